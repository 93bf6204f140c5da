"""vkjobs in apps of hosts: what it adds, and that it leaves the rest alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.schedules import crontab
from hosts import make_app, worker_thread
from kombu import Exchange, Queue
from messages import waiting
from rows import Row
from workers import wait_for

import vkjobs
from vkjobs import Context, Job
from vkjobs.errors import ConfigurationError
from vkjobs.handlers import registry
from vkjobs.tasks import read_settings, settings_of

Add = Callable[..., Row]
Read = Callable[[Any], Row]

OURS = {"vkjobs", "vkjobs.tick", "slow"}
SLOW = Queue("slow", Exchange("speeds", "topic"), "slow.#", queue_arguments={"x-max-priority": 10})


@pytest.fixture(autouse=True)
def handled(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Know the kinds `noop` and `slow`, the latter with a queue of its own; give the jobs that were handled."""
    monkeypatch.setattr(registry, "_handlers", {})
    jobs: list[Job] = []

    @vkjobs.handler("noop")
    @vkjobs.handler("slow", queue="slow")
    def work(job: Job, ctx: Context) -> None:
        jobs.append(job)

    return jobs


def consumed(app: Celery) -> set[str]:
    app.finalize()
    return set(app.amqp.queues.consume_from)


@pytest.mark.parametrize(
    ("conf", "own"),
    [
        ({}, {"celery"}),
        ({"task_default_queue": "mine"}, {"mine"}),
        ({"task_queues": [Queue("a"), Queue("b", Exchange("x", "topic"), "k.#")]}, {"a", "b"}),
        ({"task_queues": {"a": {"exchange": "a"}}, "task_create_missing_queues": False}, {"a"}),
        ({"task_default_queue": "vkjobs"}, {"vkjobs"}),
        ({"task_queues": [SLOW, Queue("vkjobs", Exchange("x"), "vkjobs", durable=False)]}, {"slow", "vkjobs"}),
    ],
)
def test_a_worker_reads_the_hosts_queues_and_ours(conf: dict[str, Any], own: set[str]) -> None:
    assert consumed(make_app(**conf)) == own
    app = vkjobs.setup(make_app(**conf))
    assert consumed(app) == own | OURS
    plain = make_app(**conf)
    for name in own:
        assert app.amqp.queues[name] == plain.amqp.queues[name]
    changed = {key for key in app.conf if app.conf[key] != plain.conf[key]}
    assert changed == {"beat_schedule"}


def test_a_queue_that_the_host_has_written_to_is_read_too() -> None:
    app = make_app()
    assert app.amqp.queues["slow"].name == "slow"  # of itself, not every version of Celery reads it then
    assert consumed(vkjobs.setup(app)) == {"celery"} | OURS


@pytest.mark.parametrize("include", [["mine"], ["slow"], ["vkjobs", "vkjobs.tick"]])
def test_queues_chosen_for_a_worker_are_all_that_it_reads(include: list[str]) -> None:
    app = vkjobs.setup(make_app(task_default_queue="mine"))
    app.finalize()
    app.amqp.queues.select(include)
    assert consumed(app) == set(include)


def test_queues_excluded_for_a_worker_are_not_read() -> None:
    app = vkjobs.setup(make_app())
    app.finalize()
    app.amqp.queues.deselect(["slow"])
    assert consumed(app) == {"celery", "vkjobs", "vkjobs.tick"}


def test_tasks_are_there_whenever_their_kinds_are_registered() -> None:
    app = vkjobs.setup(make_app())

    @vkjobs.handler("before", soft_time_limit=5, time_limit=6)
    def before(job: Job, ctx: Context) -> None:
        pass

    app.finalize()

    @vkjobs.handler("after", queue="late")
    def after(job: Job, ctx: Context) -> None:
        pass

    names = {name for name in app.tasks if name.startswith("vkjobs.")}
    own = {"run_due", "enqueue", "unhandled", "noop", "slow", "before", "after"}
    assert names == {f"vkjobs.{name}" for name in own}
    assert (app.tasks["vkjobs.before"].soft_time_limit, app.tasks["vkjobs.before"].time_limit) == (5, 6)
    assert consumed(app) == {"celery", "late"} | OURS


