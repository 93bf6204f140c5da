from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import redis as redis_client
from celery import Celery
from hosts import keep, make_app, worker_thread
from messages import Message, waiting
from original import IDS, execute, make_original
from rows import Row
from sqlalchemy import Engine, make_url, text
from workers import wait_for

import vkjobs
from vkjobs import Context, Job
from vkjobs.errors import DatabaseUnavailable, InvalidJobError, JobFailed
from vkjobs.handlers import registry
from vkjobs.local import Postgres, Redis
from vkjobs.migrations import migrate
from vkjobs.tasks import engine_of

pytestmark = pytest.mark.usefixtures("emptied")

Add = Callable[..., Row]
Read = Callable[[Any], Row]

PLAIN = "lease moved on"
UNHEARD_OF = "lease moved on: no job has such an id"
NAMELESS = "lease moved on: the message names no job and lease"


@pytest.fixture(scope="module")
def database_url(postgres: Postgres) -> str:
    return postgres.create_database("tasks", template="migrated")


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Know the kinds `noop` and `fails`, and these alone; give the ids of the jobs that were handled."""
    monkeypatch.setattr(registry, "_handlers", {})
    called: list[int] = []

    @vkjobs.handler("noop")
    def noop(job: Job, ctx: Context) -> None:
        called.append(int(job.id))

    @vkjobs.handler("fails", max_attempts=2)
    def fails(job: Job, ctx: Context) -> None:
        called.append(int(job.id))
        raise RuntimeError("no luck")

    return called


@pytest.fixture
def celery_config(database_url: str, redis_url: str, calls: list[int]) -> dict[str, object]:
    return {
        "broker_connection_retry_on_startup": True,
        "broker_url": redis_url,
        "result_backend": redis_url,
        "result_backend_thread_safe": True,  # that of a thread of its own would leave its connection open
        "vkjobs_database_url": database_url,
    }


@pytest.fixture
def app(celery_app: Celery) -> Celery:
    return vkjobs.setup(keep(celery_app))


@pytest.fixture
def other_app(redis_url: str) -> Celery:
    """An app that knows nothing of vkjobs."""
    return make_app(broker_url=redis_url, result_backend=redis_url)


@pytest.fixture
def worker(app: Celery) -> Iterator[object]:
    with worker_thread(app, task_events=True, without_heartbeat=False) as worker:
        yield worker


def run(app: Celery, message: Message) -> Any:
    """Run a message's task here and now."""
    return app.tasks[message.task].apply(args=message.args, kwargs=message.kwargs).get()


def taken(app: Celery, redis_url: str) -> Message:
    """Dispatch what is due, and take its one message out of the broker."""
    app.tasks["vkjobs.run_due"].apply().get()
    (message,) = waiting(redis_url)
    with redis_client.Redis.from_url(redis_url) as broker:
        broker.delete("vkjobs")
    return message


def test_run_due_may_be_fired_by_hand_and_gives_the_number_of_rows(
    app: Celery, worker: object, add: Add, read: Read, calls: list[int]
) -> None:
    rows = [add(), add(), add(run_at=3600)]
    assert app.tasks["vkjobs.run_due"].delay().get(timeout=30) == 2
    wait_for(lambda: read(rows[1].id).status == "done", "the jobs to be done")
    assert calls == [row.id for row in rows[:2]]
    assert app.tasks["vkjobs.run_due"].delay().get(timeout=30) == 0


def test_another_app_fires_run_due_and_enqueues(worker: object, other_app: Celery, read: Read, engine: Engine) -> None:
    def enqueue(**kwargs: Any) -> Any:
        return other_app.send_task("vkjobs.enqueue", kwargs=kwargs, queue="vkjobs.tick").get(timeout=30)

    plain = enqueue(kind="noop")
    full = enqueue(kind="later", ref_id="task-1", run_at="2030-01-31T12:00:00.5+01:00", payload={"a": [1]})
    wait_for(lambda: not read(plain).lease_until, "its row")
    row = read(full)
    assert (row.kind, row.ref_id, row.payload, row.status) == ("later", "task-1", {"a": [1]}, "pending")
    assert row.run_at == "2030-01-31 11:00:00.5+00"
    assert other_app.send_task("vkjobs.run_due", queue="vkjobs.tick").get(timeout=30) == 1
    wait_for(lambda: read(plain).status == "done", "the job to be done")
    # What another app learns is the text: it need not have vkjobs.
    with pytest.raises(Exception, match="run_at is 'tomorrow': it must be ISO 8601 with offset, as in 2030-01-31T"):
        enqueue(kind="noop", run_at="tomorrow")
    with pytest.raises(Exception, match="unexpected keyword argument 'when'"):
        enqueue(kind="noop", when="2030-01-31T12:00:00Z")
    with engine.connect() as conn:
        assert conn.execute(text("select count(*) from vk_jobs")).scalar_one() == 2


