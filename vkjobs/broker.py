"""One line to the broker for each process: publishing and asking for a queue's depth, both bounded in time.

Celery's own producers wait for a broker that does not answer for as long as it pleases, and the slot or thread that
publishes would wait with them. Knows no job.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

from celery import Celery
from kombu import Connection, Producer

# An answer takes a millisecond. Connecting, publishing and both once more still end within half a minute.
_PATIENCE_S = 4.0
_TIMEOUTS = {
    "redis": {"socket_timeout": _PATIENCE_S, "socket_connect_timeout": _PATIENCE_S},
    "amqp": {"read_timeout": _PATIENCE_S, "write_timeout": _PATIENCE_S},
}
_RETRY_POLICY = {"max_retries": 1, "interval_start": 0, "interval_max": 0.2}


class _Line:
    """A connection that is opened when needed and used by one thread at a time."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._lock = threading.RLock()  # with task_always_eager a job runs, and fires the next run, while it is sent
        self._connection: Any = None
        self._producer: Any = None

    @contextmanager
    def producer(self) -> Iterator[Producer]:
        """Yield a producer; if the block fails, the next one gets a new connection."""
        with self._lock:
            if self._producer is None:
                self._connection = self._connect()
                self._producer = self._connection.Producer(auto_declare=False)
            try:
                yield self._producer
            except BaseException:
                connection, self._connection, self._producer = self._connection, None, None
                with suppress(Exception):  # a broken one may refuse to be closed
                    connection.release()
                raise

    def _connect(self) -> Connection:
        driver = self._app.connection_for_write().transport.driver_type
        return self._app.connection_for_write(transport_options=_TIMEOUTS.get(driver, {}), connect_timeout=_PATIENCE_S)


_lines: WeakKeyDictionary[Celery, _Line] = WeakKeyDictionary()
_inherited: list[WeakKeyDictionary[Celery, _Line]] = []


def _forget_parents_lines() -> None:
    global _lines  # noqa: PLW0603
    _inherited.append(_lines)  # kept, because collecting a connection would end the parent's
    _lines = WeakKeyDictionary()


os.register_at_fork(after_in_child=_forget_parents_lines)


def _line(app: Celery) -> _Line:
    return _lines.setdefault(app, _Line(app))


def publish(app: Celery, task: str, kwargs: dict[str, Any], **options: Any) -> None:
    """Send a message for ``task`` of ``app``; ``options`` are those of `apply_async`.

    Raises:
        Exception: whatever the transport raises; within half a minute if the broker does not answer.
    """
    with _line(app).producer() as producer:
        app.tasks[task].apply_async(
            kwargs=kwargs, producer=producer, retry=True, retry_policy=_RETRY_POLICY, ignore_result=True, **options
        )


def depth(app: Celery, queue: str) -> int:
    """Return how many messages wait in ``queue``; none if it does not exist or the broker does not say."""
    try:
        with _line(app).producer() as producer:
            return int(producer.channel.queue_declare(queue=queue, passive=True).message_count)
    except Exception:  # noqa: BLE001 - each transport has its own exceptions for a missing queue
        return 0
