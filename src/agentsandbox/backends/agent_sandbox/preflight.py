# SPDX-License-Identifier: Apache-2.0
"""Whether a cluster has the controller, in a version that is known here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentsandbox.backends.agent_sandbox.objects import CORE, EXTENSIONS, served
from agentsandbox.backends.base import Check
from agentsandbox.backends.kubernetes.api import KubernetesApi
from agentsandbox.errors import ConfigurationError, InfrastructureError, NotFound

__all__ = ["INSTALL", "examine_controller"]

INSTALL = "install the agent-sandbox controller with its extensions, or use backend 'kubernetes'"
"""What to do about a cluster without it."""


async def examine_controller(where: Mapping[str, Any]) -> list[Check]:
    """
    Ask the API server for the kinds of the controller.

    Args:
        where: Arguments of :meth:`KubernetesApi.connect`.

    """
    try:
        api = await KubernetesApi.connect(**where, max_connections=8)
    except ConfigurationError:
        return []  # said already
    try:
        return [await _group(api, group) for group in (CORE, EXTENSIONS)]
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
