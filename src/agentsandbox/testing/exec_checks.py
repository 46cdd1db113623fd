# SPDX-License-Identifier: Apache-2.0
"""The rules about commands that end by themselves: results, streams, input, environment."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

import anyio

from agentsandbox.errors import (
    CommandFailed,
    CommandNotExecutable,
    CommandNotFound,
    ConfigurationError,
    OutputLimitExceeded,
    UserNotFound,
    WorkingDirectoryNotFound,
)
from agentsandbox.testing.subject import HANG_GUARD, Need, NotApplicable, Source, need, raises, sh

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MIB = 1024 * 1024


async def check_exit_codes_and_streams(source: Source, image: str) -> None:
    """A command that ends gives its exit code, with standard output and standard error apart and byte-exact."""
    async with await source.acquire(image) as lease:
        result = await sh(lease, "printf 'out\\n'; printf 'err' >&2; exit 70")
        assert (result.exit_code, result.stdout, result.stderr) == (70, b"out\n", b"err")
        assert not result.ok
        assert (result.sizes.stdout, result.sizes.stderr, result.truncated) == (4, 3, False)

        result = await lease.exec(["true"])
        assert (result.exit_code, result.stdout, result.stderr) == (0, b"", b"")
        assert result.ok


async def check_signals_are_128_plus_n(source: Source, image: str) -> None:
    """A command that signal n ends has the exit code 128 + n, and is never taken for a timeout."""
    async with await source.acquire(image) as lease:
        for name, number in [("TERM", 15), ("KILL", 9), ("INT", 2), ("SEGV", 11)]:
            assert (await sh(lease, f"kill -{name} $$", timeout=30)).exit_code == 128 + number, name


async def check_string_is_a_script_and_list_is_argv(source: Source, image: str) -> None:
    """A string is run by a POSIX shell; a list reaches the program word for word, uninterpreted."""
    async with await source.acquire(image) as lease:
        words = ["$HOME", "`id`", "two words", "", "*", "'\"\\", "line\nbreak", "é✨", "-n"]
        assert (await lease.exec(["printf", "%s|", *words])).stdout == "".join(f"{w}|" for w in words).encode()

        need(lease, Need.SHELL)
        assert (await lease.exec("x=3; echo $((x + 4)) | cat")).stdout == b"7\n"


async def check_result_says_what_it_cost(source: Source, image: str) -> None:
    """A result carries wall time, processor time and peak memory of the command, as far as the level can know them."""
    async with await source.acquire(image) as lease:
        result = await sh(lease, "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done")

        assert result.ok
        assert result.wall_seconds > 0
        need(lease, Need.PROCESSOR_TIME)
        assert result.cpu_seconds is not None
        assert 0 < result.cpu_seconds
        need(lease, Need.PEAK_MEMORY)
        assert result.peak_memory_bytes is not None
        assert result.peak_memory_bytes > 64 * 1024


async def check_check_true_raises_on_failure(source: Source, image: str) -> None:
    """``check=True`` turns an exit code other than 0 into :exc:`CommandFailed` that carries the result."""
    async with await source.acquire(image) as lease:
        with raises(CommandFailed, match="exit code 3: broken") as caught:
            await sh(lease, "echo partial; echo broken >&2; exit 3", check=True)

        assert (caught.value.result.exit_code, caught.value.result.stdout) == (3, b"partial\n")


async def check_start_errors_are_typed(source: Source, image: str) -> None:
    """What cannot be started raises a start error that names it; nothing ran, and the sandbox is still good."""
    async with await source.acquire(image) as lease:
        with raises(CommandNotFound, match="no-such-program-4711"):
            await lease.exec(["no-such-program-4711", "x"])
        with raises(CommandNotFound, match="/nowhere/prog"):
            await lease.exec(["/nowhere/prog"])
        with raises(CommandNotExecutable, match="/etc/passwd"):
            await lease.exec(["/etc/passwd"])
        assert (await lease.exec(["echo", "good"])).stdout == b"good\n"

        need(lease, Need.SHELL)
        with raises(WorkingDirectoryNotFound, match="/no/such/dir"):
            await lease.exec("touch ran", cwd="/no/such/dir")
        with raises(UserNotFound, match="no-such-user-4711"):
            await lease.exec("touch ran", user="no-such-user-4711")

        assert (await lease.exec("test ! -e ran && echo good")).stdout == b"good\n"


async def check_nonsense_is_refused_before_it_runs(source: Source, image: str) -> None:
    """A command that cannot work (empty, NUL inside, timeout 0) is a configuration error and costs nothing."""
    async with await source.acquire(image) as lease:
        with raises(ConfigurationError, match="empty"):
            await lease.exec([])
        with raises(ConfigurationError, match="NUL"):
            await lease.exec(["echo", "a\0b"])
        with raises(ConfigurationError, match="timeout"):
            await lease.exec("true", timeout=0)

        assert (await lease.exec(["true"])).ok


async def check_p16_there_is_no_terminal(source: Source, image: str) -> None:
    """No terminal is between the command and its bytes: no CRLF, no colours, standard error stays apart."""
    async with await source.acquire(image) as lease:
        result = await sh(lease, r"printf 'a\n'; printf 'e\n' >&2; test -t 1 && echo tty; test -t 0 && echo tty; true")

        assert (result.stdout, result.stderr) == (b"a\n", b"e\n")


async def check_p21_no_state_leaks_between_commands(source: Source, image: str) -> None:
    """Each command is its own process: ``exit``, ``set -e``, ``exec``, ``cd`` and ``export`` end with it."""
    async with await source.acquire(image) as lease:
        home = (await sh(lease, "pwd")).stdout
        result = await sh(lease, "echo before; exit 3")
        assert (result.exit_code, result.stdout) == (3, b"before\n")
        assert (await sh(lease, "set -e; false")).exit_code == 1
        assert (await sh(lease, "exec true")).exit_code == 0
        assert (await sh(lease, "cd /tmp; export A=1")).exit_code == 0
        assert (await sh(lease, 'echo "$A$PWD"')).stdout == home


async def check_p22_stdin_is_empty_or_delivered(source: Source, image: str) -> None:
    """Without ``stdin=`` the input is empty and at its end; what is given arrives, also when it is empty."""
    async with await source.acquire(image) as lease:
        result = await sh(lease, "cat; echo rc=$?; read x; echo r=$?", timeout=30)
        assert result.stdout == b"rc=0\nr=1\n"
        assert (await sh(lease, "wc -c", stdin=b"abc")).text.strip() == "3"
        assert (await lease.exec(["cat"], stdin=b"")).stdout == b""
        every_byte = bytes(range(256)) * 3
        assert (await lease.exec(["cat"], stdin=every_byte)).stdout == every_byte


async def check_large_stdin_arrives_whole(source: Source, image: str) -> None:
    """50 MiB of standard input arrive whole, whether given as bytes or as an asynchronous iterable."""
    block = os.urandom(MIB)
    want = hashlib.sha256(block * 50).hexdigest()

    async def blocks() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield block

    async with await source.acquire(image) as lease:
        assert (await lease.exec(["sha256sum"], stdin=block * 50)).text.split()[0] == want
        assert (await lease.exec(["sha256sum"], stdin=blocks())).text.split()[0] == want


async def check_unread_stdin_does_not_hang(source: Source, image: str) -> None:
    """A command may end, or close its input, without reading what it was given."""
    async with await source.acquire(image) as lease:
        with anyio.fail_after(HANG_GUARD):
            assert (await lease.exec(["head", "-c", "1"], stdin=b"x" * (8 * MIB))).stdout == b"x"
            assert (await lease.exec(["true"], stdin=b"x" * (8 * MIB))).exit_code == 0
            assert (await sh(lease, "exec <&-; echo closed", stdin=b"x" * (8 * MIB))).stdout == b"closed\n"


async def check_large_arguments_and_scripts(source: Source, image: str) -> None:
    """Arguments and scripts of 1 MiB work."""
    async with await source.acquire(image) as lease:
        need(lease, Need.LONG_ARGUMENTS)
        chunk = "x" * (64 * 1024)
        assert (await lease.exec(["printf", "%s", *([chunk] * 16)])).stdout == (chunk * 16).encode()

        script = "n=0\n" + "n=$((n+1)) # " + "p" * 1010 + "\n"
        script += ("n=$((n+1)) # " + "p" * 1010 + "\n") * 1023
        assert len(script) > MIB
        assert (await lease.exec(script + "echo $n\nexit 5")).stdout == b"1024\n"
        assert (await lease.exec(script + "exit 5")).exit_code == 5
        assert (await lease.exec(script + "cat", stdin=b"still mine")).stdout == b"still mine"


async def check_environment(source: Source, image: str) -> None:
    """``env=`` arrives byte for byte, for this command only; PATH and HOME are set; the driver's variables are not."""
    value = 'x\ny "q" $(id) é✨'
    os.environ["AGENTSANDBOX_CONFORMANCE_SECRET"] = "s1"  # noqa: S105
    try:
        async with await source.acquire(image) as lease:
            text = (await lease.exec(["env"])).text
            assert "s1" not in text.split("\n")
            assert "AGENTSANDBOX_CONFORMANCE_SECRET" not in text
            assert (await sh(lease, 'test -n "$PATH" && test -d "$HOME" && test -w "$HOME"')).ok

            need(lease, Need.SHELL)
            result = await lease.exec(["sh", "-c", r'printf "%s\n" "$A"'], env={"A": value})
            assert result.stdout == value.encode() + b"\n"
            assert (await lease.exec('printf "[%s]" "$A"')).stdout == b"[]"
    finally:
        del os.environ["AGENTSANDBOX_CONFORMANCE_SECRET"]