@pytest.mark.parametrize(
    ("kwargs", "line"),
    [
        ({"run_at": "2030-01-31T12:00:00"}, "run_at is datetime.datetime(2030, 1, 31, 12, 0), a time without zone"),
        ({"run_at": "tomorrow"}, "run_at is 'tomorrow': it must be ISO 8601 with offset, as in 2030-01-31T12:00:00+00"),
        ({"run_at": 5}, "run_at is 5: it must be ISO 8601 with offset"),
        ({"run_at": ["x"]}, "run_at is ['x']: it must be ISO 8601 with offset"),
        ({"kind": ""}, "kind has 0 characters"),
        ({"kind": 5}, "kind is 5: it must be a string"),
        ({"ref_id": {"id": 5}}, "ref_id is {'id': 5}: it must be a string"),
        ({"payload": {"a": "\0"}}, "payload['a'] holds a NUL character"),
    ],
)
def test_the_enqueue_task_refuses_what_cannot_be_stored(
    app: Celery, engine: Engine, kwargs: dict[str, Any], line: str
) -> None:
    with pytest.raises(InvalidJobError) as refused:
        app.tasks["vkjobs.enqueue"].apply(kwargs={"kind": "noop", **kwargs}).get()
    assert str(refused.value).startswith(line)
    with engine.connect() as conn:
        assert conn.execute(text("select count(*) from vk_jobs")).scalar_one() == 0


@pytest.mark.parametrize(
    ("away", "back"),
    [
        ("alter database {} set default_transaction_read_only = on", "alter database {} reset all"),
        ("alter table vk_jobs rename to elsewhere", "alter table elsewhere rename to vk_jobs"),
    ],
    ids=["read-only", "missing"],
)
def test_a_job_is_enqueued_when_its_table_can_be_written_again(
    app: Celery, worker: object, other_app: Celery, database_url: str, read: Read, away: str, back: str
) -> None:
    name = str(make_url(database_url).database)
    writable = "set default_transaction_read_only = off"
    execute(database_url, away.format(name))
    engine_of(app).dispose()  # a server that was demoted has other sessions
    try:
        result = other_app.send_task("vkjobs.enqueue", kwargs={"kind": "noop"}, queue="vkjobs.tick")
        wait_for(lambda: result.state == "RETRY", "the first try")
    finally:
        execute(database_url, writable, back.format(name))
    assert read(result.get(timeout=30)).kind == "noop"


def test_a_job_that_the_host_refuses_is_not_tried_again(
    app: Celery, worker: object, other_app: Celery, database_url: str
) -> None:
    execute(database_url, "alter table vk_jobs add constraint no_noop check (kind <> 'noop')")
    try:
        with pytest.raises(DatabaseUnavailable, match=r"^nothing was written: .*no_noop"):
            other_app.send_task("vkjobs.enqueue", kwargs={"kind": "noop"}, queue="vkjobs.tick").get(timeout=30)
    finally:
        execute(database_url, "alter table vk_jobs drop constraint no_noop")


@pytest.mark.parametrize(("key", "type_of_id"), [("bigserial", int), ("uuid", str), ("text", str)])
def test_jobs_of_an_adopted_table_go_all_the_way(
    celery_config: dict[str, object], empty_database_url: str, redis_url: str, key: str, type_of_id: type
) -> None:
    make_original(empty_database_url, IDS[key])
    migrate(empty_database_url)
    app = vkjobs.setup(make_app(broker_url=redis_url, vkjobs_database_url=empty_database_url))
    id = app.tasks["vkjobs.enqueue"].apply(kwargs={"kind": "fails"}).get()
    assert type(id) is type_of_id
    message = taken(app, redis_url)
    assert message.kwargs["job_id"] == id
    assert app.tasks["vkjobs.fails"].apply(kwargs=message.kwargs).state == "RETRY"
    assert run(app, message) == PLAIN


