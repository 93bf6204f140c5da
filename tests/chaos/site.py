"""What a scenario breaks and looks at: a database and a broker, its jobs, its workers, and the audit in the end.

Knows no scenario.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random
from threading import Event, Lock
from typing import Any

import audit
from legal import Rules
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.exc import OperationalError
from workers import HERE, Worker, wait_for

from chaos.servers import Broker
from chaos.verdict import Result, judge
from vkjobs.local import Postgres
from vkjobs.migrations import migrate

TICK_S, HORIZON_S, LEASE_S = 0.5, 1.0, 4.0
_PATIENCE_S = 90.0
_LONG = 10_000


_ALEMBIC = Lock()  # its context is one for all threads
STOP = Event()
"""Set: everything ends as soon as it can."""


class Site:
    """The place of one scenario.

    Attributes:
        broker, postgres: for the scenario to break.
        url: of the scenario's own database.
        jobs: how many jobs a scenario under load has.
        long: whether this is the long version.
        random: decides the schedule of the faults.
        lease, max_attempts: settings of the workers that are started from now on.
        seen: what the scenario wants to be printed.
        claims_may_be_unseen: a crash of Postgres may undo a claim, which needs no durable commit.
    """

    def __init__(
        self, *, broker: Broker, postgres: Postgres, url: str, folder: Path, jobs: int, random: Random
    ) -> None:
        self.broker = broker
        self.postgres = postgres
        self.url = url
        self.jobs = jobs
        self.random = random
        self.folder = folder
        self.seen: dict[str, Any] = {}
        self.claims_may_be_unseen = False
        self.max_attempts = 1000
        self.lease = LEASE_S
        self.long = jobs >= _LONG
        self._engine = create_engine(url, isolation_level="AUTOCOMMIT", pool_pre_ping=True)
        self._effects = folder / "effects"
        self._effects.touch()
        self._workers: list[Worker] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._fails: set[str] = set()
        self.ask("create table effects (job_id bigint)")  # no unique constraint: a double shows

    # What is there.

    def migrate(self) -> None:
        """Migrate, and record every change of vk_jobs from then on."""
        with _ALEMBIC:
            migrate(self.url)
        with self._engine.connect() as conn:
            audit.install(conn)

    def add(
        self, kind: str, number: int, *, due: float = 0, over: float = 0, fails: bool = False, **payload: Any
    ) -> None:
        """Add jobs of a kind, due in ``due`` seconds and from then on spread over ``over`` seconds.

        ``fails`` tells how such jobs shall end.
        """
        column, value = (", payload", ", cast(:payload as jsonb)") if payload else ("", "")
        self.ask(
            f"""
            insert into vk_jobs (kind, ref_id, run_at{column})
            select :kind, 'r' || i, clock_timestamp() + make_interval(secs => :due + :over * i / :number){value}
            from generate_series(1, :number) i""",
            kind=kind,
            number=number,
            due=due,
            over=over,
            payload=json.dumps(payload),
        )
        if fails:
            self._fails.add(kind)

    def worker(self, *options: str, beat: bool = True, concurrency: int = 2, **environment: str) -> Worker:
        """Start a worker; see `settings` for what it gets, ``environment`` comes on top."""
        options = ("-c", str(concurrency), *(("-B",) if beat else ()), *options)
        worker = Worker("chaos_app", options, self.settings(**environment), self.folder, number=len(self._workers))
        self._workers.append(worker)
        return worker

    def beat(self) -> subprocess.Popen[bytes]:
        """Start a beat as a process of its own."""
        command = [sys.executable, "-P", "-m", "celery", "-A", "chaos_app", "beat"]
        with (self.folder / f"beat-{len(self._processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=self.folder, env={**os.environ, **self.settings()}, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        return process

    def settings(self, **environment: str) -> dict[str, str]:
        """Return the environment of workers: leases and ticks so short that a scenario need not last."""
        return {
            "PYTHONPATH": os.pathsep.join([str(HERE / "apps"), os.environ.get("PYTHONPATH", "")]),
            "EFFECTS": str(self._effects),
            "VKJOBS_DATABASE_URL": self.url,
            "VKJOBS_BROKER_URL": self.broker.url,
            "VKJOBS_TICK": str(TICK_S),
            "VKJOBS_HORIZON": str(HORIZON_S),
            "VKJOBS_LEASE": str(self.lease),
            "VKJOBS_BACKOFF": "0",
            "VKJOBS_MAX_ATTEMPTS": str(self.max_attempts),
            **environment,
        }

    # What is seen.

    def ask(self, sql: str, **values: Any) -> Any:
        """Execute a statement, patiently; return the first value of its answer, if it has one."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            assert not STOP.is_set(), "interrupted"
            try:
                with self._engine.connect() as conn:
                    result = conn.execute(text(sql), values)
                    return result.scalar() if result.returns_rows else None
            except OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def row(self, sql: str) -> tuple[Any, ...]:
        """Return the row that a query finds."""
        with self._engine.connect() as conn:
            return tuple(conn.execute(text(sql)).one())

    def count(self, condition: str, **values: Any) -> int:
        """Return how many jobs fulfil a condition."""
        return int(self.ask(f"select count(*) from vk_jobs where {condition}", **values))

    def attempts(self) -> int:
        """Return the failed attempts of all jobs."""
        return int(self.ask("select coalesce(sum(attempts), 0) from vk_jobs"))

    def lateness(self, condition: str = "true") -> float:
        """Return the longest time, in seconds, by which a start of a job came after its ``run_at``."""
        sql = f"select max(extract(epoch from started_at - run_at)) from vk_jobs where {condition}"
        return round(float(self.ask(sql) or 0), 2)

    def starts(self) -> Counter[str]:
        """Return how often each job was started, by its id, as its handler told."""
        return Counter(self._effects.read_text().split())

    @contextmanager
    def transaction(self, sql: str, isolation: Any = "READ COMMITTED") -> Iterator[list[Any]]:
        """Leave a transaction open that has executed ``sql``, somebody else's as far as vkjobs is concerned.

        Gives the first column of its answer.
        """
        with self._engine.connect() as conn:
            conn.execution_options(isolation_level=isolation)
            with conn.begin():
                yield list(conn.execute(text(sql)).scalars())

    @contextmanager
    def all_connections(self, most: int = 1000) -> Iterator[int]:
        """Hold as many connections as Postgres allows, the workers' too, or ``most``; gives their number."""
        others = create_engine(self.url, poolclass=NullPool)
        with ExitStack() as held:
            number = 0
            with suppress(OperationalError):
                while number < most:
                    if number % 20 == 0:
                        self.terminate()
                    held.enter_context(others.connect())
                    number += 1
            yield number

    def terminate(self, condition: str = "true") -> None:
        """End the workers' connections to the database."""
        mine = "datname = current_database() and application_name = 'vkjobs'"
        self.ask(f"select count(pg_terminate_backend(pid)) from pg_stat_activity where {mine} and {condition}")

    # What is waited for, and when faults come.

    def span(self, seconds: float) -> float:
        """Return how long something lasts here that lasts ``seconds`` in the long version."""
        return seconds * min(1.0, max(0.2, self.jobs / _LONG))

    def every(self, seconds: float, *, lasting: float) -> Iterator[int]:
        """Count the moments of faults: one about every ``seconds``, for ``span(lasting)`` seconds, three at least."""
        number, ends_at = 0, time.monotonic() + self.span(lasting)
        while number < 3 or time.monotonic() < ends_at:
            time.sleep(seconds * self.random.uniform(0.7, 1.3))
            yield number
            number += 1

    @contextmanager
    def away(self, server: Broker | Postgres) -> Iterator[None]:
        """Kill a server, and start it at the end of the block."""
        server.stop("immediate") if isinstance(server, Postgres) else server.kill()
        try:
            yield
        finally:
            server.start()

    @staticmethod
    def wait(fact: Callable[[], object], what: str) -> None:
        """Wait for what SQL does not say."""
        wait_for(fact, what, _PATIENCE_S)

    def until(self, condition: str, what: str, patience: float | None = None) -> None:
        """Wait until a condition in SQL holds."""
        patience = patience or _PATIENCE_S * max(1.0, self.jobs / 1000)
        deadline = time.monotonic() + patience
        while not self.ask(f"select {condition}"):
            assert time.monotonic() < deadline, f"waited {patience:g} s in vain for {what}"
            time.sleep(0.05)

    def settle(self) -> None:
        """Wait until all jobs are over."""
        self.until("not exists (select from vk_jobs where status in ('pending', 'running'))", "all jobs to be over")

    # What many scenarios expect.

    def no_attempt_is_spent(self) -> None:
        """Expect that no job has a failed attempt."""
        assert self.attempts() == 0, "an attempt was spent"

    def each_job_is_started_once(self) -> None:
        """Expect that no handler was called twice for a job."""
        assert set(self.starts().values()) == {1}, "a job was started twice"

    # What is left in the end.

    def close(self) -> None:
        """Kill what the scenario started."""
        for worker in self._workers:
            # One that was waited for has left no child, and its number may be another's by now.
            if worker.process.returncode is None:
                worker.kill()
        for process in self._processes:
            process.kill()
            process.wait()

    def verdict(self) -> Result:
        """Judge what became of the jobs."""
        rules = Rules(self.max_attempts, self.lease + HORIZON_S, HORIZON_S, backoff=0)
        starts = None if self.claims_may_be_unseen else self.starts()
        with self._engine.connect() as conn:
            result = judge(conn, rules, fails=self._fails, starts=starts)
        self._engine.dispose()
        result.seen |= self.seen
        return result
