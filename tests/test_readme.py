"""README.md, done as a reader would: its files are written, its commands run, on a database called shop."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text
from workers import wait_for

import vkjobs.marketplace
from vkjobs import database, handlers
from vkjobs.local import Postgres
from vkjobs.policy import backoff
from vkjobs.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
FILES = {block.split()[1]: block for language, block in BLOCKS if language == "python"}
INLINE = re.findall(r"`((?:make|celery|python) [^`]+)`", README)
IN_BLOCKS = [line for language, block in BLOCKS if language == "sh" for line in block.splitlines()]
COMMANDS = {line.split("#")[0].strip() for line in [*INLINE, *IN_BLOCKS]}
WORKER = "celery -A shop worker -B -l INFO"
FLOWER = "celery -A shop flower --tasks-columns=name,state,kwargs,received,result,exception"

tested: set[str] = set()


def covers(*parts: str) -> Callable[[Any], Any]:
    """Say which of README's files and commands a test runs."""
    tested.update(parts)
    return lambda test: test


class Reader:
    """Somebody with an empty folder, a database called shop, and a broker that is not where README says."""

    def __init__(self, folder: Path, environment: dict[str, str], shop: Engine) -> None:
        self._folder = folder
        self._shop = shop
        self._started: list[subprocess.Popen[bytes]] = []
        self._going_on: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            **environment,
        }

    def write(self, *names: str) -> None:
        for name in names:
            (self._folder / name).write_text(FILES[name])

    def write_changed(self, name: str, words: str, others: str) -> None:
        assert words in FILES[name]
        (self._folder / name).write_text(FILES[name].replace(words, others))

    def run(self, command: str) -> None:
        """Run a command that ends by itself."""
        process = self._popen(command)
        assert process.wait(60) == 0, self.output(command)

    def start(self, command: str) -> None:
        """Start a command that goes on until the reader leaves."""
        self._going_on[command] = self._popen(command)

    def output(self, command: str) -> str:
        return self._log(command).read_text()

    def sql(self, query: str) -> list[tuple[Any, ...]]:
        with self._shop.connect() as conn:
            return [tuple(row) for row in conn.execute(text(query))]

    def sees(self, query: str, *rows: tuple[Any, ...]) -> None:
        """Wait until a query finds these rows."""

        def seen() -> bool:
            for command, process in self._going_on.items():
                assert process.poll() is None, self.output(command)
            return self.sql(query) == list(rows)

        wait_for(seen, f"{rows} of {query}")

    def do(self, statement: str) -> None:
        with self._shop.connect() as conn:
            conn.execute(text(statement))

    def leave(self) -> None:
        for process in self._started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _log(self, command: str) -> Path:
        return self._folder / (re.sub(r"\W+", "-", command) + ".log")

    def _popen(self, command: str) -> subprocess.Popen[bytes]:
        with self._log(command).open("wb") as log:
            process = subprocess.Popen(
                command,
                shell=True,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started.append(process)
        return process


@pytest.fixture
def reader(tmp_path: Path, postgres: Postgres, redis_url: str) -> Iterator[Reader]:
    server = database.engine(postgres.url, 1)
    shop = database.engine(postgres.create_database("shop"), 1)
    environment = {
        "PGHOST": str(postgres.folder),
        "PGPORT": "5432",
        "PGUSER": "postgres",
        "CELERY_BROKER_URL": redis_url,
        "FLOWER_ADDRESS": "127.0.0.1",
        "FLOWER_PORT": "0",
    }
    reader = Reader(tmp_path, environment, shop)
    try:
        yield reader
    finally:
        reader.leave()
        shop.dispose()
        with server.connect() as conn:
            conn.execute(text("drop database shop with (force)"))
        server.dispose()


@covers("shop.py", "deadlines.py", "checkout.py", "closing.py", "elsewhere.py")
@covers("celery -A shop jobs migrate", WORKER, "python checkout.py", FLOWER)
def test_an_order_expires_in_a_readers_own_app(reader: Reader) -> None:
    reader.write("shop.py", "deadlines.py", "checkout.py", "closing.py", "elsewhere.py")
    reader.run("celery -A shop jobs migrate")
    reader.start(WORKER)
    reader.run("python checkout.py")
    assert reader.sql("select kind, ref_id from vk_jobs") == [("order_expire", "order-1")]
    reader.sees("select status from vk_jobs", ("done",))
    assert reader.sql("select status from orders") == [("expired",)]

    reader.do("insert into orders select 'order-' || n, 'open' from generate_series(3, 9) n")
    reader.run("python closing.py")
    reader.sees("select status, count(*) from vk_jobs group by status", ("done", 8))
    assert reader.sql("select distinct status from orders") == [("expired",)]

    reader.run("python elsewhere.py")
    waiting = "select ref_id, run_at = '2030-01-31T12:00:00Z' from vk_jobs where status = 'pending'"
    reader.sees(waiting, ("order-1", True))

    reader.do("insert into orders values ('order-2', 'paying')")
    reader.do("insert into vk_jobs (kind, ref_id) values ('order_expire', 'order-2'), ('order_expire', 'nobody')")
    reader.sees(
        """
        select ref_id, status, attempts, run_at > now() + interval '4 minutes', split_part(last_error, chr(10), 1)
        from vk_jobs where ref_id in ('order-2', 'nobody') order by ref_id desc""",
        ("order-2", "pending", 0, True, None),
        ("nobody", "failed", 1, False, "GiveUp: there is no such order"),
    )

    wait_for(lambda: "'snoozed: for 300 s'" in reader.output(WORKER), "the worker to tell of the snooze")
    reader.start(FLOWER)
    wait_for(lambda: "enabled by remote" in reader.output(WORKER), "Flower to find the worker")


@covers("shop.py", "archive.py")
def test_a_reader_handles_many_orders_at_once(reader: Reader) -> None:
    reader.write("deadlines.py", "archive.py")
    reader.write_changed("shop.py", 'include=["deadlines"]', 'include=["deadlines", "archive"]')
    reader.run("celery -A shop jobs migrate")
    reader.do("create table orders (id text primary key, status text)")
    reader.do("insert into orders select n, case when mod(n, 100) = 7 then 'open' else 'expired' end "
              "from generate_series(1, 500) n")  # fmt: skip
    reader.do("insert into vk_jobs (kind, ref_id) select 'order_archive', id from orders")
    reader.start(WORKER)
    reader.sees(
        "select status, attempts, count(*) from vk_jobs group by 1, 2 order by 1", ("done", 0, 495), ("failed", 1, 5)
    )
    assert reader.sql("select status, count(*) from orders group by 1") == [("open", 5)]
    said = "select distinct split_part(last_error, chr(10), 1) from vk_jobs where status = 'failed'"
    assert reader.sql(said) == [("GiveUp: it has not expired",)]


@covers("celery -A shop jobs migrate", "celery -A shop worker", "celery -A shop beat")
def test_worker_and_beat_run_apart(reader: Reader) -> None:
    reader.write("shop.py", "deadlines.py")
    reader.run("celery -A shop jobs migrate")
    reader.do("create table orders (id text primary key, status text)")
    reader.do("insert into orders values ('order-1', 'open')")
    reader.start("celery -A shop worker")
    reader.start("celery -A shop beat")
    reader.do("insert into vk_jobs (kind, ref_id) values ('order_expire', 'order-1')")
    reader.sees("select status from orders", ("expired",))


@covers("rules.py", "celeryconfig.py", "celery -A vkjobs jobs migrate", "celery -A vkjobs worker -B")
def test_the_marketplace_calls_a_readers_rules(reader: Reader) -> None:
    reader.write("rules.py", "celeryconfig.py", "deadlines.py")
    reader.run("celery -A vkjobs jobs migrate")
    reader.do("create table vk_tasks (id text primary key, template text, status text)")
    reader.do("insert into vk_tasks values ('task-1', 'direct', 'open')")
    reader.do("create table orders as select 'order-1' as id, 'open' as status")
    reader.start("celery -A vkjobs worker -B")
    reader.do("""
        insert into vk_jobs (kind, ref_id)
        values ('open_expire', 'task-1'), ('review_warn', 'task-1'), ('transfer_expire', 'task-1'),
            ('order_expire', 'order-1')""")
    reader.sees("select distinct status from vk_jobs", ("done",))
    assert reader.sql("select status from vk_tasks") == [("closed",)]
    assert reader.sql("select status from orders") == [("expired",)]


@covers("settings.py", "project.py", "celery -A project jobs migrate")
def test_an_app_with_a_namespace_is_set_up_by_keys_of_it(reader: Reader) -> None:
    reader.write("settings.py", "project.py", "deadlines.py")
    reader.run("celery -A project jobs migrate")
    assert reader.sql("select count(*) from vk_jobs") == [(0,)]


MAKE = ("make demo", "make demo FLOWER=1", "make test", "make wheel")


@covers(*MAKE)
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("command", MAKE)
def test_make_has_the_target(command: str) -> None:
    # CI runs them in earnest; here they would run this test in turn.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    subprocess.run([*command.split(), "-n"], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)


def test_every_file_and_command_has_its_test() -> None:
    assert {language for language, _ in BLOCKS} == {"text", "python", "sh"}
    assert tested == {*FILES, *COMMANDS}


def table(head: str) -> list[list[str]]:
    """Return the cells of the table whose head begins so."""
    (found,) = re.findall(rf"^\| {head} \|.*\n\|[ |-]+\|\n((?:\|.*\n)+)", README, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in found.splitlines()]


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def test_the_settings_are_those_of_the_code() -> None:
    lines = []
    for knob in fields(Settings):
        default = "" if knob.default in (None, "") else f"{knob.default:g}"
        lines.append([f"`{PREFIX}{knob.name}`", default, knob.metadata["unit"], knob.metadata["meaning"]])
    assert table("setting") == lines, "\n".join(f"| {' | '.join(line)} |" for line in lines)


def test_the_columns_are_those_of_the_table(engine: Engine) -> None:
    with engine.connect() as conn:
        columns = conn.execute(text("select column_name from information_schema.columns where table_name = 'vk_jobs'"))
        assert {name for cells in table("column") for name in names(cells[0])} == set(columns.scalars())


def test_the_kinds_are_those_of_the_marketplace() -> None:
    module = vkjobs.marketplace.kinds.__name__
    kinds = {known.kind for known in handlers.registry if known.function.__module__ == module}
    assert {name for cells in table("kind") for name in names(cells[0])} == kinds


def test_what_a_handler_is_given_and_may_set_is_what_the_code_has() -> None:
    (given,) = re.findall(r"^`job` has (.*?)\. `ctx", README, re.MULTILINE | re.DOTALL)
    assert set(names(given)) - {"enqueue"} == {field.name for field in fields(handlers.Job)}
    (policy,) = re.findall(r"`@vkjobs.handler\(kind, …\)` takes (.*?)\n\n", README, re.DOTALL)
    assert set(names(policy)) == {field.name for field in fields(handlers.Policy)}


def test_the_backoff_is_that_of_the_settings() -> None:
    default = Settings()
    pauses = [f"{backoff(n, default.backoff, default.backoff_cap):g} s" for n in range(3)]
    assert f"tried again after {', '.join(pauses)}, …; is `failed` at the fifth time" in README
    assert default.max_attempts == 5


def test_what_is_linked_to_is_there() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_versions_are_those_of_the_package() -> None:
    (python, celery, sqlalchemy) = re.findall(
        r"needs Python (\S+), Celery (\S+) and SQLAlchemy (\S+) or newer", README
    )[0]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={python}"
    assert {f"celery>={celery}", f"sqlalchemy>={sqlalchemy}"} <= set(project["dependencies"])
