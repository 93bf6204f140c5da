"""The jobs of one message end as if each had come alone, whatever becomes of the others."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from bench import BY, Bench, somebody
from original import connected, execute
from outages import commits_that_break, commits_without_answer, cut_once
from places import full, moment
from rows import Row
from sqlalchemy import Connection, Engine, create_engine, text
from statements import watching
from workers import wait_for

from vkjobs import bulk, database, ledger
from vkjobs.errors import DatabaseUnavailable, JobsLocked
from vkjobs.execute import Executor, Outcome, Verdict
from vkjobs.handlers import Context, GiveUp, Job, Snooze
from vkjobs.local import Postgres

Handle = Callable[[Job, Context], object]


@pytest.fixture(scope="module")
def database_url(postgres: Postgres) -> str:
    url = postgres.create_database(f"bulk_{uuid4().hex}", template="migrated")
    execute(url, "create table effects (job_id bigint)")
    return url


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    execute(database_url, "delete from vk_jobs", "delete from effects")
    engine = database.engine(database_url, 5)
    yield engine
    engine.dispose()


@pytest.fixture
def bench(engine: Engine, caplog: pytest.LogCaptureFixture) -> Bench:
    caplog.set_level(logging.INFO, "vkjobs")
    return Bench(engine)


def verdicts(outcomes: list[Outcome]) -> Counter[str]:
    return Counter(str(outcome.verdict) for outcome in outcomes)


def states(bench: Bench, rows: list[Row]) -> list[tuple[str, int]]:
    """Status and attempts of each row."""
    found = text("select status, attempts from vk_jobs where id = :id")
    with bench.engine.connect() as conn:
        return [tuple(conn.execute(found, {"id": row.id}).one()) for row in rows]


def effects(bench: Bench) -> list[int]:
    with bench.engine.connect() as conn:
        return list(conn.execute(text("select job_id from effects order by 1")).scalars())


def write(job: Job, ctx: Context) -> None:
    ctx.session.execute(text("insert into effects values (:id)"), {"id": job.id})


def write_all(jobs: list[Job], ctx: Context) -> None:
    for job in jobs:
        write(job, ctx)


@contextmanager
def counting(engine: Engine) -> Iterator[list[str]]:
    """Give the statements that are sent in the block."""
    sent: list[str] = []
    with watching(engine, before=lambda _, statement: sent.append(statement)):
        yield sent


def noop(_job: Job, _ctx: Context) -> None: ...


DONE = ("done", 0)
RETRIED = ("pending", 1)


# One by one


def test_one_statement_claims_all_and_one_settles_those_that_are_done(bench: Bench) -> None:
    told: list[Job] = []
    bench.handle(lambda job, _: told.append(job), bulk=10)
    rows = [bench.add(payload={"n": number}) for number in range(7)]
    with counting(bench.engine) as sent:
        assert bench.run_all(*rows) == [Outcome(Verdict.DONE)] * 7
    assert [statement.rpartition("execute vkjobs_")[2][:9] for statement in sent] == ["claim_all", "settle_al"]
    assert [(job.id, job.payload) for job in told] == [(row.id, row.payload) for row in rows]
    assert states(bench, rows) == [DONE] * 7
    assert {bench.read(row).claimed_by for row in rows} == {BY}


def test_a_message_without_jobs_does_nothing(bench: Bench) -> None:
    assert bench.run_all() == []


def lose(bench: Bench) -> Handle:
    def handle(job: Job, _ctx: Context) -> None:
        somebody(bench.engine)("update vk_jobs set lease_until = now() + interval '9 min' where id = :id", id=job.id)

    return handle


def raising(error: BaseException) -> Handle:
    def handle(_job: Job, _ctx: Context) -> None:
        raise error

    return handle


def write_and_raise(job: Job, ctx: Context) -> None:
    write(job, ctx)
    raise ValueError("after its writes")


def write_what_is_refused(_job: Job, ctx: Context) -> None:
    ctx.session.execute(text("insert into effects values ('no number')"))


ENDS: dict[str, tuple[Callable[[Bench], Handle], Verdict, tuple[str, int], int]] = {
    # By name: the handler of the one, its verdict, its status and attempts, and whether it has had an effect.
    "raises": (lambda _: raising(ValueError("x")), Verdict.RETRYING, RETRIED, 0),
    "exits": (lambda _: raising(SystemExit(1)), Verdict.RETRYING, RETRIED, 0),
    "snoozes": (lambda _: raising(Snooze(timedelta(hours=1))), Verdict.SNOOZED, ("pending", 0), 0),
    "gives up": (lambda _: raising(GiveUp("x")), Verdict.FAILED, ("failed", 1), 0),
    "writes": (lambda _: write, Verdict.DONE, DONE, 1),
    "writes and raises": (lambda _: write_and_raise, Verdict.RETRYING, RETRIED, 0),
    "writes what is refused": (lambda _: write_what_is_refused, Verdict.RETRYING, RETRIED, 0),
    "loses its lease": (lose, Verdict.LEASE_LOST, ("running", 0), 0),
}


@pytest.mark.parametrize("end", ENDS)
def test_one_that_ends_in_another_way_leaves_the_others_done(bench: Bench, end: str) -> None:
    make, verdict, state, written = ENDS[end]
    handle_one = make(bench)
    bench.handle(lambda job, ctx: handle_one(job, ctx) if job.ref_id == "it" else None, bulk=10)
    rows = [bench.add(ref_id="it" if number == 2 else "r") for number in range(5)]
    outcomes = bench.run_all(*rows)
    assert verdicts(outcomes) == Counter({"done": 4}) + Counter([str(verdict)])
    assert states(bench, rows) == [DONE, DONE, state, DONE, DONE]
    assert effects(bench) == [rows[2].id] * written


def test_one_that_writes_after_its_lease_was_lost_leaves_no_effect(bench: Bench) -> None:
    lose_it = lose(bench)

    def handle(job: Job, ctx: Context) -> None:
        write(job, ctx)
        if job.ref_id == "it":
            lose_it(job, ctx)

    bench.handle(handle, bulk=10)
    rows = [bench.add(ref_id="it" if number == 1 else "r") for number in range(3)]
    assert verdicts(bench.run_all(*rows)) == {"done": 2, "lease lost": 1}
    assert effects(bench) == [rows[0].id, rows[2].id]


def test_one_whose_payload_cannot_be_decoded_fails_alone(bench: Bench) -> None:
    bench.handle(noop, bulk=10)
    rows = [bench.add() for _ in range(3)]
    digits = "9" * 5000  # Python reads no such number
    somebody(bench.engine)("update vk_jobs set payload = cast(:it as jsonb) where id = :id", it=digits, id=rows[1].id)
    assert verdicts(bench.run_all(*rows)) == {"done": 2, "retrying": 1}
    assert states(bench, rows) == [DONE, RETRIED, DONE]


def test_jobs_of_a_kind_that_nobody_handles_fail_alone(bench: Bench) -> None:
    bench.handle(noop, bulk=10)
    rows = [bench.add(), bench.add(kind="other"), bench.add()]
    assert verdicts(bench.run_all(*rows)) == {"done": 2, "retrying": 1}
    assert (bench.read(rows[1]).last_error or "").startswith("UnhandledKind")


# Where nothing of a message is plain


@contextmanager
def refusing(engine: Engine, when: str) -> Iterator[None]:
    """Have a trigger of the host's refuse the update of rows in the block."""
    execute_ = somebody(engine)
    execute_(
        """create function refuse() returns trigger language plpgsql as $$
        begin raise exception 'the host refuses it'; end $$"""
    )
    execute_(f"create trigger refuse before update on vk_jobs for each row when ({when}) execute function refuse()")
    try:
        yield
    finally:
        execute_("drop function refuse cascade")


