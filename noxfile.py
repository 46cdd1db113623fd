# SPDX-License-Identifier: Apache-2.0
"""Everything that is checked about this project, one session a concern; ``nox -l`` lists them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["lint", "typecheck", "tests", "docs"]

PYPROJECT = nox.project.load_toml("pyproject.toml")
CURRENT = f"{sys.version_info.major}.{sys.version_info.minor}"
SUPPORTED = nox.project.python_versions(PYPROJECT)

TOTAL_COVERAGE = 92
"""Percent of lines and branches, over everything that can be measured from the tests' own process."""

LEVELS_COVERAGE = 92
"""The same, of the lower exec levels."""

COMPLETE = [
    "_kinds.py",
    "errors.py",
    "models/*",
    "protocol/connection.py",
    "protocol/frames.py",
    "warmpool/book.py",
    "warmpool/breaker.py",
    "warmpool/census.py",
    "warmpool/decisions.py",
    "warmpool/lease.py",
    "warmpool/matching.py",
    "warmpool/outlook.py",
    "warmpool/ratelimit.py",
    "warmpool/replenisher.py",
    "warmpool/statistics.py",
    "warmpool/stragglers.py",
    "warmpool/turns.py",
]
"""Modules without I/O, which have no excuse: every line and every branch."""

OVER_DOUBLES = [
    "contract/test_conformance_agent_sandbox.py",
    "contract/test_conformance_cluster.py",
    "contract/test_residues_cluster_all.py",
]
"""The backend contract at each exec level, and every residue, over the API server double."""

OVER_SHELLS = "unit/session/levels"
"""The lower exec levels over plain shells."""

OF_LEVELS = ["--omit=*/protocol/runner/*", "--include=*/agentsandbox/session/levels/*"]
"""What those tests are the only ones to measure."""

ORDINARY_USER = 65534
"""``nobody``: an id that exists everywhere and owns nothing."""

AS_ORDINARY_USER = ["setpriv", f"--reuid={ORDINARY_USER}", f"--regid={ORDINARY_USER}", "--clear-groups", "env"]
"""``env`` matters: setpriv itself still finds programs with root's eyes."""


def groups(*names: str) -> list[str]:
    """Read the requirements of dependency groups."""
    return nox.project.dependency_groups(PYPROJECT, *names)


def install_package(session: nox.Session, *requirements: str, extras: str = "cli") -> None:
    """Install the package as users get it, as a wheel: one given by ``--installpkg FILE``, or one built now."""
    package = Path()
    if "--installpkg" in session.posargs:
        at = session.posargs.index("--installpkg")
        package = Path(session.posargs.pop(at + 1))
        session.posargs.pop(at)
    session.install(f"{package}[{extras}]", *requirements)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, layers, spelling."""
    session.install("-e", ".[cli]", *groups("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-cache")
    session.run("codespell", "src", "tests", "docs", "examples", *map(str, Path().glob("*.md")), "noxfile.py")


@nox.session
def typecheck(session: nox.Session) -> None:
    """Types of the package, strictly."""
    session.install("-e", ".[cli]", *groups("typecheck", "test"))
    session.run("mypy", "--strict", "src")
    if Path("tests/typing").is_dir():
        session.run("mypy", "--strict", "tests/typing")


def measure(session: nox.Session, *arguments: str, options: Sequence[str] = ()) -> dict[str, str]:
    """Run pytest with coverage; return the environment in which ``coverage report`` finds what was measured."""
    env = {"COVERAGE_FILE": str(Path(session.create_tmp()).resolve() / "coverage")}
    session.run("coverage", "erase", env=env)
    session.run("coverage", "run", *options, "-m", "pytest", *arguments, env=env)
    session.run("coverage", "combine", "--quiet", env=env)
    return env


def run_tests(session: nox.Session) -> None:
    """Run the suite, or a selection of it, and hold the whole suite to the coverage thresholds."""
    install_package(session, *groups("test"))
    others = ("adapters", "e2e", "examples", "runner", OVER_SHELLS, *OVER_DOUBLES)
    env = measure(session, *(session.posargs or [f"--ignore=tests/{name}" for name in others]))
    if session.posargs:
        session.log("a selection of tests says nothing about coverage: thresholds not checked")
        return
    include = ",".join(f"*/agentsandbox/{name}" for name in COMPLETE)
    session.run("coverage", "report", f"--fail-under={TOTAL_COVERAGE}", env=env)
    session.run("coverage", "report", "--fail-under=100", f"--include={include}", env=env)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the suite on the current Python with coverage; ``nox -s tests -- ARGUMENTS`` gives pytest a selection."""
    run_tests(session)


@nox.session(python=[version for version in SUPPORTED if version != CURRENT])
def tests_other(session: nox.Session) -> None:
    """Run the suite on each other supported Python that this machine has."""
    run_tests(session)


