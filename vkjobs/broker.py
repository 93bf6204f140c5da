"""One line to the broker for each process: publishing and asking for a queue's depth, both bounded in time.

Celery's own producers wait for a broker that does not answer for as long as it pleases, and the slot or thread that
publishes would wait with them. Where the transport can, many messages make one round trip. Knows no job.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import datetime
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from celery import Celery
from celery.utils import uuid
from kombu import Connection, Producer
from kombu.exceptions import ChannelError, OperationalError
from kombu.transport import virtual

# An answer takes a millisecond. Connecting, publishing and both once more still end within half a minute.
_PATIENCE_S = 4.0
_TIMEOUTS = {
    "redis": {"socket_timeout": _PATIENCE_S, "socket_connect_timeout": _PATIENCE_S},
    "amqp": {"read_timeout": _PATIENCE_S, "write_timeout": _PATIENCE_S},
}
_RETRY_POLICY = {"max_retries": 1, "interval_start": 0, "interval_max": 0.2}
_FAILURES_IN_A_ROW = 3  # so many mean that the queue or its broker is away, not that a message is odd


class Message(NamedTuple):
    """A call of a task of the app."""

    queue: str
    task: str
    kwargs: dict[str, Any]
    shown: str
    """The arguments as Flower shows them."""
    eta: datetime | None = None


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


def publish(app: Celery, message: Message) -> None:
    """Send a message.

    Raises:
        Exception: whatever the transport raises; within half a minute if the broker does not answer.
    """
    with _line(app).producer() as producer:
        _send(app, producer, message, retry=True)


def publish_all(app: Celery, messages: Sequence[Message]) -> dict[int, Exception]:
    """Send many messages to one queue; return, by number, those that were not sent, or perhaps not, and why.

    Takes at most half a minute if the broker does not answer.
    """
    unsent: dict[int, Exception] = {}
    for last in (False, True):
        unsent = {}
        batched = False
        try:
            with _line(app).producer() as producer:
                batched = getattr(producer, "supports_batch_publish", False)  # kombu 5.7
                batch: AbstractContextManager[object] = producer.batch() if batched else nullcontext()
                with batch:
                    _send_each(app, producer, messages, unsent, retry=not batched)
        except Exception as error:  # noqa: BLE001 - whatever a transport raises
            if batched or not unsent:
                # What has arrived of a batch is not known. Twice does no harm, so it is tried again as a whole: the
                # broker may only have closed an idle connection.
                unsent = dict.fromkeys(range(len(messages)), _cause(error))
            if not batched or last:
                return unsent
        else:
            return unsent
    return unsent


def _send_each(
    app: Celery, producer: Producer, messages: Sequence[Message], unsent: dict[int, Exception], *, retry: bool
) -> None:
    in_a_row = 0
    for number, message in enumerate(messages):
        try:
            _send(app, producer, message, retry=retry, declare=number == 0)  # all are for one queue
        except Exception as error:
            unsent[number] = error
            in_a_row += 1
            if isinstance(error, OperationalError) or in_a_row == _FAILURES_IN_A_ROW:
                unsent.update(dict.fromkeys(range(number + 1, len(messages)), error))
                raise
        else:
            in_a_row = 0


def _cause(error: Exception) -> Exception:
    # That of a batch says no more than that it failed.
    return error.__cause__ if isinstance(error.__cause__, Exception) else error


def _send(app: Celery, producer: Producer, message: Message, *, retry: bool, declare: bool = True) -> None:
    if app.conf.task_always_eager:
        app.tasks[message.task].apply_async(kwargs=message.kwargs, queue=message.queue, producer=producer)
        return
    # What apply_async does beyond this costs as much again: options of the host's for its own tasks, routes, a result.
    sent = app.amqp.create_task_message(
        uuid(),
        message.task,
        (),
        message.kwargs,
        eta=message.eta,
        argsrepr="()",
        kwargsrepr=message.shown,
        ignore_result=True,
        create_sent_event=app.conf.task_send_sent_event,
    )
    app.amqp.send_task_message(
        producer,
        message.task,
        sent,
        queue=message.queue,
        declare=None if declare else (),
        serializer="json",
        delivery_mode="transient",
        retry=retry,
        retry_policy=_RETRY_POLICY,
    )


def depth(app: Celery, queue: str) -> int:
    """Return how many messages wait in ``queue``; none if it does not exist or the broker does not say."""
    try:
        with _line(app).producer() as producer:
            channel = producer.channel
            try:
                return int(channel.queue_declare(queue=queue, passive=True).message_count)
            except ChannelError:
                if isinstance(channel, virtual.Channel):  # has no empty queues, and stays usable
                    return 0
                raise
    except Exception:  # noqa: BLE001 - each transport has its own exceptions for a missing queue
        return 0
