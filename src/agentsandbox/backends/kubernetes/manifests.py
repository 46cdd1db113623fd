# SPDX-License-Identifier: Apache-2.0
"""What we send to the API server, as plain data: Pods, deletes, patches, exec calls and network policies."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any
from urllib.parse import quote_plus

import attrs

from agentsandbox.backends.kubernetes.jailing import secure
from agentsandbox.backends.kubernetes.options import (
    DOMAIN,
    PodOptions,
    check_labels,
    check_name,
    check_run_id,
    label_value,
    lifetime,
)
from agentsandbox.errors import ConfigurationError, UsageError

__all__ = [
    "COMMAND_LIMIT",
    "CONTAINER",
    "DOMAIN",
    "RESTART_EXIT_CODE",
    "STRATEGIC_MERGE",
    "FirstProcess",
    "PodOptions",
    "delete_options",
    "exec_params",
    "exec_path",
    "image_patch",
    "label_value",
    "lifetime",
    "network_policy",
    "pod",
    "pod_name",
    "pods_path",
    "selector",
    "template_hash",
]

CONTAINER = "sandbox"
RESTART_EXIT_CODE = 42
"""The first process ends with it to have its container made anew, in the same Pod."""
STRATEGIC_MERGE = "application/strategic-merge-patch+json"
"""Content type of :func:`image_patch`."""
COMMAND_LIMIT = 2048
"""Bytes of a command line in a URL: proxies and servers cut from 4 KiB on; what is longer travels in frames."""
_PROGRAM_LIMIT = 128 * 1024
"""The kernel's limit for one argument."""
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"

_PYTHONS = """
python3 python /testbed/.venv/bin/python /opt/miniconda3/envs/testbed/bin/python /opt/miniconda3/bin/python
/opt/conda/bin/python /opt/venv/bin/python /root/.venv/bin/python /usr/local/bin/python3 /usr/bin/python3
"$HOME"/.pyenv/versions/*/bin/python /root/.pyenv/versions/*/bin/python /opt/pyenv/versions/*/bin/python
"""
"""The image's own PATH, then where images of software-engineering tasks keep an interpreter."""

# Becomes our program where there is a Python; else stays as a first process that does what ours does: reap, end on TERM
# at once, ask for a new container on USR1. $0 is the program, "$@" its arguments.
_WRAPPER = f"""\
for p in {" ".join(_PYTHONS.split())}; do
p=$(command -v "$p" 2>/dev/null) || continue
case $("$p" -V 2>/dev/null) in "Python 3."[7-9]*|"Python 3."[1-9][0-9]*) ;; *) continue;; esac
exec "$p" -ISBuc "$0" "$@"
done
trap 'exit 0' TERM INT
trap 'exit {RESTART_EXIT_CODE}' USR1
command -v sleep >/dev/null 2>&1 || exit 127
while :; do sleep 3600 & wait $!; done"""


class FirstProcess(StrEnum):
    """What a sandbox's container starts with."""

    RUNNER = "runner"
    """Our program if the image has a Python, else a keeper written in ``sh``."""
    IMAGE = "image"
    """The image's own entry point: for images without any shell."""


def pod_name(run_id: str, number: int) -> str:
    """
    Return the name of the *number*-th Pod of a run. No two calls give the same.

    Raises:
        ConfigurationError: If the run id is not 12 hexadecimal digits.

    """
    check_run_id(run_id)
    digits = ""
    while number or not digits:
        number, digit = divmod(number, 36)
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"[digit] + digits
    return f"asb-{run_id}-{digits}-{secrets.token_hex(3)}"


def selector(run_id: str) -> str:
    """
    Return the label selector of a run's objects. There is none for the objects of all runs, on purpose.

    Raises:
        ConfigurationError: If the run id is not 12 hexadecimal digits.

    """
    check_run_id(run_id)
    return f"{DOMAIN}/run-id={run_id},{DOMAIN}/managed-by=agentsandbox"


