"""Whatever a handler returns or raises becomes one outcome, one settling and one line of the log."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn, cast
from uuid import uuid4

import pytest
from bench import BY, Bench, somebody
from original import connected, execute, make_original
from places import Near, assert_changed, full, moment, timed
from rows import Row
from sqlalchemy import Connection, Engine, make_url
from statements import watching

from vkjobs import database
from vkjobs.execute import Outcome, Verdict
from vkjobs.handlers import Context, GiveUp, Job, Snooze
from vkjobs.local import Postgres
from vkjobs.migrations import migrate

FREED = {
    "status": "pending", "lease_until": None, "claimed_by": None, "started_at": None, "claimed_until": None,
    "updated_at": Near(0),
}  # fmt: skip


@pytest.fixture(scope="module")
def database_url(postgres: Postgres) -> str:
    return postgres.create_database(f"execute_{uuid4().hex}", template="migrated")


@pytest.fixture(scope="module")
def engine(database_url: str) -> Iterator[Engine]:
    engine = database.engine(database_url, 5)
    yield engine
    engine.dispose()


@pytest.fixture
def bench(engine: Engine, caplog: pytest.LogCaptureFixture) -> Bench:
    caplog.set_level(logging.INFO, "vkjobs")
    with engine.connect() as conn:
        conn.exec_driver_sql("delete from vk_jobs")
    return Bench(engine)


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [getattr(record, "event", "") for record in caplog.records]


def raising(error: BaseException) -> Callable[[Job, Context], NoReturn]:
    def handle(_job: Job, _ctx: Context) -> NoReturn:
        raise error

    return handle


def returning(value: object) -> Callable[[Job, Context], object]:
    return lambda _job, _ctx: value


# Returned


@pytest.mark.parametrize(
    "value", [None, {1, 2}, object(), ValueError("returned"), "x" * 5_000_000, "\0\ud800", lambda: None, NotImplemented]
)
def test_a_handler_may_return_anything(bench: Bench, caplog: pytest.LogCaptureFixture, value: object) -> None:
    bench.handle(returning(value))
    row = bench.add(**full("leased", kind="job"))
    with bench.engine.connect() as conn, timed(conn) as span:
        outcome = bench.run(row)
    assert outcome == Outcome(Verdict.DONE)
    after = bench.read(row)
    assert_changed(
        row, after, span, status="done", lease_until=None, updated_at=Near(0), started_at=Near(0), claimed_by=BY,
        claimed_until=Near(30),
    )  # fmt: skip
    assert caplog.records == []


def test_a_handler_may_return_an_open_file(bench: Bench, tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        assert bench.run_new(returning(file))[0].verdict is Verdict.DONE
        assert not file.closed


def test_a_handler_is_told_what_the_row_says(bench: Bench) -> None:
    told: list[Job] = []

    def handle(job: Job, ctx: Context) -> None:
        told.append(job)
        assert ctx.settings is bench.executor.settings
        assert not ctx.lease_lost

    _, row = bench.run_new(handle, ref_id="r9", attempts=3, payload={"a": [1]})
    assert told == [Job(row.id, "job", "r9", moment(row.run_at), 3, {"a": [1]})]


# Raised


class StrRaises(Exception):
    def __str__(self) -> str:
        raise KeyError("no")


class StrIsNoText(Exception):
    def __str__(self) -> str:
        return cast(str, 1)


class Unpicklable(Exception):
    def __init__(self, *, needed: object) -> None:
        super().__init__("unpicklable")
        self.needed = needed

    def __reduce__(self) -> NoReturn:
        raise TypeError("never")


class Bare(BaseException):
    pass


def noted(error: Exception, note: str) -> Exception:
    error.add_note(note)
    return error


def chained(length: int) -> Exception:
    error = ValueError("0")
    for number in range(1, length):
        following = ValueError(str(number))
        following.__cause__ = error
        error = following
    return error


def circular() -> Exception:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    return one


RAISED: list[tuple[BaseException, str]] = [
    (ValueError("plain"), "ValueError: plain"),
    (ValueError(), "ValueError"),
    (ValueError("two\nlines"), "ValueError: two\nlines"),
    (ValueError("a\0b"), "ValueError: a\\x00b"),
    (ValueError("lone \ud800 \udfff"), "ValueError: lone \\ud800 \\udfff"),
    (ValueError("🦆 %s %(x)s :id {} \\"), "ValueError: 🦆 %s %(x)s :id {} \\"),
    (noted(ValueError("noted"), "\0 \ud800"), "ValueError: noted"),
    (StrRaises(), "StrRaises: (no message: its __str__ raised KeyError)"),
    (StrIsNoText(), "StrIsNoText: (no message: its __str__ raised TypeError)"),
    (Unpicklable(needed=lambda: None), "Unpicklable: unpicklable"),
    (Bare("bare"), "Bare: bare"),
    (SystemExit(3), "SystemExit: 3"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),
    (GeneratorExit("g"), "GeneratorExit: g"),
    (ExceptionGroup("many", [ValueError("\0"), StrRaises()]), "ExceptionGroup: many (2 sub-exceptions)"),
    (BaseExceptionGroup("all", [SystemExit(1)]), "BaseExceptionGroup: all (1 sub-exception)"),
    (chained(3000), "ValueError: 2999"),
    (circular(), "ValueError: one"),
    (UnicodeDecodeError("utf-8", b"\xff\x00", 0, 1, "\0"), "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff"),
]


@pytest.mark.parametrize(("error", "beginning"), RAISED, ids=[beginning[:30] for _, beginning in RAISED])
def test_whatever_a_handler_raises_is_one_failed_attempt_logged_once(
    bench: Bench, caplog: pytest.LogCaptureFixture, error: BaseException, beginning: str
) -> None:
    bench.handle(raising(error))
    row = bench.add(**full("leased", kind="job", attempts=2))
    with bench.engine.connect() as conn, timed(conn) as span:
        outcome = bench.run(row)
    after = bench.read(row)
    assert_changed(row, after, span, **FREED, attempts=3, run_at=Near(120), last_error=after.last_error)
    assert after.last_error is not None
    assert after.last_error.startswith(beginning)
    assert "raise error\n" in after.last_error
    assert outcome.verdict is Verdict.RETRYING
    assert outcome.detail.startswith(f"in 120 s: {beginning}")
    [record] = caplog.records
    told = {name: getattr(record, name) for name in ("event", "job_id", "kind", "ref_id", "attempts", "final")}
    assert told == {
        "event": "job failed", "job_id": row.id, "kind": "job", "ref_id": "r", "attempts": 3, "final": False,
    }  # fmt: skip
    assert record.__dict__["error"].startswith(beginning)
    assert "\n" not in record.getMessage()
    assert bench.run_new(kind="job", lease_until=60, attempts=4)[0].verdict is Verdict.FAILED


def test_a_failing_job_harms_no_other(bench: Bench) -> None:
    for number, (error, _) in enumerate(RAISED):
        bench.handle(raising(error), kind=f"k{number}")
        assert bench.run_new(kind=f"k{number}")[0].verdict is Verdict.RETRYING
    assert bench.run_new(returning(None))[0].verdict is Verdict.DONE


def test_of_megabytes_of_error_head_and_tail_are_kept(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    _, row = bench.run_new(raising(ValueError("<head>" + "x" * 5_000_000 + "<tail>")))
    assert row.last_error is not None
    assert row.last_error.startswith("ValueError: <head>xxx")
    assert row.last_error.rstrip().endswith("xxx<tail>")
    assert 9_000 < len(row.last_error) <= 10_000
    assert len(caplog.text) < 5_000


def test_endless_recursion_is_a_failed_attempt(bench: Bench) -> None:
    def handle(job: Job, ctx: Context) -> None:
        handle(job, ctx)

    outcome, row = bench.run_new(handle)
    assert outcome.verdict is Verdict.RETRYING
    assert (row.last_error or "").startswith("RecursionError: maximum recursion depth exceeded")


def test_the_last_attempt_ends_the_job_and_is_an_error_in_the_log(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.handle(raising(ValueError("again")), max_attempts=2, backoff=7)
    levels = []
    for attempts in (0, 1):
        caplog.clear()
        row = bench.add(**full("leased", kind="job", attempts=attempts, unique_key=None))
        with bench.engine.connect() as conn, timed(conn) as span:
            outcome = bench.run(row)
        [record] = caplog.records
        levels.append(record.levelno)
    assert levels == [logging.WARNING, logging.ERROR]
    assert outcome == Outcome(Verdict.FAILED, "ValueError: again")
    after = bench.read(row)
    assert_changed(
        row, after, span, status="failed", lease_until=None, updated_at=Near(0), started_at=Near(0), claimed_by=BY,
        claimed_until=Near(30), attempts=2, run_at=Near(14), last_error=after.last_error,
    )  # fmt: skip


def test_giving_up_ends_the_job_at_its_first_attempt(bench: Bench) -> None:
    outcome, row = bench.run_new(raising(GiveUp("no such customer")))
    assert outcome == Outcome(Verdict.FAILED, "GiveUp: no such customer")
    assert (row.status, row.attempts) == ("failed", 1)
    assert (row.last_error or "").startswith("GiveUp: no such customer\n")


class Liar(Exception):
    """Says that it is of another class."""

    def __init__(self, said: type) -> None:
        self.said = said

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self.said


@pytest.mark.parametrize("said", [Snooze, GiveUp])
def test_an_exception_that_lies_about_its_class_is_a_failed_attempt(bench: Bench, said: type) -> None:
    outcome, row = bench.run_new(raising(Liar(said)))
    assert outcome.verdict is Verdict.RETRYING
    assert (row.status, row.attempts) == ("pending", 1)


def test_an_error_is_kept_that_the_databases_encoding_lacks(postgres: Postgres, database_url: str) -> None:
    name = f"latin_{uuid4().hex}"
    execute(database_url, f"create database {name} encoding latin1 template template0")
    url = make_url(database_url).set(database=name).render_as_string(hide_password=False)
    migrate(url)
    engine = database.engine(url, 2)
    outcome, row = Bench(engine).run_new(raising(ValueError("Ärger 🦆")))
    engine.dispose()
    assert outcome.verdict is Verdict.RETRYING
    assert (row.last_error or "").startswith("ValueError: \\xc4rger \\U0001f986\n")


def test_a_payload_that_python_cannot_read_is_a_failed_attempt(bench: Bench) -> None:
    bench.handle(raising(AssertionError("started")))
    row = bench.add()
    somebody(bench.engine)("update vk_jobs set payload = cast(repeat('9', 5000) as jsonb)")
    outcome = bench.run(row)
    assert outcome.verdict is Verdict.RETRYING
    assert "integer string conversion" in outcome.detail
    assert somebody(bench.engine)("select attempts from vk_jobs") == 1


# Snoozed


@pytest.mark.parametrize(
    ("until", "run_at"),
    [
        (timedelta(seconds=90), Near(90)),
        (timedelta(microseconds=1), Near(0.000_001)),
        (datetime(2040, 1, 2, 3, 4, 5, 678901, tzinfo=UTC), "2040-01-02 03:04:05.678901+00"),
        (datetime(1999, 1, 1, tzinfo=UTC), "1999-01-01 00:00:00+00"),
    ],
)
def test_a_snoozed_job_waits_until_the_time_and_no_attempt_is_counted(
    bench: Bench, caplog: pytest.LogCaptureFixture, until: timedelta | datetime, run_at: object
) -> None:
    bench.handle(raising(Snooze(until)))
    row = bench.add(**full("leased", kind="job"))
    with bench.engine.connect() as conn, timed(conn) as span:
        outcome = bench.run(row)
    assert outcome == Outcome(Verdict.SNOOZED, str(Snooze(until)))
    assert_changed(row, bench.read(row), span, **FREED, run_at=run_at)
    assert events(caplog) == ["job snoozed"]


def test_a_snooze_beyond_the_end_of_time_is_a_failed_attempt(bench: Bench) -> None:
    outcome, row = bench.run_new(raising(Snooze(timedelta.max)))
    assert outcome.verdict is Verdict.RETRYING
    assert (row.status, row.attempts) == ("pending", 1)


# Without a handler


@pytest.mark.parametrize("attempts", [0, 4])
def test_an_unknown_kind_fails_in_the_words_of_the_original(bench: Bench, attempts: int) -> None:
    _, row = bench.run_new(kind="nope", attempts=attempts)
    assert row.last_error is not None
    assert row.last_error.splitlines()[0] == f"UnhandledKind: Unhandled job kind: nope, id: {row.id}"
    assert row.status == ("failed" if attempts else "pending")


def test_an_unknown_kind_without_ref_id_fails_in_the_words_of_the_original(bench: Bench) -> None:
    _, row = bench.run_new(kind="nope", ref_id=None)
    assert row.last_error is not None
    assert row.last_error.splitlines()[0] == f"MissingRefId: vk_jobs.ref_id missing for nope, id: {row.id}"


def test_a_known_kind_may_do_without_ref_id(bench: Bench) -> None:
    assert bench.run_new(returning(None), ref_id=None)[0].verdict is Verdict.DONE


# Lost


STEALS = {
    "the original took it over": "status = 'running', lease_until = now() + interval '5 min'",
    "it was reaped": "status = 'failed', lease_until = null, attempts = 5",
    "it was freed": "status = 'pending', lease_until = null",
    "it is over": "status = 'done', lease_until = null",
}
ENDS: dict[str, Any] = {
    "returns": returning(None),
    "raises": raising(ValueError("late")),
    "snoozes": raising(Snooze(timedelta(seconds=9))),
    "gives up": raising(GiveUp("late")),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("steal", STEALS)
def test_a_worker_that_lost_its_lease_changes_nothing_and_says_so_once(
    bench: Bench, caplog: pytest.LogCaptureFixture, steal: str, end: str
) -> None:
    stolen: list[Row] = []

    def handle(job: Job, ctx: Context) -> object:
        somebody(bench.engine)(f"update vk_jobs set {STEALS[steal]} where id = :id", id=job.id)
        stolen.append(bench.read(row))
        return ENDS[end](job, ctx)

    bench.handle(handle)
    row = bench.add()
    assert bench.run(row).verdict is Verdict.LEASE_LOST
    assert [bench.read(row)] == stolen
    [lost] = [record for record in caplog.records if getattr(record, "event", "") == "lease lost"]
    assert (lost.__dict__["job_id"], lost.__dict__["kind"], lost.__dict__["ref_id"]) == (row.id, "job", "r")


def test_a_settling_of_a_row_that_is_no_longer_there_is_a_lost_lease(bench: Bench) -> None:
    bench.handle(lambda job, _: somebody(bench.engine)("delete from vk_jobs where id = :id", id=job.id))
    assert bench.run(bench.add()).verdict is Verdict.LEASE_LOST


@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_renewed_any_more_when_it_is_settled(bench: Bench, end: str) -> None:
    held: list[bool] = []

    def handle(job: Job, ctx: Context) -> object:
        assert bench.heartbeat.holds(job.id)
        held.clear()
        return ENDS[end](job, ctx)

    bench.handle(handle)
    row = bench.add()
    with watching(bench.engine, before=lambda *_: held.append(bench.heartbeat.holds(row.id))):
        assert bench.run(row).verdict is not Verdict.LEASE_LOST
    assert held
    assert not any(held)


# Time limits


class SoftTimeLimitExceeded(Exception):
    pass


@pytest.fixture
def soft_limit() -> Iterator[Callable[[], None]]:
    """Give what the soft limit does to a worker's child: a signal, whose handler raises."""

    def raise_it(*_: object) -> NoReturn:
        raise SoftTimeLimitExceeded

    previous = signal.signal(signal.SIGUSR1, raise_it)
    yield lambda: signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, previous)


