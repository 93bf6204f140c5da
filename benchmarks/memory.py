"""How much the memory of a worker, all its processes together, grows while a million jobs run through it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.figures import table
from benchmarks.site import Place, Process, Site, wait_for
from benchmarks.systems import vkjobs

_WARM_UP, _JOBS = 20_000, 1_000_000
_SHORT_WARM_UP, _SHORT_JOBS = 2000, 20_000
_STEPS = 10
_SLOWEST = 100  # jobs a second
_PAGE = os.sysconf("SC_PAGE_SIZE")


def run(site: Site, *, short: bool) -> dict[str, Any]:
    """Return by kind how many MB all processes have grown by together, and the MB of each after each tenth."""
    warm_up, number = (_SHORT_WARM_UP, _SHORT_JOBS) if short else (_WARM_UP, _JOBS)
    found = {kind: _measure(site, kind, warm_up, number) for kind in (vkjobs.NOOP, vkjobs.BULK)}
    return {
        "jobs": number,
        "growth_mb": _growth(found[vkjobs.NOOP]),
        "growth_mb_bulk": _growth(found[vkjobs.BULK]),
        "rss_mb": found,
    }


def _growth(steps: list[dict[str, float]]) -> float:
    return round(sum(steps[-1].values()) - sum(steps[0].values()), 1)


def _measure(site: Site, kind: str, warm_up: int, number: int) -> list[dict[str, float]]:
    with site.place() as place:
        worker = vkjobs.serve(place)
        _run(place, kind, warm_up)
        steps = [_memory(worker)]
        for step in range(_STEPS):
            _run(place, kind, number // _STEPS)
            steps.append(_memory(worker))
            print(f"{kind}, {number // _STEPS * (step + 1):,} jobs: {steps[-1]}", file=sys.stderr)
    return steps


def _run(place: Place, kind: str, number: int) -> None:
    done = vkjobs.settled(place)[0] + number
    vkjobs.add(place, kind, number)
    wait_for(
        lambda: place.total().calls >= done and vkjobs.settled(place)[0] == done,
        f"{number} jobs to be settled",
        patience=60 + number / _SLOWEST,
        every=0.5,
    )


def _memory(worker: Process) -> dict[str, float]:
    """Return the resident megabytes of the main process and of each child."""
    children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
    return {
        name: round(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE / 1e6, 1)
        for name, pid in {"main": worker.pid, **{f"child {pid}": pid for pid in children}}.items()
    }


def tell(figures: dict[str, Any]) -> str:
    """Return the figures for people."""
    jobs = figures["jobs"]
    rows = [
        (kind, *(f"{sum(steps[at].values()):.1f}" for at in (0, len(steps) // 2, -1)), f"{_growth(steps):.1f}")
        for kind, steps in figures["rss_mb"].items()
    ]
    return table(("MB resident", "warm", f"after {jobs // 2:,} jobs", f"after {jobs:,}", "growth"), rows)
