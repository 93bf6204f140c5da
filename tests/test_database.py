from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest
from original import connected, execute, rows, until
from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from vkjobs import database
from vkjobs.errors import ConfigurationError
from vkjobs.local import Postgres


@pytest.fixture(scope="module")
def database_url(postgres: Postgres) -> str:
    url = postgres.create_database(f"database_{uuid4().hex}")
    execute(url, f"alter database {make_url(url).database} set default_transaction_isolation = 'repeatable read'")
    return url


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = database.engine(database_url, 2)
    yield engine
    engine.dispose()


# URLs


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("postgres://h/d", "postgresql+psycopg2://h/d"),
        ("postgresql://u:p%40ss@h:5433/d", "postgresql+psycopg2://u:p%40ss@h:5433/d"),
        ("postgresql+psycopg://h/d", "postgresql+psycopg2://h/d"),
        ("postgresql+asyncpg://h/d", "postgresql+psycopg2://h/d"),
        ("postgresql+psycopg2://h/d", "postgresql+psycopg2://h/d"),
        ("postgresql://[::1]:5432/d?sslmode=require", "postgresql+psycopg2://[::1]:5432/d?sslmode=require"),
        ("postgresql:///d?host=/run/postgresql", "postgresql+psycopg2:///d?host=%2Frun%2Fpostgresql"),
        ("postgresql://", "postgresql+psycopg2://"),
    ],
)
def test_each_way_to_name_a_postgres_is_read_for_psycopg2(given: str, read: str) -> None:
    assert database.url_of(given).render_as_string(hide_password=False) == read


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("", "is not set: set it, or VKJOBS_DATABASE_URL in the environment"),
        ("garbage", "is no URL"),
        ("host=h dbname=d", "is no URL"),
        ("postgresql:", "is no URL"),
        ("postgresql://u:secret@h:port/d", "is no URL"),
        ("postgresql://u:secret@h1:1,h2:2/d", "is no URL"),
        ("mysql://u:secret@h/d", "is of mysql: vkjobs needs Postgres"),
        ("sqlite://", "is of sqlite: vkjobs needs Postgres"),
    ],
)
def test_what_is_no_url_of_a_postgres_is_refused_in_one_line_without_its_password(given: str, reason: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        database.engine(given, 1)
    said = str(caught.value)
    assert said.startswith(f"vkjobs_database_url {reason}")
    assert "secret" not in said
    assert "\n" not in said
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


# Connections


def test_a_process_has_one_engine_for_a_url_and_says_who_it_is(engine: Engine, database_url: str) -> None:
    assert database.engine(database_url, 2) is engine
    with engine.connect() as conn:
        assert conn.scalar(text("show application_name")) == "vkjobs"


def test_a_pool_is_bounded(engine: Engine) -> None:
    met = threading.Barrier(2)

    def use(_: int) -> int:
        with engine.connect() as conn:
            met.wait(30)  # so two are really open at once
            return int(conn.scalar(text("select pg_backend_pid()")) or 0)

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(use, range(8)))) == 2


def test_a_connection_commits_each_statement_and_after_a_transaction_again(engine: Engine, database_url: str) -> None:
    isolation = text("show transaction_isolation")
    for _ in range(2):
        with database.transaction(engine) as one, database.transaction(engine) as other:
            for conn in (one, other):
                assert conn.scalar(isolation) == "read committed"
                assert not conn.connection.driver_connection.autocommit  # type: ignore[union-attr]
        with engine.connect() as one, engine.connect() as other:
            for conn in (one, other):
                assert conn.connection.driver_connection.autocommit  # type: ignore[union-attr]
    with engine.connect() as conn:
        conn.exec_driver_sql("create table committed ()")
        assert rows(database_url, "select from committed") == []


# Outages


def lose_connection(conn: Connection) -> None:
    conn.exec_driver_sql("select pg_terminate_backend(pg_backend_pid())")


def lose_connection_meanwhile(conn: Connection) -> None:
    url = conn.engine.url.render_as_string(hide_password=False)
    pid = conn.scalar(text("select pg_backend_pid()"))
    execute(url, f"select pg_terminate_backend({pid})")
    until(lambda: not rows(url, f"select from pg_stat_activity where pid = {pid}"))
    conn.exec_driver_sql("select 1")


def write_to_a_standby(conn: Connection) -> None:
    conn.exec_driver_sql("set default_transaction_read_only = on")
    conn.exec_driver_sql("create table t ()")


def wait_for_the_pool(conn: Connection) -> None:
    narrow = create_engine(conn.engine.url, pool_size=1, max_overflow=0, pool_timeout=0.01)
    with narrow.connect():
        narrow.connect()


def connect_to(**parts: Any) -> Callable[[Connection], None]:
    return lambda conn: create_engine(conn.engine.url.set(**parts)).connect().close()


