# SPDX-License-Identifier: Apache-2.0
"""What a reset policy takes."""

from __future__ import annotations

import pytest

from agentsandbox.errors import ConfigurationError
from agentsandbox.models.reset import ResetPolicy


def test_paths_are_kept_in_order() -> None:
    """Several absolute paths are a scope."""
    assert ResetPolicy(scope=["/opt/env", "/srv/data"]).scope == ("/opt/env", "/srv/data")


@pytest.mark.parametrize("path", ["opt/env", "", "/a\0b", 7], ids=repr)
def test_a_path_that_is_not_absolute_is_refused(path: object) -> None:
    """The error names it, also behind a good one."""
    with pytest.raises(ConfigurationError, match="absolute paths"):
        ResetPolicy(scope=["/opt/env", path])  # type: ignore[list-item]
