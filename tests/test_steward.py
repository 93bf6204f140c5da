"""The steward of a worker's main process, on a real database and with real messages, but without the worker."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import psycopg2
import pytest
from billiard.einfo import ExceptionInfo
from billiard.exceptions import Terminated, WorkerLostError
from celery import Celery
from hosts import make_app
from places import moment
from rows import Row
from sqlalchemy import Engine, event, text
from statements import watching
from workers import wait_for as wait_patiently_for

import vkjobs
from vkjobs import bulk, database, ledger
from vkjobs.ledger import token_text
from vkjobs.steward import JobRequest, Steward, release_waiting, steward_of
from vkjobs.tasks import claimant, engine_of

Add = Callable[..., Row]
Read = Callable[[Any], Row]

# It ends by SystemExit, which is no exception to threading, but is one to pytest.
pytestmark = pytest.mark.filterwarnings("ignore:Exception in thread vkjobs-steward")

wait_for = partial(wait_patiently_for, patience=15.0)

TICK = 0.2
NODE, PID = "w@host", 7


@pytest.fixture
def app(redis_url: str, database_url: str) -> Celery:
    return vkjobs.setup(make_app(broker_url=redis_url, vkjobs_database_url=database_url, vkjobs_tick=TICK))


@pytest.fixture
def steward(app: Celery) -> Iterator[Steward]:
    yield steward_of(app)
    steward_of(app).stop(30)
    engine_of(app).dispose()


@contextmanager
def at_connecting(app: Celery, strike: Callable[[], None]) -> Iterator[None]:
    """Call ``strike`` before each new connection of the steward's."""

    def connect(*_: object) -> None:
        strike()

    engine = engine_of(app)
    engine.dispose()
    event.listen(engine, "do_connect", connect)
    try:
        yield
    finally:
        event.remove(engine, "do_connect", connect)


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [getattr(record, "event", "") for record in caplog.records]


def received(app: Celery, row: Row, **options: Any) -> JobRequest:
    """Send the message of a leased row; return it as a worker's main process has it."""
    kwargs = {"job_id": row.id, "token": token_text(moment(row.lease_until or ""))}
    app.send_task("vkjobs.unhandled", kwargs=kwargs, queue="vkjobs", **options)
    with app.connection_for_read() as connection, connection.SimpleQueue("vkjobs") as queue:
        message = queue.get(timeout=30)
        message.ack()
    return JobRequest(message, app=app, hostname=NODE)


def claimed(engine: Engine, row: Row, by: str) -> None:
    with engine.connect() as conn:
        assert ledger.claim(conn, row.id, moment(row.lease_until or ""), lease=3600, by=by) is not None


@pytest.fixture
def running(app: Celery, steward: Steward, engine: Engine, add: Add) -> tuple[JobRequest, Row]:
    """A job that a child has claimed, and its message."""
    row = add(lease_until=60)
    request = received(app, row)
    request.on_accepted(PID, time.monotonic())
    claimed(engine, row, claimant(request.id, NODE, PID))
    return request, row


# Children that died


@pytest.mark.parametrize("error", [WorkerLostError("SIGKILL"), Terminated(15), SystemExit(3), KeyboardInterrupt("^C")])
def test_a_child_that_died_is_settled_whatever_it_is_told_by(
    running: tuple[JobRequest, Row], read: Read, error: BaseException
) -> None:
    request, row = running
    try:
        raise error
    except BaseException:
        request.on_failure(ExceptionInfo())
    wait_for(lambda: read(row.id).attempts == 1, "the attempt to be counted")
    after = read(row.id)
    assert (after.status, after.lease_until) == ("pending", None)
    assert (after.last_error or "").startswith(f"WorkerLost: its process died: {error}\n")


def test_a_job_that_failed_is_not_settled_a_second_time(running: tuple[JobRequest, Row], read: Read) -> None:
    request, row = running
    before = read(row.id)
    try:
        raise vkjobs.JobFailed("ValueError: x")
    except vkjobs.JobFailed:
        request.on_failure(ExceptionInfo())
    steward_of(request.app).stop(30)
    assert read(row.id) == before


def test_a_job_killed_at_its_time_limit_is_settled_and_a_warned_one_is_not(
    running: tuple[JobRequest, Row], read: Read
) -> None:
    request, row = running
    before = read(row.id)
    request.on_timeout(soft=True, timeout=5)
    steward_of(request.app).stop(30)
    assert read(row.id) == before
    request.on_timeout(soft=False, timeout=9)
    wait_for(lambda: read(row.id).attempts == 1, "the attempt to be counted")
    assert (read(row.id).last_error or "").startswith("WorkerLost: its process was killed at the time limit of 9 s\n")


def test_a_job_whose_child_died_before_the_claim_is_free(steward: Steward, add: Add, read: Read) -> None:
    row = add(lease_until=60)
    steward.child_died(row.id, moment(row.lease_until or ""), by="task w 1", reason="it died")
    wait_for(lambda: read(row.id).lease_until is None, "the job to be free")
    assert (read(row.id).status, read(row.id).attempts) == ("pending", 0)


