"""The steward of a worker: a thread of its main process that mends what its children cannot.

It settles the jobs of children that died, frees leased jobs that a stopping worker will not run, ticks while nobody
else does, and compares this host's clock with the database's. It runs no handler.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any
from weakref import WeakSet

from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import Terminated, WorkerLostError
from celery import Celery
from celery.worker.request import Request
from sqlalchemy.exc import DataError

from vkjobs import bulk, ledger
from vkjobs.database import clock_lead, in_a_line, is_passing
from vkjobs.dispatch import WorkerLost
from vkjobs.events import Seldom, emit
from vkjobs.execute import failure_of, log_failure
from vkjobs.handlers import registry
from vkjobs.ledger import JobId
from vkjobs.tasks import claimant, dispatcher_of, engine_of, leases_of, settings_of

_SILENT_TICKS = 3  # so many missing ones mean that beat is away, or that no worker has a slot for its ticks
_RETRY_S = 1.0
_LOG_EVERY_S = 30.0
_COMPARE_CLOCKS_EVERY_S = 10.0

_waiting: WeakSet[JobRequest] = WeakSet()
_stewards: dict[Celery, Steward] = {}


class JobRequest(Request):  # type: ignore[misc]
    """A job's message in the worker's main process: knows whether it was started, and how its child ended."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _waiting.add(self)

    @property
    def eta(self) -> datetime | None:
        """See Celery: when to start by this host's clock. The message says it by the database's."""
        eta: datetime | None = super().eta
        try:
            return eta and eta + steward_of(self._app).clock_lead
        except OverflowError:
            return eta  # of a forged message

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        """See Celery: a child has started on it."""
        _waiting.discard(self)
        super().on_accepted(pid, time_accepted)

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> None:
        """See Celery: the task raised, or its child is gone."""
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        super().on_failure(exc_info, *args, **kwargs)
        if isinstance(error, WorkerLostError | Terminated | SystemExit | KeyboardInterrupt):
            self._child_died(f"its process died: {error}")

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """See Celery: the soft limit has raised in the child, or the hard one will have killed it."""
        super().on_timeout(soft, timeout)
        if not soft:
            self._child_died(f"its process was killed at the time limit of {timeout:g} s")

    def leases(self) -> list[tuple[JobId, datetime]]:
        """Return the ids and tokens that the message brought, if it brought any."""
        return leases_of(**self._kwargs) if isinstance(self._kwargs, dict) else []

    def _child_died(self, reason: str) -> None:
        by = claimant(self.id, self.hostname, self.worker_pid)
        leases = self.leases()
        steward = steward_of(self._app)
        for number, lease in enumerate(leases):
            if len(leases) == 1 or bulk.position.is_at(self.worker_pid, number):
                steward.child_died(*lease, by=by, reason=reason)
            else:
                steward.not_run(*lease, by=by)


