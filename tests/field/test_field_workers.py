"""Failures of cases.md that take real workers, or a RabbitMQ."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis as redis_client
from chaos.servers import RabbitMQ
from hosts import make_app
from original import execute
from rows import Row
from sqlalchemy import Engine, text
from workers import Worker, wait_for

import vkjobs
from vkjobs.dispatch import Dispatcher
from vkjobs.errors import BrokerUnavailable
from vkjobs.handlers import Policy, Registry
from vkjobs.local import Redis
from vkjobs.settings import Settings

Start = Callable[..., Worker]
Add = Callable[..., Row]


@pytest.fixture
def effects(database_url: str, tmp_path: Path) -> Path:
    execute(database_url, "create table effects (job_id bigint)")
    return tmp_path / "effects"


def count(engine: Engine, what: str) -> int:
    with engine.connect() as conn:
        return int(conn.execute(text(f"select count(*) from {what}")).scalar_one())


def all_done(engine: Engine) -> bool:
    return count(engine, "vk_jobs where status <> 'done'") == 0


# F03


def test_a_message_that_the_broker_delivers_again_while_its_job_runs_starts_nothing(
    start_worker: Start, add: Add, engine: Engine, effects: Path
) -> None:
    options = ("--prefetch-multiplier", "1", "-c", "1")
    rows = [add(kind="mark", payload={"seconds": 4}) for _ in range(2)]
    for _ in range(2):
        start_worker("impatient_redis", "-B", *options, EFFECTS=str(effects)).ready()
    wait_for(lambda: all_done(engine), "the jobs to be done")
    assert sorted(effects.read_text().split()) == sorted(str(row.id) for row in rows)
    assert count(engine, "vk_jobs where attempts > 0") == 0


# F13: nothing that beat leaves behind or finds is needed


def test_beat_ticks_with_a_corrupt_schedule_a_strange_pid_file_and_another_interval(
    start_worker: Start, add: Add, engine: Engine, effects: Path
) -> None:
    environment = {"EFFECTS": str(effects)}
    first = start_worker("effects", "-B", VKJOBS_TICK="5", **environment).ready()
    first.kill()
    (first.folder / "celerybeat-schedule").write_bytes(b"\0corrupt")
    (first.folder / "celerybeat.pid").write_text("1\n")
    again = start_worker("effects", "-B", VKJOBS_TICK="0.2", **environment)
    (again.folder / "celerybeat-schedule").write_bytes(b"\0corrupt")
    (again.folder / "celerybeat.pid").write_text("1\n")
    again.ready()
    add(kind="mark")
    wait_for(lambda: all_done(engine), "a tick")
    assert "beat is silent" not in again.log


# F16


def test_what_redis_evicts_when_its_memory_is_full_runs_all_the_same(
    start_worker: Start, engine: Engine, database_url: str, effects: Path
) -> None:
    with Redis() as broker, redis_client.Redis.from_url(broker.url) as client:
        client.config_set("maxmemory", "2mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
        execute(database_url, "insert into vk_jobs (kind, run_at) select 'mark', now() from generate_series(1, 200)")
        quick = {"VKJOBS_LEASE": "1", "VKJOBS_HORIZON": "0.4", "VKJOBS_TICK": "0.2", "EFFECTS": str(effects)}
        start_worker("effects", "-B", "-c", "2", VKJOBS_BROKER_URL=broker.url, **quick).ready()
        wait_for(lambda: count(engine, "vk_jobs where status = 'done'") > 20, "jobs to be done")
        client.delete(*client.scan_iter("_kombu*"), "none")
        for number in range(40):
            client.set(f"ballast-{number}", b"x" * 50_000)
        wait_for(lambda: all_done(engine), "the jobs to be done")
    assert count(engine, "effects") == 200
    assert count(engine, "vk_jobs where attempts > 0") == 0


# Children that are recycled


@pytest.mark.parametrize("limit", [("--max-tasks-per-child", "1"), ("--max-memory-per-child", "1000")])
def test_children_that_are_recycled_lose_nothing_and_spend_no_attempt(
    start_worker: Start, engine: Engine, database_url: str, effects: Path, limit: tuple[str, str]
) -> None:
    execute(database_url, "insert into vk_jobs (kind, run_at) select 'mark', now() from generate_series(1, 12)")
    start_worker("effects", "-B", "-c", "2", *limit, EFFECTS=str(effects)).ready()
    wait_for(lambda: all_done(engine), "the jobs to be done")
    assert count(engine, "effects") == 12
    assert count(engine, "vk_jobs where attempts > 0") == 0
    assert count(engine, "(select distinct split_part(claimed_by, ' ', 3) from vk_jobs) pids") > 4


# A table that is locked for long


@pytest.mark.parametrize("kind", ["mark", "mark_bulk"])
def test_a_table_that_somebody_locks_is_waited_for_and_costs_nothing(
    start_worker: Start, add: Add, engine: Engine, effects: Path, kind: str
) -> None:
    worker = start_worker("bulky", "-B", "-c", "6", EFFECTS=str(effects)).ready()  # ticks wait for the table too
    rows = [add(kind="mark", payload={"seconds": 3}), *(add(kind=kind, run_at=2.5) for _ in range(5))]
    leased = "vk_jobs where status = 'pending' and lease_until is not null and run_at > now()"
    wait_for(lambda: count(engine, "vk_jobs where status = 'running'") == 1, "a job to run")
    wait_for(lambda: count(engine, leased) == 5, "the others to be leased")
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as conn:
        conn.execute(text("lock table vk_jobs in access exclusive mode"))
        wait_for(lambda: "retry: " in worker.log or "not started: " in worker.log, "a job to give its slot back")
        conn.rollback()
    wait_for(lambda: all_done(engine), "the jobs to be done")
    assert sorted(effects.read_text().split()) == sorted(str(row.id) for row in rows)
    assert count(engine, "vk_jobs where attempts > 0") == 0
    worker.signal(signal.SIGTERM)
    assert worker.process.wait(30) == 0


# F08, F15: RabbitMQ


@pytest.fixture
def rabbitmq() -> Iterator[RabbitMQ]:
    if not RabbitMQ.is_installed():
        pytest.skip("apt-get install rabbitmq-server")
    with RabbitMQ() as broker:
        yield broker


def test_a_rabbitmq_out_of_memory_holds_up_no_run_and_loses_nothing(
    rabbitmq: RabbitMQ, start_worker: Start, add: Add, engine: Engine, effects: Path
) -> None:
    kinds = Registry()
    kinds.register("mark", lambda job, ctx: None, Policy())
    app = vkjobs.setup(make_app(broker_url=rabbitmq.url))
    for _ in range(20):
        add(kind="mark")
    rabbitmq.control("set_vm_memory_high_watermark", "0.00001")
    began = time.monotonic()
    with suppress(BrokerUnavailable):  # by the size of its buffers
        Dispatcher(app, engine, Settings(lease=2, horizon=1), kinds).run_due(housekeeping=True)
    assert time.monotonic() - began < 30
    rabbitmq.control("set_vm_memory_high_watermark", "0.4")
    quick = {"VKJOBS_BROKER_URL": rabbitmq.url, "VKJOBS_LEASE": "2", "VKJOBS_HORIZON": "1", "EFFECTS": str(effects)}
    start_worker("effects", "-B", "-c", "2", **quick).ready()
    wait_for(lambda: all_done(engine), "the jobs to be done")
    assert count(engine, "effects") == 20
    assert count(engine, "vk_jobs where attempts > 0") == 0


def test_a_message_is_acknowledged_before_its_job_runs(
    rabbitmq: RabbitMQ, start_worker: Start, add: Add, engine: Engine, effects: Path
) -> None:
    """So that no ``consumer_timeout`` of RabbitMQ, which ends the channel, can meet a job that takes long."""
    add(kind="mark", payload={"seconds": 4})
    options = ("-B", "-c", "2", "--prefetch-multiplier", "1")
    start_worker("effects", *options, VKJOBS_BROKER_URL=rabbitmq.url, EFFECTS=str(effects)).ready()
    wait_for(lambda: count(engine, "vk_jobs where status = 'running'") == 1, "the job to run")
    time.sleep(0.5)
    told = rabbitmq.control("list_queues", "name", "messages_unacknowledged")
    assert dict(line.split("\t") for line in told.splitlines() if "\t" in line)["vkjobs"] == "0"
    for _ in range(10):
        add(kind="mark")
    wait_for(lambda: count(engine, "vk_jobs where status = 'done'") == 10, "short jobs beside it")
    wait_for(lambda: all_done(engine), "all")
