"""What may happen to a row of vk_jobs, as pure code: a history is replayed, and what was illegal is told.

The protocol is told here a second time, and nothing of vkjobs is used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Id = int | str
Instant = float
"""Microseconds since 1970; an int, or an infinity. Unlike a datetime it holds any time that Postgres has."""
Row = dict[str, Any]

SECOND = 1_000_000

_INSTANT = re.compile(
    r"(\d{4,})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?([+-])(\d\d)(?::?(\d\d))?(?::(\d\d))?( BC)?"
)


class Change(NamedTuple):
    """One change of one row, with its times as `Instant`; ``op`` is insert, update, delete, truncate or found."""

    seq: int
    at: Instant
    actor: str | None
    op: str
    old: Row | None
    new: Row | None
    statement: str = ""
    txid: int | None = None
    pid: int | None = None

    @property
    def id(self) -> Id:
        """The row's id."""
        row = self.old or self.new
        assert row is not None
        id: Id = row["id"]
        return id


class History(NamedTuple):
    """All that happened, in order, and what the table holds in the end."""

    changes: Sequence[Change]
    rows: Sequence[Row]


@dataclass(frozen=True)
class Rules:
    """The settings under which the workers ran; durations in seconds."""

    max_attempts: int
    lease: float
    """Of a kind with a lease of its own: the longer one."""
    horizon: float
    backoff: float
    backoff_cap: float = 86_400
    foreign_grace: float = 0

    @property
    def longest(self) -> float:
        """Microseconds; a pending row is leased for lease and horizon."""
        return (self.lease + self.horizon) * SECOND


def instant(shown: str) -> Instant:
    """Return a time that Postgres has shown as text or JSON."""
    if "infinity" in shown:
        return -math.inf if shown.startswith("-") else math.inf
    match = _INSTANT.fullmatch(shown)
    assert match is not None, shown
    return _instant(match)


def _instant(match: re.Match[str]) -> int:
    year, month, day, hour, minute, second = map(int, match.groups()[:6])
    fraction, sign, *zone, before_christ = match.groups()[6:]
    if before_christ:
        year = 1 - year
    # Days by the proleptic Gregorian calendar, in which a year begins in March and 400 of them have 146,097.
    year, month = (year, month - 3) if month > 2 else (year - 1, month + 9)
    days = 365 * year + year // 4 - year // 100 + year // 400 + (153 * month + 2) // 5 + day - 719_469
    offset = sum(int(part or 0) * unit for part, unit in zip(zone, (3600, 60, 1), strict=True))
    seconds = days * 86_400 + hour * 3600 + minute * 60 + second + (offset if sign == "-" else -offset)
    return seconds * SECOND + int((fraction or "").ljust(6, "0"))


class Step(NamedTuple):
    """An update, as the demands on it see it."""

    old: Row
    new: Row
    at: Instant
    rules: Rules
    tokens: set[Instant]
    """All leases that the row has ever had."""
    statement: str

    def names(self, column: str) -> bool:
        """Tell whether the statement holds the time that it found in the column."""
        return any(_instant(match) == self.old[column] for match in _INSTANT.finditer(self.statement))

    def names_token(self) -> bool:
        return self.names("lease_until")

    def names_child(self) -> bool:
        quoted = (self.old["claimed_by"] or "").replace("'", "''")
        return f"claimed_by = '{quoted}'" in self.statement

    def late(self, name: str, since: str) -> float:
        """Return the seconds from one time of the new row to another."""
        seconds: float = (self.new[name] - self.new[since]) / SECOND
        return seconds

    def backoff(self) -> float:
        doublings = min(max(self.old["attempts"] or 0, 0), 64)
        return min(self.rules.backoff_cap, self.rules.backoff * 2.0**doublings)

    def last(self) -> bool:
        gave_up = (self.new["last_error"] or "").startswith("GiveUp")
        return gave_up or (self.old["attempts"] or 0) + 1 >= self.rules.max_attempts