async def check_working_directory(source: Source, image: str) -> None:
    """Without ``cwd=`` a command starts in the sandbox's directory, where it may write; a relative one is below it."""
    async with await source.acquire(image) as lease:
        base = (await sh(lease, "pwd")).text.strip()
        assert base.startswith("/")
        await sh(lease, "mkdir -p sub/deep && echo here > sub/deep/f", check=True)
        assert (await lease.exec(["cat", "sub/deep/f"])).stdout == b"here\n"

        need(lease, Need.SHELL)
        assert (await lease.exec(["cat", "f"], cwd="sub/deep")).stdout == b"here\n"
        assert (await lease.exec("pwd", cwd="sub")).text.strip() == f"{base.rstrip('/')}/sub"
        assert (await lease.exec("pwd", cwd="/usr")).text.strip() == "/usr"


async def check_user(source: Source, image: str) -> None:
    """``user=`` takes a name or an id, and HOME follows it."""
    async with await source.acquire(image) as lease:
        if not lease.capabilities.users:
            raise NotApplicable("commands run as one user only")
        assert (await lease.exec("id -u", user="root")).stdout == b"0\n"
        assert (await lease.exec("id -u", user=0)).stdout == b"0\n"
        entry = (await lease.exec("grep ^daemon: /etc/passwd", check=True)).text.strip().split(":")
        uid, home = entry[2], entry[5]
        assert (await lease.exec('echo "$(id -u) $HOME"', user="daemon")).text.split() == [uid, home]
        assert (await lease.exec("id -u", user=int(uid))).text.strip() == uid


