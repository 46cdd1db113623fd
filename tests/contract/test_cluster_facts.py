# SPDX-License-Identifier: Apache-2.0
"""The cluster double answers what a real server of version 1.36.2 answered: every recorded case, asked again."""

from __future__ import annotations

import base64
import json
import re
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import anyio
import pytest

from agentsandbox.testing.cluster import FakeCluster, Image, NodeSpec, Timing

pytestmark = pytest.mark.anyio

FACTS = Path(__file__).parent / "facts"
SWE = "docker.io/sandbox/swe:1"
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
HEX = re.compile(r"[0-9a-f]{64}")
TIME = re.compile(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d(Z|\+00:00)")
ADDRESS = re.compile(r"10\.244\.\d+\.\d+")
NIL_UUID = "00000000-0000-0000-0000-000000000000"


def load(name):
    return json.loads((FACTS / f"{name}.json").read_text())["cases"]


API, EXEC, STATUS, RESTARTS = map(load, ("api", "exec", "pod_status", "restart_in_place"))


@pytest.fixture
def anyio_backend():
    """The double is aiohttp's, and that is asyncio's."""
    return "asyncio"


class Normal:
    """What differs between two clusters, numbered by first appearance, so that what must be equal stays equal."""

    def __init__(self):
        self.seen = {}

    def __call__(self, value):
        if isinstance(value, dict):
            return {key: self(one) for key, one in sorted(value.items()) if one is not None}
        if isinstance(value, list):
            return [self(one) for one in value]
        if isinstance(value, str):
            value = TIME.sub("<time>", value)
            value = ADDRESS.sub("<address>", value)
            for pattern, name in ((UUID, "uid"), (HEX, "id")):
                value = pattern.sub(lambda found, name=name: self.number(found[0], name), value)
        return value

    def number(self, text, name):
        if text == NIL_UUID:
            return text
        known = self.seen.setdefault(name, {})
        return f"<{name} {known.setdefault(text, len(known))}>"


@asynccontextmanager
async def cluster_as_recorded(namespace="facts", **options):
    """The recorded cluster, and a session to it."""
    images = {
        SWE: Image(user="root"),
        "docker.io/sandbox/swe:2": Image(user="root"),
        "docker.io/library/busybox:1.36": Image(user="root"),
        "registry.invalid/none:1": Image(error="no_host", present=False),
    }
    nodes = [NodeSpec(name="node1", address="apiserver", cpu="4")]
    async with FakeCluster(namespace=namespace, nodes=nodes, images=images, **options) as cluster:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(cluster.url, connector=connector) as session:
            yield cluster, session


def pod(name, command=("sleep", "infinity"), *, image=SWE, **spec):
    container = {"name": "sandbox", "image": image, "command": list(command), "imagePullPolicy": "IfNotPresent"}
    container["resources"] = spec.pop("resources", None) or {
        "limits": {"memory": "128Mi"},
        "requests": {"cpu": "10m", "memory": "16Mi"},
    }
    container.update(spec.pop("container", {}))
    base = {"automountServiceAccountToken": False, "enableServiceLinks": False, "terminationGracePeriodSeconds": 1}
    return {"metadata": {"name": name, "labels": {"facts": "1"}}, "spec": {**base, "containers": [container], **spec}}


def path(cluster, name="", sub=""):
    return f"/api/v1/namespaces/{cluster.namespace}/pods" + (f"/{name}" if name else "") + (f"/{sub}" if sub else "")


async def make(cluster, session, body, ready=True):
    async with session.post(path(cluster), json=body) as response:
        assert response.status == 201, await response.text()
    if ready:
        await until(cluster, body["metadata"]["name"], is_ready)


def is_ready(found):
    conditions = {one["type"]: one["status"] for one in found["status"].get("conditions") or ()}
    return conditions.get("Ready") == "True"


async def until(cluster, name, predicate):
    """Wait until a Pod is as it should be, and return it."""
    pods = cluster.store.resource("pods")
    with anyio.fail_after(30):
        while True:
            changed = anyio.Event()
            unsubscribe = cluster.store.subscribe(pods, lambda _event, changed=changed: changed.set())
            try:
                found = cluster.store.find(pods, cluster.namespace, name)
                if found is not None and predicate(found.object):
                    return found.object
                await changed.wait()
            finally:
                unsubscribe()


# api.json

REQUESTS = {
    "create_already_exists": ("POST", "", pod("a")),
    "get_not_found": ("GET", "nope", None),
    "invalid_pod": ("POST", "", pod("UPPER")),
    "patch_immutable_field": (
        "PATCH",
        "a",
        {"spec": {"containers": [{"name": "sandbox", "command": ["x"]}]}},
    ),
    "delete_wrong_uid": ("DELETE", "a", {"preconditions": {"uid": NIL_UUID}}),
    "patch_wrong_resource_version": ("PATCH", "a", {"metadata": {"resourceVersion": "1", "labels": {"x": "y"}}}),
}


async def test_every_api_case_is_asked() -> None:
    """No recorded answer of the API is left out here."""
    assert set(API) == {*REQUESTS, "watch_in_place_image_change"}


@pytest.mark.parametrize("case", REQUESTS)
async def test_refusal_as_recorded(case: str) -> None:
    """A refusal has the recorded status, reason, headers and body, word by word."""
    recorded = API[case]
    method, name, body = REQUESTS[case]
    async with cluster_as_recorded() as (cluster, session):
        await make(cluster, session, pod("a"))
        kind = "application/strategic-merge-patch+json" if method == "PATCH" else "application/json"
        async with session.request(
            method, path(cluster, name), data=json.dumps(body) if body else None, headers={"Content-Type": kind}
        ) as response:
            answer = await response.json()

            assert (response.status, response.reason) == (recorded["status"], recorded["reason"])
            assert set(recorded["headers"]) <= set(response.headers)
            assert response.headers["Content-Type"] == recorded["headers"]["Content-Type"]
    assert Normal()(answer) == Normal()(recorded["body"])


async def watched(cluster, session, act, *, count, start=None):
    """Return the first *count* events of a watch, with *act* done meanwhile at each event."""
    events = []
    params = {"watch": "true", "timeoutSeconds": "30"}
    async with session.get(path(cluster), params=params) as response:
        async for line in response.content:
            events.append(json.loads(line))
            await act(events)
            if len(events) >= count:
                break
    return events


async def test_image_change_in_place_as_recorded() -> None:
    """A watch tells an image change as recorded: patched, observed, and then the next container, all in full."""
    recorded = API["watch_in_place_image_change"]
    async with cluster_as_recorded() as (cluster, session):
        await make(cluster, session, pod("a"))

        async def act(events):
            if len(events) == 1:
                patch = {"spec": {"containers": [{"name": "sandbox", "image": "docker.io/library/busybox:1.36"}]}}
                headers = {"Content-Type": "application/strategic-merge-patch+json"}
                async with session.patch(path(cluster, "a"), data=json.dumps(patch), headers=headers) as response:
                    assert response.status == 200

        events = await watched(cluster, session, act, count=len(recorded))

    told = [
        {
            "type": one["type"],
            "status": one["object"]["status"],
            "image": one["object"]["spec"]["containers"][0]["image"],
        }
        for one in events
    ]
    wanted = [{key: one[key] for key in ("type", "status", "image")} for one in recorded]
    assert Normal()(told) == Normal()(wanted)


# pod_status.json


def waits_for(reason):
    return lambda found: waiting_reason(found) == reason


def waiting_reason(found):
    statuses = found["status"].get("containerStatuses") or [{}]
    return ((statuses[0].get("state") or {}).get("waiting") or {}).get("reason")


def phase(name):
    return lambda found: found["status"]["phase"] == name


PODS = {
    "running_ready": (pod("a"), is_ready),
    "after_oom_in_child": (pod("a"), is_ready),
    "crash_loop_back_off": (pod("crash", ["sh", "-c", "sleep 1; exit 1"]), waits_for("CrashLoopBackOff")),
    "first_process_oom_killed": (
        pod("pid1oom", ["python3", "-c", "import time; time.sleep(1); bytearray(10**9)"], restartPolicy="Never"),
        phase("Failed"),
    ),
    "succeeded": (pod("done", ["true"], restartPolicy="Never"), phase("Succeeded")),
    "ImagePullBackOff": (pod("nopull", image="registry.invalid/none:1"), waits_for("ImagePullBackOff")),
    "InvalidImageName": (pod("badimg", image="docker.io/UPPER:1"), waits_for("InvalidImageName")),
    "ErrImageNeverPull": (
        pod("never", image="docker.io/sandbox/none:9", container={"imagePullPolicy": "Never"}),
        waits_for("ErrImageNeverPull"),
    ),
    "unschedulable": (
        pod("huge", resources={"requests": {"cpu": "500"}}),
        lambda found: bool(found["status"].get("conditions")),
    ),
    "evicted_ephemeral_storage": (
        pod(
            "disk",
            ["sh", "-c", "head -c 60000000 /dev/zero > /big; sleep infinity"],
            resources={
                "limits": {"ephemeral-storage": "20Mi"},
                "requests": {"cpu": "10m", "ephemeral-storage": "20Mi"},
            },
        ),
        is_ready,
    ),
    "terminating": (pod("slowstop", terminationGracePeriodSeconds=20), is_ready),
}


async def test_every_pod_status_is_asked() -> None:
    """No recorded status of a Pod is left out here."""
    assert set(STATUS) == set(PODS)


def by_type(found):
    """The order of conditions says nothing once they went through a client."""
    return {
        **found,
        "status": {**found["status"], "conditions": sorted(found["status"]["conditions"], key=lambda c: c["type"])},
    }


@pytest.mark.parametrize("case", PODS)
async def test_pod_status_as_recorded(case: str) -> None:
    """A Pod in that state has the recorded metadata, spec and status."""
    body, predicate = PODS[case]
    recorded = STATUS[case]
    async with cluster_as_recorded(enforce_memory=True) as (cluster, session):
        await make(cluster, session, body, ready=False)
        found = await until(cluster, body["metadata"]["name"], predicate)
        if case == "after_oom_in_child":
            await run_exec(cluster, session, ["python3", "-c", "bytearray(10**9)"])
            found = cluster.pod("a")
        elif case == "evicted_ephemeral_storage":
            cluster.evict("facts", "disk", message=recorded["status"]["message"])
            found = await until(cluster, "disk", phase("Failed"))
        elif case == "terminating":
            async with session.delete(path(cluster, "slowstop")) as response:
                assert response.status == 200
            found = cluster.pod("slowstop")
            # The grace period is the Pod's, and nobody waits for it here.
            cluster.delete_behind("slowstop")

    for one in (found, recorded):
        one["metadata"].pop("resourceVersion")
    assert Normal()(by_type(found)) == Normal()(by_type(recorded))


# exec.json


async def run_exec(cluster, session, command, *, pod="a", protocol="v5.channel.k8s.io", stdin=False, tty=False, **more):
    """Open an exec stream as it was recorded; return what came of it."""
    params = [*(("command", word) for word in command), ("container", more.get("container", "sandbox"))]
    params += [("stdin", str(stdin).lower()), ("stdout", "true"), ("stderr", str(not tty).lower())]
    params += [("tty", str(tty).lower())]
    try:
        socket = await session.ws_connect(
            path(cluster, pod, "exec"), params=params, protocols=[protocol], max_msg_size=0, autoclose=True
        )
    except aiohttp.WSServerHandshakeError as error:
        return {"handshake_error": {"status": error.status, "message": error.message}, "frames": []}
    frames = []
    async with socket:
        for channel, text in more.get("sent", ()):
            await socket.send_bytes(bytes((channel,)) + text.encode("latin-1"))
        with anyio.move_on_after(more.get("patience", 30)) as scope:
            if more.get("act"):
                frames.append((await socket.receive()).data)
                frames.append((await socket.receive()).data)
                await more["act"]()
            while (message := await socket.receive()).type is aiohttp.WSMsgType.BINARY:
                frames.append(message.data)
        found = {"negotiated": socket.protocol, "frames": frames}
        found["close_code"] = None if scope.cancelled_caught else socket.close_code
        return found


def channels(frames):
    """Join what each channel says; how it is cut differs from run to run, but an empty message comes first."""
    joined = {}
    for frame in frames:
        joined[frame[0]] = joined.get(frame[0], b"") + frame[1:]
    return joined


def recorded_channels(case):
    joined = {}
    for frame in case["frames"]:
        data = frame["data"]
        data = base64.b64decode(data["base64"]) if isinstance(data, dict) else data.encode()
        joined[frame["channel"]] = joined.get(frame["channel"], b"") + data
    return joined


HANDSHAKES = [name for name, case in EXEC.items() if "handshake_error" in case]
STREAMS = [name for name in EXEC if name not in HANDSHAKES]
NOT_PLAIN = {
    "large_stdout_8MiB",
    "oom_in_child",
    "oom_in_child_memory_events",
    "pod_deleted_mid_stream",
    "image_patched_mid_stream",
    "long_argument_100KiB",
    "long_argument_1MiB",
}


def as_text(found):
    """Status frames as objects, ids numbered."""
    normal = Normal()
    return {channel: normal(json.loads(data)) if channel == 3 else data for channel, data in found.items()}


async def replay(case, cluster, session, **more):
    """Ask a recorded case again and compare everything but times and cuts."""
    recorded = EXEC[case]
    request = recorded["request"]
    command = more.pop("command", request["command"])
    found = await run_exec(
        cluster,
        session,
        command,
        protocol=request["protocol"],
        stdin=request["stdin"],
        tty=request["tty"],
        sent=request["sent"],
        patience=1 if "timed_out_after_seconds" in recorded else 30,
        **more,
    )
    assert found["negotiated"] == recorded["negotiated"]
    assert found["close_code"] == recorded.get("close_code")
    assert found["frames"][0] == b"\x01"
    return found


@pytest.mark.parametrize("case", [name for name in STREAMS if name not in NOT_PLAIN])
async def test_stream_as_recorded(case: str) -> None:
    """An exec stream says what was recorded: output, status, protocol and how the connection ends."""
    async with cluster_as_recorded() as (cluster, session):
        await make(cluster, session, pod("a"))
        found = await replay(case, cluster, session)

        if case == "background_child_detached":  # it is still there when its stream has ended
            left = await run_exec(cluster, session, ["sh", "-c", "grep -l sleep /proc/[0-9]*/comm | wc -l"])
            assert channels(left["frames"])[1] == b"2\n"

    assert as_text(channels(found["frames"])) == as_text(recorded_channels(EXEC[case]))


async def test_large_output_as_recorded() -> None:
    """8 MiB of output arrive whole, in messages of at most 32 KiB and a byte, and then the status."""
    recorded = EXEC["large_stdout_8MiB"]
    async with cluster_as_recorded() as (cluster, session):
        await make(cluster, session, pod("a"))
        found = await replay("large_stdout_8MiB", cluster, session)

    assert sum(len(frame) - 1 for frame in found["frames"]) == recorded["total_bytes"]
    assert max(map(len, found["frames"])) <= 32 * 1024 + 1
    assert found["frames"][-1][1:].decode() == recorded["frames"][-1]["data"]


@pytest.mark.parametrize(("case", "size"), [("long_argument_100KiB", 100 * 1024), ("long_argument_1MiB", 1024 * 1024)])
async def test_long_argument_as_recorded(case: str, size: int) -> None:
    """An argument of 100 KiB works, and one of 1 MiB fails in the words of the container runtime, with exit code 1."""
    async with cluster_as_recorded() as (cluster, session):
        await make(cluster, session, pod("a"))
        found = await replay(case, cluster, session, command=["sh", "-c", ": " + "x" * size])

    assert as_text(channels(found["frames"])) == as_text(recorded_channels(EXEC[case]))


async def test_memory_as_recorded() -> None:
    """A child over the memory limit is killed: exit code 137, one more in its cgroup's count, the Pod as before."""
    async with cluster_as_recorded(enforce_memory=True) as (cluster, session):
        await make(cluster, session, pod("a"))
        before = cluster.pod("a")
        first = await replay("oom_in_child", cluster, session)
        second = await replay("oom_in_child_memory_events", cluster, session)
        after = cluster.pod("a")

    assert as_text(channels(first["frames"])) == as_text(recorded_channels(EXEC["oom_in_child"]))
    assert as_text(channels(second["frames"])) == as_text(recorded_channels(EXEC["oom_in_child_memory_events"]))
    assert after == before


async def test_deletion_in_a_stream_as_recorded() -> None:
    """Deleting a Pod ends its streams with exit code 137, once the grace period is over."""
    async with cluster_as_recorded(timing=Timing(second=0.1)) as (cluster, session):
        await make(cluster, session, pod("a"))

        async def act():
            async with session.delete(path(cluster, "a")) as response:
                assert response.status == 200

        found = await replay("pod_deleted_mid_stream", cluster, session, act=act)

    assert as_text(channels(found["frames"])) == as_text(recorded_channels(EXEC["pod_deleted_mid_stream"]))


async def test_image_change_in_a_stream_as_recorded() -> None:
    """Changing a Pod's image ends its streams with exit code 137."""
    async with cluster_as_recorded(timing=Timing(second=0.1)) as (cluster, session):
        await make(cluster, session, pod("a"))

        async def act():
            await change_image(cluster, session, "a", "docker.io/sandbox/swe:2")

        found = await replay("image_patched_mid_stream", cluster, session, act=act)

    assert as_text(channels(found["frames"])) == as_text(recorded_channels(EXEC["image_patched_mid_stream"]))


async def change_image(cluster, session, name, image):
    patch = {"spec": {"containers": [{"name": "sandbox", "image": image}]}}
    headers = {"Content-Type": "application/strategic-merge-patch+json"}
    async with session.patch(path(cluster, name), data=json.dumps(patch), headers=headers) as response:
        assert response.status == 200


@pytest.mark.parametrize("case", HANDSHAKES)
async def test_handshake_as_recorded(case: str) -> None:
    """A stream that cannot be opened is refused with the recorded status."""
    recorded = EXEC[case]
    bodies = {
        "exec_while_container_waiting": pod("a", image="registry.invalid/none:1"),
        "exec_in_finished_pod": pod("a", ["true"], restartPolicy="Never"),
        "exec_in_pending_pod": pod("a", resources={"requests": {"cpu": "500"}}),
    }
    predicates = {
        "exec_while_container_waiting": waits_for("ImagePullBackOff"),
        "exec_in_finished_pod": phase("Succeeded"),
        "exec_in_pending_pod": lambda found: bool(found["status"].get("conditions")),
    }
    async with cluster_as_recorded() as (cluster, session):
        await make(cluster, session, bodies.get(case, pod("a")), ready=False)
        await until(cluster, "a", predicates.get(case, is_ready))
        found = await run_exec(
            cluster,
            session,
            recorded["request"]["command"],
            protocol=recorded["request"]["protocol"],
            container="other" if case == "no_such_container" else "sandbox",
            pod="other" if case == "no_such_pod" else "a",
        )

    assert found["handshake_error"] == recorded["handshake_error"]


# restart_in_place.json

# A first process that does not handle a signal yet never sees it.
READY = "until grep -q 'SigCgt:.*42..$' /proc/1/status; do :; done"
FIRST_PROCESS = json.loads((FACTS / "restart_in_place.json").read_text())["first_process"]


def summary(event):
    """What was recorded of an event."""
    found = event["object"]
    return {
        "type": event["type"],
        "phase": found["status"]["phase"],
        "image": found["spec"]["containers"][0]["image"],
        "conditions": [[c["type"], c["status"], c.get("reason")] for c in found["status"].get("conditions") or ()],
        "containers": [
            {key: c.get(key) for key in ("image", "ready", "restartCount", "containerID", "state", "lastState")}
            for c in found["status"].get("containerStatuses") or ()
        ],
    }


def distinct(events):
    """Leave out what repeats the event before it: only fields changed that were not recorded."""
    normal = Normal()
    kept = []
    for event in events:
        one = normal({key: value for key, value in event.items() if key not in ("at", "type")})
        if not kept or kept[-1] != one:
            kept.append(one)
    return kept


def rendered(recorded):
    return [{**one, "conditions": [[*c] for c in one["conditions"]]} for one in recorded]


@pytest.mark.parametrize("case", RESTARTS)
async def test_restart_in_place_as_recorded(case: str) -> None:
    """Restarts and image changes in place go through the recorded states, with the recorded back-off."""
    recorded = RESTARTS[case]
    rules = recorded["restart_policy_rules"]
    container = {"restartPolicy": "Never", "restartPolicyRules": rules} if rules else {}
    body = pod(
        f"facts-{case.replace('_', '-')}",
        ["sh", "-c", FIRST_PROCESS],
        restartPolicy=recorded["pod_restart_policy"],
        terminationGracePeriodSeconds=300,  # of the test's short seconds
        container={**container, "volumeMounts": [{"name": "data", "mountPath": "/data"}]},
        volumes=[{"name": "data", "emptyDir": {}}],
    )
    name = body["metadata"]["name"]
    wanted = distinct(rendered(recorded["watch"]))
    timing = Timing(second=0.01, observe=0.2 if rules else 0.0, sandbox=0.001, start=0.001)
    events = []
    async with cluster_as_recorded("default", timing=timing) as (cluster, session):
        unsubscribe = cluster.store.subscribe(
            cluster.store.resource("pods"),
            lambda event: events.append(summary({"type": event.type, "object": event.now.object})),
        )
        await make(cluster, session, body)
        for step in range(4):
            restarts = cluster.pod(name)["status"]["containerStatuses"][0]["restartCount"]
            if step == 0 and recorded["empty_dir_marker_survives"] is not None:
                await run_exec(cluster, session, ["sh", "-c", "touch /marker /data/marker"], pod=name)
            await run_exec(cluster, session, ["sh", "-c", READY], pod=name)
            if "image_patch" in case:
                await change_image(cluster, session, name, f"docker.io/sandbox/swe:{2 - step % 2}")
            if rules or "image_patch" not in case:
                await run_exec(cluster, session, ["sh", "-c", "kill -USR1 1"], pod=name)
            if len(distinct(events)) >= len(wanted) + 2:
                break
            await until(
                cluster,
                name,
                lambda found, restarts=restarts: (
                    is_ready(found) and found["status"]["containerStatuses"][0]["restartCount"] > restarts
                ),
            )
            if step == 0 and recorded["empty_dir_marker_survives"] is not None:
                root = await run_exec(cluster, session, ["test", "-e", "/marker"], pod=name)
                data = await run_exec(cluster, session, ["test", "-e", "/data/marker"], pod=name)
                survives = [json.loads(found["frames"][-1][1:])["status"] == "Success" for found in (root, data)]
                expected = [recorded["root_file_system_marker_survives"], recorded["empty_dir_marker_survives"]]
                assert survives == expected, (root, data)
        unsubscribe()

    first = next(i for i, one in enumerate(events) if normal_start(one) == normal_start(recorded["watch"][0]))
    assert distinct(events[first:])[: len(wanted)] == wanted


def normal_start(event):
    """By what the first recorded event is found among ours."""
    return [len(event["containers"]), event["phase"], [tuple(c[:2]) for c in event["conditions"]]]
