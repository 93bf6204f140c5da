"""Two who reach for one row at once, on connections of their own: one wins, the other waits and loses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from original import connected, execute, until
from places import ME, full, moment
from rows import Row
from sqlalchemy import Connection, Engine, make_url, text
from sqlalchemy.exc import OperationalError

from vkjobs import database, ledger
from vkjobs.ledger import Failure
from vkjobs.local import Postgres

AGAIN = Failure(final=False, delay=60, error="E: x")
LATER = datetime.fromisoformat("2040-01-02T03:04:05.678901+00:00")

Statement = Callable[[Connection, Row], object]


def token_of(row: Row) -> datetime:
    return moment(row.lease_until or "")


def claim(conn: Connection, row: Row) -> object:
    return ledger.claim(conn, row.id, token_of(row), lease=40, by="claimer")


def claim_too(conn: Connection, row: Row) -> object:
    return ledger.claim(conn, row.id, token_of(row), lease=50, by="second claimer")


def cancel(conn: Connection, row: Row) -> object:
    return ledger.cancel(conn, row.id)


def reschedule(conn: Connection, row: Row) -> object:
    return ledger.reschedule(conn, row.id, LATER)


def renew(conn: Connection, row: Row) -> object:
    return ledger.renew(conn, [(row.id, token_of(row), LATER)])


def settle_done(conn: Connection, row: Row) -> object:
    return ledger.settle_done(conn, row.id, token_of(row))


def settle_failed(conn: Connection, row: Row) -> object:
    return ledger.settle_failed(conn, row.id, token_of(row), AGAIN)


def settle_dead_child(conn: Connection, row: Row) -> object:
    return ledger.settle_dead_child(conn, row.id, AGAIN, by=ME)


def snooze(conn: Connection, row: Row) -> object:
    return ledger.snooze(conn, row.id, token_of(row), 60.0)


def reap(conn: Connection, row: Row) -> object:
    return ledger.settle_failed(conn, row.id, token_of(row), Failure(final=True, delay=60, error="lost"))


ENDS: dict[Statement, dict[str, Any]] = {
    claim: {"status": "running", "claimed_by": "claimer"},
    claim_too: {"status": "running", "claimed_by": "second claimer"},
    cancel: {"status": "cancelled"},
    reschedule: {"status": "pending", "attempts": 2},
    settle_done: {"status": "done"},
    settle_failed: {"status": "pending", "attempts": 3},
    settle_dead_child: {"status": "pending", "attempts": 3},
    snooze: {"status": "pending", "attempts": 2},
    reap: {"status": "failed", "attempts": 3},
}
_PAIRS = [
    *(("leased", claim, other) for other in (claim_too, cancel, reschedule)),
    *(("ours, expired", reap, other) for other in (settle_done, settle_failed, settle_dead_child, snooze)),
    *(("ours", settle_done, other) for other in (settle_dead_child, settle_failed, snooze)),
]
RIVALS = [(place, *pair) for place, one, other in _PAIRS for pair in ((one, other), (other, one))]


@pytest.fixture(scope="module", params=["read committed", "repeatable read", "serializable"])
def engine(postgres: Postgres, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Engine of a database whose transactions are isolated otherwise by default."""
    url = postgres.create_database(f"races_{uuid4().hex}", template="migrated")
    name = make_url(url).database
    execute(url, f"alter database {name} set default_transaction_isolation = '{request.param}'")
    engine = database.engine(url, 5)
    yield engine
    engine.dispose()


@pytest.fixture(autouse=True)
def empty_table(engine: Engine) -> None:
    with engine.connect() as conn:
        conn.exec_driver_sql("delete from vk_jobs")


def url_of(engine: Engine) -> str:
    return engine.url.render_as_string(hide_password=False)


def until_waiting(engine: Engine, number: int) -> None:
    """Wait until so many statements wait for a lock."""
    waiting = text("""
        select count(*) from pg_stat_activity
        where datname = current_database() and wait_event_type = 'Lock'""")
    with connected(url_of(engine)) as conn:
        until(lambda: conn.scalars(waiting).one() == number)


def race(engine: Engine, row: Row, *statements: Statement) -> list[object]:
    """Let the statements reach the locked row in this order, free it, and return their answers."""

    def go(statement: Statement) -> object:
        with engine.connect() as conn:
            return statement(conn, row)

    answers: list[Future[object]] = []
    with ThreadPoolExecutor() as threads, connected(url_of(engine), "READ COMMITTED") as somebody:
        somebody.execute(text("select from vk_jobs where id = :id for update"), {"id": row.id})
        for number, statement in enumerate(statements, 1):
            answers.append(threads.submit(go, statement))
            until_waiting(engine, number)
        somebody.rollback()
        return [answer.result() for answer in answers]