def test_the_soft_limit_raises_in_the_handler(bench: Bench, soft_limit: Callable[[], None]) -> None:
    outcome, row = bench.run_new(lambda *_: soft_limit())
    assert outcome == Outcome(Verdict.RETRYING, "in 30 s: SoftTimeLimitExceeded")
    assert row.attempts == 1
    with pytest.raises(SoftTimeLimitExceeded):
        soft_limit()


@pytest.mark.parametrize(
    ("end", "verdict"), [("returns", "done"), ("raises", "retrying"), ("snoozes", "snoozed"), ("gives up", "failed")]
)
def test_the_soft_limit_does_not_disturb_the_settling(
    bench: Bench, soft_limit: Callable[[], None], end: str, verdict: str
) -> None:
    struck: list[str] = []

    def strike(_conn: Connection, statement: str) -> None:
        if struck:
            struck.append(statement)
            soft_limit()

    def handle(job: Job, ctx: Context) -> object:
        struck.append("from now on")
        return ENDS[end](job, ctx)

    bench.handle(handle)
    row = bench.add()
    with watching(bench.engine, before=strike, after=strike):
        assert bench.run(row).verdict == verdict
    assert len(struck) > 1
    assert "SoftTimeLimit" not in (bench.read(row).last_error or "")


def test_a_soft_limit_that_came_during_the_claim_raises_in_the_handler(
    bench: Bench, soft_limit: Callable[[], None]
) -> None:
    bench.handle(raising(AssertionError("started")))
    row = bench.add()
    struck: list[str] = []

    def strike(_conn: Connection, statement: str) -> None:
        if not struck:
            struck.append(statement)
            soft_limit()

    with watching(bench.engine, after=strike):
        assert bench.run(row) == Outcome(Verdict.RETRYING, "in 30 s: SoftTimeLimitExceeded")
    assert bench.read(row).attempts == 1


