# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from importlib.util import MAGIC_NUMBER
from pathlib import Path

import pytest

import agentsandbox
from agentsandbox.protocol import bootstrap, frames

BARE = [sys.executable, "-I", "-S", "-B"]
"""An interpreter that finds nothing of ours."""

HELLO = frames.dump({"version": frames.VERSION, "nonce": "secret", "received": 0})
FIRST_WORDS = frames.encode(frames.HELLO, 0, HELLO) + HELLO


def run(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run a bare interpreter."""
    return subprocess.run([*BARE, *arguments], input=stdin, capture_output=True, timeout=20, check=False)


def test_the_modules_come_back_under_their_names() -> None:
    """Every module of the runner can be imported, from empty parents, with its source for tracebacks."""
    code = (
        "import importlib\n"
        f"for name in {bootstrap.runner_modules()!r}:\n"
        "    assert importlib.import_module(name).__loader__.get_source(name).startswith('# SPDX'), name\n"
        "import agentsandbox\n"
        "print(sorted(vars(agentsandbox).keys() - {'__builtins__'}), agentsandbox.__path__)\n"
    )

    result = run("-c", bootstrap.source().decode() + code)

    assert result.stderr == b""
    assert b"'protocol'" in result.stdout
    assert b"SandboxPool" not in result.stdout


def test_the_same_modules_give_the_same_bytes() -> None:
    """The program is deterministic, ASCII, and short enough for one argument of a command line."""
    bootstrap._source.cache_clear()
    first = bootstrap.program(config={"b": 1, "a": "ü"})
    bootstrap._source.cache_clear()

    assert bootstrap.program(config={"a": "ü", "b": 1}) == first
    assert first.isascii()
    assert b"\0" not in first
    assert len(first) < 128 * 1024
    assert bootstrap.source() == first[: len(bootstrap.source())]


def test_an_interpreter_like_ours_gets_bytecode() -> None:
    """What is made for the same bytecode need not be compiled; where it came from on our side is not told."""
    text = bootstrap.program(entry="json:dumps", bytecode=MAGIC_NUMBER.hex())
    assert text.isascii()
    for other in ("", "0d0d0d0d", "nonsense"):
        assert bootstrap.program(entry="json:dumps", bytecode=other) == bootstrap.program(entry="json:dumps")
    code = (
        "import importlib\n"
        f"for name in {bootstrap.runner_modules()!r}:\n"
        "    module = importlib.import_module(name)\n"
        "    assert module.__loader__.get_source(name) is None, name\n"
    )
    check = "from agentsandbox.protocol.runner.scan import Scanner as s\nprint(s.__init__.__code__.co_filename)\n"

    result = run("-", stdin=(text.decode().rpartition("import importlib, json")[0] + code + check).encode())

    assert (b"", b"<agentsandbox.protocol.runner.scan>\n") == (result.stderr, result.stdout)


def test_modules_of_the_drivers_machine_are_left_out_unless_named() -> None:
    """What only the local backend needs does not travel, but can be asked for."""
    assert not {f"agentsandbox.protocol.runner.{name}" for name in ("host", "jail")} & set(bootstrap.runner_modules())
    more = bootstrap.source(["agentsandbox.protocol.bootstrap"]).decode()

    assert run("-c", more + "import agentsandbox.protocol.bootstrap").returncode == 0
    assert (
        b"No module named" in run("-c", bootstrap.source().decode() + "import agentsandbox.protocol.bootstrap").stderr
    )


def test_an_entry_is_called_with_its_configuration() -> None:
    """The named function gets the configuration, whatever characters are in it."""
    config = {"text": "a'b\"c\\n\n%s {x} ü🐍\udcff", "number": 1.5, "none": None, "list": [True]}
    program = bootstrap.program(entry="json:dumps", config=config)
    printing = program.replace(b"getattr(", b"print(getattr(", 1) + b")"

    result = run("-c", printing.decode().replace("\n)", ")"))

    assert result.stderr == b""
    assert json.loads(result.stdout) == config


@pytest.mark.parametrize("entry", ["nothing", "a:b:c", "a b:c", ":x", "x:", "a:b);evil("])
def test_an_entry_that_is_none_is_refused(entry: str) -> None:
    """Only names of modules and functions go into the program."""
    with pytest.raises(ValueError, match="an entry is 'module:function'"):
        bootstrap.program(entry=entry)


def test_the_runner_serves_over_standard_input_and_output(tmp_path: Path) -> None:
    """The default entry is a runner on its standard streams; it ends with them."""
    program = bootstrap.program(config={"nonce": "secret", "workdir": str(tmp_path)})

    result = run("-c", program.decode(), stdin=FIRST_WORDS)

    kind, _, length = frames.HEADER.unpack_from(result.stdout)
    welcome = frames.load(result.stdout[frames.HEADER.size : frames.HEADER.size + length])
    assert (kind, welcome["version"], result.returncode, result.stderr) == (frames.WELCOME, 1, 0, b"")
    assert welcome["facts"]["workdir"] == str(tmp_path)


def test_the_program_can_come_through_the_stream_itself(tmp_path: Path) -> None:
    """A stub reads exactly the program from standard input; the next byte is the runner's."""
    program = bootstrap.program(config={"nonce": "secret", "workdir": str(tmp_path)})
    stub = bootstrap.stub(len(program))

    result = run("-c", stub, stdin=program + FIRST_WORDS)

    assert len(stub) < 300
    assert (result.stdout[0], result.stderr) == (frames.WELCOME, b"")
    cut = run("-c", stub, stdin=program[:-1])
    assert (cut.returncode, cut.stderr) == (1, b"the program ends early\n")


def test_it_works_from_a_zipped_package(tmp_path: Path) -> None:
    """The sources are found as well when the package itself lies in an archive."""
    root = Path(agentsandbox.__file__).parent
    wheel = tmp_path / "package.zip"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("agentsandbox/__init__.py", "")
        for path in sorted((root / "protocol").rglob("*.py")):
            archive.write(path, f"agentsandbox/{path.relative_to(root)}")
    code = (
        f"import sys; sys.path.insert(0, {str(wheel)!r}); from agentsandbox.protocol import bootstrap\n"
        "sys.stdout.buffer.write(bootstrap.source())"
    )

    result = run("-c", code)

    assert result.stderr == b""
    assert result.stdout == bootstrap.source()
