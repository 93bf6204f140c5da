"""How many jobs that do nothing each system runs a second, side by side: two cores, two worker processes.

Rate: number of jobs / time from the first start to the last one settled. Of what has its queue in the database the jobs
are there before; bare Celery is published to meanwhile. The rounds alternate, so that noise hits all alike.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.figures import medians, ratios, table
from benchmarks.site import BenchmarkError, Place, Site
from benchmarks.systems import System, awa, celery, pgqueuer, procrastinate, vkjobs

_ROUNDS, _ROUND_S = 5, 9.0
_SHORT_ROUNDS, _SHORT_ROUND_S = 2, 2.0
_PATIENCE_S, _SLOWEST = 60.0, 100  # jobs a second


def run(site: Site, *, short: bool) -> dict[str, Any]:
    """Return the median rates, their ratios, and the rates of each round."""
    rounds, seconds = (_SHORT_ROUNDS, _SHORT_ROUND_S) if short else (_ROUNDS, _ROUND_S)
    systems: list[System] = [
        celery.System(),
        vkjobs.System(),
        vkjobs.System("vkjobs_bulk", vkjobs.BULK, first_guess=5000),
        procrastinate.System(),
        pgqueuer.System(),
        awa.System(),
    ]
    guesses = {one.name: one.first_guess if short else rate(site, one, one.first_guess) for one in systems}
    measured: list[dict[str, float]] = []
    for number in range(rounds):
        found = {}
        for system in _order(systems, number):
            found[system.name] = rate(site, system, max(100, round(guesses[system.name] * seconds)))
            print(f"round {number + 1}: {system.name:14} {found[system.name]:8,.0f} jobs/s", file=sys.stderr)
        measured.append(found)
    rates = medians(measured)
    names = [system.name for system in systems]
    ours = [("vkjobs", name) for name in names if not name.startswith("vkjobs")]
    bulk = [("vkjobs_bulk", name) for name in names if name != "vkjobs_bulk"]
    return {
        "rates": {name: rates[name] for name in names},
        "ratios": ratios(rates, [*ours, *bulk]),
        "rounds": [{name: round(one[name]) for name in names} for one in measured],
    }


def _order(systems: Sequence[System], number: int) -> Sequence[System]:
    return systems[::-1] if number % 2 else systems


def rate(site: Site, system: System, number: int) -> float:
    """Return the jobs a second of one round."""
    with site.place() as place:
        system.begin(place, number)
        return finish(place, system, number)


def finish(place: Place, system: System, number: int) -> float:
    """Wait until the jobs are settled; return the jobs a second.

    Raises:
        BenchmarkError: not all were settled in time.
    """
    began = time.monotonic()
    # Looking at the table costs it something, so it is left alone until all have at least started.
    while place.total().calls < number or system.settled(place)[0] < number:
        place.check()
        if time.monotonic() - began > _PATIENCE_S + number / _SLOWEST:
            raise BenchmarkError(f"{system.name} has settled {system.settled(place)[0]} of {number} jobs in time")
        time.sleep(0.05)
    count, last = system.settled(place)
    if count != number:
        raise BenchmarkError(f"{system.name} has settled {count} jobs, not {number}")
    return number / (last - place.total().first)


def tell(figures: dict[str, Any]) -> str:
    """Return the figures for people."""
    rates = figures["rates"]
    others = ("celery", "procrastinate")
    rows = [(name, rate, *(round(rate / rates[other], 2) for other in others)) for name, rate in rates.items()]
    return table(("", "jobs/s", *(f"per {other}" for other in others)), rows)
