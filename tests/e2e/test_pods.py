# SPDX-License-Identifier: Apache-2.0
"""Sandboxes in the Pods of a real cluster."""

from __future__ import annotations

import os
import subprocess

import anyio
import anyio.to_process
import pytest

from agentsandbox import Episode, SandboxPool
from agentsandbox.client import SandboxClient
from agentsandbox.errors import ImagePullFailed, ProvisionError, QuotaExceeded, SandboxLost, Unschedulable
from agentsandbox.models.command import Command
from agentsandbox.models.sandbox import ExecLevel, SandboxSpec
from agentsandbox.testing import conformance

from .conftest import NAMESPACE, options, sh

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]


async def test_a_sandbox_is_made_used_and_gone(running, image, api):
    """A Pod is made, its runner answers with what the image offers, and after its removal the Pod is gone."""
    async with running() as backend:
        sandbox = await backend.create(SandboxSpec(image=image, env={"A": "b"}), "sb-1")
        await sandbox.check()
        result = await sh(sandbox, "echo $A; echo err >&2; exit 3")

        assert (3, b"b\n", b"err\n") == (result.exit_code, result.stdout, result.stderr)
        assert ExecLevel.RUNNER is sandbox.capabilities.exec_level
        assert sandbox.session.facts["pid"] == 1
        assert sandbox.node
        pod = await api.request("GET", f"/api/v1/namespaces/{NAMESPACE}/pods/{sandbox.pod}")
        assert sandbox.identity.uid == pod["metadata"]["uid"]
        assert sandbox.nonce not in str(pod)

        await backend.destroy(sandbox)
        await backend.destroy(sandbox)
        assert backend._reflector.get(sandbox.uid) is None


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
async def test_rule_holds(check, image):
    """The rule in the check's docstring holds in Pods."""
    async with SandboxClient("kubernetes", images={image: 2}, backend_options=options()) as client:
        try:
            await check(client, image)
        except conformance.NotApplicable as reason:
            pytest.skip(str(reason))


async def test_p15_a_deleted_pod_ends_its_command_at_once(running, image, api, events):
    """A command in a Pod that somebody deletes ends with the reason, not with its own time limit."""
    async with running() as backend:
        sandbox = await backend.create(SandboxSpec(image=image), "sb-1")

        async def delete(started):
            await started.wait()
            await api.request("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/{sandbox.pod}")

        started = anyio.Event()
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(delete, started)
                with pytest.raises(SandboxLost) as caught:
                    await sandbox.session.exec(Command(command="sleep 60", timeout=60), on_started=started.set)
        assert "deleted" == caught.value.reason
        with pytest.raises(SandboxLost, match="deleted"):
            await sandbox.check()
        assert ["sb-1"] == [event.sandbox for event in events if event.name == "sandbox.lost"]


async def test_an_eviction_is_told_apart(running, image, api):
    """A Pod that is evicted is lost, in the cluster's words."""
    async with running() as backend:
        sandbox = await backend.create(SandboxSpec(image=image), "sb-1")
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": sandbox.pod}}
        await api.request("POST", f"/api/v1/namespaces/{NAMESPACE}/pods/{sandbox.pod}/eviction", body=body)
        with anyio.fail_after(20):
            while sandbox.loss is None:  # noqa: ASYNC110 - told by the watch
                await anyio.sleep(0.05)
        assert sandbox.loss.reason in ("evicted", "deleted")


async def test_memory_of_the_whole_container_is_no_success(running, image):
    """A command that takes all memory is killed or takes its sandbox along; it never succeeds."""
    async with running(limits={"cpu": "2", "memory": "96Mi"}) as backend:
        sandbox = await backend.create(SandboxSpec(image=image), "sb-1")
        program = "x = bytearray(400 << 20)"
        try:
            result = await sandbox.session.exec(_python(sandbox, program))
        except SandboxLost as error:
            outcome = error.reason
        else:
            outcome = result.exit_code
        assert outcome in ("oom_killed", "died", "stream_ended", 1, 137)


def _python(sandbox, program):
    return Command(command=[sandbox.session.facts["executable"], "-c", program])


