"""vkjobs in a Celery app: its tasks, thin, and what the app needs for them. Decides nothing about jobs."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from celery import Celery, Task
from celery.exceptions import Retry
from celery.worker import state as worker_state
from kombu import Exchange, Queue
from sqlalchemy import Engine
from sqlalchemy.exc import ProgrammingError, SQLAlchemyError

from vkjobs import broker, client, database, ledger, policy, settings
from vkjobs.bulk import BulkExecutor
from vkjobs.dispatch import JOB_QUEUE, TICK_QUEUE, UNHANDLED, Baton, Dispatcher, queue_names, task_name
from vkjobs.errors import (
    BrokerUnavailable,
    ConfigurationError,
    DatabaseUnavailable,
    InvalidJobError,
    JobFailed,
    JobsLocked,
)
from vkjobs.events import emit
from vkjobs.execute import Executor, Outcome, Verdict
from vkjobs.handlers import Function, Handler, Policy, check_kind, registry
from vkjobs.heartbeat import Heartbeat
from vkjobs.ledger import JobId
from vkjobs.report import storable
from vkjobs.settings import Settings

F = TypeVar("F", bound=Function)

RUN_DUE = "vkjobs.run_due"
ENQUEUE = "vkjobs.enqueue"

_LONGEST_PAUSE_S = 60.0  # between two tries to enqueue
_LOCKED_PAUSE_S = 2.0  # between two tries to start a job whose row somebody has locked

_apps: WeakSet[Celery] = WeakSet()
_reads_no_more: WeakSet[Celery] = WeakSet()
_settings: WeakKeyDictionary[Celery, Settings] = WeakKeyDictionary()
_executors: dict[Celery, Executor] = {}
_last_tick: WeakKeyDictionary[Celery, float] = WeakKeyDictionary()

# A child renews its own jobs, by a thread that it starts itself.
os.register_at_fork(after_in_child=_executors.clear)


class VkjobsTask(Task):  # type: ignore[misc]
    """What all tasks of vkjobs have in common, whatever the host's defaults for its own tasks are.

    Messages are cheap: what the broker loses is leased again. They are acknowledged before they run, because the row,
    not the message, says what is still to be done. They go to their queue by its name, past the host's routes.
    """

    # Celery warns of a queue and the like only in a task's own class.
    abstract = True
    acks_late = False
    delivery_mode = "transient"
    exchange = ""
    ignore_result = True
    queue = routing_key = TICK_QUEUE
    rate_limit = 0  # none; one for a kind comes from `task_annotations`
    reject_on_worker_lost = False
    serializer = "json"
    store_errors_even_if_ignored = False
    throws = (JobFailed, DatabaseUnavailable, BrokerUnavailable, InvalidJobError)


class JobTask(VkjobsTask):
    """Runs a job of one kind; of `unhandled`, of whatever kind the row says."""

    abstract = True
    Request = "vkjobs.steward:JobRequest"
    queue = routing_key = JOB_QUEUE
    kind: str | None = None


class EnqueueTask(VkjobsTask):
    """Inserts a job. Unlike that of a job, its message is all there is: it stays until the row is written."""

    abstract = True
    acks_late = True
    acks_on_failure_or_timeout = True
    delivery_mode = "persistent"
    max_retries = None
    reject_on_worker_lost = True


def handler(
    kind: str,
    *,
    max_attempts: int | None = None,
    backoff: float | None = None,
    lease: float | None = None,
    time_limit: float | None = None,
    soft_time_limit: float | None = None,
    queue: str | None = None,
    bulk: int | None = None,
    as_list: bool = False,
) -> Callable[[F], F]:
    """Register the decorated function ``(job, ctx)`` as the handler of ``kind``; see `Policy` for the keywords.

    Raises:
        ConfigurationError: the kind is taken, is no fitting name, or its policy cannot work.
    """
    check_kind(kind)  # also where the decorator is used without a kind
    policy = Policy(max_attempts, backoff, lease, time_limit, soft_time_limit, queue, bulk, as_list)

    def register(function: F) -> F:
        added = registry.register(kind, function, policy)
        for app in _apps:
            _add_kind(app, added)
        return function

    return register


def setup(app: Celery) -> Celery:
    """Add vkjobs to a Celery app: its tasks, its two queues beside the app's own, and its beat entry; return the app.

    Nothing of the app's own is changed. Settings are read from ``app.conf`` when first needed, and checked when a
    worker or beat starts.
    """
    if app in _apps:
        return app
    _apps.add(app)
    # No events: in Flower, a tick a second would bury the jobs and, in time, push them out.
    app.task(
        _run_due,
        name=RUN_DUE,
        bind=True,
        base=VkjobsTask,
        shared=False,
        ignore_result=False,
        send_events=False,
    )
    app.task(_enqueue, name=ENQUEUE, bind=True, base=EnqueueTask, shared=False, ignore_result=False)
    app.task(_run_job, name=UNHANDLED, bind=True, base=JobTask, shared=False)
    for known in registry:
        _add_kind(app, known)
    if app.finalized:
        _complete(app)
    else:
        app.on_after_finalize.connect(_complete, weak=False)
    return app


def set_up_apps() -> list[Celery]:
    """Return the apps that have vkjobs."""
    return list(_apps)


def settings_of(app: Celery) -> Settings:
    """Return the app's settings, as they were when first needed or last read.

    Raises:
        ConfigurationError: one is unknown or impossible.
    """
    return _settings.get(app) or read_settings(app)


def read_settings(app: Celery) -> Settings:
    """Read the app's settings anew, and return them.

    Raises:
        ConfigurationError: one is unknown or impossible.
    """
    _settings[app] = settings.load(app.conf, app.namespace)
    return _settings[app]


def engine_of(app: Celery) -> Engine:
    """Return this process's engine for the app's database.

    Raises:
        ConfigurationError: no database is set.
    """
    chosen = settings_of(app)
    return database.engine(chosen.database_url, chosen.pool_size)


def dispatcher_of(app: Celery) -> Dispatcher:
    """Return what leases and publishes for the app.

    Raises:
        ConfigurationError: no database is set.
    """
    return Dispatcher(app, engine_of(app), settings_of(app), registry)


def _add_kind(app: Celery, added: Handler) -> None:
    policy = added.policy
    app.task(
        _run_job,
        name=task_name(added.kind),
        bind=True,
        base=JobTask,
        shared=False,
        kind=added.kind,
        time_limit=policy.time_limit,
        soft_time_limit=policy.soft_time_limit,
    )
    if app.finalized:
        _read(app, policy.queue or JOB_QUEUE)


def read_no_more(app: Celery) -> None:
    """Let a worker with ``-Q`` read its queues alone, also if kinds with other queues are registered later."""
    _reads_no_more.add(app)


def _read(app: Celery, queue: str) -> None:
    """Let a worker without ``-Q`` read ``queue`` too, beside the app's own; `task_queues` would end those.

    One that the host has declared stays as it is: messages reach any queue by its name alone.
    """
    queues = app.amqp.queues
    add = queues.add if app in _reads_no_more else queues.select_add
    add(queues.get(queue) or Queue(queue, Exchange(queue, type="direct"), routing_key=queue))


def _complete(sender: Celery, **_: Any) -> None:
    """Add queues and beat entry, once the app's configuration is final."""
    for name in queue_names(registry):
        _read(sender, name)
    try:
        # Not kept: the host may have more to say before a setting is needed.
        entry = beat_entry(settings.load(sender.conf, sender.namespace))
    except ConfigurationError:
        return  # a worker or beat does not start with it, and says why
    schedule = {RUN_DUE: entry, **(sender.conf.beat_schedule or {})}
    if sender.namespace:  # some versions of Celery look at its key first
        key = f"{sender.namespace.rstrip('_')}_beat_schedule"
        sender.conf[key.upper() if sender.namespace.isupper() else key.lower()] = schedule
    sender.conf.beat_schedule = schedule