# Messages


@pytest.mark.parametrize("processes", [1, 2])
def test_of_a_message_that_arrives_twice_one_is_started(bench: Bench, engine: Engine, processes: int) -> None:
    started: list[object] = []
    both_arrived = threading.Barrier(2)
    claimed_once = threading.Event()

    def handle(job: Job, _: Context) -> None:
        started.append(job.id)
        assert claimed_once.wait(30)

    benches = [bench, bench] if processes == 1 else [bench, Bench(engine)]
    for each in benches[2 - processes :]:
        each.handle(handle)
    row = bench.add()

    def deliver(each: Bench) -> Verdict:
        both_arrived.wait(30)
        verdict = each.run(row).verdict
        if verdict is Verdict.MOVED_ON:
            claimed_once.set()
        return verdict

    with ThreadPoolExecutor() as threads:
        verdicts = set(threads.map(deliver, benches))
    assert verdicts == {Verdict.DONE, Verdict.MOVED_ON}
    assert started == [row.id]


def test_a_job_that_was_leased_again_while_it_runs_here_is_not_started_here_beside_itself(bench: Bench) -> None:
    started: list[object] = []

    def handle(job: Job, _: Context) -> None:
        started.append(job.id)
        again = "update vk_jobs set status = 'pending', lease_until = now() + interval '9 s' where id = :id"
        somebody(bench.engine)(again, id=job.id)
        leased = bench.read(row)
        assert bench.run(leased).verdict is Verdict.MOVED_ON
        assert bench.read(row) == leased

    bench.handle(handle)
    row = bench.add()
    assert bench.run(row).verdict is Verdict.LEASE_LOST
    assert started == [row.id]


