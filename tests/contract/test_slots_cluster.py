# SPDX-License-Identifier: Apache-2.0
"""Several sandboxes in one Pod of the cluster double, each in a jail of its own."""

from __future__ import annotations

import anyio
import attrs
import pytest

from agentsandbox import Episode, SandboxPool
from agentsandbox.backends.kubernetes import KubernetesBackend, hosts
from agentsandbox.backends.local.ids import choose
from agentsandbox.client import SandboxClient
from agentsandbox.errors import (
    TASK_FAULTS,
    ConfigurationError,
    ImagePullFailed,
    InfrastructureError,
    ProvisionError,
    SandboxLost,
)
from agentsandbox.models.command import Command
from agentsandbox.models.reset import ResetPolicy
from agentsandbox.models.sandbox import SandboxSpec
from agentsandbox.testing import conformance
from agentsandbox.testing.cluster import FakeCluster, Image

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

HOST = SandboxSpec(image="host")
ROOT = Image(user="0")
IMAGES = {"host": ROOT, "other": ROOT, "nobody": Image(user="1000"), "bad": Image(error="not_found", present=False)}


@pytest.fixture
def anyio_backend():
    """Kubernetes backends are asyncio's."""
    return "asyncio"


@pytest.fixture
async def cluster(anyio_backend):
    """A cluster whose containers are root, as those must be that make jails."""
    ids = choose()
    ids.release()
    if ids.kind != "range":
        pytest.skip("this machine gives its containers one id only")
    async with FakeCluster(images=IMAGES, enforce_memory=True) as cluster:
        yield cluster


@pytest.fixture
def options(cluster, tmp_path):
    """The options of a backend for it."""
    return {"kubeconfig": cluster.kubeconfig(tmp_path), "run_as_root": True, "jail": True}


async def sh(sandbox, script, **more):
    """Run a script in a sandbox of a backend."""
    return await sandbox.session.exec(Command(command=script, **more))


async def python(sandbox, program, **more):
    """Run a Python program in a sandbox of a backend."""
    executable = sandbox.session.facts["executable"]
    return await sandbox.session.exec(Command(command=[executable, "-c", program], **more))


async def gone(backend, pod):
    """Wait until a Pod is not there any more."""
    with anyio.fail_after(30):
        while pod in backend._sandboxes:  # noqa: ASYNC110 - its removal is nobody's to wait for
            await anyio.sleep(0.01)


NEIGHBOUR = """
import os, socket
with open("/tmp/mine", "w") as file: file.write("%(name)s")
with open("/dev/shm/mine", "w") as file: file.write("%(name)s")
s = socket.socket(socket.AF_UNIX); s.bind("\\0mine"); s.listen(1)
t = socket.socket(); t.bind(("127.0.0.1", 7777)); t.listen(1)
if os.fork():
    os._exit(0)
os.setsid()
null = os.open(os.devnull, os.O_RDWR)
for fd in 0, 1, 2: os.dup2(null, fd)
import time; time.sleep(60)
"""

SEEN = """
import os
found = [os.uname().nodename, open("/tmp/mine").read(), sorted(os.listdir("/tmp")), sorted(os.listdir("/dev/shm"))]
found += [sorted(os.listdir("/.jail")) if os.path.exists("/.jail") else "no stage"]
names = {open(f"/proc/{pid}/comm").read().strip() for pid in os.listdir("/proc") if pid.isdigit()}
found += [len([pid for pid in os.listdir("/proc") if pid.isdigit()])]
print(found)
"""


async def test_no_slot_sees_anothers_files_or_processes(options, cluster):
    """One Pod serves three sandboxes, each with its own files, processes, ports, names and shared memory."""
    backend = KubernetesBackend(**options, slots=3)
    async with backend.running():
        sandboxes = [await backend.create(HOST, f"sb-{number}") for number in range(3)]
        for sandbox in sandboxes:
            result = await python(sandbox, NEIGHBOUR % {"name": sandbox.name})
            assert (0, b"") == (result.exit_code, result.stderr)
        for sandbox in sandboxes:
            shown = (await python(sandbox, SEEN)).text.strip()
            assert str(["sandbox", sandbox.name, ["mine"], ["mine"], "no stage", 3]) == shown

        assert 1 == len(cluster.pods()) == len({sandbox.identity.uid for sandbox in sandboxes})
        assert 3 == len({sandbox.identity.instance for sandbox in sandboxes})
        assert ("jail", "replace") == sandboxes[0].capabilities.rungs
        assert "and in it a jail" in sandboxes[0].capabilities.isolation
        assert not sandboxes[0].capabilities.network
        assert "<Hosts [1 Pods, 3 sandboxes, 1 Pods made]>" == repr(backend._hosts)
        assert "ready]" in repr(sandboxes[0])


