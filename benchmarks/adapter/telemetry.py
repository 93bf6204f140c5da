"""What the adapter says on stdout: a descriptor, then a line for each metric at each sample."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from benchmarks.figures import percentile

_WINDOW_S = 30.0
_MOST_SAMPLES = 60_000  # of the window: what 2,000 jobs a second make


class Telemetry:
    """Counts, and says what it has counted."""

    def __init__(self, manifest: dict[str, Any]) -> None:
        self._manifest = manifest
        self._lock = threading.Lock()
        self._waits: deque[tuple[float, float]] = deque(maxlen=_MOST_SAMPLES)
        self._inserted = self._completed = 0
        self._since = time.monotonic()

    def describe(self) -> None:
        """Say what runs here."""
        system = self._manifest["system"]
        _say(
            {
                "kind": "descriptor",
                "system": system,
                "event_tables": self._manifest["event_tables"],
                "extensions": self._manifest["extensions"],
                "version": version(system),
                "schema_version": version(system),
                "db_name": self._manifest["db_name"],
                "started_at": _iso(time.time()),
            }
        )

    def inserted(self, number: int) -> None:
        """Count jobs that were inserted."""
        with self._lock:
            self._inserted += number

    def completed(self, waited: float) -> None:
        """Count a job that has ended, after it had waited for so many seconds."""
        with self._lock:
            self._completed += 1
            self._waits.append((time.monotonic(), waited * 1000))

    def sample(self, at: float, depth: int | None) -> None:
        """Say each metric, of the time ``at``, in seconds since the epoch."""
        now = time.monotonic()
        with self._lock:
            waits = [waited for then, waited in self._waits if then > now - _WINDOW_S]
            span, self._since = max(now - self._since, 0.001), now
            inserted, self._inserted = self._inserted, 0
            completed, self._completed = self._completed, 0
        if waits:
            for percent in (50, 95, 99):
                self._metric(at, f"claim_p{percent}_ms", round(percentile(waits, percent), 3), _WINDOW_S)
        self._metric(at, "enqueue_rate", round(inserted / span, 2), round(span, 3))
        self._metric(at, "completion_rate", round(completed / span, 2), round(span, 3))
        if depth is not None:
            self._metric(at, "queue_depth", depth, 0)

    def _metric(self, at: float, metric: str, value: float, window: float) -> None:
        _say(
            {
                "t": _iso(at),
                "system": self._manifest["system"],
                "kind": "adapter",
                "subject_kind": "adapter",
                "subject": "",
                "metric": metric,
                "value": value,
                "window_s": window,
            }
        )


def _say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
