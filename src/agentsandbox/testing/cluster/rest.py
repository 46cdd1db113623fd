# SPDX-License-Identifier: Apache-2.0
"""What requests do to objects: list, get, create, replace, patch and delete."""

from __future__ import annotations

import base64
import json
import secrets
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import attrs

from agentsandbox.testing.cluster import patching, podspec
from agentsandbox.testing.cluster.matching import matcher
from agentsandbox.testing.cluster.replies import Json, Refusal, bad_request, invalid, modified, not_found
from agentsandbox.testing.cluster.store import Resource, Stored

if TYPE_CHECKING:
    from agentsandbox.testing.cluster.cluster import FakeCluster

__all__ = ["Request", "Rest"]

_PAGES_KEPT = 64
_EMPTY: Json = {}
_FIXED = ("uid", "creationTimestamp", "generation", "namespace", "deletionTimestamp", "deletionGracePeriodSeconds")


@attrs.frozen(kw_only=True)
class Request:
    """A request for objects, understood."""

    method: str
    """The HTTP method."""
    resource: Resource
    """What it is about."""
    namespace: str = ""
    """Where; empty is everywhere."""
    name: str = ""
    """Of the one object; empty is all."""
    subresource: str = ""
    """Such as ``status``."""
    query: dict[str, str]
    """The query; of repeated names the last."""
    body: Any = None
    """What came with it, parsed."""
    content_type: str = "application/json"
    """Of the body."""

    @property
    def dry_run(self) -> bool:
        """Whether nothing must be changed."""
        return "All" in (self.query.get("dryRun"), *(_of(self.body, "dryRun") or ()))


def _of(body: Any, key: str) -> Any:
    return body.get(key) if isinstance(body, dict) else None


