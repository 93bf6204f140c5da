"""run_due: lease what is due, publish each row as a Celery task of its own. Knows no handler's work."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple, Self

from celery import Celery
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from vkjobs import broker, ledger, policy
from vkjobs.database import available, in_a_line, is_outage
from vkjobs.errors import BrokerUnavailable, VkjobsError
from vkjobs.events import Seldom, emit
from vkjobs.execute import failure_of, log_failure
from vkjobs.handlers import Registry
from vkjobs.ledger import JobId, Lease
from vkjobs.settings import Settings

JOB_QUEUE = "vkjobs"
TICK_QUEUE = "vkjobs.tick"
UNHANDLED = "vkjobs.unhandled"

_MOST_ROWS = 2000  # that one statement leases
_REF_ID_SHOWN = 200  # characters of ref_id that Flower gets to see
_BROKER_PATIENCE_S = 5.0
_CLOCK_STEP_S = 3600.0  # a lease that was given before the database's clock was set back ends by itself

_stuck_is_told = Seldom(30.0)
_unpruned_is_told = Seldom(30.0)


class WorkerLost(VkjobsError):
    """The worker that ran the job died or was cut off; what it was doing is unknown."""


def task_name(kind: str) -> str:
    """Return the name of the Celery task that runs jobs of ``kind``."""
    return f"vkjobs.{kind}"


class _Lane(NamedTuple):
    """Jobs of a queue that are leased together: of the kinds listed, or of all that are listed for no other lane.

    Attributes:
        queue: the queue.
        kinds: names of kinds.
        listed: what ``kinds`` means.
        bulk: most jobs that one message carries.
    """

    queue: str
    kinds: Sequence[str]
    listed: bool
    bulk: int = 1

    def first(self, settings: Settings) -> int:
        """Return how many jobs that are due a tick lets wait."""
        return max(self.bulk, min(policy.FIRST_BATCH, settings.batch))

    def batch(self, settings: Settings) -> int:
        """Return how many jobs a baton fetches at most."""
        return max(settings.batch, min(settings.batch * self.bulk, _MOST_ROWS))

    def window(self, settings: Settings) -> int:
        """Return how many leased jobs may wait."""
        return settings.window * self.bulk


_MOMENTS = ("token", "after", "ready")


class Baton(NamedTuple):
    """What a batch hands on to the next one of its queue, as JSON in one of its messages.

    Attributes:
        queue: the queue.
        batch: how many jobs the batch was to have.
        kinds: those that it had. Others are found by ticks.
        token: that of the batch.
        after: nothing older is left but what ticks find.
        ready: since when the message that carries the baton could be started, by the database's clock.
    """

    queue: str
    batch: int
    kinds: list[str]
    token: datetime
    after: datetime
    ready: datetime

    def to_json(self) -> dict[str, object]:
        """Return it in the form that `read` reads."""
        return {
            **self._asdict(),
            **{name: ledger.token_text(getattr(self, name)) for name in _MOMENTS},
        }

    @classmethod
    def read(cls, value: object) -> Self | None:
        """Return the baton that a message brought; None if it is none."""
        if not isinstance(value, dict):
            return None
        try:
            moments = {
                name: datetime.fromisoformat(value[name]).astimezone(UTC) for name in ("token", "after", "ready")
            }
            found = cls(**{**value, **moments})
        except (KeyError, OverflowError, TypeError, ValueError):
            return None
        fits = isinstance(found.queue, str) and isinstance(found.batch, int) and isinstance(found.kinds, list)
        return found if fits and all(isinstance(kind, str) for kind in found.kinds) else None


class _Batch(NamedTuple):
    """What one lease took, and how many jobs it was to take."""

    leases: list[Lease]
    wanted: int


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
        """Lease what is due and what soon will be, of each queue, and publish it; return how many were published.

        Of what is due, a queue is only filled up a little: batons fetch more as fast as it is started.

        Args:
            housekeeping: also see to what went wrong: expired leases, dead workers.

        Raises:
            DatabaseUnavailable: nothing was leased.
            BrokerUnavailable: some were not published; these are free again.
        """
        if housekeeping:
            with available("nothing was leased"), self.engine.connect() as conn:
                self._clean(conn)
        began = time.monotonic()
        published = refused = 0
        for lane in _lanes(self.registry):
            with available(f"nothing more was leased after {published} jobs"), self.engine.connect() as conn:
                batches = self._fill_up(conn, lane) if housekeeping else self._add(conn, lane)
            sent, unsent = self._publish(lane, batches)
            published += sent
            refused += unsent
            if unsent and time.monotonic() - began > _BROKER_PATIENCE_S:
                break  # it does not answer: the other queues would only wait too
        return _told(published, refused)

    def take(self, baton: Baton) -> int:
        """Lease the next batch after the one that ``baton`` comes from, and publish it; return how many were published.

        Raises:
            DatabaseUnavailable: nothing was leased.
            BrokerUnavailable: some were not published; these are free again.
        """
        lane = next((lane for lane in _lanes(self.registry) if _is_of(baton, lane)), None)
        if lane is None:
            return 0  # a deploy has taken its kinds to another queue
        with available("nothing was leased"), self.engine.connect() as conn:
            batches = self._go_on(conn, lane, baton)
        return _told(*self._publish(lane, batches))

    def _clean(self, conn: Connection) -> None:
        chosen = self.settings
        self._reap(conn)
        for mend in (
            partial(ledger.take_over, grace=chosen.foreign_grace),
            partial(ledger.free_again, lease=self._duration, horizon=chosen.horizon),
        ):
            try:
                mend(conn)
            except SQLAlchemyError as refusal:
                if is_outage(refusal):
                    raise
                emit(logging.ERROR, "jobs cannot be freed", error=in_a_line(refusal))
        if chosen.keep_done is not None:
            self._prune(conn, chosen.keep_done)
        longest = max([chosen.lease, *(handler.lease(chosen) for handler in self.registry)])
        if (stuck := ledger.stuck(conn, lease=longest + _CLOCK_STEP_S)) and _stuck_is_told():
            emit(
                logging.WARNING, "stuck", jobs=stuck, reason="running, with a lease further off than any that is given"
            )

    def _prune(self, conn: Connection, keep: float) -> None:
        try:
            ledger.prune(conn, keep=keep)
        except SQLAlchemyError as refusal:
            if is_outage(refusal):
                raise
            if _unpruned_is_told():
                emit(logging.WARNING, "done jobs cannot be deleted", error=in_a_line(refusal))

    def _reap(self, conn: Connection) -> None:
        """Count a failed attempt of each job whose worker let its lease expire."""
        for job in ledger.lost(conn, lease=self.settings.lease):
            error = WorkerLost(f"its lease expired; last held by {job.claimed_by}")
            handler = self.registry.get(job.kind)
            failure = failure_of(error, job.attempts, handler, self.settings)
            # Which of a message's jobs was executed nobody knows: each is tried alone before an attempt counts.
            among_others = handler is not None and (handler.policy.bulk or 1) > 1 and not job.suspect
            # The token read is the fence: if the worker lives after all and has renewed, this touches nothing.
            try:
                if among_others:
                    if ledger.give_back(conn, job.id, by=job.claimed_by, token=job.token, error=failure.error):
                        emit(logging.WARNING, "job put back", job_id=job.id, kind=job.kind, error=str(error))
                    continue
                reaped = ledger.settle_failed(conn, job.id, job.token, failure)
            except SQLAlchemyError as refusal:
                if is_outage(refusal):
                    raise
                # Such as a trigger of the host's. The others are to go on.
                emit(logging.ERROR, "job cannot be reaped", job_id=job.id, kind=job.kind, error=in_a_line(refusal))
                continue
            if reaped:
                log_failure(job, failure, error)

    def _fill_up(self, conn: Connection, lane: _Lane) -> list[_Batch]:
        chosen = self.settings
        batches = []
        if (room := min(chosen.batch, chosen.window - broker.depth(self.app, lane.queue)) * lane.bulk) > 0:
            lost = ledger.lease_again(
                conn,
                kinds=lane.kinds,
                listed=lane.listed,
                room=min(room, _MOST_ROWS),
                lease=self._duration,
                horizon=chosen.horizon,
                refused=_say_refused,
            )
            batches.append(_Batch(lost, room))
        if room := self._room(conn, lane):
            due = self._lease(conn, lane, batch=room)
            batches.append(_Batch(due, lane.first(chosen)))
            if len(due) < room:
                batches.append(self._look_ahead(conn, lane))
        return batches

    def _add(self, conn: Connection, lane: _Lane) -> list[_Batch]:
        if not (room := self._room(conn, lane)):
            return []
        # Due and soon due in one statement: what does not fit is for the next tick.
        return [_Batch(self._lease(conn, lane, batch=room, horizon=self.settings.horizon), lane.first(self.settings))]

    def _room(self, conn: Connection, lane: _Lane) -> int:
        first = lane.first(self.settings)
        return first - ledger.ready(conn, kinds=lane.kinds, listed=lane.listed, limit=first)

    def _go_on(self, conn: Connection, lane: _Lane, baton: Baton) -> list[_Batch]:
        waited = (ledger.now(conn) - baton.ready).total_seconds()
        ticked = lane.first(self.settings) / self.settings.tick
        batch = policy.next_batch(baton.batch, waited, lane.batch(self.settings), ticked)
        if not batch:
            return []
        leased = lane._replace(kinds=baton.kinds, listed=True)
        due = self._lease(conn, leased, batch=batch, after=baton.after, since=baton.token)
        if len(due) == batch:
            return [_Batch(due, batch)]
        return [_Batch(due, batch), self._look_ahead(conn, lane)]

    def _look_ahead(self, conn: Connection, lane: _Lane) -> _Batch:
        # Only where nothing more is due: behind a backlog, what is leased ahead would wait for longer than its lease.
        most = max(self.settings.window, lane.batch(self.settings))
        return _Batch(self._lease(conn, lane, batch=most, horizon=self.settings.horizon), lane.first(self.settings))

    @property
    def _duration(self) -> float:
        return self.settings.lease + self.settings.horizon  # a job may wait for its time all the horizon long

    def _lease(self, conn: Connection, lane: _Lane, *, horizon: float = 0.0, **limits: Any) -> list[Lease]:
        return ledger.lease(
            conn,
            kinds=lane.kinds,
            listed=lane.listed,
            window=lane.window(self.settings),
            lease=self._duration,
            horizon=horizon,
            refused=_say_refused,
            **limits,
        )

    def _publish(self, lane: _Lane, batches: Iterable[_Batch]) -> tuple[int, int]:
        """Publish the batches and free what does not go out; return how many jobs went, and how many did not."""
        parts: list[list[Lease]] = []
        messages: list[broker.Message] = []
        for batch in batches:
            carrier = policy.baton(len(batch.leases), batch.wanted)
            number = 0
            for part in self._parts(lane, batch.leases):
                carries = carrier is not None and number <= carrier < number + len(part)
                messages.append(self._message(lane, part, self._baton(lane, batch, part[0]) if carries else None))
                parts.append(part)
                number += len(part)
        failed = broker.publish_all(self.app, messages)
        unsent = [lease for number in failed for lease in parts[number]]
        told: set[str] = set()
        for number, error in failed.items():
            if (line := in_a_line(error)) not in told:  # what is away is away for all
                told.add(line)
                job = parts[number][0]
                emit(logging.WARNING, "publish failed", job_id=job.id, kind=job.kind, unsent=len(unsent), error=line)
        if unsent:
            with available(f"{len(unsent)} jobs wait for their lease to expire"), self.engine.connect() as conn:
                ledger.release(conn, [(lease.id, lease.token) for lease in unsent])
        return sum(map(len, parts)) - len(unsent), len(unsent)

    def _baton(self, lane: _Lane, batch: _Batch, carrier: Lease) -> Baton:
        leased_at = self._leased_at(carrier)
        return Baton(
            queue=lane.queue,
            batch=batch.wanted,
            kinds=sorted({lease.kind for lease in batch.leases}),
            token=carrier.token,
            after=min(leased_at, batch.leases[-1].run_at),
            ready=max(leased_at, carrier.run_at),
        )

    def _message(self, lane: _Lane, leases: Sequence[Lease], baton: Baton | None) -> broker.Message:
        lease = leases[0]
        known = self.registry.get(lease.kind) is not None
        kwargs: dict[str, object] = {"job_id": lease.id, "token": ledger.token_text(lease.token)}
        shown = _shown(lease, known=known)
        if lane.bulk > 1:
            kwargs = {"job_ids": [lease.id for lease in leases], "token": kwargs["token"]}
            shown = repr({"jobs": len(leases), "job_ids": f"{lease.id} … {leases[-1].id}"})
        if baton is not None:
            kwargs["baton"] = baton.to_json()
        return broker.Message(
            lane.queue,
            task_name(lease.kind) if known else UNHANDLED,
            kwargs,
            shown,
            self._eta(lease),
        )

    def _eta(self, lease: Lease) -> datetime | None:
        return lease.run_at if lease.run_at > self._leased_at(lease) else None

    def _leased_at(self, lease: Lease) -> datetime:
        return lease.token - timedelta(seconds=self._duration)

    def _parts(self, lane: _Lane, leases: Sequence[Lease]) -> Iterator[list[Lease]]:
        """Part leases into messages, by token and time; a suspect goes alone: it may end its whole worker again."""
        part: list[Lease] = []
        for lease in leases:
            if part and not (len(part) < lane.bulk and self._fit(part[0], lease)):
                yield part
                part = []
            part.append(lease)
        if part:
            yield part

    def _fit(self, one: Lease, other: Lease) -> bool:
        together = (one.token, self._eta(one)) == (other.token, self._eta(other))
        return together and not one.suspect and not other.suspect


def _is_of(baton: Baton, lane: _Lane) -> bool:
    return lane.queue == baton.queue and (lane.bulk == 1 or list(lane.kinds) == baton.kinds)


def _say_refused(id: JobId, error: DBAPIError) -> None:
    emit(logging.ERROR, "job cannot be leased", job_id=id, error=in_a_line(error))


def _told(published: int, refused: int) -> int:
    if refused:
        raise BrokerUnavailable(f"{refused} of {published + refused} jobs were not published; they are free again")
    return published


def _shown(lease: Lease, *, known: bool) -> str:
    """Return the job in the form in which Flower shows a task's arguments."""
    shown = {"job_id": lease.id, "attempt": lease.attempts + 1, "ref_id": (lease.ref_id or "")[:_REF_ID_SHOWN] or None}
    return repr(shown if known else {**shown, "kind": lease.kind[:_REF_ID_SHOWN]})


def queue_names(registry: Registry) -> list[str]:
    """Return the names of all queues that a worker must read for the kinds known here."""
    return [TICK_QUEUE, *dict.fromkeys(lane.queue for lane in _lanes(registry))]


def _lanes(registry: Registry) -> list[_Lane]:
    own: dict[str, list[str]] = {}
    lanes: list[_Lane] = []
    for handler in registry:
        queue, bulk = handler.policy.queue or JOB_QUEUE, handler.policy.bulk or 1
        if bulk > 1:
            lanes.append(_Lane(queue, [handler.kind], listed=True, bulk=bulk))
        elif queue != JOB_QUEUE:
            own.setdefault(queue, []).append(handler.kind)
    lanes += [_Lane(queue, kinds, listed=True) for queue, kinds in own.items()]
    elsewhere = [kind for lane in lanes for kind in lane.kinds]
    return [*lanes, _Lane(JOB_QUEUE, elsewhere, listed=False)]
