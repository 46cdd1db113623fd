# SPDX-License-Identifier: Apache-2.0
"""``agentsandbox reap``: remove by its id what a run left on a cluster, when there is no receipt of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentsandbox.backends.kubernetes.api import KubernetesApi
from agentsandbox.backends.kubernetes.options import check_run_id
from agentsandbox.backends.kubernetes.reaping import reap as reap_run

if TYPE_CHECKING:
    from agentsandbox.cli.cluster_options import ClusterOptions

__all__ = ["reap"]


async def reap(run_id: str, cluster: ClusterOptions) -> list[str]:
    """
    Remove everything of one run, and nothing of any other.

    Args:
        run_id: 12 hexadecimal digits; there is no way to say "all of them".
        cluster: Where.

    Returns:
        One line for each thing that was removed, or one that says that nothing was left.

    Raises:
        ConfigurationError: If the run id is not one; no call has been made then.
        UsageError: If something is not provably the run's; nothing has been deleted then.

    """
    check_run_id(run_id)
    api = await KubernetesApi.connect(**cluster.where(), max_connections=8)
    try:
        return [*await reap_run(api, run_id)] or [f"nothing is left of run {run_id}"]
    finally:
        await api.aclose()