async def test_a_hostile_episode_cannot_take_the_runner_over(running, image):
    """Whoever connects to the runner's socket without the nonce is refused, and the driver keeps its stream."""
    async with running() as backend:
        sandbox = await backend.create(SandboxSpec(image=image), "sb-1")
        program = """
import array, os, socket, struct, json
r, w = os.pipe(); r2, w2 = os.pipe()
s = socket.socket(socket.AF_UNIX); s.connect("\\0agentsandbox")
s.sendmsg([b"+"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [r, w2]))])
print(os.read(r2, 100))
hello = json.dumps({"version": 1, "nonce": "0" * 32, "received": 0}).encode()
os.write(w, struct.pack(">BII", 1, 0, len(hello)) + hello)
print(os.read(r2, 100)[9:])
for i in range(100):
    t = socket.socket(socket.AF_UNIX); t.connect("\\0agentsandbox"); t.send(b"x")
for path in ("/proc/1/mem", "/proc/1/fd/0", "/proc/1/environ"):
    try: open(path, "rb").read(1); print("open", path)
    except OSError: pass
"""
        result = await sandbox.session.exec(_python(sandbox, program))
        assert b"b'runner\\n'\nb'{\"reason\":\"wrong nonce\"}'\n" == result.stdout
        assert 0 == (await sh(sandbox, "kill -9 1; kill -TERM 1; true")).exit_code
        assert sandbox.session.alive
        assert 1 == backend._attacher.opened


async def test_an_episode_that_kills_everything_loses_only_the_stream(running, image):
    """``kill -9 -1`` ends the relay, too; the session attaches again to the same runner."""
    async with running() as backend:
        sandbox = await backend.create(SandboxSpec(image=image), "sb-1")
        identity = sandbox.identity
        await sh(sandbox, "kill -9 -1")  # all but the shell itself
        assert b"again\n" == (await sh(sandbox, "echo again")).stdout
        await sandbox.check()
        assert identity == sandbox.identity
        assert 2 == backend._attacher.opened


async def test_a_cut_of_five_seconds_loses_no_command(running, image, gate):
    """32 running commands each finish exactly once, with complete output, although every stream is cut for 5 s."""
    way, kubeconfig = gate
    async with running(kubeconfig=kubeconfig) as backend:
        sandboxes = await _several(backend, image, 4)
        done = []

        async def run(number):
            script = f"echo {number} >> /tmp/log; for i in $(seq 100); do echo {number} $i; sleep 0.06; done"
            result = await sh(sandboxes[number % 4], script, timeout=120)
            assert b"".join(b"%d %d\n" % (number, i) for i in range(1, 101)) == result.stdout
            done.append(number)

        async with anyio.create_task_group() as group:
            for number in range(32):
                group.start_soon(run, number)
            await anyio.sleep(2)
            await way.cut()
            await anyio.sleep(5)
            await way.open()
        assert list(range(32)) == sorted(done)
        for start, sandbox in enumerate(sandboxes):
            log = (await sh(sandbox, "cat /tmp/log")).stdout.split()
            assert sorted(range(start, 32, 4)) == sorted(map(int, log))
            await sandbox.check()


async def test_a_restart_of_the_api_server_loses_no_command(running, image):
    """The same with the API server itself away for 5 s."""
    command = os.environ.get("AGENTSANDBOX_E2E_APISERVER_RESTART")
    if not command:
        pytest.skip("AGENTSANDBOX_E2E_APISERVER_RESTART is not set")
    async with running() as backend:
        sandboxes = await _several(backend, image, 4)
        done = []

        async def run(number):
            script = f"echo {number} >> /tmp/log; for i in $(seq 150); do echo {number} $i; sleep 0.08; done"
            result = await sh(sandboxes[number % 4], script, timeout=120)
            assert 150 == len(result.stdout.splitlines())
            done.append(number)

        async with anyio.create_task_group() as group:
            for number in range(32):
                group.start_soon(run, number)
            await anyio.sleep(2)
            await anyio.to_thread.run_sync(lambda: subprocess.run(command, shell=True, check=True))
        assert list(range(32)) == sorted(done)
        for sandbox in sandboxes:
            assert b"8\n" == (await sh(sandbox, "cat /tmp/log | wc -l")).stdout


async def _several(backend, image, count):
    sandboxes = [None] * count

    async def make(number):
        sandboxes[number] = await backend.create(SandboxSpec(image=image), f"sb-{number}")

    async with anyio.create_task_group() as group:
        for number in range(count):
            group.start_soon(make, number)
    return sandboxes


PLANT = """
for d in / /tmp /var/tmp /dev /dev/shm "$HOME"; do echo x > $d/planted; done
mkdir -p /dev/shm/a/b; chmod 0 /dev/shm/a
setsid sleep 333 >/dev/null 2>&1 &
"""
IPC = """
import ctypes
c = ctypes.CDLL(None)
print(c.shmget(1234, 4096, 0o1666), c.msgget(77, 0o1666), c.semget(78, 1, 0o1666))
"""


