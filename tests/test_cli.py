from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from original import make_original, open_transaction, rows, until

DONE = "vk_jobs is up to date\n"
OWN = {
    "celery": [sys.executable, "-m", "celery", "-A", "vkjobs", "jobs"],
    "vkjobs": [str(Path(sys.executable).parent / "vkjobs")],
}
HOST = [sys.executable, "-m", "celery", "-A", "proj", "jobs"]


@pytest.fixture
def host(tmp_path: Path, empty_database_url: str) -> Path:
    (tmp_path / "proj.py").write_text(
        f"import celery\napp = celery.Celery()\napp.conf.vkjobs_database_url = {empty_database_url!r}\n"
    )
    return tmp_path


def start(command: list[str], folder: Path, **environment: str) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("VKJOBS_")}
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**clean, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(command: list[str], folder: Path, **environment: str) -> tuple[int, str, str]:
    process = start(command, folder, **environment)
    out, err = process.communicate()
    return process.returncode, out, err


def test_a_host_migrates_with_its_own_app(host: Path, empty_database_url: str) -> None:
    code, out, err = run([*HOST, "migrate"], host)
    assert (code, err) == (0, "")
    assert out.startswith("creating table vk_jobs\n")
    assert out.endswith(DONE)
    assert rows(empty_database_url, "select count(*) from vk_jobs") == [(0,)]
    assert run([*HOST, "migrate"], host) == (0, DONE, "")


@pytest.mark.parametrize("way", OWN)
def test_vkjobs_own_app_migrates(way: str, tmp_path: Path, empty_database_url: str) -> None:
    code, out, err = run([*OWN[way], "migrate"], tmp_path, VKJOBS_DATABASE_URL=empty_database_url)
    assert (code, err) == (0, "")
    assert out.endswith(DONE)
    assert rows(empty_database_url, "select count(*) from vk_jobs") == [(0,)]


def test_a_table_that_does_not_fit_ends_in_one_line(host: Path, empty_database_url: str) -> None:
    make_original(empty_database_url, status="varchar(7)")
    code, out, err = run([*HOST, "migrate"], host)
    assert (code, out) == (1, "")
    assert err.startswith("Error: vk_jobs.status is character varying(7), vkjobs needs text;")
    assert err.count("\n") == 1


def test_a_missing_postgres_ends_in_one_line_without_the_password(host: Path) -> None:
    url = "postgresql://me:secret@127.0.0.1:1/nothing"
    code, out, err = run([*HOST, "migrate"], host, VKJOBS_DATABASE_URL=url)
    assert (code, out) == (1, "")
    assert "127.0.0.1:1/nothing" in err
    assert "secret" not in err
    assert err.count("\n") == 1


def test_a_missing_setting_ends_in_one_line_that_names_it(tmp_path: Path) -> None:
    code, out, err = run([*OWN["celery"], "migrate"], tmp_path)
    assert (code, out) == (1, "")
    assert err.startswith("Error: vkjobs_database_url is not set")
    assert err.count("\n") == 1


def test_ctrl_c_ends_a_wait_for_somebodys_transaction(host: Path, empty_database_url: str) -> None:
    make_original(empty_database_url)
    building = "select count(*) from pg_index where indexrelid = to_regclass('vk_jobs_free')"
    migrating = """
        select count(*) from pg_stat_activity
        where application_name = 'vkjobs migrate' and datname = current_database()"""
    with open_transaction(empty_database_url, "select 1"):
        process = start([*HOST, "migrate"], host)
        until(lambda: rows(empty_database_url, building) == [(1,)])
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
        assert process.returncode == 1
        assert "canceling statement due to user request" in err
        assert err.count("\n") == 1
        until(lambda: rows(empty_database_url, migrating) == [(0,)])
    assert run([*HOST, "migrate"], host)[1].endswith(DONE)
