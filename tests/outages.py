"""Sessions of Postgres that end at a statement or a commit."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg2
import pytest
from original import connected, execute, until
from sqlalchemy import Connection, Engine, text
from statements import watching


def end_backend(url: str, pid: int) -> None:
    """End a session of somebody else's, and wait until it is gone."""
    with connected(url) as conn:
        conn.execute(text("select pg_terminate_backend(:pid)"), {"pid": pid})
        gone = text("select count(*) = 0 from pg_stat_activity where pid = :pid")
        until(lambda: conn.scalar(gone, {"pid": pid}))


def pid_of(conn: Connection) -> int:
    return int(conn.connection.driver_connection.info.backend_pid)  # type: ignore[union-attr]


@contextmanager
def cut_once(engine: Engine, url: str, *words: str, after: bool) -> Iterator[list[str]]:
    """End the session right before or after its first statement with one of ``words``; give those that were cut."""
    cut: list[str] = []

    def strike(conn: Connection, statement: str) -> None:
        if any(some in statement for some in words) and not cut:
            cut.append(statement)
            end_backend(url, pid_of(conn))
            if after:
                # What psycopg2 says when the answer does not come; this one has come already.
                raise psycopg2.OperationalError("server closed the connection unexpectedly")

    with watching(engine, after=strike) if after else watching(engine, before=strike):
        yield cut


@contextmanager
def commits_without_answer(engine: Engine, url: str) -> Iterator[list[bool]]:
    """End the session right after the first commit of a transaction in the block; give whether there was one."""
    lost: list[bool] = []

    def commit(connection: Any) -> None:
        connection.commit()
        if not lost:
            lost.append(True)
            end_backend(url, connection.driver_connection.info.backend_pid)
            raise psycopg2.OperationalError("server closed the connection unexpectedly")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.dialect, "do_commit", commit)
        yield lost


_SLOW_COMMIT = (
    """create function dawdle() returns trigger language plpgsql as $$ begin
        if coalesce(current_setting('test.dawdled', true), '') <> txid_current()::text then
            perform set_config('test.dawdled', txid_current()::text, true), pg_sleep(0.7);
        end if;
        return null; end $$""",
    """create constraint trigger dawdle after update on vk_jobs deferrable initially deferred
        for each row when (new.status = 'done') execute function dawdle()""",
)
_DAWDLING = text("""
    select pid from pg_stat_activity
    where datname = current_database() and wait_event = 'PgSleep' and pid <> pg_backend_pid()""")


@contextmanager
def commits_that_break(engine: Engine, url: str) -> Iterator[None]:
    """Break the connection of the first settling in the block while its commit is under way."""
    sockets: dict[int, int] = {}

    def take_down(conn: Connection, _statement: str) -> None:
        sockets[pid_of(conn)] = conn.connection.driver_connection.fileno()  # type: ignore[union-attr]

    def break_the_connection() -> None:
        with connected(url) as conn:
            until(lambda: conn.scalar(_DAWDLING))
            pid = conn.scalar(_DAWDLING)
        with socket.socket(fileno=os.dup(sockets[pid])) as broken:
            broken.shutdown(socket.SHUT_RDWR)

    execute(url, *_SLOW_COMMIT)
    breaker = threading.Thread(target=break_the_connection)
    breaker.start()
    try:
        with watching(engine, before=take_down):
            yield
    finally:
        breaker.join()
        execute(url, "drop function dawdle cascade")