class Demand(NamedTuple):
    """What a change must fulfil, and the words for one that does not."""

    complaint: str
    holds: Callable[[Step], bool]

    def met(self, step: Step) -> bool:
        try:
            return self.holds(step)
        except TypeError:  # null where there must be a time or a number
            return False


class Verb(NamedTuple):
    """A transition: the columns that it may change, and what else it must fulfil."""

    columns: frozenset[str]
    demands: tuple[Demand, ...]


_CLAIM = ("started_at", "claimed_by", "claimed_until")
_ROUGHLY_S = 1.0  # between two readings of the clock in one statement
_WAIT_S = 120.0  # for a lock, after a statement has read the clock


def _expired(step: Step) -> bool:
    # One further off than any lease given by now is taken for expired too.
    found = step.old["lease_until"]
    return bool(found < step.at or found > step.new["updated_at"] + step.rules.longest)


CLOCK = Demand(
    "updated_at is not the database's time of the change",
    lambda s: s.at - _WAIT_S * SECOND < s.new["updated_at"] <= s.at and s.new["updated_at"] != s.old["updated_at"],
)
FRESH = Demand("the token is not new", lambda s: s.new["lease_until"] not in s.tokens)
AHEAD = Demand("the lease is over when it begins", lambda s: s.new["lease_until"] > s.new["updated_at"])
BOUNDED = Demand(
    "the lease is longer than any",
    lambda s: s.new["lease_until"] <= s.at + s.rules.longest + _ROUGHLY_S * SECOND,
)
KEPT = Demand(
    "the lease is longer than any",
    # A renewal never goes back, not even if the clock does.
    lambda s: s.new["lease_until"] <= max(s.at + s.rules.longest, s.old["lease_until"]) + _ROUGHLY_S * SECOND,
)
FORWARD = Demand(
    "the token is an old one",
    lambda s: (
        s.new["lease_until"] == s.old["lease_until"]  # the same renewal again: its answer was lost
        or (s.new["lease_until"] > s.old["lease_until"] and s.new["lease_until"] not in s.tokens)
    ),
)
SIGNED = Demand("claimed_until is not the new token", lambda s: s.new["claimed_until"] == s.new["lease_until"])
CLEARED = Demand("it leaves claim columns on a pending row", lambda s: all(s.new[name] is None for name in _CLAIM))
UNLEASED = Demand("it leaves a lease on a row that is over", lambda s: s.new["lease_until"] is None)
BY_TOKEN = Demand("it does not name the token that it found", Step.names_token)
BY_TOKEN_OR_CHILD = Demand(
    "it names neither the token nor the child that it found",
    lambda s: s.names_token() or s.names_child(),
)
FREED_BY_RIGHT = Demand(
    "it frees a lease that is neither named nor expired",
    lambda s: s.old["lease_until"] is None or s.names_token() or _expired(s) or s.names("run_at"),
)
OURS = Demand(
    "the running row was not ours",
    lambda s: s.old["lease_until"] is not None and s.old["claimed_until"] == s.old["lease_until"],
)
NOT_OURS = Demand(
    "it takes over a row that is ours or has time left",
    lambda s: (
        s.old["lease_until"] is None
        or s.old["lease_until"] < 0  # nobody has ever given it
        or (
            s.old["claimed_until"] != s.old["lease_until"]
            and s.old["lease_until"] < s.at - s.rules.foreign_grace * SECOND
        )
    ),
)
EXPIRED = Demand("the lease that it found was not expired", _expired)
DUE_SOON = Demand("it is not due within the horizon", lambda s: s.new["run_at"] <= s.at + s.rules.horizon * SECOND)
DUE = Demand("it starts before run_at", lambda s: s.new["run_at"] <= s.new["started_at"] <= s.at)
STARTED = Demand("started_at is not when it was claimed", lambda s: s.new["started_at"] == s.new["updated_at"])
NAMED = Demand("claimed_by says nobody", lambda s: bool(s.new["claimed_by"]))
COUNTED = Demand(
    "attempts do not rise by one",
    lambda s: s.new["attempts"] == min(s.old["attempts"] or 0, 2**31 - 2) + 1,
)
ERROR = Demand("last_error says nothing", lambda s: bool(s.new["last_error"]))
LAST = Demand("it fails for good with attempts left", Step.last)
NOT_LAST = Demand("it goes on after its last attempt", lambda s: not s.last())
BACKOFF = Demand(
    "run_at is not a backoff from now", lambda s: abs(s.late("run_at", "updated_at") - s.backoff()) < _ROUGHLY_S
)
REAPED = Demand(
    "it is called lost while its lease lasts",
    lambda s: (
        reason(s.new) != "reaped"
        or s.old["lease_until"] < s.at
        or (s.new["last_error"], s.new["attempts"]) == (s.old["last_error"], s.old["attempts"])
    ),
)
UNSUSPECTED = Demand(
    "a suspect is put back without an attempt",
    lambda s: (
        s.new["last_error"] == s.old["last_error"] or (s.old["last_error"] is None and (s.old["attempts"] or 0) <= 0)
    ),
)
ANEW = Demand(
    "a retry starts at no attempt and now",
    lambda s: s.new["attempts"] == 0 and abs(s.late("run_at", "updated_at")) < _ROUGHLY_S,
)
ORIGINALLY = Demand(
    "the original takes what is pending and due, or running and expired",
    lambda s: (
        (s.old["status"] == "pending" and s.old["run_at"] <= s.at)
        or (s.old["status"] == "running" and s.old["lease_until"] < s.at)
    ),
)

