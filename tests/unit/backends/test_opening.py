# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
import types

import pytest

from agentsandbox.backends import opening
from agentsandbox.backends.opening import open_backend
from agentsandbox.errors import ConfigurationError


@pytest.fixture
def backends(monkeypatch):
    """A table of our own, so that the test does not depend on which backends there are."""
    module = types.ModuleType("agentsandbox_test_backend")

    class Good:
        def __init__(self, *, size: int = 1) -> None:
            self.size = size

    class Broken:
        def __init__(self) -> None:
            raise TypeError("a bug, not an option")

    module.Good, module.Broken = Good, Broken
    monkeypatch.setitem(sys.modules, module.__name__, module)
    table = {
        "good": f"{module.__name__}:Good",
        "broken": f"{module.__name__}:Broken",
        "absent": "agentsandbox.backends.not_written_yet:Backend",
        "nested": "agentsandbox.not_written_yet.backend:Backend",
    }
    monkeypatch.setattr(opening, "KNOWN", table)
    return table


def needs(monkeypatch, tmp_path, table, package):
    """A backend whose module imports a package that is not installed."""
    (tmp_path / "agentsandbox_needy_backend.py").write_text(f"import {package}.client\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "agentsandbox_needy_backend", raising=False)
    table["needy"] = "agentsandbox_needy_backend:Backend"


def test_a_backend_by_its_name_with_its_options(backends):
    """Options go to its constructor."""
    assert 7 == open_backend("good", size=7).size


@pytest.mark.parametrize("name", ["docker", "", None, 5, ["good"]], ids=repr)
def test_an_unknown_name_lists_the_known_ones(backends, name):
    """Whatever it is that was given."""
    with pytest.raises(ConfigurationError, match=r"^unknown backend .*; there are good, broken, absent, nested$"):
        open_backend(name)


@pytest.mark.parametrize("name", ["absent", "nested"])
def test_a_backend_that_is_not_there_yet_says_so(backends, name):
    """It is known by name, and this version does not have it."""
    message = f"^backend '{name}' is not part of this version of agentsandbox; use 'local'$"
    with pytest.raises(ConfigurationError, match=message):
        open_backend(name)


@pytest.mark.parametrize(
    ("package", "fix"),
    [
        ("kubernetes_asyncio", "pip install kubernetes-asyncio"),
        ("some_other_package", "install the package that has 'some_other_package'"),
    ],
)
def test_a_missing_package_is_named_with_its_fix(backends, monkeypatch, tmp_path, package, fix):
    """What to install, and for which backend."""
    needs(monkeypatch, tmp_path, backends, package)
    with pytest.raises(ConfigurationError, match=rf"^backend 'needy' needs '{package}', which is not installed: {fix}"):
        open_backend("needy")


def test_an_unknown_option_is_refused_with_the_known_ones(backends):
    """A typing mistake does not pass silently."""
    with pytest.raises(ConfigurationError, match=r"unexpected keyword argument 'sise'; its options are size$"):
        open_backend("good", sise=7)
    with pytest.raises(ConfigurationError, match=r"its options are none$"):
        open_backend("broken", size=7)


def test_a_type_error_inside_a_backend_is_not_hidden(backends):
    """Only the call is checked; what a constructor raises comes through."""
    with pytest.raises(TypeError, match=r"^a bug, not an option$"):
        open_backend("broken")


def test_the_backends_of_the_design_are_known():
    """By these names users choose them."""
    assert ["local", "kubernetes", "agent-sandbox", "simulated"] == list(opening.KNOWN)