# Children that died with many jobs


def received_together(app: Celery, *rows: Row) -> JobRequest:
    """As `received`, of the message of many jobs; the first row's token is that of all."""
    kwargs = {"job_ids": [row.id for row in rows], "token": token_text(moment(rows[0].lease_until or ""))}
    app.send_task("vkjobs.unhandled", kwargs=kwargs, queue="vkjobs")
    with app.connection_for_read() as connection, connection.SimpleQueue("vkjobs") as queue:
        message = queue.get(timeout=30)
        message.ack()
    return JobRequest(message, app=app, hostname=NODE)


def was_at(monkeypatch: pytest.MonkeyPatch, pid: int, number: int) -> None:
    """Say which job of its message a child was at."""
    monkeypatch.setattr(os, "getpid", lambda: pid)
    bulk.position.set(number)


def die(request: JobRequest) -> None:
    try:
        raise WorkerLostError("SIGKILL")
    except WorkerLostError:
        request.on_failure(ExceptionInfo())
    steward_of(request.app).stop(30)


TOGETHER = "2040-01-02 03:04:05.678901+00"


@pytest.fixture
def together(app: Celery, steward: Steward, engine: Engine, add: Add) -> tuple[JobRequest, list[Row]]:
    """Four jobs of one message: the first is done, two are claimed, and the last is not yet."""
    rows = [add(lease_until=TOGETHER) for _ in range(4)]
    request = received_together(app, *rows)
    request.on_accepted(PID, time.monotonic())
    by = claimant(request.id, NODE, PID)
    leases = [(row.id, moment(TOGETHER)) for row in rows[:3]]
    with engine.connect() as conn:
        first, *_ = sorted(ledger.claim_all(conn, leases, lease=3600, by=by))
        assert ledger.settle_done(conn, first.id, first.token)
    return request, rows


def outcomes(read: Read, rows: list[Row]) -> list[tuple[str, int, bool]]:
    after = [read(row.id) for row in rows]
    return [(row.status, row.attempts, row.lease_until is None and row.last_error is None) for row in after]