@pytest.mark.parametrize("as_list", [False, True], ids=["one by one", "as list"])
def test_a_trigger_that_refuses_that_one_is_done_fails_that_one(bench: Bench, *, as_list: bool) -> None:
    bench.handle(noop, bulk=10, as_list=as_list)
    rows = [bench.add(ref_id="it" if number == 1 else "r") for number in range(4)]
    with refusing(bench.engine, "new.status = 'done' and new.ref_id = 'it'"):
        assert verdicts(bench.run_all(*rows)) == {"done": 3, "retrying": 1}
    assert states(bench, rows) == [DONE, RETRIED, DONE, DONE]
    assert "the host refuses it" in (bench.read(rows[1]).last_error or "")


@pytest.mark.parametrize("as_list", [False, True], ids=["one by one", "as list"])
@pytest.mark.parametrize("error", [None, ValueError("x")], ids=["done", "raises"])
def test_a_trigger_that_refuses_any_end_of_one_keeps_no_other_from_it(
    bench: Bench, caplog: pytest.LogCaptureFixture, error: Exception | None, *, as_list: bool
) -> None:
    def handle(job: Job, _ctx: Context) -> None:
        if job.ref_id == "it" and error:
            raise error

    def handle_all(jobs: list[Job], _ctx: Context) -> Mapping[Any, Any]:
        return {job.id: error for job in jobs if job.ref_id == "it" and error}

    bench.handle(handle_all if as_list else handle, bulk=10, as_list=as_list)
    rows = [bench.add(ref_id="it" if number == 1 else "r") for number in range(4)]
    refused = refusing(bench.engine, "old.status = 'running' and new.status <> 'running' and new.ref_id = 'it'")
    with refused, pytest.raises(Exception, match="the host refuses it"):
        bench.run_all(*rows)
    assert states(bench, rows) == [DONE, ("running", 0), DONE, DONE]
    assert [record.__dict__["job_id"] for record in caplog.records if "settled" in record.__dict__["event"]] == [
        rows[1].id
    ]