_LEASE = frozenset({"lease_until", "updated_at", *_CLAIM})
_FREE = _LEASE | {"status"}
_OVER = frozenset({"status", "lease_until", "updated_at"})
_FAILURE = frozenset({"attempts", "last_error", "run_at"})

VERBS = {
    "lease": Verb(_LEASE, (CLOCK, FRESH, AHEAD, BOUNDED, CLEARED, DUE_SOON)),
    "lease again": Verb(_LEASE, (CLOCK, FRESH, AHEAD, BOUNDED, CLEARED, DUE_SOON, EXPIRED)),
    "free": Verb(_FREE, (CLOCK, CLEARED, FREED_BY_RIGHT)),
    "reschedule": Verb(_FREE | {"run_at"}, (CLOCK, CLEARED)),
    "cancel": Verb(_OVER, (CLOCK, UNLEASED)),
    "claim": Verb(_FREE, (CLOCK, FRESH, AHEAD, BOUNDED, SIGNED, BY_TOKEN, DUE, STARTED, NAMED)),
    "renew": Verb(_LEASE - {"started_at", "claimed_by"}, (CLOCK, FORWARD, KEPT, SIGNED, BY_TOKEN, OURS)),
    "settle done": Verb(_OVER, (CLOCK, UNLEASED, BY_TOKEN, OURS)),
    "settle failed": Verb(
        _FREE | _FAILURE, (CLOCK, CLEARED, BY_TOKEN_OR_CHILD, OURS, COUNTED, ERROR, NOT_LAST, BACKOFF, REAPED)
    ),
    "settle failed, the last": Verb(
        _OVER | _FAILURE, (CLOCK, UNLEASED, BY_TOKEN_OR_CHILD, OURS, COUNTED, ERROR, LAST, REAPED)
    ),
    "snooze": Verb(_FREE | {"run_at"}, (CLOCK, CLEARED, BY_TOKEN, OURS)),
    "give back": Verb(_FREE | {"last_error"}, (CLOCK, CLEARED, BY_TOKEN_OR_CHILD, UNSUSPECTED, REAPED)),
    "take over": Verb(_FREE, (CLOCK, CLEARED, NOT_OURS)),
    "retry": Verb(_FREE | {"attempts", "run_at"}, (CLOCK, CLEARED, ANEW)),
    "take by the original": Verb(_OVER, (ORIGINALLY,)),
    "settle by the original": Verb(_OVER | _FAILURE, (UNLEASED,)),
}


def place(row: Row) -> str:
    """Return the row's place: free, leased, running, done, failed or cancelled."""
    if row["status"] == "pending":
        return "free" if row["lease_until"] is None else "leased"
    return str(row["status"])


