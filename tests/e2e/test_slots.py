# SPDX-License-Identifier: Apache-2.0
"""
Several sandboxes in one Pod of a real cluster, each in a jail of its own. The image's user must be root.

``AGENTSANDBOX_E2E_RESIDUES_IMAGE``: see ``test_residues.py``.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

import anyio
import pytest

from agentsandbox import Episode, SandboxPool
from agentsandbox.backends.kubernetes import KubernetesBackend
from agentsandbox.client import SandboxClient
from agentsandbox.errors import SandboxLost
from agentsandbox.metrics.quantiles import quantile
from agentsandbox.models.command import Command
from agentsandbox.models.sandbox import SandboxSpec
from agentsandbox.testing import conformance

from ..residues.harness import PLANTS, Hydrated, each, leave, opened  # noqa: TID252 - one copy
from .conftest import IMAGE, options, sh

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

BIG = {"limits": {"cpu": "2", "memory": "2Gi"}, "jail": True}


@pytest.fixture(scope="module")
def anyio_backend():
    """Run on the event loop that the client library needs."""
    return "asyncio"


async def several(backend, image, count):
    """Make sandboxes, one after another."""
    return [await backend.create(SandboxSpec(image=image), f"sb-{number}") for number in range(count)]


def say(text):
    """Print a figure, for ``pytest -s``."""
    sys.stdout.write(f"{text}\n")


def python(sandbox, program):
    """Return a command that runs a Python program."""
    return Command(command=[sandbox.session.facts["executable"], "-c", program])


async def test_forty_episodes_at_concurrency_eight_take_one_pod(image, api):
    """Every reward is right, and no episode sees another's files or processes; how long it took is printed."""
    pods, wrong = set(), []

    async def solve(sandbox, episode):
        look = "ls -A /tmp /dev/shm; cat /tmp/mine; cat /proc/[0-9]*/comm | grep -c sleep"
        clean = await sandbox.exec(look)
        await sandbox.write_file("/tmp/mine", episode.id)
        await sandbox.exec("echo x > /usr/left; echo x > /dev/shm/left; (setsid sleep 60 &)")
        await anyio.sleep(0.2)
        mine = await sandbox.exec("cat /tmp/mine")
        pods.add((sandbox.identity.uid, sandbox.identity.instance))
        right = (b"/dev/shm:\n\n/tmp:\n0\n", episode.id) == (clean.stdout, mine.text)
        if not right:
            wrong.append((clean.stdout, mine.text))
        return float(right)

    async with SandboxPool(
        "kubernetes", images={image: 8}, rollout=solve, backend_options=options(**BIG, slots=8)
    ) as pool:
        with anyio.fail_after(60):
            while pool.statistics().ready < 8:  # noqa: ASYNC110 - before the trainer's step begins
                await anyio.sleep(0.05)
        result = await pool.rollout([Episode(id=f"e{number}", image=image) for number in range(40)])
        hosts = pool.statistics().hosts

    assert [] == [record for record in result.records if record.reward != 1.0], wrong
    assert (1.0,) * 40 == result.rewards
    assert 1 == hosts == len({uid for uid, _ in pods})
    assert 40 == len({instance for _, instance in pods})
    for name, times in (("all", result.ttfc), *result.ttfc.by_start.items()):
        say(f"TTFC {name}: n={times.n} p50={1e3 * times.p50:.1f} ms p95={1e3 * times.p95:.1f} ms")
    for name, times in result.ttfc.by_stage.items():
        say(f"stage {name}: p50={1e3 * times.p50:.1f} ms p95={1e3 * times.p95:.1f} ms")


async def test_a_new_jail_is_there_before_it_is_asked_for(running, image):
    """With a spare the next sandbox of a slot costs no time on its Pod; what one costs without is told, too."""
    async with running(**BIG) as backend:
        times = {"create": [], "first command": [], "destroy": []}
        for number in range(12):
            began = anyio.current_time()
            sandbox = await backend.create(SandboxSpec(image=image), f"sb-{number}")
            made = anyio.current_time()
            assert 0 == (await sh(sandbox, "true")).exit_code
            ran = anyio.current_time()
            await backend.destroy(sandbox)
            for name, span in zip(times, (made - began, ran - made, anyio.current_time() - ran), strict=True):
                times[name].append(span)
            await anyio.sleep(0.2)
        assert 1 == backend._hosts.made
        for name, spans in times.items():
            say(f"{name}: p50={1e3 * quantile(spans[1:], 0.5):.2f} ms")