@pytest.mark.parametrize(
    "columns",
    [
        {"lease_until": None},
        {"lease_until": 61},
        {"status": "cancelled"},
        {"status": "done"},
        {"status": "running", "claimed_until": 60},
    ],
)
def test_a_message_whose_row_moved_on_starts_nothing(bench: Bench, columns: dict[str, Any]) -> None:
    bench.handle(raising(AssertionError("started")))
    row = bench.add(**columns)
    outcome = bench.run(row._replace(lease_until="2040-01-02 03:04:05.678901+00"))
    assert outcome == Outcome(Verdict.MOVED_ON)
    assert bench.read(row) == row


FORGED_IDS: list[Any] = [
    "garbage", "", "1; drop table vk_jobs", "%s", ":id", -1, 0, 2**63, 2**200, "1e3", "\0", "\ud800", "🦆", True,
    "x" * 10_000,
]  # fmt: skip


@pytest.mark.parametrize("forged", FORGED_IDS, ids=lambda forged: ascii(forged)[:20])
def test_a_message_with_a_forged_id_starts_nothing(bench: Bench, forged: Any) -> None:
    bench.handle(raising(AssertionError("started")))
    row = bench.add()
    outcome = bench.run(row._replace(id=forged))
    assert outcome.verdict is Verdict.MOVED_ON
    assert bench.read(row) == row


