"""The audit on real Postgres: it records all that changes a row, accepts the ledger and refuses what it is not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import audit
import legal
import pytest
from audit import History, Rules
from legal import SECOND, Change, instant
from not_the_ledger import NOT_THE_LEDGER
from original_dispatcher import DONE, FAIL, TAKE
from places import ME, PLACES, full, moment
from rows import add_row, read_row
from sqlalchemy import Connection, Engine, text

from vkjobs import client, database, ledger
from vkjobs.ledger import Claim, Failure, Lease
from vkjobs.local import Postgres
from vkjobs.prepared import Prepared

RULES = Rules(max_attempts=3, lease=60, horizon=2, backoff=30)


@pytest.fixture(scope="module")
def database_url(postgres: Postgres) -> str:
    return postgres.create_database(f"audit_{uuid4().hex}", template="migrated")


@pytest.fixture(scope="module")
def engine(database_url: str) -> Iterator[Engine]:
    """Engine of a database whose vk_jobs is audited."""
    engine = database.engine(database_url, 2)
    with engine.connect() as conn:
        audit.install(conn)
    yield engine
    engine.dispose()


@pytest.fixture
def conn(engine: Engine) -> Iterator[Connection]:
    """A new session, nothing recorded."""
    with engine.connect() as conn:
        conn.exec_driver_sql("discard all")
        conn.exec_driver_sql("truncate vk_jobs restart identity")
        conn.exec_driver_sql("truncate vk_jobs_audit restart identity")
        yield conn


@pytest.fixture
def unaudited(postgres: Postgres) -> Iterator[Connection]:
    """A connection to a database of its own, in which nothing is recorded yet."""
    engine = database.engine(postgres.create_database(f"audit_{uuid4().hex}", template="migrated"), 1)
    with engine.connect() as conn:
        yield conn
    engine.dispose()


def put(conn: Connection, place: str, **columns: Any) -> Any:
    """Add a row as the host; return its id."""
    with audit.acting(conn, "host"):
        return add_row(conn, **full(place, **{"unique_key": None, **columns})).id


def let_pass(conn: Connection, seconds: float) -> None:
    """Let the table's time pass."""
    past = timedelta(seconds=seconds)
    columns = ("run_at", "lease_until", "claimed_until", "started_at")
    moved = ", ".join(f"{name} = {name} - :past" for name in columns)
    with audit.acting(conn, "host"):
        conn.execute(text(f"update vk_jobs set {moved}"), {"past": past})


def lease(conn: Connection) -> Lease:
    [leased] = ledger.lease(conn, kinds=[], listed=False, batch=1, window=9, lease=62, horizon=2)
    return leased


def claim(conn: Connection) -> Claim:
    leased = lease(conn)
    claimed = ledger.claim(conn, leased.id, leased.token, lease=60, by=ME)
    assert claimed is not None
    return claimed


def failure(attempts: int, error: str = "E: x") -> Failure:
    final = attempts == 2 or error.startswith("GiveUp")
    return Failure(final=final, delay=30.0 * 2**attempts, error=error)


def last_change(conn: Connection) -> Change:
    return audit.history(conn).changes[-1]


def go_through_waiting(conn: Connection, id: Any) -> None:
    """Enqueued, then all that can happen to a pending job, and back; it is free again."""
    leased = lease(conn)
    assert ledger.release(conn, [(id, leased.token)])
    lease(conn)
    let_pass(conn, 100)
    assert ledger.lease_again(conn, kinds=[], listed=False, room=1, lease=62, horizon=2)
    with audit.acting(conn, "host"):
        conn.exec_driver_sql("update vk_jobs set run_at = 'infinity'")
    let_pass(conn, 100)
    assert ledger.free_again(conn, lease=62, horizon=2) == 1
    with audit.acting(conn, "host"):
        conn.exec_driver_sql("update vk_jobs set run_at = '0004-01-01 BC'")
    held = claim(conn)
    proposed = held.token + timedelta(microseconds=1)
    for _ in range(2):  # the first answer was lost
        assert ledger.renew(conn, [(id, held.token, proposed)]) == {id}
    assert ledger.snooze(conn, id, held.token, 1.5, proposed)
    lease(conn)
    assert ledger.reschedule(conn, id, moment("2040-01-02T03:04:05.678901+00:00"))
    assert ledger.reschedule(conn, id, moment("2030-01-02T03:04:05+01:00"))
    assert ledger.cancel(conn, id)
    assert ledger.retry(conn, id)


