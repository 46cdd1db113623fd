# SPDX-License-Identifier: Apache-2.0
"""
The custom resources of the agent-sandbox controller, as plain data, and what their conditions mean. Pure.

Kinds and reasons are those of https://github.com/kubernetes-sigs/agent-sandbox, API version ``v1beta1``.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

import attrs

from agentsandbox.backends.kubernetes.manifests import DOMAIN
from agentsandbox.backends.kubernetes.options import check_name, check_object
from agentsandbox.backends.kubernetes.owned import marks
from agentsandbox.errors import ConfigurationError, InvalidObject, ProvisionError, SandboxError

__all__ = [
    "CORE",
    "EXTENSIONS",
    "MERGE",
    "VERSIONS",
    "ClaimState",
    "Launch",
    "Verdict",
    "assigned",
    "claim",
    "claim_state",
    "controller_of",
    "launch_of",
    "left_to_live",
    "mode_patch",
    "object_name",
    "path",
    "pod_of",
    "replicas_patch",
    "served",
    "template",
    "warm_pool",
]

Json = dict[str, Any]

CORE = "agents.x-k8s.io"
"""Group of the kind ``Sandbox``."""

EXTENSIONS = "extensions.agents.x-k8s.io"
"""Group of templates, warm pools and claims."""

VERSIONS = ("v1beta1",)
"""What is spoken here, best first."""

MERGE = "application/merge-patch+json"
"""Content type of patches."""

_GROUPS = {
    "sandboxes": CORE,
    "sandboxtemplates": EXTENSIONS,
    "sandboxwarmpools": EXTENSIONS,
    "sandboxclaims": EXTENSIONS,
}

_CALLERS_MISTAKE = frozenset(
    {"InvalidMetadata", "EnvVarsInjectionRejected", "VolumeClaimTemplatesError", "InvalidConfiguration"}
)
_MISSING = frozenset({"TemplateNotFound", "WarmPoolNotFound"})
"""May merely lag behind what was just created."""
_OVER = frozenset(
    {
        "PodFailed",
        "PodSucceeded",
        "SandboxExpired",
        "ClaimExpired",
        "SandboxMissing",
        "SandboxSuspended",
        "MultiplePods",
    }
)


class Launch(StrEnum):
    """Where the Sandbox of a claim came from."""

    WARM = "warm"
    """A warm pool had it ready."""
    COLD = "cold"
    """The controller made it for this claim, which it tells nobody."""


class Verdict(StrEnum):
    """What a claim's conditions mean for who waits for it."""

    WAIT = "wait"
    """Nothing is decided."""
    READY = "ready"
    """There is a Sandbox, and its Pod is ready."""
    MISSING = "missing"
    """Its pool or template is not there, or the controller has not seen it yet."""
    OVER = "over"
    """What it had has ended; another claim may do better."""
    REFUSED = "refused"
    """It asks for something that it cannot get."""


@attrs.frozen(kw_only=True)
class ClaimState:
    """What a claim says about itself."""

    name: str
    """Its name."""
    verdict: Verdict
    """What it comes to."""
    sandbox: str = ""
    """The name of its Sandbox, once it has one."""
    reason: str = ""
    """The controller's word for it."""
    message: str = ""
    """The controller's own words."""

    def error(self) -> SandboxError:
        """Return what to raise if it does not get better."""
        words = f"claim {self.name}: {self.reason or 'no word from the controller'}"
        words += f": {self.message}" if self.message else ""
        return InvalidObject(words) if self.verdict is Verdict.REFUSED else ProvisionError(words)


def path(version: str, plural: str, namespace: str, name: str | None = None) -> str:
    """Return the path of a collection of custom resources, or of one of them."""
    check_name(namespace, "namespace")
    if name is not None:
        check_object(name)
    return f"/apis/{_GROUPS[plural]}/{version}/namespaces/{namespace}/{plural}" + (f"/{name}" if name else "")


def served(group: str, discovery: Mapping[str, Any]) -> str:
    """
    Choose the API version to speak.

    Args:
        group: Which group was asked for.
        discovery: The server's ``APIGroup``.

    Raises:
        ConfigurationError: If the server has none that is known here.

    """
    there = [str(version["version"]) for version in discovery.get("versions") or ()]
    for version in VERSIONS:
        if version in there:
            return version
    raise ConfigurationError(
        f"the server has {group} as {', '.join(there) or 'nothing'}, and this library speaks {', '.join(VERSIONS)}"
    )


def object_name(run_id: str, spec: Mapping[str, Any]) -> str:
    """Return the name of a run's template and pool: unique in the run by the content of the whole template."""
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"))
    return f"asb-{run_id}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def template(pod: Mapping[str, Any], *, run_id: str, version: str, nonce: str) -> Json:
    """
    Return the SandboxTemplate that makes Pods like one.

    Labels and annotations of the Pod stay in our own domain: the controller removes those in its own. Nothing that the
    controller fills in by itself is left to it: DNS, which it would point at public resolvers, and the network policy,
    which is ours to make.

    Args:
        pod: The Pod.
        run_id: 12 hexadecimal digits.
        version: Of the API.
        nonce: By which we know the object again if the answer to its creation is lost.

    """
    spec = copy.deepcopy(dict(pod["spec"]))
    spec.setdefault("dnsPolicy", "ClusterFirst")
    meta = pod["metadata"]
    mine = {f"{DOMAIN}/nonce", f"{DOMAIN}/sandbox"}
    body = {
        "podTemplate": {
            "metadata": {
                "labels": dict(meta["labels"]),
                "annotations": {key: value for key, value in meta["annotations"].items() if key not in mine},
            },
            "spec": spec,
        },
        "networkPolicyManagement": "Unmanaged",
        "envVarsInjectionPolicy": "Disallowed",
        "volumeClaimTemplatesPolicy": "Disallowed",
    }
    return _object("SandboxTemplate", version, object_name(run_id, body), body, run_id=run_id, nonce=nonce)


