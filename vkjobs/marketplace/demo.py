"""``python -m vkjobs.marketplace.demo``: a real worker carries out the example marketplace's deadlines.

Owns the processes and cleaning up. What is due, and what is expected, is the scenario's.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Self

import redis
from kombu.connection import Connection as BrokerConnection
from sqlalchemy import Engine, NullPool, create_engine, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.schema import CreateSchema, DropSchema

from vkjobs.database import in_a_line, url_of
from vkjobs.errors import BrokerUnavailable, DatabaseUnavailable, VkjobsError
from vkjobs.local import Postgres, Redis
from vkjobs.marketplace import scenario
from vkjobs.marketplace.screen import progress, say, screen, summarise

_WORKER_STARTS_S = 4.0  # the first deadlines shall find the worker up
_PATIENCE_S = 120.0  # normally a fifth of it is enough
_SHUTDOWN_S = 15.0
_LOOK_EVERY_S = 0.2
_LOG_LINES = 20
_FLOWER_COLUMNS = "--tasks-columns=name,state,kwargs,received,result,exception"  # it hides the arguments by default


class Interrupted(Exception):
    """The demo was asked to end."""


class Signals:
    """Remembers a request to end until the demo can: nothing is half begun, no cleaning up is cut off."""

    def __init__(self) -> None:
        self.received: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._remember)

    def _remember(self, number: int, _: FrameType | None) -> None:
        self.received = self.received or number

    def check(self) -> None:
        """Raise Interrupted if a signal came."""
        if self.received:
            raise Interrupted


@dataclass(frozen=True)
class Setup:
    """What the commands run in."""

    folder: Path
    environment: Mapping[str, str]
    signals: Signals


class Command:
    """A ``celery -A vkjobs …`` with a log, in a process group of its own; it ends with the ``with`` block."""

    process: subprocess.Popen[bytes]

    def __init__(self, setup: Setup, *arguments: str) -> None:
        self._setup = setup
        self._name = f"celery -A vkjobs {' '.join(arguments)}"
        self._command = [sys.executable, "-m", *self._name.split()]
        self._log = setup.folder / f"{arguments[0]}.log"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(_SHUTDOWN_S)
        except subprocess.TimeoutExpired:
            say(f"{self._name} has not stopped in {_SHUTDOWN_S:.0f} s: killed it", sys.stderr)
        self._kill_group()

    def start(self) -> None:
        """Start the process, or start it again."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                cwd=self._setup.folder,
                env=self._setup.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self, ready: Callable[[], bool], patience: float = _PATIENCE_S) -> None:
        """Wait until ``ready``. Raises VkjobsError if the process ends before, or takes too long."""
        deadline = time.monotonic() + patience
        while not ready():
            self._setup.signals.check()
            if self.process.poll() is not None:
                raise self.trouble(f"ended with exit code {self.process.returncode}")
            if time.monotonic() > deadline:
                raise self.trouble("takes too long")
            time.sleep(_LOOK_EVERY_S)

    def revive(self) -> bool:
        """Start the process again if it was killed; return whether so. Raises VkjobsError if it failed."""
        code = self.process.poll()
        if code is None:
            return False
        if code >= 0:
            raise self.trouble(f"ended with exit code {code}")
        self._kill_group()
        self.start()
        return True

    def trouble(self, what: str) -> VkjobsError:
        """Return an error with the end of the log."""
        lines = self._log.read_text(errors="replace").rstrip().splitlines()[-_LOG_LINES:]
        shown = "".join(f"\n  | {line}" for line in lines)
        return VkjobsError(f"{self._name} {what}; its last words:{shown}")

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # macOS' word for a group of zombies
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def own_schema(url: str, name: str) -> Iterator[str]:
    """Create a schema and drop it at the end; return a URL whose tables are in it and nowhere else."""
    target = url_of(url)
    limit = {"connect_timeout": 10}
    engine = create_engine(target, poolclass=NullPool, isolation_level="AUTOCOMMIT", connect_args=limit)
    try:
        with engine.connect() as conn:
            conn.execute(CreateSchema(name))
    except SQLAlchemyError as error:
        raise DatabaseUnavailable(f"{target.render_as_string()}: {in_a_line(error)}") from error
    try:
        options = " ".join([*target.normalized_query.get("options", ()), f"-c search_path={name}"])
        yield target.update_query_dict({"options": options}).render_as_string(hide_password=False)
    finally:
        try:
            with engine.connect() as conn:
                conn.execute(text("set lock_timeout = '10s'"))
                conn.execute(DropSchema(name, cascade=True))
        except SQLAlchemyError as error:
            say(f"schema {name} is left behind: {in_a_line(error)}", sys.stderr)


@contextmanager
def own_keys(url: str, name: str) -> Iterator[str]:
    """Return a ``celeryconfig`` that keeps to keys of its own on a shared Redis; remove them at the end.

    Another broker has no such prefixes: it needs a virtual host that nobody else uses.
    """
    try:
        with BrokerConnection(url, connect_timeout=10) as broker:
            broker.ensure_connection(max_retries=1, interval_start=0.1)
    except Exception as error:  # each transport has its own
        raise BrokerUnavailable(f"VKJOBS_BROKER_URL: {in_a_line(error)}") from error
    if broker.transport_cls not in ("redis", "rediss"):
        yield ""
        return
    try:
        yield f"broker_transport_options = {{'global_keyprefix': '{name}.'}}\n"
    finally:
        with suppress(redis.RedisError), redis.Redis.from_url(url) as client:
            for key in client.scan_iter(f"{name}.*"):
                client.delete(key)


