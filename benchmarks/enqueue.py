"""How many jobs a second a host writes: many in one call, and one by one, each time in one transaction."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from sqlalchemy import Connection

import vkjobs
from benchmarks.figures import table
from benchmarks.site import Site
from benchmarks.systems.vkjobs import NOOP
from vkjobs import database
from vkjobs.migrations import migrate

_MANY, _SINGLE, _ROUNDS = 50_000, 5000, 5
_SHORT_MANY, _SHORT_SINGLE, _SHORT_ROUNDS = 2000, 200, 2


def run(site: Site, *, short: bool) -> dict[str, Any]:
    """Return the median rates in rows a second."""
    many, single, rounds = (_SHORT_MANY, _SHORT_SINGLE, _SHORT_ROUNDS) if short else (_MANY, _SINGLE, _ROUNDS)
    rates: dict[str, list[float]] = {"enqueue_many": [], "enqueue": []}
    with site.place() as place:
        migrate(place.url)
        engine = database.engine(place.url, 1)
        for _ in range(rounds):
            with database.transaction(engine) as conn:
                rates["enqueue_many"].append(many / _seconds(conn, _enqueue_many, many))
            with database.transaction(engine) as conn:
                rates["enqueue"].append(single / _seconds(conn, _enqueue_each, single))
        engine.dispose()
    return {f"{name}_rows_s": round(median(found)) for name, found in rates.items()}


def _seconds(conn: Connection, write: Callable[[Connection, int], object], number: int) -> float:
    began = time.perf_counter()
    write(conn, number)
    conn.commit()
    return time.perf_counter() - began


def _enqueue_many(conn: Connection, number: int) -> None:
    vkjobs.enqueue_many(conn, [vkjobs.NewJob(NOOP, f"task-{job}") for job in range(number)])


def _enqueue_each(conn: Connection, number: int) -> None:
    for job in range(number):
        vkjobs.enqueue(conn, NOOP, f"task-{job}")


def tell(figures: dict[str, Any]) -> str:
    """Return the figures for people."""
    return table(("", "rows/s"), figures.items())
