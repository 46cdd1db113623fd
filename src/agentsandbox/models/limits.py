# SPDX-License-Identifier: Apache-2.0
"""What a number that somebody asks for may be."""

from __future__ import annotations

from agentsandbox.errors import ConfigurationError

__all__ = ["check_count", "check_number"]


def check_count(what: str, value: object, *, least: int = 1) -> None:
    """
    Refuse what is no whole number, or too small; ``True`` is no number.

    Raises:
        ConfigurationError: Naming what it is for, and what it may be.

    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{what} must be a whole number of at least {least}, not {value!r}")


def check_number(what: str, value: object, *, unit: str = "seconds") -> None:
    """
    Refuse what is no number above 0; ``True`` is none.

    Raises:
        ConfigurationError: Naming what it is for, and its unit.

    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigurationError(f"{what} must be a number above 0 {unit}, not {value!r}")
