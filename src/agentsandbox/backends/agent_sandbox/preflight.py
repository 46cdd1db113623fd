# SPDX-License-Identifier: Apache-2.0
"""Whether a cluster has the controller, in a version that is known here, and what pools of others give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from agentsandbox.backends.agent_sandbox.given import Given, find, offer
from agentsandbox.backends.agent_sandbox.objects import CORE, EXTENSIONS, served
from agentsandbox.backends.base import Check
from agentsandbox.backends.kubernetes.api import KubernetesApi
from agentsandbox.errors import ConfigurationError, InfrastructureError, NotFound

__all__ = ["INSTALL", "examine_controller", "without_pods"]

INSTALL = "install the agent-sandbox controller with its extensions, or use backend 'kubernetes'"
"""What to do about a cluster without it."""


def without_pods(check: Check) -> Check:
    """Return a check as it counts for who has the controller make Pods and need not be allowed to."""
    if check.name != "pod" or check.ok or "cannot create resource" not in check.detail:
        return check
    detail = "not tried, since no Pods may be made, not even by a dry run: no used sandbox is made anew in place"
    return attrs.evolve(check, detail=detail, fix="allow create on pods, for dry runs only", required=False)


async def examine_controller(where: Mapping[str, Any], given: Mapping[str, Given]) -> list[Check]:
    """
    Ask the API server for the kinds of the controller, and for pools and templates that are to be there.

    Args:
        where: Arguments of :meth:`KubernetesApi.connect`.
        given: Those pools and templates, by image.

    """
    try:
        api = await KubernetesApi.connect(**where, max_connections=8)
    except ConfigurationError:
        return []  # said already
    try:
        checks = [await _group(api, group) for group in (CORE, EXTENSIONS)]
        if all(check.ok for check in checks):
            for one in given.values():
                checks += await _given(api, checks[1].detail, one)
        return checks
    finally:
        await api.aclose()


async def _group(api: KubernetesApi, group: str) -> Check:
    try:
        version = served(group, await api.request("GET", f"/apis/{group}"))
    except NotFound:
        return Check(name=group, ok=False, detail="not served", fix=INSTALL)
    except (ConfigurationError, InfrastructureError) as error:
        return Check(name=group, ok=False, detail=str(error), fix=INSTALL)
    return Check(name=group, ok=True, detail=version)


async def _given(api: KubernetesApi, version: str, given: Given) -> list[Check]:
    name = f"image {given.image}"
    try:
        found, pool, template = await find(api, version, given)
        offered = offer(template["spec"]["podTemplate"])
    except (ConfigurationError, InfrastructureError) as error:
        return [Check(name=name, ok=False, detail=str(error), fix="ask who made it, or leave the image to this run")]
    detail = f"{found.words}, template {found.template}: container {offered.container} of {offered.image}"
    checks = [Check(name=name, ok=True, detail=detail)]
    if pool is not None:
        ready, kept = (pool.get("status") or {}).get("readyReplicas", 0), pool["spec"].get("replicas", 1)
        fix = "claims beyond what is ready start cold; its owner can raise its replicas"
        words = f"{ready} of {kept} ready"
        checks.append(Check(name=f"{name} warm", ok=ready > 0, detail=words, fix=fix, required=False))
    fix = "where that matters, leave the image to this run: its templates have both"
    checks.append(Check(name=f"{name} reuse", ok=False, detail="; ".join(offered.missing), fix=fix, required=False))
    return checks
