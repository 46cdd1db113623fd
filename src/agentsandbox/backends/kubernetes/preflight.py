# SPDX-License-Identifier: Apache-2.0
"""Whether a cluster can and may do what is needed, found out without leaving anything on it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio

from agentsandbox.backends.base import Check
from agentsandbox.backends.kubernetes.api import KubernetesApi
from agentsandbox.backends.kubernetes.manifests import pods_path
from agentsandbox.backends.kubernetes.options import quantity
from agentsandbox.backends.kubernetes.owned import list_all, namespace_path
from agentsandbox.backends.kubernetes.roles import ROLE_RULES, Rule
from agentsandbox.errors import (
    ConfigurationError,
    ControlPlaneError,
    InfrastructureError,
    InvalidObject,
    NotFound,
    PermissionDenied,
    QuotaExceeded,
)

if TYPE_CHECKING:
    from agentsandbox.backends.kubernetes.api import Json

__all__ = ["allowed", "check_runtime_class", "examine", "examine_at", "headroom", "unreachable"]

CLOCKS = 5.0
"""Seconds that the clocks may be apart: ages of Pods and their figures are compared with ours."""

LEAST_VERSION = (1, 30)
"""From it on servers speak the fifth websocket protocol for exec, which can end standard input; before, the fourth."""

_ENFORCE = "pod-security.kubernetes.io/enforce"


async def examine_at(where: Mapping[str, Any], manifest: Json, *, rules: Sequence[Rule] = ROLE_RULES) -> list[Check]:
    """Connect and :func:`examine`; that one cannot even connect is an answer, too."""
    try:
        api = await KubernetesApi.connect(**where, max_connections=8)
    except ConfigurationError as error:
        return [unreachable(error)]
    try:
        return await examine(api, manifest, rules=rules)
    finally:
        await api.aclose()


async def examine(api: KubernetesApi, manifest: Json, *, rules: Sequence[Rule] = ROLE_RULES) -> list[Check]:
    """
    Ask the API server about everything. Nothing is created.

    Args:
        api: The API server.
        manifest: A Pod as it will be made.
        rules: What must be allowed.

    """
    try:
        version = await api.request("GET", "/version")
    except (ControlPlaneError, ConfigurationError) as error:
        return [unreachable(error, api.host)]
    found = [_server(api, version), _clocks(api)]
    found += await _permissions(api, rules)
    namespace = await _namespace(api)
    if runtime_class := manifest["spec"].get("runtimeClassName"):
        found.append(await _runtime_class(api, runtime_class))
    found.append(await _quota(api, manifest))
    dry_run, kept = await _dry_run(api, manifest)
    found += [_named(api, namespace, dry_run), _security(namespace, dry_run), dry_run]
    if kept is not None:
        found.append(_restarts(manifest, kept))
    return found


def unreachable(error: Exception, where: str = "") -> Check:
    """Return the check that fails when there is nobody to ask."""
    if isinstance(error, ConfigurationError):
        return Check(name="client", ok=False, detail=str(error), fix="see --context, $KUBECONFIG and the message")
    if isinstance(error, PermissionDenied):
        fix = "the server does not know these credentials: log in again, or choose another --context"
        return Check(name="server", ok=False, detail=f"{where}: {error}", fix=fix)
    fix = "check the address in the kubeconfig, the network, and proxies ($HTTPS_PROXY, $NO_PROXY)"
    return Check(name="server", ok=False, detail=f"{where}: {error}", fix=fix)


def _server(api: KubernetesApi, version: Mapping[str, Any]) -> Check:
    known = tuple(int("".join(filter(str.isdigit, str(version.get(key)))) or 0) for key in ("major", "minor"))
    old = known < LEAST_VERSION
    return Check(
        name="server",
        ok=not old,
        detail=f"{version.get('gitVersion')} at {api.host}, context {api.context}"
        + ("; standard input of exec streams cannot be ended" if old else ""),
        fix="Kubernetes {}.{} or later has the newer exec protocol".format(*LEAST_VERSION),
        required=False,
    )


def _clocks(api: KubernetesApi) -> Check:
    offset = api.clock_offset or 0.0
    # The server tells whole seconds.
    apart = max(0.0, abs(offset + 0.5) - 0.5)
    return Check(
        name="clocks",
        ok=apart <= CLOCKS,
        detail=f"the server's is within {math.ceil(apart) + 1} s of ours" if apart <= CLOCKS else f"{offset:+.0f} s",
        fix="synchronise both clocks: times that the cluster notes are compared with ours",
        required=False,
    )


async def allowed(api: KubernetesApi, verb: str, rule: Rule) -> bool:
    """
    Ask the server whether we may do something in the API's namespace, or everywhere.

    Raises:
        ControlPlaneError: If it does not even let us ask.

    """
    resource, _, subresource = rule.resource.partition("/")
    attributes = {
        "namespace": "" if rule.everywhere else api.namespace,
        "verb": verb,
        "group": rule.group,
        "resource": resource,
        **({"subresource": subresource} if subresource else {}),
    }
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = await api.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=body)
    return bool((answer.get("status") or {}).get("allowed"))


async def _permissions(api: KubernetesApi, rules: Sequence[Rule]) -> list[Check]:
    answers: dict[tuple[int, str], bool] = {}
    failures: list[InfrastructureError] = []

    async def ask(number: int, verb: str) -> None:
        try:
            answers[number, verb] = await allowed(api, verb, rules[number])
        except InfrastructureError as error:
            failures.append(error)

    async with anyio.create_task_group() as group:
        for number, rule in enumerate(rules):
            for verb in rule.verbs:
                group.start_soon(ask, number, verb)
    if failures:
        detail = f"could not be asked for: {failures[0]}"
        fix = "allow SelfSubjectAccessReviews"
        return [Check(name="permissions", ok=False, detail=detail, fix=fix, required=False)]
    return [_permission(rule, [v for v in rule.verbs if not answers[n, v]]) for n, rule in enumerate(rules)]


def _permission(rule: Rule, missing: Sequence[str]) -> Check:
    lacks = ", ".join(f"{verb} {rule.resource}" for verb in missing)
    role = "ClusterRole" if rule.everywhere else "Role"
    return Check(
        name=f"permission {rule.resource}",
        ok=not missing,
        detail=f"not allowed: {lacks} ({rule.why})" if missing else f"{', '.join(rule.verbs)}: {rule.why}",
        fix=f"add {', '.join(missing)} on {rule.resource} to the {role}; the documentation has one that suffices",
        required=rule.required,
    )


async def _namespace(api: KubernetesApi) -> Json | NotFound | None:
    """Return the namespace; ``None`` if we may not look."""
    try:
        return await api.request("GET", namespace_path(api.namespace))
    except NotFound as error:
        return error
    except InfrastructureError:
        return None


def _named(api: KubernetesApi, namespace: Json | NotFound | None, dry_run: Check) -> Check:
    gone = isinstance(namespace, NotFound) or (namespace is None and "namespaces" in dry_run.detail and not dry_run.ok)
    status = {} if gone or not isinstance(namespace, dict) else namespace.get("status") or {}
    ending = status.get("phase") == "Terminating"
    detail = api.namespace + (" does not exist" if gone else " is terminating" if ending else "")
    fix = f"kubectl create namespace {api.namespace}, or another --namespace"
    return Check(name="namespace", ok=not gone and not ending, detail=detail, fix=fix)


def _security(namespace: Json | NotFound | None, dry_run: Check) -> Check:
    if isinstance(namespace, dict):
        labels = namespace["metadata"].get("labels") or {}
        level = labels.get(_ENFORCE, "privileged")
        detail = f"the namespace enforces {level}" if _ENFORCE in labels else "the namespace enforces no level"
    else:
        detail = "not looked at" if namespace else "the namespace may not be looked at; the Pod's dry run tells"
    violated = not dry_run.ok and "violates PodSecurity" in dry_run.detail
    if violated:
        detail += f"; {dry_run.detail}"
    fix = "options that ask for more than that (run_as_root, capabilities) need another namespace"
    return Check(name="pod security", ok=not violated, detail=detail, fix=fix)


async def check_runtime_class(api: KubernetesApi, name: str | None) -> str:
    """
    Make sure that there is a runtime class, as far as we may look.

    Returns:
        What is known of it, in a line.

    Raises:
        ConfigurationError: If there is none of that name.

    """
    if name is None:
        return "the cluster's default"
    try:
        found = await api.request("GET", f"/apis/node.k8s.io/v1/runtimeclasses/{name}")
    except NotFound:
        raise ConfigurationError(f"the cluster has no runtime class {name!r}") from None
    except PermissionDenied:
        return f"{name} (may not be looked at; the Pod's dry run tells)"
    overhead = (found.get("overhead") or {}).get("podFixed") or {}
    words = ", ".join(f"{key} {value}" for key, value in sorted(overhead.items()))
    return f"{name}, handler {found.get('handler')}" + (f", every Pod costs {words} more" if words else "")


async def _runtime_class(api: KubernetesApi, name: str) -> Check:
    fix = "kubectl get runtimeclasses shows what there is"
    try:
        return Check(name="runtime class", ok=True, detail=await check_runtime_class(api, name))
    except (ConfigurationError, InfrastructureError) as error:
        return Check(name="runtime class", ok=False, detail=str(error), fix=fix)


def headroom(quotas: Iterable[Mapping[str, Any]], manifest: Mapping[str, Any]) -> tuple[float, str]:
    """
    Return how many more Pods the quotas of a namespace leave room for, and which resource is the scarcest.

    Args:
        quotas: The ResourceQuotas.
        manifest: A Pod.

    """
    least, scarcest = math.inf, ""
    for quota in quotas:
        if (quota.get("spec") or {}).get("scopeSelector") or (quota.get("spec") or {}).get("scopes"):
            continue  # for some Pods only
        status = quota.get("status") or {}
        hard = status.get("hard") or (quota.get("spec") or {}).get("hard") or {}
        used = status.get("used") or {}
        for key, limit in hard.items():
            need = _need(key, manifest)
            left = (_number(limit) - _number(used.get(key, 0))) / need if need else math.inf
            if left < least:
                least, scarcest = left, f"{key} of quota {quota['metadata']['name']}"
    return (math.floor(max(0.0, least)) if least < math.inf else least), scarcest


def _need(key: str, manifest: Mapping[str, Any]) -> float:
    if key in ("pods", "count/pods"):
        return 1
    kind, _, resource = key.rpartition(".")
    if kind not in ("", "requests", "limits"):
        return 0
    found = [
        (container.get("resources") or {}).get("limits" if kind == "limits" else "requests", {}).get(resource)
        for container in manifest["spec"]["containers"]
    ]
    return sum(_number(value) for value in found if value is not None)


def _number(value: Any) -> float:
    return float(quantity(str(value)))


async def _quota(api: KubernetesApi, manifest: Json) -> Check:
    try:
        quotas = await list_all(api, f"{namespace_path(api.namespace)}/resourcequotas")
    except InfrastructureError as error:
        detail = f"may not be looked at: {error}"
        return Check(name="quota", ok=False, detail=detail, fix="allow list on resourcequotas", required=False)
    try:
        room, scarcest = headroom(quotas, manifest)
    except ConfigurationError as error:
        return Check(name="quota", ok=False, detail=f"not understood: {error}", required=False)
    if room == math.inf:
        return Check(name="quota", ok=True, detail="no quota limits these Pods")
    fix = "ask for a larger quota, or lower the requests and limits of the Pods"
    return Check(name="quota", ok=room >= 1, detail=f"room for {room:g} more Pods, by {scarcest}", fix=fix)


async def _dry_run(api: KubernetesApi, manifest: Json) -> tuple[Check, Json | None]:
    fix = "the words are the cluster's own; see the troubleshooting table in the documentation"
    try:
        kept = await _post(api, manifest)
    except (QuotaExceeded, ControlPlaneError) as error:
        return Check(name="pod", ok=False, detail=f"refused: {error}", fix=fix), None
    security = manifest["spec"]["securityContext"]
    user = security.get("runAsUser", "the image's user")
    user = f"{user}, which may be root" if not security.get("runAsNonRoot") else f"{user}, which must not be root"
    return Check(name="pod", ok=True, detail=f"accepted by a dry run; it runs as {user}"), kept


async def _post(api: KubernetesApi, manifest: Json) -> Json:
    path, params = pods_path(api.namespace), {"dryRun": "All"}
    try:
        return await api.request("POST", path, params=params, body=manifest)
    except InvalidObject:
        container = dict(manifest["spec"]["containers"][0])
        if container.pop("restartPolicyRules", None) is None:
            raise
        # A server that does not know the rule refuses the container's policy, which only makes sense with it.
        del container["restartPolicy"]
        plain = {**manifest, "spec": {**manifest["spec"], "containers": [container]}}
        return await api.request("POST", path, params=params, body=plain)


def _restarts(manifest: Json, kept: Json) -> Check:
    wanted = manifest["spec"]["containers"][0].get("restartPolicyRules")
    known = wanted is not None and kept["spec"]["containers"][0].get("restartPolicyRules") == wanted
    return Check(
        name="restart in place",
        ok=known,
        detail="RestartAllContainers is known" if known else "not known: every used sandbox costs a new Pod",
        fix="Kubernetes 1.36 has it, or 1.35 with the feature gate RestartAllContainersOnContainerExits",
        required=False,
    )
