"""What the original dispatcher did with a row, done by a real worker: row, run_due message, settled row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from conftest import PARITY_CASES
from rows import Row, add_row, read_row
from sqlalchemy import Engine, text
from workers import Worker, wait_for

from vkjobs import database
from vkjobs.local import Postgres, Redis

CASES = json.loads(Path(PARITY_CASES or Path(__file__).parents[1] / "cases" / "parity.json").read_text())


class Site:
    """A worker with the recording service, and the table and broker that it works on."""

    def __init__(self, engine: Engine, client: Celery, calls: Path) -> None:
        self.engine, self.client, self._calls = engine, client, calls

    def calls(self) -> list[dict[str, Any]]:
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        return [json.loads(line) for line in lines]

    def place(self, case: dict[str, Any]) -> Row:
        """Empty the tables and write the case's rows."""
        self._calls.unlink(missing_ok=True)
        job, task = case["job"], case["task"]
        with self.engine.connect() as conn:
            conn.execute(text("truncate vk_jobs, vk_tasks"))
            if task is not None:
                conn.execute(text("insert into vk_tasks values (:id, :template, :status)"), task)
            columns = {name: job[name] for name in ("kind", "ref_id", "status", "attempts")}
            lease = {} if job["lease_s"] is None else {"lease_until": job["lease_s"]}
            return add_row(conn, **columns, **lease, run_at=job["run_at_s"])

    def row(self, id: Any) -> Row:
        with self.engine.connect() as conn:
            return read_row(conn, id)

    def moved(self, id: Any, since: str) -> float | None:
        """Return the new run_at minus the settle time in seconds; None if run_at did not move."""
        sql = """
            select case when run_at <> cast(:since as timestamptz) then extract(epoch from run_at - updated_at) end
            from vk_jobs where id = :id"""
        with self.engine.connect() as conn:
            seconds = conn.execute(text(sql), {"id": id, "since": since}).scalar_one()
        return None if seconds is None else float(seconds)

    def underway(self) -> bool:
        sql = """
            select exists (select from vk_jobs where status = 'pending' and lease_until is not null)
                or exists (select from vk_jobs where status = 'running' and claimed_until = lease_until)"""
        with self.engine.connect() as conn:
            return bool(conn.execute(text(sql)).scalar_one())


@pytest.fixture(scope="module")
def site(postgres: Postgres, redis: Redis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("parity")
    url, broker = postgres.create_database("parity", template="migrated"), redis.url.replace("/0", "/5")
    engine = database.engine(url, 2)
    with engine.connect() as conn:
        conn.execute(text("create table vk_tasks (id text primary key, template text, status text)"))
    worker = Worker(
        "vkjobs",
        ["-c", "1"],
        {
            "VKJOBS_DATABASE_URL": url,
            "VKJOBS_BROKER_URL": broker,
            "CELERY_RESULT_BACKEND": broker,
            "VKJOBS_TASK_SERVICE": "recording_service:service",
            "VKJOBS_HORIZON": "0",  # the original looks at what is due now
            "VKJOBS_TICK": "3600",  # nobody but the test ticks
            "CALLS": str(folder / "calls"),
        },
        folder,
    )
    try:
        worker.ready()
        yield Site(engine, Celery(broker=broker, backend=broker), folder / "calls")
    finally:
        worker.kill()
        engine.dispose()


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_a_row_ends_as_it_did_with_the_original(site: Site, case: dict[str, Any]) -> None:
    before = site.place(case)
    expected = case["expect"]
    leased = site.client.send_task("vkjobs.run_due", queue="vkjobs.tick").get(timeout=30)
    wait_for(lambda: not site.underway(), "the job to settle")
    after = site.row(before.id)
    seen: dict[str, Any] = {
        "leased": leased,
        "status": after.status,
        "attempts": after.attempts,
        "lease_cleared": after.lease_until is None,
        "calls": site.calls(),
    }
    if (moved := site.moved(before.id, before.run_at)) is not None:
        seen["run_at_moved_s"] = round(moved, 2)
    if after.last_error:
        _, seen["error_first_line"] = after.last_error.splitlines()[0].split(": ", 1)
    if "error_first_line" in expected:
        expected = {
            **expected,
            "error_first_line": expected["error_first_line"].replace("{id}", str(before.id)),
        }
    assert seen == expected


def test_what_was_recorded_is_all_there() -> None:
    assert PARITY_CASES or len(CASES) == 67
