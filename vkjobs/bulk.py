"""The jobs of one message of a kind with ``bulk``, from their claim to their settling. Knows no Celery.

One statement claims them and one settles those that are done. Whatever is not plain goes the way of a single job:
a handler that raises or writes through its session, a row that cannot be claimed just now.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime

from sqlalchemy.exc import DataError, DBAPIError, SQLAlchemyError

from vkjobs import ledger
from vkjobs.database import in_a_line, is_outage
from vkjobs.errors import DatabaseUnavailable, JobsLocked
from vkjobs.events import emit
from vkjobs.execute import Execution, Executor, Outcome, Run, SoftLimit, Verdict, call, job_of, lease_lost, not_started
from vkjobs.handlers import Handler, Job
from vkjobs.heartbeat import Holding
from vkjobs.ledger import Claim, JobId

_SETTLE_EVERY_S = 1.0  # what is done is settled no later than this after, however long the others take
_LOCKED_IN_A_MESSAGE = 3  # that are waited for: many more would keep their slot for long
NONE, ALL = -1, -2


class _Position:
    """Which job of its message each process is at: written by children, read by the main process when one has died."""

    _SLOT = struct.Struct("qq")
    _SLOTS = 4096

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self._SLOT.size * self._SLOTS)  # shared with the children to come

    def set(self, number: int) -> None:
        """Say which job this process is at; `NONE`, or `ALL` of a list."""
        pid = os.getpid()
        self._SLOT.pack_into(self._memory, self._SLOT.size * (pid % self._SLOTS), pid, number)

    def is_at(self, pid: int, number: int) -> bool:
        """Tell whether the process was at the job."""
        owner, at = self._SLOT.unpack_from(self._memory, self._SLOT.size * (pid % self._SLOTS))
        return owner == pid and at in (number, ALL)


position = _Position()


class _Together:
    """The holdings of a list of jobs, as its one context needs them."""

    def __init__(self, holdings: Sequence[Holding]) -> None:
        self._holdings = holdings

    @property
    def lost(self) -> bool:
        return any(holding.lost for holding in self._holdings)


class _Meanwhile:
    """A thread of the process that settles, every second, what is done in messages that still run."""

    def __init__(self) -> None:
        self._running: set[BulkExecutor] = set()
        self._thread: threading.Thread | None = None

    @contextmanager
    def __call__(self, executor: BulkExecutor) -> Iterator[None]:
        """Include the executor until the block ends."""
        self._running.add(executor)
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="vkjobs-settling", daemon=True)
            with suppress(RuntimeError):  # the system has no thread to give: all is settled in the end
                thread.start()
                self._thread = thread
        try:
            yield
        finally:
            self._running.discard(executor)

    def _run(self) -> None:
        while True:
            time.sleep(_SETTLE_EVERY_S)
            for executor in list(self._running):
                executor.settle_meanwhile()


_meanwhile = _Meanwhile()


class BulkExecutor:
    """Runs the jobs of one message in this process.

    Args:
        single: runs a single job.
        by: names the execution in ``claimed_by``.
        lease: seconds that a running job may be silent.
    """

    def __init__(self, single: Executor, by: str, lease: float) -> None:
        self._single = single
        self._by = by
        self._lease = lease
        self._numbers: dict[str, int] = {}
        self._outcomes: list[Outcome] = []
        self._errors: list[Exception] = []
        self._locked: list[JobId] = []
        self._done: list[Run] = []  # and not yet settled
        self._settling = threading.Lock()
        self._ended = False

    def run(self, leases: Sequence[tuple[JobId, datetime]]) -> list[Outcome]:
        """Run the jobs, by id and token, and settle each; return what became of them, in any order.

        Raises:
            JobsLocked: some were not started, and may soon be.
            DatabaseUnavailable: some were not started; they are leased again when their lease has expired.
            Exception: some could not be settled; all others are.
        """
        self._numbers = {str(id): number for number, (id, _) in enumerate(leases)}
        claims = sorted(self._claim(leases), key=self._number)
        try:
            with SoftLimit() as limit, self._single.heartbeat.hold_all(claims, self._lease) as holdings:
                runs = [self._run_of(claim, holding) for claim, holding in zip(claims, holdings, strict=True)]
                handler = self._list_handler(claims)
                if handler is None:
                    self._one_by_one(runs, limit)
                else:
                    self._as_list(runs, handler, limit)
                self._settle_the_rest()
            claimed = {str(claim.id) for claim in claims}
            self._run_singly([lease for lease in leases if str(lease[0]) not in claimed])
        finally:
            position.set(NONE)
        if self._locked:
            text = f"{len(self._locked)} of {len(leases)} jobs were not started: somebody has locked them"
            raise JobsLocked(text, self._locked) from next(iter(self._errors), None)
        for error in self._errors:
            raise error
        return self._outcomes

    def _number(self, claim: Claim) -> int:
        return self._numbers.get(str(claim.id), NONE)  # none: a forged message may write an id in another way

    def _claim(self, leases: Sequence[tuple[JobId, datetime]]) -> list[Claim]:
        free = [(str(id), token) for id, token in leases if not self._single.heartbeat.holds(id)]
        try:
            return self._single.insist(
                lambda conn: ledger.claim_all(conn, free, lease=self._lease, by=self._by),
                recall=lambda conn: ledger.claimed_all(conn, free, by=self._by) or None,
                patience=self._single.settings.lease,
            )
        except (DataError, ValueError):
            return []  # one of the ids is none: one by one, only that one is refused
        except SQLAlchemyError as error:
            raise not_started(f"{len(leases)} jobs were", [id for id, _ in leases], error) from None

    def _run_of(self, claim: Claim, holding: Holding) -> Run:
        context = Execution(self._single.engine(), self._single.settings, holding)
        return Run(claim, self._single.registry.get(claim.kind), holding, context, self._by)

    def _list_handler(self, claims: Sequence[Claim]) -> Handler | None:
        kinds = {claim.kind for claim in claims}
        handler = self._single.registry.get(kinds.pop()) if len(kinds) == 1 else None
        return handler if handler is not None and handler.policy.as_list else None

    def _run_singly(self, leases: Iterable[tuple[JobId, datetime]]) -> None:
        """Run those that could not be claimed with the others: one that is locked or not yet due may be by now."""
        began = time.monotonic()
        for id, token in leases:
            if len(self._locked) >= _LOCKED_IN_A_MESSAGE:
                self._locked.append(id)
                continue
            position.set(self._numbers[str(id)])
            try:
                self._outcomes.append(self._single.run(id, token, by=self._by, lease=self._lease))
            except JobsLocked:
                self._locked.append(id)
            except DatabaseUnavailable as error:
                self._errors.append(error)
                if time.monotonic() - began > self._single.settings.lease:
                    return  # their leases have expired
            except Exception as error:  # noqa: BLE001
                self._errors.append(error)

    def _one_by_one(self, runs: Sequence[Run], limit: SoftLimit) -> None:
        with _meanwhile(self):
            for run in runs:
                position.set(self._number(run.claim))
                if run.holding.lost:
                    self._outcomes.append(lease_lost(run))
                    continue
                ended_by: BaseException | None = None
                try:
                    call(run, limit)
                except BaseException as error:  # noqa: BLE001 - SystemExit too ends the job, not the worker
                    ended_by = error
                if ended_by is None and not run.context.used_session:
                    self._done.append(run)
                else:
                    self._settle(run, ended_by)
            position.set(NONE)
        with self._settling:  # what has begun to settle them ends first
            self._ended = True

    def _as_list(self, runs: Sequence[Run], handler: Handler, limit: SoftLimit) -> None:
        context = Execution(self._single.engine(), self._single.settings, _Together([run.holding for run in runs]))
        jobs: list[Job] = []
        ends: dict[JobId, BaseException] = {}
        for run in runs:
            try:
                jobs.append(job_of(run.claim))
            except Exception as error:  # noqa: BLE001
                ends[run.claim.id] = error
        position.set(ALL)
        if jobs:
            try:
                limit.let_in()
                ends |= handler.call_with_list(jobs, context)
            except BaseException as error:  # noqa: BLE001
                ends |= {job.id: error for job in jobs}
            finally:
                limit.keep_out()
        done = [run for run in runs if run.claim.id not in ends]
        if done and context.used_session:
            try:
                self._commit(context, done)
            except Exception as error:  # noqa: BLE001 - the writes, or a trigger of the host's, stood against it
                ends |= {run.claim.id: error for run in done}
        else:
            self._done += done
        context.close()
        self._settle_done()  # the rows of the others may be locked for long
        for run in runs:
            if run.claim.id in ends:
                self._settle(run, ends[run.claim.id])

    def _commit(self, context: Execution, done: Sequence[Run]) -> None:
        """Commit the session's writes and the settling of all jobs, or neither.

        Raises:
            Exception: the commit has failed.
        """
        self._single.heartbeat.stop(*(run.holding for run in done))
        held = _held(done)
        try:
            kept = context.commit_with(lambda conn: len(ledger.settle_all_done(conn, held)) == len(held))
        except DBAPIError as error:
            if not is_outage(error):
                raise
            if not self._single.insist(lambda conn: ledger.all_settled_done(conn, held, by=self._by)):
                raise
            kept = True
        context.close()
        if kept:
            self._outcomes += [Outcome(Verdict.DONE)] * len(done)
            return
        # One whose lease is lost takes the writes of all with it: the others are done again, and cost nothing.
        for run in done:
            self._put_back(run)

    def _put_back(self, run: Run) -> None:
        if self._single.insist(lambda conn: ledger.give_back(conn, run.claim.id, by=self._by)):
            self._outcomes.append(Outcome(Verdict.SNOOZED, "another job of its message has lost its lease"))
        else:
            self._outcomes.append(lease_lost(run))

    def _settle(self, run: Run, ended_by: BaseException | None) -> None:
        self._single.heartbeat.stop(run.holding)
        try:
            self._outcomes.append(self._single.settle(run, ended_by))
        except Exception as error:  # noqa: BLE001 - the others are to go on
            emit(
                logging.ERROR, "job cannot be settled", job_id=run.claim.id, kind=run.claim.kind, error=in_a_line(error)
            )
            self._errors.append(error)
        finally:
            run.context.close()

    def settle_meanwhile(self) -> None:
        """Settle what is done while others still run."""
        with self._settling:
            if not self._ended:
                self._settle_done()

    def _settle_done(self) -> None:
        """Settle what is done, but for rows that somebody has locked."""
        done = list(self._done)
        if not done:
            return
        del self._done[: len(done)]  # another may have been added
        self._single.heartbeat.stop(*(run.holding for run in done))
        held = _held(done)
        try:
            kept = self._single.insist(
                lambda conn: ledger.settle_all_done(conn, held),
                recall=lambda conn: ledger.all_settled_done(conn, held, by=self._by) or None,
            )
            left = [run for run in done if run.claim.id not in kept]
            still = self._single.insist(lambda conn: ledger.still_held(conn, _held(left))) if left else set()
        except Exception:  # noqa: BLE001
            self._single.heartbeat.resume(*(run.holding for run in done))
            for run in done:  # such as a host's trigger, against one of them
                self._settle(run, None)
            return
        self._outcomes += [Outcome(Verdict.DONE)] * len(kept)
        locked = [run for run in left if run.claim.id in still]
        self._outcomes += [lease_lost(run) for run in left if run.claim.id not in still]
        self._single.heartbeat.resume(*(run.holding for run in locked))
        self._done += locked

    def _settle_the_rest(self) -> None:
        self._settle_done()
        while self._done:
            self._settle(self._done.pop(0), None)  # it waits in line for the lock
            self._settle_done()


def _held(runs: Iterable[Run]) -> list[tuple[JobId, datetime, datetime]]:
    return [(run.claim.id, run.holding.token, run.holding.proposed or run.holding.token) for run in runs]
