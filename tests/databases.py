"""Databases for tests: a test has one to itself, and one that it left as it was made serves the next test too."""

from __future__ import annotations

import itertools

from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.exc import SQLAlchemyError

from vkjobs import database
from vkjobs.local import Postgres

# What a test may have left behind that emptying the tables does not undo.
_TRACES = text(
    """
    select (select count(*) from pg_class where relnamespace = 'public'::regnamespace),
        (select count(*) from pg_trigger), (select count(*) from pg_constraint), (select count(*) from pg_namespace),
        (select count(*) from pg_proc where pronamespace = 'public'::regnamespace),
        (select count(*) from pg_db_role_setting),
        (select count(*) from pg_statistic join pg_class on pg_class.oid = starelid
         where relnamespace = 'public'::regnamespace),
        (select string_agg(attname || atttypid || attnotnull, ' ' order by attnum) from pg_attribute
         where attrelid = 'vk_jobs'::regclass)""".replace("::", "\\:\\:")
)
EMPTY = "truncate vk_jobs, vkjobs_ticks restart identity"
_OTHERS = text(
    "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() "
    "and pid <> pg_backend_pid()"
)


class Databases:
    """Copies of the database ``migrated``."""

    def __init__(self, server: Postgres) -> None:
        self._server = server
        self._numbers = itertools.count(1)
        self._free: list[str] = []
        self._clean: object = None

    def take(self) -> str:
        """Return the URL of a database with an empty vk_jobs."""
        if self._free:
            return self._free.pop()
        url = self._server.create_database(f"test_{next(self._numbers)}", template="migrated")
        if self._clean is None:
            self._clean = self._traces(url)
        return url

    def give_back(self, url: str) -> None:
        """Empty the database for the next test; one that was changed otherwise is not used again."""
        for (used, _, _), engine in list(database._engines.items()):
            if used == url:
                engine.dispose()
        try:
            if self._traces(url) == self._clean:
                self._free.append(url)
        except SQLAlchemyError:
            pass  # the test dropped the tables, or stopped the server

    @staticmethod
    def _traces(url: str) -> object:
        with create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT").connect() as conn:
            conn.execute(_OTHERS)
            conn.execute(text("set lock_timeout = '5s'"))
            conn.execute(text(EMPTY))
            return tuple(conn.execute(_TRACES).one())
