# SPDX-License-Identifier: Apache-2.0
"""Who may do what: tokens, roles, admission, Pod security and quotas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from agentsandbox.testing.cluster.podspec import quantity, requests_of
from agentsandbox.testing.cluster.replies import Json, Refusal, forbidden

if TYPE_CHECKING:
    from agentsandbox.testing.cluster.store import Resource, Store

__all__ = ["Access", "Admission", "Rule", "verb_of"]

Admission = Callable[[str, Json], "str | None"]
"""Given the operation (``CREATE`` or ``UPDATE``) and the object, returns the words of a refusal, or ``None``."""

USER = "system:serviceaccount:rl:trainer"


@attrs.frozen
class Rule:
    """What a role allows."""

    groups: tuple[str, ...]
    """API groups; the core one is empty, ``*`` is every one."""
    resources: tuple[str, ...]
    """Resources as ``pods`` or ``pods/exec``; ``*`` is every one."""
    verbs: tuple[str, ...]
    """Verbs; ``*`` is every one."""

    def allows(self, verb: str, group: str, resource: str) -> bool:
        """Return whether a request is covered."""
        return all(
            "*" in allowed or asked in allowed
            for allowed, asked in ((self.verbs, verb), (self.groups, group), (self.resources, resource))
        )


def verb_of(method: str, *, named: bool, watch: bool) -> str:
    """Return the verb that roles have for a request."""
    if method in ("GET", "HEAD"):
        return "get" if named else "watch" if watch else "list"
    if method == "DELETE":
        return "delete" if named else "deletecollection"
    return {"POST": "create", "PUT": "update", "PATCH": "patch"}.get(method, method.lower())


class Access:
    """
    What is allowed in the cluster. At first, everything is.

    Args:
        store: The objects; quotas and namespaces are looked up there.
        version: Of the server: from 1.35 on, opening an exec stream needs ``create`` on ``pods/exec`` beside ``get``.

    """

    def __init__(self, store: Store, *, version: tuple[int, int]) -> None:
        self.tokens: set[str] | None = None
        """The tokens that are accepted; ``None`` is every one, and none at all."""
        self.rules: list[Rule] | None = None
        """What the roles allow; ``None`` is everything."""
        self.denied: list[Rule] = []
        """What is denied all the same."""
        self.webhooks: dict[str, Admission] = {}
        """Admission webhooks by name."""
        self._store = store
        self._version = version

    def __repr__(self) -> str:
        rules = "everything" if self.rules is None else f"{len(self.rules)} rules"
        return f"<Access [{rules}, {len(self.denied)} denied, {len(self.webhooks)} webhooks]>"

    def use_role(self, role: Mapping[str, Any]) -> None:
        """Allow what a Role or ClusterRole allows, and nothing else."""
        self.rules = [
            Rule(tuple(rule.get("apiGroups") or ()), tuple(rule.get("resources") or ()), tuple(rule.get("verbs") or ()))
            for rule in role.get("rules") or ()
        ]

    def deny(self, verb: str, resource: str, *, group: str = "") -> None:
        """Deny something whatever the roles say, such as ``deny("create", "pods/exec")``."""
        self.denied.append(Rule((group,), (resource,), (verb,)))

    def allowed(self, verb: str, group: str, resource: str) -> bool:
        """Return whether roles allow a request."""
        if any(rule.allows(verb, group, resource) for rule in self.denied):
            return False
        return self.rules is None or any(rule.allows(verb, group, resource) for rule in self.rules)

    def authenticate(self, header: str) -> None:
        """
        Look at a token.

        Raises:
            Refusal: With code 401.

        """
        if self.tokens is not None and header.removeprefix("Bearer ") not in self.tokens:
            raise Refusal(401, "Unauthorized", "Unauthorized")

    def authorize(self, verb: str, group: str, resource: str, namespace: str, name: str) -> None:
        """
        Ask the roles.

        Raises:
            Refusal: With code 403.

        """
        plural, _, subresource = resource.partition("/")
        verbs = [verb]
        if resource == "pods/exec" and verb == "get" and self._version >= (1, 35):
            verbs.append("create")  # opening a websocket is a GET, which servers no longer trust to be harmless
        for needed in verbs:
            if not self.allowed(needed, group, resource):
                place = f' in the namespace "{namespace}"' if namespace else " at the cluster scope"
                what = f'User "{USER}" cannot {needed} resource "{resource}" in API group "{group}"{place}'
                raise forbidden(plural, name, what, group=group)
        del subresource

    def review(self, body: Json) -> Json:
        """Answer a SelfSubjectAccessReview."""
        asked = (body.get("spec") or {}).get("resourceAttributes") or {}
        resource = str(asked.get("resource", "*"))
        if asked.get("subresource"):
            resource += "/" + asked["subresource"]
        yes = self.allowed(str(asked.get("verb", "*")), str(asked.get("group", "")), resource)
        return {
            "kind": "SelfSubjectAccessReview",
            "apiVersion": "authorization.k8s.io/v1",
            "metadata": {},
            "spec": body.get("spec") or {},
            "status": {"allowed": yes, **({} if yes else {"reason": "no RBAC policy matched"})},
        }

    def admit(self, operation: str, resource: Resource, object_: Json) -> None:
        """
        Ask everything that has a say before an object is stored.

        Raises:
            Refusal: With code 403, or 404 if its namespace is not there.

        """
        meta = object_["metadata"]
        name = str(meta["name"])
        for webhook, ask in self.webhooks.items():
            words = ask(operation, object_)
            if words:
                message = f'admission webhook "{webhook}" denied the request: {words}'
                raise Refusal(403, "Forbidden", message)
        if operation != "CREATE" or not resource.namespaced:
            return
        namespace = self._store.get(self._store.resource("namespaces"), "", str(meta["namespace"]))
        if namespace.object["metadata"].get("deletionTimestamp"):
            words = f"unable to create new content in namespace {namespace.name} because it is being terminated"
            raise forbidden(resource.plural, name, words, group=resource.group)
        if resource.kind == "Pod":
            self._runtime_class(object_)
            self._pod_security(namespace.object, object_)
            self._quotas(object_)

    def _runtime_class(self, pod: Json) -> None:
        wanted = pod["spec"].get("runtimeClassName")
        if not wanted:
            return
        found = self._store.find(self._store.resource("runtimeclasses"), "", wanted)
        if found is None:
            words = f'pod rejected: RuntimeClass "{wanted}" not found'
            raise forbidden("pods", pod["metadata"]["name"], words)
        overhead = (found.object.get("overhead") or {}).get("podFixed")
        if overhead:
            pod["spec"]["overhead"] = dict(overhead)

    def _pod_security(self, namespace: Json, pod: Json) -> None:
        level = (namespace["metadata"].get("labels") or {}).get("pod-security.kubernetes.io/enforce", "privileged")
        causes = list(_violations(pod, level))
        if causes:
            words = f'violates PodSecurity "{level}:latest": ' + ", ".join(causes)
            raise forbidden("pods", pod["metadata"]["name"], words)

    def _quotas(self, pod: Json) -> None:
        meta = pod["metadata"]
        quotas = list(self._store.all(self._store.resource("resourcequotas"), str(meta["namespace"])))
        if not quotas:
            return
        alive = [
            one.object
            for one in self._store.all(self._store.resource("pods"), str(meta["namespace"]))
            if one.object["status"].get("phase") not in ("Succeeded", "Failed")
        ]
        for quota in quotas:
            over = []
            for key, hard in (quota.object.get("spec") or {}).get("hard", {}).items():
                used, more = sum(_use(one, key) for one in alive), _use(pod, key)
                if more and used + more > quantity(hard):
                    over.append((key, f"{more:g}", f"{used:g}", str(hard)))
            if over:
                requested, taken, limited = (
                    ",".join(f"{row[0]}={row[column]}" for row in over) for column in (1, 2, 3)
                )
                words = f"exceeded quota: {quota.name}, requested: {requested}, used: {taken}, limited: {limited}"
                raise forbidden("pods", str(meta["name"]), words)


def _use(pod: Json, key: str) -> float:
    if key in ("pods", "count/pods"):
        return 1
    kind, _, resource = key.rpartition(".")
    if kind == "limits":
        containers = pod["spec"].get("containers") or ()
        return sum(quantity(((c.get("resources") or {}).get("limits") or {}).get(resource, 0)) for c in containers)
    return requests_of(pod, resource) if resource in ("cpu", "memory", "ephemeral-storage") else 0


def _violations(pod: Json, level: str) -> Iterable[str]:
    if level not in ("baseline", "restricted"):
        return
    spec = pod["spec"]
    outer = spec.get("securityContext") or {}
    for container in spec.get("containers") or ():
        inner = container.get("securityContext") or {}
        where = f'container "{container.get("name")}"'
        capabilities = inner.get("capabilities") or {}
        if inner.get("privileged"):
            yield f"privileged ({where} must not set securityContext.privileged=true)"
        added = [one for one in capabilities.get("add") or () if one != "NET_BIND_SERVICE"]
        if level == "restricted":
            if inner.get("allowPrivilegeEscalation") is not False:
                words = "must set securityContext.allowPrivilegeEscalation=false"
                yield f"allowPrivilegeEscalation != false ({where} {words})"
            if "ALL" not in (capabilities.get("drop") or ()) or added:
                yield f'unrestricted capabilities ({where} must set securityContext.capabilities.drop=["ALL"])'
            if not (inner.get("runAsNonRoot") or outer.get("runAsNonRoot")):
                yield f"runAsNonRoot != true (pod or {where} must set securityContext.runAsNonRoot=true)"
            profile = (inner.get("seccompProfile") or outer.get("seccompProfile") or {}).get("type")
            if profile not in ("RuntimeDefault", "Localhost"):
                words = 'must set securityContext.seccompProfile.type to "RuntimeDefault" or "Localhost"'
                yield f"seccompProfile (pod or {where} {words})"
        elif "SYS_ADMIN" in added:
            yield f'non-default capabilities ({where} must not include "SYS_ADMIN" in securityContext.capabilities.add)'
