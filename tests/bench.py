"""An executor on a real database, without Celery: adds leased rows and runs them with a test's own handlers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from places import moment
from rows import Row, add_row, read_row
from sqlalchemy import Engine, text

from vkjobs.bulk import BulkExecutor
from vkjobs.execute import Executor, Outcome
from vkjobs.handlers import Function, Policy, Registry
from vkjobs.heartbeat import Heartbeat
from vkjobs.settings import Settings

BY = "task-1 w@host 7"


class Bench:
    """Runs jobs of the kind ``job``, or of any other that is handled, as one worker process does."""

    def __init__(self, engine: Engine, **settings: Any) -> None:
        self.engine = engine
        self.registry = Registry()
        self.heartbeat = Heartbeat(lambda: engine)
        self.executor = Executor(Settings(**settings), self.registry, lambda: engine, self.heartbeat)

    def handle(self, function: Function, kind: str = "job", **policy: Any) -> None:
        """Register a handler."""
        self.registry.register(kind, function, Policy(**policy))

    def add(self, **columns: Any) -> Row:
        """Add a row that is leased, and so has a message."""
        with self.engine.connect() as conn:
            return add_row(conn, **{"kind": "job", "ref_id": "r", "lease_until": 60, **columns})

    def read(self, row: Row) -> Row:
        """Read a row again."""
        with self.engine.connect() as conn:
            return read_row(conn, row.id)

    def run(self, row: Row, *, by: str = BY, lease: float = 30) -> Outcome:
        """Run the message of a leased row."""
        return self.executor.run(row.id, moment(row.lease_until or ""), by=by, lease=lease)

    def run_all(self, *rows: Row, by: str = BY, lease: float = 30) -> list[Outcome]:
        """Run the message of many leased rows."""
        return self.bulk(by, lease).run([(row.id, moment(row.lease_until or "")) for row in rows])

    def bulk(self, by: str = BY, lease: float = 30) -> BulkExecutor:
        """Return what runs one message of many jobs."""
        return BulkExecutor(self.executor, by, lease)

    def run_new(self, function: Function | None = None, **columns: Any) -> tuple[Outcome, Row]:
        """Run a new row, with ``function`` if it is given; return what became of it and the row."""
        if function is not None:
            self.handle(function)
        row = self.add(**columns)
        outcome = self.run(row)
        return outcome, self.read(row)


def somebody(engine: Engine) -> Callable[..., Any]:
    """Return a function that executes SQL on a connection of somebody else's, and returns the first value, if any."""

    def execute(sql: str, **values: Any) -> Any:
        with engine.connect() as conn:
            result = conn.execute(text(sql), values)
            return result.scalar() if result.returns_rows else None

    return execute
