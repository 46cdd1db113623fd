# SPDX-License-Identifier: Apache-2.0
"""What the documentation lists is what the code does."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import attrs
import pytest
import typer
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

import agentsandbox
from agentsandbox import errors, pytest_plugin
from agentsandbox.backends.kubernetes.jailing import JailOptions
from agentsandbox.backends.local import LocalBackend
from agentsandbox.cli.app import app
from agentsandbox.cli.stages import STAGES
from agentsandbox.errors import FailureKind
from agentsandbox.metrics.idle import Cause
from agentsandbox.metrics.prometheus import PrometheusSink
from agentsandbox.metrics.resets import ResetTally
from agentsandbox.models.episode import RolloutResult, Status
from agentsandbox.models.timing import Timings
from agentsandbox.report import results

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "agentsandbox"
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md") if "_build" not in path.parts)
TOLD = re.compile(r"[a-z]+\.[a-z_]+")
TELLERS = {"Event", "emit", "_emit", "_tell"}
FIELDS = {"name", "at", "sandbox", "episode", "attempt"}
"""What every event has beside its data."""


def _page(name):
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def _tables(page, *heads):
    """Return the rows of all tables of a page that have these columns first, each as its cells."""
    found, inside = [], False
    for line in page.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] if line.startswith("|") else []
        if not cells:
            inside = False
        elif inside:
            found.append(cells)
        elif tuple(cells[: len(heads)]) == heads:
            inside = True
    return [cells for cells in found if not set("".join(cells)) <= {"-"}]


def _words(cell):
    """Return what is marked as code in a cell, without what is in parentheses."""
    return set(re.findall(r"`([^`]+)`", re.sub(r"\([^()]*\)", "", cell)))


class _Told(ast.NodeVisitor):
    """Find the events that a module tells, and the keys of their data."""

    def __init__(self, tree):
        self.events = {}
        self.functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        self.within = []
        self.visit(tree)

    def visit_FunctionDef(self, node):
        self.within.append(node)
        self.generic_visit(node)
        self.within.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - the name is ast's

    def visit_Call(self, node):
        self.generic_visit(node)
        told = {keyword.arg: keyword.value for keyword in node.keywords}
        teller = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
        name = told["name"] if teller == "Event" and "name" in told else next(iter(node.args), None)
        if teller not in TELLERS or not isinstance(name, ast.Constant) or not TOLD.fullmatch(str(name.value)):
            return
        keys = self.events.setdefault(name.value, set())
        for part in [*node.args[1:], told.pop("data", None)]:
            keys |= self.keys(part)
        for keyword in node.keywords:
            keys |= {keyword.arg} - FIELDS - {"data"} if keyword.arg else self.keys(keyword.value) - FIELDS

    def keys(self, node):
        """Return the keys of a dictionary as far as the module's text says them."""
        match node:
            case ast.Dict():
                named = {key.value for key in node.keys if isinstance(key, ast.Constant)}
                return named.union(*(self.keys(v) for k, v in zip(node.keys, node.values, strict=True) if k is None))
            case ast.IfExp():
                return self.keys(node.body) | self.keys(node.orelse)
            case ast.Name() if self.within:
                return self.assigned(node.id)
            case ast.Call(func=ast.Name(id=name)):
                returned = [f for f in self.functions if f.name == name]
                found = [n.value for f in returned for n in ast.walk(f) if isinstance(n, ast.Return)]
                return set().union(*map(self.keys, found))
        return set()

    def assigned(self, name):
        """Return the keys that a local variable is given."""
        found = set()
        for node in ast.walk(self.within[-1]):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets if isinstance(node, ast.Assign | ast.AnnAssign) else []:
                match target:
                    case ast.Name(id=known) if known == name:
                        found |= self.keys(node.value)
                    case ast.Subscript(value=ast.Name(id=known), slice=ast.Constant(value=key)) if known == name:
                        found.add(key)
        return found


def test_every_event_is_documented():
    """The page on events has each event that is told anywhere, each with the keys of its data, and no other."""
    told = {}
    for path in SOURCE.rglob("*.py"):
        if path.parent.name not in ("runner", "cluster"):
            for name, keys in _Told(ast.parse(path.read_text(encoding="utf-8"))).events.items():
                told.setdefault(name, set()).update(keys)
    rows = _tables(_page("reference/events"), "event", "when", "`data`")
    documented = {name.strip("`"): _words(data) for name, _, data in rows}

    assert documented == told
    assert told["command.ended"] >= {"command", "exit_code", "error", "sizes"}
    assert told["episode.ended"] == {"status", "reward", "kind", "reason"}


