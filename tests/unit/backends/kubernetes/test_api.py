# SPDX-License-Identifier: Apache-2.0
"""Requests, watches and websockets as raw JSON."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from contextlib import aclosing
from email.utils import formatdate

import anyio
import pytest
from aiohttp import WSMsgType, web

from agentsandbox.backends.kubernetes.api import KubernetesApi
from agentsandbox.backends.kubernetes.manifests import exec_params
from agentsandbox.errors import (
    ApiUnavailable,
    ConfigurationError,
    Conflict,
    InvalidObject,
    NotFound,
    PermissionDenied,
    ProtocolError,
    Throttled,
)

pytestmark = pytest.mark.anyio
PODS = "/api/v1/namespaces/default/pods"


@pytest.fixture
def anyio_backend():
    """The client library dictates asyncio."""
    return "asyncio"


def status(code, reason, message):
    """A Status as servers send it."""
    return {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message, "details": {}}


async def test_request_sends_json_and_returns_json(connected):
    """Query, body, content type and credentials arrive; the answer is the server's JSON, untouched."""
    seen = {}

    async def handler(request):
        seen.update(query=request.query_string, type=request.headers["Content-Type"], body=await request.json())
        seen.update(auth=request.headers["Authorization"], method=request.method, path=request.path)
        return web.json_response({"kind": "Pod", "x": [1]})

    async with connected(handler) as api:
        answer = await api.request(
            "PATCH",
            PODS + "/a",
            params={"dryRun": "All", "watch": None, "force": True},
            body={"spec": {}},
            content_type="application/merge-patch+json",
        )

        assert answer == {"kind": "Pod", "x": [1]}
        assert repr(api) == "<KubernetesApi main/rl max_connections=8 open>"
    assert seen == {
        "query": "dryRun=All&force=true",
        "type": "application/merge-patch+json",
        "body": {"spec": {}},
        "auth": "Bearer t0",
        "method": "PATCH",
        "path": PODS + "/a",
    }
    assert repr(api) == "<KubernetesApi main/rl max_connections=8 closed>"


async def test_text_returns_a_log_as_it_is(connected):
    """A log is text, with what is not UTF-8 replaced."""

    async def handler(_):
        return web.Response(body=b"line 1\n\xff\n")

    async with connected(handler) as api:
        assert await api.text("GET", PODS + "/a/log") == "line 1\n�\n"


async def test_request_raises_what_the_server_says(connected):
    """A throttle carries the wait that the server asked for."""

    async def handler(_):
        return web.json_response(status(429, "TooManyRequests", "slow"), status=429, headers={"Retry-After": "4"})

    async with connected(handler) as api:
        with pytest.raises(Throttled, match="slow") as caught:
            await api.request("POST", PODS, body={})

    assert caught.value.retry_after == 4.0


async def test_request_is_sent_once(connected):
    """Only callers know what may be repeated."""
    calls = []

    async def handler(request):
        calls.append(request.method)
        return web.Response(status=503, text="not ready")

    async with connected(handler) as api:
        for method in ("GET", "POST", "DELETE"):
            with pytest.raises(ApiUnavailable, match="not ready"):
                await api.request(method, PODS)

    assert calls == ["GET", "POST", "DELETE"]


async def test_p41_timed_out_create_is_ambiguous(connected):
    """A create without an answer may have happened; a list without one has not changed anything."""

    async def handler(request):
        await request.read()
        await anyio.sleep(60)

    async with connected(handler) as api:
        with pytest.raises(ApiUnavailable, match="no answer in time") as write:
            await api.request("POST", PODS, body={}, timeout=0.1)
        with pytest.raises(ApiUnavailable) as read:
            await api.request("GET", PODS, timeout=0.1)

    assert (write.value.ambiguous, read.value.ambiguous) == (True, False)


async def test_p41_dropped_create_is_ambiguous_and_a_refused_connection_is_not(connected, kubeconfig):
    """A connection that broke after the request leaves the outcome open; one that was never made does not."""

    async def handler(request):
        await request.read()
        request.transport.abort()
        return web.Response()

    async with connected(handler) as api:
        with pytest.raises(ApiUnavailable) as dropped:
            await api.request("POST", PODS, body={})
        host = api.host
    api = await KubernetesApi.connect(kubeconfig=kubeconfig(host), max_connections=1)
    with pytest.raises(ApiUnavailable, match=r"cannot connect to 127\.0\.0\.1:\d+") as refused:
        await api.request("POST", PODS, body={})
    await api.aclose()

    assert (dropped.value.ambiguous, refused.value.ambiguous) == (True, False)