@pytest.mark.parametrize("at", [1, 2])
def test_of_many_jobs_the_one_that_its_child_was_at_is_settled_and_the_others_are_free(
    together: tuple[JobRequest, list[Row]], read: Read, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    request, rows = together
    was_at(monkeypatch, PID, at)
    die(request)
    expected = [("done", 0, True), ("pending", 0, True), ("pending", 0, True), ("pending", 0, True)]
    expected[at] = ("pending", 1, False)
    assert outcomes(read, rows) == expected
    assert (read(rows[at].id).last_error or "").startswith("WorkerLost: its process died: SIGKILL")


@pytest.mark.parametrize("number", [-1, 0, 7])
def test_of_a_child_that_was_at_none_of_what_it_had_claimed_no_attempt_counts(
    together: tuple[JobRequest, list[Row]], read: Read, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    request, rows = together
    was_at(monkeypatch, PID, number)
    die(request)
    assert outcomes(read, rows) == [("done", 0, True), *[("pending", 0, True)] * 3]


def test_where_another_child_was_is_not_taken_for_where_this_one_was(
    together: tuple[JobRequest, list[Row]], read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, rows = together
    was_at(monkeypatch, PID + 4096, 1)
    die(request)
    assert outcomes(read, rows) == [("done", 0, True), *[("pending", 0, True)] * 3]


def test_of_a_list_each_job_that_was_claimed_was_executed(
    together: tuple[JobRequest, list[Row]], read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, rows = together
    was_at(monkeypatch, PID, bulk.ALL)
    die(request)
    assert outcomes(read, rows) == [("done", 0, True), *[("pending", 1, False)] * 2, ("pending", 0, True)]


def test_what_a_stopping_worker_has_of_many_jobs_is_free(
    app: Celery, steward: Steward, engine: Engine, add: Add, read: Read
) -> None:
    rows = [add(lease_until=TOGETHER) for _ in range(3)]
    request = received_together(app, *rows)
    release_waiting(app)
    steward.stop(30)
    assert request.leases() == [(row.id, moment(TOGETHER)) for row in rows]
    assert [read(row.id).lease_until for row in rows] == [None] * 3


# What stands in its way


def test_the_steward_goes_on_after_an_error(
    steward: Steward, add: Add, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    row = add(lease_until=60)
    token = moment(row.lease_until or "")
    for id in ("no id", row.id):
        steward.child_died(id, token, by="task w 1", reason="it died")
    wait_for(lambda: read(row.id).lease_until is None, "the job to be free")
    assert events(caplog) == ["steward failed"]


def test_what_postgres_was_away_for_is_done_when_it_is_back(
    app: Celery, steward: Steward, add: Add, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    refused: list[bool] = []

    def refuse() -> None:
        if not refused:
            refused.append(True)
            raise psycopg2.OperationalError("the database system is starting up")

    row = add(lease_until=60)
    with at_connecting(app, refuse):
        steward.release([(row.id, moment(row.lease_until or ""))])
        wait_for(lambda: read(row.id).lease_until is None, "the job to be free")
    assert refused
    assert events(caplog) == ["steward failed"]


def test_a_job_whose_child_died_is_settled_when_nobody_has_locked_it_any_more(
    running: tuple[JobRequest, Row], engine: Engine, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    request, row = running
    with database.transaction(engine) as other:
        other.execute(text("select from vk_jobs where id = :id for update"), {"id": row.id})
        try:
            raise WorkerLostError("SIGKILL")
        except WorkerLostError:
            request.on_failure(ExceptionInfo())
        wait_for(lambda: "steward failed" in events(caplog), "the steward to wait no longer")
        other.rollback()
    wait_for(lambda: read(row.id).status == "pending", "the job to be settled")
    assert read(row.id).attempts == 1


def test_an_id_that_is_none_keeps_no_other_from_its_release(steward: Steward, add: Add, read: Read) -> None:
    row = add(lease_until=60)
    token = moment(row.lease_until or "")
    steward.release([("no id", token), (row.id, token)])
    wait_for(lambda: read(row.id).lease_until is None, "the job to be free")


def test_what_a_steward_was_told_is_done_when_it_has_stopped(
    app: Celery, steward: Steward, add: Add, read: Read
) -> None:
    row = add(lease_until=60)
    with at_connecting(app, lambda: time.sleep(0.5)):
        steward.release([(row.id, moment(row.lease_until or ""))])
        steward.stop(30)
    assert read(row.id).lease_until is None


# Ticks


def ticked(engine: Engine, source: str, ago: str) -> None:
    """Let somebody tick, or have ticked, by hand."""
    with engine.connect() as conn:
        conn.execute(text("delete from vkjobs_ticks where source = :source"), {"source": source})
        conn.execute(
            text("insert into vkjobs_ticks values (:source, now() - cast(:ago as interval))"),
            {"source": source, "ago": ago},
        )


def test_a_worker_ticks_while_beat_is_silent(
    steward: Steward, add: Add, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    for row in (add(), add()):
        steward.start(ticks=True)
        wait_for(lambda row=row: read(row.id).lease_until, "the job to be leased")  # type: ignore[misc]
    assert events(caplog) == ["beat is silent, workers tick by themselves"]


@pytest.mark.parametrize("source", ["beat", "worker"])
def test_a_worker_does_not_tick_while_somebody_does(
    app: Celery, steward: Steward, engine: Engine, add: Add, read: Read, source: str
) -> None:
    asked: list[str] = []
    ticked(engine, source, "-1 hour")
    row = add()
    with watching(engine_of(app), before=lambda _, sql: asked.append(sql)):
        steward.start(ticks=True)
        wait_for(lambda: len([sql for sql in asked if "ticked_at) from" in sql]) > 20, "many looks for a tick")
        assert read(row.id).lease_until is None
        ticked(engine, source, "1 hour")
        wait_for(lambda: read(row.id).lease_until, "the job to be leased")


def test_a_worker_waits_for_a_beat_that_starts_beside_it(
    steward: Steward, add: Add, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    row = add()
    time.sleep(TICK)  # what passed before the start does not count
    began = time.monotonic()
    steward.start(ticks=True)
    wait_for(lambda: read(row.id).lease_until, "the job to be leased")
    assert time.monotonic() - began > 3 * TICK


def test_a_worker_that_stops_ticks_no_more(steward: Steward, add: Add, read: Read) -> None:
    first, waiting = add(run_at=-9), add(lease_until=60)
    steward.start(ticks=True)
    wait_for(lambda: read(first.id).lease_until, "the first job to be leased")
    steward.retire([(waiting.id, moment(waiting.lease_until or ""))])
    wait_for(lambda: read(waiting.id).lease_until is None, "what waits here to be free")
    time.sleep(8 * TICK)
    assert read(waiting.id).lease_until is None


# Clocks


def test_the_time_of_a_message_is_by_this_hosts_clock(app: Celery, steward: Steward, add: Add) -> None:
    row = add(lease_until=60)
    steward.clock_lead = timedelta(minutes=10)
    time_of_the_database = datetime(2040, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    assert received(app, row, eta=time_of_the_database).eta == time_of_the_database + timedelta(minutes=10)
    assert received(app, row).eta is None
    forged = datetime.max.replace(tzinfo=UTC)
    assert received(app, row, eta=forged).eta == forged


def test_a_worker_knows_how_far_its_clock_is_ahead(steward: Steward) -> None:
    steward.clock_lead = timedelta(minutes=10)
    steward.start(ticks=False)
    wait_for(lambda: abs(steward.clock_lead.total_seconds()) < 60, "the clocks to be compared")
