"""What happens when a worker or beat starts and stops, by Celery's signals.

At start the settings are checked, and what is missing is said in a line each; at the stop, what was not started
is freed.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from celery import Celery, bootsteps
from celery.concurrency import prefork
from celery.signals import (
    beat_init,
    celeryd_after_setup,
    celeryd_init,
    task_unknown,
    worker_ready,
    worker_shutdown,
    worker_shutting_down,
)
from kombu.serialization import prepare_accept_content
from sqlalchemy.exc import SQLAlchemyError

from vkjobs import database, migrations
from vkjobs.database import in_a_line
from vkjobs.dispatch import TICK_QUEUE, task_name
from vkjobs.errors import ConfigurationError
from vkjobs.events import emit
from vkjobs.handlers import registry
from vkjobs.prefetch import keep_no_copies
from vkjobs.steward import release_waiting, steward_of
from vkjobs.tasks import (
    RUN_DUE,
    JobTask,
    beat_entry,
    engine_of,
    leases_of,
    read_no_more,
    read_settings,
    set_up_apps,
    settings_of,
)

_LAST_WORDS_S = 10.0  # what the steward has left to do when the worker ends
_LOOK_AT_CHILDREN_S = 0.2


class _PromptPool(bootsteps.StartStopStep):  # type: ignore[misc]
    """Lets a prefork pool find out soon which of its children have died.

    It looks when a child's pipe closes, which is a moment before the child can be waited for, and then only every 5 s.
    """

    def register_with_event_loop(self, worker: Any, hub: Any) -> None:
        """See Celery: at each connection to the broker, which clears all timers."""
        if isinstance(worker.pool, prefork.TaskPool):
            hub.call_repeatedly(_LOOK_AT_CHILDREN_S, worker.pool.maintain_pool)


class _Connection(bootsteps.StartStopStep):  # type: ignore[misc]
    """Makes job messages cheap, and lets a worker that holds messages outlive the loss of Redis.

    Celery 5.7 first collects a lost connection: kombu tries in vain to give the messages back, and forgets whose they
    are. Then Celery closes it: kombu tries once more, and its AttributeError would end the worker.
    """

    requires = ("celery.worker.consumer.connection:Connection",)

    def start(self, consumer: Any) -> None:
        """See Celery: after each connection."""
        connection, tasks = consumer.connection, consumer.app.tasks
        keep_no_copies(connection, lambda message: isinstance(tasks.get(message.headers.get("task")), JobTask))

        def close() -> None:
            with suppress(AttributeError):
                connection.release()

        connection.close = close


@celeryd_init.connect
def _check_worker(instance: Any, options: dict[str, Any], **_: Any) -> None:
    if instance.app in set_up_apps():
        if options.get("queues"):
            read_no_more(instance.app)
        _refuse_faults(instance.app)
        instance.app.steps["worker"].add(_PromptPool)
        instance.app.steps["consumer"].add(_Connection)


@beat_init.connect
def _check_beat(sender: Any, **_: Any) -> None:
    if sender.app in set_up_apps():
        _refuse_faults(sender.app)
        if RUN_DUE not in (sender.app.conf.beat_schedule or {}):  # set anew after the app was finalized
            sender.scheduler.update_from_dict({RUN_DUE: beat_entry(settings_of(sender.app))})


def _refuse_faults(app: Celery) -> list[str]:
    """End the process if it cannot work as it is set up; return what to warn of."""
    try:
        chosen = read_settings(app)  # a look before the start may have come before the host's last word
        database.url_of(chosen.database_url)
        _check_broker(app)
        return registry.warnings(chosen)
    except ConfigurationError as error:
        raise SystemExit(f"vkjobs: {error}") from None


def _check_broker(app: Celery) -> None:
    try:
        app.connection_for_write().get_transport_cls()
    except (KeyError, ImportError) as error:
        raise ConfigurationError(f"the broker cannot be used: {error.args[0]}") from None
    except Exception:  # noqa: BLE001 - and its text may hold a part of the password
        raise ConfigurationError(
            "the broker's URL cannot be read: it must look like redis://host:6379/0 or amqp://host//"
        ) from None
    accepted = app.conf.accept_content
    if "application/json" not in (prepare_accept_content(accepted) or ["application/json"]):
        raise ConfigurationError(f"accept_content is {accepted!r}: it must hold 'json', the form of vkjobs' messages")


@celeryd_after_setup.connect
def _say_what_is_missing(instance: Any, **_: Any) -> None:
    if instance.app not in set_up_apps():
        return
    warnings = _refuse_faults(instance.app)  # again: what `-I` names has been imported since
    for line in [*warnings, *_warnings_of(instance)]:
        emit(logging.WARNING, "not set up", reason=line)
    engine = engine_of(instance.app)
    try:
        with engine.connect() as conn:
            behind = migrations.check(conn)
        if behind:
            emit(logging.ERROR, "not migrated", reason=behind)
    except SQLAlchemyError as error:
        emit(logging.WARNING, "waiting for postgres", error=in_a_line(error))
    finally:
        engine.dispose()


def _warnings_of(worker: Any) -> list[str]:
    if issubclass(worker.pool_cls, prefork.TaskPool):
        return []
    lines = []
    if limited := [one.kind for one in registry if one.policy.time_limit or one.policy.soft_time_limit]:
        lines.append(f"time limits need the prefork pool: in this worker those of {', '.join(limited)} have no effect")
    size = settings_of(worker.app).pool_size
    if size <= worker.concurrency:
        lines.append(
            f"vkjobs_pool_size is {size}: with {worker.concurrency} jobs at once in one process it should be "
            f"{worker.concurrency + 1} or more, or jobs that use their session wait for each other"
        )
    return lines


@worker_ready.connect
def _start_steward(sender: Any, **_: Any) -> None:
    if sender.app in set_up_apps():
        steward_of(sender.app).start(ticks=TICK_QUEUE in sender.app.amqp.queues.consume_from)


@task_unknown.connect
def _release_unknown(sender: Any, message: Any, name: str, **_: Any) -> None:
    """Free a job of a kind that other workers know and this one does not: Celery has discarded its message."""
    if sender.app in set_up_apps() and name.startswith(task_name("")):
        with suppress(Exception):  # whatever a message may hold that is not of a job
            _, kwargs, _ = message.payload
            steward_of(sender.app).release(leases_of(**kwargs))


@worker_shutting_down.connect
def _release_waiting(**_: Any) -> None:
    for app in set_up_apps():
        release_waiting(app)


@worker_shutdown.connect
def _stop_steward(sender: Any, **_: Any) -> None:
    if sender.app in set_up_apps():
        steward_of(sender.app).stop(_LAST_WORDS_S)
