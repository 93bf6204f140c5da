from __future__ import annotations

import logging
import subprocess
import sys
from datetime import UTC, datetime
from uuid import uuid4

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from original import FOUR, IDS, STATUSES, connected, execute, make_original, open_transaction, rows, shape
from sqlalchemy import make_url, text
from sqlalchemy.exc import DBAPIError, IntegrityError

from vkjobs import ledger, migrations
from vkjobs.errors import DatabaseUnavailable, MigrationError
from vkjobs.migrations import migrate
from vkjobs.schema import Index, Status

DONE = "vk_jobs is up to date"


# An empty database


def test_an_empty_database_gets_the_table(empty_database_url: str) -> None:
    migrate(empty_database_url)
    columns = rows(
        empty_database_url,
        """
        select column_name, data_type, is_nullable, coalesce(column_default, identity_generation)
        from information_schema.columns where table_name = 'vk_jobs' order by ordinal_position""",
    )
    instant = "timestamp with time zone"
    assert columns == [
        ("id", "bigint", "NO", "BY DEFAULT"),
        ("kind", "text", "NO", None),
        ("ref_id", "text", "YES", None),
        ("status", "text", "NO", "'pending'::text"),
        ("run_at", instant, "NO", "now()"),
        ("lease_until", instant, "YES", None),
        ("attempts", "integer", "NO", "0"),
        ("last_error", "text", "YES", None),
        ("updated_at", instant, "NO", "now()"),
        ("started_at", instant, "YES", None),
        ("claimed_by", "text", "YES", None),
        ("claimed_until", instant, "YES", None),
        ("payload", "jsonb", "YES", None),
        ("unique_key", "text", "YES", None),
    ]


def test_the_table_takes_each_status_and_no_other(empty_database_url: str) -> None:
    migrate(empty_database_url)
    for status in Status:
        execute(empty_database_url, f"insert into vk_jobs (kind, status) values ('k', '{status}')")
    with pytest.raises(IntegrityError, match="vk_jobs_status_check"):
        execute(empty_database_url, "insert into vk_jobs (kind, status) values ('k', 'paused')")


def test_a_second_run_changes_nothing(empty_database_url: str) -> None:
    migrate(empty_database_url)
    before = shape(empty_database_url)
    said: list[str] = []
    migrate(empty_database_url, said.append)
    assert said == [DONE]
    assert shape(empty_database_url) == before


def test_a_dropped_table_is_made_again(empty_database_url: str) -> None:
    migrate(empty_database_url)
    before = shape(empty_database_url)
    execute(empty_database_url, "drop table vk_jobs")
    migrate(empty_database_url)
    assert shape(empty_database_url) == before


def test_a_broken_off_run_is_finished_by_the_next(empty_database_url: str) -> None:
    migrate(empty_database_url)
    before = shape(empty_database_url)
    execute(
        empty_database_url,
        "drop index vk_jobs_running",
        "alter table vk_jobs drop column unique_key, drop column payload",
        "alter table vk_jobs add column payload jsonb",
        "delete from vkjobs_alembic_version",
    )
    migrate(empty_database_url)
    assert shape(empty_database_url) == before


# The original's table


@pytest.mark.parametrize("key", IDS)
def test_an_adopted_table_keeps_its_rows_and_gives_ids_to_new_ones(empty_database_url: str, key: str) -> None:
    make_original(empty_database_url, key=IDS[key])
    given = str(uuid4()) if "uuid" in key else "41"
    execute(
        empty_database_url,
        f"insert into vk_jobs (id, kind, status, run_at) values ('{given}', 'old', 'done', now())",
        *["select setval('vk_jobs_id_seq', 41)"] * (key == "bigserial"),
    )
    columns = "id::text, kind, ref_id, status, run_at, lease_until, attempts, last_error, updated_at"
    before = rows(empty_database_url, f"select {columns} from vk_jobs")

    migrate(empty_database_url)

    assert rows(empty_database_url, f"select {columns} from vk_jobs") == before
    with connected(empty_database_url) as connection:
        new = ledger.enqueue(connection, kind="new", ref_id=None, run_at=datetime.now(UTC), payload={"a": 1})
    assert new == 42 if key.startswith("big") else str(new) != given
    assert rows(empty_database_url, "select payload from vk_jobs where kind = 'new'") == [({"a": 1},)]


