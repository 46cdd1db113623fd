# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .conftest import Driver

BASE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def test_streams_stay_apart_and_the_exit_code_is_the_commands(driver: Driver) -> None:
    """stdout, stderr and the exit code arrive as the command made them."""
    result = driver.run(script="echo out; echo err >&2; exit 3")

    assert (result.exit["code"], result.stdout, result.stderr) == (3, b"out\n", b"err\n")
    assert (result.exit["signal"], result.exit["limit"], result.exit["report"]) == (None, None, None)
    assert (result.exit["leftovers"], result.exit["survivors"]) == ([], [])


def test_merge_keeps_the_order(driver: Driver) -> None:
    """With merge, stderr arrives inside stdout, in the order of the writes."""
    result = driver.run(script="echo 1; echo 2 >&2; echo 3; echo 4 >&2", merge=True)

    assert (result.stdout, result.stderr) == (b"1\n2\n3\n4\n", b"")


def test_p16_there_is_no_terminal(driver: Driver) -> None:
    """Neither stream is a terminal, so nothing translates line ends."""
    result = driver.run(script="printf 'a\\n'; printf 'e\\n' >&2; test -t 0 || test -t 1 && echo tty")

    assert (result.stdout, result.stderr) == (b"a\n", b"e\n")


def test_arguments_arrive_byte_for_byte(driver: Driver) -> None:
    """Quotes, newlines, and bytes that are no UTF-8 survive in arguments."""
    words = ["", " x ", "a'b\"c", "$(id)", "l1\nl2", b"\xff\xfe".decode("utf-8", "surrogateescape"), "ü🐍"]

    result = driver.run(argv=["printf", "%s|", *words])

    assert result.stdout == b"".join(word.encode("utf-8", "surrogateescape") + b"|" for word in words)


def test_p38_the_environment_is_clean(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the base environment, the user's own variables, the command's and the marker are there."""
    monkeypatch.setenv("HF_TOKEN", "s1")
    number = driver.last + 1

    result = driver.run(argv=["env"], env={"A": 'x\ny "q" $(id)', "LANG": "C"})

    lines = result.stdout.replace(b"x\ny", b"x y").decode().splitlines()
    assert sorted(line.partition("=")[0] for line in lines) == [
        "A",
        "AGENTSANDBOX_COMMAND",
        "HOME",
        "LANG",
        "LOGNAME",
        "PATH",
        "USER",
    ]
    assert 'A=x y "q" $(id)' in lines
    assert f"AGENTSANDBOX_COMMAND={number}" in lines
    assert "LANG=C" in lines
    assert f"PATH={BASE_PATH}" in lines


def test_path_of_the_command_finds_the_program(driver: Driver) -> None:
    """A program is looked for in the PATH that the command gets, not in the runner's."""
    tool = driver.workdir / "bin" / "tool"
    tool.parent.mkdir(exist_ok=True)
    tool.write_text("#!/bin/sh\necho found\n")
    tool.chmod(0o755)

    assert driver.run(argv=["tool"], env={"PATH": f"{tool.parent}:/usr/bin:/bin"}).stdout == b"found\n"
    assert driver.run(argv=["tool"]).exit["kind"] == "not_found"


def test_cwd_is_the_workdir_or_below_it(driver: Driver) -> None:
    """The default is the workdir; a relative cwd is below it; an absolute one is itself."""
    (driver.workdir / "below").mkdir(exist_ok=True)
    workdir = str(driver.workdir).encode()

    assert driver.run(argv=["pwd"]).stdout == workdir + b"\n"
    assert driver.run(argv=["pwd"], cwd="below").stdout == workdir + b"/below\n"
    assert driver.run(argv=["pwd"], cwd="/").stdout == b"/\n"


def test_p21_nothing_leaks_from_one_command_into_the_next(driver: Driver) -> None:
    """Each command is a process of its own: cwd, variables, ``exit`` and ``set -e`` end with it."""
    workdir = str(driver.workdir).encode()

    results = [
        driver.run(script=script)
        for script in (
            "echo before; exit 3",
            "set -e; false; echo unreachable",
            "exec true",
            "cd /tmp; export A=1",
            'echo "$A$PWD"',
        )
    ]

    assert [(result.exit["code"], result.stdout) for result in results] == [
        (3, b"before\n"),
        (1, b""),
        (0, b""),
        (0, b""),
        (0, workdir + b"\n"),
    ]


def test_p22_stdin_is_empty_and_ends_unless_given(driver: Driver) -> None:
    """Without stdin, readers see the end at once; with it, they get all of it."""
    assert driver.run(script="cat; echo rc=$?; read x; echo r=$?").stdout == b"rc=0\nr=1\n"
    assert driver.run(b"abc", argv=["wc", "-c"]).stdout.split() == [b"3"]
    assert driver.run(b"", argv=["wc", "-c"]).stdout.split() == [b"0"]


def test_stdin_larger_than_its_window_arrives_whole(driver: Driver) -> None:
    """5 MiB go through a window of 1 MiB, byte for byte."""
    data = os.urandom(5 * 1024 * 1024)

    assert driver.run(data, argv=["cat"]).stdout == data


def test_p20_death_by_signal_is_128_plus_its_number(driver: Driver) -> None:
    """A command that a signal ended reports 128 + n and the signal."""
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV):
        result = driver.run(script=f"kill -{int(number)} $$")

        assert (result.exit["code"], result.exit["signal"], result.exit["limit"]) == (128 + number, number, None)
    assert driver.run(script="exit 137").exit["signal"] is None


