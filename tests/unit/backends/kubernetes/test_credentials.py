# SPDX-License-Identifier: Apache-2.0
"""Who we are to the API server, kept fresh."""

from __future__ import annotations

import base64
import json
import sys
import time
from contextlib import aclosing
from pathlib import Path

import anyio
import pytest
from aiohttp import web

from agentsandbox.backends.kubernetes import credentials
from agentsandbox.backends.kubernetes.api import KubernetesApi
from agentsandbox.backends.kubernetes.credentials import Credential, Credentials, proxy_for
from agentsandbox.errors import ApiUnavailable, ConfigurationError, PermissionDenied

pytestmark = pytest.mark.anyio
PODS = "/api/v1/namespaces/default/pods"
AUTHORITY = """\
-----BEGIN CERTIFICATE-----
MIIBdTCCARugAwIBAgIUHOZ/jrRSd+o6Pp/MQBd6BoyR8xEwCgYIKoZIzj0EAwIw
DzENMAsGA1UEAwwEdGVzdDAgFw0yNjExMjkxOTI0MzZaGA8yMTI2MTEwNTE5MjQz
NlowDzENMAsGA1UEAwwEdGVzdDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABJEJ
Dc1idJhhJ+j4cyrmDYzdK8FbFHhhWb3oVf2y9r3nds0dH1dS5UYTlgiaP3h3tS1b
wsCX6VCQIPnb6z35mqGjUzBRMB0GA1UdDgQWBBSbKq88KJfea1SucxsPV8snWxyR
CDAfBgNVHSMEGDAWgBSbKq88KJfea1SucxsPV8snWxyRCDAPBgNVHRMBAf8EBTAD
AQH/MAoGCCqGSM49BAMCA0gAMEUCIFNt6NqvIZzktcY5CSwXk5IECbCFIfASPYgN
VdfKVWMrAiEAnz17iJFtf1CXN2T7yZprrOxsSY3zVncUQwChCSj9/Co=
-----END CERTIFICATE-----
"""


@pytest.fixture
def anyio_backend():
    """The client library dictates asyncio."""
    return "asyncio"


def status(code, reason, message):
    """A Status as servers send it."""
    return {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message, "details": {}}


async def test_context_and_namespace_can_be_chosen(kubeconfig):
    """The context's namespace counts, else ``default``, unless one is given."""
    config = kubeconfig("https://127.0.0.1:1")
    chosen = []
    for options in ({}, {"context": "other"}, {"context": "other", "namespace": "mine"}):
        api = await KubernetesApi.connect(kubeconfig=config, max_connections=1, **options)
        chosen.append((api.context, api.namespace))
        await api.aclose()

    assert chosen == [("main", "rl"), ("other", "default"), ("other", "mine")]


async def test_service_account_of_the_own_pod_is_used(tmp_path, monkeypatch):
    """Inside a Pod and without a kubeconfig there is a token, which is read again once a minute."""
    for name, text in (("token", "t1\n"), ("ca.crt", AUTHORITY), ("namespace", "mine\n")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(credentials, "_SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setenv("NO_PROXY", "10.96.0.0/12")
    api = await KubernetesApi.connect(max_connections=1)
    held = await api._credentials.current()
    (tmp_path / "token").write_text("t2\n")
    renewed = await api._credentials.renew(held)
    await api.aclose()

    assert (api.context, api.namespace, api.host) == ("in-cluster", "mine", "https://10.96.0.1:443")
    assert (held.authorization, renewed.authorization) == ("Bearer t1", "Bearer t2")
    assert held.renew_at - anyio.current_time() <= 60


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["users"][0].update(user={"exec": {"command": "false", "apiVersion": "v1"}}), "returned 1"),
        (lambda c: c["users"][0].update(user={"exec": {"command": "no-such-plugin", "apiVersion": "v1"}}), "no-such-"),
        (lambda c: c["contexts"].clear(), "name main"),
        (
            lambda c: c["clusters"][0]["cluster"].update({"proxy-url": "socks5://u:p@proxy:1"}),
            "proxy socks5|proxy proxy",
        ),
        (lambda c: c["clusters"][0]["cluster"].update({"certificate-authority": "/no/ca"}), "/no/ca"),
    ],
    ids=["plugin_fails", "no_plugin", "no_context", "socks", "no_ca"],
)
async def test_unusable_kubeconfig_is_named(change, words, kubeconfig):
    """Whatever is wrong with the file is said at the start, as a configuration error."""
    path = kubeconfig("https://127.0.0.1:1")
    config = json.loads(Path(path).read_text())
    change(config)
    Path(path).write_text(json.dumps(config))

    with pytest.raises(ConfigurationError, match=words):
        await KubernetesApi.connect(kubeconfig=path, max_connections=1)


