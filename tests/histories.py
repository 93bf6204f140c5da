"""Histories made by hand: rows in each place, and for each verb what it legally makes of one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from legal import SECOND, Change, History, Instant, Row, Rules

RULES = Rules(max_attempts=3, lease=60, horizon=2, backoff=30, backoff_cap=50, foreign_grace=10)
NOW = 1_700_000_000 * SECOND


def at(seconds: float) -> int:
    """A time so many seconds from the change that is judged."""
    return NOW + round(seconds * SECOND)


CLAIM = {"started_at": at(-20), "claimed_by": "task w@host 7"}
NO_CLAIM = {"started_at": None, "claimed_by": None, "claimed_until": None}
FREE: Row = {
    "id": 7, "kind": "noop", "ref_id": "r", "status": "pending", "run_at": at(-30), "lease_until": None, "attempts": 0,
    "last_error": None, "updated_at": at(-20), **NO_CLAIM, "payload": {"a": 1}, "unique_key": None,
}  # fmt: skip
LEASED = FREE | {"lease_until": at(40)}
EXPIRED = FREE | {"lease_until": at(-5)}
OURS = FREE | CLAIM | {"status": "running", "lease_until": at(40), "claimed_until": at(40)}
DEAD = OURS | {"lease_until": at(-5), "claimed_until": at(-5)}
FOREIGN = FREE | {"status": "running", "lease_until": at(-15)}
OVER = FREE | CLAIM | {"claimed_until": at(40)}
DONE = OVER | {"status": "done"}
FAILED = OVER | {"status": "failed", "attempts": 3, "last_error": "E: x"}
CANCELLED = FREE | {"status": "cancelled"}
PLACES = {"free": FREE, "leased": LEASED, "running": OURS, "done": DONE, "failed": FAILED, "cancelled": CANCELLED}

FREED = {"status": "pending", "lease_until": None, **NO_CLAIM}
FAILURE = {"attempts": 1, "last_error": "E: x", "run_at": at(30)}
LAST = {"status": "failed", "lease_until": None, "attempts": 3, "last_error": "E: x", "run_at": at(50)}

LEGAL: dict[str, tuple[Row, dict[str, Any]]] = {
    "lease": (FREE, {"lease_until": at(62)}),
    "lease again": (EXPIRED, {"lease_until": at(62)}),
    "free": (LEASED, FREED),
    "reschedule": (LEASED, {**FREED, "run_at": at(900)}),
    "cancel": (LEASED, {"status": "cancelled", "lease_until": None}),
    "claim": (
        LEASED,
        {**CLAIM, "status": "running", "started_at": at(0), "lease_until": at(60), "claimed_until": at(60)},
    ),
    "renew": (OURS, {"lease_until": at(60), "claimed_until": at(60)}),
    "settle done": (OURS, {"status": "done", "lease_until": None}),
    "settle failed": (OURS, {**FREED, **FAILURE}),
    "settle failed, the last": (OURS | {"attempts": 2}, LAST),
    "snooze": (OURS, {**FREED, "run_at": at(900)}),
    "give back": (OURS, FREED),
    "take over": (FOREIGN, FREED),
    "retry": (FAILED, {**FREED, "attempts": 0, "run_at": at(0)}),
    "take by the original": (LEASED, {"status": "running", "lease_until": at(60)}),
    "settle by the original": (OURS, {"status": "done", "lease_until": None}),
}
"""By verb, a row and what the verb makes of it."""


def shown(time: Instant) -> str:
    """A time as a statement has it."""
    if math.isinf(time):
        return "'infinity'"
    seconds, fraction = divmod(int(time), SECOND)
    return f"'{datetime.fromtimestamp(seconds, UTC).replace(microsecond=fraction).isoformat()}'"


def of(rows: Iterable[Row | None], **columns: Any) -> History:
    """A history of one job, from row to row; all but the last change are the host's."""
    path = list(rows)
    changes = [
        Change(number, at(-10), "host", "update" if old else "insert", old, new)
        for number, (old, new) in enumerate(zip([None, *path], path, strict=False), 1)
    ]
    changes[-1] = changes[-1]._replace(**{"actor": None, "at": NOW, **columns})
    return History(changes, [row for row in path[-1:] if row is not None])


def changed(
    verb: str,
    old: dict[str, Any] | None = None,
    new: dict[str, Any] | None = None,
    statement: str | None = None,
    tokens: Iterable[Instant] = (),
) -> History:
    """A history that ends with a legal change, or one with these differences; it has had ``tokens`` before."""
    before, changes = LEGAL[verb]
    before = before | (old or {})
    after = before | changes | {"updated_at": at(0)} | (new or {})
    if statement is None and before["lease_until"] is not None:
        statement = f"lease_until in ({shown(before['lease_until'])}::timestamptz)"
    path = [*(before | {"lease_until": token} for token in tokens), before, after]
    actor = "original" if "original" in verb else None
    return of(path, statement=statement or "", actor=actor)


def counted(*verbs: str) -> History:
    """One job's history, legal or not, in which each change begins where the one before ended."""
    row = LEGAL[verbs[0]][0]
    changes = [Change(0, at(-10), "host", "insert", None, row)]
    for number, verb in enumerate(verbs, 1):
        old, row = row, row | LEGAL[verb][1]
        changes.append(Change(number, at(number), None, "update", old, row))
    return History(changes, [row])