class Steward:
    """Does what it is told, one thing after another, and ticks in between.

    Attributes:
        clock_lead: how far this host's clock was ahead of the database's when last compared.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._started = time.monotonic()
        self.clock_lead = timedelta(0)
        self._compared = float("-inf")
        self._ticks = False
        self._ticking = False
        self._seldom = Seldom(_LOG_EVERY_S)

    def start(self, *, ticks: bool) -> None:
        """Start the thread; with ``ticks`` it sees to it that somebody ticks."""
        self._started = time.monotonic()
        self._ticks = ticks
        self._tell(self.compare_clocks)

    def stop(self, patience: float) -> None:
        """Finish what it was told, for at most ``patience`` seconds."""
        self._ticks = False
        if self._thread is not None:
            self._work.put(self._end)
            self._thread.join(patience)
            self._thread = None

    def compare_clocks(self) -> None:
        """Find out the `clock_lead`. Raises SQLAlchemyError."""
        self._compared = time.monotonic()
        with engine_of(self._app).connect() as conn:
            self.clock_lead = clock_lead(conn)

    def child_died(self, id: JobId, token: datetime, *, by: str, reason: str) -> None:
        """Settle a job whose child died as ``by``; if it had not started, free it."""
        self._tell(lambda: self._bury(id, token, by, reason))

    def not_run(self, id: JobId, token: datetime, *, by: str) -> None:
        """Free a job whose child died as ``by`` while it was at another one of the same message."""
        self._tell(lambda: self._give_back(id, token, by))

    def retire(self, leases: list[tuple[JobId, datetime]]) -> None:
        """Tick no more, and free leased jobs that this worker will not run."""
        self._ticks = False
        self.release(leases)

    def release(self, leases: list[tuple[JobId, datetime]]) -> None:
        """Free leased jobs that this worker will not run."""
        if leases:
            self._tell(lambda: self._release(leases))

    def _tell(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="vkjobs-steward", daemon=True)
            self._thread.start()
        self._work.put(work)

    @staticmethod
    def _end() -> None:
        raise SystemExit  # of the thread

    def _run(self) -> None:
        tick = settings_of(self._app).tick
        ticked = time.monotonic()
        while True:
            try:
                self._attempt(self._work.get(timeout=min(tick, _COMPARE_CLOCKS_EVERY_S)))
            except queue.Empty:
                if time.monotonic() - self._compared > _COMPARE_CLOCKS_EVERY_S:
                    self._attempt(self.compare_clocks)
            if self._ticks and time.monotonic() - ticked >= tick:
                ticked = time.monotonic()
                self._attempt(self._tick)

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the thread has other work to do, whatever this one met
            if self._seldom():
                emit(logging.WARNING, "steward failed", error=in_a_line(error))
            if is_passing(error) and work not in (self._tick, self.compare_clocks):
                # Its lease would see to it too, only later.
                time.sleep(_RETRY_S)
                self._work.put(work)

    def _bury(self, id: JobId, token: datetime, by: str, reason: str) -> None:
        with engine_of(self._app).connect() as conn:
            claim = ledger.claimed(conn, id, by=by)
            if claim is None:
                ledger.release(conn, [(id, token)])
                return
            error = WorkerLost(reason)
            failure = failure_of(error, claim.attempts, registry.get(claim.kind), settings_of(self._app))
            if ledger.settle_dead_child(conn, id, failure, by=by):
                log_failure(claim, failure, error)

    def _give_back(self, id: JobId, token: datetime, by: str) -> None:
        with engine_of(self._app).connect() as conn:
            if not ledger.give_back(conn, id, by=by):
                ledger.release(conn, [(id, token)])

    def _release(self, leases: list[tuple[JobId, datetime]]) -> None:
        with engine_of(self._app).connect() as conn:
            try:
                ledger.release(conn, leases)
            except DataError:  # one of the ids is none
                for lease in leases:
                    with suppress(DataError):
                        ledger.release(conn, [lease])

    def _tick(self) -> None:
        chosen = settings_of(self._app)
        with engine_of(self._app).connect() as conn:
            uptime = time.monotonic() - self._started  # beat may be starting beside this worker
            silent = min(ledger.silence(conn, "beat"), uptime) > _SILENT_TICKS * chosen.tick
            mine = silent and ledger.silence(conn, "worker") > chosen.tick / 2
            if mine:
                ledger.ticked(conn, "worker")
        if silent != self._ticking:
            self._ticking = silent
            emit(
                logging.WARNING if silent else logging.INFO,
                "beat is silent, workers tick by themselves" if silent else "beat ticks again",
            )
        if mine:
            dispatcher_of(self._app).run_due(housekeeping=True)


def steward_of(app: Celery) -> Steward:
    """Return this process's steward for the app."""
    # No lock: a signal handler asks too. Where two threads make one at once, all get the same.
    return _stewards.get(app) or _stewards.setdefault(app, Steward(app))


def release_waiting(app: Celery) -> None:
    """Free the jobs whose messages this worker has but has not started."""
    requests = [request for request in list(_waiting) if request.app is app]
    leases = [lease for request in requests for lease in request.leases()]
    steward_of(app).retire(leases)
