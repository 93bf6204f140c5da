"""The original dispatcher and its table, as the tests need them, and short ways to a database."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, create_engine, text
from sqlalchemy.pool import NullPool

from vkjobs.migrations.online import LOCK_TIMEOUT_S

# A statement that is held up by more than one try for a lock fails.
PATIENT = f"set lock_timeout = '{2 * LOCK_TIMEOUT_S}s'"

ORIGINAL = """
    create table vk_jobs (
        id {id}, kind text not null, ref_id text, status {status}, run_at timestamptz not null,
        lease_until timestamptz, attempts integer not null default 0, last_error text,
        updated_at timestamptz not null default now())"""
FOUR = "('pending', 'running', 'done', 'failed')"
IDS = {
    "bigint": "bigint primary key",
    "bigserial": "bigserial primary key",
    "text": "text primary key",
    "uuid": "uuid primary key",
    "uuid with a default": "uuid primary key default gen_random_uuid()",
}
STATUSES = {
    "text": "text not null default 'pending'",
    "check": f"text not null default 'pending' check (status in {FOUR})",
    "enum": "vk_status not null default 'pending'",
    "varchar": f"varchar(16) not null default 'pending' check (status in {FOUR} and status not like '%:n')",
}


@contextmanager
def connected(url: str, isolation: Any = "AUTOCOMMIT") -> Iterator[Connection]:
    engine = create_engine(url, poolclass=NullPool, isolation_level=isolation)
    with engine.connect() as connection:
        yield connection


def execute(url: str, *statements: str) -> None:
    with connected(url) as connection:
        for statement in statements:
            connection.exec_driver_sql(statement.replace("%", "%%"))


def rows(url: str, query: str) -> list[tuple[Any, ...]]:
    with connected(url) as connection:
        return [tuple(row) for row in connection.execute(text(query))]


def make_original(url: str, key: str = IDS["bigserial"], status: str = STATUSES["check"]) -> None:
    execute(url, f"create type vk_status as enum {FOUR}", ORIGINAL.format(id=key, status=status))


def shape(url: str) -> list[tuple[Any, ...]]:
    """Everything that makes up the tables of the database."""
    return rows(
        url,
        """
        select attrelid::regclass::text || '.' || attname, format_type(atttypid, atttypmod) || ' '
            || attidentity::text || ' ' || attnotnull::text || coalesce(pg_get_expr(adbin, adrelid), '')
        from pg_attribute join pg_class c on c.oid = attrelid
            left join pg_attrdef on adrelid = attrelid and adnum = attnum
        where relnamespace = 'public'::regnamespace and relkind = 'r' and attnum > 0 and not attisdropped
        union all select conname, pg_get_constraintdef(oid) || convalidated::text from pg_constraint
            where connamespace = 'public'::regnamespace
        union all select indexname, indexdef from pg_indexes where schemaname = 'public'
        union all select 'enum', enumlabel from pg_enum
        union all select relname || ' with', reloptions::text from pg_class
            where relnamespace = 'public'::regnamespace and reloptions is not null
        order by 1, 2""",
    )


def until(fact: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not fact():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


@contextmanager
def open_transaction(url: str, query: str) -> Iterator[int]:
    """Somebody's transaction that has run ``query`` and stays open; gives its process id."""
    with connected(url, "REPEATABLE READ") as connection:
        pid = connection.scalar(text("select pg_backend_pid()"))
        connection.exec_driver_sql(query)
        yield pid
        connection.rollback()


@contextmanager
def original_dispatcher(url: str) -> Iterator[list[int]]:
    """The original's statements in a loop; gives the ids it has settled. If one fails, so does the test."""
    settled: list[int] = []
    stop = threading.Event()

    def run() -> None:
        with connected(url) as connection:
            connection.exec_driver_sql(PATIENT)
            while not stop.is_set():
                taken = connection.execute(
                    text("""
                        update vk_jobs set status = 'running', lease_until = now() + interval '1 minute'
                        where id in (
                            select id from vk_jobs where status = 'pending' and run_at <= now()
                                or status = 'running' and lease_until < now()
                            order by run_at limit 20 for update skip locked)
                        returning id""")
                )
                settle = text("""
                    update vk_jobs set status = 'done', lease_until = null, last_error = 'by the original'
                    where id = :id""")
                for job in taken.scalars().all():
                    connection.execute(settle, {"id": job})
                    settled.append(job)

    with ThreadPoolExecutor() as threads:
        loop = threads.submit(run)
        try:
            until(lambda: settled or loop.done())
            yield settled
        finally:
            stop.set()
        loop.result()
