"""Kinds with bulk: which jobs travel in one message, how many wait, and what becomes of those whose worker died."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
import redis as redis_client
from hosts import make_app
from messages import Message, waiting
from rows import Row
from sqlalchemy import Engine, text
from workers import wait_for

import vkjobs
from vkjobs import Context, Job
from vkjobs.dispatch import Baton, Dispatcher
from vkjobs.errors import BrokerUnavailable
from vkjobs.handlers import registry
from vkjobs.local import Postgres
from vkjobs.settings import Settings

pytestmark = pytest.mark.usefixtures("emptied")

Add = Callable[..., Row]
Read = Callable[[Any], Row]


@pytest.fixture(scope="module")
def database_url(postgres: Postgres) -> str:
    return postgres.create_database("dispatch_bulk", template="migrated")


@pytest.fixture(autouse=True)
def _kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Know `noop`; `few` and `some`, of three and five a message, and `apart`, of three with a queue of its own."""
    monkeypatch.setattr(registry, "_handlers", {})

    @vkjobs.handler("noop")
    @vkjobs.handler("few", bulk=3)
    @vkjobs.handler("some", bulk=5)
    @vkjobs.handler("apart", bulk=3, queue="apart")
    @vkjobs.handler("one", bulk=1)
    def work(job: Job, ctx: Context) -> None:
        pass


class Dispatch:
    """A dispatcher with any settings."""

    def __init__(self, broker_url: str, engine: Engine) -> None:
        self._app = vkjobs.setup(make_app(broker_url=broker_url))
        self._engine = engine

    def __call__(self, **settings: Any) -> int:
        return self._with(settings).run_due(housekeeping=True)

    def take(self, baton: dict[str, Any], **settings: Any) -> int:
        found = Baton.read({**baton, "ready": "2100-01-01T00:00:00+00:00"})  # it came back at once
        assert found is not None
        return self._with(settings).take(found)

    def _with(self, settings: dict[str, Any]) -> Dispatcher:
        return Dispatcher(self._app, self._engine, Settings(**settings), registry)


@pytest.fixture
def dispatch(redis_url: str, engine: Engine) -> Dispatch:
    return Dispatch(redis_url, engine)


def execute(engine: Engine, sql: str) -> None:
    with engine.connect() as conn:
        conn.execute(text(sql))


def ids(messages: list[Message]) -> list[list[Any]]:
    """The ids that each message carries."""
    return [message.kwargs["job_ids"] if "job_ids" in message.kwargs else [message.kwargs["job_id"]]
            for message in messages]  # fmt: skip


def batons(messages: list[Message]) -> list[dict[str, Any]]:
    return [message.kwargs["baton"] for message in messages if "baton" in message.kwargs]


# Lanes


def test_one_message_carries_as_many_jobs_as_the_kinds_bulk(dispatch: Dispatch, add: Add, redis_url: str) -> None:
    rows = [add(kind="few", run_at=-100 + number, ref_id="secret", payload=["secret"]) for number in range(3)]
    assert dispatch(batch=20) == 3
    rows += [add(kind="some", run_at=-50 + number) for number in range(7)]
    assert dispatch(batch=20) == 7
    messages = waiting(redis_url)
    assert ids(messages) == [[row.id for row in rows[start:end]] for start, end in ((0, 3), (3, 8), (8, 10))]
    assert [message.task for message in messages] == ["vkjobs.few", "vkjobs.some", "vkjobs.some"]
    first = messages[0]
    assert sorted(first.kwargs) == ["job_ids", "token"]
    assert "secret" not in str(first)
    assert first.headers["kwargsrepr"] == repr({"jobs": 3, "job_ids": f"{rows[0].id} … {rows[2].id}"})


def test_a_bulk_of_one_travels_as_any_job(dispatch: Dispatch, add: Add, redis_url: str) -> None:
    rows = [add(kind="one"), add(kind="noop")]
    assert dispatch() == 2
    assert [message.kwargs["job_id"] for message in waiting(redis_url)] == [row.id for row in rows]


def test_each_bulk_kind_travels_apart_in_its_queue_and_is_leased_once(
    dispatch: Dispatch, add: Add, redis_url: str
) -> None:
    kinds = ["few", "noop", "some", "unknown", "apart"]
    rows = [add(kind=kind, run_at=-number) for number in range(10) for kind in kinds]
    assert dispatch(batch=20) == 10 + 10 + 10 + 20
    kind_of = {row.id: row.kind for row in rows}
    shared, apart = waiting(redis_url), waiting(redis_url, "apart")
    assert {kind_of[id] for carried in ids(apart) for id in carried} == {"apart"}
    assert {kind_of[id] for carried in ids(shared) for id in carried} == set(kinds) - {"apart"}
    for message in [*shared, *apart]:
        (kind,) = {kind_of[id] for id in ids([message])[0]}
        assert message.task == ("vkjobs.unhandled" if kind == "unknown" else f"vkjobs.{kind}")
    everything = [id for carried in ids([*shared, *apart]) for id in carried]
    assert len(everything) == len(set(everything))