def template_hash(options: PodOptions, program: str = "", first_process: FirstProcess = FirstProcess.RUNNER) -> str:
    """Return what Pods have in common that may serve one another's images, as 16 hexadecimal digits."""
    text = json.dumps([attrs.asdict(options), program, first_process, _WRAPPER], sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def pod(
    name: str,
    image: str,
    *,
    options: PodOptions,
    run_id: str,
    owner: str,
    nonce: str,
    program: str = "",
    arguments: Sequence[str] = (),
    first_process: FirstProcess = FirstProcess.RUNNER,
    restart_rule: bool = True,
    node: str | None = None,
) -> dict[str, Any]:
    """
    Return the Pod to create.

    Args:
        name: Unique; see :func:`pod_name`.
        image: The container image.
        options: Everything that is the same for many Pods.
        run_id: 12 hexadecimal digits.
        owner: Who pays for it; any text.
        nonce: Random, to recognise a Pod as the one that an unanswered create has made. Not a secret.
        program: Source of the first process, for Python 3.7 or later with nothing but its standard library.
        arguments: Its ``sys.argv[1:]``. Whoever may read Pods reads them.
        first_process: What the container starts with.
        restart_rule: Whether the server knows the rule ``RestartAllContainers``; ask it by a dry run.
        node: The only node that it may be on; ``None`` leaves that to the scheduler.

    Raises:
        ConfigurationError: If a name or label is not one.

    """
    check_name(name, "Pod name")
    check_run_id(run_id)
    if not image or image != image.strip() or any(c.isspace() for c in image):
        raise ConfigurationError(f"{image!r} is not the name of an image")
    if len(program.encode()) >= _PROGRAM_LIMIT:
        raise UsageError(f"a program of {len(program.encode())} bytes does not fit into an argument")
    template = template_hash(options, program, first_process)
    labels = {
        **options.labels,
        f"{DOMAIN}/managed-by": "agentsandbox",
        f"{DOMAIN}/run-id": run_id,
        f"{DOMAIN}/owner": label_value(owner),
        f"{DOMAIN}/pool": template,
    }
    check_labels(labels)
    annotations = {
        **options.annotations,
        f"{DOMAIN}/image": image,
        f"{DOMAIN}/spec-hash": template,
        f"{DOMAIN}/nonce": nonce,
    }
    spec = _spec(image, options, program, arguments, first_process, restart_rule=restart_rule)
    if node is not None:
        spec["affinity"] = _pinned(options.affinity or {}, node)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels, "annotations": annotations},
        "spec": spec,
    }


def _pinned(affinity: Mapping[str, Any], node: str) -> dict[str, Any]:
    """Add a node to what a Pod requires. Unlike ``nodeName`` it leaves the scheduler to count what is free there."""
    nodes = affinity.get("nodeAffinity") or {}
    terms = (nodes.get(_REQUIRED) or {}).get("nodeSelectorTerms") or [{}]
    here = {"key": "metadata.name", "operator": "In", "values": [node]}
    # One of the terms has to hold, and each as a whole.
    terms = [{**term, "matchFields": [*(term.get("matchFields") or ()), here]} for term in terms]
    return {**affinity, "nodeAffinity": {**nodes, _REQUIRED: {"nodeSelectorTerms": terms}}}


def _spec(
    image: str,
    options: PodOptions,
    program: str,
    arguments: Sequence[str],
    first_process: FirstProcess,
    *,
    restart_rule: bool,
) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": image,
        "imagePullPolicy": options.pull_policy,
        "resources": {"requests": dict(options.requests), "limits": dict(options.limits)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], **({"add": list(options.capabilities)} if options.capabilities else {})},
        },
    }
    if first_process is FirstProcess.RUNNER:
        container["command"] = ["sh", "-c", _WRAPPER, program, *arguments]
    if restart_rule:
        container["restartPolicy"] = "Never"
        container["restartPolicyRules"] = [
            {"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [RESTART_EXIT_CODE]}}
        ]
    if options.env:
        container["env"] = [{"name": name, "value": value} for name, value in sorted(options.env.items())]
    if options.workdir is not None:
        container["workingDir"] = options.workdir
    if options.volume_mounts:
        container["volumeMounts"] = [dict(mount) for mount in options.volume_mounts]
    security: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    if not options.run_as_root:
        security["runAsNonRoot"] = True
    if options.user is not None:
        security["runAsUser"] = options.user
    if options.group is not None:
        security["runAsGroup"] = options.group
    optional = {
        "runtimeClassName": options.runtime_class,
        "nodeSelector": dict(options.node_selector),
        "tolerations": [dict(toleration) for toleration in options.tolerations],
        "affinity": options.affinity,
        "priorityClassName": options.priority_class,
        "imagePullSecrets": [{"name": secret} for secret in options.image_pull_secrets],
        "volumes": [dict(volume) for volume in options.volumes],
    }
    made: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "activeDeadlineSeconds": options.lifetime,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": security,
        "containers": [container],
        **{key: value for key, value in optional.items() if value},
    }
    if options.jail is not None and first_process is FirstProcess.RUNNER:
        secure(made, options.jail)
    return made


