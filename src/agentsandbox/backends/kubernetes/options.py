# SPDX-License-Identifier: Apache-2.0
"""How users want their Pods, checked before a cluster hears of it; and which names and labels a cluster takes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

import attrs

from agentsandbox.backends.kubernetes.jailing import JailOptions, check, jail_options
from agentsandbox.errors import ConfigurationError

__all__ = [
    "DOMAIN",
    "PodOptions",
    "check_key",
    "check_labels",
    "check_name",
    "check_object",
    "check_run_id",
    "label_value",
    "lifetime",
    "quantity",
]

DOMAIN = "agentsandbox.dev"
"""Prefix of our labels and annotations."""

DAY = 24 * 3600
"""Seconds that a Pod lives when nothing is said."""

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_PREFIX = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
_FACTORS: dict[str, Decimal] = {"": Decimal(1), "m": Decimal("0.001"), "k": Decimal(1000)} | {
    unit + i: Decimal(base) ** power for i, base in (("", 1000), ("i", 1024)) for power, unit in enumerate("KMGTPE", 1)
}
_ENV = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")


def quantity(value: str) -> Decimal:
    """
    Return the number that the cluster's way of writing quantities stands for.

    Raises:
        ConfigurationError: If it is not one.

    """
    match = _QUANTITY.fullmatch(value)
    if match is None:
        raise ConfigurationError(f"{value!r} is not a quantity such as '500m', '2' or '1Gi'")
    return Decimal(match[1]) * _FACTORS[match[2] or ""]


def _mapping(value: Mapping[str, Any]) -> dict[str, Any]:
    return dict(value)


def _tuple(value: Iterable[Any]) -> tuple[Any, ...]:
    if isinstance(value, str):
        raise ConfigurationError(f"{value!r} should be a list")
    return tuple(value)


def _seconds(value: Iterable[float]) -> tuple[float, ...]:
    found = _tuple(value)
    for one in found:
        if isinstance(one, bool) or not isinstance(one, int | float) or not 0 < one < math.inf:
            raise ConfigurationError(f"stages: {one!r} is not a number of seconds above 0")
    return found


@attrs.frozen(kw_only=True)
class PodOptions:
    """How Pods are made, whatever their image. Checked when it is made, as far as that goes without a cluster."""

    requests: Mapping[str, str] = attrs.field(factory=lambda: {"cpu": "250m", "memory": "512Mi"}, converter=_mapping)
    """What the scheduler sets aside, such as ``{"cpu": "500m", "memory": "1Gi"}``."""
    limits: Mapping[str, str] = attrs.field(factory=lambda: {"cpu": "2", "memory": "2Gi"}, converter=_mapping)
    """What a sandbox can use at most."""
    stages: tuple[float, ...] = attrs.field(default=(), converter=_seconds)
    """Time limits of everything that an episode does one after another, in seconds: a Pod has to outlive their sum."""
    max_lifetime: float | None = None
    """The longest that a Pod may live, in seconds; ``None`` is any time."""
    lifetime: int = attrs.field(default=attrs.Factory(lambda self: self._derived(), takes_self=True))
    """Seconds after which the cluster ends a Pod whatever we do; by default by :attr:`stages`, else a day."""
    run_as_root: bool = False
    """Let the image's user be root. Needed by images that declare no other user."""
    user: int | None = None
    """User id to run as; ``None`` is the image's."""
    group: int | None = None
    """Group id to run as; ``None`` is the image's."""
    capabilities: tuple[str, ...] = attrs.field(default=(), converter=_tuple)
    """Linux capabilities to add; all others are dropped."""
    runtime_class: str | None = None
    """Runtime class, such as ``gvisor``."""
    node_selector: Mapping[str, str] = attrs.field(factory=dict, converter=_mapping)
    """Labels that a node must have."""
    tolerations: tuple[Mapping[str, Any], ...] = attrs.field(default=(), converter=_tuple)
    """Taints that are fine, in the words of the Pod API."""
    affinity: Mapping[str, Any] | None = None
    """Affinity, in the words of the Pod API."""
    priority_class: str | None = None
    """Priority class."""
    image_pull_secrets: tuple[str, ...] = attrs.field(default=(), converter=_tuple)
    """Names of Secrets for the registry."""
    pull_policy: str = attrs.field(
        default="IfNotPresent", validator=attrs.validators.in_(("IfNotPresent", "Always", "Never"))
    )
    """When to pull the image."""
    volumes: tuple[Mapping[str, Any], ...] = attrs.field(default=(), converter=_tuple)
    """Volumes, in the words of the Pod API. They survive a restart in place: nothing of an episode belongs on them."""
    volume_mounts: tuple[Mapping[str, Any], ...] = attrs.field(default=(), converter=_tuple)
    """Where they appear in the sandbox."""
    env: Mapping[str, str] = attrs.field(factory=dict, converter=_mapping)
    """Variables on top of the image's. No secrets: everybody who may read Pods reads them."""
    workdir: str | None = None
    """Directory to start in; ``None`` is the image's."""
    labels: Mapping[str, str] = attrs.field(factory=dict, converter=_mapping)
    """Labels of your own."""
    annotations: Mapping[str, str] = attrs.field(factory=dict, converter=_mapping)
    """Annotations of your own."""
    jail: JailOptions | None = attrs.field(default=None, converter=jail_options)
    """
    Whether each sandbox is a jail in its Pod, which is a reset of some milliseconds: ``True``, or fields of
    :class:`~agentsandbox.backends.kubernetes.jailing.JailOptions`. It gives the Pod capabilities, ``SYS_ADMIN`` among
    them, that its jails do not have.
    """
    slots: int = 1
    """How many sandboxes one Pod serves at once; more than one are jails."""

    def __attrs_post_init__(self) -> None:
        """Check everything that can be checked without a cluster."""
        for where in (self.requests, self.limits):
            for value in where.values():
                quantity(value)
        for resource, least in self.requests.items():
            most = self.limits.get(resource)
            if quantity(least) <= 0:
                raise ConfigurationError(f"request of {resource}: {least} is not more than 0")
            if most is not None and quantity(least) > quantity(most):
                raise ConfigurationError(f"request of {resource}: {least} is more than the limit {most}")
        if self.lifetime < 1 or self.lifetime > 2**31 - 1:
            raise ConfigurationError(f"lifetime: {self.lifetime} is not a number of seconds that a Pod can live")
        if self.max_lifetime is not None and self.lifetime > self.max_lifetime:
            raise ConfigurationError(f"lifetime is {self.lifetime} s, and max_lifetime {self.max_lifetime:g} s")
        if self.lifetime < sum(self.stages):
            need = sum(self.stages)
            raise ConfigurationError(f"lifetime is {self.lifetime} s, and the stages may take {need:g} s in all")
        if self.user == 0 and not self.run_as_root:
            raise ConfigurationError("user: 0 is root, which needs run_as_root=True")
        if self.workdir is not None and not self.workdir.startswith("/"):
            raise ConfigurationError(f"workdir: {self.workdir!r} is not absolute")
        for name in self.env:
            if not _ENV.fullmatch(name):
                raise ConfigurationError(f"env: {name!r} is not the name of a variable")
        for name in (*self.image_pull_secrets, *filter(None, (self.runtime_class, self.priority_class))):
            check_object(name)
        check_labels(self.labels)
        check_labels(self.node_selector)
        for key in (*self.labels, *self.annotations):
            if key.startswith(f"{DOMAIN}/"):
                raise ConfigurationError(f"{key}: the domain {DOMAIN} is ours")
            check_key(key)
        check(self.jail, self.slots, root=self.run_as_root and not self.user, volume_mounts=self.volume_mounts)

    @property
    def needed(self) -> float:
        """How long a Pod must have to live when an episode gets it, in seconds."""
        return sum(self.stages) or self.lifetime / 2

    def _derived(self) -> int:
        if not self.stages:
            return DAY if self.max_lifetime is None else math.floor(min(DAY, self.max_lifetime))
        # As long again as an episode takes, so that a Pod may also wait for one.
        return lifetime(self.stages, margin=max(300.0, sum(self.stages)), max_lifetime=self.max_lifetime)


