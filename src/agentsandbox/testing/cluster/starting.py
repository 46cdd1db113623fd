# SPDX-License-Identifier: Apache-2.0
"""From a Pod's spec to a container that runs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from agentsandbox.testing.cluster.peers import EchoContainer
from agentsandbox.testing.cluster.podspec import quantity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentsandbox.testing.cluster.containers import Container
    from agentsandbox.testing.cluster.replies import Json
    from agentsandbox.testing.cluster.worker import Worker

__all__ = ["NOT_STARTED", "dropped", "duration", "rule", "start"]

_CAPABILITIES = re.findall(
    r"[A-Z_]+",
    """
    CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE
    NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT
    SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL
    SETFCAP
    """,
)
"""In the kernel's order."""

NOT_STARTED = (
    "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: "
    "unable to start container process: error during container init: {}: unknown"
)
"""What a container runtime says of a container whose first process cannot be started."""


async def start(worker: Worker) -> Container | EchoContainer:
    """
    Start the container of a Pod whose image is there.

    Raises:
        NotStarted: If its first process cannot be started.

    """
    cluster, pod = worker.cluster, worker.pod
    spec = pod["spec"]["containers"][0]
    if cluster.process == "echo-runner":
        return EchoContainer(cluster.network.answering(pod, cluster.answer))
    image = worker.kubelet.image(spec["image"])
    assert image is not None
    outer, inner = pod["spec"].get("securityContext") or {}, spec.get("securityContext") or {}
    user, group = (inner.get(key, outer.get(key)) for key in ("runAsUser", "runAsGroup"))
    limit = ((spec.get("resources") or {}).get("limits") or {}).get("memory")
    # What volumes hold outlives containers; it lies where the parent of the containers keeps it.
    kept = {volume["name"]: f"/volumes/{worker.uid}/{volume['name']}" for volume in pod["spec"].get("volumes") or ()}
    files = {
        volume["name"]: _data(worker, volume["configMap"]["name"])
        for volume in pod["spec"].get("volumes") or ()
        if "configMap" in volume
    }
    return await cluster.runtime.run(
        image,
        argv=[*(spec.get("command") or image.command), *(spec.get("args") or ())],
        env={
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            "KUBERNETES_SERVICE_PORT": "443",
            **{entry["name"]: _value(entry, pod) for entry in spec.get("env") or ()},
        },
        workdir=spec.get("workingDir"),
        user=None if user is None else str(user),
        group=group,
        drop=dropped(inner.get("capabilities") or {}),
        nested="SYS_ADMIN" in ((inner.get("capabilities") or {}).get("add") or ()),
        memory=int(quantity(limit)) if limit and cluster.enforce_memory else None,
        volumes=[
            (kept[mount["name"]], mount["mountPath"], files.get(mount["name"], {}))
            for mount in spec.get("volumeMounts") or ()
        ],
        hostname=worker.name,
    )


def _value(entry: Json, pod: Json) -> str:
    """Return what a variable is set to."""
    path = ((entry.get("valueFrom") or {}).get("fieldRef") or {}).get("fieldPath", "")
    if not path:
        return str(entry.get("value", ""))
    found: Any = pod
    for part in path.split("."):
        found = found.get(part) or ""
    return str(found)


def _data(worker: Worker, name: str) -> dict[str, str]:
    """Return the files of a ConfigMap; there are none in one that is not there."""
    store = worker.cluster.store
    found = store.find(store.resource("configmaps"), worker.namespace, name)
    return dict(found.object.get("data") or {}) if found is not None else {}


def dropped(capabilities: Mapping[str, Sequence[str]]) -> list[int]:
    """Return the numbers of the capabilities that a container does without."""
    without, added = set(capabilities.get("drop") or ()), set(capabilities.get("add") or ())
    return [
        number
        for number, name in enumerate(_CAPABILITIES)
        if ("ALL" in without or name in without) and name not in added
    ]


def rule(container: Json, code: int) -> str:
    """Return what a container's restart rules say to an exit code: ``Restart``, ``RestartAllContainers`` or nothing."""
    for one in container.get("restartPolicyRules") or ():
        codes = one.get("exitCodes") or {}
        within = code in (codes.get("values") or ())
        if within == (codes.get("operator", "In") == "In"):
            return str(one.get("action"))
    return ""


def duration(seconds: float) -> str:
    """Return a time as a kubelet writes it."""
    whole = round(seconds)
    return f"{whole}s" if whole < 60 else f"{whole // 60}m{whole % 60}s"