@pytest.mark.parametrize("rivals", RIVALS, ids=lambda rivals: f"{rivals[1].__name__}, {rivals[2].__name__}")
def test_of_two_that_reach_for_a_row_the_first_wins_and_the_second_waits_and_changes_nothing(
    engine: Engine,
    add: Callable[..., Row],
    read: Callable[[Any], Row],
    rivals: tuple[str, Statement, Statement],
) -> None:
    place, winner, loser = rivals
    row = add(**full(place))
    won, lost = race(engine, row, winner, loser)
    assert won
    assert not lost
    after = read(row.id)._asdict()
    assert {name: after[name] for name in ENDS[winner]} == ENDS[winner]


def test_a_release_waits_for_nobody_and_leaves_the_locked_to_their_lease(
    engine: Engine, add: Callable[..., Row], read: Callable[[Any], Row]
) -> None:
    locked, free = (add(**full("leased", unique_key=key)) for key in ("one", "two"))
    with engine.connect() as conn, connected(url_of(engine), "READ COMMITTED") as somebody:
        conn.exec_driver_sql("set lock_timeout = '3s'")
        somebody.execute(text("select from vk_jobs where id = :id for update"), {"id": locked.id})
        assert ledger.release(conn, [(row.id, token_of(row)) for row in (locked, free)]) == 1
        somebody.rollback()
    assert read(locked.id) == locked
    assert read(free.id).lease_until is None


def test_a_renewal_waits_for_nobody_and_tells_the_locked_from_the_lost(
    engine: Engine, add: Callable[..., Row], read: Callable[[Any], Row]
) -> None:
    locked, free, lost = (add(**full(place, unique_key=None)) for place in ("ours", "ours", "done"))
    given = [(row.id, moment(row.lease_until or row.updated_at), LATER) for row in (locked, free, lost)]
    with engine.connect() as conn, database.transaction(engine) as somebody:
        conn.exec_driver_sql("set lock_timeout = '3s'")
        somebody.execute(text("select from vk_jobs where id = :id for update"), {"id": locked.id})
        assert ledger.renew(conn, given) == {free.id}
        assert ledger.still_held(conn, given) == {locked.id, free.id}
        somebody.rollback()
        assert ledger.renew(conn, given) == {locked.id, free.id}
    assert {read(row.id).claimed_until for row in (locked, free)} == {"2040-01-02 03:04:05.678901+00"}


def test_a_claim_does_not_wait_for_long_for_a_row_that_somebody_has_locked(
    engine: Engine, add: Callable[..., Row], read: Callable[[Any], Row]
) -> None:
    row = add(**full("leased"))
    with engine.connect() as conn, database.transaction(engine) as somebody:
        conn.exec_driver_sql("set statement_timeout = '20s'")
        somebody.execute(text("select from vk_jobs where id = :id for update"), {"id": row.id})
        with pytest.raises(OperationalError, match="lock timeout"):
            claim(conn, row)
        assert read(row.id) == row
        somebody.rollback()
        assert claim(conn, row)


def test_a_claim_of_many_passes_over_what_is_locked_and_not_due(engine: Engine, add: Callable[..., Row]) -> None:
    locked, early, due = (add(lease_until=60, run_at=run_at) for run_at in (-1, 60, -1))
    leases = [(row.id, token_of(row)) for row in (locked, early, due)]
    with engine.connect() as conn, database.transaction(engine) as somebody:
        conn.exec_driver_sql("set lock_timeout = '3s'")
        somebody.execute(text("select from vk_jobs where id = :id for update"), {"id": locked.id})
        assert {claim.id for claim in ledger.claim_all(conn, leases, lease=40, by="claimer")} == {due.id}
        somebody.rollback()
        assert {claim.id for claim in ledger.claim_all(conn, leases, lease=40, by="claimer")} == {locked.id}


def test_a_settling_of_many_passes_over_what_is_locked_alone_and_waits_for_it_in_a_transaction(
    engine: Engine, add: Callable[..., Row]
) -> None:
    locked, free = (add(**full("ours", unique_key=None)) for _ in range(2))
    held = [(row.id, token_of(row), token_of(row)) for row in (locked, free)]
    with engine.connect() as conn, database.transaction(engine) as somebody, database.transaction(engine) as own:
        conn.exec_driver_sql("set statement_timeout = '20s'")
        somebody.execute(text("select from vk_jobs where id = :id for update"), {"id": locked.id})
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(ledger.settle_all_done, own, held)
            until_waiting(engine, 1)
            somebody.rollback()
            assert waiting.result() == {locked.id, free.id}
        own.rollback()
        somebody.execute(text("select from vk_jobs where id = :id for update"), {"id": locked.id})
        assert ledger.settle_all_done(conn, held) == {free.id}
        assert ledger.still_held(conn, held) == {locked.id}
        somebody.rollback()
        assert ledger.settle_all_done(conn, held) == {locked.id}