def test_an_empty_adopted_table_numbers_from_one(empty_database_url: str) -> None:
    make_original(empty_database_url, key=IDS["bigint"])
    migrate(empty_database_url)
    with connected(empty_database_url) as connection:
        assert ledger.enqueue(connection, kind="k", ref_id=None, run_at=None, payload=None) == 1


@pytest.mark.parametrize("status", STATUSES)
def test_an_adopted_table_lets_a_job_be_cancelled(empty_database_url: str, status: str) -> None:
    make_original(empty_database_url, status=STATUSES[status])
    execute(empty_database_url, "insert into vk_jobs (kind, run_at) values ('k', now())")
    migrate(empty_database_url)
    with connected(empty_database_url) as connection:
        assert ledger.cancel(connection, 1)
    assert rows(empty_database_url, "select status::text from vk_jobs") == [("cancelled",)]


@pytest.mark.parametrize("status", ["check", "enum", "varchar"])
def test_an_adopted_table_goes_on_refusing_other_statuses(empty_database_url: str, status: str) -> None:
    make_original(empty_database_url, status=STATUSES[status])
    migrate(empty_database_url)
    with pytest.raises(DBAPIError, match=r"vk_jobs_status_check|invalid input value for enum"):
        execute(empty_database_url, "insert into vk_jobs (kind, run_at, status) values ('k', now(), 'paused')")


def test_a_constraint_on_status_keeps_its_name_and_stays_validated(empty_database_url: str) -> None:
    make_original(empty_database_url, status=f'text constraint "Four states" check (status in {FOUR})')
    migrate(empty_database_url)
    constraints = "select conname, convalidated from pg_constraint where contype = 'c' and conrelid <> 0"
    assert rows(empty_database_url, constraints) == [("Four states", True)]


def test_a_constraint_that_old_rows_break_stays_as_lenient_to_them(empty_database_url: str) -> None:
    make_original(empty_database_url, status="text")
    execute(
        empty_database_url,
        "insert into vk_jobs (kind, run_at, status) values ('k', now(), 'ancient')",
        f"alter table vk_jobs add constraint states check (status in {FOUR}) not valid",
    )
    migrate(empty_database_url)
    constraints = "select conname, convalidated from pg_constraint where contype = 'c' and conrelid <> 0"
    assert rows(empty_database_url, constraints) == [("states", False)]
    execute(empty_database_url, "insert into vk_jobs (kind, run_at, status) values ('k', now(), 'cancelled')")


def test_a_constraint_half_replaced_by_a_broken_off_run_is_replaced(empty_database_url: str) -> None:
    make_original(empty_database_url)
    execute(empty_database_url, "alter table vk_jobs add constraint vk_jobs_new_check check (true) not valid")
    migrate(empty_database_url)
    constraints = "select conname, convalidated from pg_constraint where contype = 'c' and conrelid <> 0"
    assert rows(empty_database_url, constraints) == [("vk_jobs_status_check", True)]
    execute(empty_database_url, "insert into vk_jobs (kind, run_at, status) values ('k', now(), 'cancelled')")


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize(
    ("index", "where"),
    [
        (
            Index.FREE,
            "status = 'pending' and lease_until is null and kind = 'k' and run_at <= now() order by run_at",
        ),
        (Index.LEASED, "status = 'pending' and lease_until is not null and lease_until < now()"),
        (Index.RUNNING, "status = 'running' and lease_until < now()"),
        (Index.UNIQUE_KEY, "unique_key = 'u' and status in ('pending', 'running')"),
    ],
)
def test_each_place_is_found_by_its_index(empty_database_url: str, status: str, index: Index, where: str) -> None:
    make_original(empty_database_url, status=STATUSES[status])
    migrate(empty_database_url)
    with connected(empty_database_url) as connection:
        connection.exec_driver_sql("set enable_seqscan = off")
        plan = connection.exec_driver_sql(f"explain select id from vk_jobs where {where}").scalars().all()
    assert any(f"Index Scan using {index} " in line or f"Scan on {index} " in line for line in plan), plan


def test_a_key_is_unique_among_pending_and_running_jobs_alone(empty_database_url: str) -> None:
    migrate(empty_database_url)
    add = "insert into vk_jobs (kind, status, unique_key) values ('k', '{}', 'u')"
    execute(
        empty_database_url,
        *(add.format(status) for status in ("done", "failed", "cancelled", "done", "running")),
    )
    with pytest.raises(IntegrityError, match=Index.UNIQUE_KEY):
        execute(empty_database_url, add.format("pending"))


