# SPDX-License-Identifier: Apache-2.0
"""Credentials are where they were given, and nowhere else, on the local backend."""

from __future__ import annotations

import contextlib
import logging
import os
from contextlib import asynccontextmanager

import pytest

from agentsandbox import (
    CommandFailed,
    ConfigurationError,
    Episode,
    Graded,
    ResetPolicy,
    SandboxClient,
    SandboxPool,
    UsageError,
)
from agentsandbox.backends.local import LocalBackend
from agentsandbox.errors import CommandNotFound

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

SECRET = "sk-s3cr3t-9f8e7d6c5b4a"

FILES = ResetPolicy(rungs=("files", "replace"))

EVERYWHERE = """
import os, sys
found = []
places = ("/workspace", "/home", "/tmp", "/var/tmp", "/dev/shm", "/run", "/etc", "/mnt", "/srv")
for top, _, names in (step for place in places for step in os.walk(place)):
    for name in names:
        if not os.path.isfile(os.path.join(top, name)):  # /dev/urandom has no end
            continue
        try:
            with open(os.path.join(top, name), "rb") as file:
                if sys.argv[1].encode()[::-1] in file.read():
                    found.append(os.path.join(top, name))
        except OSError:
            pass
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline"):
        try:
            with open("/proc/%s/%s" % (pid, name), "rb") as file:
                if sys.argv[1].encode()[::-1] in file.read():
                    found.append("/proc/%s/%s" % (pid, name))
        except OSError:
            pass
print(found)
"""
"""Looks for a credential, which it is given backwards, wherever files can be written, and in every process."""


async def everywhere(lease):
    """Where in the sandbox the secret is, as root sees it."""
    return (await lease.exec(["python3", "-c", EVERYWHERE, SECRET[::-1]], user="root", check=True)).text.strip()


@asynccontextmanager
async def leased(**options):
    """A lease of a fresh sandbox, and what is told of it."""
    events = []
    async with SandboxClient("local", images={"host": 1}, spares=0, sink=events.append, **options) as client:
        async with await client.acquire("host") as lease:
            yield lease, events
        client.events = events


async def test_a_command_has_its_secrets_and_the_next_one_does_not():
    """As variables on top of the others, byte for byte."""
    value = SECRET + " \n\"'$HOME é"
    async with leased() as (lease, _):
        first = await lease.exec('printf %s "$TOKEN$A"', secrets={"TOKEN": value}, env={"A": "b"})
        second = await lease.exec('printf %s "$TOKEN"')
        async with await lease.open_process('printf %s "$TOKEN"', secrets={"TOKEN": value}) as process:
            third = b"".join([data async for data in process.stdout])

        assert (value + "b", "") == (first.text, second.text)
        assert value.encode() == third
        assert "[]" == await everywhere(lease)


async def test_a_lease_has_its_secrets_until_it_is_reset():
    """Every command has them; afterwards no process and no file does."""
    async with leased(reset=FILES) as (lease, _):
        lease.use_secrets({"TOKEN": SECRET})
        await lease.exec("setsid sleep 60 & echo $TOKEN > kept; echo $TOKEN > /tmp/kept", check=True)
        assert "/workspace/kept" in await everywhere(lease)
        report = await lease.reset()

        assert ("files", True) == (report.rung, report.verified)
        assert "[]" == await everywhere(lease)
        assert "\n" == (await lease.exec("echo $TOKEN")).text


async def test_a_secret_in_a_file_is_for_one_user_and_gone_after_the_reset():
    """It is in memory, private from its first byte, and the report of the reset says that it was removed."""
    async with leased(reset=FILES) as (lease, events):
        name = lease.sandbox
        path = await lease.place_secret(SECRET)
        found = await lease.exec(f"stat -c '%a %U %s' {path}; stat -f -c %T {path}; cat {path}", check=True)
        other = await lease.exec(["cat", path], user="nobody")
        report = await lease.reset()

        assert f"600 sandbox {len(SECRET)}\ntmpfs\n{SECRET}" == found.text
        assert (1, b"") == (other.exit_code, other.stdout)
        assert ("files", True, (path,), name) == (report.rung, report.verified, report.secrets, lease.sandbox)
        assert path in report.changed
        assert "[]" == await everywhere(lease)
        assert () == (await lease.reset()).secrets
        told = [event.data["secrets"] for event in events if event.name == "sandbox.reset"]
        assert [1, 0] == told


async def test_a_secret_in_a_file_is_gone_with_the_sandbox():
    """Where another one is cheaper, too, the report names the file."""
    async with leased() as (lease, _):
        path = await lease.place_secret(SECRET)
        report = await lease.reset()

        assert ("jail", (path,)) == (report.rung, report.secrets)
        assert "[]" == await everywhere(lease)


async def test_the_next_holder_of_a_sandbox_finds_nothing():
    """What was placed is removed by the reset after the release as well, verified."""
    events = []
    async with SandboxClient("local", images={"host": 1}, spares=0, reset=FILES, sink=events.append) as client:
        async with await client.acquire("host") as lease:
            name = lease.sandbox
            await lease.place_secret(SECRET)
            await lease.exec("setsid sleep 60 &", secrets={"TOKEN": SECRET})
        async with await client.acquire("host") as lease:
            assert name == lease.sandbox
            assert "[]" == await everywhere(lease)

    assert [(True, 1)] == [(e.data["verified"], e.data["secrets"]) for e in events if e.name == "sandbox.reset"][:1]


