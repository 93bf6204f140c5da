"""What the host's code calls: enqueue, and have what is due start at once, not at the next tick.

A nudge fires `run_due` once the caller's transaction has committed. It is sent by a thread that is started when first
needed, so that it neither holds up nor fails the caller; a nudge that is lost costs no more than the wait for a tick.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from celery import Celery
from sqlalchemy import Connection, event
from sqlalchemy.orm import Session, SessionTransaction, scoped_session

from vkjobs import broker, client
from vkjobs.client import SessionOrConnection
from vkjobs.database import in_a_line
from vkjobs.dispatch import TICK_QUEUE
from vkjobs.errors import InvalidJobError
from vkjobs.events import Seldom, emit
from vkjobs.execute import AFTER_COMMIT
from vkjobs.ledger import JobId, NewJob
from vkjobs.tasks import RUN_DUE, settings_of

_AT_ONCE = datetime.min.replace(tzinfo=UTC)
_PROMISES = "vkjobs.nudge"
# Between two messages of a process: the more commits a second there were of late, the more of them share the next one.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.1
_PAUSE_FOR_RATE_S = 0.0002
_OF_LATE_S = 0.25
_LAST_WORDS_S = 1.0  # a script may end right after its commit
_LOG_EVERY_S = 30.0


def enqueue(
    session_or_connection: SessionOrConnection,
    kind: str,
    ref_id: str | None = None,
    *,
    run_at: datetime | None = None,
    payload: Any = None,
    nudge: Celery | None = None,
) -> JobId:
    """Insert a job in the caller's transaction: it is there if and when that commits.

    Args:
        session_or_connection: the host's own; of an async one, ``await session.run_sync(enqueue, kind, …)``.
        kind: what is to be done; 1 to 200 characters. It need not be known in this process.
        ref_id: what it is to be done to.
        run_at: when; a time with its zone. None: now, by the database's clock.
        payload: arguments beyond ``ref_id``: any value that JSON has.
        nudge: your Celery app. If the job is due once the session has committed, it starts at once, not at the next
            tick. With a connection, call `vkjobs.nudge` after the commit.

    Returns:
        The job's id.

    Raises:
        InvalidJobError: an argument cannot be stored as meant; nothing was written.
    """
    _check(session_or_connection, nudge)
    id = client.enqueue(session_or_connection, kind, ref_id, run_at=run_at, payload=payload)
    _promise(session_or_connection, nudge, [run_at])
    return id


def enqueue_many(
    session_or_connection: SessionOrConnection, jobs: Iterable[NewJob], *, nudge: Celery | None = None
) -> list[JobId]:
    """Insert many jobs in the caller's transaction, at a small part of what it costs to `enqueue` them one by one.

    Args:
        session_or_connection: see `enqueue`.
        jobs: the jobs. They are sent 1,000 at a time; only a connection in autocommit keeps a part if sending fails.
        nudge: see `enqueue`.

    Returns:
        The jobs' ids, in the order of the jobs.

    Raises:
        InvalidJobError: a job cannot be stored as meant; nothing was written.
    """
    _check(session_or_connection, nudge)
    jobs = list(jobs)
    ids = client.enqueue_many(session_or_connection, jobs)
    _promise(session_or_connection, nudge, [job.run_at for job in jobs])
    return ids


def nudge(app: Celery) -> None:
    """Have what is due start at once: for code that has committed jobs by SQL, or on a connection.

    Returns at once and raises nothing if the broker is away: the next tick does what this would have done. Many calls
    make few messages.

    Raises:
        InvalidJobError: ``app`` is no Celery app.
    """
    _check(None, app)
    _nudge_if_soon(app, _AT_ONCE)


def _check(given: object, app: object) -> None:
    if app is None:
        return
    if not issubclass(type(app), Celery):  # as which a proxy would pass itself off, whose app changes with the thread
        raise InvalidJobError(f"nudge is a {type(app).__name__}: it must be your Celery app itself")
    if isinstance(given, Connection):
        raise InvalidJobError(
            "nudge needs a Session, because a Connection does not tell when it has committed: call vkjobs.nudge(app) "
            "after the commit"
        )


def _promise(given: SessionOrConnection, app: Celery | None, run_ats: Sequence[datetime | None]) -> None:
    """Nudge if and when the session's transaction commits, and one of these times is soon."""
    if app is None or not run_ats:
        return
    session = given() if isinstance(given, scoped_session) else given
    assert isinstance(session, Session)
    promises = session.info.get(_PROMISES) or _Promises(session)
    transaction = session.get_nested_transaction() or session.get_transaction()
    assert transaction is not None
    promises.add(transaction, app, min(run_at or _AT_ONCE for run_at in run_ats))


