from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hosts import make_app
from messages import waiting
from rows import Row, add_row, read_row
from sqlalchemy import Engine, text
from workers import HERE, PATIENCE_S, Worker, wait_for

from vkjobs import database, ledger
from vkjobs.ledger import token_text
from vkjobs.local import Postgres
from vkjobs.migrations import migrate

Start = Callable[..., Worker]
Add = Callable[..., Row]
Read = Callable[[Any], Row]

# Well-formed, and nobody is there.
SERVICES = {"VKJOBS_DATABASE_URL": "postgresql://127.0.0.1:1/none", "VKJOBS_BROKER_URL": "redis://127.0.0.1:1/0"}
SERVICE = {"VKJOBS_TASK_SERVICE": "recording_service:service", "CALLS": os.devnull}


def launch(folder: Path, *words: str, app: str = "vkjobs", **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "celery", "-A", app, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(HERE / "apps"), "PYTHONWARNINGS": "ignore", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, *words: str, app: str = "vkjobs", **environment: str) -> tuple[int, str, str]:
    process = launch(folder, *words, app=app, **environment)
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("words", "environment", "line"),
    [
        (
            "worker",
            {"VKJOBS_LEASE": "never"},
            "VKJOBS_LEASE is 'never': it must be a number of seconds from 1 to 86400",
        ),
        ("worker -B", {"VKJOBS_TICK": "0"}, "VKJOBS_TICK is '0': it must be a number of seconds from 0.05 to 3600"),
        ("beat", {"VKJOBS_BATCH": "1.5"}, "VKJOBS_BATCH is '1.5': it must be a whole number from 1 to 10000"),
        ("worker -B", {"VKJOBS_LAESE": "60"}, "VKJOBS_LAESE is unknown: did you mean VKJOBS_LEASE?"),
        (
            "worker",
            {"VKJOBS_BATCH": "500"},
            "vkjobs_batch is 500: it must not exceed vkjobs_window, which is 200",
        ),
        (
            "worker -B",
            {"VKJOBS_DATABASE_URL": ""},
            (
                "vkjobs_database_url is not set: set it, or VKJOBS_DATABASE_URL in the environment, to a URL such as "
                "postgresql://user@host/database"
            ),
        ),
        (
            "beat",
            {"VKJOBS_DATABASE_URL": "mysql://me:secret@host/d"},
            "vkjobs_database_url is of mysql: vkjobs needs Postgres, postgresql://…",
        ),
        (
            "worker",
            {"VKJOBS_DATABASE_URL": "postgresql://me:secret@host:secret/d"},
            "vkjobs_database_url is no URL: it must look like postgresql://user@host/database",
        ),
        ("worker", {"VKJOBS_BROKER_URL": "foo://me:secret@h"}, "the broker cannot be used: No such transport: foo"),
        (
            "beat",
            {"VKJOBS_BROKER_URL": "redis://me:sec/ret@host/0"},
            "VKJOBS_BROKER_URL is '***@host/0': it must be a URL such as redis://host:6379/0 or amqp://host//",
        ),
        (
            "worker",
            {"CELERY_BROKER_URL": "redis://me:sec/ret@host/0"},
            "the broker's URL cannot be read: it must look like redis://host:6379/0 or amqp://host//",
        ),
        (
            "worker",
            {"VKJOBS_TASK_SERVICE": "nowhere:service"},
            "vkjobs_task_service is 'nowhere:service': there is no module nowhere",
        ),
    ],
)
def test_what_cannot_work_ends_the_start_in_one_line(
    tmp_path: Path, words: str, environment: dict[str, str], line: str
) -> None:
    code, out, err = run(tmp_path, *words.split(), **{**SERVICES, **environment})
    assert code == 1
    assert err.count("\n") == 1
    assert err.endswith(f"vkjobs: {line}\n")
    assert "Traceback" not in out
    assert "sec" not in (out + err).replace("seconds", "")
    assert list(tmp_path.iterdir()) == []


def test_a_fault_that_shows_with_a_module_named_by_include_ends_the_start_in_one_line(tmp_path: Path) -> None:
    environment = {**SERVICES, "VKJOBS_TASK_SERVICE": "nowhere:service", "EFFECTS": os.devnull}
    code, _, err = run(tmp_path, "worker", "-I", "vkjobs.marketplace", app="effects", **environment)
    assert code == 1
    assert err == "vkjobs: vkjobs_task_service is 'nowhere:service': there is no module nowhere\n"


def test_a_module_with_a_wrong_handler_is_named_with_the_error(tmp_path: Path) -> None:
    code, _, err = run(tmp_path, "worker", "-I", "twice", **SERVICES)
    assert code == 1
    assert "twice.py" in err
    assert err.endswith("ConfigurationError: kind 'twice': has a handler already, twice.first\n")