def test_a_table_in_another_schema_of_the_search_path_is_adopted_there(empty_database_url: str) -> None:
    make_original(empty_database_url)
    execute(empty_database_url, "create schema service")
    url = make_url(empty_database_url).update_query_dict({"options": "-csearch_path=service,public"})
    migrate(url.render_as_string(hide_password=False))
    tables = "select schemaname, tablename from pg_tables where tablename like 'vk%' order by 2"
    assert rows(empty_database_url, tables) == [
        ("public", "vk_jobs"),
        ("public", "vkjobs_alembic_version"),
        ("public", "vkjobs_ticks"),
    ]
    with connected(empty_database_url) as connection:
        assert migrations.check(connection) is None


# How it is vacuumed

PARAMETERS = {
    "autovacuum_vacuum_scale_factor": "0",
    "autovacuum_vacuum_threshold": "1000",
    "autovacuum_vacuum_cost_limit": "1000",
    "autovacuum_analyze_scale_factor": "0.01",
    "vacuum_truncate": "off",
}


def parameters(url: str) -> dict[str, str]:
    query = """
        select option_name, option_value from pg_class, pg_options_to_table(reloptions)
        where pg_class.oid = 'vk_jobs'::regclass"""
    return dict(rows(url, query))


def test_a_new_table_is_vacuumed_as_a_queue_needs_it(empty_database_url: str) -> None:
    migrate(empty_database_url)
    assert parameters(empty_database_url) == PARAMETERS


def test_an_adopted_table_is_vacuumed_as_its_owner_wants_and_else_as_a_queue_needs_it(empty_database_url: str) -> None:
    make_original(empty_database_url)
    owners = {"autovacuum_vacuum_threshold": "7", "autovacuum_enabled": "false", "fillfactor": "80"}
    chosen = ", ".join(f"{name} = {value}" for name, value in owners.items())
    execute(empty_database_url, f"alter table vk_jobs set ({chosen})")
    said: list[str] = []
    migrate(empty_database_url, said.append)
    assert parameters(empty_database_url) == {**PARAMETERS, **owners}
    ours = ", ".join(f"{name} = {value}" for name, value in PARAMETERS.items() if name not in owners)
    assert f"setting {ours}" in said


def test_the_vacuum_is_set_beside_those_who_write(empty_database_url: str) -> None:
    migrate(empty_database_url)
    execute(
        empty_database_url,
        f"alter table vk_jobs reset ({', '.join(PARAMETERS)})",
        "delete from vkjobs_alembic_version",
    )
    with open_transaction(empty_database_url, "insert into vk_jobs (kind) values ('k')"):
        said: list[str] = []
        migrate(empty_database_url, said.append)
    assert len(said) == 2
    assert parameters(empty_database_url) == PARAMETERS


# What does not fit


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("drop column lease_until", "vk_jobs has no column lease_until"),
        ("drop column run_at", "vk_jobs has no column run_at"),
        ("drop column id", "vk_jobs has no column id"),
        ("alter column run_at type timestamp", "vk_jobs.run_at is timestamp without time zone"),
        (
            "alter column lease_until type timestamp(3)",
            "vk_jobs.lease_until is timestamp(3) without time zone",
        ),
        # A token would not be found again in what was rounded.
        (
            "alter column lease_until type timestamptz(3)",
            "vk_jobs.lease_until is timestamp(3) with time zone",
        ),
        (
            "alter column run_at type bigint using extract(epoch from run_at) * 1000",
            "vk_jobs.run_at is bigint",
        ),
        ("alter column run_at type text", "vk_jobs.run_at is text"),
        ("alter column status type varchar(7)", "vk_jobs.status is character varying(7)"),
        ("alter column attempts type text", "vk_jobs.attempts is text"),
        ("alter column last_error type varchar(2000)", "vk_jobs.last_error is character varying(2000)"),
        ("alter column id type numeric", "vk_jobs.id is numeric"),
        ("add column payload text", "vk_jobs.payload is text"),
        ("drop constraint vk_jobs_pkey", "vk_jobs.id is no primary key"),
        (
            "add constraint leased check ((status = 'running') = (lease_until is not null))",
            "constraint leased of vk_jobs forbids the lease of a pending job",
        ),
    ],
)
def test_a_table_that_does_not_fit_is_refused_untouched_with_the_sql_that_helps(
    empty_database_url: str, change: str, named: str
) -> None:
    make_original(empty_database_url, key="bigint primary key", status="text not null")
    execute(
        empty_database_url,
        "insert into vk_jobs (id, kind, run_at, status) values (1, 'k', '2026-01-01T00:00Z', 'pending')",
        f"alter table vk_jobs {change}",
    )
    before = [row for row in shape(empty_database_url) if "vkjobs_alembic_version" not in row[0]]

    with pytest.raises(MigrationError) as refusal:
        migrate(empty_database_url)

    message = str(refusal.value)
    assert named in message
    assert "\n" not in message
    assert [row for row in shape(empty_database_url) if "vkjobs_alembic_version" not in row[0]] == before
    execute(empty_database_url, message.partition("this would help: ")[2])
    migrate(empty_database_url)
    with connected(empty_database_url) as connection:
        assert migrations.check(connection) is None
        if "run_at type" in change:
            assert connection.scalar(text("select run_at = '2026-01-01T00:00Z' from vk_jobs"))