async def check_merge_keeps_order(source: Source, image: str) -> None:
    """``merge=True`` puts standard error into standard output, in the order of writing."""
    async with await source.acquire(image) as lease:
        need(lease, Need.SHELL)
        script = "for i in 1 2 3 4 5; do echo o$i; echo e$i >&2; done"
        result = await lease.exec(script, merge=True)

        assert result.stdout == b"".join(b"o%d\ne%d\n" % (i, i) for i in range(1, 6))
        assert (result.stderr, result.sizes.stderr) == (b"", 0)


async def check_output_is_streamed(source: Source, image: str) -> None:
    """``on_output`` gets output while the command runs, stream by stream; the result has it all the same."""
    seen: list[tuple[str, bytes]] = []
    first = anyio.Event()

    async def on_output(stream: str, data: bytes) -> None:
        seen.append((stream, data))
        first.set()

    async def answer() -> AsyncIterator[bytes]:
        await first.wait()
        yield b"go\n"

    async with await source.acquire(image) as lease:
        with anyio.fail_after(HANG_GUARD):
            script = "echo first; read x; echo got $x; echo e >&2"
            result = await sh(lease, script, stdin=answer(), on_output=on_output)

        assert (result.stdout, result.stderr) == (b"first\ngot go\n", b"e\n")
        assert b"".join(data for stream, data in seen if stream == "stdout") == b"first\ngot go\n"
        assert b"".join(data for stream, data in seen if stream == "stderr") == b"e\n"


