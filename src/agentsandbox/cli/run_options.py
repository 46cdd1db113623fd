# SPDX-License-Identifier: Apache-2.0
"""What a user asks of ``run``."""

from __future__ import annotations

from pathlib import Path

import attrs

from agentsandbox.cli.cluster_options import CLUSTERS, DEFAULT_IMAGE, ClusterOptions

__all__ = ["RunOptions"]


@attrs.frozen(kw_only=True)
class RunOptions:
    """What the user asked for."""

    output: Path
    count: int | None = None
    parallelism: int | None = None
    backend: str = "local"
    image: str | None = None
    tasks: Path | None = None
    rollout: str | None = None
    cluster: ClusterOptions = attrs.Factory(ClusterOptions)
    resume: bool = False

    @property
    def default_image(self) -> str:
        """The image of episodes that name none."""
        return self.image or (DEFAULT_IMAGE if self.backend in CLUSTERS else "host")