def warm_pool(template: str, *, name: str, run_id: str, version: str, nonce: str) -> Json:
    """Return a SandboxWarmPool of a template, with nothing in it."""
    body = {"replicas": 0, "sandboxTemplateRef": {"name": template}}
    return _object("SandboxWarmPool", version, name, body, run_id=run_id, nonce=nonce)


def claim(name: str, pool: str, *, run_id: str, version: str, nonce: str, now: datetime, lifetime: float) -> Json:
    """
    Return a SandboxClaim.

    Neither variables nor volumes are asked for: with either, the controller starts cold.

    Args:
        name: Its name; a Sandbox that is started cold gets it, too.
        pool: The name of the SandboxWarmPool.
        run_id: 12 hexadecimal digits.
        version: Of the API.
        nonce: By which we know the object again if the answer to its creation is lost.
        now: The server's time, as far as it is known.
        lifetime: Seconds after which the controller ends the claim whatever we do.

    """
    over = (now + timedelta(seconds=lifetime)).strftime("%Y-%m-%dT%H:%M:%SZ")
    body = {
        "warmPoolRef": {"name": pool},
        "lifecycle": {"shutdownTime": over, "shutdownPolicy": "Delete"},
    }
    return _object("SandboxClaim", version, name, body, run_id=run_id, nonce=nonce)


def _object(kind: str, version: str, name: str, spec: Json, *, run_id: str, nonce: str) -> Json:
    return {
        "apiVersion": f"{EXTENSIONS}/{version}",
        "kind": kind,
        "metadata": {"name": name, "labels": marks(run_id), "annotations": {f"{DOMAIN}/nonce": nonce}},
        "spec": spec,
    }


def replicas_patch(uid: str, replicas: int) -> Json:
    """Return the merge patch that sets how many ready ones this very pool keeps."""
    return {"metadata": {"uid": uid}, "spec": {"replicas": replicas}}


def mode_patch(uid: str, mode: str) -> Json:
    """Return the merge patch that suspends (``Suspended``) or resumes (``Running``) this very Sandbox."""
    return {"metadata": {"uid": uid}, "spec": {"operatingMode": mode}}


def claim_state(claim: Mapping[str, Any]) -> ClaimState:
    """Read off a claim what has become of it."""
    status = claim.get("status") or {}
    generation = claim["metadata"].get("generation")
    ready: Mapping[str, Any] = next((one for one in status.get("conditions") or () if one.get("type") == "Ready"), {})
    sandbox = str((status.get("sandbox") or {}).get("name") or "")
    reason, message = str(ready.get("reason") or ""), str(ready.get("message") or "")
    observed = ready.get("observedGeneration", generation)
    if ready.get("status") == "True":
        # Of an earlier generation it is old news; and ready without a name is not ready for us.
        verdict = Verdict.READY if sandbox and observed == generation else Verdict.WAIT
    elif reason in _CALLERS_MISTAKE:
        verdict = Verdict.REFUSED
    elif reason in _MISSING:
        verdict = Verdict.MISSING
    else:
        verdict = Verdict.OVER if reason in _OVER else Verdict.WAIT
    name = claim["metadata"]["name"]
    return ClaimState(name=name, verdict=verdict, sandbox=sandbox, reason=reason, message=message)


def assigned(claim: Mapping[str, Any]) -> str:
    """Return the name of the Sandbox that a claim has been given, ready or not; empty if there is none."""
    annotations = (claim.get("metadata") or {}).get("annotations") or {}
    named = ((claim.get("status") or {}).get("sandbox") or {}).get("name")
    return str(named or annotations.get(f"{CORE}/sandbox-name") or "")


def controller_of(object_: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return who looks after an object, as its owner references have it; empty for nobody."""
    owners = object_["metadata"].get("ownerReferences") or ()
    return next((one for one in owners if one.get("controller")), {})


def launch_of(sandbox: Mapping[str, Any]) -> Launch:
    """Return how a Sandbox was started; what does not say so was not taken from a pool."""
    label = (sandbox["metadata"].get("labels") or {}).get(f"{CORE}/launch-type")
    return Launch.WARM if label == Launch.WARM else Launch.COLD


def pod_of(sandbox: Mapping[str, Any]) -> str:
    """Return the name of a Sandbox's Pod: newer controllers give it the Sandbox's own."""
    meta = sandbox["metadata"]
    return str((meta.get("annotations") or {}).get(f"{CORE}/pod-name") or meta["name"])


def left_to_live(pod: Mapping[str, Any], now: float) -> float:
    """
    Return how many seconds a Pod has left, which may have waited in a pool before it was claimed.

    Args:
        pod: The Pod.
        now: The server's time, as far as it is known.

    """
    limit, since = pod["spec"].get("activeDeadlineSeconds"), (pod.get("status") or {}).get("startTime")
    if limit is None or not since:
        return math.inf
    return float(limit) - (now - datetime.fromisoformat(since).timestamp())