def lifetime(stages: Iterable[float], *, margin: float = 300.0, max_lifetime: float | None = None) -> int:
    """
    Return how long a Pod has to live, in whole seconds.

    Args:
        stages: Deadlines of everything that happens in it one after another, in seconds.
        margin: For what happens between them, in seconds.
        max_lifetime: What the caller allows at most, in seconds.

    Raises:
        ConfigurationError: If the stages alone take longer than allowed.

    """
    need = sum(stages)
    if max_lifetime is not None and max_lifetime < need:
        raise ConfigurationError(f"max_lifetime is {max_lifetime:g} s, and the stages may take {need:g} s in all")
    return math.ceil(min(need + margin, math.inf if max_lifetime is None else max_lifetime))


def label_value(text: str) -> str:
    """Turn any text, such as a user's name, into the nearest label value."""
    return re.sub(r"[^-A-Za-z0-9_.]+", "-", text)[:63].strip("-_.")


def check_name(value: str, what: str) -> None:
    """Refuse what is not a DNS label; *what* says what it names."""
    if not _NAME.fullmatch(value) or len(value) > 63:
        raise ConfigurationError(f"{what} {value!r}: at most 63 of a-z, 0-9 and '-', not '-' at either end")


def check_object(value: str) -> None:
    """Refuse what cannot be the name of an object: DNS labels with dots between them."""
    if not _PREFIX.fullmatch(value) or len(value) > 253:
        raise ConfigurationError(f"{value!r} is not the name of an object")


def check_run_id(value: str) -> None:
    """Refuse what is not a run id."""
    if not re.fullmatch(r"[0-9a-f]{12}", value):
        raise ConfigurationError(f"run id {value!r}: 12 hexadecimal digits are one")


def check_key(key: str) -> None:
    """Refuse what is not the key of a label or annotation."""
    prefix, _, name = key.rpartition("/")
    if not name or not _LABEL.fullmatch(name) or len(name) > 63:
        raise ConfigurationError(f"label {key!r}: the name is at most 63 of A-Z, a-z, 0-9, '-', '_' and '.'")
    if "/" in key and (not _PREFIX.fullmatch(prefix) or len(prefix) > 253):
        raise ConfigurationError(f"label {key!r}: {prefix!r} is not a domain")


def check_labels(labels: Mapping[str, str]) -> None:
    """Refuse what the API server would not take as labels."""
    for key, value in labels.items():
        check_key(key)
        if not isinstance(value, str) or not _LABEL.fullmatch(value) or len(value) > 63:
            raise ConfigurationError(
                f"label {key}: {value!r} is not at most 63 of A-Z, a-z, 0-9, '-', '_' and '.', beginning and ending "
                "with a letter or digit"
            )
