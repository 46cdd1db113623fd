# SPDX-License-Identifier: Apache-2.0
"""``agentsandbox cleanup``: remove what a run left behind, and only that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentsandbox.backends.opening import backend_class
from agentsandbox.cli.output import read_receipt

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["cleanup"]


async def cleanup(output: Path) -> list[str]:
    """
    Remove what the run that wrote *output* left behind. The directory itself stays.

    Args:
        output: The directory of the run.

    Returns:
        One line for each thing that was removed, or one that says that nothing was left.

    Raises:
        ConfigurationError: If there is no receipt.
        UsageError: If the run is still going on, or something is not provably its own.

    """
    receipt = read_receipt(output)
    removed = await backend_class(receipt["backend"]).remove_leftovers(receipt)
    return [*removed] or [f"nothing is left of run {receipt['run_id']}"]
