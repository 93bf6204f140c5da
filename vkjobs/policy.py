"""Backoff, attempts, batons and batches: pure functions of numbers. No clock, connection or setting is read here."""

from __future__ import annotations

FIRST_BATCH = 20
"""Jobs that a tick lets wait in a queue of which it knows nothing: the original's batch."""

_MAX_DOUBLINGS = 64  # any backoff of a microsecond or more has met its cap long before
_WAIT_S = 0.5  # that the middle of a batch should have waited: enough that no worker is ever idle
_LEAST_BATCH = 2


def backoff(attempts: int, base: float, cap: float) -> float:
    """Return the seconds to wait after a failed attempt: ``base * 2 ** attempts``, at most ``cap``.

    The rule is the original dispatcher's. ``attempts`` are those that had failed before; a row may hold any number.

    >>> [backoff(n, base=30, cap=86_400) for n in (0, 1, 4, 38)]
    [30.0, 60.0, 480.0, 86400]
    """
    return min(cap, base * 2.0 ** min(max(attempts, 0), _MAX_DOUBLINGS))


def is_last(attempts: int, max_attempts: int) -> bool:
    """Tell whether the attempt that fails now, after ``attempts`` failed ones, is the last that a job has.

    >>> is_last(3, max_attempts=5), is_last(4, max_attempts=5)
    (False, True)
    """
    return attempts + 1 >= max_attempts


def baton(leased: int, batch: int) -> int | None:
    """Return which of ``leased`` messages carries the baton: one in the middle; None if none shall.

    When it is started half of the batch still waits, enough to keep the workers busy while the next one is leased. A
    lease of less than half a batch took all that was due, or the window is full of others, one of which has a baton.

    >>> baton(100, batch=100), baton(50, batch=100), baton(49, batch=100), baton(1, batch=1)
    (50, 25, None, 0)
    """
    return leased // 2 if leased and 2 * leased >= batch else None


def next_batch(batch: int, waited: float, most: int, ticked: float) -> int:
    """Return how many jobs to lease next, when the middle of ``batch`` was started after ``waited`` seconds.

    As many as the workers start in a second, at that rate: so that they are never idle, and what waits is started long
    before its lease ends. It grows by no more than twice at a time. 0 where ticks, which let ``ticked`` jobs start
    a second, are enough for twice that rate: a run for a few jobs would cost more than the jobs.

    >>> next_batch(20, waited=0.01, most=100, ticked=20), next_batch(100, waited=0.4, most=100, ticked=20)
    (40, 100)
    >>> next_batch(20, waited=0.9, most=100, ticked=20), next_batch(20, waited=1.1, most=100, ticked=20)
    (11, 0)
    """
    waited = max(waited, 1e-6)
    if batch / waited < ticked:
        return 0
    return max(_LEAST_BATCH, min(most, 2 * batch, round(batch * _WAIT_S / waited)))
