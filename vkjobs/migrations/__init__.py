"""Brings ``vk_jobs`` to the form this version needs, by Alembic, while others use the table. Knows no Celery.

``env.py`` and ``versions/`` are Alembic's to load. Every statement is a transaction of its own; a revision
looks before each step, so that one that broke off is finished by running it again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from importlib.resources import files

from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from vkjobs.database import CONNECT_TIMEOUT_S, in_a_line, is_outage, url_of
from vkjobs.errors import DatabaseUnavailable, MigrationError
from vkjobs.schema import TABLE

VERSION_TABLE = "vkjobs_alembic_version"
"""Not Alembic's default, which the host's own migrations may use in the same database."""

Report = Callable[[str], None]
"""Takes one line about what is being done."""

_ADVISORY_LOCK = int.from_bytes(b"migrate")
_POLL_S = 0.2

log = logging.getLogger(__name__)


def migrate(url: str, report: Report = log.info) -> None:
    """Create ``vk_jobs``, or add what it lacks; say each step to ``report``. Any number may run at once.

    Needs a session of its own: not a pooler that shares connections between transactions.

    Raises:
        ConfigurationError: ``url`` is no URL of a Postgres database.
        DatabaseUnavailable: Postgres cannot be reached, or went away; what is done is kept, run it again.
        MigrationError: the table is not one that vkjobs can use; the message says how to change that.

    """
    target = url_of(url)
    settings = {"connect_timeout": CONNECT_TIMEOUT_S, "application_name": "vkjobs migrate"}
    engine = create_engine(target, poolclass=NullPool, isolation_level="AUTOCOMMIT", connect_args=settings)
    try:
        with engine.connect() as connection:
            # A limit of the role or the database is meant for queries, not for building an index.
            connection.execute(text("set statement_timeout = 0"))
            _lock(connection, report)
            _upgrade(connection, report)
    except DBAPIError as error:
        kind = DatabaseUnavailable if is_outage(error) else MigrationError
        raise kind(f"{target.render_as_string()}: {in_a_line(error)}") from error
    report(f"{TABLE} is up to date")


def check(connection: Connection) -> str | None:
    """Return one line that says what to run if ``vk_jobs`` is missing or behind this version, else None.

    A table that a newer version has migrated is fine: during a deploy, older workers go on.
    """
    remedy = "run `celery -A <app> jobs migrate`"
    if not _exists(connection, TABLE):
        return f"there is no table {TABLE}: {remedy}"
    *older, newest = _known_revisions()
    if _revision(connection) in (None, *older):
        return f"the table {TABLE} is older than this vkjobs, which needs revision {newest}: {remedy}"
    return None


def _lock(connection: Connection, report: Report) -> None:
    # Waiting inside pg_advisory_lock would hold a snapshot, and the index build of the one who has the lock
    # waits for all older snapshots: both would wait for ever.
    waiting = False
    while not connection.scalar(text(f"select pg_try_advisory_lock({_ADVISORY_LOCK})")):
        if not waiting:
            report("waiting for another migration to finish")
        waiting = True
        time.sleep(_POLL_S)


def _upgrade(connection: Connection, report: Report) -> None:
    from alembic import command  # noqa: PLC0415 - slow to import, and each worker imports this module
    from alembic.config import Config  # noqa: PLC0415

    found = _revision(connection)
    if found and found not in _known_revisions():
        raise MigrationError(f"{TABLE} is of a newer vkjobs, at revision {found}: install that version")
    if found and not _exists(connection, TABLE):  # somebody dropped the table, and only the table
        connection.execute(text(f"delete from {VERSION_TABLE}"))
    config = Config(attributes={"connection": connection, "report": report})
    config.set_main_option("script_location", "vkjobs:migrations")
    command.upgrade(config, "head")


def _known_revisions() -> list[str]:
    """Return the revisions, oldest first: a file is named by its revision, as in `r0001_vk_jobs`."""
    names = [path.name for path in files(f"{__name__}.versions").iterdir()]
    return sorted(name[1:].partition("_")[0] for name in names if name.startswith("r"))


def _exists(connection: Connection, table: str) -> bool:
    return connection.scalar(text("select to_regclass(:table) is not null"), {"table": table}) is True


def _revision(connection: Connection) -> str | None:
    if not _exists(connection, VERSION_TABLE):
        return None
    found: str | None = connection.scalar(text(f"select version_num from {VERSION_TABLE}"))
    return found
