"""Real services for all tests: one Postgres and one Redis a session, a database of its own for each test."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as redis_client
from databases import EMPTY, Databases
from rows import Row, add_row, read_row
from sqlalchemy import Engine, text
from workers import Worker

from vkjobs import database
from vkjobs.local import Postgres, Redis
from vkjobs.migrations import migrate

# What the tests run on is theirs alone, whatever the shell that started them has set.
PARITY_CASES = os.environ.pop("VKJOBS_PARITY_CASES", None)
for name in [name for name in os.environ if name.startswith(("VKJOBS_", "CELERY_"))]:
    del os.environ[name]

_numbers = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the modules of few tests: those take the longest, and would run alone in the end."""
    sizes = Counter(item.path for item in items)
    items.sort(key=lambda item: sizes[item.path])


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with Postgres() as server:
        migrate(server.create_database("migrated"))
        yield server


@pytest.fixture
def empty_database_url(postgres: Postgres) -> str:
    return postgres.create_database(f"empty_{next(_numbers)}")


@pytest.fixture(scope="session")
def databases(postgres: Postgres) -> Databases:
    return Databases(postgres)


@pytest.fixture
def database_url(databases: Databases) -> Iterator[str]:
    """URL of a database in which vk_jobs is empty."""
    url = databases.take()
    yield url
    databases.give_back(url)


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = database.engine(database_url, 10)
    yield engine
    engine.dispose()


@pytest.fixture
def emptied(engine: Engine) -> None:
    """Empty the tables: for modules whose tests share a database."""
    with engine.connect() as conn:
        conn.execute(text(EMPTY))


@pytest.fixture(scope="session")
def redis() -> Iterator[Redis]:
    with Redis() as server:
        yield server


@pytest.fixture
def redis_url(redis: Redis) -> Iterator[str]:
    """URL of an empty Redis."""
    with redis_client.Redis.from_url(redis.url) as client:
        client.flushall()
        yield redis.url


@pytest.fixture
def add(engine: Engine) -> Callable[..., Row]:
    """Add a row in any state: ``add(kind="open_expire", run_at=-1, …)``; times are seconds from the database's now."""

    def add_one(**columns: Any) -> Row:
        with engine.connect() as conn:
            return add_row(conn, **columns)

    return add_one


@pytest.fixture
def read(engine: Engine) -> Callable[[Any], Row]:
    """Read a row again by its id."""

    def read_one(id: Any) -> Row:
        with engine.connect() as conn:
            return read_row(conn, id)

    return read_one


@pytest.fixture
def start_worker(tmp_path: Path, database_url: str, redis_url: str) -> Iterator[Callable[..., Worker]]:
    """Start a real worker on the test's own database and broker; what still runs afterwards is killed."""
    workers: list[Worker] = []

    def start(app: str = "vkjobs", *options: str, **environment: str) -> Worker:
        services = {"VKJOBS_DATABASE_URL": database_url, "VKJOBS_BROKER_URL": redis_url}
        worker = Worker(app, options, {**services, **environment}, tmp_path, number=len(workers))
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        worker.kill()