async def test_no_configuration_at_all_names_the_fix(tmp_path, monkeypatch):
    """Neither kubeconfig nor service account: the message says what to give."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    with pytest.raises(ConfigurationError, match="KUBECONFIG"):
        await KubernetesApi.connect(max_connections=1)


def plugin(tmp_path, *, lifetime):
    """An exec plugin that issues ``t1``, ``t2``, … and counts its runs in a file."""
    runs = tmp_path / "runs"
    script = tmp_path / "plugin"
    script.write_text(
        f"#!{sys.executable}\n"
        "import json, time, datetime, pathlib\n"
        f"runs = pathlib.Path({str(runs)!r})\n"
        "n = len(runs.read_text()) + 1 if runs.exists() else 1\n"
        "runs.write_text('x' * n)\n"
        f"lifetime = {lifetime!r}[n - 1]\n"
        "status = {'token': f't{n}'}\n"
        "if lifetime: status['expirationTimestamp'] = datetime.datetime.fromtimestamp(\n"
        "    time.time() + lifetime, datetime.timezone.utc).strftime('%Y-%m-%dT%H:%M:%S.%fZ')\n"
        "print(json.dumps({'apiVersion': 'client.authentication.k8s.io/v1', 'kind': 'ExecCredential',\n"
        "                  'status': status}))\n"
    )
    script.chmod(0o755)
    return {"exec": {"command": str(script), "apiVersion": "client.authentication.k8s.io/v1"}}, runs


def token_gate(accepted, seen, *, websocket=False):
    """A handler that knows only some tokens."""

    async def handler(request):
        token = request.headers["Authorization"].removeprefix("Bearer ")
        seen.append((request.path.rsplit("/", 1)[-1], token))
        if token not in accepted:
            return web.json_response(status(401, "Unauthorized", "Unauthorized"), status=401)
        if request.path.endswith("/exec"):
            ws = web.WebSocketResponse()
            await ws.prepare(request)
            await ws.close()
            return ws
        if request.query.get("watch"):
            return web.Response(text='{"type":"BOOKMARK"}\n')
        return web.json_response({})

    return handler


async def test_p52_rejected_token_is_renewed_once_for_everybody(tmp_path, connected):
    """200 calls, a watch and a handshake are rejected at once: the plugin runs once more, and none of them fails."""
    user, runs = plugin(tmp_path, lifetime=[None, None])
    accepted, seen = {"t1"}, []
    async with connected(token_gate(accepted, seen), user=user, max_connections=64) as api:
        await api.request("GET", PODS)
        accepted.symmetric_difference_update({"t1", "t2"})

        async def handshake():
            await (await api.websocket(PODS + "/exec", params={}, protocols=(), heartbeat=None, max_size=0)).close()

        async def watch():
            async with aclosing(api.watch(PODS, params={})) as events:
                assert [event async for event in events] == [{"type": "BOOKMARK"}]

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            tasks.start_soon(handshake)
            for _ in range(200):
                tasks.start_soon(api.request, "GET", PODS)
        seen.clear()
        await handshake()

    assert runs.read_text() == "xx"
    assert seen == [("exec", "t2")]


async def test_p52_token_is_renewed_before_it_expires(tmp_path, connected):
    """A token that is about to expire is replaced without the server ever having to reject it."""
    user, runs = plugin(tmp_path, lifetime=[0.001, 3600])
    accepted, seen = {"t2"}, []
    async with connected(token_gate(accepted, seen), user=user) as api:
        await api.request("GET", PODS)
        await api.request("GET", PODS)

    assert runs.read_text() == "xx"
    assert [token for _, token in seen] == ["t2", "t2"]


async def test_p52_server_that_rejects_everything_is_a_permission_error(tmp_path, connected):
    """A token that is rejected again right after its renewal ends as PermissionDenied, without a storm of plugins."""
    user, runs = plugin(tmp_path, lifetime=[None] * 50)
    denied = []
    async with connected(token_gate(set(), []), user=user) as api:

        async def call():
            try:
                await api.request("GET", PODS)
            except PermissionDenied as error:
                denied.append(str(error))

        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(call)

    assert denied == ["Unauthorized"] * 20
    assert runs.read_text() == "xx"


async def test_p52_cancelled_renewer_does_not_fail_the_others():
    """When the caller that renews is cancelled, those that wait get the credential all the same."""
    release, loads = anyio.Event(), []

    async def load():
        loads.append(1)
        await release.wait()
        return Credential(authorization="t2")

    stale = Credential(authorization="t1")
    shared = Credentials(stale, load)
    got = []

    async def wait():
        got.append((await shared.renew(stale)).authorization)

    async with anyio.create_task_group() as tasks, anyio.create_task_group() as doomed:
        doomed.start_soon(shared.renew, stale)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        doomed.cancel_scope.cancel()
        release.set()

    assert (got, len(loads), repr(shared)) == (["t2"], 1, "<Credentials renewals=1>")


async def test_p52_failing_plugin_is_unavailable_and_an_unexpired_token_goes_on():
    """While the old token is good a failing renewal is no reason to fail; afterwards it is, with the plugin's words."""
    loads = []

    async def load():
        loads.append(1)
        raise ConfigurationError("exec: process returned 1. no network")

    now = anyio.current_time()
    aging = Credential(authorization="t1", renew_at=now - 1, expires_at=now + 100)
    shared = Credentials(aging, load)

    assert await shared.current() is aging
    assert await shared.current() is aging
    assert len(loads) == 1
    assert repr(shared) == "<Credentials renewals=0 failing>"
    expired = Credentials(Credential(authorization="t1", renew_at=now - 2, expires_at=now - 1), load)
    with pytest.raises(ApiUnavailable, match="no network"):
        await expired.current()


