# SPDX-License-Identifier: Apache-2.0
"""No evidence is no reward."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from agentsandbox.errors import ConfigurationError, EvidenceMissing, InvalidTask
from agentsandbox.models.command import ExecResult
from agentsandbox.rollouts.grading import TestOutcome, grade_tests, parse_outcomes, require_failing, require_passed

if TYPE_CHECKING:
    from pathlib import Path

PASSED, FAILED, SKIPPED = TestOutcome.PASSED, TestOutcome.FAILED, TestOutcome.SKIPPED

TESTS = '''
import unittest

class Case(unittest.TestCase):
    def test_good(self):
        pass

    def test_documented(self):
        """A line of documentation."""

    def test_bad(self):
        self.assertEqual(1, 2)

    def test_broken(self):
        raise RuntimeError("x")

    @unittest.skip("not today")
    def test_skipped(self):
        pass

    @unittest.expectedFailure
    def test_expected(self):
        self.fail()
'''


def result(text: str = "", *, code: int = 0, truncated: bool = False, stderr: str = "") -> ExecResult:
    """Return the result of a test command."""
    return ExecResult(exit_code=code, stdout=text.encode(), stderr=stderr.encode(), truncated=truncated)


def test_p59_a_baseline_that_passes_is_an_invalid_task() -> None:
    """A task whose tests pass before it is solved has no reward."""
    with pytest.raises(InvalidTask, match=r"must fail before the task is solved, and it passed \(exit code 0\)"):
        require_failing(result("t1 PASSED\n"))


def test_a_failing_baseline_is_returned() -> None:
    """A baseline that ran and failed is what is wanted."""
    failing = result("t1 FAILED\n", code=1)

    assert require_failing(failing) is failing


@pytest.mark.parametrize(
    ("baseline", "words"),
    [
        pytest.param(result(code=127), "could not be executed", id="no such program"),
        pytest.param(result(code=137), "ended by signal 9", id="killed"),
        pytest.param(result("...", code=1, truncated=True), "is incomplete", id="truncated"),
    ],
)
def test_a_baseline_that_did_not_run_is_no_failing_baseline(baseline: ExecResult, words: str) -> None:
    """An exit code other than 0 proves nothing if the tests never ran."""
    with pytest.raises(EvidenceMissing, match=words):
        require_failing(baseline)


def test_p59_an_empty_output_is_no_evidence() -> None:
    """Exit code 0 and nothing printed: the tests never ran, so there is no reward."""
    with pytest.raises(EvidenceMissing, match="printed nothing"):
        grade_tests(result(""), tests=["t1"])
    with pytest.raises(EvidenceMissing, match="printed nothing"):
        require_passed(result(""), tests=["t1"])


def test_p59_a_missing_test_is_no_evidence() -> None:
    """Output that ends after the first test says nothing of the second."""
    cut = result("t1 PASSED\n")

    with pytest.raises(EvidenceMissing, match="does not mention t2"):
        grade_tests(cut, tests=["t1", "t2"])


@pytest.mark.parametrize(
    ("graded", "words"),
    [
        pytest.param(result("t1 PASSED\n", truncated=True), "is incomplete", id="truncated"),
        pytest.param(result("t1 PASSED\n", code=137), "ended by signal 9", id="killed"),
        pytest.param(result("t1 PASSED\n", code=126), "could not be executed", id="not executable"),
        pytest.param(result("t1 FAILED\n", code=0), "failed, and the exit code is 0", id="contradiction"),
        pytest.param(result("t1 SKIPPED\n"), "were skipped: t1", id="skipped"),
        pytest.param(result("ran t1: PASSED with flying colours\n"), "does not mention t1", id="prose"),
    ],
)
def test_p59_doubtful_results_are_not_graded(graded: ExecResult, words: str) -> None:
    """Neither 0 nor 1 is the reward of a run that proves nothing."""
    with pytest.raises(EvidenceMissing, match=words):
        grade_tests(graded, tests=["t1"])


def test_grades() -> None:
    """1 if every required test passed, 0 if one failed; others do not count."""
    text = "t1 PASSED\nt2 PASSED\nt3 FAILED\n"

    assert grade_tests(result(text, code=1), tests=["t1", "t2"]) == 1.0
    assert grade_tests(result(text, code=1), tests=["t1", "t3"]) == 0.0
    assert grade_tests(result(text, code=1), tests="t1") == 1.0
    assert grade_tests(result("", code=1), tests=["t1"], text="t1 PASSED") == 1.0


def test_a_failed_test_decides_although_another_was_skipped() -> None:
    """One failed test is enough for 0."""
    assert grade_tests(result("t1 SKIPPED\nt2 FAILED\n", code=1), tests=["t1", "t2"]) == 0.0


def test_no_tests_are_no_evidence() -> None:
    """A grader that names no test is a mistake of its author."""
    with pytest.raises(ConfigurationError, match="at least one test"):
        grade_tests(result("t1 PASSED\n"), tests=[])


def test_require_passed() -> None:
    """Every named test passed and the command agrees, or it raises."""
    good = result("t1 PASSED\nt2 PASSED\n")

    assert require_passed(good, tests=["t1", "t2"]) is good
    with pytest.raises(EvidenceMissing, match="no evidence that these tests passed: t2"):
        require_passed(result("t1 PASSED\nt2 FAILED\n", code=1), tests=["t1", "t2"])
    with pytest.raises(EvidenceMissing, match="and yet the exit code is 2"):
        require_passed(result("t1 PASSED\n", code=2), tests=["t1"])


def test_long_lists_are_shortened() -> None:
    """A message names five tests and counts the rest."""
    with pytest.raises(EvidenceMissing, match=r"does not mention t0, t1, t2, t3, t4 and 7 more$"):
        grade_tests(result("x PASSED\n"), tests=[f"t{number}" for number in range(12)])


@pytest.mark.parametrize(
    ("text", "outcomes"),
    [
        pytest.param("tests/test_a.py::test_x PASSED      [ 50%]", {"tests/test_a.py::test_x": PASSED}, id="pytest -v"),
        pytest.param("a.py::T::test_x[a b-1] FAILED [100%]", {"a.py::T::test_x[a b-1]": FAILED}, id="parameters"),
        pytest.param("a.py::t SKIPPED (no network) [ 1%]", {"a.py::t": SKIPPED}, id="skipped with a reason"),
        pytest.param("a.py::t XFAIL (known)", {"a.py::t": PASSED}, id="expected failure"),
        pytest.param("FAILED a.py::t - assert 1 == 2", {"a.py::t": FAILED}, id="pytest -rA"),
        pytest.param("PASSED a.py::t", {"a.py::t": PASSED}, id="pytest -rA passed"),
        pytest.param("a.py::t PASSED\nERROR a.py::t - at teardown", {"a.py::t": FAILED}, id="the worst counts"),
        pytest.param("a.py::t FAILED\nPASSED a.py::t", {"a.py::t": FAILED}, id="in whatever order"),
        pytest.param("1 passed in 0.1s", {}, id="a summary is no evidence"),
        pytest.param("", {}, id="nothing"),
    ],
)
def test_what_pytest_prints(text: str, outcomes: dict[str, TestOutcome]) -> None:
    """Lines of pytest are read as they are."""
    assert dict(parse_outcomes(text)) == outcomes


def test_what_unittest_prints(tmp_path: Path) -> None:
    """The real output of ``unittest -v`` is read, documented tests and failures among it."""
    (tmp_path / "test_cases.py").write_text(TESTS)
    command = [sys.executable, "-m", "unittest", "-v", "test_cases"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    graded = ExecResult(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)
    seen = parse_outcomes(graded.error_text)

    assert {name: seen.get(f"test_cases.Case.{name}") for name in (
        "test_good", "test_documented", "test_bad", "test_broken", "test_skipped", "test_expected"
    )} == {
        "test_good": PASSED,
        "test_documented": PASSED,
        "test_bad": FAILED,
        "test_broken": FAILED,
        "test_skipped": SKIPPED,
        "test_expected": PASSED,
    }  # fmt: skip
    assert seen["test_good"] is PASSED
    assert grade_tests(graded, tests=["test_good", "test_documented"]) == 1.0
    assert grade_tests(graded, tests=["test_cases.Case.test_bad"]) == 0.0


def test_a_method_name_that_two_cases_share_is_not_enough() -> None:
    """A short name counts only if it is unique."""
    text = "test_x (m.A.test_x) ... ok\ntest_x (m.B.test_x) ... FAIL\n"

    assert dict(parse_outcomes(text)) == {"m.A.test_x": PASSED, "m.B.test_x": FAILED}


def test_unittest_of_older_pythons() -> None:
    """Up to Python 3.10 the class alone stands in parentheses."""
    assert dict(parse_outcomes("test_x (m.A) ... ok\n")) == {"m.A.test_x": PASSED, "test_x": PASSED}


def test_what_a_test_prints_itself_does_not_hide_its_outcome() -> None:
    """Output between a name and its outcome is skipped, and never glued to another test."""
    text = "test_x (m.A.test_x) ... some output\nok\ntest_y (m.A.test_y) ... hangs\ntest_z (m.A.test_z) ... ok\n"

    assert dict(parse_outcomes(text)) == {
        "m.A.test_x": PASSED,
        "test_x": PASSED,
        "m.A.test_z": PASSED,
        "test_z": PASSED,
    }


def test_a_test_that_prints_ok_and_fails_has_failed() -> None:
    """Of several outcomes the worst counts, also of subtests."""
    printed = "test_x (m.A.test_x) ... ok\nFAIL\n\n====\nFAIL: test_x (m.A.test_x)\n----\nok\n"
    subtests = "test_x (m.A.test_x) ... \n  test_x (m.A.test_x) (i=1) ... FAIL\nok\n"

    assert parse_outcomes(printed)["m.A.test_x"] is FAILED
    assert parse_outcomes(subtests)["m.A.test_x"] is FAILED