def test_each_state_of_a_job_is_told_apart_by_its_event(
    app: Celery, worker: object, other_app: Celery, add: Add, read: Read, calls: list[int]
) -> None:
    seen: list[dict[str, Any]] = []
    with other_app.connection_for_read() as connection:
        receiver = other_app.events.Receiver(connection, handlers={"*": seen.append})
        thread = threading.Thread(target=receiver.capture, kwargs={"wakeup": False})
        thread.start()
        try:
            wait_for(lambda: any(event["type"] == "worker-heartbeat" for event in seen), "the worker's events")
            done, again, failed = add(), add(kind="fails", ref_id="task-1"), add(kind="fails", attempts=1)
            stale = {"job_id": done.id, "token": "2020-01-01T00:00:00+00:00"}
            moved = other_app.send_task("vkjobs.noop", kwargs=stale, queue="vkjobs").id
            assert other_app.send_task("vkjobs.run_due", queue="vkjobs.tick").get(timeout=30) == 3
            ends = ("task-succeeded", "task-retried", "task-failed")
            wait_for(lambda: sum(event["type"] in ends for event in seen) == 4, "all four ends")
        finally:
            receiver.should_stop = True
            thread.join()
    received = {event["uuid"]: event for event in seen if event["type"] == "task-received"}
    told: dict[Any, tuple[str, Any]] = {
        uuid: (event["type"], event.get("result", event.get("exception")))
        for event in seen
        if (uuid := event.get("uuid")) and event["type"] in ends
    }
    assert told.pop(moved) == ("task-succeeded", "'lease moved on'")
    by_job = {received[uuid]["kwargs"]: end for uuid, end in told.items()}
    assert by_job.pop(repr({"job_id": done.id, "attempt": 1, "ref_id": None})) == ("task-succeeded", "'done'")
    state, why = by_job.pop(repr({"job_id": again.id, "attempt": 1, "ref_id": "task-1"}))
    assert state == "task-retried"
    assert "JobFailed('tried again in 30 s: RuntimeError: no luck')" in why
    assert by_job == {
        repr({"job_id": failed.id, "attempt": 2, "ref_id": None}): (
            "task-failed",
            "JobFailed('RuntimeError: no luck')",
        )
    }
    assert sorted(event["name"] for event in received.values()) == ["vkjobs.fails"] * 2 + ["vkjobs.noop"] * 2
    assert [read(row.id).status for row in (done, again, failed)] == ["done", "pending", "failed"]