def beat_entry(chosen: Settings) -> dict[str, Any]:
    """Return what `beat_schedule` says of `run_due`."""
    return {
        "task": RUN_DUE,
        "schedule": timedelta(seconds=chosen.tick),
        "kwargs": {"by": "beat"},
        "options": {"queue": TICK_QUEUE, "ignore_result": True},
    }


def _executor_of(app: Celery) -> Executor:
    if app not in _executors:
        chosen = settings_of(app)
        # Renewals have a connection of their own: those of the pool may all be with handlers that take long.
        heartbeat = Heartbeat(partial(database.engine, chosen.database_url, 1, "heartbeat"))
        _executors[app] = Executor(chosen, registry, partial(engine_of, app), heartbeat)
        _die_at_once(heartbeat)
    return _executors[app]


def _die_at_once(heartbeat: Heartbeat) -> None:
    """Let SIGTERM end a pool's child that runs a job; at the hard time limit and on Terminate it gets one.

    Billiard's own handler raises SystemExit, which would surface in the job as if its handler had raised it.
    """
    previous = signal.getsignal(signal.SIGTERM)
    if not callable(previous) or previous.__module__ != "billiard.common":
        return

    def on_term(signum: int, frame: FrameType | None) -> None:
        if heartbeat.busy:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        previous(signum, frame)

    signal.signal(signal.SIGTERM, on_term)


