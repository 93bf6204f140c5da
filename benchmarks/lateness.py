"""How long after its time a job starts, on a quiet worker.

Each handler writes its start by the database's clock into the table ``starts``; ``due`` has the time that it was to
start at. One system after another, the same times for all.
"""

from __future__ import annotations

import time
from random import Random
from typing import Any

from benchmarks.figures import spread, table
from benchmarks.site import BenchmarkError, Place, Site
from benchmarks.systems import Scheduler, awa, marks, pgqueuer, procrastinate, vkjobs

_JOBS, _OVER_S = 2000, 60.0
_SHORT_JOBS, _SHORT_OVER_S = 200, 8.0
_WARM_UP = 20
_LEAD_S = 5.0  # enough to add them all
_PATIENCE_S = 30.0


def run(site: Site, *, short: bool) -> dict[str, Any]:
    """Return by system the spread of the lateness and how many jobs were early."""
    number, over = (_SHORT_JOBS, _SHORT_OVER_S) if short else (_JOBS, _OVER_S)
    schedulers: list[Scheduler] = [
        vkjobs.Scheduler(),
        procrastinate.Scheduler(),
        pgqueuer.Scheduler(),
        awa.Scheduler(),
    ]
    return {one.name: _figures(_lateness(site, one, number, over)) for one in schedulers}


def _figures(late_ms: list[float]) -> dict[str, Any]:
    return {**spread(late_ms), "early": sum(late < 0 for late in late_ms)}


def _lateness(site: Site, scheduler: Scheduler, number: int, over: float) -> list[float]:
    """Return the milliseconds by which each job started late."""
    random = Random(1)
    with site.place() as place:
        place.ask(marks.TABLES)
        scheduler.serve(place)
        _add(place, scheduler, range(_WARM_UP), [0.5] * _WARM_UP)
        _wait(place, _WARM_UP, _PATIENCE_S)
        place.ask("truncate due, starts")
        delays = [_LEAD_S + over * random.random() for _ in range(number)]
        _add(place, scheduler, range(_WARM_UP, _WARM_UP + number), delays)
        _wait(place, number, _LEAD_S + over + _PATIENCE_S)
        rows = place.ask("""
            select extract(epoch from min(started_at) - run_at) * 1000 from due join starts using (job)
            group by job, run_at""")
    return [float(late) for (late,) in rows]


def _add(place: Place, scheduler: Scheduler, jobs: range, delays: list[float]) -> None:
    sql = """
        insert into due select job, clock_timestamp() + make_interval(secs => delay)
        from unnest(%s::int[], %s::float[]) t (job, delay)"""
    place.ask(sql, list(jobs), delays)
    scheduler.schedule(place)


def _wait(place: Place, number: int, patience: float) -> None:
    deadline = time.monotonic() + patience
    while (found := place.ask("select count(distinct job) from starts")[0][0]) < number:
        place.check()
        if time.monotonic() > deadline:
            raise BenchmarkError(f"only {found} of {number} jobs started")
        time.sleep(0.5)


def tell(figures: dict[str, Any]) -> str:
    """Return the figures for people."""
    head = ("ms late", "p50", "p99", "max", "early")
    return table(head, [(name, *one.values()) for name, one in figures.items()])
