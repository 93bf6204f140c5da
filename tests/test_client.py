from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from original import IDS, make_original
from rows import Row
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

import vkjobs
from vkjobs import NewJob, database
from vkjobs.errors import InvalidJobError
from vkjobs.local import Postgres
from vkjobs.migrations import migrate

Read = Callable[[Any], Row]


class Letter(StrEnum):
    A = "a"


class Digit(IntEnum):
    ONE = 1


def deep(levels: int) -> Any:
    value: Any = "the bottom"
    for _ in range(levels):
        value = [value]
    return value


def circle() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.fixture(scope="module")
def database_url(postgres: Postgres) -> str:
    return postgres.create_database("client", template="migrated")


@pytest.fixture(autouse=True)
def _empty(engine: Engine) -> None:
    with engine.connect() as conn:
        conn.execute(text("truncate vk_jobs; drop table if exists host_tasks"))


@pytest.fixture
def host(engine: Engine) -> Engine:
    """The engine of a host, with transactions as SQLAlchemy has them by default."""
    return engine.execution_options(isolation_level="READ COMMITTED")


def count(engine: Engine) -> int:
    with engine.connect() as conn:
        return int(conn.execute(text("select count(*) from vk_jobs")).scalar_one())


def seconds_from_now(engine: Engine, moment: str) -> float:
    sql = "select extract(epoch from clock_timestamp() - cast(:moment as timestamptz))"
    with engine.connect() as conn:
        return float(conn.execute(text(sql), {"moment": moment}).scalar_one())


def test_a_job_is_there_when_the_callers_transaction_commits(host: Engine, engine: Engine, read: Read) -> None:
    with host.connect() as conn:
        id = vkjobs.enqueue(conn, "open_expire", "task-1")
        assert count(engine) == 0
        conn.commit()
    row = read(id)
    assert row[:4] == (id, "open_expire", "task-1", "pending")
    assert (row.attempts, row.last_error, row.payload, row.unique_key) == (0, None, None, None)
    assert (row.lease_until, row.started_at, row.claimed_by, row.claimed_until) == (None, None, None, None)


def test_a_job_goes_with_the_callers_transaction(host: Engine, engine: Engine) -> None:
    with host.connect() as conn:
        vkjobs.enqueue(conn, "open_expire", "task-1")
        conn.rollback()
    with Session(host) as session:
        vkjobs.enqueue(session, "open_expire", "task-1")
        session.rollback()
    with suppress(RuntimeError), Session(host) as session, session.begin():
        vkjobs.enqueue(session, "open_expire", "task-1")
        raise RuntimeError
    assert count(engine) == 0


def test_a_session_writes_its_own_rows_and_the_job_together(host: Engine, engine: Engine, read: Read) -> None:
    with Session(host) as session:
        session.execute(text("create table host_tasks (id text)"))
        session.execute(text("insert into host_tasks values ('task-1')"))
        id = vkjobs.enqueue(session, "open_expire", "task-1")
        assert count(engine) == 0
        session.commit()
    assert read(id).ref_id == "task-1"
    with engine.connect() as conn:
        assert conn.execute(text("select id from host_tasks")).scalars().all() == ["task-1"]


def test_a_scoped_session_will_do(host: Engine, read: Read) -> None:
    session = scoped_session(sessionmaker(host))
    id = vkjobs.enqueue(session, "open_expire")
    session.commit()
    session.remove()
    assert read(id).kind == "open_expire"


def test_a_savepoint_of_the_caller_takes_the_job_back(host: Engine, read: Read, engine: Engine) -> None:
    with Session(host) as session:
        kept = vkjobs.enqueue(session, "kept")
        savepoint = session.begin_nested()
        vkjobs.enqueue(session, "taken_back")
        savepoint.rollback()
        session.commit()
    assert read(kept).kind == "kept"
    assert count(engine) == 1


def test_on_a_connection_in_autocommit_the_job_is_there_at_once(engine: Engine, read: Read) -> None:
    with engine.connect() as conn:
        id = vkjobs.enqueue(conn, "open_expire")
        assert read(id).status == "pending"


def test_a_job_without_time_is_due_now_by_the_databases_clock(engine: Engine, read: Read) -> None:
    with engine.connect() as conn:
        row = read(vkjobs.enqueue(conn, "open_expire"))
    assert 0 <= seconds_from_now(engine, row.run_at) < 30
    assert 0 <= seconds_from_now(engine, row.updated_at) < 30


