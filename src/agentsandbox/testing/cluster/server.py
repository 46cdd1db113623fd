# SPDX-License-Identifier: Apache-2.0
"""The HTTP side: paths, credentials, faults, discovery and logs."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import anyio
from aiohttp import web

from agentsandbox.testing.cluster import logs
from agentsandbox.testing.cluster.access import verb_of
from agentsandbox.testing.cluster.faults import RequestFault, RequestRecord
from agentsandbox.testing.cluster.replies import Json, Refusal, bad_request
from agentsandbox.testing.cluster.rest import Request
from agentsandbox.testing.cluster.watching import watch

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

    from agentsandbox.testing.cluster.cluster import FakeCluster
    from agentsandbox.testing.cluster.store import Resource

__all__ = ["ApiServer"]

_LONGEST_LINE = 4 * 1024 * 1024
_LARGEST_BODY = 64 * 1024 * 1024
_PATH = re.compile(
    r"^/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+)/(?P<version>[^/]+))"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/[^/]+))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[^/]+))?$"
)
_CLUSTER_SUBRESOURCES = ("status", "finalize")
FLOW_SCHEMA = "f4f73789-5834-4e73-a785-8730536d3f39"


class ApiServer:
    """
    The server.

    Args:
        cluster: Whose.

    """

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self._runner: web.AppRunner | None = None
        self.port = 0
        """The port that it listens on."""

    def __repr__(self) -> str:
        return f"<ApiServer on port {self.port or 'none'}>"

    async def start(self, tls: ssl.SSLContext | None, *, port: int = 0) -> None:
        """Listen on 127.0.0.1; 0 is any port."""
        app = web.Application(client_max_size=_LARGEST_BODY)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            app,
            shutdown_timeout=0.05,
            access_log=None,
            max_line_size=_LONGEST_LINE,
            max_field_size=_LONGEST_LINE,
            keepalive_timeout=600,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=tls, backlog=8192, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close every connection and listen no more."""
        if self._runner is not None:
            with anyio.move_on_after(10, shield=True):
                await self._runner.cleanup()
            self._runner = None

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        cluster = self._cluster
        record = RequestRecord(
            at=anyio.current_time(),
            method=http.method,
            path=http.path,
            query=tuple((key, value) for key, value in http.rel_url.query.items()),
            authorization=http.headers.get("Authorization", ""),
        )
        cluster.requests.append(record)
        headers = {
            "Date": cluster.clock.date(),
            "Content-Type": "application/json",
            "X-Kubernetes-Pf-Flowschema-Uid": FLOW_SCHEMA,
        }
        fault = cluster.faults.take_request(http.method, http.path)
        try:
            if fault is not None:
                answer = await self._suffer(fault, http, headers)
                if answer is not None:
                    record.status = answer.status
                    return answer
            response = await self._route(http, record, headers)
        except Refusal as refusal:
            response = _reply(refusal.code, refusal.status, {**headers, **refusal.headers})
        if fault is not None and fault.cut == "after":
            return _cut(http)
        record.status = response.status
        return response

    async def _suffer(self, fault: RequestFault, http: web.Request, headers: dict[str, str]) -> web.Response | None:
        if fault.stalled is not None:
            await fault.stalled.wait()
        if fault.delay:
            await anyio.sleep(fault.delay)
        if fault.cut == "before":
            return _cut(http)
        if fault.status is None:
            return None
        if isinstance(fault.body, str):
            text = {**headers, "Content-Type": "text/plain; charset=utf-8", **fault.headers}
            return web.Response(status=fault.status, body=fault.body.encode(), headers=text)
        return _reply(fault.status, fault.body or {}, {**headers, **fault.headers})

    async def _route(self, http: web.Request, record: RequestRecord, headers: dict[str, str]) -> web.StreamResponse:
        cluster = self._cluster
        cluster.access.authenticate(record.authorization)
        if (found := self._discovery(http.path)) is not None:
            if isinstance(found, str):
                return web.Response(text=found, headers={**headers, "Content-Type": "text/plain"})
            return _reply(200, found, headers)
        match = _PATH.match(http.path)
        if match is None:
            raise Refusal(404, "NotFound", "the server could not find the requested resource", {})
        body = await _body(http, record)
        parts = match.groupdict()
        group, version = parts["group"] or "", parts["core"] or parts["version"]
        if parts["plural"] == "selfsubjectaccessreviews" and http.method == "POST":
            return _reply(201, cluster.rest.review(body), headers)
        plural, namespace = parts["plural"], parts["namespace"] or ""
        name, sub = parts["name"] or "", parts["sub"] or ""
        if namespace and plural in _CLUSTER_SUBRESOURCES and not name:  # /namespaces/x/status
            plural, name, sub, namespace = "namespaces", namespace, plural, ""
        resource = cluster.rest.find(group, version, plural)
        query = dict(http.rel_url.query)
        watching = query.get("watch") in ("true", "1") and http.method == "GET"
        verb = verb_of(http.method, named=bool(name) and not (watching and not sub), watch=watching)
        cluster.access.authorize(verb, group, plural + (f"/{sub}" if sub else ""), namespace, name)
        if sub == "exec" and resource.kind == "Pod":
            return await cluster.streams.serve(http, namespace, name, headers)
        if sub == "log" and resource.kind == "Pod":
            return await logs.serve(cluster, http, namespace, name, headers)
        request = Request(
            method=http.method,
            resource=resource,
            namespace=namespace,
            name=name,
            subresource=sub,
            query=query,
            body=body,
            content_type=http.content_type,
        )
        if watching:
            return await watch(cluster, http, request, headers)
        status, raw = cluster.rest.answer(request)
        return web.Response(status=status, body=raw, headers=headers)

    def _discovery(self, path: str) -> Json | str | None:
        major, minor = self._cluster.version
        if path in ("/healthz", "/livez", "/readyz"):
            return "ok"
        if path == "/version":
            return {
                "major": str(major),
                "minor": str(minor),
                "gitVersion": f"v{major}.{minor}.2",
                "platform": "linux/amd64",
            }
        resources = list(self._cluster.store.resources.values())
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
        if path == "/apis":
            groups: dict[str, list[str]] = {"authorization.k8s.io": ["v1"]}
            for one in resources:
                if one.group and one.version not in groups.setdefault(one.group, []):
                    groups[one.group].append(one.version)
            return {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [_group(name, versions) for name, versions in groups.items()],
            }
        if (asked := re.fullmatch(r"/apis/([^/]+)", path)) is not None:
            served_as = list(dict.fromkeys(one.version for one in resources if one.group == asked[1]))
            if not served_as:
                raise Refusal(404, "NotFound", "the server could not find the requested resource", {})
            return {"kind": "APIGroup", "apiVersion": "v1", **_group(asked[1], served_as)}
        found = re.fullmatch(r"/api/(v1)|/apis/([^/]+)/([^/]+)", path)
        if found is None:
            return None
        group, version = found[2] or "", found[1] or found[3]
        served = [one for one in resources if (one.group, one.version) == (group, version)]
        if not served and group != "authorization.k8s.io":
            raise Refusal(404, "NotFound", "the server could not find the requested resource", {})
        name = f"{group}/{version}" if group else version
        listed = [entry for one in served for entry in _entries(one)]
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": name, "resources": listed}


