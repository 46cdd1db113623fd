# SPDX-License-Identifier: Apache-2.0
"""
Templates and warm pools that somebody else has made: what they give, and what they do not. Mostly pure.

They are read, and never changed, scaled or deleted. Claims on them are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from agentsandbox.backends.agent_sandbox.objects import path
from agentsandbox.backends.kubernetes.conditions import container_of
from agentsandbox.backends.kubernetes.manifests import RESTART_EXIT_CODE
from agentsandbox.backends.kubernetes.options import check_object
from agentsandbox.errors import ConfigurationError, NotFound

if TYPE_CHECKING:
    from agentsandbox.backends.kubernetes.api import Json, KubernetesApi

__all__ = ["Given", "Offer", "find", "find_all", "named", "offer"]

AT_ONCE = 16

SHORT = 5
"""Seconds that a Pod may take to end without being told about."""


@attrs.frozen(kw_only=True)
class Given:
    """Where the Sandboxes of an image come from, if not from a template of ours."""

    image: str
    """The word by which episodes name it."""
    pool: str = ""
    """The SandboxWarmPool to claim from; empty where only the template is given, and the pool is ours to make."""
    template: str = ""
    """The SandboxTemplate; of a pool, known when it has been looked at."""

    @property
    def words(self) -> str:
        """Name it."""
        return f"SandboxWarmPool {self.pool!r}" if self.pool else f"SandboxTemplate {self.template!r}"


@attrs.frozen(kw_only=True)
class Offer:
    """What Pods of a template have that is not ours to choose."""

    container: str
    """The container that is the sandbox."""
    image: str
    """Its image."""
    runtime: str = ""
    """Runtime class; empty is the cluster's default."""
    grace: int = 30
    """Seconds that a Pod may take to end."""
    restarts: bool = False
    """Whether the container has the rule by which Pods of ours are made anew in place."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Say what the template does not give, and what follows from it."""
        rule = (
            "its rule for restarts is of no use without" if self.restarts else "it has neither a rule for restarts nor"
        )
        lacks = [
            "a runner is started by exec: the first process is the template's",
            f"no reset in place, since {rule} a first process of ours: each used sandbox is replaced by a new claim",
        ]
        if self.grace > SHORT:
            lacks.append(f"a Pod may take {self.grace} s to end (terminationGracePeriodSeconds), and counts as long")
        return tuple(lacks)


def named(pools: Mapping[str, str] | None, templates: Mapping[str, str] | None) -> dict[str, Given]:
    """
    Read the options ``pools`` and ``templates``: image → name of an object.

    Raises:
        ConfigurationError: If one of them is not that, or an image is in both.

    """
    found: dict[str, Given] = {}
    for option, names in (("pool", pools), ("template", templates)):
        if names is None:
            continue
        if not isinstance(names, Mapping):
            raise ConfigurationError(f"{option}s is a mapping of image → name of a {option}, not {names!r}")
        for image, name in names.items():
            if not isinstance(image, str) or not image:
                raise ConfigurationError(f"{option}s: an image is a name such as 'swe', not {image!r}")
            if not isinstance(name, str):
                raise ConfigurationError(f"{option}s: {image!r} is to be the name of a {option}, not {name!r}")
            check_object(name)
            if image in found:
                raise ConfigurationError(f"image {image!r} is in pools and in templates: name one of them")
            found[image] = Given(image=image, **{option: name})
    return found


def offer(pod: Mapping[str, Any]) -> Offer:
    """
    Read off a Pod, or the Pod template of a SandboxTemplate, what it gives.

    Raises:
        ConfigurationError: If it has no container.

    """
    container = container_of(pod)
    if not container.get("name"):
        raise ConfigurationError("it has no container")
    rules = container.get("restartPolicyRules") or ()
    return Offer(
        container=str(container["name"]),
        image=str(container.get("image", "")),
        runtime=str(pod["spec"].get("runtimeClassName") or ""),
        grace=int(pod["spec"].get("terminationGracePeriodSeconds", 30)),
        restarts=any(
            rule.get("action") == "RestartAllContainers"
            and RESTART_EXIT_CODE in ((rule.get("exitCodes") or {}).get("values") or ())
            for rule in rules
        ),
    )


async def find(api: KubernetesApi, version: str, given: Given) -> tuple[Given, Json | None, Json]:
    """
    Look a pool and its template up.

    Returns:
        What was given, with the name of the template; the pool, if one was given; and the template.

    Raises:
        ConfigurationError: If one of them is not there.
        ControlPlaneError: If the API server refuses or does not answer.

    """
    pool: Json | None = None
    try:
        if given.pool:
            pool = await api.request("GET", path(version, "sandboxwarmpools", api.namespace, given.pool))
            given = attrs.evolve(given, template=str(pool["spec"]["sandboxTemplateRef"]["name"]))
        template = await api.request("GET", path(version, "sandboxtemplates", api.namespace, given.template))
    except NotFound:
        of = f", the template of {given.words}," if given.pool and pool is not None else ""
        what = f"SandboxTemplate {given.template!r}" if pool is not None or not given.pool else given.words
        raise ConfigurationError(
            f"image {given.image!r}: {what}{of} is not in namespace {api.namespace}; "
            "kubectl get sandboxwarmpools,sandboxtemplates shows what there is"
        ) from None
    return given, pool, template


async def find_all(api: KubernetesApi, version: str, given: Mapping[str, Given]) -> dict[str, Given]:
    """
    Make sure that all pools and templates are there.

    Raises:
        ConfigurationError: If one of them is not.
        ControlPlaneError: If the API server refuses or does not answer.

    """
    found: dict[str, Given] = {}
    failures: list[Exception] = []
    slots = anyio.Semaphore(AT_ONCE)

    async def one(each: Given) -> None:
        async with slots:
            try:
                found[each.image], _, _ = await find(api, version, each)
            except Exception as error:  # noqa: BLE001 - raised below, and not in a group
                failures.append(error)

    async with anyio.create_task_group() as group:
        for each in given.values():
            group.start_soon(one, each)
    if failures:
        raise failures[0]
    return found
