"""What a lease, a claim and a settle cost in a small and in a huge table, and under somebody's open transaction.

Costs are those of the ledger's statements, one after another on one connection: a lease of 100 jobs, then a claim and
a settle of each, then as many new jobs that are due. The tables take turns, so that noise hits all alike. With the open
transaction, which keeps vacuum from removing what was dead after it began, whole workers run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any, TypeVar

from sqlalchemy import Connection

from benchmarks.figures import table
from benchmarks.site import Place, Site
from benchmarks.systems import vkjobs
from benchmarks.throughput import finish
from vkjobs import database, ledger
from vkjobs.migrations import migrate

_ROWS = (10_000, 1_000_000, 10_000_000)
_BACKLOGS = (10, 10_000, 1_000_000)
_TURNS = 60
_SHORT_ROWS = (1000, 5000, 20_000)
_SHORT_BACKLOGS = (10, 1000)
_SHORT_TURNS = 5
_NAMES = ("10k", "1m", "10m")

_BATCH = 100
_VERBS = ("lease", "claim", "settle")
_KINDS = 5

# By kind: jobs, and pairs of rounds with and without the open transaction.
_LONG_TRANSACTION = {vkjobs.NOOP: (200_000, 1), vkjobs.BULK: (200_000, 3)}
_SHORT_LONG_TRANSACTION = {vkjobs.NOOP: (1000, 1), vkjobs.BULK: (5000, 1)}

T = TypeVar("T")
Costs = dict[str, list[float]]


def run(site: Site, *, short: bool) -> dict[str, Any]:
    """Return the costs, by number of rows and backlog, in ms, and how much the greatest is above the smallest."""
    costs = _costs(site, *((_SHORT_ROWS, _SHORT_BACKLOGS, _SHORT_TURNS) if short else (_ROWS, _BACKLOGS, _TURNS)))
    smallest, *_, largest = _NAMES
    figures: dict[str, Any] = {
        f"{verb}_ratio_{largest}_to_{smallest}": max(
            round(at[largest][verb] / at[smallest][verb], 2) for at in costs.values()
        )
        for verb in _VERBS
    }
    for kind, (number, pairs) in (_SHORT_LONG_TRANSACTION if short else _LONG_TRANSACTION).items():
        name = "long_transaction_drop" + ("_bulk" if kind == vkjobs.BULK else "")
        figures[name] = _drop(site, kind, number, pairs)
    return {**figures, "rows": dict(zip(_NAMES, _SHORT_ROWS if short else _ROWS, strict=True)), "costs_ms": costs}


def _costs(
    site: Site, sizes: tuple[int, ...], backlogs: tuple[int, ...], turns: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Return by backlog, by name of the size and by verb the median cost in milliseconds."""
    with ExitStack() as stack:
        connections = {}
        for name, rows in zip(_NAMES, sizes, strict=True):
            place = stack.enter_context(site.place())
            _fill(place, rows)
            engine = database.engine(place.url, 1)
            stack.callback(engine.dispose)
            connections[name] = stack.enter_context(engine.connect())
        found = {}
        for backlog in backlogs:
            costs: dict[str, Costs] = {name: {verb: [] for verb in _VERBS} for name in connections}
            for conn in connections.values():
                _grow_backlog(conn, backlog)
            for turn in range(turns + 2):
                for name, conn in connections.items():
                    samples = _turn(conn)
                    if turn > 1:  # the first ones fill caches
                        for verb in _VERBS:
                            costs[name][verb] += samples[verb]
            found[str(backlog)] = {
                name: {verb: round(median(samples), 3) for verb, samples in one.items()} for name, one in costs.items()
            }
            print(f"backlog {backlog}: {found[str(backlog)]}", file=sys.stderr)
    return found


