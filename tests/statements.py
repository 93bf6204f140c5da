"""Hooks around the statements that an engine's connections send, SQLAlchemy's and prepared ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event

from vkjobs import prepared

Hook = Callable[[Connection, str], None]


def _nothing(_conn: Connection, _statement: str) -> None: ...


@contextmanager
def watching(engine: Engine, *, before: Hook = _nothing, after: Hook = _nothing) -> Iterator[None]:
    """Call the hooks before each statement is sent and after it is answered."""
    send = prepared._send

    def send_watched(conn: Connection, cursor: Any, sql: str, values: dict[str, Any]) -> None:
        before(conn, sql)
        send(conn, cursor, sql, values)
        after(conn, sql)

    def before_execute(conn: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        before(conn, statement)

    def after_execute(conn: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        after(conn, statement)

    event.listen(engine, "before_cursor_execute", before_execute)
    event.listen(engine, "after_cursor_execute", after_execute)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prepared, "_send", send_watched)
            yield
    finally:
        event.remove(engine, "before_cursor_execute", before_execute)
        event.remove(engine, "after_cursor_execute", after_execute)