async def test_a_secret_in_a_file_is_in_no_checkpoint_and_in_no_diff(tmp_path):
    """It would leave the sandbox otherwise."""
    async with leased(baseline=True) as (lease, _):
        path = await lease.place_secret(SECRET)
        await lease.exec("echo x > x", check=True)
        await lease.checkpoint(tmp_path)
        diff = await lease.diff(root="/")

    assert ["/workspace/x"] == [change.path for change in diff.changes]
    assert SECRET not in diff.text
    assert not [top for top, _, names in os.walk(tmp_path) for name in names if SECRET in read(top, name)]
    assert path.startswith("/dev/shm/")


def read(top, name):
    with open(os.path.join(top, name), "rb") as file:
        return file.read().decode("utf-8", "replace")


async def test_p38_secrets_are_in_nothing_that_is_kept_of_a_run(tmp_path, caplog):
    """Not in records, journal, artifacts, patches, command logs, events, errors or logs, whatever the episode did."""
    caplog.set_level(logging.DEBUG)
    events = []

    async def solve(sandbox, episode):
        secrets = {"TOKEN": SECRET}
        await sandbox.place_secret(SECRET)
        await sandbox.exec(f"echo {SECRET} > out.txt; echo $TOKEN >&2", secrets=secrets)
        await sandbox.exec(["echo", SECRET])
        with contextlib.suppress(CommandNotFound):
            await sandbox.exec([f"/no/{SECRET}"])
        with contextlib.suppress(FileNotFoundError):
            await sandbox.read_file(f"/no/{SECRET}")
        if episode.id == "failed":
            await sandbox.exec("printf %5000s; echo $TOKEN >&2; exit 3", secrets=secrets, check=True)
        if episode.id == "raised":
            raise ValueError(f"cannot log in with {SECRET}")
        if episode.id == "slow":
            await sandbox.exec("echo $TOKEN; exec sleep 60", secrets=secrets, timeout=0.3)
        return Graded(reward=1.0, patch=f"+{SECRET}\n", info={"log": [f"used {SECRET}"]})

    batch = [Episode(id=name, image="host", artifacts=("out.txt",)) for name in ("good", "failed", "raised", "slow")]
    async with SandboxPool(
        "local",
        images={"host": 2},
        rollout=solve,
        output=tmp_path / "output",
        journal=tmp_path / "run.journal",
        sink=events.append,
    ) as pool:
        result = await pool.rollout(batch)

    good, failed, raised, slow = result.records
    assert (1.0, "+[redacted]\n", {"log": ["used [redacted]"]}) == (good.reward, good.patch, good.info)
    assert b"[redacted]\n" == good.artifacts["out.txt"].read_bytes()
    assert "CommandFailed: exit code 3: [redacted]" == failed.reason
    assert "ValueError: cannot log in with [redacted]" == raised.reason
    assert slow.failure.kind == "command_timeout"
    assert "echo [redacted] > out.txt; echo $TOKEN >&2" == good.last.commands[0]["command"]
    for told in (repr(result.records), repr([r.history for r in result.records]), repr(events), caplog.text):
        assert SECRET not in told
    kept = [os.path.join(top, name) for top, _, names in os.walk(tmp_path) for name in names]
    assert len(kept) >= 10
    assert [] == [path for path in kept if SECRET in read(*os.path.split(path))]


async def test_an_error_shows_no_secret(tmp_path):
    """Its message, its output and its cause."""
    async with leased() as (lease, _):
        with pytest.raises(CommandFailed) as failed:
            await lease.exec("echo $TOKEN; echo $TOKEN >&2; exit 1", secrets={"TOKEN": SECRET}, check=True)
        with pytest.raises(PermissionError) as denied:
            await lease.write_file(f"/etc/{SECRET}", "x")

        assert (b"[redacted]\n", b"[redacted]\n") == (failed.value.result.stdout, failed.value.result.stderr)
        assert "[redacted]" in str(denied.value)
        assert SECRET not in repr(failed.value) + repr(denied.value) + repr(lease)
        assert {"a": ["[redacted]"]} == lease.redact({"a": [SECRET]})


async def test_what_can_be_no_secret_is_refused_before_anything_runs():
    """And after the release nothing is taken."""
    async with leased() as (lease, _):
        with pytest.raises(ConfigurationError, match="secret 'TOKEN' is shorter than 4 characters"):
            await lease.exec("touch ran", secrets={"TOKEN": "abc"})
        with pytest.raises(ConfigurationError, match="secret 'TOKEN' is a int, not a string"):
            lease.use_secrets({"TOKEN": 12345})
        with pytest.raises(ConfigurationError, match="secret 'of a file' is shorter"):
            await lease.place_secret("")
        assert "" == (await lease.exec("ls")).text
    with pytest.raises(UsageError, match="was released"):
        lease.use_secrets({"TOKEN": SECRET})
    with pytest.raises(UsageError, match="was released"):
        await lease.place_secret(SECRET)


async def test_a_sandbox_reaches_itself_and_nothing_else():
    """The local network is off, and cannot be had."""
    probe = """
import socket
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(server.getsockname(), 5).close()
for address in ("192.0.2.1", "127.0.0.2", "10.0.0.1", "8.8.8.8"):
    try:
        socket.create_connection((address, 80), 5)
    except OSError as error:
        print(address, error.errno)
"""
    async with leased() as (lease, _):
        found = await lease.exec(["python3", "-c", probe], check=True)
        names = (
            await lease.exec("ls /sys/class/net 2>/dev/null; cut -d: -f1 /proc/net/dev | tail -n +3", check=True)
        ).text

        assert "192.0.2.1 101\n127.0.0.2 111\n10.0.0.1 101\n8.8.8.8 101\n" == found.text
        assert {"lo"} == set(names.split())
        assert lease.capabilities.network is False
    with pytest.raises(ConfigurationError, match="network=True is not supported by the local backend"):
        LocalBackend(network=True)
