"""Procrastinate. Run as a module, it is a worker."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import procrastinate
from procrastinate.jobs import Job

from benchmarks.adapter.reports import report, waited_s, work_s
from benchmarks.site import Place
from benchmarks.systems.marks import mark
from benchmarks.systems.waiting import wait_to_begin
from benchmarks.tally import hit

# Of 1, 4, 10 and 30 for each of two processes, this was the fastest with jobs that do nothing.
_CONCURRENCY = 10


def _app(dsn: str) -> Any:
    return procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn))


async def _install(place: Place) -> None:
    async with _app(place.dsn).open_async() as app:
        await app.schema_manager.apply_schema_async()


async def _add(place: Place, jobs: list[Any]) -> None:
    async with _app(place.dsn).open_async() as app:
        await app.job_manager.batch_defer_jobs_async(jobs)


def _job(task: str, **more: Any) -> Any:
    return Job(id=None, queue="default", lock=None, queueing_lock=None, task_name=task, **more)


def serve(place: Place, concurrency: int) -> None:
    """Install, and start a worker that polls as often as it does by default."""
    asyncio.run(_install(place))
    worker = place.start(__name__, str(concurrency))
    worker.ready()
    worker.go()


def connect(dsn: str) -> Callable[[list[dict[str, Any]]], Awaitable[object]]:
    """Return what adds the adapter's jobs."""
    app = _app(dsn)

    async def insert(payloads: list[dict[str, Any]]) -> None:
        if not opened:
            opened.append(await app.open_async())
        await app.job_manager.batch_defer_jobs_async([_job("work", task_kwargs=payload) for payload in payloads])

    opened: list[Any] = []
    return insert


class System:
    """See `systems.System`."""

    name = "procrastinate"
    first_guess = 400

    def begin(self, place: Place, number: int) -> None:
        """Add the jobs, then let two workers begin."""
        asyncio.run(_install(place))
        asyncio.run(_add(place, [_job("noop") for _ in range(number)]))
        workers = [place.start(__name__, str(_CONCURRENCY)) for _ in range(2)]
        for worker in workers:
            worker.ready()
        for worker in workers:
            worker.go()

    def settled(self, place: Place) -> tuple[int, float]:
        """Read its events."""
        sql = """
            select count(*), coalesce(extract(epoch from max(at)), 0) from procrastinate_events
            where type = 'succeeded'"""
        ((count, last),) = place.ask(sql)
        return count, float(last)


class Scheduler:
    """See `systems.Scheduler`."""

    name = "procrastinate"

    def serve(self, place: Place) -> None:
        """Start a worker for two jobs at once."""
        serve(place, 2)

    def schedule(self, place: Place) -> None:
        """Add jobs with their times."""
        rows = place.ask("select job, run_at from due")
        asyncio.run(_add(place, [_job("mark", task_kwargs={"job": job}, scheduled_at=at) for job, at in rows]))


async def _work(concurrency: int) -> None:
    app = _app(os.environ["BENCH_DSN"])

    @app.task(name="noop")
    async def noop() -> None:
        hit()

    @app.task(name="mark")
    async def mark_start(job: int) -> None:
        mark(job)

    @app.task(name="work")
    async def work(at: float, fill: str) -> None:
        waited = waited_s(at)
        await asyncio.sleep(work_s())
        report(waited)

    async with app.open_async():
        wait_to_begin()
        await app.run_worker_async(concurrency=concurrency)


if __name__ == "__main__":
    asyncio.run(_work(int(sys.argv[1])))