async def test_a_jail_cannot_make_another_or_undo_its_own(options):
    """Root in a jail mounts nothing, makes no namespaces, and changes nothing that jails share."""
    backend = KubernetesBackend(**options, slots=2)
    async with backend.running():
        first, second = [await backend.create(HOST, f"sb-{number}") for number in range(2)]
        script = (
            "chmod 0 /dev/null; mount -t tmpfs none /mnt; umount /proc; unshare -U true; unshare -m true; "
            "mount -o remount,rw /; chroot / true; kill -9 1; kill -9 -1; ls -A /.jail /.agentsandbox; true"
        )
        result = await sh(first, script)
        assert 0 == result.stdout.count(b"ok")
        for refused in (b"chmod", b"mount:", b"umount:", b"unshare:", b"chroot:"):
            assert refused in result.stderr, refused
        for sandbox in (first, second):
            await sandbox.check()
            assert b"yes\n" == (await sh(sandbox, "echo > /dev/null && echo yes")).stdout


@pytest.mark.parametrize("storage", ["memory", "disk"])
async def test_the_next_sandbox_of_a_slot_finds_nothing(options, cluster, storage):
    """After a reset the lease has another jail of the same Pod, without anything of the one before."""
    options = {**options, "slots": 2, "jail": {"storage": storage}}
    async with SandboxClient("kubernetes", images={"host": 2}, backend_options=options) as client:
        async with await client.acquire("host") as lease:
            before = lease.identity
            await lease.exec("echo x > /usr/left; echo x > left; (setsid sleep 60 &); rm -rf /opt /etc/hosts")
            report = await lease.reset()
            assert ("jail", True) == (report.rung, report.verified)
            assert before.uid == lease.identity.uid
            assert before.instance != lease.identity.instance
            shown = await lease.exec("ls -d /usr/left left; ls -d /opt /etc/hosts; ls /proc | grep -c '^[0-9]'")
            assert "/opt" in shown.text.split()
            assert not shown.text.count("left")
        assert 1 == client.statistics().hosts == len(cluster.pods())


async def test_rewards_are_right_and_one_pod_was_made(options, cluster):
    """Twelve episodes in three slots: each finds its own files only, and the API server is asked for one Pod."""

    async def solve(sandbox, episode):
        clean = await sandbox.exec("ls -A /tmp; cat /tmp/mine")
        await sandbox.write_file("/tmp/mine", episode.id)
        mine = await sandbox.exec("cat /tmp/mine; (setsid sleep 60 &)")
        return float(clean.stdout == b"" and mine.text == episode.id)

    options = {**options, "slots": 3}
    async with SandboxPool("kubernetes", images={"host": 3}, rollout=solve, backend_options=options) as pool:
        result = await pool.rollout([Episode(id=f"e{number}", image="host") for number in range(12)])
        assert 1 == pool.statistics().hosts

    assert (1.0,) * 12 == result.rewards
    assert 1 == len([one for one in cluster.asked("POST", r"/pods$") if not one.get("dryRun")])
    assert [] == cluster.pods()


async def test_the_end_of_the_pod_is_the_end_of_every_slot(options, cluster):
    """A container that was killed for memory loses all leases in it, under a name that no policy takes for theirs."""
    backend = KubernetesBackend(**options, slots=2)
    events = []
    backend.sink = events.append
    async with backend.running():
        first, second = [await backend.create(HOST, f"sb-{number}") for number in range(2)]
        cluster.restart_container(first.pod, exit_code=137, oom=True)
        error = await _loss(first, "sleep 60")
        assert ("host_oom_killed", True) == (error.reason, error.retryable)
        assert error.reason not in TASK_FAULTS
        with pytest.raises(SandboxLost, match="host_oom_killed"):
            await second.check()
        lost = [event.sandbox for event in events if event.name == "sandbox.lost"]
        assert {"sb-0", "sb-1"} <= set(lost)

        third = await backend.create(HOST, "sb-3")
        assert third.pod != first.pod
        assert b"fine\n" == (await sh(third, "echo fine")).stdout
        for sandbox in (first, second):
            await backend.destroy(sandbox)
        await gone(backend, first.pod)


async def _loss(sandbox, script):
    try:
        await sh(sandbox, script)
    except SandboxLost as error:
        return error
    raise AssertionError("the command came to its end")


