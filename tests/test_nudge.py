"""Nudges, sent to a real Redis: when one is sent, how many, and whom it may not harm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis as redis_client
from celery import Celery, current_app
from hosts import make_app
from messages import waiting
from rows import Row
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker
from workers import Worker, wait_for

import vkjobs
from vkjobs import NewJob
from vkjobs.errors import InvalidJobError
from vkjobs.events import Seldom
from vkjobs.handlers import registry
from vkjobs.local import Redis
from vkjobs.nudge import _nudger

Read = Callable[[Any], Row]

IMPATIENT = {"max_retries": 1, "interval_start": 0}  # as long as a broker that is away is tried for


@pytest.fixture
def app(redis_url: str) -> Celery:
    return make_app(broker_url=redis_url)


@pytest.fixture
def host(engine: Engine) -> Engine:
    """The engine of a host, with transactions as SQLAlchemy has them by default."""
    return engine.execution_options(isolation_level="READ COMMITTED")


@pytest.fixture
def nudges(redis_url: str) -> Callable[[], int]:
    """Tell how many nudges were sent since this was last asked."""

    def taken() -> int:
        let_it_finish()
        sent = waiting(redis_url, "vkjobs.tick")
        assert all((message.task, message.kwargs) == ("vkjobs.run_due", {"by": "nudge"}) for message in sent)
        with redis_client.Redis.from_url(redis_url) as broker:
            broker.delete("vkjobs.tick")
        return len(sent)

    return taken


@pytest.fixture
def session(host: Engine) -> Iterator[Session]:
    with Session(host) as session:
        yield session


Nudges = Callable[[], int]


class Base(DeclarativeBase): ...


class Task(Base):
    """A row of the host's."""

    __tablename__ = "host_tasks"
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture(autouse=True)
def _finished() -> Iterator[None]:
    """Leave the thread to the next test with nothing to do, and let it complain anew."""
    _nudger._seldom = Seldom(1000)
    yield
    let_it_finish()


def is_busy() -> bool:
    return bool(_nudger._asked) or _nudger._sending


def let_it_finish() -> None:
    wait_for(lambda: not is_busy(), "the nudges to be sent or given up", patience=20)