async def test_expiry_is_read_from_a_token_that_tells_it(kubeconfig):
    """A JSON web token says itself when it expires, whoever issued it."""
    claims = base64.urlsafe_b64encode(json.dumps({"exp": time.time() + 1000}).encode()).decode().rstrip("=")
    config = kubeconfig("https://127.0.0.1:1", {"token": f"e30.{claims}.x"})
    api = await KubernetesApi.connect(kubeconfig=config, max_connections=1)
    held = await api._credentials.current()
    await api.aclose()

    now = anyio.current_time()
    assert (935 < held.renew_at - now < 941, 990 < held.expires_at - now < 1001) == (True, True)


@pytest.mark.parametrize(
    ("host", "configured", "environ", "proxy"),
    [
        ("https://k8s.example:6443", "http://p:1", {}, "http://p:1"),
        ("https://k8s.example:6443", None, {"HTTPS_PROXY": "http://p:2"}, "http://p:2"),
        ("https://k8s.example:6443", None, {"https_proxy": "http://p:2", "NO_PROXY": ".example"}, None),
        ("https://k8s.example:6443", None, {"https_proxy": "http://p:2", "NO_PROXY": "ple"}, "http://p:2"),
        ("https://10.96.0.1:443", None, {"HTTPS_PROXY": "http://p:2", "NO_PROXY": "10.0.0.0/8"}, None),
        ("https://11.96.0.1:443", None, {"HTTPS_PROXY": "http://p:2", "NO_PROXY": "10.0.0.0/8"}, "http://p:2"),
        ("https://127.0.0.1:6443", None, {"HTTPS_PROXY": "http://p:2"}, None),
        ("http://k8s.example", None, {"HTTPS_PROXY": "http://p:2"}, None),
        ("https://k8s.example", None, {"HTTPS_PROXY": "http://p:2", "NO_PROXY": "*"}, None),
    ],
)
def test_proxy_is_chosen_as_kubectl_does(host, configured, environ, proxy):
    """The kubeconfig's proxy comes first, then the environment's unless NO_PROXY names the host or its network."""
    assert proxy_for(host, configured, environ) == proxy