async def check_undecodable_output_stays_bytes(source: Source, image: str) -> None:
    """Bytes are the truth: what is not UTF-8 arrives as it is, and text replaces it; split characters are whole."""
    async with await source.acquire(image) as lease:
        result = await sh(lease, r"printf '\303\050\377\000\n'; printf '\342'; sleep 0.05; printf '\234\250'")

        assert result.stdout == b"\xc3\x28\xff\x00\n\xe2\x9c\xa8"
        assert result.text == "\ufffd(\ufffd\x00\n✨"


async def check_p24_output_is_capped(source: Source, image: str) -> None:
    """Output over the cap keeps head and tail, counts every byte, says so, and does not fill the driver's memory."""
    async with await source.acquire(image) as lease:
        await sh(lease, "yes | head -c 4194304", output_limit=MIB)
        before = _resident()
        result = await sh(lease, "yes | head -c 52428800", output_limit=MIB)
        grown = _resident() - before

        assert (result.exit_code, result.truncated, result.sizes.stdout) == (0, True, 52_428_800)
        assert 0 < len(result.stdout) <= MIB
        assert grown < 16 * MIB

        result = await sh(lease, "seq 1 200000; seq 1 5 >&2", output_limit=4096)
        whole = b"".join(b"%d\n" % i for i in range(1, 200_001))
        assert result.sizes.stdout == len(whole)
        assert len(result.stdout) <= 4096
        assert result.stdout.startswith(whole[:1000])
        assert result.stdout.endswith(whole[-1000:])
        assert result.stderr == b"1\n2\n3\n4\n5\n"


async def check_require_complete(source: Source, image: str) -> None:
    """``require_complete=True`` raises instead of cutting; output of exactly the limit is complete."""
    async with await source.acquire(image) as lease:
        result = await sh(lease, "yes | head -c 1048576", output_limit=MIB, require_complete=True)
        assert (result.truncated, len(result.stdout)) == (False, MIB)

        with raises(OutputLimitExceeded, match="1048576") as caught:
            await sh(lease, "yes | head -c 52428800", output_limit=MIB, require_complete=True)
        assert caught.value.limit == MIB
        assert (await lease.exec(["true"])).ok


async def check_programs_start_clean(source: Source, image: str) -> None:
    """A command has default signal dispositions, umask 022 and no descriptors but 0, 1 and 2."""
    async with await source.acquire(image) as lease:
        assert (await sh(lease, "yes | head -n 1")).stderr == b""
        assert (await sh(lease, "umask")).text.strip() in {"0022", "022"}
        numbers = {int(n) for n in (await lease.exec(["ls", "/proc/self/fd"])).text.split()}
        assert numbers <= {0, 1, 2, 3}  # 3 is the directory that ls reads


async def check_commands_run_side_by_side(source: Source, image: str) -> None:
    """Commands of one sandbox run at the same time, and neither their output nor their order mixes."""
    results: dict[int, bytes] = {}

    async with await source.acquire(image) as lease:

        async def one(number: int) -> None:
            script = f"i=0; while [ $i -lt 300 ]; do echo {number}-$i; i=$((i+1)); done"
            results[number] = (await sh(lease, script)).stdout

        with anyio.fail_after(HANG_GUARD):
            async with anyio.create_task_group() as group:
                group.start_soon(lambda: sh(lease, "yes | head -c 20000000", output_limit=1024))
                for number in range(8):
                    group.start_soon(one, number)

    assert results == {n: "".join(f"{n}-{i}\n" for i in range(300)).encode() for n in range(8)}


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