def execute_sql(*statements: str) -> Callable[[Connection], None]:
    def run(conn: Connection) -> None:
        for statement in statements:
            conn.exec_driver_sql(statement)

    return run


OUTAGES = [
    lose_connection,
    lose_connection_meanwhile,
    write_to_a_standby,
    wait_for_the_pool,
    connect_to(query={"host": "/nowhere"}),
    connect_to(host="127.0.0.1", port=1, query={}),
    connect_to(database="not_there_yet"),
    execute_sql("do $$ begin raise exception 'full' using errcode = '53100'; end $$"),
    execute_sql("do $$ begin raise exception 'starting' using errcode = '57P03'; end $$"),
]
MISTAKES = [
    execute_sql("select 1 / 0"),
    execute_sql("select * from not_there"),
    execute_sql("not sql"),
    execute_sql("set statement_timeout = 5", "select pg_sleep(60)"),
    execute_sql("create temporary table u (i int unique)", "insert into u values (1), (1)"),
    execute_sql("do $$ begin raise exception 'deadlock' using errcode = '40P01'; end $$"),
    execute_sql("do $$ begin raise exception 'lock timeout' using errcode = '55P03'; end $$"),
    execute_sql("do $$ begin raise exception 'mine' using errcode = 'P0001'; end $$"),
]


@pytest.mark.parametrize(
    ("fail", "outage"), [*((fail, True) for fail in OUTAGES), *((fail, False) for fail in MISTAKES)]
)
def test_an_outage_is_told_from_a_mistake(
    database_url: str, fail: Callable[[Connection], None], *, outage: bool
) -> None:
    with pytest.raises(SQLAlchemyError) as caught, connected(database_url) as conn:
        fail(conn)
    assert database.is_outage(caught.value) is outage
    assert "\n" not in database.in_a_line(caught.value)


def test_what_is_no_error_of_a_database_is_no_outage() -> None:
    assert not database.is_outage(ConnectionError("closed"))
    assert not database.is_outage(ValueError())


def test_an_error_in_a_line_has_no_sql_no_parameters_and_no_password(database_url: str) -> None:
    with connected(database_url) as conn, pytest.raises(DBAPIError) as caught:
        conn.execute(text("select 1 / :zero, :word"), {"zero": 0, "word": "hidden"})
    assert database.in_a_line(caught.value) == "division by zero"
    secret = make_url(database_url).set(password="hidden", query={"host": "/nowhere"})
    with pytest.raises(DBAPIError) as caught:
        create_engine(secret).connect()
    assert "/nowhere" in database.in_a_line(caught.value)
    assert "hidden" not in database.in_a_line(caught.value)


@pytest.mark.parametrize(("error", "line"), [(ValueError(), "ValueError"), (ValueError(" a \n b"), "a")])
def test_any_error_has_a_line(error: Exception, line: str) -> None:
    assert database.in_a_line(error) == line


def test_a_server_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "CONNECT_TIMEOUT_S", 2)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            server.accept()[0].close()

        hangs_up = threading.Timer(20, hang_up)
        hangs_up.start()
        mute = database.engine(f"postgresql://me@127.0.0.1:{server.getsockname()[1]}/x", 1)
        with pytest.raises(DBAPIError, match="timeout expired"):
            mute.connect()
        hangs_up.cancel()


def test_clocks_are_compared_by_the_quickest_answer(engine: Engine) -> None:
    asked: list[object] = []

    def dawdle(*_: object) -> None:
        asked.append(None)
        time.sleep(0 if len(asked) == 2 else 1)

    with engine.connect() as conn:
        event.listen(engine, "before_cursor_execute", dawdle)
        try:
            lead = database.clock_lead(conn)
        finally:
            event.remove(engine, "before_cursor_execute", dawdle)
    assert len(asked) > 2
    assert abs(lead.total_seconds()) < 0.25  # a slow answer is off by half of what it took


# Forks


FORK = """
import gc, os, sys, threading
from sqlalchemy import text
from vkjobs import database

def pid():
    with database.engine(sys.argv[1], 1).connect() as conn:
        return conn.scalar(text("select pg_backend_pid()"))

held, done = threading.Event(), threading.Event()

def hold():
    with database._lock:
        held.set()
        done.wait()

mine = pid()
threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if not child:
    other = pid()
    gc.collect()
    print("its own" if other != mine else "shared", flush=True)
    sys.exit()
done.set()
_, status = os.waitpid(child, 0)
print("child", status, "parent's still usable" if pid() == mine else "parent's was closed")
"""


@pytest.mark.timeout(30)
def test_a_forked_child_gets_a_session_of_its_own_and_leaves_the_parents_alone(database_url: str) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK, database_url]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=20, check=False)
    assert done.stdout.splitlines() == ["its own", "child 0 parent's still usable"]
