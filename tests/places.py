"""The places in which a row of vk_jobs can be, and whole rows compared with what is expected of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

from rows import Row
from sqlalchemy import Connection, text

ME = "task-1 w@host 7"
_RAN = {"claimed_by": ME, "started_at": -90}

PLACES: dict[str, dict[str, Any]] = {
    "free": {},
    "free, with an old claim": {**_RAN, "claimed_until": -30},
    "leased": {"lease_until": 60},
    "leased, with an old claim": {"lease_until": 60, **_RAN, "claimed_until": -30},
    "leased, expired": {"lease_until": -5},
    "leased since ever": {"lease_until": "-infinity"},
    "leased too far": {"lease_until": 90_000},
    "leased for ever": {"lease_until": "infinity"},
    "ours": {"status": "running", "lease_until": 60, "claimed_until": 60, **_RAN},
    "ours, expired": {"status": "running", "lease_until": -5, "claimed_until": -5, **_RAN},
    "foreign": {"status": "running", "lease_until": 60},
    "foreign, once ours": {"status": "running", "lease_until": 60, "claimed_until": 59, **_RAN},
    "foreign, expired": {"status": "running", "lease_until": -5},
    "foreign, once ours, expired": {"status": "running", "lease_until": -5, "claimed_until": -6, **_RAN},
    "running without lease": {"status": "running"},
    "running without lease, once ours": {"status": "running", "claimed_until": -5, **_RAN},
    "running for ever": {"status": "running", "lease_until": "infinity"},
    "done": {"status": "done", "claimed_until": -5, **_RAN},
    "done, with a lease": {"status": "done", "lease_until": 60, "claimed_until": 60, **_RAN},
    "failed": {"status": "failed", "claimed_until": -5, **_RAN},
    "failed, with a lease": {"status": "failed", "lease_until": 60, "claimed_until": 60, **_RAN},
    "cancelled": {"status": "cancelled"},
    "cancelled, with a lease": {"status": "cancelled", "lease_until": 60, "claimed_until": 60, **_RAN},
}
"""By name, the columns of a row in each place; times are seconds from now."""


def at(*beginnings: str) -> frozenset[str]:
    """Return the places whose names begin so; each beginning must fit one."""
    found = {beginning: {place for place in PLACES if place.startswith(beginning)} for beginning in beginnings}
    assert all(found.values()), found
    return frozenset().union(*found.values())


def full(place: str, **columns: Any) -> dict[str, Any]:
    """Return a row's columns in a place, none left at a default that a statement could reset unseen."""
    common = {"ref_id": "r", "attempts": 2, "last_error": "before", "payload": {"a": 1}, "unique_key": "key"}
    return {**common, "updated_at": -80, **PLACES[place], **columns}


def moment(shown: str) -> datetime:
    """Return a time that Postgres showed as text."""
    return datetime.fromisoformat(shown)


class Near(float):
    """A time so many seconds after the statement, by the database's clock."""


class Span:
    """When a statement ran, by the database's clock."""

    began: datetime
    ended: datetime

    def holds(self, found: str | None, seconds: float) -> bool:
        if found is None or "infinity" in found or "BC" in found:
            return False
        later = timedelta(seconds=seconds)
        return self.began + later <= moment(found) <= self.ended + later


@contextmanager
def timed(conn: Connection) -> Iterator[Span]:
    """Take down when the block's statements ran."""
    span = Span()
    now = text("select clock_timestamp()")
    span.began = conn.scalars(now).one()
    yield span
    span.ended = conn.scalars(now).one()


def assert_changed(before: Row, after: Row, span: Span, **changes: Any) -> None:
    """Assert that ``changes``, and nothing else, lie between the two rows."""
    seen: dict[str, Any] = {
        name: value
        for name, value in changes.items()
        if isinstance(value, Near) and span.holds(getattr(after, name), value)
    }
    assert after._replace(**seen) == before._replace(**changes)