async def test_an_attempt_is_tried_again_when_another_slot_takes_all_memory(options, cluster):
    """Nobody knows who brought it about, so nobody's result counts, and all are tried again on another Pod."""
    options = {**options, "slots": 2, "limits": {"memory": "200Mi"}, "requests": {"memory": "64Mi"}}
    tries = []

    async def solve(sandbox, episode):
        tries.append((episode.id, sandbox.identity.uid))
        if len(tries) <= 2:
            while len(tries) < 2:  # noqa: ASYNC110 - both are there
                await anyio.sleep(0.01)
            if episode.id == "greedy":
                python = (await sandbox.exec("command -v python3")).text.strip()
                await sandbox.exec([python, "-c", "x = bytearray(400 << 20); import time; time.sleep(60)"])
            else:
                await sandbox.exec("sleep 60")
        return 1.0

    async with SandboxPool("kubernetes", images={"host": 2}, rollout=solve, backend_options=options) as pool:
        result = await pool.rollout([Episode(id=name, image="host") for name in ("greedy", "modest")])

    assert (1.0, 1.0) == result.rewards
    assert [2, 2] == [record.attempts for record in result.records]
    assert 2 == len({uid for _, uid in tries})


@pytest.mark.parametrize(
    ("place", "reason"), [({"oom": 1}, "host_oom_killed"), ({"oom": 0, "full": True}, "host_disk_full")]
)
async def test_what_was_short_for_all_is_told_by_whoever_notices(options, place, reason):
    """The end of a command in one slot tells of it; its own result does not count, nor does that of any other."""
    backend = KubernetesBackend(**options, slots=2)
    async with backend.running():
        first, second = [await backend.create(HOST, f"sb-{number}") for number in range(2)]
        told = first.session._calls.on_place
        first.session._calls.on_place = lambda _place: told(place)
        await sh(first, "true")
        for sandbox in (first, second):
            with pytest.raises(SandboxLost, match=reason):
                await sandbox.check()


async def test_what_was_short_for_one_slot_only_is_its_own(options):
    """With one slot nobody else can have suffered: its command ends as in a Pod without jails."""
    backend = KubernetesBackend(**options)
    async with backend.running():
        sandbox = await backend.create(HOST, "sb-1")
        told = sandbox.session._calls.on_place
        sandbox.session._calls.on_place = lambda _place: told({"oom": 1, "full": True})
        assert 0 == (await sh(sandbox, "true")).exit_code
        await sandbox.check()


async def test_a_policy_without_the_rung_looks_at_files(options, cluster):
    """A jail is a place like any other: its files can be restored, and what changed in it can be told."""
    options = {**options, "slots": 2}
    policy = ResetPolicy(rungs=("files", "replace"))
    async with SandboxClient("kubernetes", images={"host": 1}, reset=policy, backend_options=options) as client:
        async with await client.acquire("host") as lease:
            before = lease.identity
            await lease.exec("echo x > left; echo y > /tmp/left")
            report = await lease.reset()
            assert report.verified
            assert (report.rung == "files") is (before == lease.identity)
            assert b"" == (await lease.exec("ls -A . /tmp | grep left; true")).stdout


async def test_a_deleted_pod_is_replaced(options, cluster):
    """When somebody deletes the Pod, every sandbox in it is lost with that reason, and the next one is elsewhere."""
    backend = KubernetesBackend(**options, slots=2)
    async with backend.running():
        first, second = [await backend.create(HOST, f"sb-{number}") for number in range(2)]
        cluster.delete_behind(first.pod)
        for sandbox in (first, second):
            error = await _loss(sandbox, "sleep 60")
            assert "host_deleted" == error.reason
        assert (await backend.create(HOST, "sb-3")).identity.uid != first.identity.uid


async def test_a_jail_that_ends_by_itself_is_lost_alone(options):
    """Its first process is killed from outside; the sandbox is lost, its place is free, its neighbour goes on."""
    backend = KubernetesBackend(**options, slots=2)
    async with backend.running():
        first, second = [await backend.create(HOST, f"sb-{number}") for number in range(2)]
        keeper = first.jail.process.pid
        result = await sh(first.jails.host, f"kill -9 $(cat /proc/{keeper}/task/{keeper}/children)")
        assert (0, b"") == (result.exit_code, result.stderr)
        assert "stream_ended" == (await _loss(first, "sleep 60")).reason
        await second.check()
        third = await backend.create(HOST, "sb-3")
        assert third.pod == second.pod
        await backend.destroy(first)
        assert 1 == backend._hosts.made


