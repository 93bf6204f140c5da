from __future__ import annotations

import doctest
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from vkjobs import policy

ATTEMPTS = st.integers(-(2**63), 2**63)
SECONDS = st.floats(0, 31_536_000)


def test_the_examples_hold() -> None:
    assert doctest.testmod(policy).attempted >= 3
    assert doctest.testmod(policy).failed == 0


def test_the_backoff_is_the_originals() -> None:
    assert [policy.backoff(attempts, 30, 86_400) for attempts in range(5)] == [30, 60, 120, 240, 480]


@settings(deadline=None)
@given(ATTEMPTS, SECONDS, SECONDS)
def test_a_backoff_never_overflows_nor_exceeds_its_cap(attempts: int, base: float, cap: float) -> None:
    delay = policy.backoff(attempts, base, cap)
    assert math.isfinite(delay)
    assert 0 <= delay <= cap
    assert policy.backoff(attempts + 1, base, cap) >= delay


@settings(deadline=None)
@given(st.integers(0, 2**31))
def test_a_backoff_of_nothing_is_nothing(attempts: int) -> None:
    assert policy.backoff(attempts, 0, 86_400) == 0


@settings(deadline=None)
@given(st.integers(-(2**63), 0), SECONDS)
def test_less_than_no_attempts_are_none(attempts: int, base: float) -> None:
    assert policy.backoff(attempts, base, 31_536_000) == base


@settings(deadline=None)
@given(ATTEMPTS, st.integers(1, 1_000_000))
def test_a_job_has_as_many_attempts_as_its_policy_says(attempts: int, max_attempts: int) -> None:
    assert policy.is_last(attempts, max_attempts) is (attempts >= max_attempts - 1)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 10_000))
def test_a_batch_has_one_baton_in_its_middle_and_less_than_half_a_batch_has_none(leased: int, batch: int) -> None:
    carrier = policy.baton(leased, batch)
    assert (carrier is None) is (leased == 0 or leased < batch / 2)
    if carrier is not None:
        assert 0 <= carrier < leased
        assert abs(carrier - (leased - 1 - carrier)) <= 1


@settings(deadline=None)
@given(st.integers(1, 10_000), st.floats(-1e9, 1e9), st.integers(2, 10_000), st.floats(0, 1e6))
def test_a_batch_at_most_doubles_and_stays_within_its_bounds(
    batch: int, waited: float, most: int, ticked: float
) -> None:
    size = policy.next_batch(batch, waited, most, ticked)
    assert size == 0 or 2 <= size <= max(2, min(most, 2 * batch))
    assert (size == 0) is (waited > 0 and batch / waited < ticked)


@settings(deadline=None)
@given(st.integers(1, 10_000), st.floats(0, 1e9), st.floats(0, 1e9))
def test_the_longer_a_batch_has_waited_the_smaller_is_the_next(batch: int, one: float, other: float) -> None:
    sizes = [policy.next_batch(batch, waited, 10_000, ticked=20) for waited in sorted((one, other))]
    assert sizes[0] >= sizes[1]
