# SPDX-License-Identifier: Apache-2.0
"""What a number that somebody asks for may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agentsandbox.errors import ConfigurationError

if TYPE_CHECKING:
    import attrs

__all__ = ["at_least", "check_count", "check_number", "quantile", "share"]


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


def quantile(_: object, attribute: attrs.Attribute[Any], value: float) -> None:
    """Refuse for a field what is no quantile."""
    if not 0 < value < 1:
        raise ConfigurationError(f"{attribute.name} must be between 0 and 1, not {value!r}")


def share(_: object, attribute: attrs.Attribute[Any], value: float) -> None:
    """Refuse for a field what is no share of a whole."""
    if not 0 <= value <= 1:
        raise ConfigurationError(f"{attribute.name} is a share from 0 to 1, not {value!r}")


def at_least(least: int, unit: str = "") -> Callable[[object, attrs.Attribute[Any], float], None]:
    """Refuse for a field what is less than *least*."""

    def check(_: object, attribute: attrs.Attribute[Any], value: float) -> None:
        if not value >= least:
            raise ConfigurationError(f"{attribute.name} must be at least {f'{least} {unit}'.strip()}, not {value!r}")

    return check