def delete_options(uid: str, *, grace: int | None = None) -> dict[str, Any]:
    """Return the body of a delete that hits this very object, or nothing if another has its name by now."""
    if not uid:
        raise UsageError("a delete without a UID could hit another object of the same name")
    body: dict[str, Any] = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
    return body if grace is None else {**body, "gracePeriodSeconds": grace}


def image_patch(uid: str, image: str) -> dict[str, Any]:
    """Return the patch (:data:`STRATEGIC_MERGE`) that makes this very Pod serve another image."""
    return {
        "metadata": {"uid": uid, "annotations": {f"{DOMAIN}/image": image}},
        "spec": {"containers": [{"name": CONTAINER, "image": image}]},
    }


def pods_path(namespace: str, name: str | None = None) -> str:
    """Return the path of a namespace's Pods, or of one of them."""
    check_name(namespace, "namespace")
    if name is None:
        return f"/api/v1/namespaces/{namespace}/pods"
    check_name(name, "Pod name")
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def exec_path(namespace: str, name: str) -> str:
    """Return the path that runs a command in a Pod."""
    return pods_path(namespace, name) + "/exec"


def exec_params(
    command: Sequence[str], *, container: str = CONTAINER, stdin: bool = False, tty: bool = False
) -> list[tuple[str, str]]:
    """
    Return the query that runs a command in a Pod.

    Raises:
        UsageError: If the command would take more than :data:`COMMAND_LIMIT` bytes of the URL. What it says must not
            depend on the user's input: scripts and arguments travel in frames.

    """
    size = sum(len("&command=") + len(quote_plus(word)) for word in command)
    if size > COMMAND_LIMIT:
        raise UsageError(f"a command line of {size} bytes does not belong in a URL (at most {COMMAND_LIMIT})")
    return [
        *(("command", word) for word in command),
        ("container", container),
        ("stdin", str(stdin).lower()),
        ("stdout", "true"),
        ("stderr", str(not tty).lower()),
        ("tty", str(tty).lower()),
    ]


def network_policy(run_id: str, *, allow: Iterable[str] = ()) -> dict[str, Any]:
    """
    Return the policy of a run's Pods: nothing in, nothing out but what is allowed.

    It works only where the cluster's network plugin enforces policies.

    Args:
        run_id: 12 hexadecimal digits.
        allow: Where Pods may connect to: ``"dns"``, networks such as ``"10.1.0.0/16"``, or with a TCP port,
            ``"10.1.2.3/32:443"`` or ``"fd00::/8:443"``.

    Raises:
        ConfigurationError: If one of them is none of that.

    """
    check_run_id(run_id)
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": f"asb-{run_id}",
            "labels": {f"{DOMAIN}/managed-by": "agentsandbox", f"{DOMAIN}/run-id": run_id},
        },
        "spec": {
            "podSelector": {"matchLabels": {f"{DOMAIN}/run-id": run_id}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [],
            "egress": [_egress(entry) for entry in allow],
        },
    }


def _egress(entry: str) -> dict[str, Any]:
    if entry == "dns":
        resolvers = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}
        return {"to": [resolvers], "ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]}
    match = re.fullmatch(r"(.+/\d+)(?::(\d+))?", entry)
    try:
        if match is None:
            raise ValueError
        network = str(ipaddress.ip_network(match[1]))
        port = int(match[2]) if match[2] else None
        if port is not None and not 0 < port < 65536:
            raise ValueError
    except ValueError:
        raise ConfigurationError(f"{entry!r} is not 'dns', a network, or a network with a port") from None
    rule: dict[str, Any] = {"to": [{"ipBlock": {"cidr": network}}]}
    return rule if port is None else {**rule, "ports": [{"protocol": "TCP", "port": port}]}
