"""Postgres goes away at the worst moments: nothing is settled twice, and no outage is taken for a failure."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg2
import pytest
from bench import Bench, somebody
from original import connected, execute, until
from outages import commits_that_break, commits_without_answer, cut_once, end_backend
from sqlalchemy import Connection, Engine, create_engine, event, text
from statements import watching
from workers import wait_for

from vkjobs import database, ledger
from vkjobs.database import url_of
from vkjobs.errors import DatabaseUnavailable
from vkjobs.execute import Verdict
from vkjobs.handlers import Context, GiveUp, Job, Snooze
from vkjobs.local import Postgres


@pytest.fixture(scope="module")
def database_url(postgres: Postgres) -> str:
    url = postgres.create_database(f"outages_{uuid4().hex}", template="migrated")
    execute(url, "create table effects (what text)")
    return url


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    execute(database_url, "delete from vk_jobs", "delete from effects")
    engine = database.engine(database_url, 4)
    yield engine
    engine.dispose()


@pytest.fixture
def bench(engine: Engine, caplog: pytest.LogCaptureFixture) -> Bench:
    caplog.set_level(logging.INFO, "vkjobs")
    return Bench(engine)


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [getattr(record, "event", "") for record in caplog.records]


def effects(bench: Bench) -> int:
    return int(somebody(bench.engine)("select count(*) from effects"))


def counting(started: list[object], *, session: bool = False) -> Callable[[Job, Context], None]:
    def handle(job: Job, ctx: Context) -> None:
        started.append(job.id)
        if session:
            ctx.session.execute(text("insert into effects values ('x')"))

    return handle


NOW = datetime.now(UTC)
DONE = ("set status = 'done'", "execute vkjobs_settle_done")  # in the handler's transaction, and alone


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_settling_that_is_cut_off_is_made_again_or_found_done_and_costs_nothing(
    bench: Bench, database_url: str, caplog: pytest.LogCaptureFixture, *, after: bool
) -> None:
    started: list[object] = []
    bench.handle(counting(started))
    row = bench.add()
    with cut_once(bench.engine, database_url, *DONE, after=after) as cut:
        assert bench.run(row).verdict is Verdict.DONE
    assert len(cut) == 1
    assert started == [row.id]
    settled = bench.read(row)
    assert (settled.status, settled.attempts, settled.last_error) == ("done", 0, None)
    assert events(caplog) == ["waiting for postgres"]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_claim_that_is_cut_off_starts_its_job_once(bench: Bench, database_url: str, *, after: bool) -> None:
    started: list[object] = []
    bench.handle(counting(started))
    row = bench.add()
    with cut_once(bench.engine, database_url, "execute vkjobs_claim", after=after) as cut:
        assert bench.run(row).verdict is Verdict.DONE
    assert len(cut) == 1
    assert started == [row.id]


def test_a_failure_whose_settling_is_cut_off_counts_one_attempt(bench: Bench, database_url: str) -> None:
    def handle(_job: Job, _ctx: Context) -> None:
        raise GiveUp("x")

    bench.handle(handle)
    row = bench.add()
    with cut_once(bench.engine, database_url, "set status = 'failed'", after=False) as cut:
        assert bench.run(row).verdict is Verdict.FAILED
    assert len(cut) == 1
    assert bench.read(row).attempts == 1


def test_a_failed_attempt_whose_answer_is_lost_is_not_counted_twice(bench: Bench, database_url: str) -> None:
    def handle(_job: Job, _ctx: Context) -> None:
        raise GiveUp("x")

    bench.handle(handle)
    row = bench.add()
    with cut_once(bench.engine, database_url, "set status = 'failed'", after=True):
        bench.run(row)
    assert (bench.read(row).status, bench.read(row).attempts) == ("failed", 1)


@pytest.mark.parametrize("words", ["insert into effects", DONE[0]], ids=["in the handler", "at the settling"])
def test_a_session_that_is_cut_off_is_a_failed_attempt_without_effects(
    bench: Bench, database_url: str, words: str
) -> None:
    started: list[object] = []
    bench.handle(counting(started, session=True))
    row = bench.add()
    with cut_once(bench.engine, database_url, words, after=False) as cut:
        assert bench.run(row).verdict is Verdict.RETRYING
    assert len(cut) == 1
    assert started == [row.id]
    after = bench.read(row)
    assert (after.status, after.attempts, after.lease_until) == ("pending", 1, None)
    assert (after.last_error or "").startswith("OperationalError")
    assert effects(bench) == 0


def test_a_commit_whose_answer_is_lost_is_asked_again_and_not_taken_for_a_failure(
    bench: Bench, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    started: list[object] = []
    bench.handle(counting(started, session=True))
    row = bench.add()
    with commits_without_answer(bench.engine, database_url) as lost:
        assert bench.run(row).verdict is Verdict.DONE
    assert lost
    assert started == [row.id]
    assert (bench.read(row).status, bench.read(row).attempts) == ("done", 0)
    assert effects(bench) == 1
    assert "job failed" not in events(caplog)


def test_a_commit_that_never_came_is_a_failed_attempt(
    bench: Bench, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.handle(counting([], session=True))
    row = bench.add()
    real = bench.engine.dialect.do_commit
    cut: list[bool] = []

    def cut_before_commit(connection: Any) -> None:
        if not cut:
            cut.append(True)
            end_backend(database_url, connection.driver_connection.info.backend_pid)
        real(connection)

    monkeypatch.setattr(bench.engine.dialect, "do_commit", cut_before_commit)
    assert bench.run(row).verdict is Verdict.RETRYING
    assert cut
    assert (bench.read(row).last_error or "").startswith("OperationalError")
    assert bench.read(row).attempts == 1
    assert effects(bench) == 0


@pytest.mark.parametrize("session", [True, False])
def test_a_commit_that_is_still_under_way_when_the_connection_breaks_is_waited_for(
    bench: Bench, database_url: str, caplog: pytest.LogCaptureFixture, *, session: bool
) -> None:
    bench.handle(counting([], session=session))
    row = bench.add()
    with commits_that_break(bench.engine, database_url):
        assert bench.run(row).verdict is Verdict.DONE
    assert (bench.read(row).status, bench.read(row).attempts) == ("done", 0)
    assert effects(bench) == session
    assert not {"job failed", "lease lost"} & set(events(caplog))


@pytest.mark.timeout(30)
def test_a_job_is_not_started_without_postgres_and_its_message_ends_in_one_line() -> None:
    away = create_engine(url_of("postgresql:///x?host=/nowhere"), isolation_level="AUTOCOMMIT")
    bench = Bench(away, lease=1.0, horizon=0.5)
    with pytest.raises(DatabaseUnavailable, match=r"^job 5 was not started: .*/nowhere.*$") as caught:
        bench.executor.run(5, NOW, by="me", lease=1)
    assert "\n" not in str(caught.value)


def test_a_message_whose_row_is_locked_for_long_ends_in_one_line(bench: Bench, engine: Engine) -> None:
    row = bench.add()
    tried: list[str] = []
    with database.transaction(engine) as other, watching(engine, before=lambda _, sql: tried.append(sql)):
        other.execute(text("select from vk_jobs where id = :id for update"), {"id": row.id})
        tried.clear()
        impatient = Bench(engine, lease=3.0, horizon=1.0)
        with pytest.raises(DatabaseUnavailable, match=f"^job {row.id} was not started: .*lock timeout$"):
            impatient.run(row)
        assert len([sql for sql in tried if "claim" in sql]) <= 2  # prepared and executed, once
        other.rollback()
    assert bench.read(row) == row


def test_a_settling_outwaits_a_statement_timeout(database_url: str, caplog: pytest.LogCaptureFixture) -> None:
    options = {"options": "-c statement_timeout=300"}
    hasty = create_engine(url_of(database_url), connect_args=options, isolation_level="AUTOCOMMIT")
    bench = Bench(hasty)
    with connected(database_url, "READ COMMITTED") as other:

        def handle(job: Job, _: Context) -> None:
            other.execute(text("select from vk_jobs where id = :id for update"), {"id": job.id})
            freer.start()

        def free() -> None:
            until(lambda: "waiting for postgres" in events(caplog))
            other.rollback()

        freer = threading.Thread(target=free)
        bench.handle(handle)
        row = bench.add()
        assert bench.run(row).verdict is Verdict.DONE
        freer.join()
    assert bench.read(row).attempts == 0
    hasty.dispose()


@pytest.mark.parametrize("ends", [None, ValueError("x"), GiveUp("x"), Snooze(timedelta(hours=1))], ids=str)
def test_a_settling_waits_for_a_locked_row_only_briefly_at_a_time(
    bench: Bench,
    database_url: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    ends: Exception | None,
) -> None:
    """It is back in line at once, and no run takes the job for lost, although its lease expires meanwhile."""
    slept: list[float] = []
    settling, sleep = threading.current_thread(), time.sleep

    def listen_and_sleep(seconds: float) -> None:
        if threading.current_thread() is settling:
            slept.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", listen_and_sleep)
    with connected(database_url, "READ COMMITTED") as other, connected(database_url) as looking:

        def handle(job: Job, _: Context) -> None:
            other.execute(text("select from vk_jobs where id = :id for update"), {"id": job.id})
            freer.start()
            if ends is not None:
                raise ends

        def free() -> None:
            with suppress(AssertionError):
                wait_for(lambda: len(slept) == 2, "the settling to give up twice", patience=6)
            seen.extend(ledger.lost(looking, lease=0))
            other.rollback()

        seen: list[object] = []
        freer = threading.Thread(target=free)
        bench.handle(handle)
        row = bench.add()
        outcome = bench.run(row, lease=0.5)
        freer.join()
    assert seen == []
    assert outcome.verdict is {ValueError: Verdict.RETRYING, GiveUp: Verdict.FAILED, Snooze: Verdict.SNOOZED}.get(
        type(ends), Verdict.DONE
    )
    assert bench.read(row).attempts == isinstance(ends, ValueError | GiveUp)
    waits = [getattr(record, "error", "") for record in caplog.records if "waiting" in record.getMessage()]
    assert waits == ["canceling statement due to lock timeout"]
    assert sum(slept) < 0.1


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_an_outage_of_any_length_is_a_line_a_while_and_over_within_seconds(
    bench: Bench, engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("vkjobs.execute.time", clock)
    monkeypatch.setattr("vkjobs.events.time", clock)
    outage: list[float] = []

    def connect(_dialect: object, *_: object) -> None:
        if outage and clock.now < 600:
            raise psycopg2.OperationalError("the database system is shutting down")

    def handle(_job: Job, _ctx: Context) -> None:
        outage.append(clock.now)
        engine.dispose()

    bench.handle(handle)
    row = bench.add()
    event.listen(engine, "do_connect", connect)
    try:
        assert bench.run(row).verdict is Verdict.DONE
    finally:
        event.remove(engine, "do_connect", connect)
    assert 600 <= clock.now < 610
    assert 15 < len(events(caplog)) < 25
    assert set(events(caplog)) == {"waiting for postgres"}
    assert bench.read(row).attempts == 0


def test_a_table_that_is_missing_is_no_reason_to_lose_the_message(postgres: Postgres) -> None:
    engine = database.engine(postgres.create_database(f"none_{uuid4().hex}"), 2)
    with pytest.raises(DatabaseUnavailable, match=r"^job 5 was not started: relation .* does not exist$"):
        Bench(engine).executor.run(5, NOW, by="me", lease=1)
    engine.dispose()


def test_a_settling_waits_for_a_connection_of_the_pool(database_url: str, caplog: pytest.LogCaptureFixture) -> None:
    narrow = create_engine(
        url_of(database_url), pool_size=1, max_overflow=0, pool_timeout=0.05, isolation_level="AUTOCOMMIT"
    )
    bench = Bench(narrow)
    taken: list[Connection] = []
    bench.handle(lambda _job, _ctx: taken.append(narrow.connect()))
    row = bench.add()

    def give_back() -> None:
        until(lambda: "waiting for postgres" in events(caplog))
        taken[0].close()

    giver = threading.Thread(target=give_back)
    giver.start()
    assert bench.run(row).verdict is Verdict.DONE
    giver.join()
    assert bench.read(row).attempts == 0
    narrow.dispose()
