# SPDX-License-Identifier: Apache-2.0
"""
Turning the result of a test command into a reward that is worth training on.

A test that did not run has not passed. These functions want explicit evidence for every test that matters, in output
that is complete; where it is missing they raise, so that the episode has no reward instead of a wrong one.

They read what the sandbox printed. An episode that can change the tests or their runner can print anything: put both
back in place before grading.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from agentsandbox.errors import ConfigurationError, EvidenceMissing, InvalidTask

if TYPE_CHECKING:
    from agentsandbox.models.command import ExecResult

__all__ = ["TestOutcome", "grade_tests", "parse_outcomes", "require_failing", "require_passed"]

_SIGNALLED = 128
"""Exit codes above this say that a signal ended the command."""

_NOT_RUN = frozenset({126, 127})
"""Exit codes of a shell that could not execute the command."""


class TestOutcome(StrEnum):
    """What a test runner says about one test."""

    __test__ = False

    PASSED = "passed"
    """It ran and passed."""
    FAILED = "failed"
    """It ran and failed, or ended in an error."""
    SKIPPED = "skipped"
    """It did not run."""


_PASSED, _FAILED, _SKIPPED = TestOutcome.PASSED, TestOutcome.FAILED, TestOutcome.SKIPPED
_WORDS = {
    "PASSED": _PASSED,
    "XFAIL": _PASSED,
    "ok": _PASSED,
    "expected failure": _PASSED,
    "FAILED": _FAILED,
    "ERROR": _FAILED,
    "XPASS": _FAILED,
    "FAIL": _FAILED,
    "unexpected success": _FAILED,
    "SKIPPED": _SKIPPED,
    "skipped": _SKIPPED,
}

# pytest -v:         tests/test_a.py::test_x[1-2] PASSED     [ 50%]
_PYTEST_VERBOSE = re.compile(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)(?: .*)?$")
# pytest -rA, and a plain "t1 PASSED" or "PASSED t1":
_WORD_FIRST = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS) (\S.*?)(?: - .*)?$")
_WORD_LAST = re.compile(r"^(\S+) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)$")
# unittest -v:       test_x (test_a.Case.test_x) ... ok       or, with a docstring, the outcome on the next line
_UNITTEST = re.compile(r"^\s*(\w+) \(([\w.<>]+)\)(.*)$")
_UNITTEST_END = re.compile(r"^(ok|FAIL|ERROR|skipped|expected failure|unexpected success)(?: .*)?$")


def parse_outcomes(text: str) -> Mapping[str, TestOutcome]:
    """
    Read what a test runner printed about each test.

    Understood are ``pytest -v``, ``pytest -rA``, ``python -m unittest -v`` and lines such as ``name PASSED``. A test of
    unittest is entered under its dotted name (``module.Case.test``) and, if unique, under its method name.
    A test that is mentioned more than once has the worst of its outcomes.

    Args:
        text: The output of the runner.

    Returns:
        Name to outcome, of the tests that are mentioned.

    """
    outcomes: dict[str, TestOutcome] = {}
    methods: dict[str, set[str]] = {}
    current: str | None = None
    for line in map(str.rstrip, text.splitlines()):
        if (match := _PYTEST_VERBOSE.match(line)) or (match := _WORD_LAST.match(line)):
            _enter(outcomes, match[1], _WORDS[match[2]])
        elif match := _WORD_FIRST.match(line):
            _enter(outcomes, match[2], _WORDS[match[1]])
        if header := _UNITTEST.match(line):
            method, where = header[1], header[2]
            current = where if where.endswith(f".{method}") else f"{where}.{method}"  # The class alone, up to 3.10.
            methods.setdefault(method, set()).add(current)
        elif line.startswith(("=====", "-----")):
            current = None
        # What a test prints itself stands between its name and its outcome: of several outcomes the worst counts.
        end = _UNITTEST_END.match(line.rpartition(" ... ")[2]) if current else None
        if current and end:
            _enter(outcomes, current, _WORDS[end[1]])
    for method, names in methods.items():
        name = next(iter(names))
        if len(names) == 1 and name in outcomes:
            outcomes.setdefault(method, outcomes[name])
    return MappingProxyType(outcomes)


def require_failing(result: ExecResult, *, what: str = "the baseline") -> ExecResult:
    """
    Insist that the tests fail before the task is solved: a task that passes already teaches nothing.

    Args:
        result: The result of the test command in the unchanged sandbox.
        what: What ran, for the message.

    Returns:
        The result itself.

    Raises:
        InvalidTask: If it passed.
        EvidenceMissing: If it did not fail but was killed, or never ran.

    """
    if result.exit_code == 0:
        raise InvalidTask(f"{what} must fail before the task is solved, and it passed (exit code 0)")
    _check_ran(result, what)
    return result


def require_passed(result: ExecResult, *, tests: Iterable[str], text: str | None = None) -> ExecResult:
    """
    Insist on explicit evidence that every one of *tests* ran and passed.

    Args:
        result: The result of the test command.
        tests: The names as the runner prints them; at least one.
        text: The runner's report, if it is not in the standard output followed by the standard error.

    Returns:
        The result itself.

    Raises:
        EvidenceMissing: If one did not pass, or is not mentioned, or if the output is incomplete or contradicts the
            exit code.

    """
    outcomes = _evidence(result, tests, text)
    lacking = [name for name, outcome in outcomes.items() if outcome is not _PASSED]
    if lacking:
        raise EvidenceMissing(f"no evidence that these tests passed: {_some(lacking)}")
    if result.exit_code != 0:
        raise EvidenceMissing(f"every required test passed, and yet the exit code is {result.exit_code}")
    return result


def grade_tests(result: ExecResult, *, tests: Iterable[str], text: str | None = None) -> float:
    """
    Return the reward for a set of tests: 1.0 if every one passed, 0.0 if one failed.

    A command that fails although every required test passed (a test outside *tests* failed) gives 1.0: only what is
    asked for decides.

    Args:
        result: The result of the test command.
        tests: The names as the runner prints them; at least one.
        text: The runner's report, if it is not in the standard output followed by the standard error.

    Returns:
        1.0 or 0.0.

    Raises:
        EvidenceMissing: If a test is not mentioned or was skipped and none failed, or if the output is incomplete, or
            if a test failed and the exit code is 0: then there is no valid reward.

    """
    outcomes = _evidence(result, tests, text)
    failed = [name for name, outcome in outcomes.items() if outcome is _FAILED]
    if failed and result.exit_code == 0:
        raise EvidenceMissing(f"the output says that {_some(failed)} failed, and the exit code is 0")
    if failed:
        return 0.0
    skipped = [name for name, outcome in outcomes.items() if outcome is _SKIPPED]
    if skipped:
        raise EvidenceMissing(f"these tests were skipped: {_some(skipped)}")
    return 1.0


def _evidence(result: ExecResult, tests: Iterable[str], text: str | None) -> Mapping[str, TestOutcome]:
    required = [tests] if isinstance(tests, str) else list(dict.fromkeys(tests))
    if not required:
        raise ConfigurationError("name at least one test: no tests are no evidence")
    _check_ran(result, "the test command")
    if text is None:
        text = f"{result.text}\n{result.error_text}"
    if not text.strip():
        raise EvidenceMissing("the test command printed nothing")
    seen = parse_outcomes(text)
    absent = [name for name in required if name not in seen]
    if absent:
        raise EvidenceMissing(f"the output does not mention {_some(absent)}")
    return {name: seen[name] for name in required}


def _check_ran(result: ExecResult, what: str) -> None:
    if result.truncated:
        raise EvidenceMissing(f"the output of {what} is incomplete; raise output_limit or use require_complete=True")
    if result.exit_code in _NOT_RUN:
        raise EvidenceMissing(f"{what} could not be executed (exit code {result.exit_code})")
    if result.exit_code > _SIGNALLED:
        raise EvidenceMissing(f"{what} was ended by signal {result.exit_code - _SIGNALLED}")


def _enter(outcomes: dict[str, TestOutcome], name: str, outcome: TestOutcome) -> None:
    order = (_PASSED, _SKIPPED, _FAILED)
    before = outcomes.get(name, outcome)
    outcomes[name] = max(before, outcome, key=order.index)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