def _is_stopping() -> bool:
    """Tell whether the worker is shutting down, where its pool runs tasks in its own process: it runs all it has."""
    return worker_state.should_stop is not None and worker_state.should_stop is not False  # 0 is an exit code


def _run_due(self: VkjobsTask, by: str = "call", baton: object = None) -> int:
    """Lease the due jobs and publish each as a task of its own; return how many.

    Args:
        self: the task.
        by: who asks. "beat": a tick just after another one returns at once. "baton": half of a batch is started; lease
            the next one of its queue, and leave the rest to the ticks. "nudge": a job that is due was committed; leave
            what went wrong to the ticks. Anything else: a call by hand.
        baton: of the batch.
    """
    app = self.app
    chosen = settings_of(app)
    if by != "call" and _is_stopping():
        return 0  # what is leased now, another worker can run sooner
    if by == "beat":
        # Ticks that piled up while no worker was there end without a word to the database.
        now = time.monotonic()
        if now - _last_tick.get(app, -chosen.tick) < chosen.tick / 2:
            return 0
        _last_tick[app] = now
        with database.available("nothing was leased"), engine_of(app).connect() as conn:
            ledger.ticked(conn, "beat")
    if by != "baton":
        return dispatcher_of(app).run_due(housekeeping=by != "nudge")
    if (found := Baton.read(baton)) is None:
        return 0  # of another version, or forged: the next tick sees to it
    return dispatcher_of(app).take(found)


def _run_job(
    self: JobTask,
    /,
    job_id: object = None,
    token: object = None,
    *_: object,
    job_ids: object = None,
    baton: object = None,
    **__: object,
) -> str:
    """Run the jobs that ``token`` leases. Whatever else a message says has no say: the row is the truth."""
    if baton:
        _pass_on(self.app, baton)
    leases = leases_of(job_id, token, job_ids)
    try:
        if job_ids is not None:
            return _in_a_line(_bulk_executor_of(self).run(leases))
        outcome = _run(self, leases)
    except JobsLocked as locked:
        jobs = {"job_id": job_id} if job_ids is None else {"job_ids": locked.ids}
        if self.request.is_eager or not _send_again(self, {**jobs, "token": token}):
            raise
        raise Retry(f"in {_LOCKED_PAUSE_S:g} s", locked) from None
    if outcome.verdict is Verdict.RETRYING:
        # The message is for Celery's log; Flower shows the exception alone.
        raise Retry(outcome.detail, JobFailed(f"tried again {outcome.detail}"))
    if outcome.verdict is Verdict.FAILED:
        raise JobFailed(outcome.detail)
    return str(outcome)


def _in_a_line(outcomes: Sequence[Outcome]) -> str:
    counts = Counter(str(outcome.verdict) for outcome in outcomes)
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()) or "no job"


def _pass_on(app: Celery, baton: object) -> None:
    """Fire the next run; where that fails, the next tick does."""
    try:
        broker.publish(app, broker.Message(TICK_QUEUE, RUN_DUE, {"by": "baton", "baton": baton}, "{'by': 'baton'}"))
    except Exception as error:  # noqa: BLE001 - whatever a transport raises, the job has ended as it has
        emit(logging.WARNING, "baton lost", error=database.in_a_line(error))