def go_through_bulk(conn: Connection, id: Any) -> None:
    """Claimed with others, put back as its worker died, and as the lease of another was lost; it is free in the end."""
    leased = lease(conn)
    [held] = ledger.claim_all(conn, [(id, leased.token)], lease=60, by=ME)
    assert ledger.claimed_all(conn, [(id, leased.token)], by=ME)
    assert ledger.give_back(conn, id, by=ME)
    held = claim(conn)
    let_pass(conn, 70)
    [dead] = ledger.lost(conn, lease=-1)
    assert not ledger.give_back(conn, id, by=ME, token=held.token, error="WorkerLost: its lease expired; …")
    assert ledger.give_back(conn, id, by=dead.claimed_by, token=dead.token, error="WorkerLost: its lease expired; …")
    claim(conn)
    assert ledger.give_back(conn, id, by=ME)


def go_through_failures(conn: Connection, id: Any) -> None:
    """Fail in each way, and be tried again; it is free in the end."""
    held = claim(conn)
    assert ledger.settle_failed(conn, id, held.token, failure(0))
    let_pass(conn, 40)
    claim(conn)
    assert ledger.settle_dead_child(conn, id, failure(1, "WorkerLost: its process died"), by=ME)
    let_pass(conn, 70)
    claim(conn)
    let_pass(conn, 70)
    [dead] = ledger.lost(conn, lease=-1)
    assert ledger.settle_failed(conn, id, dead.token, failure(2, "WorkerLost: its lease expired; …"))
    assert ledger.retry(conn, id)


def test_the_ledgers_own_changes_are_accepted_whatever_way_a_job_goes(engine: Engine, conn: Connection) -> None:
    id = client.enqueue(conn, "noop", "r")
    go_through_waiting(conn, id)
    go_through_bulk(conn, id)
    go_through_failures(conn, id)
    held = claim(conn)
    with database.transaction(engine) as own:
        assert ledger.settle_failed(own, id, held.token, failure(0))
        own.rollback()
        assert ledger.settle_all_done(own, [(id, held.token, held.token)]) == {id}
        own.rollback()
        assert ledger.settle_done(own, id, held.token)
        own.commit()

    put(conn, "running without lease", attempts=0)
    assert ledger.take_over(conn, grace=0) == 1
    held = claim(conn)
    assert ledger.settle_failed(conn, held.id, held.token, failure(0, "GiveUp: x"))

    history = audit.history(conn)
    assert audit.check(history, RULES) == []
    told = audit.summary(history)
    assert told.verbs["give back"] == 3
    assert told.verbs.keys() == legal.VERBS.keys() - {"take by the original", "settle by the original"}
    assert told.attempts == {"raised": 1, "child died": 1, "reaped": 1, "gave up": 1}
    assert told.places == {"done": 1, "failed": 1}
    assert told.claims == told.settled
    assert told.doubled == told.lost == told.unfinished == []


def test_the_originals_changes_are_accepted_if_they_are_marked(conn: Connection) -> None:
    put(conn, "free", run_at=-30)
    put(conn, "leased", run_at=-20)
    put(conn, "ours, expired", run_at=-10)
    at = conn.execute(text("select clock_timestamp() as now, clock_timestamp() + interval '60 s' as lease_until")).one()
    with audit.acting(conn, "original"):
        jobs = conn.execute(text(TAKE), {**at._mapping, "batch": 20}).all()
        assert len(jobs) == 3
        for job in jobs[:2]:
            conn.execute(text(DONE), {"id": job.id})
        failed = {"status": "pending", "attempts": 3, "run_at": at.now, "error": "E: x"}
        conn.execute(text(FAIL), {"id": jobs[2].id, **failed})
    history = audit.history(conn)
    assert audit.check(history, RULES) == []
    unmarked = [change._replace(actor=None) if change.actor == "original" else change for change in history.changes]
    assert audit.check(history._replace(changes=unmarked), RULES)


