# SPDX-License-Identifier: Apache-2.0
"""The command line. Needs the extra ``cli``."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; the entry point ``agentsandbox``."""
    try:
        from agentsandbox.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in {"rich", "typer"}:
            raise
        sys.exit(f"the command line needs {error.name}: pip install 'agentsandbox[cli]'")
    app()