def _send_again(self: JobTask, kwargs: dict[str, Any]) -> bool:
    """Send the message again for a little later: a lock that is waited for keeps its slot from other jobs."""
    try:
        with engine_of(self.app).connect() as conn:
            eta = ledger.now(conn) + timedelta(seconds=_LOCKED_PAUSE_S)
        queue = self.request.delivery_info["routing_key"]
        broker.publish(self.app, broker.Message(queue, self.name, kwargs, self.request.kwargsrepr or "", eta))
    except Exception as error:  # noqa: BLE001 - whatever a transport raises, the leases expire
        emit(logging.WARNING, "locked jobs wait for their lease to expire", error=database.in_a_line(error))
        return False
    return True


def _run(self: JobTask, leases: Sequence[tuple[JobId, datetime]]) -> Outcome:
    if not leases:
        return Outcome(Verdict.MOVED_ON, "the message names no job and lease")
    ((id, token),) = leases
    executor = _executor_of(self.app)
    return executor.run(id, token, by=_claimant_of(self), lease=_lease_of(self, executor))


def _bulk_executor_of(self: JobTask) -> BulkExecutor:
    executor = _executor_of(self.app)
    return BulkExecutor(executor, _claimant_of(self), _lease_of(self, executor))


def _claimant_of(self: JobTask) -> str:
    return claimant(self.request.id, self.request.hostname, os.getpid())


def _lease_of(self: JobTask, executor: Executor) -> float:
    # A claim must know its lease before it reads the row: where `unhandled` meets a known kind, it has the general one.
    known = registry.get(self.kind) if self.kind else None
    return known.lease(executor.settings) if known else executor.settings.lease


def leases_of(
    job_id: object = None, token: object = None, job_ids: object = None, **_: object
) -> list[tuple[JobId, datetime]]:
    """Return the ids and tokens that a message brought: one, several, or none if they can be none."""
    ids = [job_id] if job_ids is None else job_ids
    if not isinstance(token, str) or not isinstance(ids, list):
        return []
    try:
        moment = datetime.fromisoformat(token)
        if moment.tzinfo is None:
            return []
        moment = moment.astimezone(UTC)
    except (ValueError, OverflowError):
        return []
    return [(id, moment) for id in ids if _can_be_an_id(id)]


def _can_be_an_id(id: object) -> bool:
    return isinstance(id, int | str) and not isinstance(id, bool) and (isinstance(id, int) or storable(id) == id)


def claimant(task_id: str, node: str, pid: int) -> str:
    """Return the name of an execution for ``claimed_by``: its Celery task id, node and process id."""
    return f"{task_id} {node} {pid}"


def _enqueue(
    self: VkjobsTask, kind: str, ref_id: str | None = None, run_at: str | None = None, payload: Any = None
) -> JobId:
    """Insert a job for another app or language; return its id. It is tried again for as long as Postgres is away.

    Args:
        self: the task.
        kind: what is to be done.
        ref_id: what it is to be done to.
        run_at: when, in ISO 8601 with offset; none: now.
        payload: any JSON value.

    Raises:
        InvalidJobError: an argument cannot be stored as meant; nothing was written.
        DatabaseUnavailable: nothing was written, and to try again would not help.
    """
    moment = None
    if run_at is not None:
        try:
            moment = datetime.fromisoformat(run_at)
        except (TypeError, ValueError):
            raise InvalidJobError(
                f"run_at is {run_at!r}: it must be ISO 8601 with offset, as in 2030-01-31T12:00:00+00:00"
            ) from None
    try:
        with engine_of(self.app).connect() as conn:
            return client.enqueue(conn, kind, ref_id, run_at=moment, payload=payload)
    except SQLAlchemyError as error:
        unavailable = DatabaseUnavailable(f"nothing was written: {database.in_a_line(error)}")
        # A table that is not there, or not for us, will be.
        passing = database.is_passing(error) or isinstance(error, ProgrammingError)
        if self.request.is_eager or not passing:
            raise unavailable from None
    raise self.retry(exc=unavailable, countdown=policy.backoff(self.request.retries, 1, _LONGEST_PAUSE_S))
