"""vkjobs and the original dispatcher on one table, as two programs that know nothing of each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from original import make_original
from rows import Row, add_row, read_row
from sqlalchemy import Engine, text
from workers import HERE, Worker, wait_for

from vkjobs import database
from vkjobs.local import Postgres
from vkjobs.migrations import migrate

KINDS = ("open_expire", "hold_timeout", "checkpoint_miss", "contest_close", "checkpoint_warn", "review_warn")


@pytest.fixture
def database_url(postgres: Postgres, tmp_path: Path) -> str:
    """URL of a database whose vk_jobs was made by the original and adopted since."""
    url = postgres.create_database(f"shared_{tmp_path.name}")
    make_original(url)
    migrate(url)
    return url


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = database.engine(database_url, 5)
    yield engine
    engine.dispose()


class Original:
    """The original dispatcher as a process."""

    def __init__(self, url: str, calls: Path, lease: float, pause: float = 0) -> None:
        program = [sys.executable, str(HERE / "original_dispatcher.py"), url, str(lease), str(pause)]
        self.process = subprocess.Popen(program, env={**os.environ, "CALLS": str(calls)}, cwd=HERE)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    path = tmp_path / "calls"
    path.touch()
    return path


@pytest.fixture
def start_original(database_url: str, calls: Path) -> Iterator[Callable[..., Original]]:
    started: list[Original] = []

    def start(lease: float = 60, pause: float = 0) -> Original:
        started.append(Original(database_url, calls, lease, pause))
        return started[-1]

    yield start
    for original in started:
        original.kill()


@pytest.fixture
def vkjobs(start_worker: Callable[..., Worker], calls: Path) -> Callable[..., Worker]:
    def start(**environment: str) -> Worker:
        settings = {"VKJOBS_TASK_SERVICE": "recording_service:service", "CALLS": str(calls), **environment}
        return start_worker("vkjobs", "-B", "-c", "2", **settings)

    return start


def called(calls: Path) -> Counter[str]:
    return Counter(json.loads(line)["input"]["task_id"] for line in calls.read_text().splitlines())


def count(engine: Engine, where: str) -> Any:
    with engine.connect() as conn:
        return conn.execute(text(f"select count(*) from vk_jobs where {where}")).scalar_one()


def add(engine: Engine, **columns: Any) -> Row:
    with engine.connect() as conn:
        return add_row(conn, **columns)


def read(engine: Engine, id: Any) -> Row:
    with engine.connect() as conn:
        return read_row(conn, id)


def test_both_work_on_one_table_and_each_job_is_done_once(
    engine: Engine, calls: Path, start_original: Callable[..., Original], vkjobs: Callable[..., Worker]
) -> None:
    worker = vkjobs().ready()
    sql = """
        insert into vk_jobs (kind, ref_id, status, run_at)
        select (cast(:kinds as text[]))[1 + i % 6],
               case when i % 10 = 0 then 'boom-' else 't-' end || i, 'pending', now() + make_interval(secs => i * 0.01)
        from generate_series(1, 400) i"""
    with engine.connect() as conn:
        conn.execute(text(sql), {"kinds": list(KINDS)})
    start_original(pause=0.01)
    wait_for(lambda: count(engine, "status <> 'done' and attempts = 0") == 0, "all jobs to be tried")
    assert worker.stop() == 0
    assert count(engine, "ref_id like 't-%' and status = 'done' and attempts = 0") == 360
    assert count(engine, "ref_id like 'boom-%' and status = 'pending' and attempts = 1 and lease_until is null") == 40
    assert called(calls) == {f"{'t' if i % 10 else 'boom'}-{i}": 1 for i in range(1, 401)}
    by_vkjobs = count(engine, "status = 'done' and claimed_by is not null")
    assert 0 < by_vkjobs < 360, "one of the two did all the work: nothing was shown"


def test_what_the_original_left_running_is_taken_over_at_no_attempt(
    engine: Engine, start_original: Callable[..., Original], vkjobs: Callable[..., Worker]
) -> None:
    jobs = [add(engine, kind="open_expire", ref_id=f"t{n}", attempts=n) for n in range(3)]
    original = start_original(lease=1, pause=60)
    wait_for(lambda: count(engine, "status = 'running'") == 3, "the original to take the jobs")
    original.kill()
    vkjobs()
    wait_for(lambda: count(engine, "status = 'done'") == 3, "vkjobs to do them")
    assert [read(engine, job.id).attempts for job in jobs] == [0, 1, 2]


@pytest.mark.parametrize(
    "place",
    [
        {"status": "pending", "lease_until": 3600},
        {
            "status": "running",
            "lease_until": -1,
            "claimed_until": -1,
            "claimed_by": "x y 1",
            "started_at": -2,
        },
        {"status": "pending", "attempts": 4},
    ],
    ids=["leased", "running, expired", "failed before"],
)
def test_what_vkjobs_left_is_understood_by_the_original(
    engine: Engine, start_original: Callable[..., Original], place: dict[str, Any]
) -> None:
    fine = add(engine, kind="open_expire", ref_id="t1", **place)
    failing = add(engine, kind="open_expire", ref_id="boom-1", **place)
    start_original()
    wait_for(lambda: read(engine, failing.id).attempts > failing.attempts, "the original to run them")
    assert read(engine, fine.id).status == "done"
    after = read(engine, failing.id)
    assert (after.status, after.attempts) == (
        "failed" if failing.attempts == 4 else "pending",
        failing.attempts + 1,
    )
    assert after.lease_until is None


def test_what_the_original_settled_is_run_by_vkjobs_like_its_own(
    engine: Engine, calls: Path, start_original: Callable[..., Original], vkjobs: Callable[..., Worker]
) -> None:
    job = add(engine, kind="open_expire", ref_id="boom-1", attempts=2)
    original = start_original()
    wait_for(lambda: read(engine, job.id).attempts == 3, "the original to fail it")
    original.kill()
    with engine.connect() as conn:
        conn.execute(text("update vk_jobs set run_at = now()"))
    vkjobs()
    wait_for(lambda: read(engine, job.id).attempts == 4, "vkjobs to fail it")
    assert called(calls) == {"boom-1": 2}
