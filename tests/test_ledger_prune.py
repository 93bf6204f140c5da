"""What prune deletes, whom it leaves alone, and what a tick says of rows that refuse it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from hosts import make_app
from original import connected, execute, make_original, rows
from places import PLACES, full
from rows import Row
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError, OperationalError

import vkjobs
from vkjobs import database, dispatch, ledger
from vkjobs.dispatch import Dispatcher
from vkjobs.events import Seldom
from vkjobs.handlers import Registry
from vkjobs.migrations import migrate
from vkjobs.settings import Settings

KEEP = 3600.0
OLD, YOUNG = -3700, -3500
MANY = """
    insert into vk_jobs (kind, status, updated_at, last_error)
    select 'noop', 'done', now() - {age} * interval '1 s', repeat('x', {width}) from generate_series(1, {number})"""
BOOK = "create table book (job bigint references vk_jobs (id){})"

Add = Callable[..., Row]


@pytest.fixture
def ids(database_url: str) -> Callable[[], list[Any]]:
    return lambda: [id for (id,) in rows(database_url, "select id from vk_jobs order by id")]


def prune(engine: Engine, pages: int = 500) -> int:
    with engine.connect() as conn:
        return ledger.prune(conn, keep=KEEP, pages=pages)


@pytest.mark.parametrize("age", [OLD, YOUNG])
@pytest.mark.parametrize("place", PLACES)
def test_only_what_has_long_been_done_is_deleted(
    engine: Engine, add: Add, ids: Callable[[], list[Any]], place: str, age: int
) -> None:
    row = add(**full(place, updated_at=age, run_at=-100_000))
    goes = row.status == "done" and age == OLD
    assert prune(engine) == goes
    assert ids() == ([] if goes else [row.id])


@pytest.mark.parametrize("key", ["text primary key", "uuid primary key default gen_random_uuid()"])
def test_ids_may_be_of_any_type(empty_database_url: str, key: str) -> None:
    make_original(empty_database_url, key=key)
    migrate(empty_database_url)
    execute(
        empty_database_url,
        f"create table book (job {key.split(maxsplit=1)[0]} references vk_jobs (id))",
        """
        insert into vk_jobs (kind, status, run_at, updated_at)
        select 'noop', 'done', now(), now() - interval '2 h' from generate_series(1, 3)""",
        "insert into book select id from vk_jobs limit 1",
    )
    with connected(empty_database_url) as conn, pytest.raises(DBAPIError, match="book_job_fkey"):
        ledger.prune(conn, keep=KEEP)
    assert rows(empty_database_url, "select id from vk_jobs") == rows(empty_database_url, "select job from book")


def test_a_tick_deletes_a_thousand_at_most_and_all_of_a_small_table_sooner_or_later(
    engine: Engine, database_url: str, ids: Callable[[], list[Any]]
) -> None:
    execute(database_url, MANY.format(age=-OLD, width=1, number=2500), MANY.format(age=-YOUNG, width=1, number=2))
    assert [prune(engine) for _ in range(4)] == [1000, 1000, 500, 0]
    assert ids() == [2501, 2502]


def test_a_large_table_is_covered_by_and_by_a_stretch_at_a_time(engine: Engine, database_url: str) -> None:
    execute(database_url, MANY.format(age=-OLD, width=1500, number=1000))  # five to a page: 200 pages
    pruned = [prune(engine, pages=10) for _ in range(600)]  # the chance to miss one of 20 stretches is 2e-12
    assert max(pruned) == 50
    assert sum(pruned) == 1000


def test_an_empty_table_is_pruned_in_vain(engine: Engine) -> None:
    assert prune(engine) == 0


def test_rows_that_somebody_has_locked_are_passed_over_and_found_later(engine: Engine, add: Add) -> None:
    locked, *_ = [add(status="done", updated_at=OLD) for _ in range(3)]
    with database.transaction(engine) as somebody:
        # As a foreign key does for a row that is being written.
        somebody.execute(text("select from vk_jobs where id = :id for key share"), {"id": locked.id})
        assert [prune(engine) for _ in range(2)] == [2, 0]
        somebody.rollback()
        assert prune(engine) == 1


def test_a_row_that_is_changed_meanwhile_is_kept(engine: Engine, add: Add, ids: Callable[[], list[Any]]) -> None:
    again, other = add(status="done", updated_at=OLD), add(status="done", updated_at=OLD)
    with database.transaction(engine) as somebody:
        somebody.execute(text("update vk_jobs set status = 'pending' where id = :id"), {"id": again.id})
        assert prune(engine) == 1
        somebody.commit()
    assert prune(engine) == 0
    assert ids() == [again.id] != [other.id]


# What the host has to say


@pytest.mark.parametrize("clause", ["", " on delete restrict", " deferrable initially deferred"])
def test_a_row_that_a_foreign_key_keeps_harms_no_other(
    engine: Engine, database_url: str, ids: Callable[[], list[Any]], clause: str
) -> None:
    execute(database_url, MANY.format(age=-OLD, width=1, number=50), BOOK.format(clause))
    execute(database_url, "insert into book values (1), (25), (50)")
    with pytest.raises(DBAPIError, match="book_job_fkey"):
        prune(engine)
    assert ids() == [1, 25, 50]
    execute(database_url, "delete from book where job = 25")
    with pytest.raises(DBAPIError):
        prune(engine)
    assert ids() == [1, 50]
    execute(database_url, "drop table book")
    assert prune(engine) == 2


def test_many_that_are_kept_are_tried_in_another_order_each_time(
    engine: Engine, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "_MOST_REFUSED", 2)
    execute(database_url, MANY.format(age=-OLD, width=1, number=40), BOOK.format(""))
    execute(database_url, "insert into book select id from vk_jobs where id <= 20")
    for _ in range(300):
        with pytest.raises(DBAPIError, match="book_job_fkey"):
            prune(engine)
        if rows(database_url, "select count(*) from vk_jobs") == [(20,)]:
            break
    assert rows(database_url, "select count(*), max(id) from vk_jobs") == [(20, 20)]


def test_a_lock_behind_a_cascade_is_not_waited_for(engine: Engine, database_url: str) -> None:
    execute(database_url, MANY.format(age=-OLD, width=1, number=2), BOOK.format(" on delete cascade"))
    execute(database_url, "insert into book values (1)")
    with engine.connect() as conn, database.transaction(engine) as somebody:
        conn.exec_driver_sql("set statement_timeout = '20s'")
        somebody.execute(text("select from book for update"))
        with pytest.raises(OperationalError, match="lock timeout"):
            ledger.prune(conn, keep=KEEP)
        somebody.rollback()
        assert ledger.prune(conn, keep=KEEP) == 2
    assert rows(database_url, "select count(*) from book") == [(0,)]


# In a tick


@pytest.fixture
def tick(engine: Engine, redis_url: str) -> Callable[..., int]:
    app = vkjobs.setup(make_app(broker_url=redis_url))
    return lambda *, housekeeping=True, **settings: Dispatcher(app, engine, Settings(**settings), Registry()).run_due(
        housekeeping=housekeeping
    )


def test_a_tick_prunes_if_it_is_told_to(tick: Callable[..., int], add: Add, ids: Callable[[], list[Any]]) -> None:
    old, young = add(status="done", updated_at=OLD), add(status="done", updated_at=YOUNG)
    tick()
    tick(housekeeping=False, keep_done=KEEP)
    assert ids() == [old.id, young.id]
    tick(keep_done=KEEP)
    assert ids() == [young.id]


def test_a_row_that_is_kept_harms_no_tick_and_is_told_of_seldom(
    tick: Callable[..., int],
    add: Add,
    ids: Callable[[], list[Any]],
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(dispatch, "_unpruned_is_told", Seldom(60))
    kept, other = add(status="done", updated_at=OLD), add(status="done", updated_at=OLD)
    execute(database_url, BOOK.format(""), f"insert into book values ({kept.id})")
    due = [add(), add()]
    assert [tick(keep_done=KEEP) for _ in range(3)] == [2, 0, 0]
    assert ids() == [kept.id, *(row.id for row in due)]
    assert other.id not in ids()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("done jobs cannot be deleted error=")
    assert "book_job_fkey" in record.getMessage()
