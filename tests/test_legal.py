"""The checker of histories, by histories made by hand: the legal ones pass, and each broken rule is told by name."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from itertools import product
from typing import Any

import legal
import pytest
from histories import (
    CANCELLED,
    CLAIM,
    DEAD,
    DONE,
    EXPIRED,
    FAILURE,
    FOREIGN,
    FREE,
    LEASED,
    LEGAL,
    NO_CLAIM,
    NOW,
    OURS,
    PLACES,
    RULES,
    at,
    changed,
    of,
    shown,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from legal import CLEARED, SECOND, Change, History, Row, Rules, check, instant

ALSO_LEGAL: dict[str, tuple[str, Row, dict[str, Any], str]] = {
    "a lease over a row with an old claim": ("lease", FREE | CLAIM, NO_CLAIM, ""),
    "a lease that lies too far off is expired": ("lease again", LEASED | {"lease_until": math.inf}, {}, ""),
    "an expired lease is freed without its token": ("free", EXPIRED, {}, "no token"),
    "a job that is due is rescheduled to the same time": ("free", LEASED, {}, "'2023-11-14 22:12:50+00:00'"),
    "a free job is rescheduled": ("reschedule", FREE, {}, ""),
    "a job that was claimed is cancelled and keeps who ran it": ("cancel", LEASED | CLAIM, {}, ""),
    "a renewal whose answer was lost": ("renew", OURS, {"lease_until": at(40), "claimed_until": at(40)}, ""),
    "a renewal after the clock was set back": (
        "renew", OURS | {"lease_until": at(600), "claimed_until": at(600)},
        {"lease_until": at(600.000001), "claimed_until": at(600.000001)}, "",
    ),
    "a dead worker's job": ("settle failed", DEAD, {"last_error": "WorkerLost: its lease expired; held by x"}, ""),
    "a dead child's job": ("settle failed", OURS, {}, "and claimed_by = 'task w@host 7' and"),
    "a child with a quote": ("settle failed", OURS | {"claimed_by": "a'b"}, {}, "claimed_by = 'a''b'"),
    "a backoff at its cap": ("settle failed", OURS | {"attempts": 1}, {"attempts": 2, "run_at": at(50)}, ""),
    "negative attempts": ("settle failed", OURS | {"attempts": -4}, {"attempts": -3}, ""),
    "no attempts": ("settle failed", OURS | {"attempts": None}, {}, ""),
    "attempts without end": (
        "settle failed, the last", OURS | {"attempts": 2**31 - 1}, {"attempts": 2**31 - 1}, "",
    ),
    "giving up": ("settle failed, the last", OURS, {"attempts": 1, "last_error": "GiveUp: x"}, ""),
    "a job whose message's worker died is put back with a word": (
        "give back", DEAD, {"last_error": "WorkerLost: its lease expired; held by x"}, "",
    ),
    "a job that had not begun when its child died": ("give back", OURS, {}, "and claimed_by = 'task w@host 7' and"),
    "a suspect is put back as it was": ("give back", OURS | {"attempts": 1, "last_error": "E: x"}, {}, ""),
    "a running row without a lease is taken over": ("take over", FOREIGN | {"lease_until": None}, {}, ""),
    "a running row with a lease of long ago is taken over": (
        "take over", FOREIGN | {"lease_until": -math.inf, "claimed_until": -math.inf}, {}, "",
    ),
    "a row that the original took from us": ("take over", DEAD | {"lease_until": at(-15)}, {}, ""),
    "a retry of what was cancelled": ("retry", CANCELLED, {}, ""),
    "the original takes what is running": ("take by the original", DEAD, {}, ""),
    "the original counts as it likes": (
        "settle by the original", DONE, {**FAILURE, "status": "pending", "attempts": 9}, "",
    ),
}  # fmt: skip

_RENEWED = {"lease_until": at(60), "claimed_until": at(60)}
BROKEN: list[tuple[str, str, dict[str, Any]]] = [
    *((verb, "updated_at is not", {"new": {"updated_at": at(-20)}}) for verb in legal.VERBS if "original" not in verb),
    *((verb, "updated_at is not", {"new": {"updated_at": at(1)}}) for verb in ("lease", "settle done")),
    ("claim", "updated_at is not", {"new": {"updated_at": at(-600), "started_at": at(-600)}}),
    *((verb, "the token is not new", {"tokens": [at(62)]}) for verb in ("lease", "lease again")),
    ("claim", "the token is not new", {"tokens": [at(60)]}),
    ("claim", "the token is not new", {"new": {"lease_until": at(40), "claimed_until": at(40)}}),
    *((verb, "the lease is over when", {"new": {"lease_until": at(0)}}) for verb in ("lease", "lease again")),
    ("claim", "the lease is over when", {"new": {"lease_until": at(-1), "claimed_until": at(-1)}}),
    ("claim", "the lease is over when", {"new": {"lease_until": None}}),
    *((verb, "the lease is longer", {"new": {"lease_until": at(600)}}) for verb in ("lease", "lease again")),
    *((verb, "the lease is longer", {"new": dict.fromkeys(_RENEWED, at(600))}) for verb in ("claim", "renew")),
    *((verb, "the lease is longer", {"new": dict.fromkeys(_RENEWED, math.inf)}) for verb in ("claim", "renew")),
    ("renew", "the token is an old one", {"new": dict.fromkeys(_RENEWED, at(39))}),
    ("renew", "the token is an old one", {"tokens": [at(60)]}),
    ("renew", "the token is an old one", {"new": {"lease_until": None}}),
    *((verb, "claimed_until is not", {"new": {"claimed_until": at(61)}}) for verb in ("claim", "renew")),
    *((verb, "claimed_until is not", {"new": {"claimed_until": None}}) for verb in ("claim", "renew")),
    *(
        (verb, "it leaves claim columns", {"old": CLAIM, "new": {column: CLAIM[column]}})
        for verb in legal.VERBS
        if CLEARED in legal.VERBS[verb].demands
        for column in CLAIM
    ),
    *((verb, "it leaves claim columns", {"new": {"claimed_until": at(40)}}) for verb in ("lease", "settle failed")),
    *(
        (verb, "it leaves a lease", {"new": {"lease_until": at(40)}})
        for verb in ("cancel", "settle done", "settle failed, the last", "settle by the original")
    ),
    *(
        (verb, "it does not name the token", {"statement": "lease_until in ('2023-11-14 22:14:00.000001+00:00')"})
        for verb in ("claim", "renew", "settle done", "snooze")
    ),
    *(
        (verb, "it names neither the token nor the child", {"statement": statement})
        for verb in ("settle failed", "settle failed, the last")
        for statement in ("", "set last_error = 'last held by task w@host 7'", "claimed_by = 'task w@host 77'")
    ),
    ("free", "it frees a lease that is neither", {"statement": ""}),
    *(
        (verb, "the running row was not ours", {"old": {"claimed_until": claimed_until}})
        for verb in ("renew", "settle done", "settle failed", "settle failed, the last", "snooze")
        for claimed_until in (at(39), None)
    ),
    ("snooze", "the running row was not ours", {"old": {"lease_until": None, "claimed_until": None}}),
    ("give back", "it names neither the token nor the child", {"statement": "claimed_by = 'task w@host 77'"}),
    ("give back", "a suspect is put back", {"old": {"last_error": "E: x"}, "new": {"last_error": "E: y"}}),
    ("give back", "a suspect is put back", {"old": {"attempts": 1}, "new": {"last_error": "E: y"}}),
    ("give back", "it is called lost", {"new": {"last_error": "WorkerLost: its lease expired; held by x"}}),
    ("take over", "it takes over a row that is ours", {"old": {"lease_until": at(-9)}}),
    ("lease again", "the lease that it found", {"old": {"lease_until": at(40)}}),
    *((verb, "it is not due within", {"old": {"run_at": at(3)}}) for verb in ("lease", "lease again")),
    ("claim", "it starts before run_at", {"old": {"run_at": at(0.000001)}}),
    ("claim", "it starts before run_at", {"old": {"run_at": at(-0.5)}, "new": {"started_at": at(-0.6)}}),
    ("claim", "started_at is not when", {"new": {"started_at": at(-0.1)}}),
    ("claim", "it starts before run_at", {"new": {"started_at": None}}),
    ("claim", "claimed_by says nobody", {"new": {"claimed_by": None}}),
    ("claim", "claimed_by says nobody", {"new": {"claimed_by": ""}}),
    *(
        (verb, "attempts do not rise by one", {"new": {"attempts": attempts}})
        for verb in ("settle failed", "settle failed, the last")
        for attempts in (0, 2, 4, None)
    ),
    *(
        (verb, "last_error says nothing", {"old": {"last_error": "E: x"}, "new": {"last_error": error}})
        for verb in ("settle failed", "settle failed, the last")
        for error in (None, "")
    ),
    ("settle failed, the last", "it fails for good", {"old": {"attempts": 1}, "new": {"attempts": 2}}),
    ("settle failed", "it goes on after", {"old": {"attempts": 2}, "new": {"attempts": 3}}),
    ("settle failed", "it goes on after", {"new": {"last_error": "GiveUp: x"}}),
    *(
        ("settle failed", "run_at is not a backoff", {"new": {"run_at": run_at}})
        for run_at in (at(28), at(32), at(0), at(-30))
    ),
    *(
        (verb, "it is called lost", {"new": {"last_error": "WorkerLost: its lease expired; held by x"}})
        for verb in ("settle failed", "settle failed, the last")
    ),
    ("retry", "a retry starts at", {"new": {"attempts": 3}}),
    ("retry", "a retry starts at", {"new": {"run_at": at(-30)}}),
    ("take by the original", "the original takes what is", {"old": {"run_at": at(1)}}),
    ("take by the original", "the original takes what is", {"old": OURS}),
    ("take by the original", "the original takes what is", {"old": FOREIGN | {"lease_until": None}}),
    ("take by the original", "the original takes what is", {"old": DONE}),
]  # fmt: skip
"""Verb, how the complaint begins, and what is different from the legal change."""


@pytest.mark.parametrize("verb", LEGAL)
def test_a_legal_change_is_accepted(verb: str) -> None:
    assert check(changed(verb), RULES) == []


@pytest.mark.parametrize("case", ALSO_LEGAL.values(), ids=ALSO_LEGAL)
def test_what_the_protocol_allows_at_its_borders_is_accepted(case: tuple[str, Row, dict[str, Any], str]) -> None:
    verb, old, new, statement = case
    assert check(changed(verb, old, new, statement or None), RULES) == []


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: f"{case[0]}: {case[1]}")
def test_a_change_that_breaks_a_rule_is_refused_and_the_rule_named(case: tuple[str, str, dict[str, Any]]) -> None:
    verb, complaint, differences = case
    found = check(changed(verb, **differences), RULES)
    assert [line for line in found if f"{verb}: {complaint}" in line], found


def test_each_rule_of_each_verb_is_broken_by_a_test() -> None:
    demands = {(verb, demand.complaint) for verb, (_, demands) in legal.VERBS.items() for demand in demands}
    broken = {
        (verb, whole) for verb, beginning, _ in BROKEN for _, whole in demands if whole.startswith(beginning)
    } & demands
    assert broken == demands
    assert LEGAL.keys() == legal.VERBS.keys()


_OTHERS_COLUMNS = [
    (verb, column)
    for verb, column in product(LEGAL, FREE)
    if column not in legal.VERBS[verb].columns
    and (verb, column) not in {("free", "run_at"), ("give back", "run_at")}  # these are to reschedule, and to snooze
]


@pytest.mark.parametrize(("verb", "column"), _OTHERS_COLUMNS)
def test_a_verb_that_changes_a_column_of_others_is_refused(verb: str, column: str) -> None:
    other = {"run_at": at(-31), "started_at": at(-21), "claimed_until": at(39)}.get(column, "other")
    assert check(changed(verb, new={column: other}), RULES)


def test_a_column_of_the_hosts_is_nobody_elses() -> None:
    found = check(changed("lease", new={"hosts_own": 1}), RULES)
    assert found == ["job 7, change 2: lease: it changes hosts_own"]


_NO_WAYS = [
    pair
    for pair in product(PLACES, repeat=2)
    if pair not in {(legal.place(row), legal.place(row | changes)) for row, changes in LEGAL.values()}
    and pair not in {("free", "free"), ("free", "cancelled"), ("cancelled", "free")}
]


@pytest.mark.parametrize("pair", _NO_WAYS, ids="-".join)
def test_there_is_no_other_way_from_place_to_place(pair: tuple[str, str]) -> None:
    old, new = PLACES[pair[0]], PLACES[pair[1]] | {"updated_at": at(0), "last_error": "E: y"}
    found = check(of([old, new], statement=shown(at(40))), RULES)
    assert any(f"there is no way from {pair[0]} to {pair[1]}" in line for line in found)


def test_an_unknown_status_is_no_place_to_go() -> None:
    assert check(of([OURS, OURS | {"status": "lost"}]), RULES) == [
        "job 7, change 2: there is no way from running to lost"
    ]


@pytest.mark.parametrize(
    "columns",
    [
        {"status": "running"},
        {"lease_until": at(60)},
        {"attempts": 1},
        {"last_error": "E: x"},
        {"started_at": at(0)},
        {"claimed_by": "me"},
        {"claimed_until": at(60)},
    ],
    ids=str,
)
def test_a_job_begins_free_and_blank(columns: dict[str, Any]) -> None:
    assert check(of([FREE]), RULES) == []
    [name] = columns
    assert check(of([FREE | columns]), RULES) == [f"job 7, change 1: enqueue: {name} is {columns[name]!r}"]


@pytest.mark.parametrize("actor", [None, "original"])
def test_nobody_but_the_host_deletes_a_job(actor: str | None) -> None:
    changes = [Change(1, NOW, "host", "insert", None, DONE), Change(2, NOW, actor, "delete", DONE, None)]
    assert check(History(changes, []), RULES) == [f"job 7, change 2: {actor or 'vkjobs'} may not delete"]
    assert check(History([changes[0], changes[1]._replace(actor="host")], []), RULES) == []


def test_nobody_but_the_host_truncates_the_table() -> None:
    changes = [Change(1, NOW, "host", "insert", None, DONE), Change(2, NOW, None, "truncate", None, None)]
    assert check(History(changes, []), RULES) == ["change 2: vkjobs truncates the table"]
    assert check(History([changes[0], changes[1]._replace(actor="host")], []), RULES) == []


def test_the_original_inserts_nothing() -> None:
    assert check(of([FREE], actor="original"), RULES) == ["job 7, change 1: original may not insert"]


@pytest.mark.parametrize("pair", list(product(PLACES, repeat=2)), ids="-".join)
def test_the_host_may_do_anything(pair: tuple[str, str]) -> None:
    old, new = PLACES[pair[0]], PLACES[pair[1]] | {"attempts": 77}
    assert check(of([old, new], actor="host"), RULES) == []


def test_what_the_host_did_is_what_the_next_change_is_held_to() -> None:
    taken = FOREIGN | {"claimed_until": at(-15), "lease_until": at(-15)}
    found = check(changed("take over", old=taken, statement="no token"), RULES)
    assert found == ["job 7, change 2: give back: it names neither the token nor the child that it found"]


def test_a_change_that_was_not_recorded_is_noticed() -> None:
    whole = changed("settle done")
    first, last = whole.changes
    assert first.new is not None
    odd = first._replace(new=first.new | {"attempts": 1})
    assert check(whole._replace(changes=[odd, last]), RULES) == ["job 7, change 2: a change before it was not recorded"]
    assert check(whole._replace(changes=[last]), RULES) == ["job 7, change 2: a change before it was not recorded"]
    assert check(whole._replace(changes=[first]), RULES) == ["job 7: its last change was not recorded"]
    assert check(whole._replace(rows=[]), RULES) == ["job 7: its last change was not recorded"]
    assert check(whole._replace(changes=[]), RULES) == ["job 7: its last change was not recorded"]


def test_a_job_is_told_from_another() -> None:
    one = changed("settle done")
    other = [change._replace(seq=change.seq + 10, old=change.old and change.old | {"id": 8}) for change in one.changes]
    other = [change._replace(new=change.new and change.new | {"id": 8}) for change in other]
    changes = [change for pair in zip(one.changes, other, strict=True) for change in pair]
    changes[-1] = changes[-1]._replace(statement="")
    found = check(History(changes, [*one.rows, one.rows[0] | {"id": 8}]), RULES)
    assert found == ["job 8, change 12: settle done: it does not name the token that it found"]


def test_a_kind_may_have_rules_of_its_own() -> None:
    history = changed("settle failed, the last", old={"attempts": 0}, new={"attempts": 1})
    once = Rules(max_attempts=1, lease=60, horizon=2, backoff=30)
    assert check(history, RULES) == ["job 7, change 2: settle failed, the last: it fails for good with attempts left"]
    assert check(history, RULES, {"noop": once}) == []
    assert check(history, once, {"noop": RULES}) != []


@settings(database=None, deadline=None, derandomize=True)
@given(st.datetimes(timezones=st.timezones() | st.just(UTC)))
def test_an_instant_is_what_python_takes_it_for(time: datetime) -> None:
    if time.utcoffset() is not None and (utc := time.astimezone(UTC) if 1 < time.year < 9999 else None):
        since = utc - datetime(1970, 1, 1, tzinfo=UTC)
        assert instant(time.isoformat()) == (since.days * 86_400 + since.seconds) * SECOND + since.microseconds
