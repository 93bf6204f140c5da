"""The process's connections to Postgres: one bounded pool, never shared across a fork. Knows no table."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.engine import URL, ExceptionContext
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from vkjobs.errors import ConfigurationError, DatabaseUnavailable

# libpq waits for ever by default; a worker must come back to say that Postgres is away.
CONNECT_TIMEOUT_S = 10
_OUTAGES = ("08", "53", "57P", "25006")
_PASSING = ("57014", "55P03", "40001", "40P01")

_engines: dict[tuple[str, int, str], Engine] = {}
_lock = threading.Lock()


def _forget_parents_connections() -> None:
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()  # another thread of the parent may have held it at the fork
    for engine in _engines.values():
        engine.dispose(close=False)  # the sockets are the parent's: closing them would end its sessions


os.register_at_fork(after_in_child=_forget_parents_connections)


def url_of(text: str) -> URL:
    """Return ``text`` as a URL of the psycopg2 driver; ``postgres://`` and ``postgresql://`` are welcome.

    Raises:
        ConfigurationError: it is empty, no URL, or of another database.
    """
    if not text:
        raise ConfigurationError(
            "vkjobs_database_url is not set: set it, or VKJOBS_DATABASE_URL in the environment, "
            "to a URL such as postgresql://user@host/database"
        )
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise ConfigurationError(
            "vkjobs_database_url is no URL: it must look like postgresql://user@host/database"
        ) from None
    if url.get_backend_name() not in ("postgres", "postgresql"):
        raise ConfigurationError(
            f"vkjobs_database_url is of {url.get_backend_name()}: vkjobs needs Postgres, postgresql://…"
        )
    # SQLAlchemy 2.1 reads a bare postgresql:// as psycopg 3.
    return url.set(drivername="postgresql+psycopg2")


def engine(url: str, pool_size: int, purpose: str = "jobs") -> Engine:
    """Return this process's engine for ``url`` and ``purpose``; it opens at most ``pool_size`` connections.

    Its connections are in autocommit: each call of the ledger is a transaction and a round trip. See `transaction`.

    Raises:
        ConfigurationError: see `url_of`.
    """
    with _lock:
        key = (url, pool_size, purpose)
        if key not in _engines:
            _engines[key] = create_engine(
                url_of(url),
                pool_size=pool_size,
                max_overflow=0,
                isolation_level="AUTOCOMMIT",
                connect_args={
                    "connect_timeout": CONNECT_TIMEOUT_S,
                    "application_name": "vkjobs",
                    "client_encoding": "utf8",  # whatever the database's is
                },
            )
            event.listen(_engines[key], "handle_error", _drop_what_became_read_only)
        return _engines[key]


def _drop_what_became_read_only(context: ExceptionContext) -> None:
    if is_read_only(context.original_exception):
        context.is_disconnect = True


def is_read_only(error: BaseException) -> bool:
    """Tell whether a driver's error says that its session cannot write.

    It may never be able to again, although the database is: a server that was demoted keeps its sessions, and so does
    one whose default was changed. Connections are made anew then.
    """
    return getattr(error, "pgcode", None) == "25006"


def transaction(engine: Engine) -> Connection:
    """Return a connection whose statements are one transaction, in the isolation that handlers' sessions rely on."""
    return engine.connect().execution_options(isolation_level="READ COMMITTED")


def clock_lead(conn: Connection) -> timedelta:
    """Return how far this host's clock is ahead of Postgres', to half of the shortest of three round trips."""
    samples: list[tuple[timedelta, timedelta]] = []
    for _ in range(3):
        asked = datetime.now(UTC)
        theirs = conn.execute(text("select clock_timestamp()")).scalar_one()
        took = datetime.now(UTC) - asked
        samples.append((took, asked + took / 2 - theirs))
    return min(samples)[1]


def is_outage(error: BaseException) -> bool:
    """Tell whether ``error`` says that Postgres is away or refuses work, not that a statement was wrong.

    Class 08 is a lost connection, 53 too few resources, 57P a shutdown, 25006 a read-only standby
    (https://www.postgresql.org/docs/current/errcodes-appendix.html). So is the wait for a connection of the pool.
    """
    if isinstance(error, PoolTimeout):
        return True
    if not isinstance(error, DBAPIError):
        return False
    code = getattr(error.orig, "pgcode", None)
    if code is None:  # libpq's own word: it could not connect, or the connection broke
        return error.connection_invalidated or isinstance(error, OperationalError | InterfaceError)
    return str(code).startswith(_OUTAGES)


def is_passing(error: BaseException) -> bool:
    """Tell whether the same statement may well work when it is tried again.

    Beside an outage: 57014 it was cancelled, 55P03 somebody held a lock for too long, 40001 and 40P01 it lost a race.
    """
    return is_outage(error) or getattr(getattr(error, "orig", None), "pgcode", None) in _PASSING


def is_locked(error: BaseException) -> bool:
    """Tell whether a statement gave up its wait for somebody's lock."""
    return getattr(getattr(error, "orig", None), "pgcode", None) == "55P03"


@contextmanager
def available(what: str) -> Iterator[None]:
    """Turn what the block meets in the database into a DatabaseUnavailable of one line that begins with ``what``."""
    try:
        yield
    except SQLAlchemyError as error:
        raise DatabaseUnavailable(f"{what}: {in_a_line(error)}") from None


def in_a_line(error: BaseException) -> str:
    """Return the first line of a database error, for a log: without SQL, parameters or password."""
    text = str(getattr(error, "orig", None) or error).strip()
    return " ".join(text.split("\n")[0].split()) or type(error).__name__