@pytest.mark.parametrize(
    "run_at",
    [
        datetime(2030, 1, 31, 12, 0, 0, 123456, UTC),
        datetime(2030, 7, 1, 12, tzinfo=ZoneInfo("Europe/Paris")),
        datetime(1969, 12, 31, tzinfo=UTC),
        datetime.max.replace(tzinfo=UTC),
        datetime.min.replace(tzinfo=UTC),
    ],
)
def test_a_time_keeps_its_instant_to_the_microsecond(engine: Engine, read: Read, run_at: datetime) -> None:
    with engine.connect() as conn:
        id = vkjobs.enqueue(conn, "open_expire", run_at=run_at)
        same = text("select run_at = cast(:run_at as timestamptz) from vk_jobs where id = :id")
        assert conn.execute(same, {"id": id, "run_at": run_at.isoformat()}).scalar_one() is True


@pytest.mark.parametrize("kind", ["k", "k" * 200, "two words", "🎉'\"\\%(x)s:kind; --", "run_due", Letter.A])
def test_any_text_up_to_200_characters_may_be_a_kind(engine: Engine, read: Read, kind: str) -> None:
    with engine.connect() as conn:
        assert read(vkjobs.enqueue(conn, kind)).kind == kind


@pytest.mark.parametrize("ref_id", [None, "", " ", "🎉'\"\\%(x)s:ref; --\n", "r" * 100_000])
def test_any_text_may_be_a_ref_id(engine: Engine, read: Read, ref_id: str | None) -> None:
    with engine.connect() as conn:
        assert read(vkjobs.enqueue(conn, "open_expire", ref_id)).ref_id == ref_id


PAYLOADS: list[Any] = [
    False, 0, -1.5, 1e-7, 10**100, "", "null", "🎉'\"\\%(x)s:ref; --\n", [], {}, deep(100),
    {"": [{"a": None, "b": [True, 2, "drei"]}], "A": {}},
]  # fmt: skip


@pytest.mark.parametrize("payload", PAYLOADS)
def test_any_json_may_be_the_payload(engine: Engine, read: Read, payload: Any) -> None:
    with engine.connect() as conn:
        stored = read(vkjobs.enqueue(conn, "open_expire", payload=payload)).payload
    assert (type(stored), stored) == (type(payload), payload)


def test_tuples_and_enumerations_are_stored_as_json_has_them(engine: Engine, read: Read) -> None:
    with engine.connect() as conn:
        id = vkjobs.enqueue(conn, "open_expire", payload={Letter.A: (Letter.A, Digit.ONE)})
    assert read(id).payload == {"a": ["a", 1]}


AN_HOUR = timedelta(hours=1)
NAIVE = datetime(2030, 1, 31, 12)  # noqa: DTZ001

cannot_be_stored = pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"kind": ""}, "kind has 0 characters: it must have 1 to 200"),
        ({"kind": "k" * 201}, "kind has 201 characters: it must have 1 to 200"),
        ({"kind": None}, "kind is None: it must be a string"),
        ({"kind": b"kind"}, "kind is b'kind': it must be a string"),
        ({"kind": "a\0b"}, "kind holds a NUL character, which Postgres cannot store"),
        ({"kind": "a\ud800b"}, "kind holds a lone surrogate, which Postgres cannot store"),
        ({"ref_id": 5}, "ref_id is 5: it must be a string"),
        ({"ref_id": UUID(int=0)}, f"ref_id is {UUID(int=0)!r}: it must be a string"),
        ({"ref_id": "\0"}, "ref_id holds a NUL character, which Postgres cannot store"),
        ({"ref_id": "\udfff"}, "ref_id holds a lone surrogate, which Postgres cannot store"),
        ({"run_at": NAIVE}, "run_at is datetime.datetime(2030, 1, 31, 12, 0), a time without zone: give it one, "),
        ({"run_at": "2030-01-31T12:00:00Z"}, "run_at is '2030-01-31T12:00:00Z': it must be a datetime with a zone"),
        ({"run_at": 1.5e9}, "run_at is 1500000000.0: it must be a datetime with a zone"),
        ({"run_at": date(2030, 1, 31)}, "run_at is datetime.date(2030, 1, 31): it must be a datetime with a zone"),
        ({"run_at": AN_HOUR}, "run_at is datetime.timedelta(seconds=3600): it must be a datetime with a zone"),
        ({"payload": {1, 2}}, "payload is a set, which JSON does not have"),
        ({"payload": [b"x"]}, "payload[0] is a bytes, which JSON does not have"),
        ({"payload": {"when": NAIVE}}, "payload['when'] is a datetime, which JSON does not have"),
        ({"payload": [0, {"a": Decimal(1)}]}, "payload[1]['a'] is a Decimal, which JSON does not have"),
        ({"payload": MappingProxyType({})}, "payload is a mappingproxy, which JSON does not have"),
        ({"payload": float("nan")}, "payload is nan, which JSON does not have"),
        ({"payload": {"a": [1, float("-inf")]}}, "payload['a'][1] is -inf, which JSON does not have"),
        ({"payload": {1: "one"}}, "a key of payload is 1: it must be a string"),
        ({"payload": {"a": [{None: 0}]}}, "a key of payload['a'][0] is None: it must be a string"),
        ({"payload": {(1, 2): 0}}, "a key of payload is (1, 2): it must be a string"),
        ({"payload": "\0"}, "payload holds a NUL character, which Postgres cannot store"),
        ({"payload": {"a": ["x", "\0"]}}, "payload['a'][1] holds a NUL character, which Postgres cannot store"),
        ({"payload": {"a\0": 0}}, "a key of payload holds a NUL character, which Postgres cannot store"),
        ({"payload": [["\ud800"]]}, "payload[0][0] holds a lone surrogate, which Postgres cannot store"),
        ({"payload": {"\udfff": 0}}, "a key of payload holds a lone surrogate, which Postgres cannot store"),
        ({"payload": circle()}, "payload is not JSON: "),
        ({"payload": deep(100_000)}, "payload is not JSON: "),
        ({"payload": 10**5000}, "payload is not JSON: "),
    ],
)