def test_signals_have_their_defaults(driver: Driver) -> None:
    """SIGPIPE ends a writer, and nothing is ignored or blocked."""
    result = driver.run(script="(yes; echo $? >&2) | head -n 1; grep -E '^Sig(Blk|Ign)' /proc/self/status")

    lines = result.stdout.split()
    assert (lines[0], result.stderr) == (b"y", b"141\n")
    assert lines[2::2] == [b"0000000000000000", b"0000000000000000"]


@pytest.mark.parametrize("padding", [0, 100 * 1024], ids=["short", "long"])
def test_each_command_is_a_session_with_three_descriptors(driver: Driver, padding: int) -> None:
    """Own session, umask 022, and no descriptor but 0, 1 and 2, for short and for long scripts."""
    script = "read pid _ _ _ _ session _ < /proc/self/stat; echo $((pid == session)); umask\n"
    script += "i=3; while [ $i -lt 64 ]; do [ -e /proc/self/fd/$i ] && [ $i -ne 10 ] && echo fd $i; i=$((i+1)); done\n"

    result = driver.run(script=script + "#" * padding)

    assert result.stdout == b"1\n0022\n"


def test_resources_are_those_of_the_command(driver: Driver) -> None:
    """CPU time counts children that were waited for; memory is the largest process."""
    code = "import os; x = bytearray(64 << 20); n = sum(range(3000000))"

    result = driver.run(argv=["sh", "-c", '"$0" -I -S -c "$1"; exit 5', driver.python, code])

    assert result.exit["code"] == 5
    assert 64 << 20 < result.exit["memory"] < 256 << 20
    assert 0.01 < result.exit["cpu"] <= result.exit["wall"] * os.cpu_count()


