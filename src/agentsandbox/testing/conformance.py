# SPDX-License-Identifier: Apache-2.0
"""
The contract of a backend as plain functions.

Each check is ``async def check_<rule>(source, image)``: *source* grants leases of *image*, two at a time (a
:class:`~agentsandbox.SandboxClient` or a :class:`~agentsandbox.SandboxPool` does), and its docstring is the rule. It
returns when the rule holds, raises :exc:`AssertionError` (or what the backend raised) when it does not, and
:exc:`NotApplicable` when the sandbox does not claim the capability. The image needs ``/bin/sh`` and the usual small
programs: ``cat``, ``seq``, ``sha256sum`` and their like.

In a test module::

    @pytest.mark.anyio
    @pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
    async def test_contract(check):
        async with SandboxClient(MyBackend(), images={"image": 2}) as client:
            await check(client, "image")
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import attrs

from agentsandbox.errors import UsageError
from agentsandbox.testing import exec_checks, file_checks, lease_checks, process_checks
from agentsandbox.testing.subject import NotApplicable, Source

__all__ = ["CHECKS", "Check", "NotApplicable", "Report", "Source", "run_all"]

Check = Callable[[Source, str], Awaitable[None]]
"""One rule of the contract."""

CHECKS: tuple[Check, ...] = tuple(
    value
    for module in (exec_checks, process_checks, file_checks, lease_checks)
    for name, value in vars(module).items()
    if name.startswith("check_")
)
"""Every rule, in the order in which a new backend best meets them."""


@attrs.frozen(kw_only=True)
class Report:
    """What came of :func:`run_all`."""

    passed: tuple[str, ...]
    """Names of the checks that hold."""
    not_applicable: tuple[tuple[str, str], ...]
    """Names of those that do not apply, each with the reason."""


async def run_all(source: Source, image: str, *, checks: Iterable[Check] = CHECKS) -> Report:
    """
    Run the checks one after another.

    Args:
        source: What grants leases, two at a time.
        image: Of what image.
        checks: Which checks to run.

    Returns:
        Which checks passed and which do not apply.

    Raises:
        ExceptionGroup: With the error of each check that failed; a note on each names the check and its rule.
        UsageError: If assertions are switched off (``python -O``): nothing would be checked.

    """
    if not __debug__:
        raise UsageError("conformance checks need assertions: run Python without -O")
    passed: list[str] = []
    skipped: list[tuple[str, str]] = []
    failed: list[Exception] = []
    for check in checks:
        name = getattr(check, "__name__", repr(check))
        try:
            await check(source, image)
        except NotApplicable as reason:
            skipped.append((name, str(reason)))
        except Exception as error:  # noqa: BLE001 - collected with its check's name, and raised below
            error.add_note(f"{name}: {check.__doc__}")
            failed.append(error)
        else:
            passed.append(name)
    if failed:
        raise ExceptionGroup(f"{len(failed)} of {len(failed) + len(passed)} checks failed", failed)
    return Report(passed=tuple(passed), not_applicable=tuple(skipped))