async def test_a_jail_whose_end_nobody_saw_takes_its_pod_along(options, cluster):
    """Its keeper is killed: whether anything is left of the jail is not known, so nothing in that Pod is used again."""
    backend = KubernetesBackend(**options, slots=2)
    async with backend.running():
        first, second = [await backend.create(HOST, f"sb-{number}") for number in range(2)]
        await sh(first.jails.host, f"kill -9 {first.jail.process.pid}")
        with pytest.raises(InfrastructureError, match="jail_left: of sandbox sb-0 there is still what nobody saw end"):
            await backend.destroy(first)
        with pytest.raises(SandboxLost, match="host_jail_left"):
            await second.check()
        await gone(backend, first.pod)
        await backend.destroy(first)


async def test_a_pod_that_is_about_to_end_takes_nobody_new(options, cluster):
    """The next sandbox is in another Pod; the old one serves whom it has, and is removed after that."""
    backend = KubernetesBackend(**options, slots=2, lifetime=1000)
    async with backend.running():
        first = await backend.create(HOST, "sb-1")
        await first.vet()
        first.jails.host.born -= 900
        with pytest.raises(SandboxLost, match="expiring"):
            await first.vet()
        second = await backend.create(HOST, "sb-2")
        assert first.pod != second.pod
        assert b"fine\n" == (await sh(first, "echo fine")).stdout
        await backend.destroy(first)
        await gone(backend, first.pod)


async def test_a_pod_that_is_not_worth_a_lease_takes_nobody_new(options, cluster, monkeypatch):
    """What one sandbox finds out about its Pod, before it is leased, keeps others from beginning there."""
    backend = KubernetesBackend(**options, slots=2)
    async with backend.running():
        first = await backend.create(HOST, "sb-1")

        async def silent():
            raise SandboxLost("silent")

        monkeypatch.setattr(first.jails.host, "vet", silent)
        with pytest.raises(SandboxLost, match="silent"):
            await first.vet()
        assert first.pod != (await backend.create(HOST, "sb-2")).pod


async def test_a_mistake_of_ours_fails_one_sandbox_and_not_the_run(options, cluster, monkeypatch):
    """Whatever goes wrong while a Pod is made is told to whoever asked for it."""
    backend = KubernetesBackend(**options, slots=2)
    async with backend.running():
        with monkeypatch.context() as patch:
            patch.setattr(backend._placer, "post", None)
            with pytest.raises(ProvisionError, match="TypeError: "):
                await backend.create(HOST, "sb-1")
        assert b"fine\n" == (await sh(await backend.create(HOST, "sb-2"), "echo fine")).stdout


async def test_nothing_is_made_when_the_run_is_over(options, cluster):
    """Whoever still asks is told; every Pod is gone."""
    backend = KubernetesBackend(**options, slots=2)
    async with backend.running():
        await backend.create(HOST, "sb-1")
        backend._hosts.close()
        with pytest.raises(ProvisionError, match="being closed"):
            await backend.create(HOST, "sb-2")
    assert [] == cluster.pods()


async def test_a_pool_that_is_left_while_its_pods_are_made_leaves_none(options, cluster):
    """What is being made is given up and gone when the pool has ended, also if a Pod takes its time to go."""
    cluster.timing = attrs.evolve(cluster.timing, stop=0.5)
    async with SandboxPool("kubernetes", images={"host": 16}, backend_options={**options, "slots": 8}):
        pass

    assert [] == cluster.pods()


async def test_a_lost_stream_costs_no_jail(options, cluster):
    """The one stream of the Pod is cut while commands run in two jails; they come to their end all the same."""
    backend = KubernetesBackend(**options, slots=2)
    cut = cluster.faults.exec(cut=True, after_seconds=2.0)
    async with backend.running():
        sandboxes = [await backend.create(HOST, f"sb-{number}") for number in range(2)]
        results = []

        async def run(sandbox):
            results.append((await sh(sandbox, "for i in 1 2 3 4 5 6; do echo $i; sleep 0.5; done")).stdout)

        async with anyio.create_task_group() as group:
            for sandbox in sandboxes:
                group.start_soon(run, sandbox)
        assert [b"1\n2\n3\n4\n5\n6\n"] * 2 == results
        assert 1 == cut.hits
        assert 2 == backend._attacher.opened


async def test_a_pod_that_makes_no_jails_serves_one_sandbox_and_says_why(options, cluster):
    """With one slot the sandbox is the Pod, without the capabilities that jails would need."""
    backend = KubernetesBackend(**options)
    async with backend.running():
        sandbox = await backend.create(SandboxSpec(image="nobody"), "sb-1")
        assert sandbox.capabilities.facts["jail"].startswith("no: ")
        assert "jail" not in sandbox.capabilities.rungs
        pod = cluster.pod(sandbox.pod)
        security = pod["spec"]["containers"][0]["securityContext"]
        assert {"drop": ["ALL"]} == security["capabilities"]
        assert not security["allowPrivilegeEscalation"]