def watch(engine: Engine, worker: Command, signals: Signals) -> None:
    """Show how the worker gets on until all jobs are over; start it again if somebody kills it."""
    began = time.monotonic()
    with screen() as show:
        while True:
            rows = progress(engine)
            over = not rows[-1].pending and not rows[-1].running
            show(time.monotonic() - began, rows, over)
            if over:
                return
            signals.check()
            if worker.revive():
                say("  The worker was killed: started it again")
            if time.monotonic() - began > _PATIENCE_S:
                raise worker.trouble("has not finished the jobs in time")
            time.sleep(_LOOK_EVERY_S)


def run(signals: Signals, *, flower: bool) -> int:
    """Run the demo; return the exit code."""
    if sys.stdout.isatty() and not importlib.util.find_spec("rich"):
        raise VkjobsError("the live table needs rich: pip install 'vkjobs[local]'")
    if flower and not importlib.util.find_spec("flower"):
        raise VkjobsError("Flower is missing: pip install 'vkjobs[flower]'")
    name = f"vkjobs_demo_{secrets.token_hex(4)}"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="vkjobs-demo-")))
        database = os.environ.get("VKJOBS_DATABASE_URL")
        if not database:
            say("Starting Postgres")
            database = stack.enter_context(Postgres()).url
        broker = os.environ.get("VKJOBS_BROKER_URL")
        if not broker:
            say("Starting Redis")
            broker = stack.enter_context(Redis()).url
        signals.check()
        database = stack.enter_context(own_schema(database, name))
        (folder / "celeryconfig.py").write_text(stack.enter_context(own_keys(broker, name)))
        setup = Setup(folder, _environment(folder, database, broker), signals)
        return _carry_out(setup, stack, database, flower)


def _environment(folder: Path, database: str, broker: str) -> dict[str, str]:
    """Return an environment in which nothing of the caller's own vkjobs or Celery counts."""
    settings = {**scenario.SETTINGS, "database_url": database, "broker_url": broker}
    own = {f"VKJOBS_{key.upper()}": value for key, value in settings.items()}
    own["TMPDIR"] = str(folder)  # a killed worker leaves a temporary folder of its own
    foreign = ("VKJOBS_", "CELERY_", "FLOWER_")
    return {key: value for key, value in os.environ.items() if not key.startswith(foreign)} | own


def _carry_out(setup: Setup, stack: ExitStack, database: str, flower: bool) -> int:
    say("celery -A vkjobs jobs migrate")
    with Command(setup, "jobs", "migrate") as migration:
        migration.wait(lambda: migration.process.poll() == 0)
    address = _start_flower(setup, stack) if flower else None

    engine = create_engine(url_of(database))
    stack.callback(engine.dispose)
    with engine.begin() as conn:
        start = conn.execute(text("select now()")).scalar_one() + timedelta(seconds=_WORKER_STARTS_S)
        jobs = scenario.fill(conn, start)
    say(f"Filled in {len(jobs)} deadlines, due within {_WORKER_STARTS_S + scenario.LAST_DUE_S:.0f} s")

    say("celery -A vkjobs worker -B")
    worker = stack.enter_context(Command(setup, "worker", "-B", "--concurrency=4", "--loglevel=INFO"))
    watch(engine, worker, setup.signals)
    killed = scenario.lost_a_worker(engine)
    wrong = scenario.disagreements(jobs, scenario.outcomes(engine), killed=killed)
    summarise(jobs, wrong)
    if address and sys.stdout.isatty():
        say(f"Flower is at {address} until you press Ctrl-C")
        with suppress(Interrupted):
            worker.wait(lambda: False, patience=float("inf"))
    return 1 if wrong else 0


def _start_flower(setup: Setup, stack: ExitStack) -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    say("celery -A vkjobs flower")
    flower = stack.enter_context(Command(setup, "flower", "--address=127.0.0.1", f"--port={port}", _FLOWER_COLUMNS))
    flower.wait(answers)
    say(f"Flower is at http://127.0.0.1:{port}")
    return f"http://127.0.0.1:{port}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code: 0 only if every deadline ended as expected."""
    signals = Signals()
    parser = argparse.ArgumentParser(
        prog="python -m vkjobs.marketplace.demo",
        description="Carry out hundreds of deadlines of an example marketplace with a real Celery worker.",
        epilog="With VKJOBS_DATABASE_URL or VKJOBS_BROKER_URL set it uses these services, in a schema and "
        "keys of its own, which it removes; else it starts its own.",
    )
    parser.add_argument("--flower", action="store_true", help="start Flower too")
    chosen = parser.parse_args(arguments)
    try:
        return run(signals, flower=chosen.flower)
    except (VkjobsError, SQLAlchemyError, Interrupted) as error:
        if signals.received:
            say("Interrupted; all is cleaned up.", sys.stderr)
            return 128 + signals.received
        say(f"demo: {error if isinstance(error, VkjobsError) else in_a_line(error)}", sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
