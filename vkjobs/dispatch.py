"""run_due: lease what is due, publish each row as a Celery task of its own. Knows no handler's work."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from celery import Celery
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from vkjobs import ledger, policy
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
_FAILURES_IN_A_ROW = 3  # so many failed publishes mean that the broker is away, not that a row is odd
_RETRY_POLICY = {"max_retries": 2, "interval_start": 0, "interval_step": 0.2, "interval_max": 0.5}


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


def run_due(app: Celery, engine: Engine, settings: Settings, registry: Registry, *, housekeeping: bool) -> int:
    """Lease one batch of each queue's due jobs and publish them.

    Args:
        app: publishes.
        engine: the database.
        settings: the settings in force.
        registry: the kinds known here.
        housekeeping: also see to what went wrong: expired leases, dead workers. A baton's run leaves that to beat's.

    Returns:
        The number of jobs leased and published.

    Raises:
        DatabaseUnavailable: nothing was leased.
        BrokerUnavailable: some were not published; these are free again.
    """
    try:
        with engine.connect() as conn:
            if housekeeping:
                reap(conn, settings, registry)
                ledger.take_over(conn, grace=settings.foreign_grace)
                ledger.free_again(conn, lease=settings.lease + settings.horizon, horizon=settings.horizon)
            batches = [
                (queue, _lease(app, conn, settings, queue, again=housekeeping)) for queue in _queues(registry)
            ]
    except SQLAlchemyError as error:
        raise DatabaseUnavailable(f"nothing was leased: {in_a_line(error)}") from None
    published = 0
    for queue, leases in batches:
        sent, unsent = _publish(app, settings, registry, queue, leases)
        published += sent
        if unsent:
            with engine.connect() as conn:
                ledger.release(conn, unsent)
            if len(unsent) >= _FAILURES_IN_A_ROW:
                raise BrokerUnavailable(f"{len(unsent)} of {len(leases)} jobs could not be published; they are free again")
    return published


def reap(conn: Connection, settings: Settings, registry: Registry) -> int:
    """Count a failed attempt of each job whose worker let its lease expire; return how many."""
    reaped = 0
    for job in ledger.lost(conn, lease=settings.lease):
        error = WorkerLost(f"its lease expired; last held by {job.claimed_by}")
        failure = failure_of(error, job.attempts, registry.get(job.kind), settings)
        # The token read is the fence: if the worker lives after all and has renewed, this touches nothing.
        if ledger.settle_failed(conn, job.id, job.token, failure):
            log_failure(job, failure, error)
            reaped += 1
    return reaped


def _queues(registry: Registry) -> list[_Queue]:
    own: dict[str, list[str]] = {}
    for handler in registry:
        if handler.policy.queue not in (None, JOB_QUEUE):
            own.setdefault(str(handler.policy.queue), []).append(handler.kind)
    elsewhere = [kind for kinds in own.values() for kind in kinds]
    return [_Queue(JOB_QUEUE, elsewhere, listed=False), *(_Queue(name, kinds, listed=True) for name, kinds in own.items())]


def _lease(app: Celery, conn: Connection, settings: Settings, queue: _Queue, *, again: bool) -> list[Lease]:
    duration = settings.lease + settings.horizon  # a job may wait for its time all the horizon long
    leases: list[Lease] = []
    if again and (room := min(settings.batch, settings.window - _depth(app, queue.name))) > 0:
        leases = ledger.lease_again(
            conn, kinds=queue.kinds, listed=queue.listed, room=room, lease=duration, horizon=settings.horizon
        )
    if len(leases) < settings.batch:
        leases += ledger.lease(
            conn, kinds=queue.kinds, listed=queue.listed, batch=settings.batch - len(leases),
            window=settings.window, lease=duration, horizon=settings.horizon,
        )  # fmt: skip
    return leases


def _depth(app: Celery, queue: str) -> int:
    """Return how many messages wait in ``queue``; none if it does not exist or the broker does not say."""
    try:
        with app.connection_for_write() as connection:
            channel = connection.default_channel
            return int(channel.queue_declare(queue=queue, passive=True).message_count)
    except Exception:  # noqa: BLE001 - each transport has its own exceptions for a missing queue
        return 0


def _publish(
    app: Celery, settings: Settings, registry: Registry, queue: _Queue, leases: Sequence[Lease]
) -> tuple[int, list[tuple[JobId, datetime]]]:
    """Publish a message for each lease; return how many went out, and the leases of those that did not."""
    unsent: list[tuple[JobId, datetime]] = []
    carrier = policy.baton(len(leases))
    in_a_row = 0
    with app.producer_or_acquire() as producer:
        for number, lease in enumerate(leases):
            if in_a_row == _FAILURES_IN_A_ROW:
                unsent.append((lease.id, lease.token))
                continue
            try:
                _send(app, producer, settings, registry, queue.name, lease, baton=number == carrier)
            except Exception as error:  # noqa: BLE001 - whatever a transport raises, the row must not wait for its lease
                in_a_row += 1
                unsent.append((lease.id, lease.token))
                emit(logging.WARNING, "publish failed", job_id=lease.id, kind=lease.kind, error=in_a_line(error))
            else:
                in_a_row = 0
    return len(leases) - len(unsent), unsent


def _send(
    app: Celery, producer: object, settings: Settings, registry: Registry, queue: str, lease: Lease, *, baton: bool
) -> None:
    known = registry.get(lease.kind) is not None
    message: dict[str, object] = {"job_id": lease.id, "token": ledger.token_text(lease.token)}
    if baton:
        message["baton"] = True
    shown = {"job_id": lease.id, "attempt": lease.attempts + 1, "ref_id": (lease.ref_id or "")[:_REF_ID_SHOWN] or None}
    if not known:
        shown["kind"] = lease.kind[:_REF_ID_SHOWN]
    leased_at = lease.token - timedelta(seconds=settings.lease + settings.horizon)
    app.tasks[task_name(lease.kind) if known else UNHANDLED].apply_async(
        kwargs=message,
        queue=queue,
        eta=lease.run_at if lease.run_at > leased_at else None,
        producer=producer,
        argsrepr="()",
        kwargsrepr=repr(shown),
        retry=True,
        retry_policy=_RETRY_POLICY,
    )


def queue_names(registry: Registry) -> Iterable[str]:
    """Return the names of all queues that a worker must read for the kinds known here."""
    return [TICK_QUEUE, *(queue.name for queue in _queues(registry))]