@cannot_be_stored
def test_what_cannot_be_stored_as_meant_is_refused_and_nothing_written(
    host: Engine, engine: Engine, arguments: dict[str, Any], line: str
) -> None:
    with Session(host) as session:
        session.execute(text("create table host_tasks ()"))
        with pytest.raises(InvalidJobError) as refused:
            vkjobs.enqueue(session, **{"kind": "open_expire", **arguments})
        assert str(refused.value).startswith(line)
        assert "\n" not in str(refused.value)
        session.commit()  # the transaction is as good as before
    assert count(engine) == 0
    with engine.connect() as conn:
        assert conn.execute(text("select to_regclass('host_tasks')")).scalar_one() is not None


def test_a_refusal_may_be_caught_as_a_value_error(engine: Engine) -> None:
    with engine.connect() as conn, pytest.raises(ValueError, match="kind has 0 characters"):
        vkjobs.enqueue(conn, "")


def test_what_is_no_session_or_connection_is_refused_and_nothing_written(host: Engine, engine: Engine) -> None:
    with host.connect() as conn:
        for wrong in (host, conn.connection, conn.connection.driver_connection, AsyncSession(), None):
            line = f"^session_or_connection is a {type(wrong).__name__}: it must be a Session or Connection of SQLAlch"
            with pytest.raises(InvalidJobError, match=line):
                vkjobs.enqueue(wrong, "open_expire")  # type: ignore[arg-type]
        conn.commit()
    assert count(engine) == 0


@pytest.mark.parametrize("key", [key for key in IDS if key != "bigint"])
def test_an_adopted_table_gives_ids_of_its_own_type(empty_database_url: str, key: str) -> None:
    make_original(empty_database_url, IDS[key])
    migrate(empty_database_url)
    engine = create_engine(database.url_of(empty_database_url), poolclass=NullPool)
    with Session(engine) as session:
        ids = {vkjobs.enqueue(session, "open_expire", "task-1", payload={"n": n}) for n in range(3)}
        session.commit()
        rows = session.execute(text("select id, kind, ref_id, status, payload from vk_jobs order by payload")).all()
    assert {row.id if key == "bigserial" else str(row.id) for row in rows} == ids
    assert [row[1:] for row in rows] == [("open_expire", "task-1", "pending", {"n": n}) for n in range(3)]
    kind_of_id = int if key == "bigserial" else str
    assert all(isinstance(id, kind_of_id) for id in ids)


# Many at once

MORE_THAN_A_STATEMENT = 2500


def test_many_jobs_are_there_when_the_callers_transaction_commits(host: Engine, engine: Engine) -> None:
    with host.connect() as conn:
        ids = vkjobs.enqueue_many(conn, (NewJob("noop") for _ in range(MORE_THAN_A_STATEMENT)))
        assert len(set(ids)) == MORE_THAN_A_STATEMENT
        assert count(engine) == 0
        conn.rollback()
    assert count(engine) == 0
    with Session(host) as session:
        vkjobs.enqueue_many(session, [NewJob("noop")] * MORE_THAN_A_STATEMENT)
        session.commit()
    assert count(engine) == MORE_THAN_A_STATEMENT
    scoped = scoped_session(sessionmaker(host))
    assert vkjobs.enqueue_many(scoped, []) == []
    scoped.remove()


def test_of_many_the_ids_are_in_the_order_of_the_jobs(engine: Engine) -> None:
    jobs = [NewJob("noop", f"task-{n}") for n in range(MORE_THAN_A_STATEMENT)]
    with engine.connect() as conn:
        ids = vkjobs.enqueue_many(conn, reversed(jobs))
        stored = {row.id: row.ref_id for row in conn.execute(text("select id, ref_id from vk_jobs"))}
    assert [stored[id] for id in ids] == [job.ref_id for job in reversed(jobs)]


