"""The ledger on tables of other types, with extreme values, and under a clock that the test sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from original import STATUSES, connected, execute, make_original
from places import full, moment
from rows import Row, add_row, read_row
from sqlalchemy import Connection, Engine, make_url, text

from vkjobs import database, ledger
from vkjobs.ledger import Failure, JobId, Lease
from vkjobs.local import Postgres
from vkjobs.migrations import migrate

ALL: dict[str, Any] = {"kinds": [], "listed": False}
AGAIN = Failure(final=False, delay=0, error="E: x")
END = Failure(final=True, delay=0, error="E: x")
EXTREMES = (
    "-infinity",
    "4713-01-01 00:00:00+00 BC",
    "0001-01-01 00:00:00+00",
    "294276-12-31 00:00:00+00",
    "infinity",
)


def lease_all(conn: Connection, horizon: float = 0) -> list[Lease]:
    return ledger.lease(conn, **ALL, batch=100, window=1000, lease=60, horizon=horizon)


def start(conn: Connection, lease: Lease) -> datetime:
    claim = ledger.claim(conn, lease.id, lease.token, lease=30, by="me")
    assert claim is not None
    assert (claim.id, claim.kind, claim.ref_id) == (lease.id, lease.kind, lease.ref_id)
    return claim.token


# Adopted tables


def live(conn: Connection, job: JobId) -> None:
    """Lead a row through each statement."""

    def leased() -> Lease:
        [lease] = [lease for lease in lease_all(conn) if lease.id == job]
        return lease

    def expire() -> None:
        conn.execute(text("update vk_jobs set lease_until = now() - interval '9s' where id = :id"), {"id": job})

    lease = leased()
    assert ledger.early_by(conn, job, lease.token) is not None
    assert ledger.release(conn, [(job, lease.token)]) == 1
    leased()
    expire()
    [lease] = ledger.lease_again(conn, **ALL, room=5, lease=60, horizon=2)
    token = start(conn, lease)
    assert ledger.claimed(conn, job, by="me") is not None
    assert ledger.renew(conn, [(job, token, token + timedelta(seconds=9))]) == {job}
    assert ledger.snooze(conn, job, token + timedelta(seconds=9), datetime(2020, 1, 1, tzinfo=UTC))
    assert ledger.settle_failed(conn, job, start(conn, leased()), AGAIN)
    start(conn, leased())
    assert ledger.settle_dead_child(conn, job, AGAIN, by="me")
    start(conn, leased())
    conn.execute(text("update vk_jobs set lease_until = now() - interval '9s', claimed_until = now() - interval '9s'"))
    [lost] = ledger.lost(conn, lease=0)
    assert ledger.settle_failed(conn, job, lost.token, AGAIN)
    start(conn, leased())
    expire()
    assert ledger.take_over(conn, grace=5) == 1
    leased()
    expire()
    conn.execute(text("update vk_jobs set run_at = now() + interval '1 day'"))
    assert ledger.free_again(conn, lease=60, horizon=2) == 1
    assert ledger.reschedule(conn, job, datetime(2020, 1, 1, tzinfo=UTC))
    assert ledger.settle_failed(conn, job, start(conn, leased()), END)
    assert ledger.retry(conn, job)
    assert ledger.cancel(conn, job)
    assert ledger.retry(conn, job)
    assert ledger.settle_done(conn, job, start(conn, leased()))
    assert ledger.settled_done(conn, job, by="me")


@pytest.mark.parametrize(
    ("key", "status", "alter"),
    [
        ("bigserial primary key", STATUSES["check"], ""),
        (
            "serial primary key",
            STATUSES["varchar"],
            "alter kind type varchar(50), alter ref_id type varchar(50)",
        ),
        ("text primary key", STATUSES["text"], "alter attempts type bigint"),
        ("varchar(40) primary key", STATUSES["enum"], "alter updated_at type timestamptz(3)"),
        ("uuid primary key", STATUSES["enum"], "alter attempts drop not null, alter attempts drop default"),
        (
            "uuid primary key",
            STATUSES["check"],
            "alter last_error type varchar, alter kind type varchar",
        ),
    ],
    ids=["bigint", "integer", "text", "varchar", "uuid, enum", "uuid, check"],
)
def test_each_statement_works_on_an_adopted_table(empty_database_url: str, key: str, status: str, alter: str) -> None:
    make_original(empty_database_url, key, status)
    if alter:
        execute(empty_database_url, "alter table vk_jobs " + alter)
    migrate(empty_database_url)
    with connected(empty_database_url) as conn:
        live(
            conn,
            ledger.enqueue(conn, kind="k", ref_id="r", run_at=datetime(2020, 1, 1, tzinfo=UTC), payload=None),
        )


# Extreme values


@pytest.fixture(scope="module")
def database_url(postgres: Postgres) -> str:
    url = postgres.create_database(f"values_{uuid4().hex}", template="migrated")
    execute(url, "alter table vk_jobs alter attempts drop not null")
    return url


@pytest.fixture(scope="module")
def engine(database_url: str) -> Iterator[Engine]:
    engine = database.engine(database_url, 2)
    yield engine
    engine.dispose()


@pytest.fixture(autouse=True)
def empty_table(engine: Engine) -> None:
    with engine.connect() as conn:
        conn.exec_driver_sql("delete from vk_jobs")


@pytest.mark.parametrize("failure", [AGAIN, END])
@pytest.mark.parametrize(
    "attempts",
    [(None, 1), (-5, -4), (-(2**31), -(2**31) + 1), (0, 1), (2**31 - 2, 2**31 - 1), (2**31 - 1, 2**31 - 1)],
)
def test_attempts_count_on_from_any_number_and_never_overflow(
    engine: Engine,
    add: Callable[..., Row],
    read: Callable[[Any], Row],
    attempts: tuple[int | None, int],
    failure: Failure,
) -> None:
    before, then = attempts
    row = add(attempts=before)
    with engine.connect() as conn:
        [lease] = lease_all(conn)
        assert lease.attempts == (before or 0)
        assert ledger.settle_failed(conn, row.id, start(conn, lease), failure)
        assert read(row.id).attempts == then
        dead = add(status="running", claimed_by="dead", claimed_until=9, lease_until=9, attempts=before)
        assert ledger.settle_dead_child(conn, dead.id, failure, by="dead")
        assert read(dead.id).attempts == then
        add(status="running", claimed_by="lost", claimed_until=-9, lease_until=-9, attempts=before)
        assert [lost.attempts for lost in ledger.lost(conn, lease=0)] == [before or 0]


def test_attempts_that_an_adopted_table_counts_in_a_smallint_never_overflow(empty_database_url: str) -> None:
    make_original(empty_database_url)
    execute(empty_database_url, "alter table vk_jobs alter attempts type smallint")
    migrate(empty_database_url)
    with connected(empty_database_url) as conn:
        for before, then in ((0, 1), (2**15 - 2, 2**15 - 1), (2**15 - 1, 2**15 - 1)):
            row = add_row(conn, attempts=before)
            [lease] = lease_all(conn)
            assert ledger.settle_failed(conn, row.id, start(conn, lease), END)
            assert read_row(conn, row.id).attempts == then


@pytest.mark.parametrize("horizon", [0, 7200])
def test_times_that_python_does_not_have_keep_nobody_else_from_being_leased(
    engine: Engine, add: Callable[..., Row], horizon: float
) -> None:
    odd = {time: add(kind=time, run_at=time).id for time in EXTREMES}
    due = {add(kind=time).id for time in EXTREMES}
    past = {odd[time] for time in EXTREMES[:3]}
    with engine.connect() as conn:
        leases = {lease.id: lease for lease in lease_all(conn, horizon)}
        assert set(leases) == past | due
        for lease in leases.values():
            assert ledger.settle_done(conn, lease.id, start(conn, lease))


def test_a_lease_that_python_does_not_have_is_given_up_beside_others(
    engine: Engine, add: Callable[..., Row], read: Callable[[Any], Row]
) -> None:
    ids = {add(kind=until, lease_until=until).id for until in EXTREMES} | {add(lease_until=-5).id}
    past = EXTREMES[:3]
    foreign = {add(status="running", lease_until=until).id for until in past}
    ours = {add(status="running", lease_until=until, claimed_until=until).id for until in past}
    with engine.connect() as conn:
        assert ledger.lost(conn, lease=0) == []
        again = ledger.lease_again(conn, **ALL, room=99, lease=60, horizon=2)
        assert {lease.id for lease in again} == ids
        assert ledger.take_over(conn, grace=5) == 6
    assert {read(job).lease_until for job in foreign | ours} == {None}


@pytest.mark.parametrize("run_at", ["294276-12-31 00:00:00+00", "infinity"])
def test_a_leased_row_moved_to_the_end_of_time_is_not_due_and_freed(
    engine: Engine, add: Callable[..., Row], read: Callable[[Any], Row], run_at: str
) -> None:
    row = add(run_at=run_at, lease_until=-5)
    token = moment(row.lease_until or "")
    with engine.connect() as conn:
        assert ledger.claim(conn, row.id, token, lease=30, by="me") is None
        assert (ledger.early_by(conn, row.id, token) or 0) > 86_400
        assert ledger.free_again(conn, lease=60, horizon=2) == 1
    assert read(row.id).lease_until is None


@pytest.mark.parametrize("until", [float(60), datetime.max.replace(tzinfo=UTC), datetime(1, 1, 2, tzinfo=UTC)])
def test_a_job_may_be_snoozed_until_any_time(
    engine: Engine, add: Callable[..., Row], read: Callable[[Any], Row], until: datetime | float
) -> None:
    row = add(**full("ours"))
    with engine.connect() as conn:
        assert ledger.snooze(conn, row.id, moment(row.lease_until or ""), until)
    if isinstance(until, datetime):
        assert moment(read(row.id).run_at) == until


def test_a_megabyte_of_error_and_any_character_that_postgres_has_are_kept(
    engine: Engine, add: Callable[..., Row], read: Callable[[Any], Row]
) -> None:
    error = "E: %s %(id)s :id \\ ' \" \x01 \u2028 🦆 \U0010ffff" + "x" * 1_000_000
    row = add(**full("ours"))
    with engine.connect() as conn:
        assert ledger.settle_failed(conn, row.id, moment(row.lease_until or ""), Failure(True, 0, error))
    assert read(row.id).last_error == error


# A clock that the test sets


@pytest.fixture
def clock(postgres: Postgres) -> Iterator[tuple[Connection, Callable[[datetime], None]]]:
    """A connection on which the ledger's two clocks show what is set."""
    url = postgres.create_database(f"clock_{uuid4().hex}", template="migrated")
    body = "returns timestamptz language sql as 'select now from clock.clock'"
    execute(
        url,
        "create schema clock",
        "create table clock.clock as select now()",
        f"create function clock.clock_timestamp() {body}",
        f"create function clock.statement_timestamp() {body}",
        f"alter database {make_url(url).database} set search_path = clock, pg_catalog, public",
    )
    with connected(url) as conn:

        def set_clock(now: datetime) -> None:
            conn.execute(text("update clock.clock set now = :now"), {"now": now})

        yield conn, set_clock


