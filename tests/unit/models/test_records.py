# SPDX-License-Identifier: Apache-2.0
"""Sandboxes, times, resets and events as records."""

from __future__ import annotations

import ast
import importlib
import itertools
import pkgutil
from pathlib import Path
from typing import Any

import attrs
import pytest

import agentsandbox.models
from agentsandbox.errors import ConfigurationError
from agentsandbox.models.command import ProcessInfo
from agentsandbox.models.events import Event, discard
from agentsandbox.models.reset import RUNGS, ResetPolicy, ResetReport
from agentsandbox.models.sandbox import Capabilities, ExecLevel, Identity, SandboxSpec
from agentsandbox.models.timing import StartKind, Timings, TTFCSample, TTFCSummary

MODULES = [
    importlib.import_module(f"agentsandbox.models.{info.name}")
    for info in pkgutil.iter_modules(agentsandbox.models.__path__)
]
RECORDS = [
    value
    for module in MODULES
    for value in vars(module).values()
    if isinstance(value, type) and attrs.has(value) and value.__module__ == module.__name__
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_records_are_frozen_and_documented(record: type) -> None:
    """Every record is immutable, takes keywords only, and every public field has a line of its own."""
    tree = ast.parse(Path(importlib.import_module(record.__module__).__file__).read_text())
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == record.__name__).body
    documented = {
        first.target.id
        for first, second in itertools.pairwise(body)
        if isinstance(first, ast.AnnAssign) and isinstance(second, ast.Expr) and isinstance(second.value, ast.Constant)
    }
    fields = attrs.fields(record)

    assert all(field.kw_only for field in fields)
    assert {field.name for field in fields if not field.name.startswith("_")} <= documented
    assert record.__setattr__ is not object.__setattr__
    assert record.__doc__


def test_specs_tell_sandboxes_apart() -> None:
    """Equal specs are interchangeable; the environment takes part in equality and not in the hash."""
    assert SandboxSpec(image="host") == SandboxSpec(image="host", env={})
    assert SandboxSpec(image="host") != SandboxSpec(image="host", env={"A": "1"})
    assert hash(SandboxSpec(image="host")) == hash(SandboxSpec(image="host", env={"A": "1"}))


@pytest.mark.parametrize("image", ["", None, 3], ids=repr)
def test_an_image_is_a_name(image: Any) -> None:
    """Anything but a name is refused with an example."""
    with pytest.raises(ConfigurationError, match="such as 'host'"):
        SandboxSpec(image=image)


def test_identities_differ_by_restart() -> None:
    """A sandbox that was restarted is another one."""
    assert Identity(uid="a", instance="1") == Identity(uid="a", instance="1", restarts=0)
    assert Identity(uid="a", instance="1") != Identity(uid="a", instance="1", restarts=1)
    assert Identity(uid="a", instance="1") != Identity(uid="a", instance="2")


def test_capabilities_claim_nothing_by_default() -> None:
    """No isolation, users, network or cheap reset is assumed."""
    assert Capabilities() == Capabilities(
        exec_level=ExecLevel.RUNNER, isolation="none", users=False, network=False, rungs=("replace",)
    )


def test_absent_figures_are_none() -> None:
    """A summary and timings without data are absent, not zero."""
    assert (TTFCSummary().n, TTFCSummary().p99, TTFCSummary().censored) == (0, None, 0)
    assert set(attrs.astuple(Timings())) == {None}
    assert TTFCSample(seconds=1.0).start is StartKind.COLD


def test_events_are_dropped_by_default() -> None:
    """The default sink takes an event and returns nothing."""
    assert discard(Event(name="sandbox.created", at=1.0)) is None


def test_reset_policies() -> None:
    """A policy names known rungs, at least one."""
    assert ResetPolicy().rungs == RUNGS
    assert ResetPolicy(rungs=["replace"]).rungs == ("replace",)
    with pytest.raises(ConfigurationError, match="unknown reset rung 'wish'"):
        ResetPolicy(rungs=("jail", "wish"))
    with pytest.raises(ConfigurationError, match="at least one rung"):
        ResetPolicy(rungs=())


def test_reset_reports() -> None:
    """A report says what was found."""
    report = ResetReport(rung="files", seconds=0.5, killed=(ProcessInfo(pid=3, command="sleep 9"),), verified=True)

    assert (report.changed, report.killed[0].pid, report.reason) == ((), 3, "")