def test_the_working_folders_celeryconfig_is_read_and_beats_our_defaults(tmp_path: Path) -> None:
    _, plain, _ = run(tmp_path, "report")
    assert "beat_scheduler: 'celery.beat:Scheduler'" in plain
    assert "task_default_queue: 'vkjobs'" in plain
    assert "transport:redis" in plain
    mine = {"beat_scheduler": "mine:Scheduler", "task_default_queue": "mine", "broker_url": "amqp://mine//"}
    (tmp_path / "celeryconfig.py").write_text("".join(f"{key} = {value!r}\n" for key, value in mine.items()))
    _, configured, _ = run(tmp_path, "report")
    assert all(f"{key}: {value!r}" in configured for key, value in mine.items() if key != "broker_url")
    assert "transport:amqp" in configured
    for environment, transport in (
        ({"VKJOBS_BROKER_URL": "redis://host/0"}, "redis"),
        ({"VKJOBS_BROKER_URL": "redis://host/0", "CELERY_BROKER_URL": "memory://"}, "memory"),
        ({"VKJOBS_BROKER_URL": "", "CELERY_CONFIG_MODULE": "other_config"}, "filesystem"),
    ):
        (tmp_path / "other_config.py").write_text("broker_url = 'filesystem://'\n")
        assert f"transport:{transport}" in run(tmp_path, "report", **environment)[1]


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import nowhere\n", "ModuleNotFoundError: No module named 'nowhere'"),
        ("broker_url = = 1\n", "SyntaxError: invalid syntax"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_wrong_inside_celeryconfig_is_shown(tmp_path: Path, source: str, error: str) -> None:
    (tmp_path / "celeryconfig.py").write_text(source)
    code, _, err = run(tmp_path, "worker", **SERVICES)
    assert code != 0
    assert 'celeryconfig.py", line 1' in err
    assert err.endswith(f"{error}\n")


def test_a_wrong_key_in_celeryconfig_ends_the_start_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "celeryconfig.py").write_text("vkjobs_leese = 60\n")
    code, _, err = run(tmp_path, "worker", "-B", **SERVICES)
    assert (code, err) == (1, "vkjobs: vkjobs_leese is unknown: did you mean vkjobs_lease?\n")


def test_a_worker_that_could_not_read_its_messages_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "celeryconfig.py").write_text("accept_content = ['pickle']\n")
    code, _, err = run(tmp_path, "worker", **SERVICES)
    line = "vkjobs: accept_content is ['pickle']: it must hold 'json', the form of vkjobs' messages\n"
    assert (code, err) == (1, line)


def test_beat_ticks_and_leaves_no_file(tmp_path: Path, redis_url: str) -> None:
    beat = launch(tmp_path, "beat", **{**SERVICES, "VKJOBS_BROKER_URL": redis_url, "VKJOBS_TICK": "0.1"})
    try:
        wait_for(lambda: len(waiting(redis_url, "vkjobs.tick")) > 2, "three ticks")
        beat.terminate()
        out, err = beat.communicate(timeout=PATIENCE_S)
    finally:
        beat.kill()
    assert (beat.returncode, err) == (0, "")
    assert "Traceback" not in out
    for tick in waiting(redis_url, "vkjobs.tick"):
        assert (tick.task, tick.kwargs) == ("vkjobs.run_due", {"by": "beat"})
        assert (tick.properties["delivery_mode"], tick.headers["ignore_result"]) == (1, True)
    assert list(tmp_path.iterdir()) == []


def test_a_worker_waits_for_postgres_and_then_works(tmp_path: Path, redis_url: str, start_worker: Start) -> None:
    with Postgres() as server:
        url = server.create_database("late")
        migrate(url)
        server.stop()
        worker = start_worker("vkjobs", "-B", "-c", "1", VKJOBS_DATABASE_URL=url, VKJOBS_TICK="0.2", **SERVICE).ready()
        wait_for(lambda: worker.log.count("nothing was leased: ") > 2, "three ticks in vain")
        assert worker.log.count("waiting for postgres error=") == 1
        assert "Traceback" not in worker.log
        server.start()
        engine = database.engine(url, 1)
        with engine.connect() as conn:
            row = add_row(conn, kind="open_expire", ref_id="task-1")
            wait_for(lambda: read_row(conn, row.id).status == "done", "the job to be done")
        engine.dispose()
        assert worker.stop() == 0
    assert "Traceback" not in worker.log
    assert list(worker.folder.iterdir()) == []


