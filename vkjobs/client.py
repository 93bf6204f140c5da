"""What the host's code calls: enqueue, on its own session or connection. Knows no Celery."""

from __future__ import annotations

import json
import math
from datetime import datetime
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.orm import Session, scoped_session

from vkjobs import ledger
from vkjobs.errors import InvalidJobError
from vkjobs.handlers import MAX_KIND_LENGTH
from vkjobs.ledger import JobId


def enqueue(
    session_or_connection: Session | scoped_session[Any] | Connection,
    kind: str,
    ref_id: str | None = None,
    *,
    run_at: datetime | None = None,
    payload: Any = None,
) -> JobId:
    """Insert a job in the caller's transaction: it is there if and when that commits.

    Args:
        session_or_connection: the host's own; of an async one, ``await session.run_sync(enqueue, kind, …)``.
        kind: what is to be done; 1 to 200 characters. It need not be known in this process.
        ref_id: what it is to be done to.
        run_at: when; a time with its zone. None: now, by the database's clock.
        payload: arguments beyond ``ref_id``: any value that JSON has.

    Returns:
        The job's id.

    Raises:
        InvalidJobError: an argument cannot be stored as meant; nothing was written.
    """
    if not isinstance(session_or_connection, Session | scoped_session | Connection):
        raise InvalidJobError(
            f"session_or_connection is a {type(session_or_connection).__name__}: it must be a Session or Connection of "
            "SQLAlchemy; with an async one, await session.run_sync(enqueue, kind, …)"
        )
    _check_text("kind", kind)
    if not 1 <= len(kind) <= MAX_KIND_LENGTH:
        raise InvalidJobError(f"kind has {len(kind)} characters: it must have 1 to {MAX_KIND_LENGTH}")
    if ref_id is not None:
        _check_text("ref_id", ref_id)
    if run_at is not None:
        check_run_at(run_at)
    _check_payload(payload)
    if not isinstance(session_or_connection, Connection):
        session_or_connection = session_or_connection.connection()
    return ledger.enqueue(session_or_connection, kind=kind, ref_id=ref_id, run_at=run_at, payload=payload)


def check_run_at(run_at: object) -> None:
    """Raise InvalidJobError unless ``run_at`` is a time with its zone."""
    if not isinstance(run_at, datetime):
        raise InvalidJobError(f"run_at is {run_at!r}: it must be a datetime with a zone")
    if run_at.utcoffset() is None:
        raise InvalidJobError(
            f"run_at is {run_at!r}, a time without zone: give it one, as in datetime.now(UTC) or "
            "run_at.replace(tzinfo=ZoneInfo('Europe/Paris'))"
        )


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidJobError(f"{name} is {value!r}: it must be a string")
    if "\0" in value:
        raise InvalidJobError(f"{name} holds a NUL character, which Postgres cannot store")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidJobError(f"{name} holds a lone surrogate, which Postgres cannot store") from None


def _check_payload(payload: Any) -> None:
    try:
        _check_value("payload", payload)
        json.dumps(payload)
    except InvalidJobError:
        raise
    except (ValueError, RecursionError) as error:  # an endless number, a circle
        raise InvalidJobError(f"payload is not JSON: {error}") from None


def _check_value(where: str, value: Any) -> None:
    if isinstance(value, str):
        _check_text(where, value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            _check_text(f"a key of {where}", key)
            _check_value(f"{where}[{key!r}]", inner)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            _check_value(f"{where}[{number}]", inner)
    elif isinstance(value, float) and not math.isfinite(value):
        raise InvalidJobError(f"{where} is {value}, which JSON does not have")
    elif value is not None and not isinstance(value, int | float):
        raise InvalidJobError(f"{where} is a {type(value).__name__}, which JSON does not have")
