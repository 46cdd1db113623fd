# SPDX-License-Identifier: Apache-2.0
"""The cluster of the recorded facts as the double has it, and what is needed to ask it the same again."""

from __future__ import annotations

import json
import re
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import anyio

from agentsandbox.testing.cluster import FakeCluster, Image, NodeSpec

FACTS = Path(__file__).parent / "facts"
SWE = "docker.io/sandbox/swe:1"
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
HEX = re.compile(r"[0-9a-f]{64}")
TIME = re.compile(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d(Z|\+00:00)")
ADDRESS = re.compile(r"10\.244\.\d+\.\d+")
NIL_UUID = "00000000-0000-0000-0000-000000000000"


def load(name):
    return json.loads((FACTS / f"{name}.json").read_text())["cases"]


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


def waits_for(reason):
    return lambda found: waiting_reason(found) == reason


def waiting_reason(found):
    statuses = found["status"].get("containerStatuses") or [{}]
    return ((statuses[0].get("state") or {}).get("waiting") or {}).get("reason")


def phase(name):
    return lambda found: found["status"]["phase"] == name


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


async def change_image(cluster, session, name, image):
    patch = {"spec": {"containers": [{"name": "sandbox", "image": image}]}}
    headers = {"Content-Type": "application/strategic-merge-patch+json"}
    async with session.patch(path(cluster, name), data=json.dumps(patch), headers=headers) as response:
        assert response.status == 200