def _entries(resource: Resource) -> list[Json]:
    verbs = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
    base = {"singularName": resource.kind.lower(), "namespaced": resource.namespaced, "kind": resource.kind}
    entries = [{"name": resource.plural, **base, "verbs": verbs, "shortNames": list(resource.short)}]
    subresources = {"exec": ["create", "get"], "log": ["get"], "eviction": ["create"]}
    subresources["status"] = ["get", "patch", "update"]
    for name, its in subresources.items():
        if resource.kind == "Pod" or name == "status":
            entries.append({"name": f"{resource.plural}/{name}", **base, "verbs": its})
    return entries


def _group(name: str, versions: list[str]) -> Json:
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


def _reply(status: int, body: Json, headers: Mapping[str, str]) -> web.Response:
    return web.Response(status=status, body=json.dumps(body, separators=(",", ":")).encode(), headers=headers)


def _cut(http: web.Request) -> web.Response:
    if http.transport is not None:
        http.transport.abort()
    return web.Response(status=599)


async def _body(http: web.Request, record: RequestRecord) -> Any:
    if not http.can_read_body:
        return None
    data = await http.read()
    if not data:
        return None
    try:
        record.body = json.loads(data)
    except ValueError:
        raise bad_request("the request body is not JSON") from None
    return record.body
