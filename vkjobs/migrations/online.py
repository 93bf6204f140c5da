"""DDL on ``vk_jobs`` while others read and write it: short locks, taken by trying again. Knows no revision."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psycopg2.errors
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from vkjobs.migrations import Report
from vkjobs.schema import TABLE

# Everybody who comes after a waiting ALTER waits behind it. Longer than Postgres' deadlock_timeout (1 s), after which
# an autovacuum that stands in the way is cancelled.
LOCK_TIMEOUT_S = 2
# Others get their turn.
PAUSE_S = 2


@dataclass(frozen=True)
class Online:
    """What a revision does to the table. The connection must be an autocommit one."""

    connection: Connection
    report: Report

    def alter(self, statement: str) -> None:
        """Execute a statement that excludes all others for a moment; wait for that moment without holding them up."""
        while True:
            self._execute(f"set lock_timeout = '{LOCK_TIMEOUT_S}s'")
            try:
                return self._execute(statement)
            except DBAPIError as error:
                if not isinstance(error.orig, psycopg2.errors.LockNotAvailable):
                    raise
            finally:
                self._execute("set lock_timeout = 0")
            self.report(f"{TABLE} is in use by {self._holder()}: trying again")
            time.sleep(PAUSE_S)

    def validate(self, constraint: str) -> None:
        """Check a constraint that was added as ``not valid`` against all rows; nobody waits for it."""
        self._execute(f"alter table {TABLE} validate constraint {constraint}")

    def build_index(self, name: str, definition: str) -> None:
        """Build an index unless it is there; it waits for the transactions open now, nobody waits for it.

        Args:
            name: name of the index.
            definition: columns and condition, as in ``(lease_until) where status = 'running'``. It begins with
                ``unique`` for a unique index.
        """
        find = text("select indisvalid from pg_index where indexrelid = to_regclass(:name)")
        valid = self.connection.scalar(find, {"name": name})
        if valid:
            return
        self.report(f"building index {name}")
        if valid is False:  # a build that broke off leaves it: never used, and in the way
            self._execute(f"drop index concurrently {name}")
        unique = "unique" if definition.startswith("unique") else ""
        columns = definition.removeprefix("unique")
        self._execute(f"create {unique} index concurrently {name} on {TABLE} {columns}")

    def _execute(self, statement: str) -> None:
        self.connection.exec_driver_sql(statement.replace("%", "%%"))

    def _holder(self) -> str:
        oldest = text("""
            select pid from pg_locks join pg_stat_activity using (pid)
            where relation = to_regclass(:table) and granted and pid <> pg_backend_pid()
            order by xact_start limit 1""")
        pid = self.connection.scalar(oldest, {"table": TABLE})
        return f"process {pid}" if pid else "another transaction"
