"""run_due: lease what is due, publish each row as a Celery task of its own. Knows no handler's work."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from celery import Celery
from kombu.exceptions import OperationalError
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from vkjobs import broker, ledger, policy
from vkjobs.database import in_a_line
from vkjobs.errors import BrokerUnavailable, DatabaseUnavailable, VkjobsError
from vkjobs.events import emit
from vkjobs.execute import failure_of, log_failure
from vkjobs.handlers import Registry
from vkjobs.ledger import JobId, Lease
from vkjobs.settings import Settings

JOB_QUEUE = "vkjobs"
TICK_QUEUE = "vkjobs.tick"
UNHANDLED = "vkjobs.unhandled"

_REF_ID_SHOWN = 200  # characters of ref_id that Flower gets to see
_FAILURES_IN_A_ROW = 3  # so many failed publishes mean that the queue or its broker is away, not that a row is odd


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
class _Message:
    """A lease on its way to a queue."""

    queue: str
    lease: Lease
    baton: bool


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
        try:
            with self.engine.connect() as conn:
                if housekeeping:
                    self._clean(conn)
                batches = [(queue, self._lease(conn, queue, again=housekeeping)) for queue in _queues(self.registry)]
        except SQLAlchemyError as error:
            raise DatabaseUnavailable(f"nothing was leased: {in_a_line(error)}") from None
        messages = [
            _Message(queue.name, lease, baton=number == policy.baton(len(leases), self.settings.batch))
            for queue, leases in batches
            for number, lease in enumerate(leases)
        ]
        unsent = self._publish(messages)
        if unsent:
            with self.engine.connect() as conn:
                ledger.release(conn, unsent)
            raise BrokerUnavailable(f"{len(unsent)} of {len(messages)} jobs were not published; they are free again")
        return len(messages)

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
            if ledger.settle_failed(conn, job.id, job.token, failure):
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

    def _publish(self, messages: Sequence[_Message]) -> list[tuple[JobId, datetime]]:
        """Publish the messages; return the leases of those that did not go out."""
        unsent: list[Lease] = []
        failures: Counter[str] = Counter()  # of each queue, in a row
        for message in messages:
            if failures[message.queue] < _FAILURES_IN_A_ROW:
                try:
                    self._send(message)
                except Exception as error:  # noqa: BLE001 - whatever a transport raises, the row must go on
                    fields = {"job_id": message.lease.id, "kind": message.lease.kind, "error": in_a_line(error)}
                    emit(logging.WARNING, "publish failed", **fields)
                    failures[message.queue] += _FAILURES_IN_A_ROW if isinstance(error, OperationalError) else 1
                else:
                    failures[message.queue] = 0
                    continue
            unsent.append(message.lease)
        return [(lease.id, lease.token) for lease in unsent]

    def _send(self, message: _Message) -> None:
        lease = message.lease
        known = self.registry.get(lease.kind) is not None
        kwargs: dict[str, object] = {"job_id": lease.id, "token": ledger.token_text(lease.token)}
        if message.baton:
            kwargs["baton"] = True
        leased_at = lease.token - timedelta(seconds=self.settings.lease + self.settings.horizon)
        broker.publish(
            self.app,
            task_name(lease.kind) if known else UNHANDLED,
            kwargs,
            queue=message.queue,
            routing_key=message.queue,
            eta=lease.run_at if lease.run_at > leased_at else None,
            argsrepr="()",
            kwargsrepr=_shown(lease, known=known),
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