def test_every_row_of_a_journal_is_documented():
    """The page on the journal says of each kind of row what it is written before."""
    files = (SOURCE / "rollouts" / "journal").glob("*.py")
    rows = re.compile(r"(?:Row\(name=|_(?:row|append)\(\s*)\"([a-z]+\.[a-z]+)\"")
    written = {name for path in files for name in rows.findall(path.read_text(encoding="utf-8"))}
    documented = set().union(
        *(_words(row[0]) for row in _tables(_page("topics/journal"), "event", "is written before"))
    )

    assert documented == written


@pytest.mark.parametrize("kind", FailureKind, ids=str)
def test_every_failure_kind_is_explained(kind):
    """The page on failures says of each kind whose doing it is and whether it is tried again."""
    rows = _tables(_page("topics/failures"), "what happened", "kind", "blame", "again?")

    assert kind in set().union(*(_words(row[1]) for row in rows))


def _errors():
    found = [getattr(errors, name) for name in errors.__all__]
    return [made for made in found if isinstance(made, type) and issubclass(made, errors.SandboxError)]


def test_every_blame_is_the_one_that_is_given():
    """The blame of each kind in the table of the page on failures is that of an error of this kind."""
    rows = _tables(_page("topics/failures"), "what happened", "kind", "blame", "again?")
    documented = {kind: row[2].replace(" ", "_") for row in rows for kind in _words(row[1])}
    given = {}
    for error in _errors():
        given.setdefault(error.kind.value, set()).add(error.blame.value)

    assert {kind: blame for kind, blame in documented.items() if blame not in given.get(kind, {blame})} == {}
    assert set(documented) - set(given) == {"rollout_raised", "cancelled", "interrupted"}


@pytest.mark.parametrize("status", Status, ids=str)
def test_every_status_is_explained(status):
    """The page on failures has one row for each status that an episode can end with."""
    assert f"| `{status}` |" in _page("topics/failures")


def test_every_layer_is_described():
    """The page on architecture describes each top-level module and package."""
    layers = {
        path.stem for path in SOURCE.iterdir() if not path.name.startswith(("_", ".")) and path.suffix != ".typed"
    }
    described = set(re.findall(r"\*\*(\w+)\*\*", _page("topics/architecture")))

    assert layers - described == set()


