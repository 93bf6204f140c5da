"""Each statement over each place in which a row can be, with the right token and with others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, NamedTuple, cast
from uuid import uuid4

import pytest
from places import ME, PLACES, Near, assert_changed, at, full, moment, timed
from rows import Row
from sqlalchemy import Connection, Engine, text

from vkjobs import database, ledger
from vkjobs.ledger import Failure
from vkjobs.local import Postgres

LEASE = 40.0
LATER = datetime(2040, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
RETRY = Failure(final=False, delay=7.5, error="E: again")
END = Failure(final=True, delay=7.5, error="E: the last")

NO_CLAIM = {"started_at": None, "claimed_by": None, "claimed_until": None}
FREED = {"status": "pending", "lease_until": None, **NO_CLAIM, "updated_at": Near(0)}
OVER = {"lease_until": None, "updated_at": Near(0)}
FAILED_ONCE = {"attempts": 3, "run_at": Near(7.5)}

LEASED = at("leased") - {"leased for ever", "leased since ever"}
HELD = at("ours", "foreign")
PENDING = at("free", "leased")


@pytest.fixture(scope="module")
def database_url(postgres: Postgres) -> str:
    return postgres.create_database(f"ledger_{uuid4().hex}", template="migrated")


@pytest.fixture(scope="module")
def engine(database_url: str) -> Iterator[Engine]:
    engine = database.engine(database_url, 2)
    yield engine
    engine.dispose()


@pytest.fixture(autouse=True)
def empty_table(engine: Engine) -> None:
    with engine.connect() as conn:
        conn.exec_driver_sql("delete from vk_jobs")


class Verb(NamedTuple):
    """A statement on one row: how it is called, from which places it leads and what it changes."""

    call: Callable[[Connection, Any, Any], object]
    places: frozenset[str]
    changes: dict[str, Any]


TOKEN_VERBS = {
    "claim": Verb(
        lambda conn, job, token: ledger.claim(conn, job, token, lease=LEASE, by="me"),
        LEASED,
        {
            "status": "running",
            "claimed_by": "me",
            "started_at": Near(0),
            "updated_at": Near(0),
            "lease_until": Near(LEASE),
            "claimed_until": Near(LEASE),
        },
    ),
    "claim_all": Verb(
        lambda conn, job, token: ledger.claim_all(conn, [(job, token)], lease=LEASE, by="me"),
        LEASED,
        {
            "status": "running",
            "claimed_by": "me",
            "started_at": Near(0),
            "updated_at": Near(0),
            "lease_until": Near(LEASE),
            "claimed_until": Near(LEASE),
        },
    ),
    "early_by": Verb(ledger.early_by, LEASED, {}),
    "release": Verb(lambda conn, job, token: ledger.release(conn, [(job, token)]), LEASED, FREED),
    "renew": Verb(
        lambda conn, job, token: ledger.renew(conn, [(job, token, LATER)]),
        HELD,
        {
            "lease_until": "2040-01-02 03:04:05.678901+00",
            "claimed_until": "2040-01-02 03:04:05.678901+00",
            "updated_at": Near(0),
        },
    ),
    "still_held": Verb(lambda conn, job, token: ledger.still_held(conn, [(job, token, LATER)]), HELD, {}),
    "settle_done": Verb(ledger.settle_done, HELD, {"status": "done", **OVER}),
    "settle_all_done": Verb(
        lambda conn, job, token: ledger.settle_all_done(conn, [(job, token, LATER)]), HELD, {"status": "done", **OVER}
    ),
    "give_back": Verb(
        lambda conn, job, token: token and ledger.give_back(conn, job, by=ME, token=token), at("ours"), FREED
    ),
    "settle_failed, not the last": Verb(
        lambda conn, job, token: ledger.settle_failed(conn, job, token, RETRY),
        HELD,
        {**FREED, **FAILED_ONCE, "last_error": "E: again"},
    ),
    "settle_failed, the last": Verb(
        lambda conn, job, token: ledger.settle_failed(conn, job, token, END),
        HELD,
        {"status": "failed", **OVER, **FAILED_ONCE, "last_error": "E: the last"},
    ),
    "snooze for a while": Verb(
        lambda conn, job, token: ledger.snooze(conn, job, token, 90.0), HELD, {**FREED, "run_at": Near(90)}
    ),
    "snooze until": Verb(
        lambda conn, job, token: ledger.snooze(conn, job, token, LATER),
        HELD,
        {**FREED, "run_at": "2040-01-02 03:04:05.678901+00"},
    ),
}
NAME_VERBS = {
    "claimed": Verb(lambda conn, job, by: ledger.claimed(conn, job, by=by), at("ours"), {}),
    "claimed_all": Verb(lambda conn, job, by: ledger.claimed_all(conn, [(job, LATER)], by=by), at("ours"), {}),
    "give_back, by name": Verb(lambda conn, job, by: ledger.give_back(conn, job, by=by), at("ours"), FREED),
    "give_back, a suspect": Verb(
        lambda conn, job, by: ledger.give_back(conn, job, by=by, error="E: again"),
        at("ours"),
        {**FREED, "last_error": "E: again"},
    ),
    "all_settled_done": Verb(
        lambda conn, job, by: ledger.all_settled_done(conn, [(job, LATER, LATER)], by=by), at("done"), {}
    ),
    "settled_done": Verb(lambda conn, job, by: ledger.settled_done(conn, job, by=by), at("done"), {}),
    "settle_dead_child, not the last": Verb(
        lambda conn, job, by: ledger.settle_dead_child(conn, job, RETRY, by=by),
        at("ours"),
        {**FREED, **FAILED_ONCE, "last_error": "E: again"},
    ),
    "settle_dead_child, the last": Verb(
        lambda conn, job, by: ledger.settle_dead_child(conn, job, END, by=by),
        at("ours"),
        {"status": "failed", **OVER, **FAILED_ONCE, "last_error": "E: the last"},
    ),
}
HOST_VERBS = {
    "cancel": Verb(lambda conn, job, _: ledger.cancel(conn, job), PENDING, {"status": "cancelled", **OVER}),
    "reschedule": Verb(
        lambda conn, job, _: ledger.reschedule(conn, job, LATER),
        PENDING,
        {**FREED, "run_at": "2040-01-02 03:04:05.678901+00"},
    ),
    "retry": Verb(
        lambda conn, job, _: ledger.retry(conn, job),
        at("failed", "cancelled"),
        {**FREED, "attempts": 0, "run_at": Near(0)},
    ),
}
VERBS = {**TOKEN_VERBS, **NAME_VERBS, **HOST_VERBS}


def token_of(row: Row) -> datetime:
    """The token of a row; of one that has none, a time that it could have had."""
    if row.lease_until is None or "infinity" in row.lease_until:
        return moment(row.updated_at) + timedelta(seconds=140)
    return moment(row.lease_until)


def stale_tokens(row: Row) -> list[Any]:
    token = token_of(row)
    steps = (timedelta(microseconds=1), timedelta(seconds=1), timedelta(hours=1))
    return [
        *(token - step for step in steps),
        *(token + step for step in steps),
        moment(row.run_at),
    ]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("verb", VERBS)
def test_a_statement_makes_its_move_from_its_places_alone(
    engine: Engine, add: Callable[..., Row], read: Callable[[Any], Row], verb: str, place: str
) -> None:
    call, places, changes = VERBS[verb]
    row = add(**full(place))
    with engine.connect() as conn, timed(conn) as span:
        answer = call(conn, row.id, ME if verb in NAME_VERBS else token_of(row))
    after = read(row.id)
    if place not in places:
        assert not answer
        assert after == row
    else:
        assert answer is not None
        assert answer is not False
        assert answer != 0 or verb == "early_by"
        assert_changed(row, after, span, **changes)
        assert after.claimed_until in (None, after.lease_until, row.claimed_until)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("verb", TOKEN_VERBS)
def test_a_stale_token_moves_nothing_from_any_place(
    engine: Engine, add: Callable[..., Row], read: Callable[[Any], Row], verb: str, place: str
) -> None:
    row = add(**full(place))
    many = ("claim_all", "renew", "still_held", "settle_all_done", "release")
    none = [] if verb in many else [None]  # these write it as text
    with engine.connect() as conn:
        for token in [*stale_tokens(row), *none]:
            assert not VERBS[verb].call(conn, row.id, token)
    assert read(row.id) == row


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("verb", NAME_VERBS)
def test_another_name_moves_nothing_from_any_place(
    engine: Engine, add: Callable[..., Row], read: Callable[[Any], Row], verb: str, place: str
) -> None:
    row = add(**full(place))
    with engine.connect() as conn:
        for name in ("task-2 w@host 7", "task-1 w@host 77", "", cast(Any, None)):
            assert not VERBS[verb].call(conn, row.id, name)
    assert read(row.id) == row


@pytest.mark.parametrize("verb", VERBS)
def test_a_statement_touches_its_own_row_alone(
    engine: Engine, add: Callable[..., Row], read: Callable[[Any], Row], verb: str
) -> None:
    place = min(VERBS[verb].places)
    row = add(**full(place, unique_key=None))
    others = [add(**full(other, unique_key=None)) for other in PLACES]
    with engine.connect() as conn:
        twin = text("update vk_jobs set lease_until = :token where status = :status and lease_until is not null")
        conn.execute(twin, {"token": row.lease_until, "status": row.status})
        others = [read(other.id) for other in others]
        assert VERBS[verb].call(conn, row.id, ME if verb in NAME_VERBS else token_of(row)) is not None
    assert [read(other.id) for other in others] == others


@pytest.mark.parametrize("verb", VERBS)
def test_a_statement_finds_no_row_where_there_is_none(engine: Engine, verb: str) -> None:
    with engine.connect() as conn:
        assert not VERBS[verb].call(conn, 4711, ME if verb in NAME_VERBS else LATER)


@pytest.mark.parametrize("place", sorted(HELD))
@pytest.mark.parametrize(
    "settle",
    [
        ledger.settle_done,
        lambda conn, job, token, proposed: ledger.settle_failed(conn, job, token, RETRY, proposed),
        lambda conn, job, token, proposed: ledger.snooze(conn, job, token, 5.0, proposed),
    ],
)
def test_until_a_renewal_is_answered_the_old_and_the_proposed_token_are_good_and_no_third(
    engine: Engine,
    add: Callable[..., Row],
    read: Callable[[Any], Row],
    settle: Callable[..., bool],
    place: str,
) -> None:
    step = timedelta(microseconds=1)
    old, proposed, neither = (add(**full(place, unique_key=None)) for _ in range(3))
    with engine.connect() as conn:
        token = token_of(neither)
        assert not settle(conn, neither.id, token - step, token + step)
        assert not settle(conn, neither.id, token + step, None)
        assert settle(conn, old.id, token_of(old), token_of(old) + step)
        assert settle(conn, proposed.id, token_of(proposed) - step, token_of(proposed))
    assert read(neither.id) == neither
    assert {read(row.id).status for row in (old, proposed)} < {"done", "pending"}


def test_a_renewal_whose_answer_was_lost_is_made_again(
    engine: Engine, add: Callable[..., Row], read: Callable[[Any], Row]
) -> None:
    row = add(**full("ours"))
    with engine.connect() as conn:
        renewal = [(row.id, token_of(row), LATER)]
        assert ledger.renew(conn, renewal) == {row.id}
        assert ledger.renew(conn, renewal) == {row.id}
    assert moment(read(row.id).lease_until or "") == LATER


def test_many_renewals_and_releases_at_once_tell_the_held_from_the_lost(
    engine: Engine, add: Callable[..., Row], read: Callable[[Any], Row]
) -> None:
    held, lost, done = (add(**full(place, unique_key=None)) for place in ("ours", "ours", "done, with a lease"))
    mine, gone = (add(**full("leased", unique_key=None)) for _ in range(2))
    step = timedelta(microseconds=1)
    with engine.connect() as conn:
        renewals = [(held.id, token_of(held), LATER), (lost.id, token_of(lost) + step, LATER)]
        assert ledger.renew(conn, [*renewals, (done.id, token_of(done), LATER)]) == {held.id}
        assert ledger.renew(conn, []) == set()
        assert ledger.release(conn, [(mine.id, token_of(mine)), (gone.id, token_of(gone) + step)]) == 1
        assert ledger.release(conn, []) == 0
    assert read(mine.id).lease_until is None
    assert [read(row.id) for row in (lost, done, gone)] == [lost, done, gone]


def test_many_settlings_at_once_tell_the_held_from_the_lost(
    engine: Engine, add: Callable[..., Row], read: Callable[[Any], Row]
) -> None:
    held, renewed, lost, foreign, done = (
        add(**full(place, unique_key=None)) for place in ("ours", "ours", "ours", "foreign", "done, with a lease")
    )
    step = timedelta(microseconds=1)
    with engine.connect() as conn:
        given = [(row.id, token_of(row), LATER) for row in (held, done)]
        given += [(renewed.id, token_of(renewed) - step, token_of(renewed)), (lost.id, token_of(lost) + step, LATER)]
        assert ledger.settle_all_done(conn, given) == {held.id, renewed.id}
        assert ledger.settle_all_done(conn, given) == set()
        assert ledger.settle_all_done(conn, []) == set()
        settled = ledger.all_settled_done(conn, [*given, (foreign.id, LATER, LATER)], by=ME)
        assert settled == {held.id, renewed.id, done.id}
        assert ledger.all_settled_done(conn, given, by="me") == set()
    assert [read(row.id) for row in (lost, foreign, done)] == [lost, foreign, done]


def test_many_claims_at_once_tell_what_each_row_says(
    engine: Engine, add: Callable[..., Row], read: Callable[[Any], Row]
) -> None:
    rows = [add(**full("leased", kind=f"k{n}", ref_id=f"r{n}", payload=[n], unique_key=None)) for n in range(3)]
    gone, later = add(**full("leased", unique_key="x")), add(**full("leased", run_at=30, unique_key=None))
    with engine.connect() as conn:
        leases = [*((row.id, token_of(row)) for row in (*rows, later)), (gone.id, token_of(gone) + timedelta(hours=1))]
        claims = sorted(ledger.claim_all(conn, leases, lease=LEASE, by="me"))
        again = sorted(ledger.claimed_all(conn, leases, by="me"))
        assert ledger.claim_all(conn, leases, lease=LEASE, by="me") == []
        assert ledger.claim_all(conn, [], lease=LEASE, by="me") == []
    assert [claim._replace(now=LATER) for claim in again] == [claim._replace(now=LATER) for claim in claims]
    for row, claim, n in zip(rows, claims, range(3), strict=True):
        assert claim[:6] == (row.id, f"k{n}", f"r{n}", moment(row.run_at), 2, f"[{n}]")
        assert claim.token == moment(read(row.id).lease_until or "")
    assert [read(row.id) for row in (gone, later)] == [gone, later]


@pytest.mark.parametrize(
    ("columns", "suspect"),
    [
        ({}, False),
        ({"attempts": 1}, True),
        ({"attempts": None}, False),
        ({"last_error": "x"}, True),
        ({"last_error": ""}, True),
    ],
)
def test_a_job_is_a_suspect_once_it_has_failed_or_its_worker_was_lost(
    engine: Engine, add: Callable[..., Row], columns: dict[str, Any], *, suspect: bool
) -> None:
    if columns.get("attempts", 0) is None:
        with engine.connect() as conn:
            conn.exec_driver_sql("alter table vk_jobs alter attempts drop not null")
    add(kind="a", **{"attempts": 0, **columns})
    add(status="running", lease_until=-5, claimed_until=-5, **{"attempts": 0, **columns})
    with engine.connect() as conn:
        queue: dict[str, Any] = {"kinds": ["a"], "listed": True, "lease": 60, "horizon": 2}
        assert [lease.suspect for lease in ledger.lease(conn, batch=9, window=9, **queue)] == [suspect]
        assert [lost.suspect for lost in ledger.lost(conn, lease=0)] == [suspect]


def test_a_token_keeps_its_microseconds_in_any_zone(
    engine: Engine, add: Callable[..., Row], read: Callable[[Any], Row]
) -> None:
    row = add(lease_until="2040-01-02 03:04:05.600001+00")
    token = datetime.fromisoformat(ledger.token_text(token_of(row).astimezone(timezone(timedelta(hours=-7)))))
    with engine.connect() as conn:
        claim = ledger.claim(conn, row.id, token.astimezone(timezone(timedelta(hours=5, minutes=45))), lease=5, by="me")
        assert claim is not None
        assert ledger.settle_done(conn, row.id, datetime.fromisoformat(ledger.token_text(claim.token)))
    assert read(row.id).status == "done"


def test_a_claim_tells_what_the_row_says(engine: Engine, add: Callable[..., Row], read: Callable[[Any], Row]) -> None:
    row = add(**full("leased", kind="k"))
    with engine.connect() as conn:
        claim = ledger.claim(conn, row.id, token_of(row), lease=LEASE, by="me")
        assert claim is not None
        told_later = ledger.claimed(conn, row.id, by="me")
        assert told_later is not None
        assert told_later.now > claim.now
        assert told_later == claim._replace(now=told_later.now)
    after = read(row.id)
    assert claim[:6] == (row.id, "k", "r", moment(row.run_at), 2, '{"a": 1}')
    assert claim.token == moment(after.lease_until or "")
    assert timedelta(0) <= claim.now - moment(after.started_at or "") < timedelta(seconds=5)


def test_a_new_job_is_free_and_due_when_said(engine: Engine, read: Callable[[Any], Row]) -> None:
    with engine.connect() as conn, timed(conn) as span:
        now = ledger.enqueue(conn, kind="k", ref_id=None, run_at=None, payload=None)
        then = ledger.enqueue(conn, kind="k", ref_id="r", run_at=LATER, payload=[1, {"ü": None}])
    free = {"kind": "k", "status": "pending", "attempts": 0, "updated_at": Near(0)}
    nothing = dict.fromkeys(Row._fields)
    blank = Row(**nothing)  # type: ignore[arg-type]
    assert_changed(blank, read(now), span, **free, id=now, run_at=Near(0))
    assert_changed(
        blank, read(then), span, **free, id=then, ref_id="r", run_at="2040-01-02 03:04:05.678901+00",
        payload=[1, {"ü": None}],
    )  # fmt: skip
