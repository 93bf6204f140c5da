"""Statements that Postgres parses and plans once for each connection, for those that every job needs.

They go past SQLAlchemy's statements, whose making costs a job as much as all the rest of its round trip; its pool and
its exceptions stay. Knows no table.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Any, cast

import psycopg2
from psycopg2 import errors
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from vkjobs.database import is_read_only

_PARAMETER = re.compile(r"(?<![:\w]):([a-z]\w*)")
_PREPARED = "vkjobs_prepared"

# A pooler in transaction mode gives each statement another of its connections, and the table of a cached plan may have
# been altered.
_NOT_KEPT = (errors.InvalidSqlStatementName, errors.FeatureNotSupported)


class Prepared:
    """A statement with ``:name`` parameters, whose types Postgres infers."""

    def __init__(self, name: str, sql: str) -> None:
        self.sql = sql
        names = list(dict.fromkeys(_PARAMETER.findall(sql)))
        # By its hash another client of a pooler, of another version, prepares nothing else under the same name.
        self._name = f"vkjobs_{name}_{hashlib.sha256(sql.encode()).hexdigest()[:12]}"
        self._prepare = f"prepare {self._name} as {_PARAMETER.sub(lambda found: f'${names.index(found[1]) + 1}', sql)}"
        self._execute = f"execute {self._name} ({', '.join(f'%({name})s' for name in names)})"
        self._plain = _PARAMETER.sub(r"%(\1)s", sql.replace("%", "%%"))

    def execute(self, conn: Connection, lead: str, values: dict[str, Any]) -> tuple[Sequence[Any], int]:
        """Execute the statement after ``lead`` in one round trip and transaction; return its rows and their count.

        Where prepared statements are not kept, it is sent as it is from then on.

        Args:
            conn: a connection in autocommit.
            lead: statements without parameters, each with its semicolon.
            values: of the parameters.

        Raises:
            SQLAlchemyError: as SQLAlchemy's own statements do.
        """
        kept: set[str] | None = conn.info.setdefault(_PREPARED, set())
        try:
            with closing(conn.connection.cursor()) as cursor:
                if kept is None:
                    _send(conn, cursor, lead + self._plain, values)
                else:
                    if self._name not in kept:
                        self._prepare_on(cursor, lead)
                        kept.add(self._name)
                    try:
                        _send(conn, cursor, lead + self._execute, values)
                    except _NOT_KEPT:
                        conn.info[_PREPARED] = None
                        _send(conn, cursor, lead + self._plain, values)
                return cursor.fetchall() if cursor.description else [], cursor.rowcount
        except psycopg2.Error as error:
            connection = cast("Any", conn.connection.dbapi_connection)
            gone = conn.dialect.is_disconnect(error, connection, None) or is_read_only(error)
            if gone:
                conn.invalidate(error)
            raise DBAPIError.instance(
                self._plain, values, error, psycopg2.Error, connection_invalidated=gone, dialect=conn.dialect
            ) from error

    def _prepare_on(self, cursor: Any, lead: str) -> None:
        with suppress(errors.DuplicatePreparedStatement):  # by another client of the same pooler
            cursor.execute(lead + self._prepare)  # it too waits if somebody has locked the table


def _send(conn: Connection, cursor: Any, sql: str, values: dict[str, Any]) -> None:
    cursor.execute(sql, values)