_WAYS = {
    ("free", "leased"): "lease",
    ("leased", "leased"): "lease again",
    ("free", "free"): "reschedule",
    ("leased", "free"): "free",
    ("free", "cancelled"): "cancel",
    ("leased", "cancelled"): "cancel",
    ("leased", "running"): "claim",
    ("running", "running"): "renew",
    ("running", "done"): "settle done",
    ("running", "free"): "snooze",
    ("running", "failed"): "settle failed, the last",
    ("failed", "free"): "retry",
    ("cancelled", "free"): "retry",
}


def verb_of(old: Row, new: Row) -> str:
    """Return by which transition vkjobs comes from one row to the other; "" if there is none."""
    verb = _WAYS.get((place(old), place(new)), "")
    moved = old["run_at"] != new["run_at"]
    if verb == "free" and moved:
        return "reschedule"
    if verb != "snooze":
        return verb
    if old["attempts"] != new["attempts"] or (moved and old["last_error"] != new["last_error"]):
        return "settle failed"
    if moved:
        return verb
    ours = old["lease_until"] is not None and 0 <= old["lease_until"] == old["claimed_until"]
    return "give back" if ours else "take over"


def reason(row: Row) -> str:
    """Return what kind of failure a row's last_error tells of: reaped, child died, gave up or raised."""
    error = row["last_error"] or ""
    for beginning, said in (
        ("WorkerLost: its lease expired", "reaped"),
        ("WorkerLost: its process", "child died"),
        ("GiveUp", "gave up"),
    ):
        if error.startswith(beginning):
            return said
    return "raised"


def check(history: History, rules: Rules, kinds: Mapping[str, Rules] | None = None) -> list[str]:
    """Return what was illegal, a line each. ``kinds`` are those with rules of their own."""
    tokens: dict[Id, set[Instant]] = {}
    last: dict[Id, Row] = {}
    found: list[str] = []
    for change in history.changes:
        if change.op == "truncate":
            last.clear()
            if change.actor != "host":
                found.append(f"change {change.seq}: vkjobs truncates the table")
            continue
        seen = tokens.setdefault(change.id, set())
        chosen = (kinds or {}).get(str((change.new or change.old or {}).get("kind")), rules)
        complaints = [] if change.old == last.get(change.id) else ["a change before it was not recorded"]
        complaints += _complaints(change, chosen, seen)
        found += [f"job {change.id}, change {change.seq}: {complaint}" for complaint in complaints]
        last.pop(change.id, None)
        if change.new is not None:
            last[change.new["id"]] = change.new
            seen.add(change.new["lease_until"])
    rows = {row["id"]: row for row in history.rows}
    found += [
        f"job {id}: its last change was not recorded" for id in rows.keys() | last if rows.get(id) != last.get(id)
    ]
    return found


def _complaints(change: Change, rules: Rules, tokens: set[Instant]) -> list[str]:
    old, new = change.old, change.new
    if change.actor == "host" or change.op == "found":
        return []
    who = change.actor or "vkjobs"
    if new is None or (old is None and who == "original"):
        return [f"{who} may not {change.op}"]
    if old is None:
        blank = {"status": "pending", "lease_until": None, "attempts": 0, "last_error": None, **dict.fromkeys(_CLAIM)}
        return [f"enqueue: {name} is {new[name]!r}" for name, value in blank.items() if new[name] != value]
    if who == "original":
        verb = f"{'take' if place(new) == 'running' else 'settle'} by the original"
    elif not (verb := verb_of(old, new)):
        return [f"there is no way from {place(old)} to {place(new)}"]
    allowed, demands = VERBS[verb]
    step = Step(old, new, change.at, rules, tokens, change.statement)
    changed = sorted(name for name in old.keys() | new if old.get(name) != new.get(name))
    complaints = [f"{verb}: it changes {name}" for name in changed if name not in allowed]
    return complaints + [f"{verb}: {demand.complaint}" for demand in demands if not demand.met(step)]
