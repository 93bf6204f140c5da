"""A job keeps its lease for as long as it runs, and finds out when it has lost it."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg2
import pytest
from bench import Bench, somebody
from original import until
from places import moment
from rows import Row
from sqlalchemy import Engine, event, text
from workers import wait_for

from vkjobs import database, ledger
from vkjobs.execute import Verdict
from vkjobs.handlers import Context, Job, Snooze
from vkjobs.heartbeat import Holding
from vkjobs.ledger import Claim
from vkjobs.local import Postgres

LEASE = 1.0
RENEWAL = "set lease_until = free.proposed"


@pytest.fixture(scope="module")
def database_url(postgres: Postgres) -> str:
    return postgres.create_database(f"heartbeat_{uuid4().hex}", template="migrated")


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = database.engine(database_url, 5)
    yield engine
    engine.dispose()


@pytest.fixture
def bench(engine: Engine, caplog: pytest.LogCaptureFixture) -> Bench:
    caplog.set_level(logging.INFO, "vkjobs")
    somebody(engine)("delete from vk_jobs")
    return Bench(engine)


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [getattr(record, "event", "") for record in caplog.records]


def lost(bench: Bench) -> list[object]:
    with bench.engine.connect() as conn:
        return [row.id for row in ledger.lost(conn, lease=0)]


def claim(bench: Bench, row: Row, lease: float = LEASE) -> Claim:
    with bench.engine.connect() as conn:
        claim = ledger.claim(conn, row.id, moment(row.lease_until or ""), lease=lease, by="me")
    assert claim is not None
    return claim


def passed(bench: Bench, since: str, seconds: float) -> bool:
    """Tell whether so many seconds have passed by the database's clock."""
    now = moment(somebody(bench.engine)("select clock_timestamp()\\:\\:text"))
    return (now - moment(since)).total_seconds() > seconds


