"""The ledger on real connections, driven at random, against a pure model of it.

Processes die before they get an answer and between two statements, answers are lost and asked for again, messages
come late, twice and out of order, transactions of two overlap, clocks jump, the host and the original dispatcher write
the same rows. After each step every row is as the model has it. In the end nothing is stuck, and the audit agrees.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar
from uuid import uuid4

import audit
import operations
import pytest
from hypothesis import HealthCheck, Phase, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from model import LEASE, MAX_ATTEMPTS, RULES, Job, Model, Token
from operations import Op
from original_dispatcher import DONE, FAIL
from places import moment
from processes import KINDS, Known
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError

from vkjobs import database, ledger
from vkjobs.local import Postgres

_LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
_SETTINGS = settings(
    max_examples=5000 if _LONG else 300,
    stateful_step_count=100 if _LONG else 50,
    derandomize=not _LONG,
    database=None,
    deadline=None,
    phases=[Phase.generate, Phase.shrink] if _LONG else [Phase.generate],  # to shrink takes minutes
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)
_PATIENCE_S = 20.0

# Minutes.
_DELAYS = st.sampled_from([-5, -5, -5, 5, 505])
_JUMPS = st.sampled_from([10, 30, 70, 70, 1000, -10, -60])

_WHICH = st.sampled_from([0, 0, 0, 1, 2, 3, 4, 5])  # counted from the most promising
_HOW = st.sampled_from(["answered", "answered", "answered", "answer lost", "rolled back"])

Operation = Callable[[Known, int], Op]
Interference = tuple[str, int]

_INTERFERENCES: list[Interference] = [
    ("move", 505), ("move", 5), ("delete", 0), ("end", 0), ("spoil", 1), ("spoil", -1), ("take", 0), ("take", 0),
    ("settle", -5), ("settle", 5), ("settle", 95),
]  # fmt: skip
_STEPS = st.lists(
    st.tuples(st.sampled_from([*operations.RUNS, *operations.RUNS, *operations.RUNS, *_INTERFERENCES]), _WHICH, _HOW),
    min_size=2,
    max_size=8,
)

_TAKE = """
    update vk_jobs set status = 'running', lease_until = :until, updated_at = now()
    where id = :id and (status = 'pending' and run_at <= now() or status = 'running' and lease_until < now())"""
_JUMP = """
    update vk_jobs
    set run_at = run_at - :past, lease_until = lease_until - :past, claimed_until = claimed_until - :past"""
# A pending row's lease becomes odd; a row that the original runs has none any more.
_SPOIL = """
    update vk_jobs set lease_until = case when status = 'pending' then cast(:until as timestamptz) end
    where id = :id and lease_until is not null
        and (status = 'pending' or status = 'running' and claimed_until is distinct from lease_until)"""
_ROWS = "select to_jsonb(j) from vk_jobs j"
_BLOCKED = text("select cardinality(pg_blocking_pids(:pid)) > 0")


class Machine(RuleBasedStateMachine):
    """Several processes, a dispatcher, the original one, a host, and the clock."""

    engine: ClassVar[Engine]

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.known = Known(self.model)
        self.unanswered: list[Op] = []
        self.taken: list[Job] = []
        self.rows: dict[Any, dict[str, Any]] = {}
        self.sound = True
        self.one = self.engine.connect()
        self.other = self.engine.connect()
        self.own = database.transaction(self.engine)
        for table in ("vk_jobs", "vk_jobs_audit"):
            self.one.exec_driver_sql(f"truncate {table} restart identity")
        self.thread = ThreadPoolExecutor(1)
        self.pid = self.other.exec_driver_sql("select pg_backend_pid()").scalar()

    def teardown(self) -> None:
        try:
            if self.sound:
                self.everything_ends()
        finally:
            self.thread.shutdown()
            for conn in (self.one, self.other, self.own):
                conn.close()

    # The rules.

    @initialize(delays=st.lists(_DELAYS, min_size=1, max_size=4))
    def begin(self, delays: list[int]) -> None:
        for number, delay in enumerate(delays):
            self.enqueue(number // 2, delay)

    def enqueue(self, which: int, delay: int) -> None:
        with self.step():
            run_at = datetime.now(UTC) + timedelta(minutes=delay)
            kind = KINDS[which % 2]
            id = ledger.enqueue(self.one, kind=kind, ref_id=None, run_at=run_at, payload=None)
            job = Job(id, kind, self.model.now + delay)
            self.model.jobs.append(job)
            self.model.touched.add(job)

    @rule(job=_WHICH, steps=_STEPS)
    def job_goes_on(self, job: int, steps: list[tuple[Operation | Interference, int, str]]) -> None:
        """What is to be done next with a job is done, so often; each time, somebody may die or interfere."""
        for step, which, how in steps:
            favourite = self.known.favourite = self.model.any(job)
            if favourite.place in ("done", "gone"):
                self.enqueue(job, -5)
            elif isinstance(step, tuple):
                self.interfere(job, step)
            else:
                self.next_step(favourite, step, which, how)

    def next_step(self, job: Job, run: Operation, which: int, how: str) -> None:
        if job.over:
            if job.token is not None:
                for operation in (operations.claim, operations.release, run):
                    self.operate(operation, 0, how)
            self.operate(operations.retry, 0, how)
        elif job.pending and job.run_at > self.model.now:
            self.operate(operations.free_again, 0, how)
            self.after_its_lease(job, how, operations.lease_again)
            self._move(job, -5)
        elif job.place == "running" and not job.ours:
            self.operate(operations.ask_if_claimed, 0, how)
            self.operate(operations.settle_dead_child, which, how)
            self.after_its_lease(job, how, operations.look_for_lost, operations.take_over)
        elif job.token is None or self.known.held_by_any(job):
            if job.place == "running":
                self.operate(operations.ask_if_claimed, which + 1)
            ways = {"free": operations.lease, "leased": operations.claim, "running": run}
            self.operate(ways[job.place], which if job.place == "running" else 0, how)
        elif self.unanswered:
            self.ask_again(0)
        else:
            unheld = (operations.take_over, operations.look_for_lost, operations.reap, operations.lease_again)
            self.after_its_lease(job, how, *unheld)

    def after_its_lease(self, job: Job, how: str, *chosen: Operation) -> None:
        if job.token is not None:
            self.clock_jumps(70)
            for operation in chosen:
                self.operate(operation, 0, how)

    @rule(operation=st.sampled_from(operations.ALL), job=_WHICH, which=_WHICH, how=_HOW)
    def anybody_does_anything(self, operation: Operation, job: int, which: int, how: str) -> None:
        self.known.favourite = self.model.any(job)
        self.operate(operation, which, how)

    def operate(self, operation: Operation, which: int, how: str = "answered") -> None:
        """A process executes a statement, and dies before it, after it, or goes on."""
        op = operations.make(self.known, operation, which)
        if op is None:
            return
        with self.step():
            if how == "rolled back":
                op.run(self.own)
                self.own.rollback()
                return
            answer = op.run(self.one)
            op.judge(answer)
        if how == "answered":
            op.learn(answer)
        elif op.again:
            self.unanswered.append(op)

    @rule(which=_WHICH)
    def ask_again(self, which: int) -> None:
        """A process that got no answer asks whether its statement took effect; if not, it executes it again."""
        if not self.unanswered:
            return
        op = self.unanswered.pop(-1 - which % len(self.unanswered))
        for asked in (op.recall, op):
            if asked is not None:
                with self.step():
                    answer = asked.run(self.one)
                    asked.judge(answer)
                asked.learn(answer)
                if answer:
                    return

    @rule(job=_WHICH, which=_WHICH, fitting=st.booleans(), data=st.data(), commits=st.booleans())
    def two_overlap(self, job: int, which: int, fitting: bool, data: st.DataObject, commits: bool) -> None:
        """A statement runs, and waits or not, while another's transaction is open."""
        self.known.favourite = favourite = self.model.any(job)
        drawn = st.sampled_from(operations.FITTING.get(favourite.place, operations.ALL) if fitting else operations.ALL)
        first, second = (operations.make(self.known, data.draw(drawn), which) for _ in range(2))
        if first is None or second is None:
            return
        with self.step():
            answer = first.run(self.own)
            effect = self.model.try_out(lambda: first.judge(answer))
            future = self.thread.submit(second.run, self.other)
            waits = self.waits(future)
            assert not waits or not second.skips or (first.alone and second.alone)
            if not waits:
                with self.model.locking(effect):
                    second.judge(future.result())
            if commits:
                self.own.commit()
                self.model.put(effect)
            else:
                self.own.rollback()
            if waits:
                assume(not gave_up(future))  # it waits briefly, and this machine was too slow
                second.judge(future.result())
        if commits:
            first.learn(answer)
        second.learn(future.result())

    def waits(self, future: Future[Any]) -> bool:
        """Wait until the other connection's statement has ended or waits for a lock; tell whether it waits."""
        for _ in range(round(_PATIENCE_S * 1000)):
            if wait([future], 0.001).done:
                return False
            if self.one.execute(_BLOCKED, {"pid": self.pid}).scalar():
                return True
        raise AssertionError("the statement neither ends nor waits for a lock")

    @rule(minutes=_JUMPS)
    def clock_jumps(self, minutes: int) -> None:
        """Time passes, or the clock is set back: all times are moved instead, and everybody's tokens with them."""
        past = timedelta(minutes=minutes)
        with self.step(), audit.acting(self.one, "host"):
            self.one.execute(text(_JUMP), {"past": past})
            self.model.now += minutes
            self.model.touched.update(self.model.jobs)
            tokens = {token for job in self.model.jobs for token in job.tokens}
            tokens |= {holding.proposed for holding in self.known.holdings if holding.proposed is not None}
            for token in tokens:
                token.value = token.value and token.value - past

    def interfere(self, job: int, interference: Interference) -> None:
        """The host or the original dispatcher writes the row by SQL of its own."""
        name, number = interference
        getattr(self, f"_{name}")(self.model.any(job), number)

    def _move(self, job: Job, delay: int) -> None:
        with self.step():
            moved = datetime.now(UTC) + timedelta(minutes=delay)
            sql = "update vk_jobs set run_at = :moved where id = :id and status = 'pending'"
            if self.write("host", sql, id=job.id, moved=moved):
                assert job.pending
                job.run_at = self.model.now + delay
                self.model.touched.add(job)

    def _delete(self, job: Job, _: int) -> None:
        with self.step():
            if self.write("host", "delete from vk_jobs where id = :id and status = 'pending'", id=job.id):
                assert job.pending
                self.model.end(job, "gone")

    def _end(self, job: Job, _: int) -> None:
        """By plain SQL, which leaves the lease on the row."""
        with self.step():
            if self.write("host", "update vk_jobs set status = 'cancelled' where id = :id", id=job.id):
                job.place = "cancelled"
                self.model.touched.add(job)

    def _spoil(self, job: Job, sign: int) -> None:
        until = math.copysign(math.inf, sign)
        with self.step():
            if self.write("host", _SPOIL, id=job.id, until=f"{until}inity"):
                self.model.give(job, Token(until) if job.pending else None)

    def _take(self, job: Job, _: int) -> None:
        if job.place == "running":
            self.clock_jumps(70)
        with self.step():
            until = datetime.now(UTC) + timedelta(minutes=LEASE)
            assert self.write("original", _TAKE, id=job.id, until=until) == self.model.original_takes(job)
        if job.place == "running" and not job.ours:
            self.taken.append(job)

    def _settle(self, _: Job, delay: int) -> None:
        """By id alone, whoever may run it by now."""
        job = next((job for job in reversed(self.taken) if job.place != "gone"), None)
        if job is None:
            return
        place = {-5: "done", 5: "free"}.get(delay, "failed")
        with self.step():
            if place == "done":
                self.write("original", DONE, id=job.id)
            else:
                run_at = datetime.now(UTC) + timedelta(minutes=delay)
                failed = {"status": "pending" if place == "free" else place, "attempts": job.attempts + 1}
                self.write("original", FAIL, id=job.id, run_at=run_at, error="E: x", **failed)
            self.model.original_settles(job, place, delay)

    def write(self, actor: audit.Actor, sql: str, **values: Any) -> int:
        with audit.acting(self.one, actor):
            return self.one.execute(text(sql), values).rowcount

    # What must hold.

    @contextmanager
    def step(self) -> Iterator[None]:
        """Let the block change model and table, then compare them."""
        self.sound = False
        self.model.touched.clear()
        yield
        rows = {row["id"]: row for row in self.one.exec_driver_sql(_ROWS).scalars()}
        assert rows.keys() == {job.id for job in self.model.jobs if job.place != "gone"}
        for job in self.model.jobs:
            if job.id in rows and job not in self.model.touched:
                assert rows[job.id] == self.rows[job.id]
            elif job.id in rows:
                self.compare(job, rows[job.id])
        self.rows = rows
        self.sound = True

    def compare(self, job: Job, row: dict[str, Any]) -> None:
        place = "pending" if job.pending else job.place
        assert (row["status"], row["attempts"], row["claimed_by"]) == (place, job.attempts, job.by)
        assert (row["lease_until"] is None) is (job.token is None)
        if job.token is None or "infinity" in row["lease_until"]:
            return
        found = moment(row["lease_until"])
        if job.token.value is None:
            assert found not in {token.value for token in job.tokens}
            job.token.value = found
        assert found == job.token.value
        if job.place == "running":
            assert (row["claimed_until"] == row["lease_until"]) is job.ours
            able = {held.by for held in self.known.holdings if held.job is job and found in held.values}
            assert len(able) <= 1

    def everything_ends(self) -> None:
        """Nobody is left but one dispatcher and one worker: all jobs end within a few runs, and legally."""
        self.known.favourite = None
        for _ in range(MAX_ATTEMPTS + len(self.model.jobs)):
            if all(job.over for job in self.model.jobs):
                break
            self.clock_jumps(1000)
            self.operate(operations.look_for_lost, 0)
            for _ in self.known.corpses:
                self.operate(operations.reap, 0)
            self.operate(operations.take_over, 0)
            self.operate(operations.free_again, 0)
            for kind in range(len(KINDS)):
                self.lease_and_run(operations.lease_again, kind)
                self.lease_and_run(operations.lease, kind)
        assert [job for job in self.model.jobs if not job.over] == []
        assert audit.check(audit.history(self.one), RULES) == []

    def lease_and_run(self, operation: Operation, kind: int) -> None:
        before = len(self.known.messages)
        self.operate(operation, kind)
        for _ in self.known.messages[before:]:
            self.operate(operations.claim, 0)
            self.operate(operations.settle_done, 0)


def gave_up(future: Future[Any]) -> bool:
    """Tell whether a statement has ended by its lock_timeout."""
    error = future.exception(_PATIENCE_S)
    return isinstance(error, OperationalError) and getattr(error.orig, "pgcode", None) == "55P03"


@pytest.fixture
def audited(postgres: Postgres) -> Iterator[Engine]:
    engine = database.engine(postgres.create_database(f"model_{uuid4().hex}", template="migrated"), 3)
    with engine.connect() as conn:
        audit.install(conn)
    yield engine
    engine.dispose()


@pytest.mark.timeout(7200 if _LONG else 400)  # 20 s, if nobody else uses the processor
def test_the_ledger_does_what_the_model_says_whoever_dies_lags_or_interferes(audited: Engine) -> None:
    Machine.engine = audited
    run_state_machine_as_test(Machine, settings=_SETTINGS)
