"""The statements that look for rows: which they find, in which order, how many, and whom they leave alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
from original import connected, until
from places import PLACES, Near, assert_changed, at, full, moment, timed
from rows import Row
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import OperationalError

from vkjobs import database, ledger
from vkjobs.ledger import Lease
from vkjobs.local import Postgres

LEASE, HORIZON = 62.0, 2.0
FREED = {
    "status": "pending", "lease_until": None, "started_at": None, "claimed_by": None, "claimed_until": None,
    "updated_at": Near(0),
}  # fmt: skip
LEASED = {**FREED, "lease_until": Near(LEASE)}

FREE = at("free")
EXPIRED = frozenset({"leased, expired", "leased since ever", "leased too far", "leased for ever"})
ORPHANED = frozenset({"foreign, expired", "foreign, once ours, expired"}) | at("running without lease")
WHENEVER = ("due", "within the horizon", "later")


@pytest.fixture(scope="module")
def database_url(postgres: Postgres) -> str:
    return postgres.create_database(f"lease_{uuid4().hex}", template="migrated")


@pytest.fixture(scope="module")
def engine(database_url: str) -> Iterator[Engine]:
    engine = database.engine(database_url, 3)
    yield engine
    engine.dispose()


@pytest.fixture(autouse=True)
def empty_table(engine: Engine) -> None:
    with engine.connect() as conn:
        conn.exec_driver_sql("delete from vk_jobs")


def lease(
    conn: Connection, *, batch: int = 100, window: int = 1000, kinds: Sequence[str] = (), listed: bool = False
) -> list[Lease]:
    queue: dict[str, Any] = {"kinds": kinds, "listed": listed}
    return ledger.lease(conn, **queue, batch=batch, window=window, lease=LEASE, horizon=HORIZON)


def lease_again(conn: Connection, *, room: int = 100, kinds: Sequence[str] = (), listed: bool = False) -> list[Lease]:
    return ledger.lease_again(conn, kinds=kinds, listed=listed, room=room, lease=LEASE, horizon=HORIZON)


def free_again(conn: Connection) -> int:
    return ledger.free_again(conn, lease=LEASE, horizon=HORIZON)


def take_over(conn: Connection) -> int:
    return ledger.take_over(conn, grace=0)


def add_many(
    conn: Connection, number: int, lease_until: str, *, status: str = "pending", run_at: str = "now()"
) -> None:
    conn.exec_driver_sql(f"""
        insert into vk_jobs (kind, status, run_at, lease_until)
        select 'k' || mod(n, 3), '{status}', {run_at} - n * interval '1s', {lease_until}
        from generate_series(1, {number}) n""")


class Search(NamedTuple):
    """A statement that looks for rows: where and when due it finds them, and what it changes."""

    call: Callable[[Connection], Any]
    places: frozenset[str]
    due: Sequence[str]
    changes: dict[str, Any]


SEARCHES = {
    "lease": Search(lease, FREE, WHENEVER[:2], LEASED),
    "lease_again": Search(lease_again, EXPIRED, WHENEVER[:2], LEASED),
    "free_again": Search(free_again, EXPIRED, WHENEVER[2:], FREED),
    "take_over": Search(take_over, ORPHANED, WHENEVER, FREED),
    "lost": Search(lambda conn: ledger.lost(conn, lease=0), frozenset({"ours, expired"}), WHENEVER, {}),
}


@pytest.mark.parametrize("start", [(place, due) for place in PLACES for due in WHENEVER], ids=", ".join)
@pytest.mark.parametrize("search", SEARCHES)
def test_a_statement_finds_the_rows_of_its_places_alone(
    engine: Engine, add: Callable[..., Row], read: Callable[[Any], Row], search: str, start: tuple[str, str]
) -> None:
    place, due = start
    call, places, whenever, changes = SEARCHES[search]
    row = add(**full(place, run_at={"due": -1, "within the horizon": HORIZON - 0.5, "later": HORIZON + 60}[due]))
    with engine.connect() as conn, timed(conn) as span:
        found = call(conn)
    after = read(row.id)
    if place not in places or due not in whenever:
        assert not found
        assert after == row
        return
    assert_changed(row, after, span, **changes)
    if isinstance(found, int):
        assert found == 1
    elif search == "lost":
        assert found == [(row.id, "noop", "r", 2, moment(after.lease_until or ""), after.claimed_by, True)]
    else:
        assert found == [(row.id, "noop", "r", moment(row.run_at), 2, moment(after.lease_until or ""), True)]


# Which kinds


ODD_KINDS = ("", "a,b", '{"x"}', "null", "NULL", "it's", "back\\slash", "%s", ":kinds", "zwölf", "\U0010ffff")


@pytest.mark.parametrize(("search", "lease_until"), [(lease, None), (lease_again, -5)])
def test_each_kind_belongs_to_one_queue_known_or_not(
    engine: Engine, add: Callable[..., Row], search: Callable[..., list[Lease]], lease_until: float | None
) -> None:
    kinds = [*ODD_KINDS, "plain", "vkjobs.own", "known" * 40]
    for kind in kinds * 2:
        add(kind=kind, lease_until=lease_until)
    listed = [*kinds[1::2], "nobody's"]
    with engine.connect() as conn:
        assert search(conn, kinds=[], listed=True) == []
        there = Counter(lease.kind for lease in search(conn, kinds=listed, listed=True))
        assert there == Counter(kinds[1::2] * 2)
        elsewhere = Counter(lease.kind for lease in search(conn, kinds=listed, listed=False))
        assert elsewhere == Counter(kinds[0::2] * 2)


# Which first


# Without an index nothing but the statement itself puts the rows in order.
PLANS = ("on", "off")


@pytest.mark.parametrize("indexes", PLANS)
def test_the_oldest_are_leased_first_whatever_their_kinds(
    database_url: str, add: Callable[..., Row], indexes: str
) -> None:
    ages = [7, 3, 11, 1, 5, 9, 2, 12, 4, 10, 6, 8]
    for number, age in enumerate(ages):
        add(kind=f"k{number % 2}", ref_id=str(age), run_at=-age)
    with connected(database_url) as conn:
        conn.exec_driver_sql(f"set enable_indexscan = {indexes}; set enable_bitmapscan = {indexes}")
        batches = [[lease.ref_id for lease in lease(conn, batch=5)] for _ in range(3)]
    assert batches == [["12", "11", "10", "9", "8"], ["7", "6", "5", "4", "3"], ["2", "1"]]


@pytest.mark.parametrize("indexes", PLANS)
def test_the_longest_expired_are_leased_again_first(database_url: str, add: Callable[..., Row], indexes: str) -> None:
    for age in (3, 9, 6, 1):
        add(ref_id=str(age), lease_until=-age, run_at=-100 + age)
    with connected(database_url) as conn:
        conn.exec_driver_sql(f"set enable_indexscan = {indexes}; set enable_bitmapscan = {indexes}")
        assert {lease.ref_id for lease in lease_again(conn, room=2)} == {"9", "6"}
        assert [lease.ref_id for lease in lease_again(conn)] == ["1", "3"]


def test_a_backlog_of_another_queue_takes_no_place_in_the_batch(engine: Engine, add: Callable[..., Row]) -> None:
    with engine.connect() as conn:
        add_many(conn, 300, "null")
        young = [add(kind=kind, run_at=0).id for kind in ("a", "z")]
        paused = ["k0", "k1", "k2"]
        assert [lease.id for lease in lease(conn, batch=5, kinds=paused, listed=False)] == young
        assert len(lease(conn, batch=5, kinds=paused, listed=True)) == 5


# How many


@pytest.mark.parametrize(
    ("batch", "window", "expected"),
    [(4, 100, 4), (100, 100, 10), (100, 10, 7), (4, 10, 4), (100, 3, 0), (100, 1, 0), (1, 4, 1)],
)
def test_a_lease_takes_a_batch_and_no_more_than_the_window_has_room_for(
    engine: Engine, add: Callable[..., Row], batch: int, window: int, expected: int
) -> None:
    for lease_until in (60, -5, "infinity"):  # all three may have messages
        add(lease_until=lease_until)
    for _ in range(10):
        add()
    with engine.connect() as conn:
        assert len(lease(conn, batch=batch, window=window)) == expected


def test_the_window_is_counted_per_queue(engine: Engine, add: Callable[..., Row]) -> None:
    for kind in ("own", "other"):
        for number in range(6):
            add(kind=kind, lease_until=60 if number < 3 else None)
        add(kind=kind, status="running", lease_until=60)
    with engine.connect() as conn:
        assert [lease.kind for lease in lease(conn, window=5, kinds=["own"], listed=True)] == ["own"] * 2
        assert lease(conn, window=5, kinds=["own"], listed=True) == []
        assert [lease.kind for lease in lease(conn, window=4, kinds=["own"], listed=False)] == ["other"]


@pytest.mark.parametrize("room", [1, 3, 7])
def test_no_more_are_leased_again_than_there_is_room(engine: Engine, add: Callable[..., Row], room: int) -> None:
    for _ in range(5):
        add(lease_until=-5)
    with engine.connect() as conn:
        assert len(lease_again(conn, room=room)) == min(room, 5)


def test_fifty_leases_at_once_never_exceed_the_window_and_share_no_row(engine: Engine, database_url: str) -> None:
    with engine.connect() as conn:
        add_many(conn, 200, "null")

    def lease_some(_: int) -> list[Lease]:
        with connected(database_url) as conn:
            return lease(conn, batch=7, window=30)

    with ThreadPoolExecutor(50) as threads:
        leases = [lease for batch in threads.map(lease_some, range(50)) for lease in batch]
    assert len(leases) == len({lease.id for lease in leases}) == 30


def test_a_lease_waits_for_one_that_is_not_over_yet_and_counts_what_it_took(engine: Engine) -> None:
    waiting = text(
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event = 'advisory'"
    )
    with ThreadPoolExecutor() as threads, engine.connect() as conn, database.transaction(engine) as other:
        add_many(conn, 20, "null")
        other.execute(text("select pg_advisory_xact_lock(:lock)"), {"lock": ledger._ADVISORY_LOCK})
        assert len(lease(other, window=5)) == 5
        second = threads.submit(lease, conn, window=5)
        with engine.connect() as third:
            until(lambda: second.done() or third.scalar(waiting))
        other.commit()
        assert second.result() == []


def test_an_expired_lease_is_given_again_once_however_many_ask(engine: Engine, database_url: str) -> None:
    with engine.connect() as conn:
        add_many(conn, 40, "now() - interval '5s'")

    def lease_some(_: int) -> list[Lease]:
        with connected(database_url) as conn:
            return lease_again(conn, room=9)

    with ThreadPoolExecutor(10) as threads:
        leases = [lease for batch in threads.map(lease_some, range(10)) for lease in batch]
    assert len(leases) == len({lease.id for lease in leases}) == 40


@pytest.mark.parametrize(
    ("call", "status", "run_at"),
    [(free_again, "pending", "now() + interval '1 day'"), (take_over, "running", "now()")],
)
def test_housekeeping_moves_a_bounded_number_at_once_and_the_rest_the_next_time(
    engine: Engine, call: Callable[[Connection], int], status: str, run_at: str
) -> None:
    with engine.connect() as conn:
        add_many(conn, 1500, "now() - interval '1 h'", status=status, run_at=run_at)
        assert [call(conn) for _ in range(3)] == [1000, 500, 0]


# Whom they leave alone


@pytest.mark.parametrize(
    ("search", "columns"),
    [
        (lambda conn: len(lease(conn, batch=2)), {}),
        (lambda conn: len(lease_again(conn, room=2)), {"lease_until": -5}),
        (free_again, {"lease_until": -5, "run_at": 1000}),
        (take_over, {"lease_until": -5, "status": "running"}),
    ],
    ids=["lease", "lease_again", "free_again", "take_over"],
)
def test_rows_that_somebody_has_locked_are_passed_over_and_found_later(
    engine: Engine, add: Callable[..., Row], search: Callable[[Connection], int], columns: dict[str, Any]
) -> None:
    rows = [add(**{"run_at": number - 100, **columns}) for number in range(5)]
    with engine.connect() as conn, database.transaction(engine) as somebody:
        conn.exec_driver_sql("set lock_timeout = '3s'")
        oldest = {"locked": [row.id for row in rows[:3]]}
        somebody.execute(text("select from vk_jobs where id = any(:locked) for no key update"), oldest)
        assert search(conn) == 2
        assert search(conn) == 0
        somebody.rollback()
        assert search(conn) > 0


def test_a_row_that_somebody_refers_to_by_foreign_key_is_leased_all_the_same(
    engine: Engine, add: Callable[..., Row]
) -> None:
    row = add()
    with engine.connect() as conn, database.transaction(engine) as somebody:
        somebody.execute(text("select from vk_jobs where id = :id for key share"), {"id": row.id})
        [found] = lease(conn)
        assert ledger.claim(conn, row.id, found.token, lease=9, by="me") is not None


def test_a_lease_does_not_wait_for_ever_for_one_that_hangs(engine: Engine, add: Callable[..., Row]) -> None:
    row = add()
    with engine.connect() as conn, database.transaction(engine) as hanging:
        conn.exec_driver_sql("set statement_timeout = '20s'")
        hanging.execute(text("select pg_advisory_xact_lock(:lock)"), {"lock": ledger._ADVISORY_LOCK})
        with pytest.raises(OperationalError, match="lock timeout"):
            lease(conn)
        hanging.rollback()
        assert [found.id for found in lease(conn)] == [row.id]


@pytest.mark.parametrize("grace", [0, 1, 4, 6, 1200])
def test_a_foreign_job_is_taken_over_when_its_grace_has_passed(
    engine: Engine, add: Callable[..., Row], grace: float
) -> None:
    for age in (0.5, 2, 5, 7, 2000):
        add(status="running", lease_until=-age)
    add(status="running")
    with engine.connect() as conn:
        assert ledger.take_over(conn, grace=grace) == sum(age > grace for age in (0.5, 2, 5, 7, 2000)) + 1


def test_nobody_is_lost_until_postgres_has_been_up_for_a_lease(engine: Engine, add: Callable[..., Row]) -> None:
    add(status="running", lease_until=-5, claimed_until=-5, claimed_by="me")
    with engine.connect() as conn:
        up = conn.scalar(text("select extract(epoch from clock_timestamp() - pg_postmaster_start_time())"))
        assert ledger.lost(conn, lease=float(up or 0) + 600) == []
        assert [lost.claimed_by for lost in ledger.lost(conn, lease=0)] == ["me"]
