from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from original import (
    PATIENT,
    connected,
    execute,
    make_original,
    open_transaction,
    original_dispatcher,
    rows,
    until,
)
from sqlalchemy import make_url, text

from vkjobs import migrations
from vkjobs.errors import DatabaseUnavailable
from vkjobs.migrations import migrate, online

DONE = "vk_jobs is up to date"
SHORT_PAUSE_S = 0.5
KILL_MIGRATION = """
    select pg_terminate_backend(pid) from pg_stat_activity
    where application_name = 'vkjobs migrate' and datname = current_database()"""


@pytest.fixture
def background() -> Iterator[Callable[..., Future[None]]]:
    with ThreadPoolExecutor() as threads:
        yield threads.submit


def test_a_transaction_in_the_way_is_waited_for_while_others_go_on(
    empty_database_url: str, background: Callable[..., Future[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online, "PAUSE_S", SHORT_PAUSE_S)
    make_original(empty_database_url)
    said: list[str] = []
    with open_transaction(empty_database_url, "select from vk_jobs") as pid:
        migration = background(migrate, empty_database_url, said.append)
        until(lambda: said.count(f"vk_jobs is in use by process {pid}: trying again") >= 2)
        with connected(empty_database_url) as other:
            other.exec_driver_sql(PATIENT)
            tries = len(said)
            written = 0
            while len(said) < tries + 2:  # through a whole further try, its wait and its pause
                other.exec_driver_sql("insert into vk_jobs (kind, run_at) values ('k', now())")
                written += 1
            assert other.scalar(text("select count(*) from vk_jobs")) == written
        assert not migration.done()
    migration.result()
    assert said[-1] == DONE


def test_two_at_once_migrate_a_big_table_under_the_original_dispatcher(empty_database_url: str) -> None:
    make_original(empty_database_url)
    execute(
        empty_database_url,
        """insert into vk_jobs (kind, status, run_at)
        select 'k', case when n > 100000 then 'pending' else 'done' end, now()
        from generate_series(1, 200000) n""",
    )
    script = f"""if True:
        from vkjobs.migrations import migrate, online
        online.PAUSE_S = {SHORT_PAUSE_S}
        migrate({empty_database_url!r}, lambda line: print(line, flush=True))"""
    start = [sys.executable, "-c", script]

    with original_dispatcher(empty_database_url) as settled:
        with open_transaction(empty_database_url, "select from vk_jobs"):
            both = [subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)]
            assert both[0].stdout is not None
            assert both[0].stdout.readline().startswith("adding columns")
            both.append(subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
            assert both[1].stdout is not None
            assert both[1].stdout.readline() == "waiting for another migration to finish\n"
        said = [process.communicate()[0].splitlines() for process in both]
        migrated_after = len(settled)
        until(lambda: len(settled) > migrated_after)

    assert [process.returncode for process in both] == [0, 0], said
    assert said[1] == [DONE]
    assert said[0][-1] == DONE
    done = rows(empty_database_url, "select id from vk_jobs where last_error = 'by the original'")
    assert {job for (job,) in done} == set(settled)
    with connected(empty_database_url) as connection:
        assert migrations.check(connection) is None
    invalid = "select count(*) from pg_index where not indisvalid and indrelid = 'vk_jobs'::regclass"
    assert rows(empty_database_url, invalid) == [(0,)]


def test_a_migration_killed_while_it_waits_for_the_table_says_that_postgres_went_away(
    empty_database_url: str, background: Callable[..., Future[None]]
) -> None:
    make_original(empty_database_url)
    waiting = "select count(*) from pg_locks where relation = 'vk_jobs'::regclass and not granted"
    with open_transaction(empty_database_url, "select from vk_jobs"):
        migration = background(migrate, empty_database_url)
        until(lambda: rows(empty_database_url, waiting) == [(1,)])
        execute(empty_database_url, KILL_MIGRATION)
        with pytest.raises(DatabaseUnavailable):
            migration.result()


def test_a_timeout_for_queries_does_not_end_a_migration(
    empty_database_url: str, background: Callable[..., Future[None]]
) -> None:
    make_original(empty_database_url)
    name = make_url(empty_database_url).database
    execute(empty_database_url, f"alter database {name} set statement_timeout = '200ms'")
    building = "select count(*) from pg_index where indexrelid = to_regclass('vk_jobs_free') and not indisvalid"
    # The build waits for this snapshot.
    with open_transaction(empty_database_url, "select 1"):
        migration = background(migrate, empty_database_url)
        until(lambda: migration.done() or rows(empty_database_url, building) == [(1,)])
        time.sleep(0.5)
    migration.result()


def test_an_index_left_invalid_by_a_killed_migration_is_built_anew(
    empty_database_url: str, background: Callable[..., Future[None]]
) -> None:
    make_original(empty_database_url)
    validity = "select indisvalid from pg_index where indexrelid = to_regclass('vk_jobs_free')"
    said: list[str] = []
    # The build waits for this snapshot.
    with open_transaction(empty_database_url, "select 1"):
        migration = background(migrate, empty_database_url, said.append)
        until(lambda: rows(empty_database_url, validity) == [(False,)])
        execute(empty_database_url, KILL_MIGRATION)
        with pytest.raises(DatabaseUnavailable):
            migration.result()
        assert rows(empty_database_url, validity) == [(False,)]

    migrate(empty_database_url, said.append)

    assert rows(empty_database_url, validity) == [(True,)]
    assert said.count("building index vk_jobs_free") == 2


def test_a_hosts_alembic_shares_the_database(empty_database_url: str, tmp_path: Path) -> None:
    host = host_alembic(tmp_path, empty_database_url)
    command.upgrade(host, "head")
    migrate(empty_database_url)
    versions = "select (select version_num from alembic_version), (select version_num from vkjobs_alembic_version)"
    assert rows(empty_database_url, versions) == [("host1", "0001")]

    command.downgrade(host, "base")
    with connected(empty_database_url) as connection:
        assert migrations.check(connection) is None
    said: list[str] = []
    migrate(empty_database_url, said.append)
    assert said == [DONE]
    command.upgrade(host, "head")
    assert rows(empty_database_url, versions) == [("host1", "0001")]


def host_alembic(folder: Path, url: str) -> Config:
    (folder / "versions").mkdir()
    (folder / "env.py").write_text(
        f"""
from alembic import context
from sqlalchemy import create_engine, pool
with create_engine({url!r}, poolclass=pool.NullPool).connect() as connection:
    context.configure(connection=connection)
    with context.begin_transaction():
        context.run_migrations()
"""
    )
    (folder / "versions" / "host1.py").write_text(
        """
from alembic import op
revision = "host1"
down_revision = None
def upgrade():
    op.execute("create table vk_tasks (id text)")
def downgrade():
    op.execute("drop table vk_tasks")
"""
    )
    config = Config()
    config.set_main_option("script_location", str(folder))
    return config
