"""A real worker with its embedded beat, its jobs, its broker's depth, and its death."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis as redis_client
from rows import Row
from sqlalchemy import Engine, make_url, text
from workers import Worker, wait_for

from vkjobs.local import Redis
from vkjobs.settings import Settings


@pytest.fixture
def effects(engine: Engine, tmp_path: Path) -> Path:
    with engine.connect() as conn:
        conn.execute(text("create table effects (job_id bigint)"))  # no unique constraint: a double shows
    return tmp_path / "effects"


@pytest.fixture
def worker(start_worker: Callable[..., Worker], effects: Path) -> Callable[..., Worker]:
    def start(*options: str, **environment: str) -> Worker:
        return start_worker("effects", "-B", "-c", "2", *options, EFFECTS=str(effects), **environment)

    return start


def scalar(engine: Engine, sql: str) -> Any:
    with engine.connect() as conn:
        return conn.execute(text(sql)).scalar_one()


def add_many(engine: Engine, kind: str, number: int, payload: str = "null") -> None:
    sql = """
        insert into vk_jobs (kind, ref_id, run_at, payload)
        select :kind, 'r' || i, now(), cast(:payload as jsonb) from generate_series(1, :number) i"""
    with engine.connect() as conn:
        conn.execute(text(sql), {"kind": kind, "number": number, "payload": payload})


def test_five_thousand_jobs_run_and_the_broker_never_holds_more_than_the_window(
    engine: Engine, worker: Callable[..., Worker], redis_url: str
) -> None:
    add_many(engine, "noop", 5000)
    worker("-l", "WARNING")
    deepest = 0
    with redis_client.Redis.from_url(redis_url) as broker:

        def all_done() -> bool:
            nonlocal deepest
            deepest = max(deepest, broker.llen("vkjobs"))
            return bool(scalar(engine, "select count(*) = 5000 from vk_jobs where status = 'done'"))

        wait_for(all_done, "5,000 jobs to be done", patience=100)
    assert 0 < deepest <= Settings().window
    assert scalar(engine, "select count(*) from vk_jobs where attempts > 0") == 0


def test_a_killed_worker_loses_nothing_and_doubles_nothing(
    engine: Engine, worker: Callable[..., Worker], effects: Path
) -> None:
    add_many(engine, "mark", 300, '{"seconds": 0.02}')
    first = worker(VKJOBS_LEASE="3", VKJOBS_BACKOFF="0")
    wait_for(lambda: scalar(engine, "select count(*) from effects") > 30, "the first worker to be in the middle")
    first.kill()
    running = scalar(engine, "select count(*) from vk_jobs where status = 'running'")
    worker(VKJOBS_LEASE="3", VKJOBS_BACKOFF="0")
    wait_for(
        lambda: scalar(engine, "select count(*) = 300 from vk_jobs where status = 'done'"),
        "all jobs to be done",
    )
    assert scalar(engine, "select count(*) from effects") == 300
    assert scalar(engine, "select count(distinct job_id) from effects") == 300
    assert scalar(engine, "select coalesce(sum(attempts), 0) from vk_jobs") == running <= 2
    starts = Counter(effects.read_text().split())
    assert set(starts) == {str(id) for id in range(1, 301)}
    assert sum(starts.values()) <= 300 + running


def test_a_job_due_later_is_started_at_its_time_and_never_before(
    engine: Engine, worker: Callable[..., Worker], add: Callable[..., Row], read: Callable[[Any], Row]
) -> None:
    worker().ready()
    jobs = [add(kind="noop", run_at=1.5 + number * 0.05) for number in range(20)]
    wait_for(lambda: all(read(job.id).status == "done" for job in jobs), "the jobs to be done")
    assert scalar(engine, "select count(*) from vk_jobs where started_at < run_at") == 0
    late = scalar(engine, "select max(extract(epoch from started_at - run_at)) from vk_jobs")
    assert late < Settings().tick, "they waited for a tick"


@pytest.mark.parametrize("minutes", [10, -10])
def test_jobs_start_at_their_time_by_the_databases_clock_whatever_the_workers_says(
    engine: Engine,
    database_url: str,
    worker: Callable[..., Worker],
    add: Callable[..., Row],
    read: Callable[[Any], Row],
    minutes: int,
) -> None:
    clock = """
        create function skewed.{0}() returns timestamptz language sql volatile
        as 'select pg_catalog.{0}() + interval ''{1} minutes'' '"""
    with engine.connect() as conn:
        conn.exec_driver_sql("create schema skewed")
        for name in ("now", "statement_timestamp", "clock_timestamp"):
            conn.exec_driver_sql(clock.format(name, minutes))
        database = make_url(database_url).database
        conn.exec_driver_sql(f"alter database {database} set search_path = skewed, pg_catalog, public")
    engine.dispose()
    worker().ready()
    jobs = [add(kind="noop", run_at=1.5 + number * 0.05) for number in range(20)]
    wait_for(lambda: all(read(job.id).status == "done" for job in jobs), "the jobs to be done")
    assert scalar(engine, "select count(*) from vk_jobs where started_at < run_at") == 0
    late = scalar(engine, "select max(extract(epoch from started_at - run_at)) from vk_jobs")
    assert late < Settings().tick, "they waited for a tick"


def test_a_long_job_keeps_its_lease_and_runs_once(
    worker: Callable[..., Worker], add: Callable[..., Row], read: Callable[[Any], Row], effects: Path
) -> None:
    job = add(kind="mark", payload={"seconds": 4})
    worker(VKJOBS_LEASE="1", VKJOBS_HORIZON="0.5", VKJOBS_TICK="0.2")
    wait_for(lambda: read(job.id).status == "done", "the job to be done")
    assert read(job.id).attempts == 0
    assert effects.read_text().split() == [str(job.id)]


def test_sigterm_lets_what_runs_finish_and_spends_no_attempt(
    engine: Engine, worker: Callable[..., Worker], effects: Path
) -> None:
    add_many(engine, "mark", 30, '{"seconds": 1}')
    first = worker().ready()
    wait_for(lambda: scalar(engine, "select count(*) = 2 from vk_jobs where status = 'running'"), "two jobs to run")
    first.signal(signal.SIGTERM)
    assert first.process.wait(30) == 0
    assert scalar(engine, "select count(*) from vk_jobs where status = 'running'") == 0
    assert scalar(engine, "select count(*) from vk_jobs where attempts > 0") == 0
    done = scalar(engine, "select count(*) from vk_jobs where status = 'done'")
    assert done == scalar(engine, "select count(*) from effects") == len(effects.read_text().split())


def test_a_worker_outlives_a_redis_that_goes_away_while_it_holds_messages(
    engine: Engine, worker: Callable[..., Worker]
) -> None:
    add_many(engine, "mark", 20, '{"seconds": 0.5}')
    with Redis() as broker:
        one = worker("--prefetch-multiplier", "8", VKJOBS_BROKER_URL=broker.url, VKJOBS_LEASE="3").ready()
        wait_for(lambda: "mark[" in one.log, "the worker to hold messages")
        broker.kill()
        wait_for(lambda: "Trying again in" in one.log or one.process.poll() is not None, "the worker to notice")
        broker.start()
        wait_for(
            lambda: scalar(engine, "select count(*) = 20 from vk_jobs where status = 'done'") or one.process.poll(),
            "the jobs to be done",
        )
        assert one.process.poll() is None, one.log
    assert scalar(engine, "select sum(attempts) from vk_jobs") == 0


def test_a_worker_leaves_no_file_and_its_hosts_queue_is_still_read(
    worker: Callable[..., Worker], redis_url: str, read: Callable[[Any], Row], add: Callable[..., Row]
) -> None:
    one = worker().ready()
    job = add(kind="noop")
    wait_for(lambda: read(job.id).status == "done", "the job to be done")
    assert "celery " in one.log.split("[queues]")[1].split("[tasks]")[0]
    assert one.stop() == 0
    assert list(one.folder.iterdir()) == []
