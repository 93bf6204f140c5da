from __future__ import annotations

import pytest

from vkjobs import ledger
from vkjobs.schema import Status

VERBS = (
    "enqueue",
    "lease",
    "lease_again",
    "free_again",
    "take_over",
    "claim",
    "renew",
    "settle_done",
    "settle_failed",
    "settle_dead_child",
    "snooze",
    "release",
    "cancel",
    "reschedule",
    "retry",
    "prune",
)


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_of_the_state_diagram_is_a_function_of_the_ledger(verb: str) -> None:
    assert Status.__doc__ is not None
    assert verb in Status.__doc__
    assert callable(getattr(ledger, verb))


def test_a_status_is_written_as_it_stands_in_the_table() -> None:
    assert [f"{status}" for status in Status] == ["pending", "running", "done", "failed", "cancelled"]