@contextmanager
def locking(url: str, *rows: Row) -> Iterator[Connection]:
    """Hold locks on rows, as a transaction of the host's does, until it ends."""
    with connected(url) as conn, conn.execution_options(isolation_level="READ COMMITTED").begin():
        conn.execute(text("select from vk_jobs where id = any(:ids) for update"), {"ids": [row.id for row in rows]})
        yield conn


def test_rows_that_cannot_be_claimed_keep_no_other_from_it(bench: Bench, database_url: str) -> None:
    started: list[Any] = []
    bench.handle(lambda job, _: started.append(job.id), bulk=20)
    good = [bench.add() for _ in range(3)]
    moved, cancelled, running, gone, here, locked = (bench.add() for _ in range(6))
    soon, later = bench.add(run_at=0.6), bench.add(run_at=30)
    host = somebody(bench.engine)
    host("update vk_jobs set lease_until = lease_until + interval '1 s' where id = :id", id=moved.id)
    host("update vk_jobs set status = 'cancelled' where id = :id", id=cancelled.id)
    host("update vk_jobs set status = 'running' where id = :id", id=running.id)
    host("delete from vk_jobs where id = :id", id=gone.id)
    with bench.engine.connect() as conn:
        claim = ledger.claim(conn, here.id, moment(here.lease_until or ""), lease=30, by="another task")
    assert claim is not None
    with bench.heartbeat.hold(claim, 30), locking(database_url, locked), pytest.raises(Exception, match="lock"):
        bench.run_all(good[0], moved, cancelled, good[1], running, locked, gone, here, soon, later, good[2])
    assert started == [*(row.id for row in good), soon.id]
    assert states(bench, [*good, soon]) == [DONE] * 4
    assert states(bench, [moved, cancelled, running, here, locked, later]) == [
        ("pending", 0), ("cancelled", 0), ("running", 0), ("running", 0), ("pending", 0), ("pending", 0),
    ]  # fmt: skip
    assert bench.read(later).lease_until is None
    assert bench.read(here).claimed_by == "another task"
    assert bench.read(locked) == locked


def test_of_many_locked_rows_a_few_are_waited_for_and_all_are_named(bench: Bench, database_url: str) -> None:
    bench.handle(lambda job, _: None, bulk=20)
    rows = [bench.add() for _ in range(10)]
    began = time.monotonic()
    with (
        locking(database_url, *rows[1:9]),
        pytest.raises(JobsLocked, match=r"^8 of 10 jobs were not started") as caught,
    ):
        bench.run_all(*rows)
    assert time.monotonic() - began < 8 * 1.0  # the wait for each of them
    assert list(caught.value.ids) == [row.id for row in rows[1:9]]
    assert states(bench, rows) == [DONE, *[("pending", 0)] * 8, DONE]