async def test_no_slot_sees_anothers_files_or_processes(running, image):
    """Eight at once: each sees its own files, shared memory, ports, processes and names, and no layer of anybody."""
    program = """
import os, socket
for path in ("/tmp/mine", "/dev/shm/mine"):
    with open(path, "x") as file: file.write(str(os.getpid()))
s = socket.socket(socket.AF_UNIX); s.bind("\\0agentsandbox"); s.listen(1)
t = socket.socket(); t.bind(("0.0.0.0", 7777)); t.listen(1)
if os.fork(): os._exit(0)
os.setsid()
null = os.open(os.devnull, os.O_RDWR)
for fd in 0, 1, 2: os.dup2(null, fd)
import time; time.sleep(60)
"""
    look = "hostname; ls -A / /tmp /dev/shm; cat /proc/[0-9]*/comm | grep -c python; cat /proc/mounts | grep -v cgroup"
    async with running(**BIG, slots=8) as backend:
        sandboxes = await several(backend, image, 8)
        for sandbox in sandboxes:
            result = await sandbox.session.exec(python(sandbox, program))
            assert (0, b"") == (result.exit_code, result.stderr)
        shown = {(await sh(sandbox, look)).stdout for sandbox in sandboxes}
        assert 1 == len(shown), shown
        assert b".jail" not in shown.pop().partition(b"\n/tmp:")[0]
        assert 1 == len({sandbox.identity.uid for sandbox in sandboxes})


async def test_a_hostile_episode_stays_in_its_jail(running, image):
    """Root in a jail cannot mount, make namespaces, touch what is shared, or reach a process outside."""
    script = """
    for try in "mount -t tmpfs none /mnt" "mount -t proc none /mnt" "umount /proc/sys" \\
        "mount -o remount,rw /proc/sys" \\
        "unshare -U true" "unshare -m true" "unshare -n true" "chroot / true" "mknod /tmp/sda b 8 0" \\
        "mknod /tmp/mem c 1 1" "chmod 0 /dev/null" "sh -c 'echo 1 > /proc/sys/kernel/panic'" \\
        "sh -c 'echo h > /proc/sysrq-trigger'" "mkdir /sys/fs/cgroup/memory/x" "sh -c 'echo x > /sys/fs/cgroup/x'" \\
        "sh -c 'echo core > /proc/sys/kernel/core_pattern'" "nsenter -t 1 -m true" "dmesg" "reboot -f" \\
        "cat /proc/1/environ" "cat /proc/1/mem" "readlink /proc/1/fd/*" "ls /proc/1/root" \\
        "ls /.jail" "ls /.agentsandbox" \\
        "date -s 2000-01-01" "kill -9 1 && false"
    do if eval "$try" > /dev/null 2>&1; then echo "possible: $try"; fi; done
    cat /proc/kcore /proc/keys /proc/timer_list 2> /dev/null | head -c 10
    grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status
    """
    async with running(**BIG, slots=2) as backend:
        first, second = await several(backend, image, 2)
        result = await sh(first, script, timeout=60)
        lines = result.text.splitlines()
        assert [] == [line for line in lines if line.startswith("possible")], lines
        bounds = {line.split()[1] for line in lines if line.startswith("Cap")}
        assert not any(int(bound, 16) & (1 << 21 | 1 << 12 | 1 << 19 | 1 << 16 | 1 << 18 | 1 << 17) for bound in bounds)
        assert "NoNewPrivs:\t1" in lines
        assert "filtered" == first.capabilities.facts["system_calls"]
        for sandbox in (first, second):
            await sandbox.check()
            assert b"fine\n" == (await sh(sandbox, "echo fine")).stdout


async def test_a_slot_that_takes_too_much_fails_alone_where_groups_are_delegated(running, image):
    """Its processes and its memory are limited; its neighbour does not notice."""
    async with running(limits=BIG["limits"], slots=8, jail={"max_processes": 64}) as backend:
        first, second = await several(backend, image, 2)
        if "memory" not in first.capabilities.facts["groups"]:
            pytest.skip("this cluster delegates no control groups")
        result = await first.session.exec(python(first, "x = bytearray(1 << 30)"))
        assert 137 == result.exit_code
        result = await sh(first, "for i in $(seq 100); do sleep 60 & done")
        assert b"annot fork" in result.stderr
        for sandbox in (first, second):
            assert b"fine\n" == (await sh(sandbox, "echo fine")).stdout
            await sandbox.check()