async def test_answer_that_is_no_json_object_is_the_servers_fault(connected):
    """A login page with status 200 is no result, and neither is a redirect to one."""
    answers = [web.Response(text="<html>login"), web.json_response([1]), web.Response(status=302, text="login")]

    async def handler(_):
        return answers.pop(0)

    async with connected(handler) as api:
        for words in ("<html>login", "not a JSON object", "login"):
            with pytest.raises(ApiUnavailable, match=words):
                await api.request("GET", PODS)


async def test_clock_offset_is_read_from_answers(connected):
    """The server's clock against ours is known after the first answer."""

    async def handler(_):
        return web.json_response({}, headers={"Date": formatdate(time.time() + 3600, usegmt=True)})

    async with connected(handler) as api:
        assert api.clock_offset is None
        await api.request("GET", "/version")

        assert 3590 < api.clock_offset < 3610


async def test_watch_yields_events_however_they_are_cut(connected):
    """Lines are put together from chunks of any shape; a cut event is an error and never half an event."""
    text = b'{"type":"ADDED","object":{"a":"\xc3\xa4"}}\n{"type":"BOOKMARK","object":{}}\n'
    tail = [b""]

    async def handler(request):
        assert request.query["watch"] == "true"
        response = web.StreamResponse()
        await response.prepare(request)
        for i in range(len(text)):
            await response.write(text[i : i + 1])
        if tail[0]:
            await response.write(tail[0])
        return response

    async with connected(handler) as api:
        async with aclosing(api.watch(PODS, params={"resourceVersion": "5"})) as events:
            got = [event async for event in events]
        tail[0] = b'{"type":"MODI'
        async with aclosing(api.watch(PODS, params={})) as events:
            with pytest.raises(ApiUnavailable, match="cut within an event"):
                async for _ in events:
                    pass

    assert got == [{"type": "ADDED", "object": {"a": "ä"}}, {"type": "BOOKMARK", "object": {}}]


async def test_watch_raises_refusals_and_breaks(connected):
    """A refused watch has its error, and so has one whose connection breaks."""

    async def handler(request):
        if request.query.get("resourceVersion") == "5":
            return web.json_response(status(410, "Expired", "too old resource version: 5 (900)"), status=410)
        if request.query.get("resourceVersion") == "6":
            return web.json_response(status(403, "Forbidden", "you cannot watch pods"), status=403)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"type":"BOOKMARK"}\n')
        request.transport.abort()
        return response

    async with connected(handler) as api:
        async with aclosing(api.watch(PODS, params={"resourceVersion": "5"})) as events:
            with pytest.raises(Conflict, match="too old") as caught:
                await anext(events)
        async with aclosing(api.watch(PODS, params={"resourceVersion": "6"})) as events:
            with pytest.raises(PermissionDenied, match="cannot watch"):
                await anext(events)
        async with aclosing(api.watch(PODS, params={})) as events:
            assert await anext(events) == {"type": "BOOKMARK"}
            with pytest.raises(ApiUnavailable, match="connection broke"):
                await anext(events)

    assert (caught.value.status, caught.value.reason) == (410, "Expired")


@pytest.mark.parametrize(
    ("code", "body", "error", "words"),
    [
        (400, status(400, "BadRequest", "container nope is not valid for pod x1"), InvalidObject, "container nope"),
        (400, status(400, "BadRequest", "pod x1 does not have a host assigned"), InvalidObject, "host assigned"),
        (404, status(404, "NotFound", 'pods "none" not found'), NotFound, "not found"),
        (403, status(403, "Forbidden", "cannot create pods/exec"), PermissionDenied, "pods/exec"),
        (403, "", InvalidObject, "none of v5.channel.k8s.io, v4.channel.k8s.io"),
        (500, 'container not found ("sandbox")', ApiUnavailable, "container not found"),
        (500, "error dialing backend: EOF", ApiUnavailable, "error dialing backend"),
        (200, "hello", ProtocolError, "handshake"),
    ],
    ids=["container", "pending", "no_pod", "rbac", "protocol", "waiting", "kubelet", "no_upgrade"],
)
async def test_p12_refused_handshakes_keep_their_reason_and_hide_the_command(code, body, error, words, connected):
    """What the server says reaches the caller; the command line reaches neither message nor cause."""

    async def handler(_):
        return web.Response(status=code, text=body if isinstance(body, str) else json.dumps(body))

    async with connected(handler) as api:
        with pytest.raises(error, match=words) as caught:
            await api.websocket(
                PODS + "/x1/exec",
                params=exec_params(["sh", "-c", "echo hunter2"]),
                protocols=("v5.channel.k8s.io", "v4.channel.k8s.io"),
                heartbeat=None,
                max_size=1 << 20,
            )

    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


