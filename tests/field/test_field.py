"""Failures that people have reported of such systems, those of cases.md that no other test shows."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4
from zoneinfo import ZoneInfo

import pytest
import redis as redis_client
from bench import Bench
from chaos.servers import PgBouncer
from hosts import make_app
from messages import waiting
from original import execute
from rows import Row
from sqlalchemy import Engine, make_url, text
from workers import wait_for

import vkjobs
from vkjobs import Context, Job, database, dispatch, ledger
from vkjobs.dispatch import Dispatcher
from vkjobs.events import Seldom
from vkjobs.execute import Verdict
from vkjobs.handlers import Policy, Registry
from vkjobs.local import Postgres
from vkjobs.settings import Settings

Add = Callable[..., Row]
Read = Callable[[Any], Row]


@pytest.fixture
def bench(engine: Engine, caplog: pytest.LogCaptureFixture) -> Bench:
    caplog.set_level(logging.INFO, "vkjobs")
    return Bench(engine)


@pytest.fixture
def tick(engine: Engine, redis_url: str) -> Callable[..., int]:
    """Run due, as a tick does."""
    app = vkjobs.setup(make_app(broker_url=redis_url))
    kinds = Registry()
    kinds.register("noop", lambda job, ctx: None, Policy())
    return lambda **settings: Dispatcher(app, engine, Settings(**settings), kinds).run_due(housekeeping=True)


def ids(redis_url: str) -> list[Any]:
    return [message.kwargs["job_id"] for message in waiting(redis_url)]


# F01


def test_a_running_row_whose_lease_never_ends_is_told_of_and_breaks_nothing(
    tick: Callable[..., int], add: Add, read: Read, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_stuck_is_told", Seldom(30))
    stuck = add(status="running", lease_until="infinity", claimed_until="infinity", claimed_by="x", started_at=-1)
    add(status="running", lease_until=50, claimed_until=50, claimed_by="x", started_at=-1)
    add()
    assert [tick(), tick()] == [1, 0]
    told = [record.getMessage() for record in caplog.records]
    assert told == ["stuck jobs=1 reason='running, with a lease further off than any that is given'"]
    assert read(stuck.id) == stuck


# F02


@pytest.mark.parametrize("words", ["before\0after", "\0" * 169])
def test_an_error_with_nuls_is_kept_readable(bench: Bench, words: str) -> None:
    def handle(_job: Job, _ctx: Context) -> None:
        raise ValueError(words)

    outcome, row = bench.run_new(handle)
    assert outcome.verdict is Verdict.RETRYING
    assert row.last_error is not None
    assert row.last_error.startswith("ValueError: " + words.replace("\0", "\\x00"))


# F07

SLOW_COMMIT = (
    """create function dawdle() returns trigger language plpgsql as $$ begin
        if current_setting('application_name') = 'vkjobs' and new.lease_until is not null
        then perform pg_sleep(1); {} end if; return null;
    end $$""",
    """create constraint trigger dawdle after update on vk_jobs deferrable initially deferred
        for each row execute function dawdle()""",
)


def test_nothing_is_published_before_its_lease_is_committed(
    tick: Callable[..., int], add: Add, database_url: str, redis_url: str
) -> None:
    row = add()
    execute(database_url, SLOW_COMMIT[0].format(""), SLOW_COMMIT[1])
    seen: list[tuple[int, bool]] = []
    run = threading.Thread(target=tick)
    run.start()
    look = database.engine(database_url, 2, "look")
    while run.is_alive():
        with look.connect() as conn:
            published = len(ids(redis_url))
            leased = conn.scalar(text("select lease_until is not null from vk_jobs"))
            seen.append((published, bool(leased)))
        time.sleep(0.05)
    run.join()
    look.dispose()
    assert (0, False) in seen
    assert (1, False) not in seen
    assert ids(redis_url) == [row.id]


def test_a_lease_whose_commit_fails_is_not_published(
    tick: Callable[..., int], add: Add, read: Read, database_url: str, redis_url: str
) -> None:
    row = add()
    execute(database_url, SLOW_COMMIT[0].format("raise 'no';"), SLOW_COMMIT[1])
    assert tick() == 0
    assert ids(redis_url) == []
    assert read(row.id) == row


# F11


@pytest.fixture
def impatient(postgres: Postgres) -> Iterator[Engine]:
    """A database that ends what is idle for a second, in a transaction or not."""
    url = postgres.create_database(name := f"impatient_{uuid4().hex}", template="migrated")
    execute(url, f"alter database {name} set idle_session_timeout = '1s'", "create table effects (what text)")
    execute(url, f"alter database {name} set idle_in_transaction_session_timeout = '1s'")
    engine = database.engine(url, 3)
    yield engine
    engine.dispose()


def test_a_long_handler_on_a_database_that_ends_idle_sessions(impatient: Engine) -> None:
    starts: list[str] = []
    bench = Bench(impatient)

    def without(_job: Job, _ctx: Context) -> None:
        starts.append("without")
        time.sleep(2)

    def within(_job: Job, ctx: Context) -> None:
        starts.append("with")
        ctx.session.execute(text("insert into effects values ('x')"))
        time.sleep(2)

    bench.handle(without, "without")
    bench.handle(within, "with")
    row = bench.add(kind="without")
    assert bench.run(row).verdict is Verdict.DONE
    assert bench.read(row).attempts == 0
    row = bench.add(kind="with")
    assert bench.run(row).verdict is Verdict.RETRYING
    after = bench.read(row)
    assert (after.status, after.attempts) == ("pending", 1)
    assert starts == ["without", "with"]
    with impatient.connect() as conn:
        assert conn.scalar(text("select count(*) from effects")) == 0


# F12


def test_a_failed_row_that_is_made_pending_by_plain_sql_runs_once_more(
    bench: Bench, engine: Engine, database_url: str
) -> None:
    def handle(_job: Job, _ctx: Context) -> None:
        raise ValueError("again")

    bench.handle(handle)
    row = bench.add(status="failed", attempts=5, lease_until=None)
    execute(database_url, f"update vk_jobs set status = 'pending', run_at = now() where id = {row.id}")
    with engine.connect() as conn:
        (leased,) = ledger.lease(conn, kinds=[], listed=False, batch=5, window=5, lease=60, horizon=0)
        assert bench.executor.run(leased.id, leased.token, by="x", lease=60).verdict is Verdict.FAILED
        after = bench.read(row)
        assert (after.status, after.attempts) == ("failed", 6)
        assert ledger.retry(conn, row.id)
        after = bench.read(row)
        assert (after.status, after.attempts, after.lease_until) == ("pending", 0, None)
    for status in ("running", "done"):
        other = bench.add(status=status, lease_until=60)
        with engine.connect() as conn:
            assert not ledger.retry(conn, other.id)
        assert bench.read(other) == other


# F14


def test_a_handler_that_lets_no_thread_run_loses_its_lease_and_changes_nothing(bench: Bench, database_url: str) -> None:
    reaper = (
        "import sys, time\n"
        "from sqlalchemy import create_engine, text\n"
        "from vkjobs.database import url_of\n"
        "engine = create_engine(url_of(sys.argv[1]), isolation_level='AUTOCOMMIT')\n"
        "taken = text(\"update vk_jobs set status = 'pending', lease_until = null where lease_until < now()\")\n"
        "with engine.connect() as conn:\n"
        "    while not conn.execute(taken).rowcount:\n"
        "        time.sleep(0.05)\n"
    )

    def handle(_job: Job, _ctx: Context) -> None:
        with subprocess.Popen([sys.executable, "-c", reaper, database_url]) as other:
            held = ctypes.PyDLL(None)  # its functions keep the interpreter's lock
            deadline = time.monotonic() + 30
            while other.poll() is None and time.monotonic() < deadline:
                held.usleep(2_000_000)

    bench.handle(handle)
    row = bench.add()
    assert bench.run(row, lease=1).verdict is Verdict.LEASE_LOST
    after = bench.read(row)
    assert (after.status, after.attempts, after.lease_until) == ("pending", 0, None)


# F18


def test_a_row_that_the_host_lets_nobody_lease_keeps_no_other_from_it(
    tick: Callable[..., int],
    add: Add,
    read: Read,
    database_url: str,
    redis_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad, good = [add(run_at=-9), add(run_at=-7)], [add(run_at=-8), add(run_at=-6)]
    execute(
        database_url,
        f"""create function refuse() returns trigger language plpgsql as $$ begin
            if new.id in ({bad[0].id}, {bad[1].id}) then raise 'not this one'; end if; return new;
        end $$""",
        "create trigger refuse before update on vk_jobs for each row execute function refuse()",
    )
    assert tick(batch=2) == 2
    assert ids(redis_url) == [row.id for row in good]
    assert [read(row.id) for row in bad] == bad
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"job cannot be leased job_id={row.id} error='not this one'" for row in bad]
    # Leased again, too.
    execute(database_url, "alter table vk_jobs disable trigger refuse")
    execute(database_url, "update vk_jobs set lease_until = now() - interval '1 min'")
    execute(database_url, "alter table vk_jobs enable trigger refuse")
    with redis_client.Redis.from_url(redis_url) as client:
        client.flushall()
    assert tick() == 2
    assert ids(redis_url) == [row.id for row in good]


# F23


def test_rows_that_the_host_sets_done_while_they_are_leased_cost_nothing(
    engine: Engine, database_url: str, add: Add
) -> None:
    execute(
        database_url,
        "insert into vk_jobs (kind, run_at, lease_until) "
        "select 'noop', now(), now() + interval '1 min' from generate_series(1, 50000)",
        "update vk_jobs set status = 'done'",
    )
    row = add()
    with engine.connect() as conn:
        (leased,) = ledger.lease(conn, kinds=[], listed=False, batch=5, window=5, lease=60, horizon=0)
        assert leased.id == row.id
        conn.execute(text("set enable_seqscan = off"))
        found = "select from vk_jobs where status = 'pending' and lease_until is not null"
        conn.execute(text(found))  # the entries of rows that are gone are marked as such by whoever meets them first
        plan = conn.scalar(text(f"explain (analyze, buffers, format json) {found}"))[0]["Plan"]
        assert plan["Actual Rows"] == 1
        assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 500


# F06


@pytest.mark.skipif(not PgBouncer.is_installed(), reason="apt-get install pgbouncer")
def test_a_connection_over_tls_that_was_opened_before_a_fork_stays_the_parents(database_url: str) -> None:
    def talk(engine: Engine, times: int) -> None:
        for _ in range(times):
            with engine.connect() as conn:
                assert len(conn.scalar(text("select repeat('x', 100000)"))) == 100_000

    with PgBouncer(database_url, 4, tls=True) as server:
        engine = database.engine(server.url, 1)
        with engine.connect() as conn:
            theirs: Any = conn.connection.driver_connection
            assert theirs.info.ssl_in_use
        children = []
        for _ in range(3):
            child = os.fork()
            if child == 0:
                try:
                    talk(database.engine(server.url, 1), 20)
                    os._exit(0)
                finally:
                    os._exit(1)
            children.append(child)
        talk(engine, 20)
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
        with engine.connect() as conn:
            assert conn.connection.driver_connection is theirs
        engine.dispose()


# A database that is read-only


@pytest.mark.parametrize("session", [False, True])
def test_a_database_that_is_read_only_for_a_while_is_waited_for(
    engine: Engine, database_url: str, caplog: pytest.LogCaptureFixture, *, session: bool
) -> None:
    """Sessions that began meanwhile stay read-only, as those of a server that was demoted do."""
    name = str(make_url(database_url).database)
    bench = Bench(engine)

    def handle(_job: Job, ctx: Context) -> None:
        execute(database_url, f"alter database {name} set default_transaction_read_only = on")
        engine.dispose()
        if session:
            ctx.session.execute(text("select 1"))
        mender.start()

    def mend() -> None:
        with suppress(AssertionError):
            wait_for(lambda: "waiting for postgres" in caplog.text, "the settling to fail", patience=6)
        execute(database_url, "set default_transaction_read_only = off", f"alter database {name} reset all")

    mender = threading.Thread(target=mend)
    bench.handle(handle)
    row = bench.add()
    # What was written through a session is gone with it, as in any outage.
    assert bench.run(row).verdict is (Verdict.RETRYING if session else Verdict.DONE)
    mender.join()
    assert bench.read(row).attempts == session
    assert "waiting for postgres" in caplog.text


# Daylight saving


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/St_Johns", "Australia/Lord_Howe"])
def test_deadlines_around_a_change_of_the_clocks_come_at_their_instant(
    engine: Engine, read: Read, redis_url: str, zone: str
) -> None:
    berlin = ZoneInfo("Europe/Berlin")
    before = datetime(2026, 10, 25, 2, 30, fold=0, tzinfo=berlin)
    after = datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=berlin)
    with engine.connect() as conn:
        conn.execute(text(f"set timezone = '{zone}'"))
        first, second = (vkjobs.enqueue(conn, "noop", run_at=moment) for moment in (before, after))
    shown = [datetime.fromisoformat(read(id).run_at) for id in (first, second)]
    assert shown == [datetime(2026, 10, 25, 0, 30, tzinfo=UTC), datetime(2026, 10, 25, 1, 30, tzinfo=UTC)]
    with engine.connect() as conn:
        conn.execute(text(f"set timezone = '{zone}'"))
        leases = ledger.lease(conn, kinds=[], listed=False, batch=5, window=5, lease=60, horizon=0)
        assert [lease.run_at for lease in leases] == shown
        for lease in leases:
            token = datetime.fromisoformat(ledger.token_text(lease.token))
            assert ledger.claim(conn, lease.id, token, lease=60, by="x") is not None