FORGED: list[tuple[list[Any], dict[str, Any], str]] = [
    ([], {}, NAMELESS),
    ([], {"job_id": 1}, NAMELESS),
    ([], {"token": "TOKEN"}, NAMELESS),
    ([], {"job_id": None, "token": "TOKEN"}, NAMELESS),
    ([], {"job_id": True, "token": "TOKEN"}, NAMELESS),
    ([], {"job_id": 1.0, "token": "TOKEN"}, NAMELESS),
    ([], {"job_id": [1], "token": "TOKEN"}, NAMELESS),
    ([], {"job_id": {"id": 1}, "token": "TOKEN"}, NAMELESS),
    ([], {"job_id": "1\0", "token": "TOKEN"}, NAMELESS),
    ([], {"job_id": "\ud800", "token": "TOKEN"}, NAMELESS),
    ([], {"job_id": 1, "token": None}, NAMELESS),
    ([], {"job_id": 1, "token": 1.5e9}, NAMELESS),
    ([], {"job_id": 1, "token": True}, NAMELESS),
    ([], {"job_id": 1, "token": "soon"}, NAMELESS),
    ([], {"job_id": 1, "token": "\ud800\0"}, NAMELESS),
    ([], {"job_id": 1, "token": "2030-01-31T12:00:00"}, NAMELESS),
    ([], {"job_id": 1, "token": "0001-01-01T00:00:00+14:00"}, NAMELESS),
    ([], {"job_id": 1, "token": "9999-12-31T23:59:59-14:00"}, NAMELESS),
    ([], {"job_id": 1, "token": "2030-01-31T12:00:00Z"}, PLAIN),
    ([], {"job_id": 1, "token": "0001-01-01T00:00:00Z"}, PLAIN),
    ([], {"job_id": 2, "token": "TOKEN"}, PLAIN),
    ([], {"job_id": -(10**30), "token": "TOKEN"}, UNHEARD_OF),
    ([], {"job_id": "one", "token": "TOKEN"}, UNHEARD_OF),
    ([], {"job_id": "", "token": "TOKEN"}, UNHEARD_OF),
    ([], {"job_id": "1' or 1 = 1 --", "token": "TOKEN"}, UNHEARD_OF),
    ([], {"job_ids": [], "token": "TOKEN"}, "no job"),
    ([], {"job_ids": 1, "token": "TOKEN"}, "no job"),
    ([], {"job_ids": "1", "token": "TOKEN"}, "no job"),
    ([], {"job_ids": {"1": 1}, "token": "TOKEN"}, "no job"),
    ([], {"job_ids": [None, True, 1.0, [1], {"id": 1}, "1\0", "\ud800"], "token": "TOKEN"}, "no job"),
    ([], {"job_ids": [1, 2]}, "no job"),
    ([], {"job_ids": [1], "token": "soon"}, "no job"),
    ([], {"job_ids": [1, 2], "token": "2030-01-31T12:00:00Z"}, "2 lease moved on"),
    ([], {"job_ids": [2, "one", 10**30, ""], "token": "TOKEN"}, "4 lease moved on"),
    ([None, 1, 2, 3], {}, NAMELESS),
    ([], {"self": 1, "kind": "fails", "status": "done"}, NAMELESS),
]


@pytest.mark.parametrize(("args", "kwargs", "answer"), FORGED)
def test_a_message_without_authority_ends_quietly(
    app: Celery,
    add: Add,
    read: Read,
    redis_url: str,
    calls: list[int],
    args: list[Any],
    kwargs: dict[str, Any],
    answer: str,
) -> None:
    row = add()
    token = taken(app, redis_url).kwargs["token"]
    leased = read(row.id)
    kwargs = {name: token if value == "TOKEN" else value for name, value in kwargs.items()}
    for task in ("vkjobs.noop", "vkjobs.unhandled"):
        assert app.tasks[task].apply(args=args, kwargs=kwargs).get() == answer
    assert read(row.id) == leased
    assert calls == []


def test_what_became_of_many_jobs_is_told_in_numbers(
    app: Celery, add: Add, read: Read, redis_url: str, calls: list[int]
) -> None:
    @vkjobs.handler("many", bulk=10)
    def many(job: Job, ctx: Context) -> None:
        if job.ref_id == "it":
            raise RuntimeError("no luck")

    rows = [add(kind="many", ref_id="it" if number == 1 else "r") for number in range(4)]
    message = taken(app, redis_url)
    assert message.kwargs["job_ids"] == [row.id for row in rows]
    assert run(app, message) == "3 done, 1 retrying"
    assert [read(row.id).status for row in rows] == ["done", "pending", "done", "done"]
    assert run(app, message) == "4 lease moved on"


@pytest.mark.parametrize("task", ["vkjobs.noop", "vkjobs.unhandled"])
def test_a_message_of_many_that_meets_a_worker_without_bulk_is_run_all_the_same(
    app: Celery, add: Add, read: Read, calls: list[int], task: str
) -> None:
    rows = [add(lease_until="2040-01-02 03:04:05.678901+00") for _ in range(2)]
    kwargs = {"job_ids": [row.id for row in rows], "token": "2040-01-02T03:04:05.678901+00:00"}
    assert app.tasks[task].apply(kwargs=kwargs).get() == "2 done"
    assert calls == [row.id for row in rows]


def test_what_else_a_message_says_has_no_say(
    app: Celery, add: Add, read: Read, redis_url: str, calls: list[int]
) -> None:
    row = add(ref_id="task-1")
    message = taken(app, redis_url)
    forged = {**message.kwargs, "kind": "fails", "ref_id": "task-2", "attempts": 9, "self": None, "payload": 1}
    assert run(app, message._replace(task="vkjobs.fails", kwargs=forged)) == "done"  # the row says noop
    assert calls == [row.id]
    assert read(row.id).ref_id == "task-1"


