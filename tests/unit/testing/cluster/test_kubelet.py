# SPDX-License-Identifier: Apache-2.0
"""The life of Pods in the double."""

from __future__ import annotations

import re

import pytest

from agentsandbox.backends.kubernetes.conditions import PodPhase, state_of
from agentsandbox.errors import ApiUnavailable, InvalidObject
from agentsandbox.testing.cluster import Image, NodeSpec, Timing
from agentsandbox.testing.cluster.images import pull_error

pytestmark = pytest.mark.anyio
QUICK = Timing(second=0.01)


def phase(name):
    return lambda pod: pod is not None and pod["status"]["phase"] == name


def waiting(reason):
    def test(pod):
        states = [one["state"] for one in (pod or {}).get("status", {}).get("containerStatuses") or ()]
        return any((state.get("waiting") or {}).get("reason") == reason for state in states)

    return test


async def test_first_process_is_the_pods_command(started) -> None:
    """The Pod's command is process 1 of its own namespace; other commands join it there, as the Pod's user."""
    async with started(process="real") as client:
        inner = {"capabilities": {"drop": ["ALL"]}, "runAsUser": 1234, "runAsGroup": 5678}
        container = {"securityContext": inner, "env": [{"name": "A", "value": "x y"}], "workingDir": "/tmp"}
        await client.make("a", ["sh", "-c", "while :; do sleep 0.1; done"], container=container)
        script = 'tr "\\0" " " </proc/1/cmdline; id -u; id -g; echo "$A $HOSTNAME $PWD"; grep CapBnd /proc/self/status'
        code, output, errors = await client.run(["sh", "-c", script])

    lines = output.decode().splitlines()
    assert (code, errors) == (0, b"")
    assert lines == [
        "sh -c while :; do sleep 0.1; done 1234",
        "5678",
        "x y a /tmp",
        "CapBnd:\t0000000000000000",
    ]


async def test_pods_do_not_see_each_other(started) -> None:
    """Each Pod has processes, files and a network of its own."""
    async with started(process="real") as client:
        await client.make("a")
        await client.make("b")
        await client.run(["sh", "-c", "touch /tmp/mine; sleep 77 </dev/null >/dev/null 2>&1 &"])
        assert await client.run(["sh", "-c", "ls /tmp; cat /proc/[0-9]*/cmdline | grep -c '[7]7'"], pod="b") == (
            1,
            b"0\n",
            b"",
        )


async def test_logs(started) -> None:
    """A log is what a container has written: whole or cut, followed to its end, of this container or the last."""
    async with started(process="real", timing=QUICK) as client:
        script = "echo one; echo two >&2; [ -e /data/x ] && exec sleep infinity; touch /data/x; printf three; exit 1"
        await client.make(
            "a",
            ["sh", "-c", script],
            ready=False,
            restartPolicy="OnFailure",
            container={"volumeMounts": [{"name": "d", "mountPath": "/data"}]},
            volumes=[{"name": "d", "emptyDir": {}}],
        )
        await client.until(
            "a", lambda pod: (pod["status"].get("containerStatuses") or [{}])[0].get("restartCount") == 1
        )

        async def log(**params):
            return await client.api.text("GET", f"{client.pods}/a/log", params=params)

        last = await log(previous="true")  # in whatever order the two streams were read
        assert sorted(last.replace("one\n", "1").replace("two\n", "2").replace("three", "3")) == ["1", "2", "3"]
        worker = client.cluster.kubelet.worker("rl", "a")
        await client.eventually(lambda: len(worker.log.lines) == 2)
        assert sorted((await log()).split()) == ["one", "two"]
        assert (await log(limitBytes=2), len((await log(tailLines=1)).split())) in {("on", 1), ("tw", 1)}
        assert all(line.startswith("20") for line in (await log(timestamps="true")).splitlines())

        await client.make(
            "b", ["sh", "-c", "for i in 1 2 3; do echo $i; sleep 0.1; done"], ready=False, restartPolicy="Never"
        )
        await client.until("b", lambda pod: bool(pod["status"].get("containerStatuses", [{}])[0].get("containerID")))
        assert await client.api.text("GET", f"{client.pods}/b/log", params={"follow": "true"}) == "1\n2\n3\n"
        with pytest.raises(InvalidObject, match="container other is not valid"):
            await log(container="other")


async def test_last_words_are_in_the_log(started) -> None:
    """A Pod is not over before all that it wrote can be read."""
    async with started(process="real") as client:
        for number in range(5):
            await client.make(f"p{number}", ["sh", "-c", "seq 2000; echo end"], ready=False, restartPolicy="Never")
        for number in range(5):
            await client.until(f"p{number}", phase("Succeeded"))
            text = await client.api.text("GET", f"{client.pods}/p{number}/log")
            assert text.splitlines()[-2:] == ["2000", "end"]


