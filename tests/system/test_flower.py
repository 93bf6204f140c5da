"""What people see of jobs in Flower, asked of a real one that watches a real worker."""

from __future__ import annotations

import ast
import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from rows import add_row
from sqlalchemy import Connection, text
from workers import Worker, wait_for

from vkjobs import database, ledger
from vkjobs.local import Postgres, Redis

LONG = "https://market.example/tasks/" + "x" * 400


class _Unix(http.client.HTTPConnection):
    """HTTP over the Unix socket that Flower listens on."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.host)


class Flower:
    """``celery -A vkjobs flower`` as a process of its own."""

    def __init__(self, broker: str, folder: Path) -> None:
        self._socket = folder / "s"
        self._log = folder / "flower.log"
        command = [sys.executable, "-P", "-m", "celery", "-A", "vkjobs", "flower"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, f"--unix-socket={self._socket}"],
                cwd=folder,
                env={**os.environ, "VKJOBS_BROKER_URL": broker, "FLOWER_UNAUTHENTICATED_API": "true"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def tasks(self) -> list[dict[str, Any]]:
        """Ask for all tasks that Flower knows; none while it is not there yet."""
        assert self.process.poll() is None, self._log.read_text()
        absent = (FileNotFoundError, ConnectionRefusedError)
        with suppress(*absent), closing(_Unix(str(self._socket))) as connection:
            connection.request("GET", "/api/tasks?limit=1000", headers={"Host": "flower"})
            answer = connection.getresponse()
            body = answer.read()
            assert answer.status == 200, body
            return list(json.loads(body).values())
        return []

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def shown(postgres: Postgres, redis: Redis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What Flower shows of each job added below, and ``all``: the names of all tasks that it shows."""
    folder = tmp_path_factory.mktemp("flower")
    url, broker = postgres.create_database("flower", template="migrated"), redis.url.replace("/0", "/6")
    services = {"VKJOBS_DATABASE_URL": url, "VKJOBS_BROKER_URL": broker, "CALLS": str(folder / "calls")}
    engine = database.engine(url, 2)
    worker = Worker(
        "vkjobs", ["-B", "-c", "1"], {**services, "VKJOBS_TASK_SERVICE": "recording_service:service"}, folder
    )
    flower = Flower(broker, folder)
    try:
        worker.ready()
        wait_for(lambda: "enabled by remote" in worker.log, "Flower to turn the worker's events on")
        with engine.connect() as conn:
            ids = add_jobs(conn)
        states = {"SUCCESS", "RETRY", "FAILURE"}
        wait_for(
            lambda: len([task for task in flower.tasks() if task["state"] in states]) == len(ids),
            "Flower to show how each job ended",
        )
        tasks = flower.tasks()
        by_id = {ast.literal_eval(task["kwargs"])["job_id"]: task for task in tasks}
        yield {"all": [task["name"] for task in tasks], **{name: by_id[ids[name]] for name in ids}}
    finally:
        flower.kill()
        worker.kill()
        engine.dispose()


def add_jobs(conn: Connection) -> dict[str, Any]:
    """Add a job of each sort; return their ids."""
    ids = {
        "done": add_row(conn, kind="open_expire", ref_id="task-1").id,
        "second attempt": add_row(conn, kind="open_expire", ref_id="task-2", attempts=1).id,
        "retrying": add_row(conn, kind="hold_timeout", ref_id="boom-1").id,
        "failed": add_row(conn, kind="hold_timeout", ref_id="boom-2", attempts=4).id,
        "unhandled": add_row(conn, kind="daily_report", ref_id="task-3").id,
        "long": add_row(conn, kind="open_expire", ref_id=LONG).id,
        "cancelled": add_row(conn, kind="open_expire", ref_id="task-4", run_at=4).id,
        "postponed": add_row(conn, kind="open_expire", ref_id="task-5", run_at=4).id,
    }
    messages = text("select count(*) from vk_jobs where run_at > now() and lease_until is not null")
    wait_for(lambda: conn.execute(messages).scalar_one() == 2, "messages for the jobs that are not due yet")
    ledger.cancel(conn, ids["cancelled"])
    later = text("update vk_jobs set run_at = run_at + interval '1 hour' where id = :id")
    conn.execute(later, {"id": ids["postponed"]})
    return ids


def test_a_job_is_a_task_named_by_its_kind_with_id_attempt_and_ref_id_readable(shown: dict[str, Any]) -> None:
    done, again = shown["done"], shown["second attempt"]
    assert (done["name"], done["args"]) == ("vkjobs.open_expire", "()")
    arguments = ast.literal_eval(done["kwargs"])
    assert arguments == {"job_id": arguments["job_id"], "attempt": 1, "ref_id": "task-1"}
    assert ast.literal_eval(again["kwargs"])["attempt"] == 2


def test_a_done_job_is_a_success(shown: dict[str, Any]) -> None:
    assert (shown["done"]["state"], shown["done"]["result"]) == ("SUCCESS", "'done'")


def test_a_retrying_job_says_when_it_is_tried_again_and_why(shown: dict[str, Any]) -> None:
    assert shown["retrying"]["state"] == "RETRY"
    assert shown["retrying"]["exception"] == "JobFailed('tried again in 30 s: RuntimeError: boom for boom-1')"


def test_a_failed_job_says_why(shown: dict[str, Any]) -> None:
    assert shown["failed"]["state"] == "FAILURE"
    assert shown["failed"]["exception"] == "JobFailed('RuntimeError: boom for boom-2')"


def test_a_message_whose_job_was_moved_on_is_told_apart_and_is_no_failure(shown: dict[str, Any]) -> None:
    assert (shown["cancelled"]["state"], shown["cancelled"]["result"]) == ("SUCCESS", "'lease moved on'")
    assert shown["postponed"]["state"] == "SUCCESS"
    assert shown["postponed"]["result"].startswith("'not yet due: due in ")


def test_a_job_of_an_unknown_kind_tells_its_kind(shown: dict[str, Any]) -> None:
    assert (shown["unhandled"]["name"], shown["unhandled"]["state"]) == ("vkjobs.unhandled", "RETRY")
    assert ast.literal_eval(shown["unhandled"]["kwargs"])["kind"] == "daily_report"


def test_of_a_long_ref_id_the_beginning_is_shown(shown: dict[str, Any]) -> None:
    ref_id = ast.literal_eval(shown["long"]["kwargs"])["ref_id"]
    assert LONG.startswith(ref_id)
    assert len(ref_id) == 200


def test_ticks_do_not_bury_the_jobs(shown: dict[str, Any]) -> None:
    assert "vkjobs.run_due" not in shown["all"]