# Parts


def test_jobs_of_the_same_moment_to_come_share_a_message_and_no_others(
    dispatch: Dispatch, engine: Engine, add: Add, redis_url: str
) -> None:
    due = [add(kind="few") for _ in range(2)]
    execute(
        engine, "insert into vk_jobs (kind, run_at) select 'few', now() + interval '20 s' from generate_series(1, 4)"
    )
    later = add(kind="few", run_at=25)
    assert dispatch(horizon=30.0) == 7
    messages = waiting(redis_url)
    assert ids(messages) == [[row.id for row in due], [3, 4, 5], [6], [later.id]]
    etas = [message.headers["eta"] for message in messages]
    assert etas[0] is None
    assert etas[1] == etas[2] != etas[3]
    with engine.connect() as conn:
        (run_at,) = conn.execute(text("select distinct run_at from vk_jobs where id in (3, 4, 5)")).scalars()
    assert datetime.fromisoformat(etas[1]) == run_at


@pytest.mark.parametrize(
    "columns", [{"attempts": 1}, {"last_error": "WorkerLost: …"}, {"attempts": 2, "last_error": "x"}]
)
def test_a_suspect_travels_alone(dispatch: Dispatch, add: Add, redis_url: str, columns: dict[str, Any]) -> None:
    rows = [add(kind="some", run_at=-50 + number, **(columns if number in (2, 3) else {})) for number in range(5)]
    assert dispatch() == 5
    a, b, c, d, e = (row.id for row in rows)
    assert ids(waiting(redis_url)) == [[a, b], [c], [d], [e]]


def test_leases_of_different_tokens_share_no_message(
    dispatch: Dispatch, engine: Engine, add: Add, redis_url: str
) -> None:
    """Where a row cannot be leased the others are, each by a statement of its own."""
    rows = [add(kind="some", ref_id="it" if number == 1 else "r") for number in range(3)]
    execute(engine, "create function refuse() returns trigger language plpgsql as 'begin raise ''no''; end'")
    execute(engine, "create trigger refuse before update on vk_jobs for each row when (new.ref_id = 'it') "
                    "execute function refuse()")  # fmt: skip
    try:
        assert dispatch() == 2
    finally:
        execute(engine, "drop function refuse cascade")
    assert ids(waiting(redis_url)) == [[rows[0].id], [rows[2].id]]


def test_expired_jobs_are_leased_again_in_as_few_messages(
    dispatch: Dispatch, engine: Engine, read: Read, redis_url: str
) -> None:
    execute(engine, "insert into vk_jobs (kind, run_at, lease_until) select 'few', now(), now() - interval '1 s' "
                    "from generate_series(1, 8)")  # fmt: skip
    assert dispatch() == 8
    messages = waiting(redis_url)
    assert [len(carried) for carried in ids(messages)] == [3, 3, 2]
    assert {message.kwargs["token"] for message in messages} == {
        datetime.fromisoformat(read(1).lease_until or "").isoformat()
    }


def test_what_is_not_published_is_free_with_all_its_message(engine: Engine, add: Add, read: Read) -> None:
    rows = [add(kind="some") for _ in range(7)]
    with pytest.raises(BrokerUnavailable, match=r"^7 of 7 jobs were not published; they are free again$"):
        Dispatch("redis://127.0.0.1:1/0", engine)()
    for row in rows:
        assert read(row.id).lease_until is None


# Window and baton


def test_the_window_of_a_bulk_kind_is_of_messages(dispatch: Dispatch, engine: Engine, redis_url: str) -> None:
    execute(engine, "insert into vk_jobs (kind, run_at) select 'few', now() from generate_series(1, 500)")
    settings = {"batch": 4, "window": 10}
    assert dispatch(**settings) == 4
    (baton,) = batons(waiting(redis_url))
    assert [dispatch.take(baton, **settings) for _ in range(5)] == [8, 8, 8, 2, 0]
    assert len(waiting(redis_url)) <= 10 + 5
    assert dispatch(**settings) == 0


def test_a_baton_of_a_bulk_kind_doubles_its_batches_up_to_a_statements_most(
    dispatch: Dispatch, engine: Engine, redis_url: str
) -> None:
    execute(engine, "insert into vk_jobs (kind, run_at) select 'few', now() from generate_series(1, 6000)")
    execute(
        engine, "insert into vk_jobs (kind, run_at) select 'some', now() - interval '1 h' from generate_series(1, 9)"
    )
    assert dispatch(batch=1000, window=10_000) == 20 + 9
    found = [baton for baton in batons(waiting(redis_url)) if baton["kinds"] == ["few"]]
    sizes = []
    for _ in range(8):
        sizes.append(dispatch.take(found[-1], batch=1000, window=10_000))
        found = [baton for baton in batons(waiting(redis_url)) if baton["kinds"] == ["few"]]
    assert sizes == [40, 80, 160, 320, 640, 1280, 2000, 1460]


