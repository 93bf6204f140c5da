"""awa, whose core is in Rust. Run as a module, it is a worker."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from typing import Any

import awa

from benchmarks.site import Place
from benchmarks.systems.marks import mark
from benchmarks.systems.waiting import wait_to_begin
from benchmarks.tally import hit

_QUEUE = "bench"
# Of 2, 50, 256, 1000 and 3000 for each of two processes, this was the fastest with jobs that do nothing.
_WORKERS = 1000


@dataclass
class Noop:
    """Arguments of a job that does nothing."""

    number: int


@dataclass
class Mark:
    """Arguments of a job that writes down its start."""

    job: int


def _client(dsn: str) -> Any:
    return awa.AsyncClient(dsn.replace("@/", "@localhost/"))  # it insists on a host, though the URL names a socket


async def _install(place: Place) -> None:
    client = _client(place.dsn)
    await client.migrate()
    await client.install_queue_storage()
    await client.close()


async def _add(place: Place, number: int) -> None:
    client = _client(place.dsn)
    await client.enqueue_many_copy([Noop(i) for i in range(number)], queue=_QUEUE)
    await client.close()


async def _schedule(place: Place, rows: list[tuple[int, Any]]) -> None:
    client = _client(place.dsn)
    for job, run_at in rows:
        await client.insert(Mark(job), queue=_QUEUE, run_at=run_at)
    await client.close()


class System:
    """See `systems.System`."""

    name = "awa"
    first_guess = 3000

    def begin(self, place: Place, number: int) -> None:
        """Add the jobs, then let two workers begin."""
        asyncio.run(_install(place))
        asyncio.run(_add(place, number))
        workers = [place.start(__name__, str(_WORKERS)) for _ in range(2)]
        for worker in workers:
            worker.ready()
        for worker in workers:
            worker.go()

    def settled(self, place: Place) -> tuple[int, float]:
        """Read where it writes down what is completed, and the count of what it has removed from there since.

        Its view of all jobs takes minutes. The last call of a handler stands in for what is removed.
        """
        sql = """
            select coalesce(sum(completed_count), 0)
                    + (select coalesce(sum(pruned_completed_count), 0) from awa.queue_terminal_rollups),
                extract(epoch from max(finalized_at))
            from awa.receipt_completion_batches"""
        ((count, last),) = place.ask(sql)
        return int(count), max(float(last or 0), place.total().last)


class Scheduler:
    """See `systems.Scheduler`."""

    name = "awa"

    def serve(self, place: Place) -> None:
        """Start a worker that polls as often as it does by default."""
        asyncio.run(_install(place))
        worker = place.start(__name__, "2")
        worker.ready()
        worker.go()

    def schedule(self, place: Place) -> None:
        """Add jobs with their times."""
        asyncio.run(_schedule(place, [(job, run_at) for job, run_at in place.ask("select job, run_at from due")]))


async def _work(workers: int) -> None:
    client = _client(os.environ["BENCH_DSN"])

    @client.task(Noop, queue=_QUEUE)
    async def noop(job: Any) -> None:
        hit()

    @client.task(Mark, queue=_QUEUE)
    async def mark_start(job: Any) -> None:
        mark(job.args.job)

    wait_to_begin()
    await client.start([(_QUEUE, workers)])
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_work(int(sys.argv[1])))