def soon(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


def run_script(script: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False)
    return done.stdout.splitlines()


# When


def test_a_job_that_is_due_starts_long_before_the_tick(
    session: Session, app: Celery, start_worker: Callable[..., Worker], read: Read
) -> None:
    late = {"VKJOBS_TICK": "300", "VKJOBS_HORIZON": "300", "VKJOBS_LEASE": "600"}
    start_worker("effects", "-c", "2", EFFECTS=os.devnull, **late).ready()
    left = vkjobs.enqueue(session, "noop")
    session.commit()
    time.sleep(1)
    assert read(left).lease_until is None  # what does not nudge waits for the tick
    nudged = vkjobs.enqueue(session, "noop", nudge=app)
    ahead = vkjobs.enqueue(session, "noop", run_at=soon(0.5))
    session.commit()
    wait_for(lambda: {read(id).status for id in (left, nudged, ahead)} == {"done"}, "the jobs to be done")


def test_a_nudge_is_sent_when_the_session_has_committed(session: Session, app: Celery, nudges: Nudges) -> None:
    vkjobs.enqueue(session, "noop", nudge=app)
    vkjobs.enqueue(session, "noop", nudge=app)
    assert nudges() == 0
    session.commit()
    assert nudges() == 1
    session.execute(text("select 1"))
    session.commit()
    assert nudges() == 0
    vkjobs.enqueue_many(session, [NewJob("noop", run_at=soon(3600)), NewJob("noop")], nudge=app)
    session.commit()
    assert nudges() == 1


def test_when_the_nudge_is_sent_the_job_is_there(
    host: Engine, app: Celery, nudges: Nudges, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def ask(_app: Celery) -> None:
        with engine.connect() as conn:
            seen.append(conn.execute(text("select count(*) from vk_jobs")).scalar_one())

    monkeypatch.setattr(_nudger, "ask", ask)
    with Session(host) as session, session.begin():
        vkjobs.enqueue(session, "noop", nudge=app)
    assert seen == [1]


@pytest.mark.parametrize(("seconds", "expected"), [(None, 1), (-3600, 1), (1, 1), (30, 0), (365 * 24 * 3600, 0)])
def test_a_job_that_is_not_due_within_the_horizon_nudges_nobody(
    session: Session, app: Celery, nudges: Nudges, seconds: float | None, expected: int
) -> None:
    vkjobs.enqueue(session, "noop", run_at=None if seconds is None else soon(seconds), nudge=app)
    session.commit()
    assert nudges() == expected
    vkjobs.enqueue_many(session, [], nudge=app)
    session.commit()
    assert nudges() == 0


def test_a_job_that_has_come_due_while_its_transaction_was_open_nudges(
    session: Session, app: Celery, nudges: Nudges
) -> None:
    app.conf.vkjobs_tick, app.conf.vkjobs_horizon = 0.1, 0.2
    vkjobs.enqueue(session, "noop", run_at=soon(0.5), nudge=app)
    time.sleep(0.5)
    session.commit()
    assert nudges() == 1


def test_a_session_that_has_not_committed_nudges_nobody(host: Engine, app: Celery, nudges: Nudges) -> None:
    session = Session(host)
    for end in (session.rollback, session.close, session.reset):
        vkjobs.enqueue(session, "noop", nudge=app)
        end()
        session.execute(text("select 1"))
        session.commit()
        assert nudges() == 0
    vkjobs.enqueue(session, "noop", nudge=app)
    with pytest.raises(Exception, match="division by zero"):
        session.execute(text("select 1 / 0"))
    session.close()
    assert nudges() == 0


def test_a_savepoint_nudges_when_the_whole_transaction_has_committed(
    session: Session, app: Celery, nudges: Nudges
) -> None:
    with session.begin_nested():
        with session.begin_nested():
            vkjobs.enqueue(session, "noop", nudge=app)
        assert nudges() == 0
    assert nudges() == 0
    session.commit()
    assert nudges() == 1


def test_a_savepoint_that_was_rolled_back_nudges_nobody(session: Session, app: Celery, nudges: Nudges) -> None:
    outer = session.begin_nested()
    with session.begin_nested():
        vkjobs.enqueue(session, "noop", nudge=app)
    outer.rollback()
    session.commit()
    assert nudges() == 0
    vkjobs.enqueue(session, "noop", nudge=app)
    with suppress(ZeroDivisionError), session.begin_nested():
        vkjobs.enqueue(session, "noop", nudge=app)
        raise ZeroDivisionError
    session.commit()
    assert nudges() == 1
    with session.begin_nested():
        vkjobs.enqueue(session, "noop", nudge=app)
    session.rollback()
    session.commit()
    assert nudges() == 0


def test_what_is_enqueued_in_a_flush_nudges(session: Session, app: Celery, nudges: Nudges) -> None:
    def enqueue(session: Session, _context: object) -> None:
        with session.begin_nested():
            vkjobs.enqueue(session, "noop", nudge=app)

    event.listen(session, "after_flush", enqueue)
    Base.metadata.create_all(session.connection())
    session.add(Task(id=1))
    session.flush()
    assert nudges() == 0
    session.rollback()
    assert nudges() == 0
    Base.metadata.create_all(session.connection())
    session.add(Task(id=1))
    session.commit()
    assert nudges() == 1


def test_a_scoped_session_and_one_of_its_own_connection_nudge(host: Engine, app: Celery, nudges: Nudges) -> None:
    scoped = scoped_session(sessionmaker(host))
    vkjobs.enqueue(scoped, "noop", nudge=app)
    scoped.commit()
    scoped.remove()
    assert nudges() == 1
    with host.connect() as conn:
        with Session(conn) as session:
            vkjobs.enqueue(session, "noop", nudge=app)
            session.commit()
        assert nudges() == 1


def test_a_session_that_has_joined_a_transaction_of_others_nudges_nobody(
    host: Engine, app: Celery, nudges: Nudges
) -> None:
    with host.connect() as conn, conn.begin() as transaction, Session(conn) as session:
        vkjobs.enqueue(session, "noop", nudge=app)
        session.commit()
        transaction.rollback()  # as tests of a host do
    assert nudges() == 0


def test_host_code_nudges_after_its_own_sql(host: Engine, app: Celery, nudges: Nudges) -> None:
    with host.connect() as conn:
        vkjobs.enqueue(conn, "noop")
        conn.commit()
    vkjobs.nudge(app)
    assert nudges() == 1


class Handled:
    """Runs a job of a kind whose handler enqueues another one, with a nudge."""

    def __init__(self, url: str, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(registry, "_handlers", {})
        self.app = vkjobs.setup(app)
        self.url = url
        self.in_handler: Callable[[vkjobs.Context], None] = lambda ctx: None

        @vkjobs.handler("chain")
        def chain(job: vkjobs.Job, ctx: vkjobs.Context) -> None:
            vkjobs.enqueue(ctx.session, "next", nudge=app)
            self.in_handler(ctx)

    def run(self, conn: Connection) -> str:
        vkjobs.enqueue(conn, "chain")
        self.app.tasks["vkjobs.run_due"].apply().get()
        [message] = [message for message in waiting(self.url) if message.task == "vkjobs.chain"]
        with redis_client.Redis.from_url(self.url) as broker:
            broker.flushall()
        return str(self.app.tasks["vkjobs.chain"].apply(kwargs=message.kwargs).state)


def test_what_a_handler_enqueues_nudges_when_its_job_is_settled(
    engine: Engine, app: Celery, database_url: str, redis_url: str, nudges: Nudges, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.conf.vkjobs_database_url = database_url
    handled = Handled(redis_url, app, monkeypatch)
    early: list[int] = []

    def commit(ctx: vkjobs.Context) -> None:
        ctx.session.commit()
        early.append(nudges())

    def commit_and_fail(ctx: vkjobs.Context) -> None:
        ctx.session.commit()
        raise RuntimeError("no luck")

    with engine.connect() as conn:
        assert (handled.run(conn), nudges()) == ("SUCCESS", 1)
        handled.in_handler = commit
        assert (handled.run(conn), early, nudges()) == ("SUCCESS", [0], 1)
        handled.in_handler = commit_and_fail
        assert (handled.run(conn), nudges()) == ("RETRY", 0)


# How many


@pytest.fixture
def drained(redis_url: str) -> Iterator[list[float]]:
    """Take each tick as soon as it comes, as idle workers do; give the times at which one came."""
    times: list[float] = []
    stop = threading.Event()

    def drain() -> None:
        with redis_client.Redis.from_url(redis_url) as broker:
            while not stop.is_set():
                if broker.brpop(["vkjobs.tick"], timeout=1):
                    times.append(time.monotonic())

    thread = threading.Thread(target=drain)
    thread.start()
    yield times
    stop.set()
    thread.join()


def test_a_thousand_commits_make_a_few_messages_and_the_last_is_not_forgotten(
    host: Engine, app: Celery, drained: list[float]
) -> None:
    began = time.monotonic()
    for _ in range(1000):
        with Session(host) as session:
            vkjobs.enqueue(session, "noop", nudge=app)
            session.commit()
    committed = time.monotonic()
    wait_for(lambda: drained and drained[-1] > committed, "the last nudge")
    assert len(drained) <= 10 + (committed - began) / 0.05


def test_where_a_tick_waits_already_none_is_sent(app: Celery, session: Session, redis_url: str) -> None:
    for _ in range(3):
        vkjobs.enqueue(session, "noop", nudge=app)
        session.commit()
        let_it_finish()
    assert len(waiting(redis_url, "vkjobs.tick")) == 1


# Whom it does not harm

SCRIPT = """
import os, sys, threading
from celery import Celery
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
import vkjobs
from vkjobs import database
from vkjobs.nudge import _nudger

app = Celery("script", set_as_current=False, broker=sys.argv[2])
engine = create_engine(database.url_of(sys.argv[1]))

def enqueue(**arguments):
    with Session(engine) as session:
        vkjobs.enqueue(session, "noop", **arguments)
        session.commit()

def threads():
    return [thread.name for thread in threading.enumerate()][1:]
"""

ALONE = """
from datetime import UTC, datetime, timedelta
enqueue()
enqueue(nudge=app, run_at=datetime.now(UTC) + timedelta(days=1))
with Session(engine) as session:
    vkjobs.enqueue(session, "noop", nudge=app)
    session.rollback()
print(threads())
enqueue(nudge=app)
print(threads())
"""

FORK = """
import redis
from vkjobs import nudge as _

def fork(act):
    child = os.fork()
    if not child:
        act()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

def nudged():
    before = threads()
    enqueue(nudge=app)
    sys.modules["vkjobs.nudge"]._nudger.finish()
    print(before, threads(), client.llen("vkjobs.tick"), flush=True)
    client.delete("vkjobs.tick")

client = redis.Redis.from_url(sys.argv[2])
nudged()
engine.dispose()
with _nudger._changed:  # as the thread may hold it at any moment
    fork(nudged)
nudged()
"""


def test_without_a_nudge_there_is_no_thread_and_a_script_may_end_right_after_its_commit(
    database_url: str, redis_url: str
) -> None:
    assert run_script(SCRIPT + ALONE, database_url, redis_url) == ["[]", "['vkjobs-nudge']"]
    assert len(waiting(redis_url, "vkjobs.tick")) == 1


def test_a_forked_child_nudges_by_a_thread_of_its_own(database_url: str, redis_url: str) -> None:
    told = run_script(SCRIPT + FORK, database_url, redis_url)
    thread = "['vkjobs-nudge']"
    assert told == [f"[] {thread} 1", f"[] {thread} 1", f"{thread} {thread} 1"]


def test_while_the_broker_is_away_commits_go_on_and_one_line_is_logged(
    host: Engine, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    with Redis() as server:
        app = make_app(broker_url=server.url, broker_transport_options=IMPATIENT)
    with Session(host) as session:
        for _ in range(2):
            id = vkjobs.enqueue(session, "noop", nudge=app)
            session.commit()
            vkjobs.nudge(app)
            let_it_finish()
    assert read(id).status == "pending"
    (record,) = caplog.records
    assert (record.levelname, record.event) == ("WARNING", "nudge failed")  # type: ignore[attr-defined]
    assert "Connection refused" in record.message


def test_a_broker_that_does_not_answer_holds_nobody_up(host: Engine) -> None:
    with Redis() as server:
        app = make_app(broker_url=server.url)
        os.kill(server.pid or 0, signal.SIGSTOP)
        try:
            with Session(host) as session:
                for _ in range(3):
                    vkjobs.enqueue(session, "noop", nudge=app)
                    session.commit()
                vkjobs.nudge(app)
            assert is_busy()  # with the first of them, after all these commits
        finally:
            os.kill(server.pid or 0, signal.SIGCONT)
        wait_for(lambda: len(waiting(server.url, "vkjobs.tick")) == 1, "the nudge to get through")
        let_it_finish()


def test_settings_that_no_worker_takes_fail_no_commit(
    session: Session, app: Celery, nudges: Nudges, caplog: pytest.LogCaptureFixture
) -> None:
    app.conf.vkjobs_tick = "never"
    vkjobs.enqueue(session, "noop", nudge=app)
    session.commit()
    vkjobs.nudge(app)
    assert [record.message.split(" error=")[0] for record in caplog.records] == ["nudge failed"]
    assert nudges() == 0


def test_where_no_thread_can_be_had_the_tick_does_it(
    session: Session, app: Celery, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_nudger, "_thread", None)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    vkjobs.enqueue(session, "noop", nudge=app)
    session.commit()
    assert [record.message for record in caplog.records] == ['nudge failed error="can\'t start new thread"']
    assert not _nudger._asked


# What is refused


def test_a_connection_does_not_tell_of_its_commit(host: Engine, app: Celery, engine: Engine) -> None:
    line = r"nudge needs a Session, because a Connection .*: call vkjobs.nudge\(app\) after the commit"
    with host.connect() as conn:
        with pytest.raises(InvalidJobError, match=line):
            vkjobs.enqueue(conn, "noop", nudge=app)
        with pytest.raises(InvalidJobError, match=line):
            vkjobs.enqueue_many(conn, [NewJob("noop")], nudge=app)
        conn.commit()
    with engine.connect() as conn:
        assert conn.execute(text("select count(*) from vk_jobs")).scalar_one() == 0


@pytest.mark.parametrize("wrong", [True, "app", Celery, current_app])
def test_what_is_no_app_is_refused_and_nothing_written(session: Session, engine: Engine, wrong: Any) -> None:
    for call in (
        lambda: vkjobs.enqueue(session, "noop", nudge=wrong),
        lambda: vkjobs.enqueue_many(session, [NewJob("noop")], nudge=wrong),
        lambda: vkjobs.nudge(wrong),
    ):
        with pytest.raises(InvalidJobError, match=r"nudge is a \w+: it must be your Celery app itself"):
            call()
    session.commit()
    with engine.connect() as conn:
        assert conn.execute(text("select count(*) from vk_jobs")).scalar_one() == 0