@nox.session
def runner(session: nox.Session) -> None:
    """Run the program that lives in sandboxes, over pipes, under every Python from 3.7 on that this machine has."""
    install_package(session, *groups("test"))
    session.run("pytest", "tests/runner", *session.posargs)


@nox.session
def doubles(session: nox.Session) -> None:
    """Run the backend contract at each exec level, and every residue, over the API server double."""
    install_package(session, *groups("test"))
    session.run("pytest", *(f"tests/{name}" for name in OVER_DOUBLES), *session.posargs)


@nox.session
def levels(session: nox.Session) -> None:
    """Run the lower exec levels over plain shells, with coverage; ``nox -s levels -- ARGUMENTS`` are pytest's."""
    install_package(session, *groups("test"))
    env = measure(session, f"tests/{OVER_SHELLS}", *session.posargs, options=OF_LEVELS[:1])
    if not session.posargs:
        session.run("coverage", "report", f"--fail-under={LEVELS_COVERAGE}", *OF_LEVELS, env=env)


@nox.session
def chaos(session: nox.Session) -> None:
    """Kill everything at random while 2,000 episodes run, and hold the journal to the law: minutes."""
    install_package(session, *groups("test"))
    session.run("python", "benchmarks/chaos.py", *(session.posargs or ["--episodes", "2000", "--driver-kills", "10"]))


@nox.session(name="adapters-inspect")
def adapters_inspect(session: nox.Session) -> None:
    """
    Run the checks that Inspect AI ships, over the local backend and over the API server double.

    They run as the current user and, when that is root, as an ordinary one too.
    """
    install_package(session, *groups("test"), extras="cli,inspect")
    suite = ["-m", "pytest", "tests/adapters", *session.posargs]
    session.run("python", *suite)
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return
    site_packages = session.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", silent=True)
    assert isinstance(site_packages, str)
    with tempfile.TemporaryDirectory(prefix="agentsandbox-ordinary-") as directory:
        # The checkout and the interpreter may both lie where only root can look.
        home = Path(directory)
        shutil.copytree(site_packages.strip(), home / "site-packages", symlinks=True)
        shutil.copytree("tests", home / "tests")
        shutil.copy("pyproject.toml", home)
        for path in [home, *home.rglob("*")]:
            shutil.chown(path, ORDINARY_USER, ORDINARY_USER)
        python = ordinary_interpreter()
        if python is None:
            session.warn(f"no Python {CURRENT} that an ordinary user may execute: the checks ran as root only")
            return
        session.chdir(home)
        session.run(
            *AS_ORDINARY_USER,
            *(python, *suite, "-p", "no:cacheprovider"),
            env={"HOME": directory, "PYTHONPATH": str(home / "site-packages"), "TMPDIR": directory},
            external=True,
        )


def ordinary_interpreter() -> str | None:
    """Find a Python like this one that the ordinary user may execute, and that really starts."""
    for candidate in [os.path.realpath(sys.executable), f"/usr/bin/python{CURRENT}", f"/usr/local/bin/python{CURRENT}"]:
        command = [*AS_ORDINARY_USER, candidate, "-c", ""]
        if subprocess.run(command, cwd="/", check=False, capture_output=True).returncode == 0:
            return candidate
    return None


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation without a network, every warning an error, and run its examples."""
    session.install(".[cli]", *groups("docs", "test"))
    for builder in ("html", "doctest"):
        session.run(
            *("sphinx-build", "-W", "-n", "--keep-going", "--quiet", "-T"),
            *("-b", builder, "-d", "docs/_build/doctrees", "docs", f"docs/_build/{builder}"),
        )


@nox.session
def examples(session: nox.Session) -> None:
    """Run the examples and the Python of the documentation, against their right values. One of them needs PyPI."""
    install_package(session, *groups("test"))
    session.run("pytest", "tests/examples", *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """Build wheel and source archive, and look at what a user gets."""
    session.install("build", "twine")
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", "dist")
    session.run("twine", "check", "--strict", *map(str, Path("dist").iterdir()))
    (wheel,) = Path("dist").glob("*.whl")
    session.install(f"{wheel}[cli]", *groups("test"))
    session.run("pytest", "tests/unit/test_packaging.py", "tests/unit/test_readme.py")
    session.run("python", "-X", "importtime", "-c", "import agentsandbox", silent=True)
    session.run("agentsandbox", "--help", silent=True)


@nox.session
def cluster(session: nox.Session) -> None:
    """Run what needs a real cluster; never by default."""
    if not os.environ.get("AGENTSANDBOX_E2E_CONTEXT"):
        session.skip("set AGENTSANDBOX_E2E_CONTEXT to the kube context of a cluster that may be written to")
    install_package(session, *groups("test"))
    session.run("pytest", "tests/e2e", *session.posargs)