def test_a_question_of_many_waits_for_a_commit_that_is_under_way(engine: Engine, add: Callable[..., Row]) -> None:
    rows = [add(**full("ours", unique_key=None)) for _ in range(2)]
    held = [(row.id, token_of(row), token_of(row)) for row in rows]
    with engine.connect() as conn, database.transaction(engine) as settling, ThreadPoolExecutor() as threads:
        assert ledger.settle_all_done(settling, held) == {row.id for row in rows}
        asked = threads.submit(lambda: ledger.all_settled_done(conn, held, by=ME))
        until_waiting(engine, 1)
        settling.commit()
        assert asked.result() == {row.id for row in rows}


def test_a_lost_row_that_somebody_has_locked_is_told_of_later(engine: Engine, add: Callable[..., Row]) -> None:
    locked, free = (add(**full("ours, expired", unique_key=None)) for _ in range(2))
    with engine.connect() as conn, database.transaction(engine) as somebody:
        conn.exec_driver_sql("set statement_timeout = '20s'")
        somebody.execute(text("select from vk_jobs where id = :id for update"), {"id": locked.id})
        assert {job.id for job in ledger.lost(conn, lease=0)} == {free.id}
        somebody.rollback()
        assert {job.id for job in ledger.lost(conn, lease=0)} == {locked.id, free.id}


@pytest.mark.parametrize("commits", [True, False])
def test_a_renewal_does_not_wait_for_its_own_settling(
    engine: Engine, add: Callable[..., Row], read: Callable[[Any], Row], *, commits: bool
) -> None:
    row = add(**full("ours"))
    with engine.connect() as conn, database.transaction(engine) as settling:
        conn.exec_driver_sql("set lock_timeout = '3s'")
        assert ledger.settle_done(settling, row.id, token_of(row), LATER)
        assert not renew(conn, row)
        if commits:
            settling.commit()
        else:
            settling.rollback()
        assert bool(renew(conn, row)) is not commits
        assert ledger.settle_done(settling, row.id, token_of(row), LATER) is not commits
        settling.commit()
    assert read(row.id).status == "done"


@pytest.mark.parametrize("commits", [True, False])
def test_a_reaper_waits_for_a_settling_in_a_transaction_and_wins_only_if_that_rolls_back(
    engine: Engine, add: Callable[..., Row], read: Callable[[Any], Row], *, commits: bool
) -> None:
    row = add(**full("ours, expired"))
    with ThreadPoolExecutor() as threads, engine.connect() as reaper, database.transaction(engine) as conn:
        assert settle_done(conn, row)
        reaped = threads.submit(reap, reaper, row)
        until_waiting(engine, 1)
        if commits:
            conn.commit()
        else:
            conn.rollback()
        assert bool(reaped.result()) is not commits
    assert read(row.id).status == ("done" if commits else "failed")


def test_of_two_messages_with_one_token_each_starts_its_row_once_even_without_a_referee(
    engine: Engine, add: Callable[..., Row]
) -> None:
    rows = [add(lease_until=60) for _ in range(40)]

    def claim_all(name: str) -> int:
        with engine.connect() as conn:
            return sum(ledger.claim(conn, row.id, token_of(row), lease=40, by=name) is not None for row in rows)

    with ThreadPoolExecutor() as threads:
        assert sum(threads.map(claim_all, "abc")) == len(rows)


def test_a_renewal_in_flight_cannot_take_a_row_back_that_was_leased_to_another(
    engine: Engine, add: Callable[..., Row], read: Callable[[Any], Row]
) -> None:
    row = add(**full("ours, expired"))
    with engine.connect() as conn:
        assert settle_failed(conn, row)
        conn.execute(text("update vk_jobs set run_at = now()"))
        [lease] = ledger.lease(conn, kinds=[], listed=False, batch=1, window=1, lease=60, horizon=0)
        assert ledger.claim(conn, row.id, lease.token, lease=40, by="successor") is not None
        held = read(row.id)
        late = token_of(row) + timedelta(seconds=40)
        assert ledger.renew(conn, [(row.id, token_of(row), late)]) == set()
        assert not ledger.settle_done(conn, row.id, token_of(row), late)
    assert read(row.id) == held