def test_layers_are_those_that_are_enforced():
    """The layers of the page on architecture are those of the contract that the linter checks."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    shown = re.search(r"```\n(pytest_plugin.*?)```", _page("topics/architecture"), re.DOTALL)[1]

    assert [layer.strip() for layer in shown.split("→")] == contracts[0]["layers"]


def test_every_path_of_the_architecture_exists():
    """What the page on architecture names by its path is a module or a package."""
    named = re.findall(r"`([a-z_]+/[a-z_/]+)`", _page("topics/architecture"))

    assert [word for word in named if not any((SOURCE / f"{word}{end}").exists() for end in ("", ".py"))] == []
    assert "protocol/runner" in named


def test_every_error_is_in_the_tree():
    """The tree of errors in the reference has every error, below the one that it is derived from."""
    tree, above = {}, []
    for drawn, name in re.findall(r"^    ([│├└─ ]*)(\w+)", errors.__doc__, re.MULTILINE):
        depth = (len(drawn) + 1) // 4
        above[depth:] = [name]
        tree[name] = above[depth - 1] if depth else "Exception"

    assert tree == {error.__name__: error.__mro__[1].__name__ for error in _errors()}


def test_results_are_defined():
    """The page on metrics defines every key of ``results.json``, and none that is not there."""
    rows = _tables(_page("topics/metrics").split("## `results.json` of")[0], "key", "definition")
    documented = [word.replace("…", "*") for row in rows for word in re.findall(r"`([^`]+)`", row[0])]
    made = results(
        RolloutResult(records=()), parallelism=1, backend="local", image="host", run_id="0", resets=ResetTally()
    )
    on_cluster = {"context", "namespace", "runtime_class"}
    spread = {"*_p95_*", "*_max_*"}

    assert set(documented) - on_cluster - spread == {
        key for key in made if not re.fullmatch(r"sandbox_to_ready_(p95|max)_seconds", key)
    }


def test_timings_are_defined():
    """The page on metrics defines every timing of an attempt."""
    rows = _tables(_page("topics/metrics"), "field", "from", "to")

    assert [row[0].strip("`") for row in rows] == [field.name for field in attrs.fields(Timings)]


def test_prometheus_metrics_are_defined():
    """The page on metrics has every metric with its labels; a star says that it can have the image as well."""
    registry = CollectorRegistry()
    PrometheusSink("b", registry=registry, images=True)
    rows = _tables(_page("topics/metrics"), "metric, after `agentsandbox_`", "labels")
    documented = {
        next(iter(_words(row[0]))): {"backend"} | _words(row[1]) | ({"image"} if row[0].endswith("*") else set())
        for row in rows
    }
    made = {
        family._name.removeprefix("agentsandbox_") + ("_total" if family._type == "counter" else ""): set(
            family._labelnames
        )
        for family in set(registry._collector_to_names)
    }

    assert documented == made


def test_attributes_of_spans_are_listed():
    """The page on metrics has every span and every attribute that OpenTelemetry gets from here."""
    page = _page("topics/metrics").split("## OpenTelemetry")[1].split("\n## ")[0]
    (sentence,) = re.findall(r"^Attributes are (.*)$", page, re.MULTILINE)
    tree = ast.parse((SOURCE / "metrics" / "otel.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    begun = [call for call in calls if getattr(call.func, "attr", "") == "_begin"]
    set_ = [call for call in calls if getattr(call.func, "attr", "") == "set_attribute"]
    words = {keyword.arg for call in begun for keyword in call.keywords} | {"status", "reward", "kind"}
    words |= {str(call.args[0].value).rpartition(".")[2] for call in set_ if isinstance(call.args[0], ast.Constant)}

    assert {word.rpartition(".")[2] for word in _words(sentence)} == words - {"type"}
    assert {f"agentsandbox.{call.args[0].value}" for call in begun} == {
        next(iter(_words(row[0]))) for row in _tables(page, "span", "from", "to")
    }


def test_causes_of_idle_time_are_listed():
    """The page on metrics has every cause."""
    rows = _tables(_page("topics/metrics"), "cause", "what is waited for")

    assert [row[0].strip("`") for row in rows] == [cause.value for cause in Cause]


def test_parts_of_a_start_are_listed():
    """The page on metrics has each part that ``ttfc`` prints."""
    rows = _tables(_page("topics/metrics"), "part", "until")

    assert [row[0].strip("`") for row in rows] == [*STAGES.values()]


def test_limits_of_local_sandboxes_are_listed():
    """The page on isolation has each limit of the local backend with its default."""
    rows = _tables(_page("topics/local-isolation"), "option of {class}`~agentsandbox.backends.local.LocalBackend`")
    shown = {next(iter(_words(row[0]))): row[1].split(",")[0] for row in rows}
    given = inspect.signature(LocalBackend).parameters
    spelled = {1024**3: "1 GiB", None: "none"}

    assert set(shown) == {name for name in given if name.endswith("_limit")} | {"max_processes", "open_files"}
    assert shown == {name: spelled.get(given[name].default, str(given[name].default)) for name in shown}


def test_faults_of_tasks_are_listed():
    """The page on failures names the reasons that can be a task's fault."""
    (sentence,) = re.findall(r"^It can be said of (.*?);", _page("topics/failures"), re.MULTILINE)

    assert _words(sentence) == errors.TASK_FAULTS


def test_fields_of_an_inspect_configuration_are_listed():
    """The page on Inspect has each field of a configuration."""
    tree = ast.parse((SOURCE / "adapters" / "inspect_ai.py").read_text(encoding="utf-8"))
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "AgentSandboxConfig"]
    fields = [node.target.id for node in found.body if isinstance(node, ast.AnnAssign)]
    rows = _tables(_page("howto/inspect"), "field", "meaning", "default")

    assert sorted(row[0].strip("`") for row in rows) == sorted(fields)


