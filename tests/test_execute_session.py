"""A handler's writes through its session are committed with the settling of its job, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn
from uuid import uuid4

import pytest
from bench import Bench, somebody
from original import execute
from sqlalchemy import Engine, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from vkjobs import database
from vkjobs.execute import Verdict
from vkjobs.handlers import Context, GiveUp, Job, Snooze
from vkjobs.local import Postgres


class Base(DeclarativeBase):
    pass


class Effect(Base):
    __tablename__ = "effects"
    id: Mapped[int] = mapped_column(primary_key=True)
    what: Mapped[str]


@pytest.fixture(scope="module")
def engine(postgres: Postgres) -> Iterator[Engine]:
    url = postgres.create_database(f"session_{uuid4().hex}", template="migrated")
    execute(
        url,
        # What a host may have set for its own sake.
        f"alter database {make_url(url).database} set default_transaction_isolation = 'repeatable read'",
        "create table effects (id serial primary key, what text not null unique deferrable initially deferred)",
    )
    engine = database.engine(url, 4)
    yield engine
    engine.dispose()


@pytest.fixture
def bench(engine: Engine) -> Bench:
    somebody(engine)("delete from vk_jobs")
    somebody(engine)("delete from effects")
    return Bench(engine)


def effects(bench: Bench) -> list[str]:
    with bench.engine.connect() as conn:
        return sorted(conn.scalars(text("select what from effects")))


def write(session: Session, what: str) -> None:
    session.execute(text("insert into effects (what) values (:what)"), {"what": what})


def writing(end: Callable[[Session], object]) -> Callable[[Job, Context], object]:
    """Return a handler that writes one effect and then does ``end``."""

    def handle(_job: Job, ctx: Context) -> object:
        write(ctx.session, "first")
        return end(ctx.session)

    return handle


def raising(error: BaseException) -> Callable[[Session], NoReturn]:
    def end(_session: Session) -> NoReturn:
        raise error

    return end


def test_effects_are_not_seen_before_the_job_is_done_and_there_when_it_is(bench: Bench) -> None:
    seen: list[tuple[list[str], str]] = []

    def handle(_job: Job, ctx: Context) -> None:
        write(ctx.session, "effect")
        ctx.session.add(Effect(what="mapped"))
        assert ctx.session is ctx.session
        seen.append((effects(bench), bench.read(row).status))

    bench.handle(handle)
    row = bench.add()
    assert bench.run(row).verdict is Verdict.DONE
    assert seen == [([], "running")]
    assert effects(bench) == ["effect", "mapped"]
    assert bench.read(row).status == "done"


def test_a_session_that_wrote_nothing_settles_too(bench: Bench) -> None:
    assert bench.run_new(lambda _, ctx: ctx.session)[0].verdict is Verdict.DONE
    assert bench.run_new(kind="job")[1].status == "done"


def test_a_session_reads_what_others_commit_whatever_the_databases_default(bench: Bench) -> None:
    def handle(_job: Job, ctx: Context) -> None:
        assert ctx.session.scalar(text("show transaction_isolation")) == "read committed"
        assert ctx.session.scalar(text("select count(*) from effects")) == 0
        somebody(bench.engine)("insert into effects (what) values ('somebody''s')")
        assert ctx.session.scalar(text("select count(*) from effects")) == 1

    assert bench.run_new(handle)[0].verdict is Verdict.DONE


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (ValueError("x"), Verdict.RETRYING),
        (SystemExit(), Verdict.RETRYING),
        (GiveUp("x"), Verdict.FAILED),
        (Snooze(timedelta(seconds=5)), Verdict.SNOOZED),
    ],
)
def test_what_was_written_is_rolled_back_if_the_job_is_not_done(
    bench: Bench, error: BaseException, verdict: Verdict
) -> None:
    assert bench.run_new(writing(raising(error)))[0].verdict is verdict
    assert effects(bench) == []


@pytest.mark.parametrize("end", [lambda _: None, raising(ValueError("x")), raising(Snooze(timedelta(seconds=5)))])
def test_what_was_written_is_rolled_back_if_the_lease_was_lost(bench: Bench, end: Callable[[Session], object]) -> None:
    def handle(job: Job, ctx: Context) -> object:
        write(ctx.session, "late")
        somebody(bench.engine)("update vk_jobs set lease_until = now() where id = :id", id=job.id)
        return end(ctx.session)

    outcome, row = bench.run_new(handle)
    assert outcome.verdict is Verdict.LEASE_LOST
    assert row.status == "running"
    assert effects(bench) == []


def then_fail(session: Session) -> None:
    session.commit()
    write(session, "second")
    session.commit()
    raise ValueError("after two commits")


def test_a_handlers_own_commit_commits_nothing_of_a_failed_job(bench: Bench) -> None:
    outcome, row = bench.run_new(writing(then_fail))
    assert outcome.verdict is Verdict.RETRYING
    assert (row.last_error or "").startswith("ValueError: after two commits")
    assert effects(bench) == []


def test_a_handlers_own_commit_is_not_seen_before_the_job_is_done(bench: Bench) -> None:
    seen: list[list[str]] = []

    def end(session: Session) -> None:
        session.commit()
        seen.append(effects(bench))
        write(session, "second")

    assert bench.run_new(writing(end))[0].verdict is Verdict.DONE
    assert seen == [[]]
    assert effects(bench) == ["first", "second"]


@pytest.mark.parametrize("undo", [Session.rollback, Session.close])
def test_a_handlers_own_rollback_takes_back_what_came_before_and_keeps_what_comes_after(
    bench: Bench, undo: Callable[[Session], None]
) -> None:
    def end(session: Session) -> None:
        undo(session)
        write(session, "second")

    assert bench.run_new(writing(end))[0].verdict is Verdict.DONE
    assert effects(bench) == ["second"]


def test_a_closed_session_settles(bench: Bench) -> None:
    outcome, row = bench.run_new(writing(lambda session: session.close()))
    assert outcome.verdict is Verdict.DONE
    assert row.status == "done"
    assert effects(bench) == []


def swallow(session: Session) -> None:
    with suppress(DBAPIError):
        session.execute(text("select 1 / 0"))


def test_an_error_of_the_database_that_was_swallowed_still_fails_the_attempt(bench: Bench) -> None:
    outcome, row = bench.run_new(writing(swallow))
    assert outcome.verdict is Verdict.RETRYING
    assert "InFailedSqlTransaction" in (row.last_error or "")
    assert (row.status, row.attempts) == ("pending", 1)
    assert effects(bench) == []


def test_an_error_undone_by_a_savepoint_harms_nothing(bench: Bench) -> None:
    def end(session: Session) -> None:
        with suppress(DBAPIError), session.begin_nested():
            write(session, "undone")
            session.execute(text("select 1 / 0"))

    assert bench.run_new(writing(end))[0].verdict is Verdict.DONE
    assert effects(bench) == ["first"]


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (lambda session: write(session, "first"), "IntegrityError"),  # deferred: refused by the commit
        (lambda session: session.add(Effect(what=None)), "IntegrityError"),  # refused by the flush before it
        (lambda session: session.add(Effect(what="\0")), "ValueError"),  # refused by psycopg2
        (lambda session: session.add(Effect(what="\ud800")), "UnicodeEncodeError"),
    ],
)
def test_what_the_commit_refuses_is_a_failed_attempt_without_effects(
    bench: Bench, last: Callable[[Session], None], words: str
) -> None:
    outcome, row = bench.run_new(writing(last))
    assert outcome.verdict is Verdict.RETRYING
    assert words in (row.last_error or "").splitlines()[0]
    assert (row.status, row.attempts, row.lease_until) == ("pending", 1, None)
    assert effects(bench) == []


def test_a_trigger_that_refuses_the_settling_is_a_failed_attempt(bench: Bench) -> None:
    execute(
        bench.engine.url.render_as_string(hide_password=False),
        """create or replace function refuse() returns trigger language plpgsql
            as $$ begin raise exception 'not this one'; end $$""",
        """create trigger refuse before update on vk_jobs
            for each row when (new.status = 'done') execute function refuse()""",
    )
    try:
        bench.handle(writing(lambda _: None), kind="writes")
        bench.handle(lambda _, __: None, kind="plain")
        for kind in ("writes", "plain"):
            outcome, row = bench.run_new(kind=kind)
            assert outcome.verdict is Verdict.RETRYING
            assert "not this one" in (row.last_error or "")
        assert effects(bench) == []
    finally:
        somebody(bench.engine)("drop trigger refuse on vk_jobs")


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("uses_session", "error"), [(True, None), (False, None), (True, ValueError("x")), (False, ValueError("x"))]
)
def test_a_job_needs_one_connection_at_most(bench: Bench, *, uses_session: bool, error: Exception | None) -> None:
    narrow = database.engine(bench.engine.url.render_as_string(hide_password=False), 1)
    alone = Bench(narrow)

    def handle(job: Job, ctx: Context) -> None:
        if uses_session:
            write(ctx.session, "effect")
            # Even if it locks its own row.
            ctx.session.execute(text("update vk_jobs set payload = '1' where id = :id"), {"id": job.id})
        else:
            assert narrow.pool.checkedout() == 0  # type: ignore[attr-defined]
        if error:
            raise error

    outcome, row = alone.run_new(handle)
    assert outcome.verdict is (Verdict.RETRYING if error else Verdict.DONE)
    kept = uses_session and not error
    assert effects(bench) == ["effect"] * kept
    assert row.payload == (1 if kept else None)
    assert narrow.pool.checkedout() == 0  # type: ignore[attr-defined]
    narrow.dispose()
