"""What a benchmark runs on: one Postgres and one Redis for all systems, and the processes that it starts."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg2
import redis

from benchmarks import tally
from vkjobs.local import Postgres, Redis

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 60.0

READY = "BENCH_READY"
"""Name of the environment variable that names the file by whose existence a process says that it is ready."""

# fsync as on a server that holds something dear. What a checkpoint costs depends on when it comes: none comes.
_SETTINGS = {"fsync": "on", "max_wal_size": "16GB", "checkpoint_timeout": "1h", "max_connections": "200"}

_OURS = ("VKJOBS_", "CELERY_")  # what is measured has its defaults, whatever the shell has set


class BenchmarkError(Exception):
    """Something that was measured did not do what it should: there is no figure."""


def wait_for(fact: Callable[[], object], what: str, patience: float = PATIENCE_S, every: float = 0.02) -> None:
    """Wait until ``fact`` returns something true.

    Raises:
        BenchmarkError: it does not in time.
    """
    deadline = time.monotonic() + patience
    while not fact():
        if time.monotonic() > deadline:
            raise BenchmarkError(f"waited {patience:g} s in vain for {what}")
        time.sleep(every)


class Process:
    """A process that is measured, with what it says in a file."""

    def __init__(self, module: str, arguments: tuple[str, ...], environment: dict[str, str], folder: Path) -> None:
        self._module = module
        self._ready = folder / "ready"
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                cwd=folder,
                env={
                    **{name: value for name, value in os.environ.items() if not name.startswith(_OURS)},
                    "PYTHONPATH": str(ROOT),
                    "PYTHONWARNINGS": "ignore:You're running the worker with superuser",
                    READY: str(self._ready),
                    **environment,
                },
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more."""
        return self._process.poll() is not None

    @property
    def log(self) -> str:
        """What it has said so far."""
        return self._log.read_text(errors="replace")

    def ready(self) -> None:
        """Wait until it says that it is ready."""
        wait_for(lambda: self._ready.exists() or self.has_ended, f"{self._module} to be ready")
        self.check()

    def check(self) -> None:
        """Raise BenchmarkError if it has ended."""
        if self.has_ended:
            raise BenchmarkError(f"{self._module} ended:\n{self.log[-4000:]}")

    def go(self) -> None:
        """Let it begin, if it waits for a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def wait(self, patience: float = PATIENCE_S) -> int:
        """Wait for its end; return its exit code."""
        return self._process.wait(patience)

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def stop(self, patience: float = 10) -> None:
        """End it, in order if it does that soon."""
        if not self.has_ended:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


class Place:
    """A fresh database, an empty broker and the processes on them, for one system's one turn.

    Attributes:
        url: of the database, in SQLAlchemy's form.
        broker_url: of the broker.
        folder: for files.
    """

    def __init__(self, url: str, broker_url: str, folder: Path) -> None:
        self.url = url
        self.broker_url = broker_url
        self.folder = folder
        self._tally = folder / "tally"
        self._tally.mkdir()
        self._processes: list[Process] = []

    @property
    def dsn(self) -> str:
        """The database's URL for drivers other than SQLAlchemy's."""
        return self.url.replace("+psycopg2", "")

    def start(self, module: str, *arguments: str, **environment: str) -> Process:
        """Start ``python -m module``."""
        folder = self.folder / f"process-{len(self._processes)}"
        folder.mkdir()
        known = {
            "BENCH_DSN": self.dsn,
            "VKJOBS_DATABASE_URL": self.url,
            "VKJOBS_BROKER_URL": self.broker_url,
            tally.FOLDER: str(self._tally),
        }
        process = Process(module, arguments, {**known, **environment}, folder)
        self._processes.append(process)
        return process

    def check(self) -> None:
        """Raise BenchmarkError if a process has ended."""
        for process in self._processes:
            process.check()

    def total(self) -> tally.Total:
        """Return how often handlers were called so far, and when."""
        return tally.total(self._tally)

    @contextmanager
    def connection(self) -> Iterator[Any]:
        """Yield a connection to the database, in autocommit."""
        connection = psycopg2.connect(self.dsn)
        connection.autocommit = True
        try:
            yield connection
        finally:
            connection.close()

    def ask(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Execute a statement; return its rows."""
        with self.connection() as connection, connection.cursor() as cursor:
            cursor.execute(sql, values or None)
            return cursor.fetchall() if cursor.description else []

    def close(self, patience: float = 10) -> None:
        """End the processes."""
        for process in self._processes:
            process.stop(patience)


class Site:
    """The servers, and a place for each turn."""

    def __init__(self, postgres: Postgres, broker: Redis, folder: Path) -> None:
        self.postgres = postgres
        self.broker = broker
        self._folder = folder
        self._numbers = itertools.count(1)

    @contextmanager
    def place(self) -> Iterator[Place]:
        """Yield a place; in the end its processes and its database are gone."""
        number = next(self._numbers)
        name = f"bench_{number}"
        folder = self._folder / name
        folder.mkdir()
        with redis.Redis.from_url(self.broker.url) as client:
            client.flushall()
        place = Place(self.postgres.create_database(name), self.broker.url, folder)
        try:
            yield place
        finally:
            place.close()
            self._drop(name)

    def _drop(self, name: str) -> None:
        connection = psycopg2.connect(self.postgres.url.replace("+psycopg2", ""))
        connection.autocommit = True
        try:
            with connection.cursor() as cursor:
                cursor.execute(f"drop database {name} with (force)")
        finally:
            connection.close()


@contextmanager
def open_site() -> Iterator[Site]:
    """Yield a site; in the end nothing of it is left."""
    with (
        Postgres(settings=_SETTINGS) as postgres,
        Redis() as broker,
        TemporaryDirectory(prefix="vkjobs-bench-", dir="/tmp") as folder,
    ):
        yield Site(postgres, broker, Path(folder))