class Rest:
    """
    Answers such requests.

    Args:
        cluster: Whose objects.

    """

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self._store = cluster.store
        self._pages: OrderedDict[str, tuple[int, list[Stored]]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Rest over {self._store!r}>"

    def answer(self, request: Request) -> tuple[int, bytes]:
        """
        Do what a request asks for.

        Returns:
            The HTTP status and the JSON.

        Raises:
            Refusal: If it is not done.

        """
        if request.method == "GET":
            return 200, self._get(request) if request.name else self._list(request)
        if request.method == "POST":
            return self._create(request)
        if request.method in ("PATCH", "PUT"):
            return 200, self._update(request)
        if request.method == "DELETE":
            return 200, self._delete(request) if request.name else self._delete_all(request)
        raise Refusal(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")

    def _get(self, request: Request) -> bytes:
        return self._store.get(request.resource, request.namespace, request.name).raw()

    def _list(self, request: Request) -> bytes:
        query, resource = request.query, request.resource
        token = query.get("continue")
        limit = int(query.get("limit") or 0)
        if token:
            if token not in self._pages:
                words = "The provided continue parameter is too old to display a consistent list result."
                raise Refusal(410, "Expired", words)
            version, found = self._pages[token]
        else:
            match = matcher(query.get("labelSelector", ""), query.get("fieldSelector", ""))
            found = [one for one in self._store.all(resource, request.namespace) if match(one.object)]
            found.sort(key=lambda one: (one.namespace, one.name))
            version = self._store.version
        meta: Json = {"resourceVersion": str(version)}
        if limit and len(found) > limit:
            rest = found[limit:]
            found = found[:limit]
            token = base64.urlsafe_b64encode(secrets.token_bytes(12)).decode()
            self._pages[token] = (version, rest)
            while len(self._pages) > _PAGES_KEPT:
                self._pages.popitem(last=False)
            meta |= {"continue": token, "remainingItemCount": len(rest)}
        head = {"kind": f"{resource.kind}List", "apiVersion": resource.api_version, "metadata": meta}
        return json.dumps(head)[:-1].encode() + b',"items":[' + b",".join(one.raw() for one in found) + b"]}"

    def _create(self, request: Request) -> tuple[int, bytes]:
        resource, body = request.resource, request.body
        if request.subresource == "eviction":
            return 201, self._evict(request)
        if not isinstance(body, dict) or not isinstance(body.get("metadata"), dict):
            raise bad_request("the object provided is unrecognized (must be of type object)")
        if body.get("kind") not in (None, resource.kind):
            words = f'the object provided is of kind "{body["kind"]}", not "{resource.kind}"'
            raise bad_request(f"{resource.kind} in version {resource.version!r} cannot be handled: {words}")
        meta = dict(body["metadata"])
        if not meta.get("name") and meta.get("generateName"):
            meta["name"] = meta["generateName"] + self._cluster.names.suffix()
        if resource.namespaced:
            if meta.get("namespace", request.namespace) != request.namespace:
                words = "the namespace of the provided object does not match the namespace sent on the request"
                raise bad_request(words)
            meta["namespace"] = request.namespace
        object_: Json = {"apiVersion": resource.api_version, "kind": resource.kind, **body, "metadata": meta}
        podspec.check_name(resource.kind, meta)
        object_ = self._defaults(resource, object_)
        self._cluster.access.admit("CREATE", resource, object_)
        if resource.kind == "Pod":
            podspec.validate(object_, version=self._cluster.version)
        if request.dry_run:
            return 201, self._store.dress(resource, object_, now=self._cluster.clock.stamp()).raw()
        return 201, self._store.create(resource, object_, now=self._cluster.clock.stamp()).raw()

    def _defaults(self, resource: Resource, object_: Json) -> Json:
        if resource.kind == "Pod":
            if not isinstance(object_.get("spec"), dict):
                raise invalid("Pod", str(object_["metadata"]["name"]), [_missing("spec.containers")])
            object_ = podspec.complete(object_)
            if self._cluster.version < (1, 34):  # a server that does not know a field drops it
                for container in object_["spec"].get("containers") or ():
                    container.pop("restartPolicyRules", None)
                    container.pop("restartPolicy", None)
        elif resource.kind == "Namespace":
            name = object_["metadata"]["name"]
            labels = {**(object_["metadata"].get("labels") or {}), "kubernetes.io/metadata.name": name}
            object_ = {**object_, "metadata": {**object_["metadata"], "labels": labels}}
            object_ |= {"spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Active"}}
        elif resource.kind == "Job":
            object_ = self._cluster.jobs.complete(object_)
        return object_

    def _update(self, request: Request) -> bytes:
        resource = request.resource
        stored = self._store.get(resource, request.namespace, request.name)
        before = stored.object
        if request.method == "PUT":
            if not isinstance(request.body, dict):
                raise bad_request("the object provided is unrecognized (must be of type object)")
            after = request.body
        else:
            after = patching.apply(before, request.body, request.content_type)
        meta = after.get("metadata") or {}
        if meta.get("resourceVersion") not in (None, "", before["metadata"]["resourceVersion"]):
            raise modified(resource.plural, stored.name)
        self._store.require(stored, {"uid": meta.get("uid")})
        if meta.get("name") != stored.name:
            raise bad_request("the name of the object does not match the name on the URL")
        meta = {**meta, **{key: before["metadata"][key] for key in _FIXED if key in before["metadata"]}}
        if request.subresource == "status":
            after = {**before, "status": after.get("status") or {}}
        else:
            after = {**after, "metadata": meta}
            if "status" in before:
                after["status"] = before["status"]
        if after.get("spec") == before.get("spec"):
            if "spec" in before:
                after["spec"] = before["spec"]
        elif resource.kind == "Pod":
            podspec.check_update(before, after)
        podspec.check_name(resource.kind, after["metadata"])
        self._cluster.access.admit("UPDATE", resource, after)
        if {**after, "metadata": {**meta, "resourceVersion": ""}} == {
            **before,
            "metadata": {**before["metadata"], "resourceVersion": ""},
        }:
            return stored.raw()  # what changes nothing makes no new version
        if request.dry_run:
            return Stored(resource, after, stored.version).raw()
        new = self._store.replace(stored, after, generation=after.get("spec") is not before.get("spec"))
        if new.object["metadata"].get("deletionTimestamp") and not new.object["metadata"].get("finalizers"):
            self._cluster.released(new)
        return new.raw()

    def _delete(self, request: Request) -> bytes:
        stored = self._store.get(request.resource, request.namespace, request.name)
        options = request.body if isinstance(request.body, dict) else _EMPTY
        self._store.require(stored, options.get("preconditions") or _EMPTY)
        if request.dry_run:
            return stored.raw()
        last = self._cluster.delete(stored, self._grace(request))
        if request.resource.kind == "Pod" or last.object["metadata"].get("deletionTimestamp"):
            return last.raw()
        details = {"name": stored.name, "kind": request.resource.plural, "uid": stored.uid}
        return json.dumps(
            {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}
        ).encode()

    def _delete_all(self, request: Request) -> bytes:
        match = matcher(request.query.get("labelSelector", ""), request.query.get("fieldSelector", ""))
        found = [one for one in self._store.all(request.resource, request.namespace) if match(one.object)]
        if not request.dry_run:
            for stored in found:
                self._cluster.delete(stored, self._grace(request))
        head: Json = {"kind": f"{request.resource.kind}List", "apiVersion": request.resource.api_version}
        head |= {"metadata": {"resourceVersion": str(self._store.version)}}
        return json.dumps(head)[:-1].encode() + b',"items":[' + b",".join(one.raw() for one in found) + b"]}"

    @staticmethod
    def _grace(request: Request) -> int | None:
        given = _of(request.body, "gracePeriodSeconds")
        if given is None and request.query.get("gracePeriodSeconds"):
            given = request.query["gracePeriodSeconds"]
        return None if given is None else int(given)

    def _evict(self, request: Request) -> bytes:
        self._cluster.evict(request.namespace, request.name, by_api=True)
        status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}
        return json.dumps(status).encode()

    def review(self, body: Any) -> Json:
        """Answer a SelfSubjectAccessReview."""
        if not isinstance(body, dict):
            raise bad_request("the object provided is unrecognized (must be of type object)")
        return self._cluster.access.review(body)

    def find(self, group: str, version: str, plural: str) -> Resource:
        """
        Return what a path names.

        Raises:
            Refusal: If the server does not have it.

        """
        resource = self._store.resources.get((group, version, plural))
        if resource is None:
            raise Refusal(404, "NotFound", "the server could not find the requested resource", {})
        return resource

    def pod(self, namespace: str, name: str) -> Stored:
        """
        Return a Pod.

        Raises:
            Refusal: If there is none.

        """
        found = self._store.find(self._store.resource("pods"), namespace, name)
        if found is None:
            raise not_found("pods", name)
        return found


def _missing(field: str) -> tuple[str, str, str]:
    return ("FieldValueRequired", field, "Required value")