def test_the_baton_travels_in_the_message_of_its_carrier(dispatch: Dispatch, engine: Engine, redis_url: str) -> None:
    execute(engine, "insert into vk_jobs (kind, run_at) select 'few', now() from generate_series(1, 60)")
    assert dispatch() == 20
    messages = waiting(redis_url)
    (position,) = [number for number, message in enumerate(messages) if "baton" in message.kwargs]
    carried = ids(messages)
    assert sum(map(len, carried[:position])) <= 10 < sum(map(len, carried[: position + 1]))


@pytest.mark.parametrize("change", [{"kinds": ["some"]}, {"kinds": []}, {"queue": "apart"}, {"queue": "gone"}])
def test_a_baton_fetches_for_its_own_lane_alone(
    dispatch: Dispatch, engine: Engine, redis_url: str, change: dict[str, Any]
) -> None:
    execute(engine, "insert into vk_jobs (kind, run_at) select 'few', now() from generate_series(1, 60)")
    dispatch()
    (baton,) = batons(waiting(redis_url))
    assert dispatch.take({**baton, **change}) == 0
    assert dispatch.take(baton) == 40


def test_a_full_queue_of_one_lane_leaves_another_lane_its_room(
    dispatch: Dispatch, engine: Engine, redis_url: str
) -> None:
    execute(engine, "insert into vk_jobs (kind, run_at) select 'noop', now() from generate_series(1, 60)")
    assert dispatch() == 20
    execute(engine, "insert into vk_jobs (kind, run_at) select 'few', now() from generate_series(1, 60)")
    assert dispatch() == 20
    assert Counter(message.task for message in waiting(redis_url)) == {"vkjobs.noop": 20, "vkjobs.few": 7}


# Dead workers


def lose(engine: Engine) -> None:
    """Let whatever waits be claimed by a worker that then dies with all its children."""
    with engine.connect() as conn:  # before that, Postgres would give it the time to renew
        up = text("select now() - pg_postmaster_start_time() > interval '2 s'")
        wait_for(lambda: conn.scalar(up), "Postgres to have been up for a lease")
    execute(
        engine,
        """update vk_jobs set status = 'running', claimed_by = 'task w@host 7', started_at = now(),
            lease_until = now() - interval '1 s', claimed_until = now() - interval '1 s'
            where lease_until is not null""",
    )


def test_the_jobs_of_a_worker_that_died_are_tried_alone_before_an_attempt_counts(
    dispatch: Dispatch, engine: Engine, add: Add, read: Read, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vkjobs")
    rows = [add(kind="few") for _ in range(3)]
    settings = {"lease": 1.0, "horizon": 0.5, "backoff": 3600.0}
    dispatch(**settings)
    with redis_client.Redis.from_url(redis_url) as broker:
        broker.flushall()
    lose(engine)
    assert dispatch(**settings) == 3
    for before, after in ((row, read(row.id)) for row in rows):
        assert (after.status, after.attempts, after.run_at, after.claimed_by) == ("pending", 0, before.run_at, None)
        assert (after.last_error or "").startswith("WorkerLost: its lease expired; last held by task w@host 7")
    assert ids(waiting(redis_url)) == [[row.id] for row in rows]
    assert [record.__dict__["event"] for record in caplog.records] == ["job put back"] * 3
    lose(engine)
    assert dispatch(**settings) == 0
    assert [(read(row.id).status, read(row.id).attempts) for row in rows] == [("pending", 1)] * 3


@pytest.mark.parametrize("kind", ["noop", "one", "unknown"])
def test_of_a_kind_without_bulk_an_attempt_counts_at_once(
    dispatch: Dispatch, engine: Engine, add: Add, read: Read, kind: str
) -> None:
    row = add(kind=kind, lease_until=60)
    lose(engine)
    dispatch(lease=2.0, backoff=3600.0)
    assert read(row.id).attempts == 1


def test_a_job_that_is_renewed_after_all_is_not_put_back(
    dispatch: Dispatch, engine: Engine, add: Add, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = add(kind="few", lease_until=60)
    lose(engine)
    found = vkjobs.ledger.lost

    def lost_and_renewed(*args: Any, **values: Any) -> Any:
        told = found(*args, **values)
        execute(
            engine, "update vk_jobs set lease_until = now() + interval '9 s', claimed_until = now() + interval '9 s'"
        )
        return told

    monkeypatch.setattr(vkjobs.ledger, "lost", lost_and_renewed)
    dispatch(lease=2.0)
    after = read(row.id)
    assert (after.status, after.last_error, after.claimed_by) == ("running", None, "task w@host 7")