@pytest.mark.parametrize("key", ["text primary key", "uuid primary key"])
def test_ids_may_be_texts_or_uuids_and_their_messages_forged_too(empty_database_url: str, key: str) -> None:
    make_original(empty_database_url, key)
    migrate(empty_database_url)
    engine = database.engine(empty_database_url, 3)
    bench = Bench(engine)
    bench.handle(raising(ValueError("once")), max_attempts=2)
    row = bench.add()
    for forged in FORGED_IDS:
        assert bench.run(row._replace(id=forged)).verdict is Verdict.MOVED_ON
    assert bench.run(row._replace(id=str(row.id))).verdict is Verdict.RETRYING
    with connected(empty_database_url) as conn:
        conn.exec_driver_sql("update vk_jobs set lease_until = now() + interval '60 s', run_at = now()")
    assert bench.run(bench.read(row)).verdict is Verdict.FAILED
    engine.dispose()


# Time


def test_a_job_that_is_due_within_a_second_is_waited_for_and_never_early(bench: Bench) -> None:
    outcome, row = bench.run_new(returning(None), run_at=0.3)
    assert outcome.verdict is Verdict.DONE
    assert moment(row.started_at or "") >= moment(row.run_at)


@pytest.mark.parametrize("run_at", [30, 7200, "infinity"])
def test_a_job_that_was_moved_to_later_is_freed_for_its_time(bench: Bench, run_at: object) -> None:
    bench.handle(raising(AssertionError("started")))
    row = bench.add(**full("leased", kind="job", run_at=run_at))
    with bench.engine.connect() as conn, timed(conn) as span:
        outcome = bench.run(row)
    assert outcome.verdict is Verdict.NOT_DUE
    assert_changed(row, bench.read(row), span, **FREED)


@pytest.mark.parametrize("run_at", ["-infinity", "4713-01-01 00:00:00+00 BC"])
def test_a_job_that_was_due_before_all_years_runs(bench: Bench, run_at: str) -> None:
    assert bench.run_new(returning(None), run_at=run_at)[0].verdict is Verdict.DONE
