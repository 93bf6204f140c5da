"""The pools beside prefork: each runs jobs, renews them, and frees what it has not started."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rows import Row
from sqlalchemy import Engine, text
from workers import Worker, wait_for

POOLS = {"threads": ("-B", "-P", "threads", "-c", "2"), "solo": ("-P", "solo"), "gevent": ("-P", "gevent", "-c", "2")}
TIMES = {"VKJOBS_TICK": "0.2", "VKJOBS_LEASE": "1", "VKJOBS_HORIZON": "0.4"}


@pytest.fixture
def effects(engine: Engine, tmp_path: Path) -> Path:
    with engine.connect() as conn:
        conn.execute(text("create table effects (job_id bigint)"))
    return tmp_path / "effects"


@pytest.fixture(params=list(POOLS))
def start(request: pytest.FixtureRequest, start_worker: Callable[..., Worker], effects: Path) -> Callable[..., Worker]:
    def start(app: str = "effects", **settings: str) -> Worker:
        return start_worker(
            app, *POOLS[request.param], "--prefetch-multiplier", "10", EFFECTS=str(effects), **TIMES, **settings
        ).ready()

    return start


def test_a_job_longer_than_its_lease_runs_once_and_short_ones_beside_it(
    start: Callable[..., Worker], add: Callable[..., Row], read: Callable[[Any], Row], effects: Path
) -> None:
    jobs = [add(kind="mark", payload={"seconds": 3})] + [add(kind="mark") for _ in range(20)]
    worker = start()
    wait_for(lambda: all(read(job.id).status == "done" for job in jobs), "the jobs to be done")
    assert [read(job.id).attempts for job in jobs] == [0] * 21
    assert sorted(effects.read_text().split(), key=int) == [str(job.id) for job in jobs]
    assert "lease lost" not in worker.log


def test_sigterm_lets_the_running_job_finish_and_spends_no_attempt(
    start: Callable[..., Worker], add: Callable[..., Row], read: Callable[[Any], Row]
) -> None:
    jobs = [add(kind="mark", payload={"seconds": 1.5}) for _ in range(8)]
    worker = start()
    wait_for(lambda: any(read(job.id).status == "running" for job in jobs), "a job to run")
    worker.signal(signal.SIGTERM)
    assert worker.process.wait(40) == 0
    rows = [read(job.id) for job in jobs]
    assert {row.status for row in rows} == {"done", "pending"}
    assert [row.attempts for row in rows] == [0] * 8


@pytest.mark.parametrize("start", ["threads"], indirect=True)
def test_what_a_stopping_worker_has_received_and_not_started_is_free(
    start: Callable[..., Worker], add: Callable[..., Row], read: Callable[[Any], Row]
) -> None:
    jobs = [add(kind="mark", payload={"seconds": 3}) for _ in range(8)]
    worker = start()
    wait_for(lambda: worker.log.count("Task vkjobs.mark") >= 8, "the worker to have all messages")
    running = [job for job in jobs if read(job.id).status == "running"]
    worker.signal(signal.SIGTERM)
    wait_for(lambda: all(read(job.id).lease_until is None for job in jobs if job not in running), "them to be free")
    assert [read(job.id).status for job in running] == ["running"] * 2, "they were freed only at the end"
    assert worker.process.wait(40) == 0
    assert [read(job.id).status for job in jobs].count("pending") == 6


def test_a_pool_without_time_limits_says_so_at_start(start: Callable[..., Worker]) -> None:
    worker = start("deadly")
    assert worker.log.count("time limits need the prefork pool: in this worker those of hang, slow have no effect") == 1
