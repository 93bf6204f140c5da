"""Backoff, attempts and batons: pure functions of numbers. No clock, no connection, no setting is read here."""

from __future__ import annotations

_MAX_DOUBLINGS = 64  # any backoff of a microsecond or more has met its cap long before


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

    When it is settled half of the batch still waits, enough to keep the workers busy while the next one is leased. A
    lease of less than half a batch took all that was due, or the window is full of others, one of which has a baton.

    >>> baton(100, batch=100), baton(50, batch=100), baton(49, batch=100), baton(1, batch=1)
    (50, 25, None, 0)
    """
    return leased // 2 if leased and 2 * leased >= batch else None
