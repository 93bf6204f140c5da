"""What the ledger's statements cost: the indexes that Postgres takes, the rows that it reads, how it commits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from original import execute
from places import ME, full
from rows import add_row
from sqlalchemy import Connection, Engine, event

from vkjobs import database, ledger, prepared
from vkjobs.ledger import Failure
from vkjobs.local import Postgres

KINDS, BATCH, WINDOW = 8, 100, 200
ELSEWHERE: dict[str, Any] = {"kinds": ["k1", "k2"], "listed": False}
AGAIN = Failure(final=False, delay=1, error="E: x")
THEN = datetime(2040, 1, 1, tzinfo=UTC)
RENEWALS = [(50_000 + n, THEN + timedelta(seconds=n), THEN - timedelta(seconds=n)) for n in range(51, 151)]
RELEASES = [(40_000 + n, THEN) for n in range(51, 151)]
JOB, TOKEN, _ = RENEWALS[0]
GIVEN = [(id, token) for id, token, _ in RENEWALS]
HISTORY = """
    insert into vk_jobs (kind, status, run_at, claimed_by, claimed_until)
    select 'k' || mod(n, 8), (array['done', 'failed', 'cancelled'])[1 + mod(n, 3)],
        now() - n * interval '1s', 'x', now()
    from generate_series(1, 20000) n"""
BACKLOG = """
    insert into vk_jobs (kind, run_at)
    select 'k' || mod(n, 8), now() + (n - 5000) * interval '1s' from generate_series(1, 10000) n"""
LEASED = """
    insert into vk_jobs (id, kind, run_at, lease_until)
    select 40000 + n, 'k' || mod(n, 8), now(),
        case when n > 50 then timestamptz '2040-01-01 00:00+00' else now() - n * interval '1s' end
    from generate_series(1, 150) n"""
RUNNING = """
    insert into vk_jobs (id, kind, run_at, status, lease_until, claimed_until, claimed_by)
    select 50000 + n, 'k' || mod(n, 8), now(), 'running', lease, lease - mod(n, 2) * interval '1s', 'x'
    from generate_series(1, 150) n,
        lateral (select case when n > 50 then timestamptz '2040-01-01 00:00+00' + n * interval '1s'
            else now() - n * interval '1s' end as lease) as given"""
FILLED = {
    "analyzed": (HISTORY, BACKLOG, LEASED, RUNNING, "analyze vk_jobs"),
    "never analyzed": (HISTORY, BACKLOG, LEASED, RUNNING),
    "analyzed when empty": ("analyze vk_jobs", HISTORY, BACKLOG, LEASED, RUNNING),
    "analyzed before the backlog": (HISTORY, "analyze vk_jobs", BACKLOG, LEASED, RUNNING),
}

Call = Callable[[Connection], object]


def lease(conn: Connection) -> object:
    return ledger.lease(conn, **ELSEWHERE, batch=BATCH, window=WINDOW, lease=60, horizon=2)


def lease_listed(conn: Connection) -> object:
    kinds = ["k0", "k3", "k4", "k5", "k6", "k7"]
    return ledger.lease(conn, kinds=kinds, listed=True, batch=BATCH, window=WINDOW, lease=60, horizon=2)


def ready(conn: Connection) -> object:
    return ledger.ready(conn, **ELSEWHERE, limit=20)


def lease_again(conn: Connection) -> object:
    return ledger.lease_again(conn, **ELSEWHERE, room=BATCH, lease=60, horizon=2)


FREE, LEASES, RUNS, KEY = "vk_jobs_free", "vk_jobs_leased", "vk_jobs_running", "vk_jobs_pkey"
CALLS: dict[str, tuple[Call, set[str], int]] = {
    # By name: the call, the indexes that it may use, and how many rows it may read.
    "lease": (lease, {FREE, LEASES, KEY}, KINDS * BATCH + KINDS + WINDOW + BATCH),
    "lease_listed": (lease_listed, {FREE, LEASES, KEY}, KINDS * BATCH + WINDOW + BATCH),
    "ready": (ready, {LEASES}, 150),
    "lease_again": (lease_again, {LEASES, KEY}, 150 + BATCH),
    "free_again": (lambda conn: ledger.free_again(conn, lease=60, horizon=2), {LEASES, KEY}, 2 * 150),
    "take_over": (lambda conn: ledger.take_over(conn, grace=0), {RUNS, KEY}, 2 * 150),
    "lost": (lambda conn: ledger.lost(conn, lease=0), {RUNS}, 150),
    "claim": (lambda conn: ledger.claim(conn, 40_100, THEN, lease=60, by="me"), {KEY}, 1),
    "early_by": (lambda conn: ledger.early_by(conn, 40_100, THEN), {KEY}, 1),
    "release": (lambda conn: ledger.release(conn, RELEASES), {KEY}, 2 * len(RELEASES)),
    "renew": (lambda conn: ledger.renew(conn, RENEWALS), {KEY, RUNS}, 150 + len(RENEWALS)),
    "still_held": (lambda conn: ledger.still_held(conn, RENEWALS), {KEY, RUNS}, 150),
    "claim_all": (lambda conn: ledger.claim_all(conn, RELEASES, lease=60, by="me"), {KEY}, 2 * len(RELEASES)),
    "claimed_all": (lambda conn: ledger.claimed_all(conn, GIVEN, by="x"), {KEY, RUNS}, 150),
    "settle_all_done": (lambda conn: ledger.settle_all_done(conn, RENEWALS), {KEY, RUNS}, 150 + len(RENEWALS)),
    "all_settled_done": (lambda conn: ledger.all_settled_done(conn, RENEWALS, by="x"), {KEY}, 2 * len(RENEWALS)),
    "settle_done": (lambda conn: ledger.settle_done(conn, JOB, TOKEN), {KEY, RUNS}, 1),
    "settled_done": (lambda conn: ledger.settled_done(conn, JOB, by="me"), {KEY}, 1),
    "settle_failed": (lambda conn: ledger.settle_failed(conn, JOB, TOKEN, AGAIN), {KEY, RUNS}, 1),
    "settle_dead_child": (lambda conn: ledger.settle_dead_child(conn, JOB, AGAIN, by="x"), {KEY, RUNS}, 150),
    "give_back": (lambda conn: ledger.give_back(conn, JOB, by="x"), {KEY, RUNS}, 150),
    "snooze": (lambda conn: ledger.snooze(conn, JOB, TOKEN, 5.0), {KEY, RUNS}, 1),
}


@pytest.fixture(scope="module", params=FILLED)
def engine(postgres: Postgres, request: pytest.FixtureRequest) -> Iterator[Engine]:
    url = postgres.create_database(f"cost_{uuid4().hex}", template="migrated")
    execute(url, "alter table vk_jobs set (autovacuum_enabled = off)", *FILLED[request.param])
    engine = database.engine(url, 2)
    yield engine
    engine.dispose()


class _Caught(Exception):
    """Stops a statement before it is executed."""


def statement_of(conn: Connection, call: Call) -> tuple[str, Any]:
    """Return the statement that ``call`` makes, without what is set before it, and its parameters."""
    caught: list[tuple[str, Any]] = []

    def catch(_conn: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        caught.append((statement.rpartition("; ")[2], parameters))
        raise _Caught

    event.listen(conn, "before_cursor_execute", catch)
    try:
        with suppress(_Caught):
            call(conn)
    finally:
        event.remove(conn, "before_cursor_execute", catch)
    return caught[0]


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for part in plan.get("Plans", []):
        yield from nodes(part)


def rows_read(node: dict[str, Any]) -> float:
    filtered = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
    return float((node["Actual Rows"] + filtered) * node["Actual Loops"])


@pytest.mark.parametrize("name", CALLS)
def test_a_statement_reads_its_own_index_and_no_more_rows_than_it_needs(engine: Engine, name: str) -> None:
    call, indexes, most = CALLS[name]
    with database.transaction(engine) as conn:
        statement, parameters = statement_of(conn, call)
        explained = conn.exec_driver_sql("explain (analyze, format json) " + statement, parameters).scalar_one()
        conn.rollback()
    plan = list(nodes(explained[0]["Plan"]))
    scans = [node for node in plan if node["Node Type"].endswith("Scan") and "Relation Name" in node]
    assert scans
    assert not [node["Node Type"] for node in scans if node["Node Type"] == "Seq Scan"]
    assert {node["Index Name"] for node in plan if "Index Name" in node} <= indexes
    assert 0 < sum(map(rows_read, scans)) <= most
    assert all(rows_read(node) <= most for node in plan if "Sort" in node["Node Type"])


@pytest.mark.parametrize("pages", [5, 40])
def test_a_prune_reads_its_stretch_of_the_table_and_no_more(
    engine: Engine, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "random", lambda: 0.5)  # the last stretch may be all but empty
    with database.transaction(engine) as conn:
        (all_rows, all_pages) = conn.exec_driver_sql(
            "select count(*), pg_relation_size('vk_jobs') / current_setting('block_size')::int from vk_jobs"
        ).one()
        statement, parameters = statement_of(conn, lambda conn: ledger.prune(conn, keep=0, pages=pages))
        explained = conn.exec_driver_sql("explain (analyze, format json) " + statement, parameters).scalar_one()
        conn.rollback()
    assert all_pages > 3 * pages
    scans = {node["Node Type"]: node for node in nodes(explained[0]["Plan"]) if "Relation Name" in node}
    assert set(scans) == {"Tid Range Scan", "Tid Scan", "ModifyTable"}
    assert "Sort" not in {node["Node Type"] for node in nodes(explained[0]["Plan"])}
    assert 0 < rows_read(scans["Tid Range Scan"]) <= 1.5 * pages * all_rows / all_pages
    assert rows_read(scans["Tid Scan"]) <= 1000


NOT_YET = """
    insert into vk_jobs (kind, run_at, status, lease_until, claimed_until)
    select 'k' || mod(n, 8), now() + n * interval '1 h', place.status, place.lease, place.lease
    from generate_series(1, 3000) n, lateral (values
        ('pending', null), ('pending', now() + interval '50 s'), ('running', now() + interval '50 s')
    ) place (status, lease)
    where n <= {} or status = 'running' or lease is null"""


@pytest.mark.parametrize("leased", [WINDOW // 2, 3000])
@pytest.mark.parametrize("name", ["lease", "lease_again", "free_again", "lost"])
def test_what_is_neither_due_nor_expired_is_not_read(postgres: Postgres, name: str, leased: int) -> None:
    url = postgres.create_database(f"cost_{uuid4().hex}", template="migrated")
    execute(url, NOT_YET.format(leased), "analyze vk_jobs")
    engine = database.engine(url, 1)
    with database.transaction(engine) as conn:
        statement, parameters = statement_of(conn, CALLS[name][0])
        explained = conn.exec_driver_sql("explain (analyze, format json) " + statement, parameters).scalar_one()
    engine.dispose()
    scans = [node for node in nodes(explained[0]["Plan"]) if "Relation Name" in node]
    # A lease counts its window.
    assert sum(map(rows_read, scans)) <= (2 * WINDOW if name == "lease" else 0)


KEPT = ("lease", "lease_listed", "lease_again", "ready", "claim", "claim_all", "settle_done", "settle_all_done")


@pytest.mark.parametrize("name", KEPT)
def test_a_plan_that_was_kept_when_the_table_was_empty_reads_no_more_when_it_is_full(
    postgres: Postgres, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres.create_database(f"cost_{uuid4().hex}", template="migrated")
    execute(url, "alter table vk_jobs set (autovacuum_enabled = off)", "analyze vk_jobs")
    engine = database.engine(url, 1)
    call, indexes, most = CALLS[name]
    plans: list[dict[str, Any]] = []

    def explain(_conn: Connection, cursor: Any, sql: str, values: dict[str, Any]) -> None:
        lead, _, statement = sql.rpartition("; ")
        assert statement.startswith("execute ")
        cursor.execute(f"{lead}; explain (analyze, format json) {statement}", values)
        plans.append(cursor.fetchone()[0][0]["Plan"])
        raise _Caught

    with engine.connect() as conn:
        for _ in range(10):  # Postgres keeps a plan from the sixth time on
            call(conn)
        execute(url, *FILLED["never analyzed"])
        monkeypatch.setattr(prepared, "_send", explain)
        with suppress(_Caught):
            call(conn)
    engine.dispose()
    scans = [node for node in nodes(plans[0]) if "Relation Name" in node and "Index Name" in node]
    assert {node["Index Name"] for node in scans} <= indexes
    assert sum(map(rows_read, scans)) <= most


# How they commit


@pytest.fixture(scope="module")
def watched(postgres: Postgres) -> Iterator[Engine]:
    """Engine of a database that takes down how each change of a row is committed."""
    url = postgres.create_database(f"cost_{uuid4().hex}", template="migrated")
    execute(
        url,
        "create table seen (durable text, isolation text)",
        """create function see() returns trigger language plpgsql as $$ begin
            insert into seen values (current_setting('synchronous_commit'), current_setting('transaction_isolation'));
            return coalesce(new, old);
        end $$""",
        "create trigger see before update or delete on vk_jobs for each row execute function see()",
    )
    engine = database.engine(url, 1)
    yield engine
    engine.dispose()


@pytest.mark.parametrize(
    ("call", "columns", "durable"),
    [
        (lease, {}, False),
        (lease_again, {"lease_until": -5}, False),
        (CALLS["free_again"][0], {"lease_until": -5, "run_at": 60}, False),
        (CALLS["take_over"][0], {"status": "running"}, False),
        (lambda conn: ledger.claim(conn, 1, THEN, lease=60, by=ME), {"lease_until": THEN}, False),
        (lambda conn: ledger.renew(conn, [(1, THEN, THEN)]), full("ours", lease_until=THEN), False),
        (lambda conn: ledger.release(conn, [(1, THEN)]), {"lease_until": THEN}, False),
        (lambda conn: ledger.settle_done(conn, 1, THEN), full("ours", lease_until=THEN), True),
        (lambda conn: ledger.settle_all_done(conn, [(1, THEN, THEN)]), full("ours", lease_until=THEN), True),
        (lambda conn: ledger.claim_all(conn, [(1, THEN)], lease=60, by=ME), {"lease_until": THEN}, False),
        (lambda conn: ledger.settle_failed(conn, 1, THEN, AGAIN), full("ours", lease_until=THEN), True),
        (lambda conn: ledger.settle_dead_child(conn, 1, AGAIN, by=ME), full("ours"), True),
        (lambda conn: ledger.give_back(conn, 1, by=ME), full("ours"), True),
        (lambda conn: ledger.snooze(conn, 1, THEN, 5.0), full("ours", lease_until=THEN), True),
        (lambda conn: ledger.cancel(conn, 1), {}, True),
        (lambda conn: ledger.reschedule(conn, 1, THEN), {}, True),
        (lambda conn: ledger.retry(conn, 1), {"status": "failed"}, True),
        (lambda conn: ledger.prune(conn, keep=0), {"status": "done"}, False),
    ],
)
def test_what_settles_is_durable_and_what_leases_need_not_be(
    watched: Engine, call: Call, columns: dict[str, Any], *, durable: bool
) -> None:
    with watched.connect() as conn:
        conn.exec_driver_sql("truncate vk_jobs, seen")
        add_row(conn, **{**columns, "id": 1})
        assert call(conn)
        seen = conn.exec_driver_sql("select * from seen").all()
        assert [tuple(row) for row in seen] == [("on" if durable else "off", "read committed")]
        assert conn.exec_driver_sql("show synchronous_commit").scalar_one() == "on"
