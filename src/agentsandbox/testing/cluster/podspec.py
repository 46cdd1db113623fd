# SPDX-License-Identifier: Apache-2.0
"""What a Pod's spec may say, what it says when it says nothing, and what of it may change. Pure."""

from __future__ import annotations

import copy
import difflib
import json
import re
from typing import TYPE_CHECKING, Any

from agentsandbox.testing.cluster.replies import Json, Refusal, immutable, invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["check_name", "check_update", "complete", "has_rule", "quantity", "requests_of", "validate"]

_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_LABEL_KEY = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_WORDS = (
    "Invalid value: \"{}\": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or "
    "'.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
_LABEL_WORDS = (
    "Invalid value: \"{}\": a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or "
    "'.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex "
    "used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
)
_SUFFIXES = {
    "m": 0.001,
    "": 1.0,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
}
_TOLERATIONS = [
    {"effect": "NoExecute", "key": f"node.kubernetes.io/{name}", "operator": "Exists", "tolerationSeconds": 300}
    for name in ("not-ready", "unreachable")
]
RULES_SINCE = (1, 36)
"""The minor version from which on a container may carry a rule that restarts all of them."""

_Causes = list[tuple[str, str, str]]


def quantity(text: Any) -> float:
    """
    Return a quantity of resources as a number.

    Raises:
        ValueError: If it is none.

    """
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([A-Za-z]*)", str(text))
    if found is None or found[2] not in _SUFFIXES:
        raise ValueError(f"{text!r} is not a quantity")
    return float(found[1]) * _SUFFIXES[found[2]]


def requests_of(pod: Json, resource: str) -> float:
    """Return how much of a resource a Pod reserves on its node; a limit without a request is one."""
    total = quantity((pod["spec"].get("overhead") or {}).get(resource, 0))
    for container in pod["spec"].get("containers") or ():
        resources = container.get("resources") or {}
        amount = (resources.get("requests") or {}).get(resource) or (resources.get("limits") or {}).get(resource) or 0
        total += quantity(amount)
    return total


def has_rule(pod: Json, action: str = "RestartAllContainers") -> bool:
    """Return whether a container of the Pod has a restart rule of this kind."""
    return any(
        rule.get("action") == action
        for container in pod["spec"].get("containers") or ()
        for rule in container.get("restartPolicyRules") or ()
    )


def check_name(kind: str, meta: Json) -> None:
    """
    Refuse names and labels that are none.

    Raises:
        Refusal: Naming the field.

    """
    name = str(meta.get("name") or "")
    causes: _Causes = []
    if not name:
        causes.append(("FieldValueRequired", "metadata.name", "Required value: name or generateName is required"))
    elif not _SUBDOMAIN.fullmatch(name) or len(name) > 253:
        causes.append(("FieldValueInvalid", "metadata.name", _WORDS.format(name)))
    for key, value in (meta.get("labels") or {}).items():
        short = key.rpartition("/")[2]
        if not _LABEL_KEY.fullmatch(short) or len(short) > 63:
            causes.append(("FieldValueInvalid", "metadata.labels", f'Invalid value: "{key}": name part is not valid'))
        if not isinstance(value, str) or not _LABEL_VALUE.fullmatch(value) or len(value) > 63:
            causes.append(("FieldValueInvalid", "metadata.labels", _LABEL_WORDS.format(value)))
    if causes:
        raise invalid(kind, name, causes)


def complete(pod: Json) -> Json:
    """Return a Pod with everything that a server adds to it."""
    pod = copy.deepcopy(pod)
    spec = pod["spec"]
    for key, value in (
        ("restartPolicy", "Always"),
        ("dnsPolicy", "ClusterFirst"),
        ("schedulerName", "default-scheduler"),
        ("securityContext", {}),
        ("terminationGracePeriodSeconds", 30),
        ("enableServiceLinks", True),
        ("serviceAccountName", "default"),
        ("serviceAccount", spec.get("serviceAccountName", "default")),
        ("priority", 0),
        ("preemptionPolicy", "PreemptLowerPriority"),
    ):
        spec.setdefault(key, copy.copy(value))
    given = spec.get("tolerations") or []
    known = {one.get("key") for one in given}
    spec["tolerations"] = [*given, *(dict(one) for one in _TOLERATIONS if one["key"] not in known)]
    for container in spec.get("containers") or ():
        image = container.get("image", "")
        latest = "@" not in image and (":" not in image.rpartition("/")[2] or image.endswith(":latest"))
        container.setdefault("imagePullPolicy", "Always" if latest else "IfNotPresent")
        container.setdefault("resources", {})
        container.setdefault("terminationMessagePath", "/dev/termination-log")
        container.setdefault("terminationMessagePolicy", "File")
        limits = container["resources"].get("limits") or {}
        if limits:
            container["resources"]["requests"] = {**limits, **(container["resources"].get("requests") or {})}
    pod["status"] = {"phase": "Pending", "qosClass": _quality(spec)}
    return pod


def _quality(spec: Json) -> str:
    resources = [container.get("resources") or {} for container in spec.get("containers") or ()]
    if not any(one.get("requests") or one.get("limits") for one in resources):
        return "BestEffort"
    for one in resources:
        limits, requests = one.get("limits") or {}, one.get("requests") or {}
        equal = all(requests.get(key, value) == value for key, value in limits.items())
        if not {"cpu", "memory"} <= set(limits) or not equal:
            return "Burstable"
    return "Guaranteed"


def validate(pod: Json, *, version: tuple[int, int]) -> None:
    """
    Refuse a Pod that a server of that version refuses.

    Raises:
        Refusal: Naming each field that is wrong.

    """
    causes: _Causes = []
    spec = pod["spec"]
    containers = spec.get("containers") or []
    if not containers:
        causes.append(("FieldValueRequired", "spec.containers", "Required value"))
    if spec["restartPolicy"] not in ("Always", "OnFailure", "Never"):
        words = f'Unsupported value: "{spec["restartPolicy"]}": supported values: "Always", "OnFailure", "Never"'
        causes.append(("FieldValueNotSupported", "spec.restartPolicy", words))
    deadline = spec.get("activeDeadlineSeconds")
    if deadline is not None and not 1 <= deadline <= 2**31 - 1:
        words = f"Invalid value: {deadline}: must be between 1 and 2147483647, inclusive"
        causes.append(("FieldValueInvalid", "spec.activeDeadlineSeconds", words))
    volumes = {volume.get("name") for volume in spec.get("volumes") or ()}
    for index, container in enumerate(containers):
        field = f"spec.containers[{index}]"
        if not container.get("name"):
            causes.append(("FieldValueRequired", f"{field}.name", "Required value"))
        if not container.get("image"):
            causes.append(("FieldValueRequired", f"{field}.image", "Required value"))
        causes += _resources(field, container.get("resources") or {})
        causes += [
            ("FieldValueNotFound", f"{field}.volumeMounts[{place}].name", f'Not found: "{mount.get("name")}"')
            for place, mount in enumerate(container.get("volumeMounts") or ())
            if mount.get("name") not in volumes
        ]
        causes += _rules(field, container, version)
    causes += _affinity(spec)
    if causes:
        raise invalid("Pod", pod["metadata"]["name"], causes)


def _affinity(spec: Json) -> _Causes:
    """Nodes are named by one field, which has one value."""
    where = "requiredDuringSchedulingIgnoredDuringExecution"
    required = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(where) or {}
    where = f"spec.affinity.nodeAffinity.{where}.nodeSelectorTerms"
    causes: _Causes = []
    for number, term in enumerate(required.get("nodeSelectorTerms") or ()):
        for place, one in enumerate(term.get("matchFields") or ()):
            field, operator, key = f"{where}[{number}].matchFields[{place}]", one.get("operator"), one.get("key")
            if operator not in ("In", "NotIn"):
                words = f'Invalid value: "{operator}": not a valid selector operator'
                causes.append(("FieldValueInvalid", f"{field}.operator", words))
            elif len(one.get("values") or ()) != 1:
                words = "must be only one value when `operator` is 'In' or 'NotIn' for node field selector"
                causes.append(("FieldValueRequired", f"{field}.values", f"Required value: {words}"))
            if key != "metadata.name":
                words = f'Invalid value: "{key}": not a valid field selector key'
                causes.append(("FieldValueInvalid", f"{field}.key", words))
    return causes


def _resources(field: str, resources: Mapping[str, Any]) -> _Causes:
    causes: _Causes = []
    limits = resources.get("limits") or {}
    for kind in ("requests", "limits"):
        for name, amount in (resources.get(kind) or {}).items():
            try:
                number = quantity(amount)
            except ValueError:
                raise Refusal(
                    400,
                    "BadRequest",
                    'Pod in version "v1" cannot be handled as a Pod: quantities must match the regular expression '
                    "'^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'",
                ) from None
            if kind == "requests" and name in limits and number > quantity(limits[name]):
                words = f'Invalid value: "{amount}": must be less than or equal to {name} limit of {limits[name]}'
                causes.append(("FieldValueInvalid", f"{field}.resources.requests", words))
    return causes


def _rules(field: str, container: Json, version: tuple[int, int]) -> _Causes:
    causes: _Causes = []
    rules = container.get("restartPolicyRules") or []
    if rules and not container.get("restartPolicy"):
        words = "Required value: must specify restartPolicy when restart rules are used"
        causes.append(("FieldValueRequired", f"{field}.restartPolicy", words))
    for index, rule in enumerate(rules):
        known = ["Restart", "RestartAllContainers"] if version >= RULES_SINCE else ["Restart"]
        if rule.get("action") not in known:
            words = ", ".join(f'"{one}"' for one in known)
            place = f"{field}.restartPolicyRules[{index}].action"
            words = f'Unsupported value: "{rule.get("action")}": supported values: {words}'
            causes.append(("FieldValueNotSupported", place, words))
    return causes


def check_update(before: Json, after: Json) -> None:
    """
    Refuse a change of what cannot be changed in a Pod.

    Raises:
        Refusal: With the difference.

    """
    allowed = copy.deepcopy(before["spec"])
    wanted = after["spec"]
    for key in ("activeDeadlineSeconds", "tolerations"):
        if key in wanted:
            allowed[key] = wanted[key]
    for mine, theirs in zip(allowed.get("containers") or (), wanted.get("containers") or (), strict=False):
        if theirs.get("image"):
            mine["image"] = theirs["image"]
    if allowed != wanted:
        raise immutable(str(before["metadata"]["name"]), _difference(allowed, wanted))
    deadline, earlier = wanted.get("activeDeadlineSeconds"), before["spec"].get("activeDeadlineSeconds")
    if earlier is not None and (deadline is None or deadline > earlier):
        words = f"Invalid value: {deadline}: must be less than or equal to previous value"
        cause = ("FieldValueInvalid", "spec.activeDeadlineSeconds", words)
        raise invalid("Pod", str(before["metadata"]["name"]), [cause])


def _difference(before: Json, after: Json) -> str:
    lines = [json.dumps(_internal(spec), indent=1).splitlines() for spec in (before, after)]
    found = list(difflib.unified_diff(lines[0], lines[1], lineterm="", n=3))[2:]
    return "\n".join(found) + "\n"


def _internal(spec: Json) -> Json:
    """Order and name the fields as the server's own records do."""
    rest = {key[:1].upper() + key[1:]: value for key, value in spec.items()}
    containers = []
    for container in rest.pop("Containers", None) or ():
        fields = {key[:1].upper() + key[1:]: value for key, value in container.items()}
        first = {key: fields.pop(key, None) for key in ("Name", "Image", "Command", "Args")}
        containers.append({**first, "WorkingDir": fields.pop("WorkingDir", ""), **fields})
    return {
        "Volumes": rest.pop("Volumes", None),
        "InitContainers": rest.pop("InitContainers", None),
        "Containers": containers,
        **rest,
    }