def test_setting_up_twice_or_late_is_the_same_as_once() -> None:
    once, twice, late = make_app(), make_app(), make_app()
    assert vkjobs.setup(once) is once
    assert vkjobs.setup(vkjobs.setup(twice)) is twice
    late.finalize()
    vkjobs.setup(late)
    once.finalize()
    vkjobs.setup(once)
    for app in (twice, late):
        assert consumed(app) == consumed(once)
        assert set(app.tasks) == set(once.tasks)
        assert app.conf.beat_schedule == once.conf.beat_schedule


def test_beat_gets_an_entry_for_run_due_beside_the_hosts_own() -> None:
    mine = {"clean": {"task": "host.clean", "schedule": crontab(hour=4)}}
    app = make_app(beat_schedule=mine, vkjobs_tick=2.5)

    @app.on_after_finalize.connect  # type: ignore[untyped-decorator]
    def add(sender: Celery, **_: Any) -> None:
        sender.add_periodic_task(60, sender.signature("host.ping"), name="ping")

    vkjobs.setup(app)
    app.finalize()
    schedule = app.conf.beat_schedule
    assert set(schedule) == {"clean", "ping", "vkjobs.run_due"}
    assert schedule["clean"] is mine["clean"]
    assert schedule["vkjobs.run_due"]["schedule"] == timedelta(seconds=2.5)
    assert "vkjobs.run_due" not in mine


def test_the_hosts_own_entry_for_run_due_comes_first() -> None:
    mine = {"vkjobs.run_due": {"task": "vkjobs.run_due", "schedule": 60}}
    app = vkjobs.setup(make_app(beat_schedule=mine))
    app.finalize()
    assert app.conf.beat_schedule == mine


def test_a_django_project_keeps_its_schedule_and_gives_its_settings() -> None:
    mine = {"clean": {"task": "host.clean", "schedule": 60}}
    source = SimpleNamespace(
        CELERY_BEAT_SCHEDULE=mine, CELERY_VKJOBS_TICK=7, CELERY_VKJOBS_LEASE=90, CELERY_TASK_DEFAULT_QUEUE="django"
    )
    app = make_app()
    vkjobs.setup(app)
    app.config_from_object(source, namespace="CELERY")
    app.finalize()
    assert set(app.conf.beat_schedule) == {"clean", "vkjobs.run_due"}
    assert app.conf.beat_schedule["vkjobs.run_due"]["schedule"] == timedelta(seconds=7)
    assert (settings_of(app).tick, settings_of(app).lease) == (7, 90)
    assert consumed(app) == {"django"} | OURS


def test_a_setting_that_cannot_work_is_told_when_it_is_needed_not_when_tasks_are_found() -> None:
    app = vkjobs.setup(make_app(vkjobs_tick="often"))
    assert consumed(app) == {"celery"} | OURS
    assert not app.conf.beat_schedule
    with pytest.raises(ConfigurationError, match="vkjobs_tick is 'often'"):
        settings_of(app)
    with pytest.raises(ConfigurationError, match="vkjobs_tick is 'often'"):
        app.tasks["vkjobs.run_due"].apply().get()


def test_settings_count_until_they_are_needed_also_after_a_look_at_the_tasks() -> None:
    app = vkjobs.setup(make_app(vkjobs_lease=70))
    assert "vkjobs.noop" in app.tasks
    app.conf.vkjobs_lease = 80
    assert settings_of(app).lease == 80
    app.conf.vkjobs_lease = 90
    assert settings_of(app).lease == 80
    assert (read_settings(app).lease, settings_of(app).lease) == (90, 90)


def test_each_app_has_settings_of_its_own() -> None:
    one, two = vkjobs.setup(make_app(vkjobs_lease=70)), vkjobs.setup(make_app(vkjobs_lease=80))
    assert (settings_of(one).lease, settings_of(two).lease) == (70, 80)


def test_celery_broker_url_in_the_environment_beats_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKJOBS_BROKER_URL", "redis://vkjobs:1/0")
    assert vkjobs.setup(make_app(broker_url="redis://host:1/0")).connection().hostname == "host"
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://environment:1/0")
    assert vkjobs.setup(make_app(broker_url="redis://host:1/0")).connection().hostname == "environment"


