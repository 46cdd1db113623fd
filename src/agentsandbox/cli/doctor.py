# SPDX-License-Identifier: Apache-2.0
"""``agentsandbox doctor``: whether a backend can work here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import attrs

from agentsandbox.backends.opening import open_backend

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["doctor"]


async def doctor(backend: str, console: Console, *, as_json: bool) -> bool:
    """
    Examine what a backend needs, and print each answer with what to do about a bad one.

    Args:
        backend: Its name.
        console: Where to print.
        as_json: Whether to print one JSON object instead.

    Returns:
        Whether it can work.

    """
    checks = await open_backend(backend).examine()
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
