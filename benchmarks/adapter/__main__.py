"""Produces and consumes until SIGTERM; see the package."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.adapter.queues import QUEUES, Queue, depth
from benchmarks.adapter.reports import SOCKET, Inbox
from benchmarks.adapter.telemetry import Telemetry
from benchmarks.site import Place

_stop = threading.Event()


def _setting(name: str, default: float) -> float:
    return float(os.environ.get(name) or default)


def main(system: str = "vkjobs") -> int:
    """Run until told to stop; return the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: _stop.set())
    if (scenario := os.environ.get("SCENARIO", "long_horizon")) != "long_horizon":
        sys.exit(f"SCENARIO is {scenario}: this adapter knows long_horizon alone")
    queue = QUEUES[system]()
    telemetry = Telemetry(queue.manifest)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="vkjobs-adapter-", dir="/tmp")))
        os.environ[SOCKET] = str(folder / "reports")
        inbox = Inbox(folder / "reports")
        url = os.environ["DATABASE_URL"].replace("postgres://", "postgresql://", 1)
        place = Place(url, os.environ.get("VKJOBS_BROKER_URL", ""), folder)
        stack.callback(place.close, patience=2)  # all is to be over within 5 s
        queue.consume(place, round(_setting("WORKER_COUNT", 8)), stack)
        telemetry.describe()
        _in_background(_receive, inbox, telemetry)
        _in_background(_produce, queue, place, telemetry)
        _sample(queue, place, telemetry)
    return 0


def _in_background(function: Callable[..., object], *arguments: Any) -> None:
    threading.Thread(target=function, args=arguments, daemon=True).start()


def _receive(inbox: Inbox, telemetry: Telemetry) -> None:
    while True:
        telemetry.completed(inbox.next())


def _produce(queue: Queue, place: Place, telemetry: Telemetry) -> None:
    """Insert jobs at the rate that is asked for; what a pause has cost is made up for."""
    fill = "x" * round(_setting("JOB_PAYLOAD_BYTES", 256))
    most, pause = round(_setting("PRODUCER_BATCH_MAX", 128)), _setting("PRODUCER_BATCH_MS", 10) / 1000
    insert = queue.inserter(place)
    credit, then = 0.0, time.monotonic()
    while not _stop.wait(pause):
        now = time.monotonic()
        try:
            if os.environ.get("PRODUCER_MODE") == "depth-target":
                credit = _setting("TARGET_DEPTH", 1000) - depth(queue, place.dsn)
            else:
                credit += _rate() * (now - then)
            then = now
            while credit >= 1 and not _stop.is_set():
                number = min(most, int(credit))
                insert([{"at": time.time(), "fill": fill} for _ in range(number)])
                credit -= number
                telemetry.inserted(number)
        except Exception as error:  # noqa: BLE001 - a database that is away for a while is part of the benchmark
            print(f"insert failed: {error}", file=sys.stderr, flush=True)
            _stop.wait(0.5)
            insert = queue.inserter(place)


def _rate() -> float:
    if control := os.environ.get("PRODUCER_RATE_CONTROL_FILE"):
        with suppress(OSError, ValueError):  # it may just be written
            return float(Path(control).read_text())
    return _setting("PRODUCER_RATE", 800)


def _sample(queue: Queue, place: Place, telemetry: Telemetry) -> None:
    every = _setting("SAMPLE_EVERY_S", 5)
    while not _stop.is_set():
        at = (time.time() // every + 1) * every
        _stop.wait(at - time.time())
        place.check()
        found = None
        try:
            found = depth(queue, place.dsn)
        except Exception as error:  # noqa: BLE001
            print(f"depth not known: {error}", file=sys.stderr, flush=True)
        telemetry.sample(min(at, time.time()), found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