@pytest.mark.parametrize("case", NOT_THE_LEDGER.values(), ids=NOT_THE_LEDGER)
def test_a_statement_that_is_not_the_ledgers_is_refused(conn: Connection, case: tuple[str, str, str]) -> None:
    place, sql, complaint = case
    id = put(conn, place, **({"run_at": 60} if "run_at" in complaint else {}))
    token = read_row(conn, id).lease_until
    assert audit.check(audit.history(conn), RULES) == []
    conn.execute(text(sql), {"id": id, "token": token})
    found = audit.check(audit.history(conn), RULES)
    assert [line for line in found if line.endswith(complaint)], found


def test_a_ledger_without_a_guard_is_refused(conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    id = put(conn, "free")
    stale = claim(conn)
    let_pass(conn, 100)
    assert ledger.settle_failed(conn, id, stale.token - timedelta(seconds=100), failure(0)._replace(delay=0))
    claim(conn)
    unfenced = ledger._SETTLE_DONE.sql.replace(ledger._HELD, "id = :id and status = 'running'")
    monkeypatch.setattr(ledger, "_SETTLE_DONE", Prepared("settle_done", unfenced))
    assert ledger.settle_done(conn, id, stale.token)
    found = audit.check(audit.history(conn), Rules(max_attempts=5, lease=60, horizon=2, backoff=0))
    assert len(found) == 1
    assert found[0].endswith("settle done: it does not name the token that it found")


@pytest.mark.parametrize("place", PLACES)
def test_the_audit_sees_a_row_as_it_was_and_as_it_is_to_the_microsecond(conn: Connection, place: str) -> None:
    id = put(conn, place)
    before = read_row(conn, id)
    conn.exec_driver_sql("set timezone = 'America/St_Johns'")
    conn.exec_driver_sql("update vk_jobs set run_at = '2040-01-02 03:04:05.678901+00', payload = '[1, null]'")
    change = last_change(conn)
    assert change.op == "update"
    assert change.old is not None
    assert change.new is not None
    for name, value in before._asdict().items():
        assert change.old[name] == (instant(value) if name.endswith(("_at", "_until")) and value else value)
    later = moment("2040-01-02T03:04:05.678901+00:00") - moment("1970-01-01T00:00:00+00:00")
    assert change.new == change.old | {"run_at": later // timedelta(microseconds=1), "payload": [1, None]}


# Of far times, the epoch has no microseconds.
EPOCH = """
    select extract(epoch from date_trunc('second', run_at)) * 1000000 + mod(extract(microseconds from run_at), 1000000)
    from vk_jobs"""


@pytest.mark.parametrize(
    "time",
    ["4713-01-01 00:00:00.000001+00 BC", "0001-02-28 23:59:59.999999+00 BC", "0004-03-01 00:00:00+00 BC", "0001-01-01",
     "0400-02-29 12:00+03", "1582-10-15 06:00:00.5-07", "1850-06-01 00:00:00+00:53:28", "1969-12-31 23:59:59.999999+00",
     "1970-01-01+00", "2000-02-29 00:00:00.1+00", "2026-03-29 02:30+02", "9999-12-31 23:59:59.999999+00",
     "294276-12-31 23:59:59.999999+00"],
)  # fmt: skip
@pytest.mark.parametrize("zone", ["UTC", "Europe/Amsterdam", "Asia/Kathmandu"])
def test_a_time_of_any_age_is_read_exactly(conn: Connection, time: str, zone: str) -> None:
    conn.exec_driver_sql(f"set timezone = '{zone}'")
    put(conn, "free", run_at=time)
    found = last_change(conn).new
    assert found is not None
    assert found["run_at"] == conn.exec_driver_sql(EPOCH).scalar()


@pytest.mark.parametrize(("time", "seen"), [("infinity", math.inf), ("-infinity", -math.inf)])
def test_an_endless_time_is_read_as_such(conn: Connection, time: str, seen: float) -> None:
    put(conn, "free", run_at=time)
    found = last_change(conn).new
    assert found is not None
    assert found["run_at"] == seen


def test_the_audit_notes_when_where_and_by_whom(engine: Engine, conn: Connection) -> None:
    began = datetime.now().astimezone()
    with database.transaction(engine) as own, audit.acting(own, "host"):
        id = client.enqueue(own, "noop")
        own.exec_driver_sql("delete from vk_jobs")
        pid = own.exec_driver_sql("select pg_backend_pid()").scalar()
        txid = own.exec_driver_sql("select txid_current()").scalar()
        own.commit()
    inserted, deleted = audit.history(conn).changes
    assert (inserted.op, deleted.op) == ("insert", "delete")
    assert inserted.id == deleted.id == id
    for change in (inserted, deleted):
        assert (change.actor, change.pid, change.txid) == ("host", pid, txid)
    assert began.timestamp() * SECOND <= inserted.at < deleted.at <= datetime.now().astimezone().timestamp() * SECOND


def test_what_was_rolled_back_did_not_happen(engine: Engine, conn: Connection) -> None:
    with database.transaction(engine) as own:
        client.enqueue(own, "noop")
        own.rollback()
    assert audit.history(conn) == History([], [])


def test_no_session_escapes_the_audit(conn: Connection) -> None:
    conn.exec_driver_sql("set session_replication_role = 'replica'")
    client.enqueue(conn, "noop")
    conn.exec_driver_sql("truncate vk_jobs")
    assert [change.op for change in audit.history(conn).changes] == ["insert", "truncate"]
    assert audit.check(audit.history(conn), RULES) == ["change 2: vkjobs truncates the table"]


def test_a_change_behind_the_audits_back_is_noticed(unaudited: Connection) -> None:
    conn = unaudited
    audit.install(conn)
    client.enqueue(conn, "noop")
    conn.exec_driver_sql("alter table vk_jobs disable trigger all")
    conn.exec_driver_sql("update vk_jobs set attempts = 1")
    assert len(audit.check(audit.history(conn), RULES)) == 1
    conn.exec_driver_sql("alter table vk_jobs enable always trigger vk_jobs_audit")
    lease(conn)
    assert len(audit.check(audit.history(conn), RULES)) == 1


def test_a_url_can_mark_its_sessions(database_url: str, conn: Connection) -> None:
    engine = database.engine(f"{database_url}&options=-c%20vkjobs.actor%3Dhost", 1)
    with engine.connect() as own:
        add_row(own, status="running")
    engine.dispose()
    assert last_change(conn).actor == "host"


def test_rows_that_were_there_before_are_taken_down_as_found(unaudited: Connection) -> None:
    row = add_row(unaudited, **full("ours"))
    audit.install(unaudited)
    assert ledger.settle_done(unaudited, row.id, moment(row.lease_until or ""))
    history = audit.history(unaudited)
    assert [change.op for change in history.changes] == ["found", "update"]
    assert audit.check(history, RULES) == []


def test_a_row_from_before_the_migration_is_the_same_after_it(unaudited: Connection) -> None:
    added = {
        "started_at": "timestamptz",
        "claimed_by": "text",
        "claimed_until": "timestamptz",
        "payload": "jsonb",
        "unique_key": "text",
    }
    for name in added:
        unaudited.exec_driver_sql(f"alter table vk_jobs drop column {name} cascade")
    audit.install(unaudited)
    unaudited.exec_driver_sql("insert into vk_jobs (kind) values ('noop')")
    for name, type_ in added.items():
        unaudited.exec_driver_sql(f"alter table vk_jobs add column {name} {type_}")
    claim(unaudited)
    history = audit.history(unaudited)
    assert [change.op for change in history.changes] == ["insert", "update", "update"]
    assert audit.check(history, RULES) == []