async def test_terminates_by_grace(started) -> None:
    """Deletion sends TERM and, when the grace period is over, KILL; the object goes when the processes are gone."""
    async with started(process="real", timing=Timing(second=0.1)) as client:
        await client.make("good", ["sh", "-c", "trap 'echo bye; exit 0' TERM; while :; do sleep 0.01; done"])
        await client.make("bad", ["sleep", "infinity"])
        await client.run(["sh", "-c", "until grep -q 'SigCgt:.*4...$' /proc/1/status; do :; done"], pod="good")
        ends = {}

        def hear(event):
            status = event.now.object["status"].get("containerStatuses") or [{}]
            if (end := (status[0].get("state") or {}).get("terminated")) is not None:
                ends[event.now.name] = end["exitCode"]

        client.cluster.store.subscribe(client.cluster.store.resource("pods"), hear)
        for name in ("good", "bad"):
            await client.api.request("DELETE", f"{client.pods}/{name}")
        for name in ("good", "bad"):
            await client.until(name, lambda pod: pod is None)

        assert ends == {"good": 0, "bad": 137}
        await client.eventually(lambda: not client.cluster.kubelet.workers)
        assert repr(client.cluster.kubelet) == "<Kubelet [0 Pods]>"


async def test_start_errors(started) -> None:
    """A first process that cannot be started fails the Pod with the runtime's words."""
    async with started(process="real") as client:
        await client.make("a", ["no-such-command"], ready=False, restartPolicy="Never")
        pod = await client.until("a", phase("Failed"))
        state = state_of(pod)

    assert (state.phase, state.reason) == (PodPhase.FAILING, "StartError")
    assert 'exec: "no-such-command": executable file not found in $PATH' in state.message


async def test_active_deadline(started) -> None:
    """A Pod that is active for too long fails with the reason DeadlineExceeded, and its processes are gone."""
    async with started(process="real") as client:
        await client.make("a", activeDeadlineSeconds=1)
        pod = await client.until("a", phase("Failed"))
        assert state_of(pod).reason == "deadline_exceeded"
        with pytest.raises(ApiUnavailable, match="container not found"):
            await client.run(["true"])


@pytest.mark.parametrize(
    ("error", "words"),
    [("throttled", "toomanyrequests"), ("not_found", "not found"), ("unauthorized", "denied"), ("my own", "my own")],
)
async def test_p49_pulls_that_fail(started, error: str, words: str) -> None:
    """A pull that fails is told, backs off, and is tried again; an image that appears is used."""
    images = {"host": Image(present=False, error=error)}
    async with started(images=images, timing=QUICK) as client:
        await client.make(ready=False)
        pod = await client.until("a", waiting("ImagePullBackOff"))
        assert words in state_of(pod).message
        client.cluster.images["host"] = Image(present=False)
        await client.until("a", lambda pod: state_of(pod).phase is PodPhase.READY)
        assert client.cluster.kubelet.fetched["node1", "host"] >= 2
        node = await client.api.request("GET", "/api/v1/nodes/node1")
        assert [one["names"][1] for one in node["status"]["images"]] == ["host"]


async def test_root_is_refused_where_the_pod_forbids_it(started) -> None:
    """An image of root cannot start in a Pod that must not run as root."""
    async with started(images={"host": Image(user="0")}) as client:
        await client.make(ready=False, securityContext={"runAsNonRoot": True})
        pod = await client.until("a", waiting("CreateContainerConfigError"))
        assert "image will run as root" in state_of(pod).message


async def test_p20_memory_kills_are_told_apart(started) -> None:
    """A first process that is out of memory has the reason OOMKilled; by order, too."""
    async with started(process="real", enforce_memory=True) as client:
        limits = {"resources": {"limits": {"memory": "64Mi"}}}
        await client.make(
            "a", ["python3", "-c", "x = bytearray(10**9)"], ready=False, restartPolicy="Never", container=limits
        )
        assert state_of(await client.until("a", phase("Failed"))).reason == "oom_killed"
        await client.make("b", restartPolicy="Never")
        client.cluster.restart_container("b", oom=True)
        assert state_of(await client.until("b", phase("Failed"))).reason == "oom_killed"
        await client.make("c", restartPolicy="Never")
        client.cluster.restart_container("c", exit_code=3)
        assert state_of(await client.until("c", phase("Failed"))).reason == "died"


