"""Enqueue on the host's own session or connection: what is given is checked, then written. Knows no Celery."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.orm import Session, scoped_session

from vkjobs import ledger
from vkjobs.errors import InvalidJobError
from vkjobs.handlers import MAX_KIND_LENGTH
from vkjobs.ledger import JobId, NewJob

SessionOrConnection = Session | scoped_session[Any] | Connection


def enqueue(
    session_or_connection: SessionOrConnection,
    kind: str,
    ref_id: str | None = None,
    *,
    run_at: datetime | None = None,
    payload: Any = None,
) -> JobId:
    """Insert a job in the caller's transaction and return its id; see `vkjobs.enqueue`, which can nudge as well.

    Raises:
        InvalidJobError: an argument cannot be stored as meant; nothing was written.
    """
    _check_session_or_connection(session_or_connection)
    job = NewJob(kind, ref_id, run_at, payload)
    _check_job(job)
    return ledger.enqueue(_connection_of(session_or_connection), **job._asdict())


def enqueue_many(session_or_connection: SessionOrConnection, jobs: Iterable[NewJob]) -> list[JobId]:
    """Insert jobs in the caller's transaction and return their ids; see `vkjobs.enqueue_many`, which can nudge as well.

    Raises:
        InvalidJobError: a job cannot be stored as meant; nothing was written.
    """
    _check_session_or_connection(session_or_connection)
    jobs = list(jobs)
    for number, job in enumerate(jobs):
        if not isinstance(job, NewJob):
            raise InvalidJobError(f"jobs[{number}] is a {type(job).__name__}: it must be a vkjobs.NewJob")
        try:
            _check_job(job)
        except InvalidJobError as error:
            raise InvalidJobError(f"jobs[{number}]: {error}") from None
    return ledger.enqueue_many(_connection_of(session_or_connection), jobs)


def _check_session_or_connection(given: object) -> None:
    if not isinstance(given, Session | scoped_session | Connection):
        raise InvalidJobError(
            f"session_or_connection is a {type(given).__name__}: it must be a Session or Connection of SQLAlchemy; "
            "with an async one, await session.run_sync(enqueue, kind, …)"
        )


def _connection_of(given: SessionOrConnection) -> Connection:
    return given if isinstance(given, Connection) else given.connection()


def _check_job(job: NewJob) -> None:
    _check_text("kind", job.kind)
    if not 1 <= len(job.kind) <= MAX_KIND_LENGTH:
        raise InvalidJobError(f"kind has {len(job.kind)} characters: it must have 1 to {MAX_KIND_LENGTH}")
    if job.ref_id is not None:
        _check_text("ref_id", job.ref_id)
    if job.run_at is not None:
        check_run_at(job.run_at)
    if job.payload is not None:
        _check_payload(job.payload)


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
        json.dumps([[payload]])  # no deeper does it lie among many
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