@contextmanager
def at_renewals(engine: Engine, when: str, strike: Callable[[], None]) -> Iterator[None]:
    """Call ``strike`` right before or after each renewal's statement."""

    def watch(_conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if RENEWAL in statement:
            strike()

    event.listen(engine, f"{when}_cursor_execute", watch)
    try:
        yield
    finally:
        event.remove(engine, f"{when}_cursor_execute", watch)


def test_a_job_longer_than_its_lease_is_renewed_until_it_settles(bench: Bench) -> None:
    tokens: set[str | None] = set()

    def handle(job: Job, ctx: Context) -> None:
        def long_enough() -> bool:
            now = bench.read(row)
            assert now.claimed_until == now.lease_until
            assert lost(bench) == []
            tokens.add(now.lease_until)
            return passed(bench, now.started_at or "", 1.4 * LEASE)

        until(long_enough)
        assert not ctx.lease_lost

    bench.handle(handle)
    row = bench.add()
    assert bench.run(row, lease=LEASE).verdict is Verdict.DONE
    assert 3 <= len(tokens) <= 12
    assert bench.read(row).attempts == 0


def test_what_has_ended_is_renewed_no_more(bench: Bench, engine: Engine) -> None:
    renewals: list[bool] = []
    with at_renewals(engine, "before", lambda: renewals.append(True)):
        assert bench.run_new(lambda *_: None)[0].verdict is Verdict.DONE
        with bench.heartbeat.hold(claim(bench, bench.add()), LEASE):
            until(lambda: renewals)
        number = len(renewals)
        row = claim(bench, bench.add())
        until(lambda: passed(bench, row.now.isoformat(), LEASE))
    assert len(renewals) <= number + 1  # one may have been under way
    assert not bench.heartbeat.busy


def test_a_handler_sees_that_its_lease_was_stolen(bench: Bench) -> None:
    def handle(job: Job, ctx: Context) -> None:
        assert not ctx.lease_lost
        somebody(engine)("update vk_jobs set lease_until = now() + interval '5 min' where id = :id", id=job.id)
        stolen.append(bench.read(row))
        until(lambda: ctx.lease_lost)
        told.append(bench.heartbeat.holds(job.id))

    engine = bench.engine
    stolen: list[Row] = []
    told: list[bool] = []
    bench.handle(handle)
    row = bench.add()
    assert bench.run(row, lease=LEASE).verdict is Verdict.LEASE_LOST
    assert [bench.read(row)] == stolen
    assert told == [False]


def test_a_short_lease_is_renewed_beside_a_long_one(bench: Bench) -> None:
    long, short = claim(bench, bench.add(), lease=3600), claim(bench, bench.add())
    with bench.heartbeat.hold(long, 3600):
        until(lambda: bench.heartbeat._wakes_at < float("inf"))  # the heart sleeps until the long one is due
        with bench.heartbeat.hold(short, LEASE) as holding:
            wait_for(lambda: holding.token > short.token, "a renewal", patience=20)


def test_a_stolen_lease_takes_no_other_with_it(bench: Bench) -> None:
    kept, stolen = (claim(bench, bench.add()) for _ in range(2))
    with bench.heartbeat.hold(kept, LEASE) as mine, bench.heartbeat.hold(stolen, LEASE) as other:
        somebody(bench.engine)("update vk_jobs set lease_until = now() where id = :id", id=stolen.id)
        until(lambda: other.lost)
        until(lambda: mine.token > kept.token)
        assert not mine.lost


def test_a_locked_row_is_not_lost_and_keeps_no_other_from_its_renewal(bench: Bench) -> None:
    locked, free = (claim(bench, bench.add()) for _ in range(2))
    with database.transaction(bench.engine) as other:
        other.execute(text("select from vk_jobs where id = :id for update"), {"id": locked.id})
        with bench.heartbeat.hold(locked, LEASE) as waits, bench.heartbeat.hold(free, LEASE) as renewed:
            until(lambda: renewed.token > free.token)
            until(lambda: waits.proposed is not None)
            assert not waits.lost
            other.rollback()
            until(lambda: waits.token > locked.token)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_renewal_without_an_answer_costs_nothing_whether_it_was_made_or_not(
    bench: Bench, caplog: pytest.LogCaptureFixture, when: str, *, goes_on: bool
) -> None:
    answers: list[bool] = []

    def lose_the_first() -> None:
        answers.append(True)
        if len(answers) == 1:
            raise psycopg2.OperationalError("server closed the connection unexpectedly")

    def handle(job: Job, ctx: Context) -> None:
        first = bench.read(row).lease_until
        until(lambda: "renewal failed" in events(caplog))
        assert (bench.read(row).lease_until != first) is (when == "after")
        if goes_on:
            until(lambda: len(answers) > 2)
        assert not ctx.lease_lost

    bench.handle(handle)
    row = bench.add()
    with at_renewals(bench.engine, when, lose_the_first):
        assert bench.run(row, lease=LEASE).verdict is Verdict.DONE
    assert bench.read(row).attempts == 0
    assert set(events(caplog)) == {"renewal failed"}


def test_the_heart_beats_on_after_any_error(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    beats: list[bool] = []

    def stumble_once() -> None:
        beats.append(True)
        if len(beats) == 1:
            raise MemoryError

    first = claim(bench, bench.add())
    with at_renewals(bench.engine, "before", stumble_once), bench.heartbeat.hold(first, LEASE) as holding:
        until(lambda: holding.token > first.token)
    assert events(caplog) == ["renewal failed"]


@pytest.mark.parametrize("error", [ValueError("x"), Snooze(timedelta(minutes=5))])
def test_a_renewal_without_an_answer_is_known_to_each_settling(
    bench: Bench, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def lose() -> None:
        raise psycopg2.OperationalError("server closed the connection unexpectedly")

    def handle(job: Job, ctx: Context) -> None:
        until(lambda: "renewal failed" in events(caplog))
        raise error

    bench.handle(handle)
    row = bench.add()
    with at_renewals(bench.engine, "after", lose):
        assert bench.run(row, lease=LEASE).verdict in (Verdict.RETRYING, Verdict.SNOOZED)
    assert bench.read(row).status == "pending"


def held(now: datetime, token: datetime) -> Holding:
    return Holding(Claim(1, "job", "r", now, 0, None, token, now), LEASE)


def test_proposals_count_from_the_databases_time_whatever_this_hosts_clock_says() -> None:
    now = datetime(2001, 1, 1, tzinfo=UTC)
    ahead = held(now, now + timedelta(seconds=LEASE)).propose() - now
    assert timedelta(seconds=LEASE) < ahead < timedelta(hours=1)


def test_a_proposal_differs_from_the_token_whatever_its_time() -> None:
    now = datetime(2140, 1, 1, tzinfo=UTC)
    token = now + timedelta(hours=5)
    assert held(now, token).propose() > token


def test_until_its_answer_is_seen_a_proposal_stays() -> None:
    now = datetime(2140, 1, 1, tzinfo=UTC)
    holding = held(now, now + timedelta(seconds=LEASE))
    first = holding.propose()
    time.sleep(0.001)
    assert holding.propose() == first
    holding.renewed()
    assert holding.token == first
    assert holding.propose() > first


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_job_settles_while_its_renewal_is_under_way(bench: Bench, when: str) -> None:
    under_way, go_on = threading.Event(), threading.Event()

    def hold_up() -> None:
        under_way.set()
        assert go_on.wait(30)

    first = claim(bench, bench.add())
    with at_renewals(bench.engine, when, hold_up), bench.heartbeat.hold(first, LEASE) as holding:
        assert under_way.wait(30)
        bench.heartbeat.stop(holding)
        tokens = (holding.token, holding.proposed)
        assert None not in tokens
        with bench.engine.connect() as conn:
            assert ledger.settle_done(conn, first.id, *tokens)
        go_on.set()
        # The answer has been dealt with when the heart beats for another.
        second = claim(bench, bench.add())
        with bench.heartbeat.hold(second, LEASE) as other:
            until(lambda: other.token > second.token)
        assert (holding.token, holding.proposed) == tokens
        assert not holding.lost


def test_a_claim_that_is_told_of_late_is_renewed_before_it_expires(bench: Bench) -> None:
    first = claim(bench, bench.add())
    until(lambda: passed(bench, first.now.isoformat(), 0.7 * LEASE))
    with bench.engine.connect() as conn:
        told = ledger.claimed(conn, first.id, by="me")
    assert told is not None
    renewed_at: list[Any] = []
    now = lambda: renewed_at.append(somebody(bench.engine)("select clock_timestamp()"))  # noqa: E731
    with at_renewals(bench.engine, "after", now), bench.heartbeat.hold(told, LEASE):
        until(lambda: renewed_at)
    assert renewed_at[0] < first.token


def test_proposals_run_by_the_databases_clock_from_the_claim(bench: Bench) -> None:
    row = bench.add()
    with bench.heartbeat.hold(claim(bench, row), LEASE) as holding:
        first = holding.token
        until(lambda: holding.token != first)
    after = bench.read(row)
    ahead = (moment(after.lease_until or "") - moment(after.updated_at)).total_seconds()
    # Late by what the renewal took on its way, and never early: no lease is longer than was asked for.
    assert 0 < ahead <= LEASE


FORK = '''
import os, sys
from celery import Celery
from sqlalchemy import text
from vkjobs import database, handler, setup, tasks

app = setup(Celery("forking", set_as_current=False, broker="memory://"))
app.conf.update(vkjobs_database_url=sys.argv[1], vkjobs_lease=1.0, vkjobs_horizon=0.5, vkjobs_tick=0.2)
seconds = 0.0

@handler("sleeps")
def sleeps(job, ctx):
    with tasks.engine_of(app).connect() as conn:
        conn.execute(text("select pg_sleep(:seconds)"), {"seconds": seconds})

def run():
    with tasks.engine_of(app).connect() as conn:
        id, token = conn.execute(text("""
            insert into vk_jobs (kind, ref_id, lease_until) values ('sleeps', 'r', clock_timestamp() + interval '60 s')
            returning id, lease_until""")).one()
    return app.tasks["vkjobs.sleeps"].apply(kwargs={"job_id": id, "token": token.isoformat()}, throw=True).result

print("parent", run(), flush=True)
child = os.fork()
if not child:
    seconds = 1.5
    try:
        print("child", run(), flush=True)
    finally:
        os._exit(0)
os.waitpid(child, 0)
print("parent", run(), flush=True)
'''


def test_a_forked_child_renews_its_own_jobs(bench: Bench, database_url: str, tmp_path: Path) -> None:
    reaped: list[object] = []
    # From Python 3.12 on it warns of forks beside threads, which is what a worker has to bear.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK, database_url]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def ended() -> bool:
        reaped.extend(lost(bench))
        return process.poll() is not None

    try:
        until(ended)
        said, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert said.splitlines() == ["parent done", "child done", "parent done"], said
    assert reaped == []
    assert somebody(bench.engine)("select count(*) from vk_jobs where status = 'done' and attempts = 0") == 3
