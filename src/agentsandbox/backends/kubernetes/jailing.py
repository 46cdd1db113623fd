# SPDX-License-Identifier: Apache-2.0
"""What it takes for a Pod to make jails, and how its jails are to be. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from agentsandbox.errors import ConfigurationError

__all__ = ["CAPABILITIES", "MODULES", "MOST_SLOTS", "STORAGE", "JailOptions", "check", "jail_options", "secure"]

CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD"),
    *("SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_ADMIN", "SYS_CHROOT"),
)
"""
What the first process of a Pod with jails may do: mount and make namespaces (``SYS_ADMIN``), change to the new root
(``SYS_CHROOT``), map ids, and keep in the layer above the image whatever owners and modes files have. Jails have none
of it outside of themselves.
"""

MODULES = tuple(f"agentsandbox.protocol.runner.{name}" for name in ("cell", "groups", "jail", "jailer", "sieve"))
"""Modules of the runner that make jails."""

STORAGE = "/.agentsandbox"
"""Where the volume for what jails write is mounted, if that is to be on disk. No jail shows it."""

MOST_SLOTS = 256
"""Jails of a Pod at most: far beyond what one first process can serve well."""

_VOLUME = "agentsandbox-jails"
_MIB = 1024**2


@attrs.frozen(kw_only=True)
class JailOptions:
    """How the jails of a Pod are made."""

    network: bool = False
    """Whether they share the network of the Pod, its ports included; otherwise each has loopback and nothing else."""
    user_namespace: bool = False
    """
    Whether the Pod gets a user namespace (``hostUsers: false``), so that its capabilities mean nothing on the node. It
    takes a container runtime that can do that.
    """
    apparmor: bool = True
    """Whether the Pod keeps the AppArmor profile of its runtime; most of them forbid to mount anything."""
    storage: str = "memory"
    """Where they keep what they write: ``"memory"`` of the Pod, or ``"disk"``, a volume of it that all share."""
    disk_limit: int = 1024 * _MIB
    """How much each may write in memory, in bytes; it counts as the Pod's memory. On disk there is no limit of each."""
    inodes: int = 1_000_000
    """How many files each may have in memory."""
    max_processes: int = 1024
    """How many processes and threads each may have: all together where control groups are delegated, else each user
    but root."""
    open_files: int = 65536
    """How many descriptors a process may have."""
    address_space: int | None = None
    """How much address space a process may have, in bytes; ``None`` sets no limit."""
    memory: int | None = None
    """
    How much memory each may use, in bytes, where control groups are delegated; ``None`` is its share of the Pod's.
    """

    def __attrs_post_init__(self) -> None:
        if self.storage not in ("memory", "disk"):
            raise ConfigurationError(f'storage of jails is "memory" or "disk", not {self.storage!r}')
        for name in ("network", "user_namespace", "apparmor"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"{name} of jails is True or False, not {getattr(self, name)!r}")
        for name, least in (
            *(("disk_limit", _MIB), ("inodes", 64), ("max_processes", 8), ("open_files", 64)),
            *(("address_space", 16 * _MIB), ("memory", 16 * _MIB)),
        ):
            value = getattr(self, name)
            if value is None and name in ("address_space", "memory"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigurationError(f"{name} of jails is a whole number of at least {least}, not {value!r}")

    def limits(self) -> dict[str, Any]:
        """Return what the kernel enforces on each jail by itself."""
        return {
            name: getattr(self, name)
            for name in ("disk_limit", "inodes", "max_processes", "open_files", "address_space")
        }

    def groups(self, *, slots: int, memory: int | None) -> dict[str, Any]:
        """
        Return what control groups are to enforce on each jail.

        Args:
            slots: How many share the Pod.
            memory: What the Pod may use, in bytes, if that is limited.

        """
        share = memory // slots if memory is not None else None
        return {"cpu": 1024, "pids": self.max_processes, "memory": share if self.memory is None else self.memory}


def jail_options(value: Any) -> JailOptions | None:
    """
    Return the options that a user gave as ``jail``: ``True``, a mapping, or nothing.

    Raises:
        ConfigurationError: If it is none of that, or has an unknown key.

    """
    if value is None or value is False:
        return None
    if isinstance(value, JailOptions):
        return value
    if value is True:
        return JailOptions()
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"jail is True or a mapping such as {{'network': True}}, not {value!r}")
    if unknown := set(value) - {field.name for field in attrs.fields(JailOptions)}:
        raise ConfigurationError(f"jail has no option {', '.join(sorted(map(str, unknown)))}")
    return JailOptions(**value)


def check(options: JailOptions | None, slots: int, *, root: bool, volume_mounts: Iterable[Mapping[str, Any]]) -> None:
    """
    Refuse what no Pod could do.

    Args:
        options: How jails are to be; ``None`` for none.
        slots: How many share a Pod.
        root: Whether its first process may be root.
        volume_mounts: What else is mounted in it.

    Raises:
        ConfigurationError: Saying what to change.

    """
    if isinstance(slots, bool) or not isinstance(slots, int) or not 1 <= slots <= MOST_SLOTS:
        raise ConfigurationError(f"slots is a whole number from 1 to {MOST_SLOTS}, not {slots!r}")
    if options is None:
        if slots > 1:
            raise ConfigurationError(f"slots={slots} needs jails, which give the Pod SYS_ADMIN: say jail=True as well")
        return
    if not root:
        raise ConfigurationError("jail needs a Pod whose first process is root: run_as_root=True, and no other user")
    shared = [str(mount.get("mountPath")) for mount in volume_mounts if not mount.get("readOnly")]
    if shared:
        raise ConfigurationError(f"jails of a Pod would share {', '.join(shared)}: mount it with readOnly")


def secure(spec: dict[str, Any], options: JailOptions) -> None:
    """
    Add to the spec of a Pod what jails need, and nothing else.

    Args:
        spec: The Pod's spec, changed in place.
        options: How its jails are to be.

    """
    (container,) = spec["containers"]
    security = container["securityContext"]
    wanted = security["capabilities"].get("add", [])
    security["capabilities"]["add"] = sorted({*wanted, *CAPABILITIES})
    security["allowPrivilegeEscalation"] = True  # the API server refuses SYS_ADMIN with anything else
    if not options.apparmor:
        security["appArmorProfile"] = {"type": "Unconfined"}
    if options.user_namespace:
        spec["hostUsers"] = False
        security["procMount"] = "Unmasked"  # in a user namespace a new /proc may show no more than the old one
    if options.storage == "disk":
        spec.setdefault("volumes", []).append({"name": _VOLUME, "emptyDir": {}})
        container.setdefault("volumeMounts", []).append({"name": _VOLUME, "mountPath": STORAGE})
