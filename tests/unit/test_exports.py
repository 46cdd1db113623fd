# SPDX-License-Identifier: Apache-2.0
"""The public names."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pkgutil

import pytest

import agentsandbox

PUBLIC = [
    "Attempt",
    "BatchFailed",
    "BlockingLease",
    "BlockingPool",
    "Change",
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "CommandFailed",
    "CommandTimeout",
    "ConfigurationError",
    "Counts",
    "Diff",
    "Episode",
    "EpisodeRecord",
    "Event",
    "EventSink",
    "EvidenceMissing",
    "ExecResult",
    "Failure",
    "FailureKind",
    "Graded",
    "GroupSummary",
    "HedgePolicy",
    "InfrastructureError",
    "InvalidTask",
    "Journal",
    "Lease",
    "ResetPolicy",
    "ResetReport",
    "RolloutResult",
    "SandboxClient",
    "SandboxError",
    "SandboxLost",
    "SandboxPool",
    "Status",
    "StragglerPolicy",
    "TTFCSample",
    "TTFCSummary",
    "UsageError",
    "__version__",
    "gather_rollouts",
    "grade_tests",
    "require_failing",
    "require_passed",
]
OPTIONAL = {"inspect_ai", "kubernetes_asyncio", "typer", "rich", "pytest"}


def test_the_public_names_are_these() -> None:
    """Adding or removing a public name is a decision, and this list is where it is made."""
    assert agentsandbox.__all__ == PUBLIC
    assert dir(agentsandbox) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there(name: str) -> None:
    """Every name can be had, is documented if it is a class or a function, and stays the same object."""
    value = getattr(agentsandbox, name)

    assert value is getattr(agentsandbox, name)
    assert value.__doc__ or not (inspect.isclass(value) or inspect.isfunction(value))


def test_the_version_is_that_of_the_distribution() -> None:
    """There is one source of truth."""
    assert agentsandbox.__version__ == importlib.metadata.version("agentsandbox")


def test_what_is_not_there_is_an_attribute_error() -> None:
    """A wrong name is said to be wrong."""
    with pytest.raises(AttributeError, match="'agentsandbox' has no attribute 'SandBoxPool'"):
        agentsandbox.SandBoxPool  # noqa: B018


def modules() -> list[str]:
    """Name every module of the package that runs on the driver."""
    found = pkgutil.walk_packages(agentsandbox.__path__, "agentsandbox.", onerror=lambda name: None)
    return [info.name for info in found if ".protocol.runner" not in info.name and not info.name.endswith("__main__")]


@pytest.mark.parametrize("name", modules())
def test_every_module_keeps_its_promise(name: str) -> None:
    """Every module can be imported and has every name in its ``__all__``."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        cause = error if error.name is not None else error.__cause__
        missing = getattr(cause, "name", None) or ""
        if missing.partition(".")[0] in OPTIONAL:
            pytest.skip(f"{missing} is not installed")
        raise

    assert [entry for entry in getattr(module, "__all__", ()) if not hasattr(module, entry)] == []