def test_files_of_a_run_are_listed(tmp_path):
    """The tutorial has every file and directory that a run leaves."""
    output = tmp_path / "run"
    done = CliRunner().invoke(app, ["run", "--count", "1", "--output", str(output)])
    rows = _tables(_page("tutorial"), "file", "contents")
    listed = {re.sub(r"<.*>", "*", word) for row in rows for word in re.findall(r"`([^`]+)`", row[0])}

    assert done.exit_code == 0, done.output
    assert [path.name for path in output.iterdir() if not any(path.match(word) for word in listed)] == [
        "journal.db-lock"
    ]


@cache
def _source():
    return frozenset(re.findall(r"\w+", "".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))))


@pytest.mark.parametrize("page", PAGES)
def test_names_exist(page):
    """Every file of the checkout, option, and name with an underscore that a page marks as code is there."""
    text = re.sub(r"^```.*?^```", "", _page(page), flags=re.DOTALL | re.MULTILINE)
    marked = set(re.findall(r"`([^`\n]+)`", text))
    files = {word for word in marked if re.fullmatch(r"[\w/]+/\w+\.py", word)}
    named = {word for code in marked - files for word in re.findall(r"[A-Za-z]\w*_\w*", code)}
    made_up = re.compile(r"(agentsandbox_)?\w+_(total|seconds)|host_\w+|no_new_privs|\w+_p\d+_\w+|(max|p95)_")
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    known = {name for command in _all_commands() for option in command.params for name in option.opts}
    known |= {"--version", "--sandbox-backend", "--sandbox-image", "--sandbox-size", "--sandbox-scope"}
    theirs = {"--all", "--hard", "--namespace"}

    assert [word for word in files if not (ROOT / word).exists()] == []
    assert {word for word in named - _source() if not made_up.fullmatch(word)} == set()
    assert options - known - theirs == set()


def _all_commands(group=None):
    for command in (group or typer.main.get_command(app)).commands.values():
        yield from _all_commands(command) if hasattr(command, "commands") else (command,)


def test_fields_of_jails_are_listed():
    """The page on Kubernetes names each field that the option ``jail`` takes."""
    fields = {field.name for field in attrs.fields(JailOptions)}
    page = _page("howto/kubernetes").split("## Jail and slots")[1].split("\n## ")[0]

    assert fields - set(re.findall(r"`(\w+)`", page)) == {"apparmor"}
    assert '`jail={"apparmor": False}`' in page


def test_options_of_the_pytest_plugin_are_listed():
    """The page on testing has each option of the pytest plugin with its default."""
    parser = pytest.Parser(_ispytest=True)
    pytest_plugin.pytest_addoption(parser)
    options = {
        option.names()[0]: str(option.attrs()["default"])
        for group in parser._groups
        for option in group.options
        if group.name == "agentsandbox"
    }
    rows = _tables(_page("howto/testing"), "option", "meaning", "default")

    assert {re.search(r"--[\w-]+", row[0])[0]: row[2].strip("`") for row in rows} == options


def _commands():
    for page in PAGES:
        for block in re.findall(r"```console\n(.*?)^```", _page(page), re.DOTALL | re.MULTILINE):
            for line in block.splitlines():
                if (words := line.removeprefix("$ ")).startswith("agentsandbox "):
                    yield page, words
        for words in re.findall(r"`(agentsandbox [a-z][^`]*)`", _page(page)):
            yield page, words


@pytest.mark.parametrize(("page", "words"), sorted(set(_commands())))
def test_commands_can_be_given(page, words):
    """Each command of a page exists, takes the options that are given there, and lacks none that it needs."""
    command, parent = typer.main.get_command(app), None
    left = [word for word in shlex.split(words)[1:] if word not in ("…", "...")]
    whole = "```" in words or words in re.sub(r"`[^`\n]*`", "", _page(page))
    while True:
        context = command.make_context("agentsandbox", left, parent=parent, resilient_parsing=not whole)
        if not (left := [*context._protected_args, *context.args]):
            break
        assert isinstance(command, typer.core.TyperGroup), f"{left} is too much"
        command = command.commands[left[0]]
        left, parent = left[1:], context


@pytest.mark.parametrize("page", PAGES)
def test_references_lead_to_something_public(page):
    """What a page imports from this package is there."""
    for module, names in re.findall(r"^from (agentsandbox[\w.]*) import (.+)$", _page(page), re.MULTILINE):
        found = __import__(module, fromlist=["*"])
        for name in re.split(r", *", names.strip("()")):
            assert hasattr(found, name.split(" as ")[0]), f"{module} has no {name}"
    assert agentsandbox.__all__