VALUES: list[dict[str, Any]] = [
    {},
    {"ref_id": "🎉'\"\\%(x)s:ref; --\n"},
    {"ref_id": "", "kind": Letter.A},
    {"ref_id": "r" * 100_000, "kind": "two words 🎉'\"\\%(x)s:kind; --"},
    {"run_at": datetime(2030, 1, 31, 12, 0, 0, 123456, UTC)},
    {"run_at": datetime(2030, 7, 1, 12, tzinfo=ZoneInfo("Europe/Paris"))},
    {"run_at": datetime(1900, 1, 1, tzinfo=ZoneInfo("Europe/Paris"))},  # its offset has seconds
    {"run_at": datetime.max.replace(tzinfo=UTC)},
    {"run_at": datetime.max.replace(tzinfo=ZoneInfo("America/New_York"))},
    {"run_at": datetime.min.replace(tzinfo=UTC)},
    {"payload": {Letter.A: (Letter.A, Digit.ONE)}},
    *({"payload": payload} for payload in PAYLOADS),
]


def test_one_of_many_is_stored_as_it_is_alone(engine: Engine, read: Read) -> None:
    def columns(id: Any) -> list[Any]:
        row = read(id)
        stored = (row.kind, row.ref_id, row.run_at, row.payload)
        now = (0 <= seconds_from_now(engine, moment) < 30 for moment in (row.run_at, row.updated_at))
        fresh = row._replace(id=None, kind="", ref_id=None, run_at="", updated_at="", payload=None)
        return [stored[:2], stored[2:] if not next(now) else stored[3], next(now), fresh]

    with engine.connect() as conn:
        alone = [vkjobs.enqueue(conn, **{"kind": "noop", **value}) for value in VALUES]
        among_many = vkjobs.enqueue_many(conn, [NewJob(**{"kind": "noop", **value}) for value in VALUES])
    assert [columns(id) for id in among_many] == [columns(id) for id in alone]


@cannot_be_stored
def test_of_many_none_is_written_if_one_cannot_be_stored_as_meant(
    host: Engine, engine: Engine, arguments: dict[str, Any], line: str
) -> None:
    def jobs() -> Iterator[NewJob]:
        yield from [NewJob("noop")] * 1001
        yield NewJob(**{"kind": "noop", **arguments})

    with Session(host) as session:
        with pytest.raises(InvalidJobError) as refused:
            vkjobs.enqueue_many(session, jobs())
        assert str(refused.value).startswith(f"jobs[1001]: {line}")
        session.commit()
    assert count(engine) == 0


@pytest.mark.parametrize("wrong", [("noop",), {"kind": "noop"}, "noop", None])
def test_one_of_many_must_be_a_new_job(engine: Engine, wrong: Any) -> None:
    line = rf"jobs\[1\] is a {type(wrong).__name__}: it must be a vkjobs.NewJob"
    with engine.connect() as conn, pytest.raises(InvalidJobError, match=line):
        vkjobs.enqueue_many(conn, [NewJob("noop"), wrong])
    with pytest.raises(InvalidJobError, match="session_or_connection is a NoneType: it must be"):
        vkjobs.enqueue_many(None, [])  # type: ignore[arg-type]
    assert count(engine) == 0


def test_the_deepest_payload_that_can_be_stored_alone_can_be_among_many(engine: Engine) -> None:
    def deepest(write: Callable[[Any], object]) -> int:
        def is_too_deep(levels: int) -> bool:
            try:
                write(deep(levels))
            except InvalidJobError:
                return True
            return False

        return bisect_left(range(10_000), True, key=is_too_deep) - 1

    with engine.connect() as conn:
        alone = deepest(lambda payload: vkjobs.enqueue(conn, "noop", payload=payload))
        assert alone == deepest(lambda payload: vkjobs.enqueue_many(conn, [NewJob("noop", payload=payload)]))


@pytest.mark.parametrize("key", IDS)
def test_an_adopted_table_gives_many_ids_of_its_own_type(empty_database_url: str, key: str) -> None:
    make_original(empty_database_url, IDS[key])
    migrate(empty_database_url)
    engine = create_engine(database.url_of(empty_database_url), poolclass=NullPool)
    with Session(engine) as session:
        alone = vkjobs.enqueue(session, "noop")
        ids = vkjobs.enqueue_many(session, [NewJob("noop", str(n)) for n in range(1500)])
        session.commit()
        stored = {str(row.id): row.ref_id for row in session.execute(text("select id, ref_id from vk_jobs"))}
    assert {type(id) for id in ids} == {type(alone)}
    assert [stored[str(id)] for id in ids] == [str(n) for n in range(1500)]
