# SPDX-License-Identifier: Apache-2.0
"""``agentsandbox doctor``: whether a backend can work here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from agentsandbox.backends.base import Check
from agentsandbox.backends.opening import open_backend
from agentsandbox.errors import SandboxError
from agentsandbox.models.sandbox import SandboxSpec

if TYPE_CHECKING:
    from rich.console import Console

    from agentsandbox.backends.base import Backend

__all__ = ["doctor"]


async def doctor(
    backend: str,
    console: Console,
    *,
    as_json: bool,
    images: Sequence[str] = (),
    options: dict[str, Any] | None = None,
) -> bool:
    """
    Examine what a backend needs, and print each answer with what to do about a bad one.

    Args:
        backend: Its name.
        console: Where to print.
        as_json: Whether to print one JSON object instead.
        images: Of each of these a sandbox is made, looked into and removed, if nothing else is missing.
        options: Arguments of the backend's class.

    Returns:
        Whether it can work.

    """
    examined = open_backend(backend, **(options or {}))
    checks = await examined.examine()
    if images and all(check.ok for check in checks if check.required):
        checks += await _try(examined, images)
    good = all(check.ok for check in checks if check.required)
    if as_json:
        console.print_json(json.dumps({"backend": backend, "ok": good, "checks": [attrs.asdict(c) for c in checks]}))
        return good
    for check in checks:
        word, style = ("ok", "green") if check.ok else ("FAIL", "red") if check.required else ("note", "yellow")
        console.print(f"{word:>4}", style=style, end="  ")
        console.print(f"{check.name}: {check.detail}", markup=False, highlight=False)
        if not check.ok and check.fix:
            console.print(f"      {check.fix}", markup=False, highlight=False)
    console.print(
        f"the {backend} backend {'can work here' if good else 'cannot work here'}", markup=False, highlight=False
    )
    return good


async def _try(backend: Backend, images: Sequence[str]) -> list[Check]:
    """Make a sandbox of each image, and say what it can do."""
    specs = [SandboxSpec(image=image) for image in images]
    found: list[Check] = []
    try:
        await backend.validate(specs)
        async with backend.running():
            for number, spec in enumerate(specs):
                found.append(await _look(backend, spec, f"doctor-{number}"))
    except SandboxError as error:
        found.append(Check(name="sandbox", ok=False, detail=str(error)))
    return found


async def _look(backend: Backend, spec: SandboxSpec, name: str) -> Check:
    start = anyio.current_time()
    try:
        sandbox = await backend.create(spec, name)
    except SandboxError as error:
        words = "the words are the backend's own"
        return Check(name=f"image {spec.image}", ok=False, detail=f"{type(error).__name__}: {error}", fix=words)
    seconds = anyio.current_time() - start
    able = sandbox.capabilities
    await backend.destroy(sandbox)
    facts = [
        f"exec level {able.exec_level}",
        *([f"Python {able.python}"] if able.python else []),
        *([f"protocol {able.facts['protocol']}"] if able.facts.get("protocol") else []),
        f"isolation {able.isolation}",
        f"reset by {', '.join(able.rungs)}",
        "several users" if able.users else "one user",
        *([f"network policy {able.facts['network_policy']}"] if able.facts.get("network_policy") else []),
    ]
    return Check(name=f"image {spec.image}", ok=True, detail=f"ready in {seconds:.1f} s; {'; '.join(facts)}")
