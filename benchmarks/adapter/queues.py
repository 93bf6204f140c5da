"""The systems that the adapter can run: how each installs itself, takes jobs, consumes them and tells its depth."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Protocol

import psycopg2

import vkjobs
from benchmarks.site import Place
from benchmarks.systems import vkjobs as bench
from vkjobs import database, local

Payload = dict[str, Any]


class Queue(Protocol):
    """A system, on the database at ``place``.

    Attributes:
        manifest: what ``adapter.json`` says of it.
        depth_sql: counts the jobs that wait.
    """

    manifest: ClassVar[dict[str, Any]]
    depth_sql: ClassVar[str]

    def consume(self, place: Place, workers: int, stack: ExitStack) -> None:
        """Install the schema, and start to consume."""

    def inserter(self, place: Place) -> Callable[[list[Payload]], object]:
        """Return what inserts jobs, in the thread that calls it."""


class Vkjobs:
    """vkjobs, with a Redis of its own where ``VKJOBS_BROKER_URL`` names none."""

    manifest: ClassVar = json.loads(Path(__file__).with_name("adapter.json").read_text())
    depth_sql: ClassVar = "select count(*) from vk_jobs where status = 'pending'"

    def consume(self, place: Place, workers: int, stack: ExitStack) -> None:
        """Start a worker with beat."""
        if not place.broker_url:
            place.broker_url = stack.enter_context(local.Redis()).url
        bench.serve(place, concurrency=workers)

    def inserter(self, place: Place) -> Callable[[list[Payload]], object]:
        """Insert by its client, as a host does whose jobs shall start at once."""
        os.environ.update(VKJOBS_DATABASE_URL=place.url, VKJOBS_BROKER_URL=place.broker_url)
        from benchmarks.systems.vkjobs_app import app  # noqa: PLC0415 - it reads the environment

        engine = database.engine(place.url, 1)

        def insert(payloads: list[Payload]) -> None:
            with database.transaction(engine) as conn:
                vkjobs.enqueue_many(conn, [vkjobs.NewJob(bench.WORK, payload=payload) for payload in payloads])
                conn.commit()
            vkjobs.nudge(app)

        return insert


class Procrastinate:
    """Procrastinate, in one process."""

    manifest: ClassVar = {
        "system": "procrastinate",
        "db_name": "procrastinate_bench",
        "event_tables": ["public.procrastinate_jobs", "public.procrastinate_events"],
        "extensions": [],
    }
    depth_sql: ClassVar = "select count(*) from procrastinate_jobs where status = 'todo'"

    def consume(self, place: Place, workers: int, stack: ExitStack) -> None:
        """Start a worker."""
        from benchmarks.systems import procrastinate  # noqa: PLC0415 - only what is measured need be installed

        procrastinate.serve(place, workers)

    def inserter(self, place: Place) -> Callable[[list[Payload]], object]:
        """Insert by its client."""
        from benchmarks.systems import procrastinate  # noqa: PLC0415

        return _in_a_loop(procrastinate.connect(place.dsn))


class Pgqueuer:
    """PgQueuer, in one process."""

    manifest: ClassVar = {
        "system": "pgqueuer",
        "db_name": "pgqueuer_bench",
        "event_tables": ["public.pgqueuer", "public.pgqueuer_log"],
        "extensions": [],
    }
    depth_sql: ClassVar = "select count(*) from pgqueuer where status = 'queued'"

    def consume(self, place: Place, workers: int, stack: ExitStack) -> None:
        """Start a worker; it has no limit for the jobs that it runs at once."""
        from benchmarks.systems import pgqueuer  # noqa: PLC0415

        pgqueuer.serve(place)

    def inserter(self, place: Place) -> Callable[[list[Payload]], object]:
        """Insert by its client."""
        from benchmarks.systems import pgqueuer  # noqa: PLC0415

        return _in_a_loop(pgqueuer.connect(place.dsn))


QUEUES: dict[str, type[Queue]] = {"vkjobs": Vkjobs, "procrastinate": Procrastinate, "pgqueuer": Pgqueuer}


def _in_a_loop(insert: Callable[[list[Payload]], Any]) -> Callable[[list[Payload]], object]:
    loop = asyncio.new_event_loop()
    return lambda payloads: loop.run_until_complete(insert(payloads))


def depth(queue: Queue, dsn: str) -> int:
    """Return how many jobs wait."""
    connection = psycopg2.connect(dsn, connect_timeout=2)
    try:
        with connection.cursor() as cursor:
            cursor.execute(queue.depth_sql)
            return int(cursor.fetchone()[0])
    finally:
        connection.close()
