"""PgQueuer, with its fast driver. Run as a module, it is a worker."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import asyncpg
import pgqueuer
from pgqueuer.adapters.drivers.asyncpg import AsyncpgDriver
from pgqueuer.adapters.persistence.queries import Queries

from benchmarks.adapter.reports import report, waited_s, work_s
from benchmarks.site import Place
from benchmarks.systems.marks import mark
from benchmarks.systems.waiting import wait_to_begin
from benchmarks.tally import hit

# Of 10, its default, 100, 500, 1000 and 2000 for each of two processes, the fastest with jobs that do nothing.
_BATCH = 1000
_DEFAULT_BATCH = 10


async def _install(place: Place) -> None:
    connection = await asyncpg.connect(place.dsn)
    await Queries(AsyncpgDriver(connection)).install()
    await connection.close()


async def _add(place: Place, entrypoint: str, payloads: list[bytes], delays: list[timedelta] | None = None) -> None:
    connection = await asyncpg.connect(place.dsn)
    many = len(payloads)
    await Queries(AsyncpgDriver(connection)).enqueue([entrypoint] * many, payloads, [0] * many, delays)
    await connection.close()


def serve(place: Place) -> None:
    """Install, and start a worker with the batch that it has by default."""
    asyncio.run(_install(place))
    worker = place.start(__name__, str(_DEFAULT_BATCH))
    worker.ready()
    worker.go()


def connect(dsn: str) -> Callable[[list[dict[str, Any]]], Awaitable[object]]:
    """Return what adds the adapter's jobs."""
    queries: list[Any] = []

    async def insert(payloads: list[dict[str, Any]]) -> None:
        if not queries:
            queries.append(Queries(AsyncpgDriver(await asyncpg.connect(dsn))))
        encoded = [json.dumps(payload).encode() for payload in payloads]
        await queries[0].enqueue(["work"] * len(encoded), encoded, [0] * len(encoded))

    return insert


class System:
    """See `systems.System`."""

    name = "pgqueuer"
    first_guess = 3000

    def begin(self, place: Place, number: int) -> None:
        """Add the jobs, then let two workers begin."""
        asyncio.run(_install(place))
        asyncio.run(_add(place, "noop", [b""] * number))
        workers = [place.start(__name__, str(_BATCH)) for _ in range(2)]
        for worker in workers:
            worker.ready()
        for worker in workers:
            worker.go()

    def settled(self, place: Place) -> tuple[int, float]:
        """Read its log."""
        sql = """
            select count(*), coalesce(extract(epoch from max(created)), 0) from pgqueuer_log
            where status = 'successful'"""
        ((count, last),) = place.ask(sql)
        return count, float(last)


class Scheduler:
    """See `systems.Scheduler`."""

    name = "pgqueuer"

    def serve(self, place: Place) -> None:
        """Start a worker; it has no limit for the jobs that it runs at once."""
        serve(place)

    def schedule(self, place: Place) -> None:
        """Add jobs with their delays, and take down the times that it makes of them."""
        rows = place.ask("select job, run_at - clock_timestamp() from due")
        asyncio.run(_add(place, "mark", [b"%d" % job for job, _ in rows], [delay for _, delay in rows]))
        place.ask("""
            update due set run_at = execute_after from pgqueuer
            where entrypoint = 'mark' and convert_from(payload, 'utf8')::int = job""")


async def _work(batch: int) -> None:
    app = pgqueuer.PgQueuer(AsyncpgDriver(await asyncpg.connect(os.environ["BENCH_DSN"])))

    @app.entrypoint("noop")
    async def noop(job: Any) -> None:
        hit()

    @app.entrypoint("mark")
    async def mark_start(job: Any) -> None:
        mark(int(job.payload))

    @app.entrypoint("work")
    async def work(job: Any) -> None:
        waited = waited_s(json.loads(job.payload)["at"])
        await asyncio.sleep(work_s())
        report(waited)

    wait_to_begin()
    await app.run(batch_size=batch)


if __name__ == "__main__":
    asyncio.run(_work(int(sys.argv[1])))
