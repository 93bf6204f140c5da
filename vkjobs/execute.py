"""One job from its message to its settling: claim, call, settle. Knows no Celery.

Every way in which a handler can end is one `Outcome`, and each outcome is one call of the ledger.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from types import FrameType
from typing import Protocol, Self, TypeVar, cast

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DataError, DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from vkjobs import ledger, policy, report
from vkjobs.database import in_a_line, is_locked, is_outage, is_passing, transaction
from vkjobs.errors import DatabaseUnavailable, JobsLocked
from vkjobs.events import Seldom, emit
from vkjobs.handlers import GiveUp, Handler, Job, MissingRefId, Registry, Snooze, UnhandledKind
from vkjobs.heartbeat import Heartbeat, Holding
from vkjobs.ledger import Claim, Failure, JobId
from vkjobs.settings import Settings

T = TypeVar("T")

AFTER_COMMIT = "vkjobs.after_commit"
"""In a handler's ``ctx.session.info``: what is to be called once its writes are committed."""

_EARLY_S = 1.0  # a job due within this is waited for; one due later is released
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_LOCK_PAUSE_S = 0.01  # the statement has waited already, and whoever waits in line for the row comes first
_LOG_EVERY_S = 30.0


class Verdict(StrEnum):
    """What became of a message."""

    DONE = "done"
    RETRYING = "retrying"
    FAILED = "failed"
    SNOOZED = "snoozed"
    LEASE_LOST = "lease lost"
    """The handler ran, but its lease had gone to somebody else: nothing was kept."""
    MOVED_ON = "lease moved on"
    """The message's token is gone, so nothing was started: the job was moved, cancelled, or is run by another."""
    NOT_DUE = "not yet due"


@dataclass(frozen=True)
class Outcome:
    """What became of a message, and the words for it."""

    verdict: Verdict
    detail: str = ""

    def __str__(self) -> str:
        """Tell it in one line, as Flower shows it."""
        return f"{self.verdict}: {self.detail}" if self.detail else str(self.verdict)


class Held(Protocol):
    """What a context must know of the leases that it works under."""

    @property
    def lost(self) -> bool:
        """Whether one of them is known to be lost."""


class Execution:
    """The `vkjobs.handlers.Context` of one execution."""

    def __init__(self, engine: Engine, settings: Settings, holding: Held) -> None:
        self.settings = settings
        self._engine = engine
        self._holding = holding
        self._session: Session | None = None
        self._connection: Connection | None = None

    @property
    def lease_lost(self) -> bool:
        """See `vkjobs.handlers.Context`."""
        return self._holding.lost

    @property
    def session(self) -> Session:
        """See `vkjobs.handlers.Context`."""
        if self._session is None:
            self._connection = transaction(self._engine)
            self._connection.begin()
            # A handler that commits by itself commits a savepoint: the transaction ends with the settling.
            self._session = Session(bind=self._connection, join_transaction_mode="create_savepoint")
        return self._session

    @property
    def used_session(self) -> bool:
        """Whether there is something to commit with the settling."""
        return self._session is not None

    def commit_with(self, settle: Callable[[Connection], bool]) -> bool:
        """Commit the session's writes and the settling in one transaction; neither, if ``settle`` returns False."""
        assert self._session is not None
        assert self._connection is not None
        self._session.commit()
        if not settle(self._connection):
            return False
        self._connection.commit()
        for act in self._session.info.pop(AFTER_COMMIT, ()):
            act()
        return True

    def close(self) -> None:
        """Roll back what was not committed and give the connection back; a broken one is no news here."""
        for part in (self._session, self._connection):
            if part is not None:
                with suppress(SQLAlchemyError):
                    part.close()
        self._session = self._connection = None


@dataclass(frozen=True)
class Run:
    """One execution of a job: what its steps need of each other."""

    claim: Claim
    handler: Handler | None
    holding: Holding
    context: Execution
    by: str