class _Promises:
    """The nudges that a session owes, by the transaction or savepoint that must commit first."""

    def __init__(self, session: Session) -> None:
        self._owed: WeakKeyDictionary[SessionTransaction, dict[Celery, datetime]] = WeakKeyDictionary()
        session.info[_PROMISES] = self
        event.listen(session, "after_commit", self._after_commit)

    def add(self, transaction: SessionTransaction, app: Celery, run_at: datetime) -> None:
        """Owe a nudge for a job that is due at ``run_at``."""
        while transaction.parent is not None and not transaction.nested:  # a flush is no transaction of its own
            transaction = transaction.parent
        owed = self._owed.setdefault(transaction, {})
        owed[app] = min(run_at, owed.get(app, run_at))

    def _after_commit(self, session: Session) -> None:
        savepoint, root = session.get_nested_transaction(), session.get_transaction()
        committed = savepoint or root
        assert committed is not None
        for app, run_at in self._owed.pop(committed, {}).items():
            if committed.parent is not None:
                self.add(committed.parent, app, run_at)
            elif isinstance(session.bind, Connection) and session.bind.in_transaction():
                # As in a handler: the session's commit is not that of the transaction it has joined.
                session.info.setdefault(AFTER_COMMIT, []).append(partial(_nudge_if_soon, app, run_at))
            else:
                _nudge_if_soon(app, run_at)


def _nudge_if_soon(app: Celery, run_at: datetime) -> None:
    try:
        if run_at <= datetime.now(UTC) + timedelta(seconds=settings_of(app).horizon):
            _nudger.ask(app)
    except Exception as error:  # noqa: BLE001 - the caller has committed: an impossible setting is no matter of its
        _nudger.complain(error)


class _Nudger:
    """The thread that sends this process's nudges."""

    def __init__(self) -> None:
        self._asked: list[Celery] = []
        self._changed = threading.Condition()
        self._sending = False
        self._thread: threading.Thread | None = None
        self._seldom = Seldom(_LOG_EVERY_S)

    def ask(self, app: Celery) -> None:
        """Nudge soon, once for all that ask until then."""
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="vkjobs-nudge", daemon=True)
                thread.start()
                self._thread = thread
            self._asked.append(app)
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait a moment until nothing is left to send."""
        with self._changed:
            self._changed.wait_for(lambda: not self._asked and not self._sending, _LAST_WORDS_S)

    def complain(self, error: Exception) -> None:
        """Log that a nudge was not sent, once in a while."""
        if self._seldom():
            emit(logging.WARNING, "nudge failed", error=in_a_line(error))

    def _run(self) -> None:
        rate, then = 0.0, time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked)
                asked, self._asked, self._sending = self._asked, [], True
            now = time.monotonic()
            rate, then = rate * math.exp((then - now) / _OF_LATE_S) + len(asked) / _OF_LATE_S, now
            for app in set(asked):
                self._send(app)
            with self._changed:
                self._sending = False
                self._changed.notify_all()
            time.sleep(min(max(_SHORTEST_PAUSE_S, rate * _PAUSE_FOR_RATE_S), _LONGEST_PAUSE_S))

    def _send(self, app: Celery) -> None:
        try:
            if not broker.depth(app, TICK_QUEUE):  # a tick that waits there does it as well
                broker.publish(app, broker.Message(TICK_QUEUE, RUN_DUE, {"by": "nudge"}, "{'by': 'nudge'}"))
        except Exception as error:  # noqa: BLE001 - whatever a transport raises
            self.complain(error)


_nudger = _Nudger()


def _start_anew() -> None:
    global _nudger  # noqa: PLW0603
    _nudger = _Nudger()  # the thread, and whoever held its lock, are the parent's


def _finish() -> None:
    _nudger.finish()


os.register_at_fork(after_in_child=_start_anew)
atexit.register(_finish)
