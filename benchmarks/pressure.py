"""The four pressure cells of the open benchmark of Postgres queues, scaled down, beside Procrastinate and PgQueuer.

Each cell is a run of the adapter on a fresh database: warm-up, a clean phase at the base rate, the pressure, recovery.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.adapter.queues import QUEUES
from benchmarks.figures import table
from benchmarks.site import Place, Process, Site, wait_for

_RATE = 200  # jobs a second
_MORE = 1.5  # times that, where there is more load
_WORKERS = 4
_KEEPS_UP = 0.95  # of the offered rate


class _Phases(NamedTuple):
    """Seconds."""

    warm_up: float
    clean: float
    recovery: float
    pressure: dict[str, float]


# The clean phase is as long as the window of the percentiles.
_LONG = _Phases(
    10, 32, 30, {"idle_in_tx_saturation": 90, "sustained_high_load": 120, "active_readers": 90, "event_burst": 45}
)
_SHORT = _Phases(2, 3, 5, dict.fromkeys(_LONG.pressure, 3))

Metrics = dict[str, list[tuple[float, float]]]


@contextmanager
def _idle_in_transaction(place: Place, _rate: Path, _table: str) -> Iterator[None]:
    with place.connection() as connection, connection.cursor() as cursor:
        cursor.execute("begin isolation level repeatable read")
        cursor.execute("select pg_current_xact_id()")
        yield


@contextmanager
def _more_load(_place: Place, rate: Path, _table: str) -> Iterator[None]:
    rate.write_text(str(_RATE * _MORE))
    yield
    rate.write_text(str(_RATE))


@contextmanager
def _readers(place: Place, _rate: Path, name: str) -> Iterator[None]:
    done = threading.Event()

    def read() -> None:
        with place.connection() as connection, connection.cursor() as cursor:
            while not done.is_set():
                cursor.execute("begin isolation level repeatable read")
                cursor.execute(f"select count(*), max(j::text) from {name} j")
                cursor.execute("commit")

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    yield
    done.set()
    for reader in readers:
        reader.join()


_CELLS: dict[str, Callable[[Place, Path, str], AbstractContextManager[None]]] = {
    "idle_in_tx_saturation": _idle_in_transaction,
    "sustained_high_load": _more_load,
    "active_readers": _readers,
    "event_burst": _more_load,
}


def run(site: Site, *, short: bool) -> dict[str, Any]:
    """Return by system and cell what became of it."""
    phases = _SHORT if short else _LONG
    found: dict[str, dict[str, Any]] = {system: {} for system in QUEUES}
    for cell in _CELLS:
        for system in QUEUES:
            found[system][cell] = _cell(site, system, cell, phases)
            print(f"{cell}, {system}: {found[system][cell]}", file=sys.stderr)
    passed = {system: sum(one["completed"] for one in cells.values()) for system, cells in found.items()}
    return {"passed": passed, "rate": _RATE, "cells": found}


def _cell(site: Site, system: str, cell: str, phases: _Phases) -> dict[str, Any]:
    with site.place() as place:
        control = place.folder / "rate"
        control.write_text(str(_RATE))
        adapter = place.start(
            "benchmarks.adapter",
            system,
            DATABASE_URL=place.dsn,
            PRODUCER_RATE_CONTROL_FILE=str(control),
            WORKER_COUNT=str(_WORKERS),
            SAMPLE_EVERY_S="1",
        )
        wait_for(lambda: _metrics(adapter) or adapter.has_ended, "the adapter's first sample")
        time.sleep(phases.warm_up)
        began = time.time()
        time.sleep(phases.clean)
        pressed = time.time()
        with _CELLS[cell](place, control, QUEUES[system].manifest["event_tables"][0]):
            time.sleep(phases.pressure[cell])
            eased = time.time()
        time.sleep(phases.recovery)
        adapter.check()
        adapter.terminate()
        ended_well = adapter.wait(5) == 0
        return verdict(_metrics(adapter), began, pressed, eased) if ended_well else {"completed": False}


def _metrics(adapter: Process) -> Metrics:
    """Return by metric its values and their times."""
    found: Metrics = {}
    for line in adapter.log.splitlines():
        if line.startswith('{"t"') and line.endswith("}"):
            sample = json.loads(line)
            found.setdefault(sample["metric"], []).append((_epoch(sample["t"]), sample["value"]))
    return found


def _epoch(iso: str) -> float:
    return datetime.fromisoformat(iso).timestamp()


def verdict(metrics: Metrics, began: float, pressed: float, eased: float) -> dict[str, Any]:
    """Return what became of a cell whose clean phase, pressure and recovery began at these times."""

    def values(metric: str, since: float, until: float) -> list[float]:
        return [value for at, value in metrics.get(metric, []) if since < at <= until]

    offered = fmean(values("enqueue_rate", pressed, eased))
    completed = fmean(values("completion_rate", pressed, eased))
    base = max(values("queue_depth", began, pressed))
    recovery = next((at - eased for at, depth in metrics["queue_depth"] if at > eased and depth <= base), None)
    p99 = {
        name: (values("claim_p99_ms", *span) or [float("inf")])[-1]
        for name, span in (("clean", (began, pressed)), ("pressure", (pressed, eased)))
    }
    return {
        "completed": completed >= _KEEPS_UP * offered and recovery is not None,
        "offered_rate": round(offered, 1),
        "completion_rate": round(completed, 1),
        "base_depth": base,
        "most_depth": max(values("queue_depth", pressed, eased)),
        "recovery_s": None if recovery is None else round(recovery, 1),
        "claim_p99_ms": p99,
        "claim_p99_ratio": round(p99["pressure"] / p99["clean"], 2),
    }


def tell(figures: dict[str, Any]) -> str:
    """Return the figures for people."""
    head = ("", "completed", "offered/s", "completed/s", "recovery s", "p99 ms clean", "p99 ms pressure", "ratio")
    rows = [
        (
            f"{cell}, {system}",
            one["completed"],
            *(one.get(name, "-") for name in ("offered_rate", "completion_rate", "recovery_s")),
            *one.get("claim_p99_ms", {"": "-", " ": "-"}).values(),
            one.get("claim_p99_ratio", "-"),
        )
        for system, cells in figures["cells"].items()
        for cell, one in cells.items()
    ]
    return table(head, rows)