@dataclass(frozen=True)
class Executor:
    """Runs jobs in this process.

    Attributes:
        settings: the settings in force.
        registry: the kinds that are known.
        engine: returns the process's engine.
        heartbeat: renews what runs here.
    """

    settings: Settings
    registry: Registry
    engine: Callable[[], Engine]
    heartbeat: Heartbeat

    def run(self, id: JobId, token: datetime, *, by: str, lease: float) -> Outcome:
        """Run the job that ``token`` leases, and settle it.

        Args:
            id: the job's id.
            token: the one that its message brought.
            by: names this execution in ``claimed_by``.
            lease: seconds that the running job may be silent.

        Raises:
            JobsLocked: the job was not started, and may soon be.
            DatabaseUnavailable: the job was not started; it is leased again when its lease has expired.
        """
        if self.heartbeat.holds(id):
            return Outcome(Verdict.MOVED_ON, "it runs here already")
        with SoftLimit() as limit:
            claim = self._claim(id, token, by, lease)
            if isinstance(claim, Outcome):
                return claim
            with self.heartbeat.hold(claim, lease) as holding:
                context = Execution(self.engine(), self.settings, holding)
                run = Run(claim, self.registry.get(claim.kind), holding, context, by)
                ended_by: BaseException | None = None
                try:
                    try:
                        call(run, limit)
                    except BaseException as error:  # noqa: BLE001 - SystemExit too ends the job, not the worker
                        ended_by = error
                    self.heartbeat.stop(holding)
                    return self.settle(run, ended_by)
                finally:
                    context.close()

    def _claim(self, id: JobId, token: datetime, by: str, lease: float) -> Claim | Outcome:
        id = str(id)  # a string literal is read as whatever type the column has; a number need not be comparable
        try:
            while True:
                claim = self.insist(
                    lambda conn: ledger.claim(conn, id, token, lease=lease, by=by),
                    recall=lambda conn: ledger.claimed(conn, id, by=by),
                    patience=self.settings.lease,
                )
                if claim is not None:
                    return claim
                early = self.insist(lambda conn: ledger.early_by(conn, id, token), patience=self.settings.lease)
                if early is None:
                    return Outcome(Verdict.MOVED_ON)
                if early > _EARLY_S:
                    self.insist(lambda conn: ledger.release(conn, [(id, token)]), patience=self.settings.lease)
                    return Outcome(Verdict.NOT_DUE, f"due in {early:.3f} s")
                time.sleep(max(0.0, early))
        except (DataError, ValueError):  # ValueError: psycopg2's, for what no text of Postgres can hold
            return Outcome(Verdict.MOVED_ON, "no job has such an id")
        except SQLAlchemyError as error:
            raise not_started(f"job {id} was", [id], error) from None

    def settle(self, run: Run, ended_by: BaseException | None) -> Outcome:
        """Settle a job whose renewal has stopped, by what ended it; None: its handler returned."""
        if ended_by is None:
            try:
                kept = self._settle_done(run)
            except Exception as error:  # noqa: BLE001
                ended_by = error  # the handler's own writes, or a trigger of the host's, stood against it
            else:
                return Outcome(Verdict.DONE) if kept else lease_lost(run)
        run.context.close()
        if issubclass(type(ended_by), Snooze):  # isinstance would ask the exception itself
            try:
                return self._snooze(run, cast("Snooze", ended_by))
            except DataError as error:
                ended_by = error  # beyond the end of Postgres' time
        return self._settle_failed(run, ended_by)

    def _settle_done(self, run: Run) -> bool:
        def settle(conn: Connection) -> bool:
            return ledger.settle_done(conn, run.claim.id, run.holding.token, run.holding.proposed)

        def settled(conn: Connection) -> bool | None:
            return ledger.settled_done(conn, run.claim.id, by=run.by) or None

        if not run.context.used_session:
            return self.insist(settle, recall=settled)
        try:
            return run.context.commit_with(settle)
        except DBAPIError as error:
            if not is_outage(error):
                raise
            # Whether the commit took effect is not known. If not, the writes are gone and the attempt has failed.
            if self.insist(settled):
                return True
            raise

    def _snooze(self, run: Run, snooze: Snooze) -> Outcome:
        id, holding = run.claim.id, run.holding
        until = snooze.until if isinstance(snooze.until, datetime) else snooze.until.total_seconds()
        if not self.insist(lambda conn: ledger.snooze(conn, id, holding.token, until, holding.proposed)):
            return lease_lost(run)
        emit(logging.INFO, "job snoozed", **_fields(run.claim), time=snooze)
        return Outcome(Verdict.SNOOZED, str(snooze))

    def _settle_failed(self, run: Run, error: BaseException) -> Outcome:
        failure = failure_of(error, run.claim.attempts, run.handler, self.settings)
        try:
            kept = self._fail(run, failure)
        except DataError:  # the database's encoding lacks a character of the error
            ascii_only = failure.error.encode("ascii", "backslashreplace").decode()
            kept = self._fail(run, failure._replace(error=ascii_only))
        if not kept:
            return lease_lost(run, error)
        headline = log_failure(run.claim, failure, error)
        if failure.final:
            return Outcome(Verdict.FAILED, headline)
        return Outcome(Verdict.RETRYING, f"in {failure.delay:g} s: {headline}")

    def _fail(self, run: Run, failure: Failure) -> bool:
        id, holding = run.claim.id, run.holding
        return self.insist(lambda conn: ledger.settle_failed(conn, id, holding.token, failure, holding.proposed))

    def insist(
        self,
        statement: Callable[[Connection], T],
        *,
        recall: Callable[[Connection], T | None] | None = None,
        patience: float = float("inf"),
    ) -> T:
        """Execute ``statement``, again and again while Postgres is away or the row locked, for ``patience`` seconds.

        ``recall`` is asked first on each further try: the statement may have taken effect and its answer been lost.
        """
        began = time.monotonic()
        seldom = Seldom(_LOG_EVERY_S)
        pause = 0.0
        while True:
            try:
                with self.engine().connect() as conn:
                    if pause and recall is not None and (answer := recall(conn)) is not None:
                        return answer
                    return statement(conn)
            except SQLAlchemyError as error:
                # A row that is locked for long keeps no slot from other jobs, unless its own has run.
                again = is_passing(error) if patience == float("inf") else is_outage(error)
                if not again or time.monotonic() - began > patience:
                    raise
                if seldom():
                    emit(logging.WARNING, "waiting for postgres", error=in_a_line(error))
                locked = is_locked(error)
            pause = _LOCK_PAUSE_S if locked else min(2 * pause or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            time.sleep(pause)


def not_started(which: str, ids: Sequence[JobId], error: SQLAlchemyError) -> DatabaseUnavailable:
    """Return what to raise where a claim was refused with ``error``; ``which`` begins its text."""
    text = f"{which} not started: {in_a_line(error)}"
    return JobsLocked(text, ids) if is_locked(error) else DatabaseUnavailable(text)


def failure_of(error: BaseException, attempts: int, handler: Handler | None, settings: Settings) -> Failure:
    """Return how a failed attempt of a job with ``attempts`` earlier ones leaves its row."""
    chosen = handler.policy if handler else None
    max_attempts = (chosen and chosen.max_attempts) or settings.max_attempts
    base = settings.backoff if chosen is None or chosen.backoff is None else chosen.backoff
    return Failure(
        final=issubclass(type(error), GiveUp) or policy.is_last(attempts, max_attempts),
        delay=policy.backoff(attempts, base, settings.backoff_cap),
        error=report.describe(error, settings.error_size),
    )


def log_failure(job: Claim | ledger.Lost, failure: Failure, error: BaseException) -> str:
    """Log a failed attempt, once; return the error's one line."""
    headline = report.headline(error)
    level = logging.ERROR if failure.final else logging.WARNING
    emit(
        level,
        "job failed",
        **{**_fields(job), "attempts": job.attempts + 1},
        final=failure.final,
        error=headline,
    )
    return headline


def lease_lost(run: Run, error: BaseException | None = None) -> Outcome:
    """Tell that a job went to somebody else, and that nothing of this execution is kept."""
    fields = _fields(run.claim) if error is None else {**_fields(run.claim), "error": report.headline(error)}
    emit(logging.WARNING, "lease lost", **fields)
    return Outcome(Verdict.LEASE_LOST)


def call(run: Run, limit: SoftLimit) -> None:
    """Call the handler; raise what it raises, and what stands in its way."""
    try:
        job = job_of(run.claim)
        if run.handler is None:
            raise MissingRefId(job) if job.ref_id is None else UnhandledKind(job)
        limit.let_in()
        run.handler.call(job, run.context)
    finally:
        limit.keep_out()


class SoftLimit:
    """The soft time limit, a signal whose handler raises: let into the job's handler, and kept out of all around it."""

    def __enter__(self) -> Self:
        self._handler = signal.getsignal(signal.SIGUSR1)
        self._inside = self._came = False
        self._installed = callable(self._handler) and threading.current_thread() is threading.main_thread()
        if self._installed:
            signal.signal(signal.SIGUSR1, self._on_signal)
        return self

    def let_in(self) -> None:
        """Let the limit raise from here on; at once, if it has come already."""
        self._inside = True
        if self._came:
            self._on_signal(signal.SIGUSR1, None)

    def keep_out(self) -> None:
        """Ignore the limit from here on."""
        self._inside = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        if self._inside and callable(self._handler):
            self._handler(number, frame)

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGUSR1, self._handler)


def job_of(claim: Claim) -> Job:
    """Return the job as its handler sees it. Raises ValueError if its payload is no JSON of Python's."""
    payload = None if claim.payload is None else json.loads(claim.payload)
    return Job(claim.id, claim.kind, claim.ref_id, claim.run_at, claim.attempts, payload)


def _fields(job: Claim | ledger.Lost) -> dict[str, object]:
    return {"job_id": job.id, "kind": job.kind, "ref_id": job.ref_id, "attempts": job.attempts}