@pytest.mark.parametrize("size", [95 * 1024, 200 * 1024, 2 * 1024 * 1024])
def test_p18_long_scripts_run(driver: Driver, size: int) -> None:
    """A script of any size runs like a short one: same name, same stdin and exit code."""
    script = "cat; echo $0\n" + ("#" * 79 + "\n") * (size // 80) + "echo end; exit 7"

    result = driver.run(b"in\n", script=script)

    assert (result.exit["code"], result.stdout) == (7, b"in\n/bin/sh\nend\n")


def test_arguments_go_up_to_what_the_kernel_takes(driver: Driver) -> None:
    """5 MB of arguments work; one above 128 KiB, or more than 6 MiB, is refused with both limits named."""
    result = driver.run(argv=["sh", "-c", "n=0; for w; do n=$((n + ${#w})); done; echo $n", "x", *["y" * 100_000] * 50])

    assert result.stdout == b"5000000\n"
    for argv in (["true", "x" * 131072], ["true", *["x" * 100_000] * 70]):
        failed = driver.run(argv=argv).exit
        assert (failed["kind"], failed["errno"]) == ("too_large", 7)
        assert "131071 bytes in one argument" in failed["message"]
        assert "6291456 in all" in failed["message"]


def failures(driver: Driver) -> list[tuple[dict[str, Any], str, int | None, str, str]]:
    """Return requests with what comes of them."""
    work = driver.workdir
    (work / "data").write_text("no program\n")
    (work / "script").write_text("#!/no/such/interpreter\n")
    (work / "noshebang").write_text("echo\n")
    for name in ("script", "noshebang"):
        (work / name).chmod(0o755)
    missing, file = "No such file or directory", f"{work}/data"
    return [
        ({"argv": ["no-such-program"]}, "not_found", 2, f"no-such-program: {missing}", "no-such-program"),
        ({"argv": ["/no/such"]}, "not_found", 2, f"/no/such: {missing}", "/no/such"),
        ({"argv": [f"{file}/x"]}, "not_found", 20, f"{file}/x: Not a directory", f"{file}/x"),
        ({"argv": ["./script"]}, "not_found", 2, "./script: the interpreter that it names does not exist", "./script"),
        ({"argv": [""]}, "not_found", None, "'': the name of the program is empty", "''"),
        ({"argv": [file]}, "not_executable", 13, f"{file}: Permission denied", file),
        ({"argv": ["./noshebang"]}, "not_executable", 8, "./noshebang: Exec format error", "./noshebang"),
        ({"argv": ["/"]}, "not_executable", 13, "/: Permission denied", "/"),
        ({"argv": ["true"], "cwd": "/no/such"}, "no_cwd", 2, f"/no/such: {missing}", "/no/such"),
        ({"script": "true", "cwd": "data"}, "no_cwd", 20, f"{file}: Not a directory", file),
        ({"argv": ["true"], "user": "nobody-here"}, "no_user", None, "nobody-here: no such user", "nobody-here"),
        ({"argv": ["a\0b"]}, "bad_request", None, "argv contains a NUL character", ""),
        ({"argv": []}, "bad_request", None, "argv must be a list of at least one string", ""),
        ({"argv": [1]}, "bad_request", None, "argv must be a string, not 1", ""),
        ({}, "bad_request", None, "exactly one of argv, script and builtin is needed, not none", ""),
        (
            {"argv": ["x"], "script": "x"},
            "bad_request",
            None,
            "exactly one of argv, script and builtin is needed, not argv and script",
            "",
        ),
        ({"builtin": "format", "args": {}}, "bad_request", None, "there is no builtin 'format'", ""),
        ({"builtin": "read", "args": {}}, "bad_request", None, "args.path must be a string, not None", ""),
        ({"argv": ["true"], "timeout": -1}, "bad_request", None, "timeout must be a number of seconds, not -1", ""),
        ({"argv": ["true"], "window": "x"}, "bad_request", None, "window must be a number of bytes, not 'x'", ""),
        (
            {"argv": ["true"], "env": {"A=B": "c"}},
            "bad_request",
            None,
            "env has a name that is empty or contains '='",
            "",
        ),
        ({"argv": ["true"], "user": True}, "bad_request", None, "user must be a name or an id", ""),
        ({"argv": ["\ud800"]}, "bad_request", None, "argv has a character that is no text: surrogates not allowed", ""),
    ]


def test_p03_what_cannot_start_says_so_and_the_runner_is_still_good(driver: Driver) -> None:
    """Every failed start names its kind, error number, reason and subject; nothing ran; the next command works."""
    for request, kind, number, message, subject in failures(driver):
        expected = {"kind": kind, "errno": number, "message": message, "subject": subject}

        assert driver.run(**request).exit == expected
        assert driver.run(argv=["true"]).exit["code"] == 0


def test_own_user_by_name_and_by_id(driver: Driver) -> None:
    """Whoever the runner is may be asked for by name or id, without any privilege."""
    uid = os.getuid()

    assert driver.facts["uid"] == uid
    for user in (uid, str(uid), driver.facts["user"]):
        assert driver.run(argv=["id", "-u"], user=user).stdout == b"%d\n" % uid


def test_another_user(driver: Driver) -> None:
    """As root a command becomes another user with that user's home and groups; otherwise it is refused by name."""
    script = 'id -u; id -g; id -G; echo "$USER:$HOME"; echo x > by-65534'
    result = driver.run(script=script, user=65534)

    if os.getuid() == 0:
        assert driver.facts["users"] is True
        lines = result.stdout.split()
        assert lines[:3] == [b"65534"] * 3
        name, _, home = lines[3].decode().partition(":")
        assert (name, home) in (("nobody", "/nonexistent"), ("nobody", "/"), ("nobody", "/var/empty"), ("65534", "/"))
        assert (driver.workdir / "by-65534").stat().st_uid == 65534
        assert driver.run(argv=["id", "-u"], user="12345").stdout == b"12345\n"
        assert driver.run(argv=["id", "-g"], user="12345").stdout == b"0\n"
        assert driver.run(argv=["id", "-g"], user="12345:54321").stdout == b"54321\n"
    else:
        assert driver.facts["users"] is False
        assert result.exit["kind"] == "no_user"
        assert str(os.getuid()) in result.exit["message"]


def test_facts_describe_the_place(driver: Driver) -> None:
    """The facts are those of this machine and of the runner's process."""
    facts = driver.facts

    assert facts["pid"] == driver.process.pid
    assert (facts["uid"], facts["gid"]) == (os.getuid(), os.getgid())
    assert (facts["kernel"], facts["machine"]) == (os.uname().release, os.uname().machine)
    assert facts["workdir"] == str(driver.workdir)
    assert facts["namespaces"]["pid"] == int(os.readlink("/proc/self/ns/pid")[5:-1])
