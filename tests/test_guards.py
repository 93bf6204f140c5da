"""The guards are where they are said to be, and the program that takes them out cannot be fooled."""

from __future__ import annotations

import subprocess
import sys

import pytest
from guards import GUARDS, page
from guards.guard import Guard, guard
from guards.proof import complaint, verdict

ROOT = page.PATH.parents[1]
POLICY = "test_policy.py::test_a_backoff_never_overflows_nor_exceeds_its_cap"
QUICK = ("the last attempt ends a job", "what JSON lacks is refused where a job is enqueued", "snooze names the token")


def test_each_guard_stands_in_the_source_and_its_tests_are_there() -> None:
    assert {guard.name: fault for guard in GUARDS if (fault := guard.fault())} == {}


def test_no_two_guards_have_one_name() -> None:
    assert len({guard.name for guard in GUARDS}) == len(GUARDS)


def test_the_page_of_invariants_lists_the_guards() -> None:
    assert page.PATH.read_text() == page.written(page.PATH.read_text()), "run: PYTHONPATH=tests python -m guards --docs"


@pytest.mark.parametrize("one", [guard for guard in GUARDS if guard.name in QUICK], ids=lambda guard: guard.name)
def test_a_guard_is_needed(one: Guard) -> None:
    assert verdict(one) == ""


@pytest.mark.parametrize(
    ("text", "without", "test", "reason"),
    [
        ("return min(cap, base", "return min(cap, 0 + base", POLICY, f"without it {POLICY} did not fail: 1 passed"),
        (
            "return min(cap, base",
            "return minimum(cap, base",
            POLICY,
            "what is left is broken: NameError: name 'minimum'",
        ),
        ("return min(cap, base", "return min(cap base", POLICY, "without it vkjobs/policy.py is no Python: "),
        ("return maximum(cap", "", POLICY, "its text stands 0 times in vkjobs/policy.py"),
        ("return ", "", POLICY, "its text stands "),
        ("return min(cap, base", "return max(cap, base", "test_policy.py::test_none", "there is no test "),
        ("return min(cap, base", "return max(cap, base", "test_none.py::test_none", "there is no test "),
    ],
)
def test_what_proves_nothing_is_told(text: str, without: str, test: str, reason: str) -> None:
    assert verdict(guard("x", 1, "policy.py", text, without, test)).startswith(reason)


def test_a_test_that_fails_anyway_proves_nothing() -> None:
    found = complaint([guard("x", 1, "policy.py", "", "", "test_policy.py::test_none")])
    assert found.startswith("tests fail with all guards in place:")


def test_the_program_says_what_it_found() -> None:
    command = [sys.executable, "-P", "-m", "guards", "--only", "policy.py: the last attempt"]
    environment = {"PYTHONPATH": str(ROOT / "tests"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    proven, last = done.stdout.splitlines()
    assert proven.startswith("needed ")
    assert proven.endswith(" s  policy.py: the last attempt ends a job")
    assert last == "1 of 1 guards are needed"