async def test_websocket_negotiates_and_sends_the_whole_query(connected):
    """The protocol that the server chose is known, and repeated parameters arrive in order."""
    seen = []

    async def handler(request):
        seen.append((request.query.getall("command"), request.query["stdin"], request.headers["Authorization"]))
        ws = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await ws.prepare(request)
        await ws.send_bytes(b"\x01" + b"x" * 5_000_000)
        await ws.close()
        return ws

    async with connected(handler) as api:
        stream = await api.websocket(
            PODS + "/a/exec",
            params=exec_params(["sh", "-c", "a b&c=d+ü"], stdin=True),
            protocols=("v5.channel.k8s.io", "v4.channel.k8s.io"),
            heartbeat=20,
            max_size=16 << 20,
        )
        message = await stream.receive()
        await stream.close()

    assert stream.protocol == "v4.channel.k8s.io"
    assert (message.type, len(message.data)) == (WSMsgType.BINARY, 5_000_001)
    assert seen == [(["sh", "-c", "a b&c=d+ü"], "true", "Bearer t0")]


async def test_p11_websockets_are_sized_by_the_caller(connected):
    """150 websockets are open at once where 150 were asked for, and calls go on beside them."""
    together, opened = anyio.Event(), []

    async def handler(request):
        if request.path.endswith("/exec"):
            ws = web.WebSocketResponse()
            await ws.prepare(request)
            opened.append(1)
            if len(opened) == 150:
                together.set()
            await together.wait()
            await ws.close()
            return ws
        return web.json_response({"open": len(opened)})

    async with connected(handler, max_connections=150) as api:

        async def one():
            stream = await api.websocket(PODS + "/a/exec", params={}, protocols=(), heartbeat=None, max_size=0)
            await stream.receive()
            await stream.close()

        async with anyio.create_task_group() as tasks:
            for _ in range(150):
                tasks.start_soon(one)
            with anyio.fail_after(20):
                await together.wait()
            assert await api.request("GET", PODS) == {"open": 150}


def limited(soft, hard, need):
    """Ask in a process of its own, whose limits can be lowered, for that many connections."""
    code = (
        "import asyncio, resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "from agentsandbox.backends.kubernetes.api import KubernetesApi\n"
        "try:\n"
        f"    asyncio.run(KubernetesApi.connect(kubeconfig='/nonexistent/config', max_connections={need}))\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_p11_too_few_files_are_refused_before_anything_is_created():
    """Where the hard limit is too low, the error names both numbers."""
    said = limited(128, 128, 500)

    assert "ConfigurationError 500 connections need 756 open files, and this process may open 128" in said


def test_p11_soft_limit_of_files_is_raised():
    """Where only the soft limit is too low, it is raised to what is needed."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    said = limited(256, 1024 if hard == resource.RLIM_INFINITY or hard > 1024 else hard, 500)

    assert said.splitlines()[-1] == "756"


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_trio_is_refused(anyio_backend):
    """The client library knows asyncio only, and the error says so."""
    with pytest.raises(ConfigurationError, match="asyncio"):
        await KubernetesApi.connect(max_connections=1)


def test_missing_client_library_names_the_fix():
    """Without kubernetes-asyncio everything else can be imported, and connecting says what to install."""
    code = (
        "import sys\n"
        "sys.modules['kubernetes_asyncio'] = None\n"
        "sys.modules['aiohttp'] = None\n"
        "import asyncio\n"
        "from agentsandbox.backends.kubernetes.api import KubernetesApi\n"
        "import agentsandbox.backends.kubernetes.watch, agentsandbox.backends.kubernetes.conditions\n"
        "try:\n"
        "    asyncio.run(KubernetesApi.connect(max_connections=1))\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert said.startswith(
        "ConfigurationError backend 'kubernetes' needs kubernetes-asyncio: pip install kubernetes-as"
    )


def test_client_library_is_imported_late():
    """Importing the backend's modules does not import the client library."""
    code = (
        "import sys, agentsandbox.backends.kubernetes.api\n"
        "print([m for m in ('kubernetes_asyncio', 'aiohttp') if m in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert said.strip() == "[]"


async def test_calls_and_websockets_go_through_the_proxy(serving, kubeconfig):
    """With proxy-url the server is reached through it."""
    seen = []

    async def proxy(request):
        seen.append(str(request.url.host))
        if "exec" in request.path:
            return web.Response(status=404, text="gone")
        return web.json_response({"via": "proxy"})

    async with serving(proxy) as address:
        config = kubeconfig("http://k8s.example", **{"proxy-url": address})
        api = await KubernetesApi.connect(kubeconfig=config, max_connections=1)
        answer = await api.request("GET", "/version")
        with pytest.raises(NotFound):
            await api.websocket("/exec", params={}, protocols=(), heartbeat=None, max_size=0)
        await api.aclose()

    assert answer == {"via": "proxy"}
    assert seen == ["k8s.example", "k8s.example"]
