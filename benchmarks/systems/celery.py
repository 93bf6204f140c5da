"""Bare Celery at its default settings: publishing and consuming at the same time."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import worker_ready

from benchmarks.site import READY, Place
from benchmarks.tally import hit

app = Celery("bench", broker=os.environ.get("VKJOBS_BROKER_URL"))


@app.task(name="noop")
def noop() -> None:
    """Count the call."""
    hit()


@worker_ready.connect
def _say_ready(**_: Any) -> None:
    Path(os.environ[READY]).touch()


class System:
    """See `systems.System`."""

    name = "celery"
    first_guess = 800

    def begin(self, place: Place, number: int) -> None:
        """Start a worker, then a process that publishes."""
        place.start("celery", "-A", __name__, "worker", "-c", "2").ready()
        place.start(__name__, str(number))

    def settled(self, place: Place) -> tuple[int, float]:
        """Return how many calls there were: nothing is written down when one ends."""
        total = place.total()
        return total.calls, total.last


def _publish(number: int) -> None:
    for _ in range(number):
        noop.delay()
    sys.stdin.read()  # a process that ends is an error


if __name__ == "__main__":
    _publish(int(sys.argv[1]))
