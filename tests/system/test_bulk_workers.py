"""Workers and their children that die or stop in the middle of a message of many jobs."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import audit
import pytest
from rows import Row
from sqlalchemy import Engine, text
from workers import Worker, wait_for

Start = Callable[..., Worker]


class Jobs:
    """The jobs of a test, and what they have left behind."""

    def __init__(self, engine: Engine, started: Path) -> None:
        self._engine = engine
        self._started = started
        started.touch()
        self.ask("create table effects (job_id bigint)")

    def ask(self, sql: str, **values: Any) -> Any:
        with self._engine.connect() as conn:
            result = conn.execute(text(sql), values)
            return result.scalar() if result.returns_rows else None

    def add(self, number: int, kind: str = "mark_bulk", ref_id: str = "r", seconds: float = 0.0) -> None:
        """Add jobs, of which all are older than those added later."""
        self.ask(
            """insert into vk_jobs (kind, ref_id, run_at, payload)
            select :kind, :ref_id, now() - interval '1 h' + (select count(*) from vk_jobs) * interval '1 s',
                jsonb_build_object('seconds', cast(:seconds as numeric))
            from generate_series(1, :number)""",
            number=number, kind=kind, ref_id=ref_id, seconds=seconds,
        )  # fmt: skip

    @property
    def started(self) -> list[int]:
        """Ids, in the order of their starts."""
        return [int(line) for line in self._started.read_text().split()]

    def by(self) -> str:
        """Who runs jobs now."""
        return str(self.ask("select max(claimed_by) from vk_jobs where status = 'running'"))

    def over(self) -> None:
        wait_for(
            lambda: not self.ask("select count(*) from vk_jobs where status in ('pending', 'running')"),
            "all jobs to be over",
        )

    def outcomes(self) -> dict[tuple[str, int], int]:
        """Number of jobs by status and attempts."""
        with self._engine.connect() as conn:
            sql = "select status, attempts, count(*) from vk_jobs group by 1, 2"
            return {(status, attempts): number for status, attempts, number in conn.execute(text(sql))}

    def effects_are_exact(self, *kinds: str) -> None:
        """Expect one effect of each done job, and none of others."""
        with self._engine.connect() as conn:
            assert audit.effects(conn, "effects", kinds or ["mark_bulk", "mark_list"]) == []


@pytest.fixture
def jobs(engine: Engine, tmp_path: Path) -> Jobs:
    return Jobs(engine, tmp_path / "started")


@pytest.fixture
def start(start_worker: Start, tmp_path: Path) -> Start:
    # A lease so long that nothing but a worker's main process can have settled a job in time, unless a test says so.
    def start_one(*options: str, **settings: str) -> Worker:
        usual = {"VKJOBS_LEASE": "3600", "VKJOBS_MAX_ATTEMPTS": "2", "VKJOBS_BACKOFF": "0",
                 "VKJOBS_TICK": "0.3", "EFFECTS": str(tmp_path / "started")}  # fmt: skip
        return start_worker("bulky", "-B", "-c", "2", *options, **{**usual, **settings})

    return start_one


def test_of_a_child_that_was_killed_the_job_that_it_was_at_has_an_attempt_and_no_other(
    start: Start, jobs: Jobs, read: Callable[[Any], Row]
) -> None:
    jobs.add(6)
    jobs.add(1, ref_id="slow")
    jobs.add(13)
    start().ready()
    wait_for(lambda: 7 in jobs.started, "the slow one to start")
    assert jobs.ask("select count(*) from vk_jobs where status = 'running'") == 14
    os.kill(int(jobs.by().split()[-1]), signal.SIGKILL)
    jobs.over()
    assert jobs.outcomes() == {("done", 0): 19, ("done", 1): 1}
    assert read(7).attempts == 1
    assert "its process died" in (read(7).last_error or "")
    assert Counter(jobs.started) == {id: 2 if id == 7 else 1 for id in range(1, 21)}
    jobs.effects_are_exact()


def test_what_was_done_but_not_settled_when_its_child_died_is_done_again_without_an_attempt(
    start: Start, jobs: Jobs
) -> None:
    jobs.add(200, kind="note_bulk")
    jobs.add(1, kind="note_bulk", ref_id="poison")
    jobs.add(200, kind="note_bulk")
    start().ready()
    jobs.over()
    assert jobs.outcomes() == {("done", 0): 400, ("failed", 2): 1}
    starts = Counter(jobs.started)
    assert starts[201] == 2
    assert {starts[id] for id in range(1, 201)} <= {1, 2}
    assert {starts[id] for id in range(202, 402)} == {1}


def test_poison_among_hundreds_fails_and_the_others_are_done_without_an_attempt(start: Start, jobs: Jobs) -> None:
    jobs.add(250)
    jobs.add(1, ref_id="poison")
    jobs.add(249)
    start().ready()
    jobs.over()
    assert jobs.outcomes() == {("done", 0): 499, ("failed", 2): 1}
    assert "SIGKILL" in jobs.ask("select last_error from vk_jobs where status = 'failed'")
    jobs.effects_are_exact()


def test_poison_in_a_list_fails_and_the_others_are_done_in_the_end(start: Start, jobs: Jobs) -> None:
    jobs.add(10, kind="mark_list")
    jobs.add(1, kind="mark_list", ref_id="poison")
    jobs.add(9, kind="mark_list")
    start().ready()
    jobs.over()
    assert jobs.outcomes() == {("done", 1): 19, ("failed", 2): 1}
    jobs.effects_are_exact()


def test_sigterm_in_the_middle_of_a_message_ends_the_message_and_frees_the_others(start: Start, jobs: Jobs) -> None:
    jobs.add(1500, seconds=0.002)
    worker = start("--prefetch-multiplier", "10", VKJOBS_BATCH="2000", VKJOBS_WINDOW="2000").ready()
    wait_for(lambda: len(jobs.started) > 50, "a message to be in its middle")
    assert worker.stop() == 0, worker.log
    assert jobs.ask("select count(*) from vk_jobs where status = 'running' or lease_until is not null") == 0
    assert jobs.ask("select sum(attempts) from vk_jobs") == 0
    start()
    jobs.over()
    assert jobs.outcomes() == {("done", 0): 1500}
    assert len(jobs.started) == 1500
    jobs.effects_are_exact()


@pytest.mark.parametrize("kind", ["mark_bulk", "mark_list"])
def test_a_worker_that_is_killed_with_all_its_children_costs_no_job_an_attempt(
    start: Start, jobs: Jobs, kind: str
) -> None:
    jobs.add(100, kind, seconds=0.02)
    worker = start(VKJOBS_LEASE="3").ready()
    wait_for(lambda: len(jobs.started) > 30, "a message to be in its middle")
    worker.kill()
    start(VKJOBS_LEASE="3")
    jobs.over()
    assert jobs.outcomes() == {("done", 0): 100}
    jobs.effects_are_exact()


def test_a_job_that_kills_its_whole_worker_fails_and_the_others_are_done_without_an_attempt(
    start: Start, jobs: Jobs
) -> None:
    jobs.add(5)
    jobs.add(1, ref_id="deadly")
    jobs.add(5)
    settings = {"VKJOBS_LEASE": "2", "VKJOBS_MAX_ATTEMPTS": "1"}
    for _ in range(2):
        worker = start("-c", "1", **settings)  # one that ran beside it would have an attempt too
        wait_for(lambda worker=worker: worker.process.poll() is not None, "the worker to die")  # type: ignore[misc]
        assert jobs.outcomes().get(("failed", 1)) is None
    start("-c", "1", **settings)
    jobs.over()
    assert jobs.outcomes() == {("done", 0): 10, ("failed", 1): 1}
    jobs.effects_are_exact()