def test_a_locked_table_is_waited_for_only_briefly(bench: Bench, database_url: str) -> None:
    bench.handle(lambda job, _: None, bulk=20)
    rows = [bench.add() for _ in range(3)]
    with connected(database_url) as conn, conn.execution_options(isolation_level="READ COMMITTED").begin():
        conn.execute(text("lock table vk_jobs in access exclusive mode"))
        free = threading.Timer(10, conn.rollback)  # who waits for it longer than briefly gets the rows
        free.start()
        with pytest.raises(JobsLocked, match=r"^3 jobs were not started: .*lock timeout") as caught:
            bench.run_all(*rows)
        free.cancel()
    assert list(caught.value.ids) == [row.id for row in rows]
    assert verdicts(bench.run_all(*rows)) == {"done": 3}


def test_a_locked_row_is_claimed_when_its_lock_goes_soon(bench: Bench, database_url: str) -> None:
    locked = bench.add()
    other = bench.add()
    release = threading.Event()

    def hold() -> None:
        with locking(database_url, locked):
            ready.set()
            release.wait(10)

    def handle(job: Job, _ctx: Context) -> None:
        if job.id == other.id:
            release.set()

    bench.handle(handle, bulk=20)
    ready = threading.Event()
    thread = threading.Thread(target=hold)
    thread.start()
    assert ready.wait(10)
    assert verdicts(bench.run_all(locked, other)) == {"done": 2}
    thread.join()


@pytest.mark.parametrize("as_list", [False, True], ids=["one by one", "as list"])
def test_a_row_that_is_locked_when_it_is_settled_is_settled_last(
    bench: Bench, database_url: str, *, as_list: bool
) -> None:
    rows = [bench.add() for _ in range(4)]
    locked = threading.Event()
    ready = threading.Event()

    def hold() -> None:
        assert ready.wait(10)
        with locking(database_url, rows[0], rows[2]):
            locked.set()
            wait_for(lambda: states(bench, [rows[1], rows[3]]) == [DONE, DONE], "those that are not locked")
            time.sleep(1.5)  # longer than a statement waits

    def handle(*_: object) -> None:
        ready.set()
        assert locked.wait(10)

    bench.handle(handle, bulk=20, as_list=as_list)
    thread = threading.Thread(target=hold)
    thread.start()
    assert verdicts(bench.run_all(*rows, lease=3)) == {"done": 4}
    thread.join()
    assert states(bench, rows) == [DONE] * 4


def test_what_waits_for_its_lock_keeps_its_lease(bench: Bench, database_url: str) -> None:
    """The first is locked for longer than the second's lease, which is renewed meanwhile."""
    first, second = bench.add(), bench.add()
    locked, ready = threading.Event(), threading.Event()

    def hold() -> None:
        assert ready.wait(10)
        with locking(database_url, first):
            with locking(database_url, second):
                locked.set()
                time.sleep(0.3)
            token = bench.read(second).lease_until
            wait_for(lambda: bench.read(second).lease_until != token, "a renewal or a settling")

    def handle(*_: object) -> None:
        ready.set()
        assert locked.wait(10)

    bench.handle(handle, bulk=20)
    thread = threading.Thread(target=hold)
    thread.start()
    assert verdicts(bench.run_all(first, second, lease=2)) == {"done": 2}
    thread.join()


FORGED: dict[str, list[Any]] = {
    "no number": ["x"],
    "too large": [10**30],
    "empty": [""],
    "ten thousand": list(range(-10_000, 0)),
}


@pytest.mark.parametrize("name", [name for name in FORGED if name != "ten thousand"])
def test_an_id_that_is_none_keeps_no_other_from_its_claim(bench: Bench, name: str) -> None:
    bench.handle(noop, bulk=10)
    rows = [bench.add(), bench.add()]
    token = moment(rows[0].lease_until or "")
    leases = [(rows[0].id, token), *((id, token) for id in FORGED[name])]
    leases.append((rows[1].id, moment(rows[1].lease_until or "")))
    outcomes = bench.bulk().run(leases)
    assert verdicts(outcomes) == {"done": 2, "lease moved on": len(FORGED[name])}
    assert states(bench, rows) == [DONE, DONE]


def test_an_id_that_is_repeated_or_written_in_another_way_is_run_once(bench: Bench) -> None:
    started: list[Any] = []
    bench.handle(lambda job, _: started.append(job.id), bulk=10)
    row, other = bench.add(), bench.add()
    token, another = moment(row.lease_until or ""), moment(other.lease_until or "")
    ids = [row.id, row.id, str(row.id), row.id]
    bench.bulk().run([*((id, token) for id in ids), (f"0{other.id}", another)])
    assert sorted(started) == [row.id, other.id]
    assert states(bench, [row, other]) == [DONE, DONE]