def _fill(place: Place, rows: int) -> None:
    """Make a table of done jobs; the indexes come after the rows."""
    migrate(place.url)
    indexes = place.ask(
        "select indexname, indexdef from pg_indexes where tablename = 'vk_jobs' and indexname !~ 'pkey'"
    )
    with place.connection() as connection, connection.cursor() as cursor:
        cursor.execute("set synchronous_commit = off")
        for name, _ in indexes:
            cursor.execute(f"drop index {name}")
        cursor.execute("alter table vk_jobs drop constraint vk_jobs_pkey")
        cursor.execute(
            """
            insert into vk_jobs (kind, ref_id, status, run_at, updated_at, started_at, claimed_until, claimed_by)
            select 'k' || mod(n, %s), 'task-' || n, 'done', at, at, at, at + interval '1 minute',
                md5(n::text) || ' celery@worker-1 ' || 1000 + mod(n, 8)
            from generate_series(1, %s) n, lateral (select now() - (%s - n) * interval '1 second' as at) as times""",
            (_KINDS, rows, rows),
        )
        cursor.execute("alter table vk_jobs add primary key (id)")
        for _, definition in indexes:
            cursor.execute(definition)
        cursor.execute("vacuum (freeze, analyze) vk_jobs")
        _fill_gaps(cursor)
        cursor.execute("vacuum (freeze, analyze) vk_jobs")
        cursor.execute("checkpoint")


def _fill_gaps(cursor: Any) -> None:
    """Fill the gap that is left at the end of each page: a backlog would be scattered over all of them.

    Jobs that have gone through a table leave none, only pages that are empty or nearly so.
    """

    def pages() -> int:
        cursor.execute("select pg_relation_size('vk_jobs') / current_setting('block_size')::int")
        return int(cursor.fetchone()[0])

    before = pages()
    while pages() == before:
        cursor.execute(
            """
            insert into vk_jobs (kind, ref_id, status)
            select 'k' || mod(n, %s), 'task-' || n, 'done' from generate_series(1, %s) n""",
            (_KINDS, before // 10 + 10),
        )


def _grow_backlog(conn: Connection, number: int) -> None:
    there = conn.exec_driver_sql("select count(*) from vk_jobs where status = 'pending'").scalar_one()
    _add(conn, number - there)
    conn.exec_driver_sql("analyze vk_jobs")


def _add(conn: Connection, number: int) -> None:
    conn.exec_driver_sql(
        """
        insert into vk_jobs (kind, ref_id, run_at) select 'k' || mod(n, %s), 'task-' || n, clock_timestamp()
        from generate_series(1, %s) n""",
        (_KINDS, number),
    )


def _turn(conn: Connection) -> Costs:
    """Lease, claim and settle as many jobs as there are, 100 at most; return what each statement cost."""
    costs: Costs = {verb: [] for verb in _VERBS}

    def timed(verb: str, call: Callable[[], T]) -> T:
        began = time.perf_counter()
        result = call()
        costs[verb].append((time.perf_counter() - began) * 1000)
        return result

    leases = timed(
        "lease",
        partial(ledger.lease, conn, kinds=[], listed=False, batch=_BATCH, window=2 * _BATCH, lease=60, horizon=0),
    )
    for lease in leases:
        claim = timed("claim", partial(ledger.claim, conn, lease.id, lease.token, lease=60, by="benchmark"))
        assert claim is not None
        assert timed("settle", partial(ledger.settle_done, conn, claim.id, claim.token))
    _add(conn, len(leases))
    return costs


def _drop(site: Site, kind: str, number: int, pairs: int) -> float:
    """Return by which part throughput is lower while a transaction is open."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    for pair in range(pairs):
        for held in (False, True) if pair % 2 == 0 else (True, False):
            with site.place() as place:
                vkjobs.serve(place)
                with _transaction(place) if held else nullcontext():
                    vkjobs.add(place, kind, number)
                    rates[held].append(finish(place, vkjobs.System(kind=kind), number))
            print(f"{kind}, transaction {held}: {rates[held][-1]:,.0f} jobs/s", file=sys.stderr)
    return round(1 - median(rates[True]) / median(rates[False]), 3)


@contextmanager
def _transaction(place: Place) -> Iterator[None]:
    with place.connection() as connection, connection.cursor() as cursor:
        cursor.execute("begin isolation level repeatable read")
        cursor.execute("select count(*) from vk_jobs")
        yield


def tell(figures: dict[str, Any]) -> str:
    """Return the figures for people."""
    rows = [
        (f"{verb}, {int(backlog):,} due", *(at[name][verb] for name in _NAMES))
        for backlog, at in figures["costs_ms"].items()
        for verb in _VERBS
    ]
    costs = table(("ms", *(f"{rows:,} rows" for rows in figures["rows"].values())), rows)
    others = [(name, value) for name, value in figures.items() if isinstance(value, float)]
    return f"{costs}\n\n{table(('', ''), others)}"