def test_a_worker_says_what_is_not_set_up_and_works_when_it_is(
    tmp_path: Path, empty_database_url: str, start_worker: Start
) -> None:
    folder = tmp_path / "worker-0"
    folder.mkdir()
    (folder / "celeryconfig.py").write_text("include = ['mine']\ntask_default_queue = 'default'\n")
    source = "import vkjobs\n@vkjobs.handler('mine')\ndef mine(job, ctx): pass\n"
    (folder / "mine.py").write_text(source)
    worker = start_worker(
        "vkjobs", "-c", "1", "-l", "WARNING", VKJOBS_DATABASE_URL=empty_database_url, VKJOBS_TICK="0.2"
    )
    wait_for(lambda: "not migrated" in worker.log, "what is missing to be said")
    service, table = [line for line in worker.log.splitlines() if " reason=" in line]
    assert 'not set up reason="no task service: set vkjobs_task_service (VKJOBS_TASK_SERVICE) to module:' in service
    assert table.endswith("not migrated reason='there is no table vk_jobs: run `celery -A <app> jobs migrate`'")
    wait_for(lambda: queues_of(worker) == {"default", "vkjobs", "vkjobs.tick"}, "its queues to be said")
    migrate(empty_database_url)
    engine = database.engine(empty_database_url, 1)
    with engine.connect() as conn:
        row = add_row(conn, kind="mine")
        wait_for(lambda: read_row(conn, row.id).status == "done", "the job to be done")
    engine.dispose()
    assert worker.stop() == 0
    assert "Traceback" not in worker.log


def queues_of(worker: Worker) -> set[str]:
    """Return the queues that the worker said to read."""
    return set(re.findall(r"^ *\.> (\S+) +exchange=", worker.log, re.MULTILINE))


def test_each_child_has_a_postgres_session_of_its_own(
    start_worker: Start, engine: Engine, add: Add, read: Read
) -> None:
    with engine.connect() as conn:
        conn.execute(text("create table seen (process int, parent int, backend int)"))
        jobs = [add(kind="whoami") for _ in range(12)]
        worker = start_worker("vkjobs", "-B", "-c", "3", "-I", "more_kinds", **SERVICE).ready()
        assert queues_of(worker) == {"vkjobs", "vkjobs.tick", "aside"}
        wait_for(lambda: all(read(job.id).status == "done" for job in jobs), "all jobs to be done")
        seen = conn.execute(text("select distinct process, backend from seen")).all()
        parents = conn.execute(text("select distinct parent from seen")).scalars().all()
        alive = conn.execute(text("select pid from pg_stat_activity where application_name = 'vkjobs'")).scalars().all()
    assert len(seen) == len({process for process, _ in seen}) == len({backend for _, backend in seen}) == 3
    assert parents == [worker.process.pid]
    assert {backend for _, backend in seen} <= set(alive)
    assert worker.stop() == 0
    assert list(worker.folder.iterdir()) == []


def test_a_worker_with_queues_chosen_reads_no_others(start_worker: Start, redis_url: str, add: Add, read: Read) -> None:
    worker = start_worker("vkjobs", "-c", "1", "-Q", "vkjobs,vkjobs.tick", "-I", "more_kinds", **SERVICE).ready()
    assert queues_of(worker) == {"vkjobs", "vkjobs.tick"}
    elsewhere, here = add(kind="aside"), add(kind="open_expire", ref_id="task-1")
    wait_for(lambda: read(here.id).status == "done", "the job of its queue to be done")
    wait_for(lambda: waiting(redis_url, "aside"), "the other's message")
    assert [message.kwargs["job_id"] for message in waiting(redis_url, "aside")] == [elsewhere.id]
    assert read(elsewhere.id).status == "pending"


def test_a_beat_ticks_by_what_the_host_said_last(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "late.py").write_text(
        "import celery, vkjobs\n"
        "app = vkjobs.setup(celery.Celery())\n"
        "app.tasks\n"
        "app.conf.beat_scheduler = 'celery.beat:Scheduler'\n"
        "app.conf.beat_schedule = {'mine': {'task': 'mine', 'schedule': 0.2}}\n"
        f"app.conf.broker_url = {redis_url!r}\n"
        "app.conf.vkjobs_database_url = 'postgresql://127.0.0.1:1/none'\n"
        "app.conf.vkjobs_tick = 0.1\n"
    )
    beat = launch(tmp_path, "beat", app="late")
    try:
        wait_for(lambda: len(waiting(redis_url, "vkjobs.tick")) > 2, "three ticks")
        wait_for(lambda: waiting(redis_url, "celery"), "the host's own task")
        beat.terminate()
        _, err = beat.communicate(timeout=PATIENCE_S)
    finally:
        beat.kill()
    assert (beat.returncode, err) == (0, "")


def test_a_worker_frees_a_job_of_a_kind_that_it_is_too_old_for(
    start_worker: Start, redis_url: str, engine: Engine, add: Add, read: Read
) -> None:
    row = add(kind="brand_new")
    with engine.connect() as conn:
        (leased,) = ledger.lease(conn, kinds=[], listed=False, batch=1, window=1, lease=60, horizon=0)
    worker = start_worker("vkjobs", "-c", "1", VKJOBS_TICK="3600", VKJOBS_HORIZON="2", **SERVICE).ready()
    others = make_app(broker_url=redis_url)
    for kwargs in ({}, {"job_id": "no id", "token": "no token"}, {"job_id": row.id, "token": token_text(leased.token)}):
        others.send_task("vkjobs.brand_new", kwargs=kwargs, queue="vkjobs")
    wait_for(lambda: read(row.id).lease_until is None, "the job to be free")
    assert (read(row.id).status, read(row.id).attempts) == ("pending", 0)
    assert worker.stop() == 0
