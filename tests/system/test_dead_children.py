"""Children that die in the middle of a job: settled at once by their worker's main process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from rows import Row
from sqlalchemy import Engine, text
from workers import Worker, wait_for


@pytest.fixture
def worker(start_worker: Callable[..., Worker], engine: Engine, tmp_path: Path) -> Worker:
    # A lease so long that nothing but the main process can have settled a job in time.
    settings = {
        "VKJOBS_LEASE": "3600",
        "VKJOBS_MAX_ATTEMPTS": "2",
        "VKJOBS_BACKOFF": "0",
        "EFFECTS": str(tmp_path / "effects"),
    }
    return start_worker("deadly", "-B", "-c", "2", **settings).ready()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("kill", "SIGKILL"),
        ("exit", "exitcode 3"),
        ("segfault", "SIGSEGV"),
        ("memory", "MemoryError"),
        ("hang", "time limit of 1 s"),
        ("slow", "SoftTimeLimitExceeded"),
    ],
)
def test_a_job_that_ends_its_process_fails_after_its_attempts_and_says_how(
    worker: Worker, add: Callable[..., Row], read: Callable[[Any], Row], kind: str, says: str
) -> None:
    job = add(kind=kind)
    others = [add(kind="noop") for _ in range(20)]
    wait_for(lambda: read(job.id).status == "failed", "the job to fail for good")
    after = read(job.id)
    assert after.attempts == 2
    assert says in (after.last_error or "")
    wait_for(lambda: all(read(other.id).status == "done" for other in others), "its neighbours to be done")
    assert [read(other.id).attempts for other in others] == [0] * 20


def test_a_job_terminated_by_hand_counts_a_failed_attempt(
    worker: Worker, add: Callable[..., Row], read: Callable[[Any], Row], redis_url: str
) -> None:
    job = add(kind="long")
    wait_for(lambda: read(job.id).status == "running", "the job to run")
    task_id = (read(job.id).claimed_by or "").split()[0]
    with Celery(broker=redis_url) as client:
        client.control.terminate(task_id)
        wait_for(lambda: read(job.id).attempts == 1, "the attempt to be counted")
    assert "process died" in (read(job.id).last_error or "")


def test_a_child_killed_from_outside_is_settled_by_its_own_row(
    worker: Worker, add: Callable[..., Row], read: Callable[[Any], Row]
) -> None:
    job = add(kind="long")
    wait_for(lambda: read(job.id).status == "running", "the job to run")
    os.kill(int((read(job.id).claimed_by or "").split()[-1]), signal.SIGKILL)
    wait_for(lambda: read(job.id).attempts == 1, "the attempt to be counted")


def test_a_death_is_noticed_long_before_the_pool_would_look_by_itself(
    worker: Worker, add: Callable[..., Row], read: Callable[[Any], Row]
) -> None:
    def kill(id: Any, attempts: int) -> float:
        wait_for(lambda: (read(id).status, read(id).attempts) == ("running", attempts), "the job to run")
        os.kill(int((read(id).claimed_by or "").split()[-1]), signal.SIGKILL)
        killed_at = time.monotonic()
        wait_for(lambda: read(id).attempts == attempts + 1, "the attempt to be counted")
        return time.monotonic() - killed_at

    jobs = [add(kind="long"), add(kind="long")]
    slowest = max(kill(job.id, attempts) for job in jobs for attempts in (0, 1))
    assert slowest < 2.5, "half of the pool's own interval"


def test_workers_tick_by_themselves_while_there_is_no_beat(
    start_worker: Callable[..., Worker],
    engine: Engine,
    add: Callable[..., Row],
    read: Callable[[Any], Row],
    tmp_path: Path,
) -> None:
    workers = [
        start_worker("effects", "-c", "1", VKJOBS_TICK="0.2", EFFECTS=str(tmp_path / "effects")).ready()
        for _ in range(2)
    ]
    job = add(kind="noop")
    wait_for(lambda: read(job.id).status == "done", "the job to be done")
    wait_for(lambda: all(worker.log.count("beat is silent") == 1 for worker in workers), "both to say so")
    start_worker("effects", "-B", "-c", "1", VKJOBS_TICK="0.2", EFFECTS=str(tmp_path / "effects"))
    wait_for(lambda: all(worker.log.count("beat ticks again") == 1 for worker in workers), "both to say so")
    with engine.connect() as conn:
        assert conn.execute(text("select count(*) from vkjobs_ticks")).scalar_one() == 2


def test_what_a_stopping_worker_has_not_started_is_free_at_once(
    start_worker: Callable[..., Worker], engine: Engine, add: Callable[..., Row], tmp_path: Path
) -> None:
    worker = start_worker("deadly", "-B", "-c", "1", "--prefetch-multiplier", "10", EFFECTS=str(tmp_path / "effects"))
    for number in range(10):
        add(kind="mark" if number else "long", run_at=-60 + number)
    with engine.connect() as conn:
        conn.execute(text("create table effects (job_id bigint)"))

        def places() -> Any:
            sql = "select count(*) filter (where status = 'running'), count(lease_until) from vk_jobs"
            return tuple(conn.execute(text(sql)).one())

        wait_for(lambda: places() == (1, 10), "one job to run and the others to be leased")
        wait_for(lambda: worker.log.count("received") > 10, "the worker to have all messages")
        worker.signal(signal.SIGTERM)
        wait_for(lambda: places()[1] == 1, "the others to be free")
        assert conn.execute(text("select sum(attempts) from vk_jobs")).scalar_one() == 0


def test_sigquit_spends_an_attempt_of_what_ran_and_none_of_what_waited(
    start_worker: Callable[..., Worker], add: Callable[..., Row], read: Callable[[Any], Row], tmp_path: Path
) -> None:
    settings = {"EFFECTS": str(tmp_path / "effects"), "VKJOBS_LEASE": "2", "VKJOBS_BACKOFF": "3600"}
    worker = start_worker("deadly", "-B", "-c", "1", "--prefetch-multiplier", "10", **settings)
    running = add(kind="long", run_at=-60)
    waiting = [add(kind="noop") for _ in range(5)]
    wait_for(lambda: worker.log.count("Task vkjobs.noop") >= 5, "the worker to have all messages")
    wait_for(lambda: read(running.id).status == "running", "the long one to run")
    worker.signal(signal.SIGQUIT)
    assert worker.process.wait(30) is not None
    start_worker("deadly", "-B", "-c", "1", **settings)
    wait_for(lambda: read(running.id).attempts == 1, "the lost attempt to be counted")
    wait_for(lambda: all(read(job.id).status == "done" for job in waiting), "the others to be done")
    assert [read(job.id).attempts for job in waiting] == [0] * 5