async def test_p55_ends_by_others(started) -> None:
    """Eviction, preemption, a lost node, a shutdown and a replacement each leave their own evidence."""
    nodes = [NodeSpec(name="one"), NodeSpec(name="two")]
    async with started(nodes=nodes, timing=QUICK) as client:
        cluster = client.cluster
        await client.make("evicted", nodeSelector={"kubernetes.io/hostname": "one"})
        cluster.evict("rl", "evicted")
        state = state_of(await client.until("evicted", phase("Failed")))
        assert (state.reason, state.message.startswith("The node was low on resource")) == ("evicted", True)

        made = await client.make("same")
        replaced = cluster.replace_pod("same")
        assert replaced["metadata"]["uid"] != made["metadata"]["uid"]
        await client.until("same", lambda pod: state_of(pod).phase is PodPhase.READY)

        seen = []
        cluster.store.subscribe(cluster.store.resource("pods"), lambda event: seen.append(state_of(event.now.object)))
        await client.make("preempted")
        cluster.preempt("preempted")
        await client.until("preempted", lambda pod: pod is None)
        assert "preempted" in {state.reason for state in seen if state.phase is PodPhase.TERMINATING}
        await client.make("drained")
        await client.api.request(
            "POST", f"{client.pods}/drained/eviction", body={"metadata": {"name": "drained"}, "kind": "Eviction"}
        )
        await client.until("drained", lambda pod: pod is None)
        assert "evicted" in {state.reason for state in seen if state.phase is PodPhase.TERMINATING}

        await client.make("on-two", nodeSelector={"kubernetes.io/hostname": "two"})
        cluster.lose_node("two", evict=True)
        state = state_of(cluster.pod("on-two"))
        assert (state.phase, state.reason) == (PodPhase.TERMINATING, "node_lost")
        with pytest.raises(ApiUnavailable, match="error dialing backend"):
            await client.run(["true"], pod="on-two")
        await client.make("on-one")
        assert cluster.pod("on-one")["spec"]["nodeName"] == "one"
        cluster.shut_down_node("one")
        assert state_of(await client.until("on-one", phase("Failed"))).reason == "node_shutdown"


async def test_room_is_given_back(started) -> None:
    """A Pod that no node has room for waits, and gets the room of one that goes."""
    async with started(nodes=[NodeSpec(name="n", pods=1)], timing=QUICK) as client:
        await client.make("a")
        await client.make("b", ready=False)
        await client.until("b", lambda pod: state_of(pod).reason == "Unschedulable")
        await client.api.request("DELETE", f"{client.pods}/a")
        await client.until("b", lambda pod: state_of(pod).phase is PodPhase.READY)


async def test_events(started) -> None:
    """What happens to a Pod is told in Events."""
    async with started() as client:
        await client.make()
        path = "/api/v1/namespaces/rl/events"
        found = await client.api.request("GET", path, params={"fieldSelector": "involvedObject.name=a"})
        assert ["Scheduled", "Pulled", "Created", "Started"] == [one["reason"] for one in found["items"]]
        assert "already present on machine" in found["items"][1]["message"]
        assert ("spec.containers{sandbox}", "node1", 1) == (
            found["items"][1]["involvedObject"]["fieldPath"],
            found["items"][1]["source"]["host"],
            found["items"][1]["count"],
        )


async def test_events_of_a_pull(started) -> None:
    """A kubelet tells when it begins to fetch an image, and how that went: by an Event, and a count of it."""
    images = {"host": Image(present=False, error="not_found")}
    async with started(images=images, timing=QUICK) as client:
        await client.make(ready=False)
        await client.until("a", waiting("ImagePullBackOff"))
        client.cluster.images["host"] = Image(present=False, size=7)
        await client.until("a", lambda pod: state_of(pod).phase is PodPhase.READY)
        found = (await client.api.request("GET", "/api/v1/namespaces/rl/events"))["items"]
        told = {re.sub(r"[0-9]+ms", "1ms", one["message"]): one["count"] for one in found}

        assert told['Pulling image "host"'] >= 2
        assert told['Failed to pull image "host": ' + pull_error("host", "not_found")] >= 1
        assert 1 == told['Successfully pulled image "host" in 1ms (1ms including waiting). Image size: 7 bytes.']


async def test_secured_connection(started) -> None:
    """With TLS, a client that knows the authority connects, and streams work."""
    async with started(tls=True) as client:
        await client.make()
        assert client.cluster.url.startswith("https://")
        assert await client.run(["true"]) == (0, b"", b"")


async def test_nothing_is_left(started) -> None:
    """With the cluster all its processes end."""
    async with started(process="real") as client:
        await client.make()
        parents = [parent.pid for parent in client.cluster.runtime._parents.values()]
        assert len(parents) == 1
    import os

    for pid in parents:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