NOON = datetime(2031, 5, 5, 12, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


def test_a_claim_is_never_early_by_a_microsecond(
    clock: tuple[Connection, Callable[[datetime], None]],
) -> None:
    conn, set_clock = clock
    set_clock(NOON - timedelta(seconds=2))
    row = add_row(conn, run_at=NOON.isoformat())
    [lease] = lease_all(conn, horizon=2)
    assert ledger.early_by(conn, row.id, lease.token) == 2
    set_clock(NOON - MICROSECOND)
    leased = read_row(conn, row.id)
    assert ledger.claim(conn, row.id, lease.token, lease=30, by="me") is None
    assert read_row(conn, row.id) == leased
    assert ledger.early_by(conn, row.id, lease.token) == 0.000_001
    set_clock(NOON)
    assert ledger.early_by(conn, row.id, lease.token) == 0
    assert ledger.claim(conn, row.id, lease.token, lease=30, by="me") is not None


def test_a_lease_takes_what_is_due_within_the_horizon_and_not_a_microsecond_more(
    clock: tuple[Connection, Callable[[datetime], None]],
) -> None:
    conn, set_clock = clock
    set_clock(NOON)
    inside = add_row(conn, run_at=(NOON + timedelta(seconds=2)).isoformat())
    add_row(conn, run_at=(NOON + timedelta(seconds=2) + MICROSECOND).isoformat())
    assert [lease.id for lease in lease_all(conn, horizon=2)] == [inside.id]


def test_a_new_token_differs_from_the_one_found_even_if_the_clock_was_set_back(
    clock: tuple[Connection, Callable[[datetime], None]],
) -> None:
    conn, set_clock = clock
    set_clock(NOON)
    # By this clock a lease and a claim of 60 s give just this token.
    expected = NOON + timedelta(seconds=60)
    row = add_row(conn, run_at="2030-01-01 00:00+00", lease_until=expected.isoformat())
    claim = ledger.claim(conn, row.id, expected, lease=60, by="me")
    assert claim is not None
    assert claim.token == expected + MICROSECOND
    after = read_row(conn, row.id)
    assert after.claimed_until == after.lease_until
    row = add_row(conn, run_at="2030-01-01 00:00+00", lease_until=(NOON - timedelta(seconds=60)).isoformat())
    [lease] = ledger.lease_again(conn, **ALL, room=5, lease=-60, horizon=2)
    assert lease.token == NOON - timedelta(seconds=60) + MICROSECOND


def test_leases_and_claims_run_from_the_databases_clock(
    clock: tuple[Connection, Callable[[datetime], None]],
) -> None:
    conn, set_clock = clock
    set_clock(NOON)
    add_row(conn, run_at="2030-01-01 00:00+00")
    [lease] = lease_all(conn)
    assert lease.token == NOON + timedelta(seconds=60)
    set_clock(NOON + timedelta(seconds=10))
    claim = ledger.claim(conn, lease.id, lease.token, lease=30, by="me")
    assert claim is not None
    assert (claim.now, claim.token) == (NOON + timedelta(seconds=10), NOON + timedelta(seconds=40))
    for late in (40, 41):
        set_clock(NOON + timedelta(seconds=late))
        assert [lost.id for lost in ledger.lost(conn, lease=-1e9)] == [lease.id] * (late - 40)
