"""run_due: lease what is due, publish each row as a Celery task of its own. Knows no handler's work."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from celery import Celery
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from vkjobs import broker, ledger, policy
from vkjobs.database import available, in_a_line, is_outage
from vkjobs.errors import BrokerUnavailable, VkjobsError
from vkjobs.events import emit
from vkjobs.execute import failure_of, log_failure
from vkjobs.handlers import Registry
from vkjobs.ledger import Lease
from vkjobs.settings import Settings

JOB_QUEUE = "vkjobs"
TICK_QUEUE = "vkjobs.tick"
UNHANDLED = "vkjobs.unhandled"

_REF_ID_SHOWN = 200  # characters of ref_id that Flower gets to see
_BROKER_PATIENCE_S = 5.0


class WorkerLost(VkjobsError):
    """The worker that ran the job died or was cut off; what it was doing is unknown."""


def task_name(kind: str) -> str:
    """Return the name of the Celery task that runs jobs of ``kind``."""
    return f"vkjobs.{kind}"


@dataclass(frozen=True)
class _Queue:
    """A queue and its kinds: those listed, or all that are listed for no other queue."""

    name: str
    kinds: Sequence[str]
    listed: bool


@dataclass(frozen=True)
class Dispatcher:
    """Leases due jobs and publishes them.

    Attributes:
        app: publishes.
        engine: the database.
        settings: the settings in force.
        registry: the kinds known here; all others travel as `vkjobs.unhandled`.
    """

    app: Celery
    engine: Engine
    settings: Settings
    registry: Registry

    def run_due(self, *, housekeeping: bool) -> int:
        """Lease one batch of each queue's due jobs and publish them; return how many were published.

        Args:
            housekeeping: also see to what went wrong: expired leases, dead workers. A baton's run leaves that to ticks.

        Raises:
            DatabaseUnavailable: nothing was leased.
            BrokerUnavailable: some were not published; these are free again.
        """
        if housekeeping:
            with available("nothing was leased"), self.engine.connect() as conn:
                self._clean(conn)
        began = time.monotonic()
        published = refused = 0
        for queue in _queues(self.registry):
            with available(f"nothing more was leased after {published} jobs"), self.engine.connect() as conn:
                leases = self._lease(conn, queue, again=housekeeping)
            unsent = self._publish(queue.name, leases)
            published += len(leases) - len(unsent)
            refused += len(unsent)
            if unsent:
                with available(f"{len(unsent)} jobs wait for their lease to expire"), self.engine.connect() as conn:
                    ledger.release(conn, [(lease.id, lease.token) for lease in unsent])
            if unsent and time.monotonic() - began > _BROKER_PATIENCE_S:
                break  # it does not answer: the other queues would only wait too
        if refused:
            raise BrokerUnavailable(f"{refused} of {published + refused} jobs were not published; they are free again")
        return published

    def _clean(self, conn: Connection) -> None:
        chosen = self.settings
        self._reap(conn)
        ledger.take_over(conn, grace=chosen.foreign_grace)
        ledger.free_again(conn, lease=chosen.lease + chosen.horizon, horizon=chosen.horizon)

    def _reap(self, conn: Connection) -> None:
        """Count a failed attempt of each job whose worker let its lease expire."""
        for job in ledger.lost(conn, lease=self.settings.lease):
            error = WorkerLost(f"its lease expired; last held by {job.claimed_by}")
            failure = failure_of(error, job.attempts, self.registry.get(job.kind), self.settings)
            # The token read is the fence: if the worker lives after all and has renewed, this touches nothing.
            try:
                reaped = ledger.settle_failed(conn, job.id, job.token, failure)
            except SQLAlchemyError as refusal:
                if is_outage(refusal):
                    raise
                # Such as a trigger of the host's. The others are to go on.
                emit(logging.ERROR, "job cannot be reaped", job_id=job.id, kind=job.kind, error=in_a_line(refusal))
                continue
            if reaped:
                log_failure(job, failure, error)

    def _lease(self, conn: Connection, queue: _Queue, *, again: bool) -> list[Lease]:
        chosen = self.settings
        duration = chosen.lease + chosen.horizon  # a job may wait for its time all the horizon long
        leases: list[Lease] = []
        if again and (room := min(chosen.batch, chosen.window - broker.depth(self.app, queue.name))) > 0:
            leases = ledger.lease_again(
                conn, kinds=queue.kinds, listed=queue.listed, room=room, lease=duration, horizon=chosen.horizon
            )
        if (room := chosen.batch - len(leases)) > 0:
            leases += ledger.lease(
                conn,
                kinds=queue.kinds,
                listed=queue.listed,
                batch=room,
                window=chosen.window,
                lease=duration,
                horizon=chosen.horizon,
            )
        return leases

    def _publish(self, queue: str, leases: Sequence[Lease]) -> list[Lease]:
        """Publish the leases; return those that did not go out."""
        carrier = policy.baton(len(leases), self.settings.batch)
        messages = [self._message(queue, lease, baton=number == carrier) for number, lease in enumerate(leases)]
        failed = broker.publish_all(self.app, messages)
        told: set[str] = set()
        for number, error in failed.items():
            if (line := in_a_line(error)) not in told:  # what is away is away for all
                told.add(line)
                job = leases[number]
                emit(logging.WARNING, "publish failed", job_id=job.id, kind=job.kind, unsent=len(failed), error=line)
        return [leases[number] for number in failed]

    def _message(self, queue: str, lease: Lease, *, baton: bool) -> broker.Message:
        known = self.registry.get(lease.kind) is not None
        kwargs: dict[str, object] = {"job_id": lease.id, "token": ledger.token_text(lease.token)}
        if baton:
            kwargs["baton"] = True
        leased_at = lease.token - timedelta(seconds=self.settings.lease + self.settings.horizon)
        return broker.Message(
            queue,
            task_name(lease.kind) if known else UNHANDLED,
            kwargs,
            _shown(lease, known=known),
            lease.run_at if lease.run_at > leased_at else None,
        )


def _shown(lease: Lease, *, known: bool) -> str:
    """Return the job in the form in which Flower shows a task's arguments."""
    shown = {"job_id": lease.id, "attempt": lease.attempts + 1, "ref_id": (lease.ref_id or "")[:_REF_ID_SHOWN] or None}
    return repr(shown if known else {**shown, "kind": lease.kind[:_REF_ID_SHOWN]})


def queue_names(registry: Registry) -> list[str]:
    """Return the names of all queues that a worker must read for the kinds known here."""
    return [TICK_QUEUE, *(queue.name for queue in _queues(registry))]


def _queues(registry: Registry) -> list[_Queue]:
    own: dict[str, list[str]] = {}
    for handler in registry:
        if handler.policy.queue not in (None, JOB_QUEUE):
            own.setdefault(str(handler.policy.queue), []).append(handler.kind)
    elsewhere = [kind for kinds in own.values() for kind in kinds]
    return [
        _Queue(JOB_QUEUE, elsewhere, listed=False),
        *(_Queue(name, kinds, listed=True) for name, kinds in own.items()),
    ]
