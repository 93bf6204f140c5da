"""How many jobs that wait 5 ms run a second on 1, 2, 4 and 8 workers of one process each."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.figures import table
from benchmarks.site import Site
from benchmarks.systems import vkjobs
from benchmarks.throughput import finish

_WORKERS = (1, 2, 4, 8)
_JOBS, _SHORT_JOBS = 1500, 150  # of each worker


def run(site: Site, *, short: bool) -> dict[str, Any]:
    """Return by number of workers the jobs a second, and how much more they are than one worker's."""
    rates = {str(number): _rate(site, number, number * (_SHORT_JOBS if short else _JOBS)) for number in _WORKERS}
    return {
        "rates": {number: round(rate, 1) for number, rate in rates.items()},
        "speedup": {number: round(rate / rates["1"], 2) for number, rate in rates.items()},
    }


def _rate(site: Site, workers: int, number: int) -> float:
    with site.place() as place:
        vkjobs.serve(place, concurrency=1)
        for other in range(1, workers):
            vkjobs.work(place, concurrency=1, name=f"w{other}")
        vkjobs.add(place, vkjobs.WAIT, number)
        rate = finish(place, vkjobs.System(kind=vkjobs.WAIT), number)
    print(f"{workers} workers: {rate:,.0f} jobs/s", file=sys.stderr)
    return rate


def tell(figures: dict[str, Any]) -> str:
    """Return the figures for people."""
    rows = [(workers, rate, figures["speedup"][workers]) for workers, rate in figures["rates"].items()]
    return table(("workers", "jobs/s", "times one"), rows)