async def test_memory_of_the_pod_that_runs_out_loses_every_slot(running, image, events):
    """Nobody knows whose fault it was: both sandboxes are lost, retryable, and the next one is in another Pod."""
    small = {"limits": {"cpu": "2", "memory": "160Mi"}, "jail": {"memory": 1 << 34}}
    async with running(**small, slots=2) as backend:
        first, second = await several(backend, image, 2)
        with suppress(SandboxLost):
            await first.session.exec(python(first, "x = bytearray(400 << 20)"))
        with anyio.fail_after(30):
            while first.loss is None or second.loss is None:  # noqa: ASYNC110 - told by whoever notices
                await anyio.sleep(0.05)
        assert first.loss.retryable
        assert {first.loss.reason, second.loss.reason} <= {"host_oom_killed", "host_died", "host_restarted"}
        lost = {event.sandbox: event.data["reason"] for event in events if event.name == "sandbox.lost"}
        assert {"sb-0", "sb-1"} <= set(lost)
        third = await backend.create(SandboxSpec(image=image), "sb-3")
        assert third.pod != first.pod


async def test_a_jail_on_disk_leaves_nothing_there(running, image):
    """What it wrote is on a volume of the Pod, and is gone with it."""
    async with running(limits=BIG["limits"], slots=2, jail={"storage": "disk"}) as backend:
        first, second = await several(backend, image, 2)
        host = first.jails.host
        before = (await sh(host, "ls /.agentsandbox")).text.split()
        assert {first.jail.name, second.jail.name} <= set(before)
        await sh(first, "dd if=/dev/zero of=/usr/big bs=1M count=64; mkdir -m 0 /usr/closed; touch /usr/closed/x")
        await backend.destroy(first)
        assert first.jail.name not in (await sh(host, "ls /.agentsandbox")).text.split()
        await second.check()
        assert b"" == (await sh(second, "ls -A /usr | grep -E 'big|closed'; ls -d /.agentsandbox")).stdout


async def test_an_image_that_makes_no_jails_serves_one_sandbox_and_says_why(running, no_python):
    """Without Python nobody is there to make them; the sandbox is the Pod, without the capabilities for jails."""
    async with running(**BIG) as backend:
        (sandbox,) = await several(backend, no_python, 1)
        assert "no: there is no Python in the image" == sandbox.capabilities.facts["jail"]
        assert b"fine\n" == (await sh(sandbox, "echo fine")).stdout
        assert b"CapBnd:\t0000000000000000\n" == (await sh(sandbox, "grep CapBnd /proc/self/status")).stdout


async def test_a_jail_can_have_the_network_of_its_pod(running, image):
    """Only when it is asked for: then it has the Pod's address."""
    async with running(limits=BIG["limits"], jail={"network": True}) as shared, running(**BIG) as closed:
        shown = []
        for backend in (shared, closed):
            (sandbox,) = await several(backend, image, 1)
            program = "import socket; print(sorted(name for _, name in socket.if_nameindex()))"
            shown.append((await sandbox.session.exec(python(sandbox, program))).text.strip())
            assert sandbox.capabilities.network is (backend is shared)
        assert "'eth0'" in shown[0]
        assert "['lo']" == shown[1]


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
async def test_rule_holds(check, image):
    """The rule in the check's docstring holds in a jail of a Pod."""
    async with SandboxClient("kubernetes", images={image: 2}, backend_options=options(**BIG, slots=2)) as client:
        try:
            await check(client, image)
        except conformance.NotApplicable as reason:
            pytest.skip(str(reason))


class Pods(Hydrated, KubernetesBackend):
    """Jails in which the fixture's tree was made before anybody may use them."""


@pytest.fixture(scope="module")
async def place(anyio_backend):
    """Open a place for the rung."""
    image = os.environ.get("AGENTSANDBOX_E2E_RESIDUES_IMAGE") or IMAGE
    more = {**BIG, "lifetime": 3600, "slots": 2}
    async with opened("jail", image, Pods(**options(**more)), Pods(**options(**more)), root=True) as place:
        yield place


@each(PLANTS)
async def test_the_next_episode_finds_nothing(place, plant):
    """Whatever was left in a jail, the next one of its slot is like one that nobody ever used."""
    await leave(place, plant)