def test_a_worker_takes_garbled_messages_in_its_stride(
    worker: object, other_app: Celery, add: Add, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    for args, kwargs, _ in FORGED:
        for task in ("vkjobs.noop", "vkjobs.unhandled"):
            other_app.send_task(task, args=args, kwargs=kwargs, queue="vkjobs", ignore_result=True)
    row = add()
    assert other_app.send_task("vkjobs.run_due", queue="vkjobs.tick").get(timeout=30) == 1
    wait_for(lambda: read(row.id).status == "done", "the job to be done")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_job_whose_message_comes_twice_runs_once(
    app: Celery, add: Add, read: Read, redis_url: str, calls: list[int]
) -> None:
    row = add()
    message = taken(app, redis_url)
    assert [run(app, message) for _ in range(3)] == ["done", PLAIN, PLAIN]
    assert calls == [row.id]
    assert read(row.id).status == "done"


def test_a_late_message_of_an_earlier_lease_changes_nothing(
    app: Celery, add: Add, read: Read, redis_url: str, engine: Engine, calls: list[int]
) -> None:
    row = add()
    late = taken(app, redis_url)
    with engine.connect() as conn:
        conn.execute(text("update vk_jobs set lease_until = now() - interval '1 second'"))
    fresh = taken(app, redis_url)
    leased = read(row.id)
    assert run(app, late) == PLAIN
    assert read(row.id) == leased
    assert run(app, fresh) == "done"
    assert calls == [row.id]


def test_outcomes_are_texts_or_expected_exceptions(app: Celery, add: Add, read: Read, redis_url: str) -> None:
    @vkjobs.handler("snoozes")
    def snoozes(job: Job, ctx: Context) -> None:
        raise vkjobs.Snooze(datetime(2030, 1, 31, 12, tzinfo=UTC))

    @vkjobs.handler("gives_up")
    def gives_up(job: Job, ctx: Context) -> None:
        raise vkjobs.GiveUp("it is too late")

    add(kind="snoozes")
    assert run(app, taken(app, redis_url)) == "snoozed: until 2030-01-31T12:00:00+00:00"
    add(kind="gives_up")
    with pytest.raises(JobFailed, match="GiveUp: it is too late"):
        run(app, taken(app, redis_url))
    add(kind="fails")
    message = taken(app, redis_url)
    result = app.tasks["vkjobs.fails"].apply(kwargs=message.kwargs)
    assert (result.state, str(result.result)) == ("RETRY", "in 30 s: RuntimeError: no luck")


def test_a_kind_that_only_the_worker_knows_is_run_all_the_same(
    app: Celery, add: Add, read: Read, redis_url: str
) -> None:
    row = add(kind="brand_new")
    message = taken(app, redis_url)
    assert message.task == "vkjobs.unhandled"
    handled = []

    @vkjobs.handler("brand_new", queue="of_its_own")
    def brand_new(job: Job, ctx: Context) -> None:
        handled.append(job.id)

    assert run(app, message) == "done"
    assert handled == [row.id]
    assert read(row.id).status == "done"


def test_a_kind_that_nobody_knows_fails_its_attempt(app: Celery, add: Add, read: Read, redis_url: str) -> None:
    row = add(kind="nobodys", ref_id="task-1", attempts=4)
    with pytest.raises(JobFailed, match=f"Unhandled job kind: nobodys, id: {row.id}"):
        run(app, taken(app, redis_url))
    after = read(row.id)
    assert (after.status, after.attempts) == ("failed", 5)


@pytest.mark.celery(vkjobs_pool_size=1, vkjobs_lease=1, vkjobs_horizon=0.5, vkjobs_tick=0.2)
def test_a_job_is_renewed_while_handlers_have_all_connections_of_the_pool(
    app: Celery, add: Add, read: Read, redis_url: str
) -> None:
    @vkjobs.handler("long")
    def long(job: Job, ctx: Context) -> None:
        ctx.session.execute(text("select 1"))
        first = read(job.id).lease_until
        wait_for(lambda: read(job.id).lease_until != first, "a renewal", patience=20)

    row = add(kind="long")
    assert run(app, taken(app, redis_url)) == "done"
    assert read(row.id).status == "done"


@pytest.mark.celery(vkjobs_batch=1)
@pytest.mark.parametrize(("kind", "state"), [("noop", "SUCCESS"), ("fails", "RETRY"), ("fails", "FAILURE")])
def test_whatever_becomes_of_a_baton_job_it_fires_the_next_run(
    app: Celery, add: Add, redis_url: str, kind: str, state: str
) -> None:
    add(kind=kind, attempts=1 if state == "FAILURE" else 0)
    message = taken(app, redis_url)
    assert waiting(redis_url, "vkjobs.tick") == []
    assert app.tasks[message.task].apply(kwargs=message.kwargs).state == state
    assert run(app, message) == PLAIN  # a message that came too late passes it on too
    for next_run in waiting(redis_url, "vkjobs.tick"):
        assert (next_run.task, next_run.kwargs) == ("vkjobs.run_due", {"by": "baton", "baton": message.kwargs["baton"]})
        assert (next_run.headers["ignore_result"], next_run.properties["delivery_mode"]) == (True, 1)
    assert len(waiting(redis_url, "vkjobs.tick")) == 2


def test_a_message_without_baton_fires_nothing(app: Celery, add: Add, redis_url: str) -> None:
    add()
    assert run(app, taken(app, redis_url)) == "done"
    assert waiting(redis_url, "vkjobs.tick") == []


def test_a_baton_that_the_broker_does_not_take_harms_no_job(
    database_url: str, add: Add, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    with Redis() as server:
        app = vkjobs.setup(make_app(broker_url=server.url, vkjobs_database_url=database_url, vkjobs_batch=1))
        row = add()
        message = taken(app, server.url)
        server.stop()
        assert run(app, message) == "done"
    assert read(row.id).status == "done"
    (record,) = caplog.records
    assert record.getMessage().startswith("baton lost error=")
    assert "\n" not in record.getMessage()


@pytest.mark.celery(vkjobs_tick=30)
def test_surplus_ticks_of_beat_do_nothing_and_calls_by_hand_always_do(app: Celery, add: Add) -> None:
    run_due = app.tasks["vkjobs.run_due"]

    def fire(**kwargs: str) -> Any:
        add()
        return run_due.apply(kwargs=kwargs).get()

    assert fire(by="beat") == 1
    assert [fire(by="beat") for _ in range(3)] == [0, 0, 0]
    assert fire() == 4
    assert fire(by="baton") == 0  # without one
    assert fire(by="beat") == 0


@pytest.mark.celery(vkjobs_tick=0.05)
def test_the_next_tick_of_beat_counts(app: Celery, add: Add) -> None:
    run_due = app.tasks["vkjobs.run_due"]
    run_due.apply(kwargs={"by": "beat"}).get()
    add()
    wait_for(lambda: run_due.apply(kwargs={"by": "beat"}).get() == 1, "a tick that leases")


@pytest.mark.parametrize(
    ("task", "kwargs", "line"),
    [
        ("run_due", {}, "nothing was leased: "),
        ("run_due", {"by": "beat"}, "nothing was leased: "),
        ("enqueue", {"kind": "noop"}, "nothing was written: "),
        ("noop", {"job_id": 1, "token": "2030-01-31T12:00:00Z"}, "job 1 was not started: "),
    ],
)
def test_a_missing_postgres_is_an_expected_error_in_a_line_without_the_password(
    redis_url: str, task: str, kwargs: dict[str, object], line: str
) -> None:
    url = "postgresql://me:secret@127.0.0.1:1/nothing"
    app = make_app(broker_url=redis_url, vkjobs_database_url=url, vkjobs_lease=1, vkjobs_horizon=0)
    fired = vkjobs.setup(app).tasks[f"vkjobs.{task}"]
    with pytest.raises(DatabaseUnavailable) as refused:
        fired.apply(kwargs=kwargs).get()
    assert isinstance(refused.value, fired.throws)
    assert str(refused.value).startswith(line)
    assert "secret" not in str(refused.value)
    assert "\n" not in str(refused.value)