def test_ten_thousand_ids_that_name_no_job_harm_none(bench: Bench) -> None:
    bench.handle(noop, bulk=10)
    row = bench.add()
    token = moment(row.lease_until or "")
    leases = [*((id, token) for id in FORGED["ten thousand"]), (row.id, token)]
    assert verdicts(bench.bulk().run(leases)) == {"done": 1, "lease moved on": 10_000}


# In time


def test_what_is_done_is_settled_while_others_still_run(bench: Bench) -> None:
    rows = [bench.add() for _ in range(4)]
    seen: list[list[tuple[str, int]]] = []

    def handle(job: Job, _ctx: Context) -> None:
        if job.id == rows[2].id:
            wait_for(lambda: states(bench, rows[:2]) == [DONE, DONE], "the settling of those before")
            seen.append(states(bench, rows))

    bench.handle(handle, bulk=10)
    assert verdicts(bench.run_all(*rows)) == {"done": 4}
    assert seen == [[DONE, DONE, ("running", 0), ("running", 0)]]


def test_without_a_thread_all_is_settled_in_the_end(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    bench.handle(noop, bulk=10)
    rows = [bench.add() for _ in range(3)]
    monkeypatch.setattr(bulk, "_meanwhile", bulk._Meanwhile())
    monkeypatch.setattr(threading.Thread, "start", start)
    assert verdicts(bench.run_all(*rows)) == {"done": 3}
    assert states(bench, rows) == [DONE] * 3


@pytest.mark.parametrize("as_list", [False, True], ids=["one by one", "as list"])
def test_all_jobs_of_a_message_are_renewed_while_one_runs(bench: Bench, *, as_list: bool) -> None:
    rows = [bench.add() for _ in range(3)]

    def handle(what: Any, _ctx: Context) -> None:
        if as_list or what.id == rows[0].id:
            tokens = [bench.read(row).lease_until for row in rows]
            wait_for(
                lambda: all(bench.read(row).lease_until != token for row, token in zip(rows, tokens, strict=True)),
                "the renewal of all",
            )

    bench.handle(handle, bulk=10, as_list=as_list)
    assert verdicts(bench.run_all(*rows, lease=2)) == {"done": 3}


def test_one_that_has_lost_its_lease_before_its_turn_is_not_started(bench: Bench) -> None:
    rows = [bench.add() for _ in range(3)]
    started: list[Any] = []
    lose_it = lose(bench)

    def handle(job: Job, ctx: Context) -> None:
        started.append(job.id)
        if job.id == rows[0].id:
            lose_it(Job(rows[1].id, "job", "r", job.run_at, 0, None), ctx)
            token = bench.read(rows[2]).lease_until
            wait_for(lambda: bench.read(rows[2]).lease_until != token, "a renewal")
            time.sleep(0.2)  # its answer is on the way

    bench.handle(handle, bulk=10)
    assert verdicts(bench.run_all(*rows, lease=2)) == {"done": 2, "lease lost": 1}
    assert started == [rows[0].id, rows[2].id]


def test_where_a_process_is_shows_from_outside(bench: Bench) -> None:
    rows = [bench.add() for _ in range(3)]
    seen: list[list[bool]] = []
    pid = os.getpid()

    def look(*_: object) -> None:
        seen.append([bulk.position.is_at(pid, number) for number in range(3)])

    bench.handle(look, bulk=10)
    bench.handle(look, "list", bulk=10, as_list=True)
    bench.run_all(*rows)
    look()
    listed = [bench.add(kind="list") for _ in range(3)]
    bench.run_all(*listed)
    look()
    late = bench.add(run_at=0.3)
    bench.run_all(rows[0], rows[1], late)
    none = [False] * 3
    assert seen == [[True, False, False], [False, True, False], [False, False, True], none, [True] * 3, none,
                    [False, False, True]]  # fmt: skip
    assert not bulk.position.is_at(pid + 1, 0)
    assert not bulk.position.is_at(pid + 4096, 0)


# As a list


def test_a_list_is_handed_over_at_once_and_in_order(bench: Bench) -> None:
    told: list[list[Any]] = []

    def handle(jobs: list[Job], ctx: Context) -> None:
        told.append([job.id for job in jobs])
        assert not ctx.lease_lost

    bench.handle(handle, bulk=10, as_list=True)
    rows = [bench.add() for _ in range(4)]
    assert verdicts(bench.run_all(*reversed(rows))) == {"done": 4}
    assert told == [[row.id for row in reversed(rows)]]


@pytest.mark.parametrize("session", [False, True], ids=["without session", "with session"])
def test_a_list_handler_says_of_each_that_is_not_done_what_ended_it(bench: Bench, *, session: bool) -> None:
    rows = [bench.add() for _ in range(5)]
    ends = {rows[1].id: ValueError("x"), rows[2].id: Snooze(timedelta(hours=1)), rows[3].id: GiveUp("y")}

    def handle(jobs: list[Job], ctx: Context) -> Mapping[Any, BaseException]:
        if session:
            write_all([job for job in jobs if job.id not in ends], ctx)
        return ends

    bench.handle(handle, bulk=10, as_list=True)
    assert verdicts(bench.run_all(*rows)) == {"done": 2, "retrying": 1, "snoozed": 1, "failed": 1}
    assert states(bench, rows) == [DONE, RETRIED, ("pending", 0), ("failed", 1), DONE]
    assert effects(bench) == ([rows[0].id, rows[4].id] if session else [])


def test_if_no_job_of_a_list_is_done_nothing_is_written(bench: Bench) -> None:
    def handle(jobs: list[Job], ctx: Context) -> Mapping[Any, BaseException]:
        write_all(jobs, ctx)
        return {job.id: ValueError("x") for job in jobs}

    bench.handle(handle, bulk=10, as_list=True)
    rows = [bench.add() for _ in range(2)]
    assert verdicts(bench.run_all(*rows)) == {"retrying": 2}
    assert effects(bench) == []


@pytest.mark.parametrize(
    "wrong",
    [True, 0, "done", [], {4711: ValueError("x")}, {None: ValueError("x")}, lambda ids: {ids[0]: "failed"},
     lambda ids: {ids[0]: None}, lambda ids: {ids[0]: ValueError}, lambda ids: {str(ids[0]): ValueError("x")},
     lambda ids: ids],
)  # fmt: skip
def test_what_a_list_handler_may_not_return_fails_all_with_a_word(bench: Bench, wrong: Any) -> None:
    def handle(jobs: list[Job], ctx: Context) -> object:
        write_all(jobs, ctx)
        return wrong([job.id for job in jobs]) if callable(wrong) else wrong

    bench.handle(handle, bulk=10, as_list=True)
    rows = [bench.add() for _ in range(2)]
    assert verdicts(bench.run_all(*rows)) == {"retrying": 2}
    assert states(bench, rows) == [RETRIED] * 2
    assert "returns None or {job.id: exception}" in (bench.read(rows[0]).last_error or "")
    assert effects(bench) == []


def test_an_empty_mapping_says_that_all_is_done(bench: Bench) -> None:
    bench.handle(lambda *_: {}, bulk=10, as_list=True)
    assert verdicts(bench.run_all(bench.add(), bench.add())) == {"done": 2}


@pytest.mark.parametrize(
    ("error", "verdict", "state"),
    [
        (ValueError("x"), Verdict.RETRYING, RETRIED),
        (SystemExit(1), Verdict.RETRYING, RETRIED),
        (GiveUp("x"), Verdict.FAILED, ("failed", 1)),
        (Snooze(timedelta(hours=1)), Verdict.SNOOZED, ("pending", 0)),
    ],
)
def test_what_a_list_handler_raises_is_so_for_all(
    bench: Bench, error: BaseException, verdict: Verdict, state: tuple[str, int]
) -> None:
    def handle(jobs: list[Job], ctx: Context) -> None:
        write_all(jobs, ctx)
        raise error

    bench.handle(handle, bulk=10, as_list=True)
    rows = [bench.add() for _ in range(3)]
    assert verdicts(bench.run_all(*rows)) == {str(verdict): 3}
    assert states(bench, rows) == [state] * 3
    assert effects(bench) == []


def test_a_payload_that_cannot_be_decoded_leaves_its_job_out_of_the_list(bench: Bench) -> None:
    told: list[int] = []
    bench.handle(lambda jobs, _: told.append(len(jobs)), bulk=10, as_list=True)
    rows = [bench.add() for _ in range(3)]
    spoil = "update vk_jobs set payload = cast(repeat('9', 5000) as jsonb) where id = :id"
    somebody(bench.engine)(spoil, id=rows[1].id)
    assert verdicts(bench.run_all(*rows)) == {"done": 2, "retrying": 1}
    assert states(bench, rows) == [DONE, RETRIED, DONE]
    assert told == [2]
    row = bench.add()
    somebody(bench.engine)(spoil, id=row.id)
    assert verdicts(bench.run_all(row)) == {"retrying": 1}
    assert told == [2]


def test_the_writes_of_a_list_and_its_settling_are_one_transaction(bench: Bench) -> None:
    rows = [bench.add() for _ in range(3)]

    def handle(jobs: list[Job], ctx: Context) -> None:
        write_all(jobs, ctx)
        assert effects(bench) == []

    bench.handle(handle, bulk=10, as_list=True)
    assert verdicts(bench.run_all(*rows)) == {"done": 3}
    assert effects(bench) == [row.id for row in rows]


def test_one_lost_lease_takes_the_writes_of_a_list_and_costs_the_others_nothing(bench: Bench) -> None:
    rows = [bench.add(attempts=number, last_error="before" if number else None) for number in range(4)]
    lose_it = lose(bench)

    def handle(jobs: list[Job], ctx: Context) -> None:
        write_all(jobs, ctx)
        lose_it(jobs[2], ctx)

    bench.handle(handle, bulk=10, as_list=True)
    assert verdicts(bench.run_all(*rows)) == {"snoozed": 3, "lease lost": 1}
    assert effects(bench) == []
    for number in (0, 1, 3):
        after = bench.read(rows[number])
        assert after == rows[number]._replace(lease_until=None, updated_at=after.updated_at)


def test_a_list_whose_settling_is_refused_fails_as_a_whole_without_effects(bench: Bench) -> None:
    bench.handle(write_all, bulk=10, as_list=True)
    rows = [bench.add(ref_id="it" if number == 1 else "r") for number in range(3)]
    with refusing(bench.engine, "new.status = 'done' and new.ref_id = 'it'"):
        assert verdicts(bench.run_all(*rows)) == {"retrying": 3}
    assert states(bench, rows) == [RETRIED] * 3
    assert effects(bench) == []


def test_a_single_job_of_a_list_kind_is_a_list_of_one(bench: Bench) -> None:
    told: list[int] = []

    def handle(jobs: list[Job], _ctx: Context) -> Mapping[Any, BaseException]:
        told.append(len(jobs))
        return {job.id: GiveUp("x") for job in jobs if job.ref_id == "it"}

    bench.handle(handle, bulk=10, as_list=True)
    good, bad = bench.add(), bench.add(ref_id="it")
    assert (bench.run(good).verdict, bench.run(bad).verdict) == (Verdict.DONE, Verdict.FAILED)
    assert told == [1, 1]


def test_a_list_job_keeps_what_full_rows_have(bench: Bench) -> None:
    bench.handle(noop, bulk=10, as_list=True)
    row = bench.add(**full("leased", kind="job"))
    bench.run_all(row)
    after = bench.read(row)
    kept = ("id", "kind", "ref_id", "run_at", "attempts", "last_error", "payload", "unique_key")
    assert [getattr(after, name) for name in kept] == [getattr(row, name) for name in kept]
    assert (after.status, after.lease_until, after.claimed_by) == ("done", None, BY)


# While Postgres is away


def events(caplog: pytest.LogCaptureFixture) -> set[str]:
    return {record.__dict__["event"] for record in caplog.records}


FORMS = pytest.mark.parametrize(
    ("as_list", "session"), [(False, False), (False, True), (True, False), (True, True)],
    ids=["one by one", "one by one, with session", "as list", "as list, with session"],
)  # fmt: skip


def counted(bench: Bench, started: list[Any], *, as_list: bool, session: bool) -> None:
    def handle(job: Job, ctx: Context) -> None:
        started.append(job.id)
        if session:
            write(job, ctx)

    def handle_all(jobs: list[Job], ctx: Context) -> None:
        for job in jobs:
            handle(job, ctx)

    bench.handle(handle_all if as_list else handle, bulk=10, as_list=as_list)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@FORMS
def test_a_claim_of_many_that_is_cut_off_starts_each_once(
    bench: Bench, database_url: str, *, as_list: bool, session: bool, after: bool
) -> None:
    started: list[Any] = []
    counted(bench, started, as_list=as_list, session=session)
    rows = [bench.add() for _ in range(3)]
    with cut_once(bench.engine, database_url, "execute vkjobs_claim_all", after=after) as cut:
        assert verdicts(bench.run_all(*rows)) == {"done": 3}
    assert len(cut) == 1
    assert started == [row.id for row in rows]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("as_list", [False, True], ids=["one by one", "as list"])
def test_a_settling_of_many_that_is_cut_off_is_made_again_or_found_done(
    bench: Bench, database_url: str, caplog: pytest.LogCaptureFixture, *, as_list: bool, after: bool
) -> None:
    started: list[Any] = []
    counted(bench, started, as_list=as_list, session=False)
    rows = [bench.add() for _ in range(3)]
    with cut_once(bench.engine, database_url, "execute vkjobs_settle_all_done", after=after) as cut:
        assert verdicts(bench.run_all(*rows)) == {"done": 3}
    assert len(cut) == 1
    assert started == [row.id for row in rows]
    assert states(bench, rows) == [DONE] * 3
    assert events(caplog) == {"waiting for postgres"}


@FORMS
def test_a_commit_of_many_that_is_still_under_way_when_the_connection_breaks_is_waited_for(
    bench: Bench, database_url: str, caplog: pytest.LogCaptureFixture, *, as_list: bool, session: bool
) -> None:
    started: list[Any] = []
    counted(bench, started, as_list=as_list, session=session)
    rows = [bench.add() for _ in range(3)]
    with commits_that_break(bench.engine, database_url):
        assert verdicts(bench.run_all(*rows)) == {"done": 3}
    assert started == [row.id for row in rows]
    assert effects(bench) == [row.id for row in rows] * session
    assert not {"job failed", "lease lost"} & events(caplog)


@pytest.mark.parametrize("as_list", [False, True], ids=["one by one", "as list"])
def test_a_commit_of_writes_whose_answer_is_lost_is_asked_again(
    bench: Bench, database_url: str, caplog: pytest.LogCaptureFixture, *, as_list: bool
) -> None:
    started: list[Any] = []
    counted(bench, started, as_list=as_list, session=True)
    rows = [bench.add() for _ in range(3)]
    with commits_without_answer(bench.engine, database_url) as lost:
        assert verdicts(bench.run_all(*rows)) == {"done": 3}
    assert lost
    assert started == [row.id for row in rows]
    assert effects(bench) == [row.id for row in rows]
    assert not {"job failed", "lease lost"} & events(caplog)


def test_a_list_whose_session_is_cut_off_fails_as_a_whole_without_effects(bench: Bench, database_url: str) -> None:
    counted(bench, [], as_list=True, session=True)
    rows = [bench.add() for _ in range(3)]
    with cut_once(bench.engine, database_url, "set status = 'done'", after=False) as cut:
        assert verdicts(bench.run_all(*rows)) == {"retrying": 3}
    assert len(cut) == 1
    assert states(bench, rows) == [RETRIED] * 3
    assert effects(bench) == []


@pytest.mark.timeout(60)
def test_many_jobs_are_not_started_without_postgres_and_their_message_ends_in_one_line() -> None:
    away = create_engine(database.url_of("postgresql:///x?host=/nowhere"), isolation_level="AUTOCOMMIT")
    impatient = Bench(away, lease=1.0, horizon=0.5)
    now = datetime.now(UTC)
    with pytest.raises(DatabaseUnavailable, match=r"^2 jobs were not started: .*/nowhere.*$"):
        impatient.bulk().run([(5, now), (6, now)])


def test_one_that_waits_for_postgres_in_vain_ends_the_message_when_the_leases_have_expired(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []

    def run(_self: Executor, id: Any, *_: Any, **__: Any) -> Outcome:
        tried.append(id)
        time.sleep(0.7)
        raise DatabaseUnavailable("away")

    impatient = Bench(bench.engine, lease=1.0, horizon=0.5)
    monkeypatch.setattr(Executor, "run", run)
    with pytest.raises(DatabaseUnavailable):
        impatient.bulk().run([(id, datetime.now(UTC)) for id in range(-9, 0)])
    assert tried == [-9, -8]
