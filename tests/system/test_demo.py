from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
import redis as redis_client
from sqlalchemy import Engine, text
from workers import wait_for

pytestmark = pytest.mark.timeout(300)

WORKER = "celery -A vkjobs worker -B"
DEMO_ENDS_S = 200.0
LOOK_EVERY_S = 0.2  # at all processes, which takes a core if it is done all the time


class Demo:
    """The demo as a process, what it printed, and all the processes that were seen below it."""

    def __init__(
        self, folder: Path, *options: str, terminal: bool = False, environment: Mapping[str, str] | None = None
    ) -> None:
        self.temporary = folder / "temporary"
        self.temporary.mkdir(exist_ok=True)
        self._output = folder / "output"
        self.seen: dict[int, str] = {}
        self._terminal: int | None = None
        theirs: int | None = None
        if terminal:
            self._terminal, theirs = pty.openpty()
            os.set_blocking(self._terminal, False)
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "vkjobs.marketplace.demo", *options],
                cwd=folder,
                env={**os.environ, "TERM": "xterm", "TMPDIR": str(self.temporary), **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=theirs or output,
                stderr=theirs or output,
                start_new_session=True,
            )
        if theirs is not None:
            os.close(theirs)

    @property
    def output(self) -> str:
        """All that was printed so far."""
        if self._terminal is not None:
            with self._output.open("ab") as output, suppress(OSError):
                while said := os.read(self._terminal, 65536):
                    output.write(said)
        return self._output.read_text(errors="replace")

    def says(self, words: str) -> None:
        """Wait until the words are printed."""
        wait_for(lambda: words in self.output or self.ended(), words, every=LOOK_EVERY_S)
        assert words in self.output, self.output

    def pid_of(self, command: str) -> int:
        """Return the process below the demo itself that runs a command, as soon as there is one."""
        found: list[int] = []

        def look() -> bool:
            found[:] = [pid for pid, parent, args in processes() if parent == self.process.pid and command in args]
            return bool(found)

        wait_for(look, command, every=LOOK_EVERY_S)
        return found[0]

    def ended(self) -> bool:
        """Note the processes below the demo; tell whether it has ended."""
        below = {self.process.pid}
        for pid, parent, args in processes():
            if parent in below:
                below.add(pid)
                self.seen[pid] = args
        self.output  # noqa: B018 - a full terminal would hold the demo up
        return self.process.poll() is not None

    def exit_code(self) -> int:
        """Wait for the end, and see that nothing is left: no process, no file."""
        wait_for(self.ended, "the end of the demo", DEMO_ENDS_S, LOOK_EVERY_S)
        assert any("postgres" in args or "celery" in args for args in self.seen.values())
        left = [args for pid, _, args in processes() if self.seen.get(pid) == args]
        assert left == []
        assert list(self.temporary.iterdir()) == []
        return self.process.returncode

    def kill(self) -> None:
        """End what is left after a failed test."""
        self.ended()
        for pid in [self.process.pid, *self.seen]:
            if any(pid == alive and self.seen.get(pid, args) == args for alive, _, args in processes()):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        if self._terminal is not None:
            os.close(self._terminal)


def processes() -> list[tuple[int, int, str]]:
    """Return pid, parent and command line of every process that is not dead, parents first."""
    listing = subprocess.run(["ps", "-ewwo", "pid=,ppid=,stat=,args="], check=True, capture_output=True, text=True)
    rows = [line.split(None, 3) for line in listing.stdout.splitlines()]
    return sorted((int(row[0]), int(row[1]), row[3]) for row in rows if len(row) == 4 and row[2][0] != "Z")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Demo]]:
    demos: list[Demo] = []

    def begin(*options: str, terminal: bool = False, **environment: str) -> Demo:
        demos.append(Demo(tmp_path, *options, terminal=terminal, environment=environment))
        return demos[-1]

    yield begin
    for demo in demos:
        demo.kill()


def test_all_deadlines_end_as_expected_and_nothing_is_left(start: Callable[..., Demo]) -> None:
    demo = start()
    assert demo.exit_code() == 0, demo.output
    agreed = re.findall(r"^  (\S.*?) +(\d+) of (\d+)$", demo.output, re.MULTILINE)
    assert all(right == size for _, right, size in agreed)
    assert {group for group, _, _ in agreed} >= {"of an unknown kind", "without ref_id", "overdue at the start"}
    total = sum(int(size) for _, _, size in agreed)
    assert total >= 500
    assert demo.output.endswith(f"All {total} deadlines, and their tasks, ended as expected.\n")
    assert "\x1b" not in demo.output
    lateness = re.search(r"^  open_expire +0 +0 +72 +2 +12 +(\d+) +(\d+) +(\d+)$", demo.output, re.MULTILINE)
    assert lateness, demo.output
    p50, p99, longest = map(int, lateness.groups())
    assert p50 <= p99 <= longest