async def test_several_slots_without_jails_are_refused(options, cluster):
    """Slots that cannot be told apart would be no sandboxes."""
    backend = KubernetesBackend(**options, slots=2)
    async with backend.running():
        with pytest.raises(ConfigurationError, match="slots=2 needs jails, and Pods of image 'nobody' cannot"):
            await backend.create(SandboxSpec(image="nobody"), "sb-1")
        with anyio.fail_after(30):
            while backend._sandboxes:  # noqa: ASYNC110 - its removal is nobody's to wait for
                await anyio.sleep(0.01)


async def test_a_user_that_is_not_there_is_the_callers_mistake(options):
    """It is told in words, and the Pod stays good for others."""
    backend = KubernetesBackend(**options, slots=2)
    async with backend.running():
        with pytest.raises(ConfigurationError, match="nosuch: no such user"):
            await backend.create(SandboxSpec(image="host", user="nosuch"), "sb-1")
        assert {} == backend._hosts.refused


async def test_a_pod_that_cannot_be_made_fails_each_sandbox_once(options):
    """Two ask for the same Pod; both are told in the cluster's words."""
    backend = KubernetesBackend(**options, slots=2)
    async with backend.running():
        errors = []

        async def create(name):
            with pytest.raises(ImagePullFailed) as caught:
                await backend.create(SandboxSpec(image="bad"), name)
            errors.append(caught.value)

        async with anyio.create_task_group() as group:
            for number in range(2):
                group.start_soon(create, f"sb-{number}")
        assert 2 == len(set(map(id, errors)))
        assert 2 == backend._hosts.made


async def test_an_empty_pod_gives_way_to_another_image(options, cluster):
    """A Pod that serves nobody is removed as soon as a Pod of another image is to be made."""
    backend = KubernetesBackend(**options, slots=2)
    async with backend.running():
        first = await backend.create(HOST, "sb-1")
        await backend.destroy(first)
        await backend.destroy(first)
        assert 1 == len(cluster.pods())
        await backend.create(SandboxSpec(image="other"), "sb-2")
        await gone(backend, first.pod)
        assert ["other"] == [pod["spec"]["containers"][0]["image"] for pod in cluster.pods()]


async def test_an_empty_pod_is_kept_for_a_while(options, cluster, monkeypatch):
    """The next sandbox of its image costs no Pod; after its time it is removed."""
    backend = KubernetesBackend(**options, slots=2)
    async with backend.running():
        first = await backend.create(HOST, "sb-1")
        await backend.destroy(first)
        second = await backend.create(HOST, "sb-2")
        assert first.pod == second.pod
        monkeypatch.setattr(hosts, "IDLE", 0.05)
        await backend.destroy(second)
        await gone(backend, first.pod)
        assert [] == cluster.pods()


async def test_a_full_pod_has_another_one_beside_it(options, cluster):
    """More sandboxes than slots take more Pods, and no more than that."""
    backend = KubernetesBackend(**options, slots=2)
    async with backend.running():
        made = []

        async def create(name):
            made.append(await backend.create(HOST, name))

        async with anyio.create_task_group() as group:
            for number in range(5):
                group.start_soon(create, f"sb-{number}")
        uids = [sandbox.identity.uid for sandbox in made]
        assert 3 == len(set(uids)) == len(cluster.pods())
        assert [1, 2, 2] == sorted(map(uids.count, set(uids)))


async def test_a_create_that_is_cancelled_takes_no_place(options):
    """Whoever gives up leaves its slot to others."""
    backend = KubernetesBackend(**options, slots=1)
    async with backend.running():
        with anyio.move_on_after(0.05) as scope:
            await backend.create(HOST, "sb-1")
        assert scope.cancelled_caught
        sandbox = await backend.create(HOST, "sb-2")
        assert "<Hosts [1 Pods, 1 sandboxes, 1 Pods made]>" == repr(backend._hosts)
        await sandbox.vet()


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
async def test_rule_holds(check, jailed):
    """The rule in the check's docstring holds in a jail."""
    try:
        await check(jailed, "host")
    except conformance.NotApplicable as reason:
        pytest.skip(str(reason))


@pytest.fixture
async def jailed(options):
    """A client whose sandboxes are jails of one Pod."""
    async with SandboxClient("kubernetes", images={"host": 2}, backend_options={**options, "slots": 2}) as client:
        yield client
