"""The jobs of one message of a kind with ``bulk``, from their claim to their settling. Knows no Celery.

One statement claims them and one settles those that are done. Whatever is not plain goes the way of a single job:
a handler that raises or writes through its session, a row that cannot be claimed just now.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection
from sqlalchemy.exc import DataError, DBAPIError, SQLAlchemyError

from vkjobs import ledger
from vkjobs.database import in_a_line, is_outage, is_passing
from vkjobs.errors import DatabaseUnavailable
from vkjobs.execute import Execution, Executor, Outcome, Run, SoftLimit, Verdict, call, job_of, lease_lost
from vkjobs.handlers import Handler
from vkjobs.heartbeat import Holding
from vkjobs.ledger import Claim, JobId

_SETTLE_EVERY_S = 1.0  # what is done is settled no later than this after, however long the others take


class _Position:
    """Which job of its message each process is at: written by children, read by the main process when one has died."""

    _SLOT = struct.Struct("qq")
    _SLOTS = 4096

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self._SLOT.size * self._SLOTS)  # shared with the children to come

    def set(self, number: int) -> None:
        """Say which job this process is at; -1 for none."""
        pid = os.getpid()
        self._SLOT.pack_into(self._memory, self._SLOT.size * (pid % self._SLOTS), pid, number)

    def of(self, pid: int) -> int | None:
        """Return which job the process was at, if any."""
        owner, number = self._SLOT.unpack_from(self._memory, self._SLOT.size * (pid % self._SLOTS))
        return number if owner == pid and number >= 0 else None


position = _Position()


class _Together:
    """The holdings of a list of jobs, as its one context needs them."""

    def __init__(self, holdings: Sequence[Holding]) -> None:
        self._holdings = holdings

    @property
    def lost(self) -> bool:
        return any(holding.lost for holding in self._holdings)


@dataclass(frozen=True)
class BulkExecutor:
    """Runs the jobs of one message in this process.

    Attributes:
        single: runs a single job.
        by: names the execution in ``claimed_by``.
        lease: seconds that a running job may be silent.
    """

    single: Executor
    by: str
    lease: float

    def run(self, leases: Sequence[tuple[JobId, datetime]]) -> list[Outcome]:
        """Run the jobs, by id and token, and settle each.

        Raises:
            DatabaseUnavailable: some were not started; they are leased again when their lease has expired.
        """
        numbers = {str(id): number for number, (id, _) in enumerate(leases)}
        claims = sorted(self._claim(leases), key=lambda claim: numbers[str(claim.id)])
        outcomes: list[Outcome] = []
        with SoftLimit() as limit, self.single.heartbeat.hold_all(claims, self.lease) as holdings:
            runs = [self._run_of(claim, holding) for claim, holding in zip(claims, holdings, strict=True)]
            try:
                handler = self._list_handler(claims)
                if handler is None:
                    outcomes += self._one_by_one(runs, numbers, limit)
                else:
                    outcomes += self._as_list(runs, handler, limit)
            finally:
                position.set(-1)
                for run in runs:
                    run.context.close()
        claimed = {str(claim.id) for claim in claims}
        for id, token in leases:
            if str(id) not in claimed:
                outcomes.append(self.single.run(id, token, by=self.by, lease=self.lease))
        return outcomes

    def _claim(self, leases: Sequence[tuple[JobId, datetime]]) -> list[Claim]:
        free = [(str(id), token) for id, token in leases if not self.single.heartbeat.holds(id)]
        try:
            return self.single.insist(
                lambda conn: ledger.claim_all(conn, free, lease=self.lease, by=self.by),
                recall=lambda conn: ledger.claimed_all(conn, free, by=self.by) or None,
                patience=self.single.settings.lease,
            )
        except (DataError, ValueError):
            return []  # one of the ids is none: one by one, only that one is refused
        except SQLAlchemyError as error:
            raise DatabaseUnavailable(f"{len(leases)} jobs were not started: {in_a_line(error)}") from None

    def _run_of(self, claim: Claim, holding: Holding) -> Run:
        context = Execution(self.single.engine(), self.single.settings, holding)
        return Run(claim, self.single.registry.get(claim.kind), holding, context, self.by)

    def _list_handler(self, claims: Sequence[Claim]) -> Handler | None:
        kinds = {claim.kind for claim in claims}
        handler = self.single.registry.get(kinds.pop()) if len(kinds) == 1 else None
        return handler if handler is not None and handler.policy.as_list else None

    def _one_by_one(self, runs: Sequence[Run], numbers: dict[str, int], limit: SoftLimit) -> list[Outcome]:
        outcomes: list[Outcome] = []
        done: list[Run] = []
        settled = time.monotonic()
        for run in runs:
            position.set(numbers[str(run.claim.id)])
            if run.holding.lost:
                outcomes.append(lease_lost(run))
                continue
            ended_by: BaseException | None = None
            try:
                call(run, limit)
            except BaseException as error:  # noqa: BLE001 - SystemExit too ends the job, not the worker
                ended_by = error
            if ended_by is None and not run.context.used_session:
                done.append(run)
            else:
                outcomes.append(self._settle(run, ended_by))
            if done and time.monotonic() - settled > _SETTLE_EVERY_S:
                outcomes += self._settle_done(done)
                done, settled = [], time.monotonic()
        position.set(-1)
        return outcomes + self._settle_done(done)

    def _as_list(self, runs: Sequence[Run], handler: Handler, limit: SoftLimit) -> list[Outcome]:
        holdings = [run.holding for run in runs]
        context = Execution(self.single.engine(), self.single.settings, _Together(holdings))
        try:
            jobs = [job_of(run.claim) for run in runs]
            try:
                limit.let_in()
                ends = handler.call_with_list(jobs, context)
            finally:
                limit.keep_out()
            done = [run for run in runs if run.claim.id not in ends]
            if not context.used_session or not done:
                context.close()
                outcomes = self._settle_done(done)
            else:
                outcomes = self._commit(context, done)
        except BaseException as error:  # noqa: BLE001
            context.close()
            return [self._settle(run, error) for run in runs]
        finally:
            context.close()
        return outcomes + [self._settle(run, ends[run.claim.id]) for run in runs if run.claim.id in ends]

    def _commit(self, context: Execution, done: Sequence[Run]) -> list[Outcome]:
        """Commit the session's writes and the settling of all jobs, or neither.

        Raises:
            Exception: the writes, or a trigger of the host's, stood against it.
        """
        self.single.heartbeat.stop(*(run.holding for run in done))
        held = _held(done)
        try:
            kept = context.commit_with(lambda conn: len(ledger.settle_all_done(conn, held)) == len(held))
        except DBAPIError as error:
            if not is_outage(error):
                raise
            if not self.single.insist(lambda conn: ledger.all_settled_done(conn, held, by=self.by)):
                raise
            kept = True
        context.close()
        if kept:
            return [Outcome(Verdict.DONE) for _ in done]
        # One whose lease is lost takes the writes of all with it: the others are done again, and cost nothing.
        still = self.single.insist(lambda conn: ledger.still_held(conn, held))
        return [self._put_back(run) if run.claim.id in still else lease_lost(run) for run in done]

    def _put_back(self, run: Run) -> Outcome:
        id, holding, due = run.claim.id, run.holding, run.claim.run_at
        if not self.single.insist(lambda conn: ledger.snooze(conn, id, holding.token, due, holding.proposed)):
            return lease_lost(run)
        return Outcome(Verdict.SNOOZED, "another job of its message has lost its lease")

    def _settle(self, run: Run, ended_by: BaseException | None) -> Outcome:
        self.single.heartbeat.stop(run.holding)
        try:
            return self.single.settle(run, ended_by)
        finally:
            run.context.close()

    def _settle_done(self, done: Sequence[Run]) -> list[Outcome]:
        if not done:
            return []
        self.single.heartbeat.stop(*(run.holding for run in done))
        held = _held(done)

        def settled(conn: Connection) -> set[JobId] | None:
            return ledger.all_settled_done(conn, held, by=self.by) or None

        try:
            kept = self.single.insist(lambda conn: ledger.settle_all_done(conn, held), recall=settled)
        except SQLAlchemyError as error:
            if is_passing(error):
                raise
            return [self.single.settle(run, None) for run in done]  # such as a host's trigger, against one of them
        return [Outcome(Verdict.DONE) if run.claim.id in kept else lease_lost(run) for run in done]


def _held(runs: Sequence[Run]) -> list[tuple[JobId, datetime, datetime]]:
    return [(run.claim.id, run.holding.token, run.holding.proposed or run.holding.token) for run in runs]