STUBBORN = {
    "accept_content": ["pickle", "json"],
    "result_serializer": "pickle",
    "broker_connection_retry_on_startup": True,
    "task_acks_late": True,
    "task_acks_on_failure_or_timeout": False,
    "task_compression": "zlib",
    "task_create_missing_queues": False,
    "task_default_delivery_mode": "persistent",
    "task_default_priority": 5,
    "task_default_queue": "mine",
    "task_default_rate_limit": "1/h",
    "task_ignore_result": False,
    "task_queues": [Queue("mine"), SLOW],
    "task_reject_on_worker_lost": True,
    "task_routes": {"*": {"queue": "mine"}},
    "task_send_sent_event": True,
    "task_serializer": "pickle",
    "task_store_errors_even_if_ignored": True,
    "task_time_limit": 50,
    "task_track_started": True,
}


CARELESS = ("task_acks_late", "task_acks_on_failure_or_timeout", "task_reject_on_worker_lost")


@pytest.fixture
def stubborn(redis_url: str, database_url: str) -> Celery:
    """An app with other ideas of everything."""
    app = make_app(broker_url=redis_url, result_backend=redis_url, vkjobs_database_url=database_url, **STUBBORN)
    return vkjobs.setup(app)


def test_a_hosts_defaults_for_its_tasks_are_not_those_of_ours(stubborn: Celery, add: Add, redis_url: str) -> None:
    stubborn.conf.task_compression = None  # to read them; no task can do without what its app says of this
    add(kind="noop")
    add(kind="unknown")
    assert stubborn.tasks["vkjobs.run_due"].apply().get() == 2
    messages = waiting(redis_url)
    assert len(messages) == 2
    for message in messages:
        assert message.content_type == "application/json"
        assert message.properties["delivery_mode"] == 1
        assert message.headers["ignore_result"] is True
    for name in ("run_due", "unhandled", "noop"):
        task = stubborn.tasks[f"vkjobs.{name}"]
        assert (task.acks_late, task.reject_on_worker_lost, task.serializer) == (False, False, "json")
        assert not task.rate_limit


def test_a_job_that_is_to_be_enqueued_is_in_its_message_until_it_is_written(redis_url: str) -> None:
    careless = make_app(broker_url=redis_url, task_default_delivery_mode="transient", **dict.fromkeys(CARELESS, False))
    enqueue = vkjobs.setup(careless).tasks["vkjobs.enqueue"]
    enqueue.delay("noop")
    [message] = waiting(redis_url, "vkjobs.tick")
    assert message.properties["delivery_mode"] == 2
    assert (enqueue.acks_late, enqueue.acks_on_failure_or_timeout, enqueue.reject_on_worker_lost) == (True, True, True)
    assert enqueue.max_retries is None


def test_a_host_may_limit_the_rate_of_a_kind() -> None:
    app = vkjobs.setup(make_app(task_annotations={"vkjobs.slow": {"rate_limit": "5/m"}}))
    assert app.tasks["vkjobs.slow"].rate_limit == "5/m"


@pytest.fixture
def worker(stubborn: Celery) -> Iterator[None]:
    @stubborn.task(name="host.pickled")  # type: ignore[untyped-decorator]
    def pickled(value: object) -> object:
        return value

    with worker_thread(stubborn):
        yield


def test_jobs_and_a_hosts_own_tasks_run_side_by_side(
    stubborn: Celery, worker: None, add: Add, read: Read, handled: list[Job]
) -> None:
    rows = [add(kind="noop"), add(kind="slow")]
    assert stubborn.tasks["vkjobs.run_due"].delay().get(timeout=30) == 2
    assert stubborn.tasks["host.pickled"].delay({1, 2}).get(timeout=30) == {1, 2}
    wait_for(lambda: all(read(row.id).status == "done" for row in rows), "both jobs to be done")
    assert {job.id for job in handled} == {row.id for row in rows}


def test_where_tasks_are_always_eager_jobs_run_within_run_due(
    redis_url: str, database_url: str, add: Add, read: Read, handled: list[Job]
) -> None:
    app = vkjobs.setup(make_app(broker_url=redis_url, vkjobs_database_url=database_url, vkjobs_batch=2))
    app.conf.task_always_eager = True
    rows = [add(kind="noop") for _ in range(5)]
    assert app.tasks["vkjobs.run_due"].delay().get() == 2
    assert [read(row.id).status for row in rows] == ["done"] * 5
    assert len(handled) == 5


def test_an_app_that_is_not_set_up_gets_nothing() -> None:
    before = make_app()
    vkjobs.setup(make_app()).finalize()
    for app in (before, make_app()):
        assert consumed(app) == {"celery"}
        assert [name for name in app.tasks if name.startswith("vkjobs.")] == []
        assert not app.conf.beat_schedule