def test_a_view_is_refused(empty_database_url: str) -> None:
    execute(empty_database_url, "create view vk_jobs as select 1 as id")
    with pytest.raises(MigrationError, match="vk_jobs is no plain table"):
        migrate(empty_database_url)


def test_who_may_not_change_the_table_is_told_so_in_one_line(empty_database_url: str) -> None:
    make_original(empty_database_url)
    role = f"r{uuid4().hex}"
    execute(empty_database_url, f"create role {role} login", f"grant all on schema public to {role}")
    url = make_url(empty_database_url).set(username=role)
    with pytest.raises(MigrationError, match=r"must be owner of table vk_jobs$"):
        migrate(url.render_as_string(hide_password=False))
    execute(empty_database_url, f"drop owned by {role}", f"drop role {role}")


def test_a_missing_postgres_is_one_line_without_the_password() -> None:
    with pytest.raises(DatabaseUnavailable) as error:
        migrate("postgresql://me:secret@127.0.0.1:1/nothing")
    assert "127.0.0.1:1/nothing" in str(error.value)
    assert "secret" not in str(error.value)
    assert "\n" not in str(error.value)


# What a worker asks at start


def test_the_check_says_what_to_run_until_the_table_is_up_to_date(empty_database_url: str) -> None:
    make_original(empty_database_url)
    with connected(empty_database_url, "READ COMMITTED") as connection:
        assert "is older than this vkjobs" in (migrations.check(connection) or "")
        connection.exec_driver_sql("drop table vk_jobs")
        assert "there is no table vk_jobs" in (migrations.check(connection) or "")
        connection.rollback()
        migrate(empty_database_url)
        assert migrations.check(connection) is None


def test_a_worker_knows_the_revisions_without_alembic() -> None:
    config = Config()
    config.set_main_option("script_location", "vkjobs:migrations")
    chain = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]
    assert migrations._known_revisions() == chain[::-1]
    loaded = "import sys, vkjobs.celery; sys.exit('alembic' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", loaded], check=False).returncode == 0


def test_a_table_of_a_newer_vkjobs_serves_workers_but_is_not_migrated(empty_database_url: str) -> None:
    migrate(empty_database_url)
    execute(empty_database_url, "update vkjobs_alembic_version set version_num = 'of tomorrow'")
    with connected(empty_database_url) as connection:
        assert migrations.check(connection) is None
    with pytest.raises(MigrationError, match="of a newer vkjobs, at revision of tomorrow"):
        migrate(empty_database_url)


def test_migrating_leaves_the_hosts_logging_alone(empty_database_url: str, caplog: pytest.LogCaptureFixture) -> None:
    names = (None, "alembic", "sqlalchemy", "vkjobs")
    before = [(logging.getLogger(name).level, logging.getLogger(name).handlers[:]) for name in names]
    migrate(empty_database_url)
    after = [(logging.getLogger(name).level, logging.getLogger(name).handlers[:]) for name in names]
    assert after == before


def test_without_a_report_the_steps_are_logged(empty_database_url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vkjobs.migrations")
    migrate(empty_database_url)
    assert "creating table vk_jobs" in caplog.messages
    assert caplog.messages[-1] == DONE
