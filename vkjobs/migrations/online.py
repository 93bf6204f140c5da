"""DDL on ``vk_jobs`` while others use it: short locks, taken by trying again. Knows no revision."""

from __future__ import annotations

import time
from dataclasses import dataclass

from psycopg2.errorcodes import LOCK_NOT_AVAILABLE
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from vkjobs.migrations import Report
from vkjobs.schema import TABLE

# Whoever comes after a waiting ALTER waits behind it: hence a limit, and a pause that gives them a turn.
# The limit is above Postgres' deadlock_timeout (1 s), at which an autovacuum in the way is cancelled.
LOCK_TIMEOUT_S = 2
PAUSE_S = 4 * LOCK_TIMEOUT_S


@dataclass(frozen=True)
class Online:
    """What a revision does to the table. The connection must be an autocommit one."""

    connection: Connection
    report: Report

    def alter(self, statement: str) -> None:
        """Execute a statement that excludes others for a moment; try until there is such a moment."""
        while True:
            try:
                return self._execute(statement, lock_timeout=f"{LOCK_TIMEOUT_S}s")
            except DBAPIError as error:
                if getattr(error.orig, "pgcode", None) != LOCK_NOT_AVAILABLE:
                    raise
            self.report(f"{TABLE} is in use by {self._holder()}: trying again")
            time.sleep(PAUSE_S)

    def validate(self, constraint: str) -> None:
        """Check a constraint that was added as ``not valid`` against all rows; nobody waits for it."""
        self._execute(f"alter table {TABLE} validate constraint {constraint}")

    def build_index(self, name: str, statement: str) -> None:
        """Execute a ``create index concurrently`` unless ``name`` is there.

        It waits for the transactions open now; nobody waits for it.
        """
        find = text("select indisvalid from pg_index where indexrelid = to_regclass(:name)")
        valid = self.connection.scalar(find, {"name": name})
        if valid:
            return
        self.report(f"building index {name}")
        if valid is False:  # left by a build that broke off: useless and in the way
            self._execute(f"drop index concurrently {name}")
        self._execute(statement)

    def _execute(self, statement: str, lock_timeout: str = "0") -> None:
        self.connection.exec_driver_sql(f"set lock_timeout = '{lock_timeout}'")
        self.connection.exec_driver_sql(statement.replace("%", "%%"))

    def _holder(self) -> str:
        oldest = text("""
            select pid from pg_locks join pg_stat_activity using (pid)
            where relation = to_regclass(:table) and granted and pid <> pg_backend_pid()
            order by xact_start limit 1""")
        pid = self.connection.scalar(oldest, {"table": TABLE})
        return f"process {pid}" if pid else "another transaction"
