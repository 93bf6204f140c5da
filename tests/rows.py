"""Rows of vk_jobs for tests: written and read by plain SQL, not by the ledger under test."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from sqlalchemy import Connection, text

COLUMNS = (
    "id", "kind", "ref_id", "status", "run_at", "lease_until", "attempts", "last_error", "updated_at", "started_at",
    "claimed_by", "claimed_until", "payload", "unique_key",
)  # fmt: skip
_TIMES = ("run_at", "lease_until", "updated_at", "started_at", "claimed_until")


class Row(NamedTuple):
    """A whole row; times as text, so that what Python has no datetime for is seen too."""

    id: Any
    kind: str
    ref_id: str | None
    status: str
    run_at: str
    lease_until: str | None
    attempts: int
    last_error: str | None
    updated_at: str
    started_at: str | None
    claimed_by: str | None
    claimed_until: str | None
    payload: Any
    unique_key: str | None


def add_row(conn: Connection, **columns: Any) -> Row:
    """Insert a row. A number given for a time is seconds from the database's now; text is taken as it stands."""
    columns = {"kind": "noop", "status": "pending", "run_at": -1, **columns}
    values: dict[str, Any] = {}
    expressions = []
    for name, value in columns.items():
        if name in _TIMES and isinstance(value, int | float):
            expressions.append(f"now() + make_interval(secs => :{name})")
        elif name in _TIMES:
            expressions.append(f"cast(:{name} as timestamptz)")
        elif name == "payload":
            expressions.append("cast(:payload as jsonb)")
            value = json.dumps(value)  # noqa: PLW2901
        else:
            expressions.append(f":{name}")
        values[name] = value
    sql = f"insert into vk_jobs ({', '.join(columns)}) values ({', '.join(expressions)}) returning id"
    id = conn.execute(text(sql), values).scalar_one()
    if not conn.connection.driver_connection.autocommit:  # type: ignore[union-attr]
        conn.commit()
    return read_row(conn, id)


def read_row(conn: Connection, id: Any) -> Row:
    """Return the row as it is now."""
    shown = ", ".join(f"{name}::text" if name in _TIMES else name for name in COLUMNS).replace("::", "\\:\\:")
    return Row(*conn.execute(text(f"select {shown} from vk_jobs where id = :id"), {"id": id}).one())
