from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest
import redis as redis_client
from hosts import make_app
from messages import waiting
from rows import Row
from sqlalchemy import Engine, text
from workers import wait_for

import vkjobs
from vkjobs import Context, Job, database
from vkjobs.dispatch import Baton, Dispatcher
from vkjobs.errors import BrokerUnavailable, DatabaseUnavailable
from vkjobs.handlers import Policy, Registry, registry
from vkjobs.local import Postgres, Redis
from vkjobs.settings import Settings

pytestmark = pytest.mark.usefixtures("emptied")

Add = Callable[..., Row]
Read = Callable[[Any], Row]
Dispatch = Callable[..., int]


@pytest.fixture(scope="module")
def database_url(postgres: Postgres) -> str:
    return postgres.create_database("dispatch", template="migrated")


@pytest.fixture(autouse=True)
def _kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Know the kinds `noop`, `other` and `slow`, the last with a queue of its own."""
    monkeypatch.setattr(registry, "_handlers", {})

    @vkjobs.handler("noop")
    @vkjobs.handler("other", time_limit=60, soft_time_limit=30)
    @vkjobs.handler("slow", queue="slow")
    def work(job: Job, ctx: Context) -> None:
        pass


@pytest.fixture
def dispatch(redis_url: str, engine: Engine) -> Dispatch:
    """Run due: ``dispatch(batch=…)`` with such settings."""
    app = vkjobs.setup(make_app(broker_url=redis_url))

    def run(*, housekeeping: bool = True, **settings: Any) -> int:
        return Dispatcher(app, engine, Settings(**settings), registry).run_due(housekeeping=housekeeping)

    return run


@pytest.fixture
def own_redis() -> Iterator[Redis]:
    with Redis() as server:
        yield server


@pytest.fixture
def dispatch_to(own_redis: Redis, engine: Engine) -> Dispatch:
    """As `dispatch`, to a Redis that the test may stop."""
    app = vkjobs.setup(make_app(broker_url=own_redis.url))
    one_queue = Registry()
    one_queue.register("noop", lambda job, ctx: None, Policy())
    return lambda: Dispatcher(app, engine, Settings(), one_queue).run_due(housekeeping=True)


def execute(engine: Engine, sql: str) -> Any:
    with engine.connect() as conn:
        return conn.execute(text(sql))


def same_instant(one: str, other: str | None) -> bool:
    return other is not None and datetime.fromisoformat(one) == datetime.fromisoformat(other)


def test_each_due_row_travels_as_a_task_of_its_kind(dispatch: Dispatch, add: Add, read: Read, redis_url: str) -> None:
    rows = [add(kind="noop", run_at=-3), add(kind="other", run_at=-2), add(kind="slow", run_at=-1)]
    later = add(kind="noop", run_at=3600)
    assert dispatch() == 3
    messages = [*waiting(redis_url), *waiting(redis_url, "slow")]
    assert [message.task for message in messages] == ["vkjobs.noop", "vkjobs.other", "vkjobs.slow"]
    for row, message in zip(rows, messages, strict=True):
        after = read(row.id)
        assert after.status == "pending"
        assert message.kwargs["job_id"] == row.id
        assert same_instant(message.kwargs["token"], after.lease_until)
    assert read(later.id) == later


def test_a_message_holds_the_id_and_the_token_and_nothing_else(dispatch: Dispatch, add: Add, redis_url: str) -> None:
    for number in range(5):
        add(ref_id=f"secret-{number}", payload={"secret": number})
    assert dispatch(batch=5) == 5
    messages = waiting(redis_url)
    assert [sorted(message.kwargs) for message in messages] == [
        ["baton", "job_id", "token"] if number == 2 else ["job_id", "token"] for number in range(5)
    ]
    baton = messages[2].kwargs["baton"]
    assert sorted(baton) == ["after", "batch", "kinds", "queue", "ready", "token"]
    assert "secret" not in str(baton)
    assert all(message.args == [] for message in messages)


def test_each_queues_batch_has_a_baton_once_it_is_half_full(dispatch: Dispatch, add: Add, redis_url: str) -> None:
    for kind in ("noop", "slow", "slow"):
        add(kind=kind)
    dispatch(batch=4)
    assert ["baton" in message.kwargs for message in waiting(redis_url)] == [False]
    assert ["baton" in message.kwargs for message in waiting(redis_url, "slow")] == [False, True]


@pytest.fixture
def take(redis_url: str, engine: Engine) -> Callable[..., int]:
    """Take a baton: ``take(baton, batch=…)``, with such settings."""
    app = vkjobs.setup(make_app(broker_url=redis_url))

    def run(baton: object, **settings: Any) -> int:
        found = Baton.read(baton)
        assert found is not None
        return Dispatcher(app, engine, Settings(**settings), registry).take(found)

    return run


def batons(redis_url: str, queue: str = "vkjobs") -> list[dict[str, Any]]:
    """Return the batons that wait in a queue, all as if they had come back at once, however slow this machine is."""
    found = [message.kwargs["baton"] for message in waiting(redis_url, queue) if "baton" in message.kwargs]
    return [{**baton, "ready": "2100-01-01T00:00:00+00:00"} for baton in found]


def test_a_tick_fills_a_queue_up_and_batons_fetch_more_as_fast_as_it_is_started(
    dispatch: Dispatch, take: Callable[..., int], engine: Engine, redis_url: str
) -> None:
    execute(engine, "insert into vk_jobs (kind, run_at) select 'noop', now() from generate_series(1, 300)")
    assert [dispatch() for _ in range(3)] == [20, 0, 0]
    (first,) = batons(redis_url)
    assert first["batch"] == 20
    assert take(first) == 40
    second = batons(redis_url)[1]
    assert take(second) == 80
    third = batons(redis_url)[2]
    assert take(third, batch=50, window=1000) == 50
    assert take(third, batch=50, window=140) == 10  # beside the 80 and the 50 that are newer than its own start


@pytest.mark.parametrize(("late", "least", "most"), [(0.8, 2, 15), (2, 0, 0)])
def test_a_baton_that_comes_late_fetches_few_and_one_later_than_a_tick_none(
    dispatch: Dispatch, take: Callable[..., int], engine: Engine, redis_url: str, late: float, least: int, most: int
) -> None:
    execute(engine, "insert into vk_jobs (kind, run_at) select 'noop', now() from generate_series(1, 300)")
    dispatch()
    (baton,) = batons(redis_url)
    with engine.connect() as conn:
        ready = conn.scalar(text("select now() - make_interval(secs => :late)"), {"late": late})
    assert least <= take({**baton, "ready": ready.isoformat()}) <= most


def test_a_baton_goes_on_where_its_batch_ended_and_a_tick_finds_the_rest(
    dispatch: Dispatch, take: Callable[..., int], add: Add, redis_url: str
) -> None:
    for age in range(40, 10, -1):
        add(run_at=-age)
    assert dispatch() == 20
    (baton,) = batons(redis_url)
    late, other = add(run_at=-100), add(kind="unknown", run_at=-5)
    add(kind="slow", run_at=-5)
    assert take(baton) == 12  # the rest, and what has no baton yet, since nothing else is due
    taken = [message.kwargs["job_id"] for message in waiting(redis_url)]
    assert set(taken[20:30]).isdisjoint({late.id, other.id})
    assert taken[30:] == [late.id, other.id]
    assert waiting(redis_url, "slow") == []


def test_a_batch_that_is_leased_ahead_has_a_baton_whose_time_is_its_carriers(
    dispatch: Dispatch, add: Add, redis_url: str
) -> None:
    rows = [add(run_at=10 + number) for number in range(12)]
    assert dispatch(horizon=40.0) == 12
    (carrier,) = [message for message in waiting(redis_url) if "baton" in message.kwargs]
    baton = carrier.kwargs["baton"]
    assert same_instant(baton["ready"], rows[6].run_at)
    assert carrier.kwargs["job_id"] == rows[6].id
    assert datetime.fromisoformat(baton["after"]) < datetime.fromisoformat(rows[0].run_at)


def test_behind_a_backlog_nothing_is_leased_ahead(dispatch: Dispatch, add: Add, redis_url: str) -> None:
    for _ in range(25):
        add(run_at=-1)
    soon = add(run_at=30)
    assert dispatch(horizon=40.0) == 20
    assert soon.id not in [message.kwargs["job_id"] for message in waiting(redis_url)]


@pytest.mark.parametrize("change", [{"queue": 7}, {"batch": "20"}, {"kinds": "noop"}, {"kinds": [1]}, {"after": "soon"},
                                    {"token": None}, {"more": 1}])  # fmt: skip
def test_what_is_no_baton_is_not_taken_for_one(change: dict[str, object]) -> None:
    now = "2026-01-01T00:00:00+00:00"
    good = {"queue": "vkjobs", "batch": 20, "kinds": ["noop"], "token": now, "after": now, "ready": now}
    read = Baton.read(good)
    assert read is not None
    assert read.to_json() == good
    assert Baton.read({**good, **change}) is None
    assert Baton.read(True) is None


def test_a_baton_of_a_queue_that_is_no_more_fetches_nothing(take: Callable[..., int], add: Add) -> None:
    add()
    now = "2026-01-01T00:00:00+00:00"
    gone = {"queue": "gone", "batch": 20, "kinds": ["noop"], "token": now, "after": now, "ready": now}
    assert take(gone) == 0


def test_messages_are_transient_json_and_without_result(dispatch: Dispatch, add: Add, redis_url: str) -> None:
    add(kind="noop")
    add(kind="unknown")
    add(kind="other")
    dispatch()
    for message in waiting(redis_url):
        assert message.content_type == "application/json"
        assert message.properties["delivery_mode"] == 1
        assert message.headers["ignore_result"] is True
        # The worker's policy has the say, not that of who published.
        assert (message.headers["timelimit"], message.headers["expires"]) == ([None, None], None)


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        ({"ref_id": "task-1"}, {"attempt": 1, "ref_id": "task-1"}),
        ({"ref_id": None, "attempts": 3}, {"attempt": 4, "ref_id": None}),
        ({"ref_id": "r" * 1100}, {"attempt": 1, "ref_id": "r" * 200}),
        ({"ref_id": "🎉'\"\n"}, {"attempt": 1, "ref_id": "🎉'\"\n"}),
        ({"kind": "k" * 60, "ref_id": "a"}, {"attempt": 1, "ref_id": "a", "kind": "k" * 60}),
        ({"kind": "k" * 200}, {"attempt": 1, "ref_id": None, "kind": "k" * 200}),
    ],
)
def test_the_shown_arguments_tell_job_attempt_and_ref_id(
    dispatch: Dispatch, add: Add, redis_url: str, columns: dict[str, Any], shown: dict[str, Any]
) -> None:
    row = add(**columns)
    dispatch()
    (message,) = waiting(redis_url)
    assert (message.headers["argsrepr"], message.headers["kwargsrepr"]) == ("()", repr({"job_id": row.id, **shown}))


@pytest.mark.parametrize("kind", ["unknown", "run_due", "enqueue", "unhandled", "k" * 200, "two words", "🎉"])
def test_an_unknown_kind_travels_as_unhandled(dispatch: Dispatch, add: Add, redis_url: str, kind: str) -> None:
    row = add(kind=kind)
    assert dispatch() == 1
    (message,) = waiting(redis_url)
    assert (message.task, message.kwargs["job_id"]) == ("vkjobs.unhandled", row.id)


def test_a_row_due_within_the_horizon_travels_with_its_time(dispatch: Dispatch, add: Add, redis_url: str) -> None:
    overdue, soon, later = add(run_at=-1), add(run_at=30), add(run_at=50)
    assert dispatch(horizon=40.0) == 2
    first, second = waiting(redis_url)
    assert (first.kwargs["job_id"], second.kwargs["job_id"]) == (overdue.id, soon.id)
    assert first.headers["eta"] is None
    assert same_instant(second.headers["eta"], soon.run_at)
    assert dispatch(horizon=60.0) == 1
    assert waiting(redis_url)[-1].kwargs["job_id"] == later.id


def test_the_oldest_rows_go_first(dispatch: Dispatch, take: Callable[..., int], add: Add, redis_url: str) -> None:
    rows = [add(kind=kind, run_at=-seconds) for seconds, kind in enumerate(["noop", "unknown", "other", "noop"], 1)]
    assert dispatch(batch=3, window=10) == 3
    (baton,) = batons(redis_url)
    assert take(baton, batch=3, window=10) == 1
    assert [message.kwargs["job_id"] for message in waiting(redis_url)] == [row.id for row in reversed(rows)]


def test_a_queue_never_holds_more_than_its_window(
    dispatch: Dispatch, take: Callable[..., int], engine: Engine, redis_url: str
) -> None:
    sql = "insert into vk_jobs (kind, run_at) select k, now() from unnest(array['noop', 'slow', 'what']) k, {}"
    execute(engine, sql.format("generate_series(1, 20)"))
    assert dispatch(batch=3, window=5) == 6
    for queue in ("vkjobs", "slow"):
        (baton,) = batons(redis_url, queue)
        assert [take(baton, batch=3, window=5) for _ in range(2)] == [2, 0]
    assert dispatch(batch=3, window=5) == 0
    execute(engine, "update vk_jobs set lease_until = now() - interval '1 hour' where lease_until is not null")
    assert [dispatch(batch=3, window=5) for _ in range(3)] == [0, 0, 0]
    assert [len(waiting(redis_url, queue)) for queue in ("vkjobs", "slow")] == [5, 5]


def test_what_a_broker_has_lost_is_published_again(
    dispatch: Dispatch, engine: Engine, add: Add, read: Read, redis_url: str
) -> None:
    rows = [add() for _ in range(3)]
    dispatch()
    with redis_client.Redis.from_url(redis_url) as broker:
        broker.flushall()
    assert dispatch() == 0
    execute(engine, "update vk_jobs set lease_until = now() - interval '1 second'")
    assert dispatch(housekeeping=False) == 0
    assert dispatch() == 3
    messages = {message.kwargs["job_id"]: message.kwargs["token"] for message in waiting(redis_url)}
    assert all(same_instant(messages[row.id], read(row.id).lease_until) for row in rows)


def test_a_dead_workers_job_is_counted_and_reported_by_a_tick(
    dispatch: Dispatch, add: Add, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    held = {"status": "running", "lease_until": "2020-01-01T00:00Z", "claimed_until": "2020-01-01T00:00Z"}
    row = add(ref_id="task-1", attempts=1, claimed_by="task w1@host 77", started_at=-60, **held)
    assert dispatch(housekeeping=False, lease=1.0, horizon=0.0) == 0
    assert read(row.id) == row

    def freed() -> bool:
        assert dispatch(lease=1.0, horizon=0.0) == 0
        return read(row.id).status == "pending"

    wait_for(freed, "Postgres to be up for a lease")
    after = read(row.id)
    assert (after.status, after.attempts, after.lease_until) == ("pending", 2, None)
    assert after.last_error is not None
    assert after.last_error.startswith("WorkerLost: its lease expired; last held by task w1@host 77\n")
    (record,) = caplog.records
    assert record.getMessage() == (
        f"job failed job_id={row.id} kind=noop ref_id=task-1 attempts=2 final=False "
        "error='WorkerLost: its lease expired; last held by task w1@host 77'"
    )


def test_rows_that_are_not_due_or_not_pending_are_left_alone(dispatch: Dispatch, add: Add, read: Read) -> None:
    held = {"lease_until": 50, "claimed_until": 50, "claimed_by": "me", "started_at": -1}
    rows = [
        add(run_at=3600),
        add(status="done"),
        add(status="failed", attempts=5),
        add(status="cancelled"),
        add(status="running", **held),
    ]
    with_one_lease = add(lease_until=50)
    assert dispatch() == 0
    assert [read(row.id)[:10] for row in rows] == [row[:10] for row in rows]
    assert read(with_one_lease.id) == with_one_lease


def stop(server: Redis) -> None:
    server.stop()


def fill(server: Redis) -> None:
    with redis_client.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", 1)


def restart(server: Redis) -> None:
    server.start()


def empty(server: Redis) -> None:
    with redis_client.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", 0)


@pytest.mark.parametrize(("fail", "mend", "rows"), [(stop, restart, 4), (fill, empty, 4), (fill, empty, 1)])
def test_what_a_broker_does_not_take_is_free_again(
    dispatch_to: Dispatch,
    own_redis: Redis,
    add: Add,
    read: Read,
    caplog: pytest.LogCaptureFixture,
    fail: Callable[[Redis], None],
    mend: Callable[[Redis], None],
    rows: int,
) -> None:
    due = [add(ref_id=f"task-{number}") for number in range(rows)]
    leased = add(lease_until=50)
    fail(own_redis)
    with pytest.raises(BrokerUnavailable) as refused:
        dispatch_to()
    assert str(refused.value) == f"{rows} of {rows} jobs were not published; they are free again"
    for row in due:
        after = read(row.id)
        assert after.lease_until is None
        assert after._replace(updated_at=row.updated_at) == row
    assert read(leased.id) == leased
    lines = [record.getMessage() for record in caplog.records]
    assert 1 <= len(lines) <= 3
    assert all(line.startswith("publish failed job_id=") and "\n" not in line for line in lines)
    mend(own_redis)
    assert dispatch_to() == rows
    assert sorted(message.kwargs["job_id"] for message in waiting(own_redis.url)) == [row.id for row in due]


@pytest.mark.parametrize("broken", ["vkjobs", "slow"])
def test_a_queue_that_takes_nothing_harms_no_other(
    dispatch: Dispatch, add: Add, read: Read, redis_url: str, broken: str
) -> None:
    rows = {"vkjobs": [add(kind="noop") for _ in range(4)], "slow": [add(kind="slow") for _ in range(4)]}
    with redis_client.Redis.from_url(redis_url) as client:
        client.set(broken, "no list")
    with pytest.raises(BrokerUnavailable) as refused:
        dispatch()
    assert str(refused.value) == "4 of 8 jobs were not published; they are free again"
    assert all(read(row.id).lease_until is None for row in rows.pop(broken))
    ((sound, fine),) = rows.items()
    assert [message.kwargs["job_id"] for message in waiting(redis_url, sound)] == [row.id for row in fine]
    assert all(read(row.id).lease_until is not None for row in fine)


def test_a_missing_postgres_is_said_in_a_line_without_the_password(redis_url: str) -> None:
    gone = database.engine("postgresql://me:secret@127.0.0.1:1/nothing", 1)
    with pytest.raises(DatabaseUnavailable) as refused:
        Dispatcher(vkjobs.setup(make_app(broker_url=redis_url)), gone, Settings(), registry).run_due(housekeeping=True)
    line = str(refused.value)
    assert line.startswith("nothing was leased: ")
    assert "\n" not in line
    assert "secret" not in line
    assert waiting(redis_url) == []


@pytest.mark.parametrize(
    "route",
    [
        {"queue": "elsewhere"},
        {"queue": "elsewhere", "exchange": "elsewhere", "routing_key": "elsewhere"},
        {"exchange": "elsewhere", "routing_key": "elsewhere"},
    ],
)
def test_a_hosts_routes_do_not_lead_jobs_astray(
    engine: Engine, add: Add, redis_url: str, route: dict[str, str]
) -> None:
    app = vkjobs.setup(make_app(broker_url=redis_url))
    app.conf.task_routes = {"*": route}
    add()
    assert Dispatcher(app, engine, Settings(), registry).run_due(housekeeping=True) == 1
    assert [message.task for message in waiting(redis_url)] == ["vkjobs.noop"]


def test_log_levels_of_failed_publishes_are_warnings(
    dispatch: Dispatch, add: Add, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    row = add()
    with redis_client.Redis.from_url(redis_url) as client:
        client.set("vkjobs", "no list")
    with pytest.raises(BrokerUnavailable):
        dispatch()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    seen = vars(record)
    assert (seen["event"], seen["job_id"], seen["kind"]) == ("publish failed", row.id, "noop")
    assert "WRONGTYPE" in seen["error"]


def test_a_connection_that_the_broker_has_closed_meanwhile_is_replaced(
    dispatch_to: Dispatch, own_redis: Redis, add: Add, caplog: pytest.LogCaptureFixture
) -> None:
    first = add()
    assert dispatch_to() == 1
    rows = [first, add(), add()]
    with redis_client.Redis.from_url(own_redis.url) as client:
        client.client_kill_filter(_type="normal")
    assert dispatch_to() == 2
    assert [message.kwargs["job_id"] for message in waiting(own_redis.url)] == [row.id for row in rows]
    assert caplog.records == []