async def test_a_restart_in_place_leaves_nothing(running, image):
    """A container made anew in the same Pod has another identity, and nothing of the one before, nor of its IPC."""
    async with running() as backend:
        old = await backend.create(SandboxSpec(image=image), "sb-1")
        if not backend.can_recycle(old):
            pytest.skip("the server does not know the rule RestartAllContainers")
        await sh(old, PLANT)
        await old.session.exec(_python(old, IPC))

        new = await backend.restart(old)

        assert old.identity.uid == new.identity.uid
        assert old.identity.restarts + 1 == new.identity.restarts
        assert old.identity.instance != new.identity.instance
        left = await sh(
            new, "find / -xdev -name planted; ls -A /dev/shm /dev/mqueue; cat /proc/sysvipc/* | grep -c 666"
        )
        assert b"/dev/mqueue:\n\n/dev/shm:\n0\n" == left.stdout
        assert not old.session.alive
        await new.check()


async def test_what_a_restart_cannot_undo_is_noticed(running, image):
    """A file that the Pod shares with the next container and that an episode has changed makes the Pod useless."""
    async with running() as backend:
        old = await backend.create(SandboxSpec(image=image), "sb-1")
        if not backend.can_recycle(old):
            pytest.skip("the server does not know the rule RestartAllContainers")
        await sh(old, "echo nameserver 10.9.9.9 >> /etc/resolv.conf")

        with pytest.raises(ProvisionError, match=r"/etc/resolv\.conf"):
            await backend.restart(old)
        await backend.destroy(old)
        assert backend._reflector.get(old.uid) is None


async def test_images_change_in_place(running, image, second_image):
    """A Pod serves one image after the other, under one UID, each with its own root file system."""
    async with running() as backend:
        sandbox = await backend.create(SandboxSpec(image=image), "sb-1")
        if not backend.can_recycle(sandbox):
            pytest.skip("the server does not know the rule RestartAllContainers")
        uid, seen = sandbox.uid, [sandbox.state.image_id]
        for number in range(6):
            sandbox = await backend.change_image(sandbox, SandboxSpec(image=(second_image, image)[number % 2]))
            assert uid == sandbox.uid
            seen.append(sandbox.state.image_id)
        assert [*seen[:2], *seen[:2], *seen[:2], seen[0]] == seen
        assert 2 == len(set(seen))


async def test_a_pool_serves_two_images_from_one_pod(image, second_image):
    """Episodes of two images share what may be alive: one Pod is made, and every episode finds its own image."""

    async def solve(sandbox, episode):
        result = await sandbox.exec("test ! -e /tmp/used && touch /tmp/used")
        return float(result.exit_code == 0)

    pods = set()
    async with SandboxPool(
        "kubernetes",
        images={image: 1, second_image: 1},
        rollout=solve,
        max_sandboxes=1,
        spares=0,
        backend_options=options(),
        sink=lambda event: pods.add(event.sandbox) if event.name == "sandbox.created" else None,
    ) as pool:
        episodes = [Episode(id=f"e{n}", image=(image, second_image)[n % 2]) for n in range(6)]
        result = await pool.rollout(episodes)
        statistics = pool.statistics()

    assert (1.0,) * 6 == result.rewards
    if statistics.recycled_total:  # else the server does not know the rule
        assert 1 == statistics.created_total == len(pods)


async def test_an_image_without_python_says_so(running, no_python):
    """An image that no runner can run in is refused in words, and its Pod does not stay."""
    async with running(exec_mode="runner") as backend:
        with pytest.raises(ProvisionError, match="no Python"):
            await backend.create(SandboxSpec(image=no_python), "sb-1")
        assert {} == backend._sandboxes


async def test_an_image_that_is_not_there(running):
    """An image that cannot be pulled is a failure of that kind, with the kubelet's words."""
    async with running(ready_timeout=20) as backend:
        with pytest.raises(ImagePullFailed, match=r"none\.invalid"):
            await backend.create(SandboxSpec(image="none.invalid/nothing:1"), "sb-1")


async def test_a_pod_that_fits_nowhere(running, image):
    """A Pod that no node has room for is unschedulable, in the scheduler's words."""
    limits = {"requests": {"cpu": "900"}, "limits": {"cpu": "900"}}
    async with running(ready_timeout=3, **limits) as backend:
        with pytest.raises(Unschedulable, match=r"(?i)insufficient cpu"):
            await backend.create(SandboxSpec(image=image), "sb-1")


async def test_a_quota_that_is_used_up(running, image, api):
    """A Pod beyond a quota is refused as such."""
    path = f"/api/v1/namespaces/{NAMESPACE}/resourcequotas"
    body = {"metadata": {"generateName": "e2e-"}, "spec": {"hard": {"pods": "0"}}}
    made = await api.request("POST", path, body=body)
    try:
        async with running() as backend:
            with pytest.raises(QuotaExceeded, match="exceeded quota"):
                for number in range(20):  # the controller has to see the quota first
                    await backend.create(SandboxSpec(image=image), f"sb-{number}")
                    await anyio.sleep(0.1)
    finally:
        await api.request("DELETE", f"{path}/{made['metadata']['name']}")