def test_on_given_services_a_killed_worker_loses_nothing_and_a_changed_task_is_noticed(
    start: Callable[..., Demo], engine: Engine, database_url: str, redis_url: str
) -> None:
    broker = redis_client.Redis.from_url(redis_url)
    broker.lpush("vkjobs", "a message of somebody else")
    with engine.begin() as conn:
        conn.execute(text("insert into vk_jobs (kind, ref_id) values ('open_expire', 'a task of somebody else')"))
        conn.execute(text("create table vk_tasks as select 'a' as id, 'direct' as template, 'open' as status"))

    def everything() -> list[object]:
        with engine.connect() as conn:
            rows = [conn.execute(text(f"select * from {table}")).all() for table in ("vk_jobs", "vk_tasks")]
            schemas = conn.execute(text("select nspname from pg_namespace order by 1")).all()
        return [*rows, schemas, broker.keys(), broker.lrange("vkjobs", 0, -1)]

    before = everything()
    demo = start(VKJOBS_DATABASE_URL=database_url, VKJOBS_BROKER_URL=redis_url, VKJOBS_LEASE="not a number")
    worker = demo.pid_of(WORKER)

    def some_are_done() -> bool:
        with engine.connect() as conn:
            schema = conn.scalar(text("select nspname from pg_namespace where nspname like 'vkjobs_demo_%'"))
            done = text(f"select count(*) from {schema}.vk_jobs where status = 'done'")
            spoil = text(f"update {schema}.vk_tasks set status = 'lost' where history = '{{review_warn}}'")
            return bool(conn.scalar(done) > 60 and conn.execute(spoil).rowcount)

    wait_for(some_are_done, "some deadlines to be met")
    os.kill(worker, signal.SIGKILL)
    assert demo.exit_code() == 1, demo.output
    assert "The worker was killed: started it again" in demo.output
    wrong = re.findall(r"^  WRONG: (.*)$", demo.output, re.MULTILINE)
    assert wrong
    assert all(", review_warn (" in line and "task lost, changed by review_warn" in line for line in wrong)
    assert f"{len(wrong)} of 587 deadlines did not end as expected." in demo.output
    assert everything() == before


def test_ctrl_c_in_a_terminal_ends_the_live_table_and_leaves_nothing(start: Callable[..., Demo]) -> None:
    demo = start(terminal=True)
    demo.says("lateness in ms")
    demo.says("checkpoint_miss")
    os.killpg(demo.process.pid, signal.SIGINT)  # as the terminal does
    assert demo.exit_code() == 128 + signal.SIGINT
    assert demo.output.endswith("Interrupted; all is cleaned up.\n")


@pytest.mark.parametrize("step", ["Starting Postgres", "jobs migrate", "worker -B"])
def test_a_signal_at_any_step_leaves_nothing(start: Callable[..., Demo], step: str) -> None:
    demo = start()
    demo.says(step)
    demo.process.send_signal(signal.SIGTERM)
    assert demo.exit_code() == 128 + signal.SIGTERM
    assert demo.output.endswith("Interrupted; all is cleaned up.\n")


def test_flower_answers_at_the_address_that_is_printed(start: Callable[..., Demo]) -> None:
    pytest.importorskip("flower")
    demo = start("--flower")
    demo.says("Flower is at ")
    address = demo.output.partition("Flower is at ")[2].split()[0]
    with urllib.request.urlopen(f"{address}/healthcheck", timeout=20) as answer:
        assert answer.status == 200
    demo.process.send_signal(signal.SIGTERM)
    assert demo.exit_code() == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"VKJOBS_DATABASE_URL": "postgresql://me:secret@127.0.0.1:1/x"}, "connection to server at "),
        ({"VKJOBS_DATABASE_URL": "mysql://me@127.0.0.1/x"}, "vkjobs_database_url is of mysql"),
        ({"VKJOBS_BROKER_URL": "redis://:secret@127.0.0.1:1"}, "VKJOBS_BROKER_URL: Error 111 connecting"),
        ({"VKJOBS_BROKER_URL": "carrier-pigeon://x"}, "No such transport: carrier-pigeon"),
    ],
)
def test_a_service_that_cannot_be_used_is_said_in_one_line(
    start: Callable[..., Demo], environment: dict[str, str], complaint: str, redis_url: str, database_url: str
) -> None:
    services = {"VKJOBS_DATABASE_URL": database_url, "VKJOBS_BROKER_URL": redis_url, **environment}
    demo = start(**services)
    assert demo.process.wait(60) == 1
    assert demo.output.count("\n") == 1
    assert demo.output.startswith("demo: ")
    assert complaint in demo.output
    assert "secret" not in demo.output
    assert list(demo.temporary.iterdir()) == []
