"""The demo's ten seconds in the marketplace: what is due, and what shall become of it. Starts nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Mapped, Session, mapped_column

from vkjobs.client import enqueue
from vkjobs.handlers import Context
from vkjobs.ledger import JobId
from vkjobs.marketplace.example import Base, ExampleService, Task
from vkjobs.schema import Status

SETTINGS = {
    "task_service": "vkjobs.marketplace.scenario:FlakyService",
    # Longer than a tick, so that a second attempt is as punctual as a first one.
    "backoff": "1.2",
    "max_attempts": "4",
    # A worker that is killed shall not be waited for as long as in earnest.
    "lease": "10",
}
"""The settings, by name, under which the expectations below hold."""

LAST_DUE_S = 10.0
_PER_KIND = 72
_EVERY = 12  # of so many deadlines of a kind, one each is overdue, moved on, or flaky
_FLAKY_UNTIL_S = 6.0  # later ones would make the demo longer: 1.2 s and 2.4 s of backoff
_HOPELESS = 1_000_000

_STATES = {
    # kind: the task's status before its deadline and after it
    "open_expire": ("open", "closed"),
    "hold_timeout": ("held", "open"),
    "checkpoint_warn": ("working", "working"),
    "checkpoint_miss": ("working", "closed"),
    "contest_close": ("open", "reviewing"),
    "review_warn": ("reviewing", "reviewing"),
    "review_auto_accept": ("reviewing", "done"),
    "transfer_expire": ("working", "working"),
}


class Outage(Base):
    """How many calls about a task are still to fail."""

    __tablename__ = "vk_demo_outages"

    task_id: Mapped[str] = mapped_column(primary_key=True)
    failures: Mapped[int]


class FlakyService(ExampleService):
    """The example service, if it had to reach agents over a network that fails now and then."""

    def act_as_worker(self, ctx: Context, *, task_id: str, action: dict[str, Any]) -> dict[str, Any]:
        """Call the agent, then do as the example does."""
        _call_agent(ctx, task_id)
        return super().act_as_worker(ctx, task_id=task_id, action=action)

    def warn(self, ctx: Context, *, task_id: str, kind: str) -> dict[str, Any]:
        """Call the agent, then do as the example does."""
        _call_agent(ctx, task_id)
        return super().warn(ctx, task_id=task_id, kind=kind)

    def expire_transfers(self, ctx: Context, *, task_id: str) -> dict[str, Any]:
        """Call the agent, then do as the example does."""
        _call_agent(ctx, task_id)
        return super().expire_transfers(ctx, task_id=task_id)


def _call_agent(ctx: Context, task_id: str) -> None:
    # By a connection of its own: like a call that went over the network, it stays made when the job fails.
    one_less = text("""
        update vk_demo_outages set failures = failures - 1 where task_id = :id and failures > 0
        returning failures""")
    with ctx.session.get_bind().engine.begin() as network:
        fails = network.execute(one_less, {"id": task_id}).first()
    if fails:
        raise ConnectionError(f"the agent of {task_id} does not answer")


class Outcome(NamedTuple):
    """What became of a deadline: of its job, and of its task, None if there is no task."""

    job: str
    attempts: int
    task: str | None
    history: tuple[str, ...]


@dataclass(frozen=True)
class Deadline:
    """A job of the demo.

    Attributes:
        group: what it is there to show.
        kind: its kind.
        due_s: when it is due, in seconds after the demo's start; negative: it is overdue.
        expected: what shall become of it.
        task: the row of its task, if it has one.
        failures: how many calls about the task fail.
    """

    group: str
    kind: str
    due_s: float
    expected: Outcome
    task: Mapping[str, Any] | None = None
    failures: int = 0


def deadlines() -> Iterator[Deadline]:
    """Return all deadlines of the demo, hundreds of each kind."""
    for lane, kind in enumerate(_STATES):
        for number in range(_PER_KIND):
            due_s = LAST_DUE_S * (number + lane / len(_STATES)) / _PER_KIND
            yield _ordinary(kind, number, due_s)
        yield _failing("failing each time: given up", kind, "direct", _STATES[kind][0], failures=_HOPELESS)
    yield _failing("contest in review, without a judge", "review_auto_accept", "contest", "reviewing")
    yield _failing("of an unknown kind", "daily_report", "direct", "open")
    yield Deadline("without ref_id", "open_expire", 0.0, Outcome(Status.FAILED, _max_attempts(), None, ()))


def _max_attempts() -> int:
    return int(SETTINGS["max_attempts"])


def _ordinary(kind: str, number: int, due_s: float) -> Deadline:
    before, after = _STATES[kind]
    task = _task(f"{kind}-{number}", "contest" if kind == "contest_close" else "direct", before)
    acted = Outcome(Status.DONE, 0, after, (kind,))
    match number % _EVERY:
        case 0:
            return Deadline("overdue at the start", kind, -60.0 * (number + 1), acted, task)
        case 1:
            task |= {"status": "cancelled", "transfer_to": None}
            untouched = Outcome(Status.DONE, 0, "cancelled", ())
            return Deadline("task moved on: nothing to do", kind, due_s, untouched, task)
        case 2 if due_s < _FLAKY_UNTIL_S:
            failures = 1 + number // _EVERY % 2
            acted = acted._replace(attempts=failures)
            return Deadline("failing once or twice: retried", kind, due_s, acted, task, failures)
    return Deadline("nothing unusual", kind, due_s, acted, task)


def _failing(group: str, kind: str, template: str, status: str, failures: int = 0) -> Deadline:
    task = _task(f"{kind}-{'hopeless' if failures else template}", template, status)
    return Deadline(group, kind, 0.0, Outcome(Status.FAILED, _max_attempts(), status, ()), task, failures)


def _task(task_id: str, template: str, status: str) -> dict[str, Any]:
    transfer_to = "agent-2" if task_id.startswith("transfer_expire") else None
    columns = {"id": task_id, "template": template, "status": status}
    return {**columns, "agent_id": "agent-1", "transfer_to": transfer_to}


def fill(conn: Connection, start: datetime) -> dict[JobId, Deadline]:
    """Create the example's tables, fill them and ``vk_jobs``; return the deadlines, due from ``start`` on."""
    Base.metadata.create_all(conn)
    jobs = {}
    with Session(conn, join_transaction_mode="create_savepoint") as session:
        for deadline in deadlines():
            task_id = None
            if deadline.task is not None:
                task_id = deadline.task["id"]
                session.add(Task(**deadline.task))
            if deadline.failures:
                session.add(Outage(task_id=task_id, failures=deadline.failures))
            due = start + timedelta(seconds=deadline.due_s)
            jobs[enqueue(conn, deadline.kind, task_id, run_at=due)] = deadline
        session.commit()
    return jobs


def outcomes(engine: Engine) -> dict[JobId, Outcome]:
    """Return what has become of each job so far."""
    query = text("""
        select j.id, j.status, j.attempts, t.status, coalesce(t.history, '{}')
        from vk_jobs j left join vk_tasks t on t.id = j.ref_id""")
    with engine.connect() as conn:
        return {row[0]: Outcome(row[1], row[2], row[3], tuple(row[4])) for row in conn.execute(query)}


def lost_a_worker(engine: Engine) -> bool:
    """Tell whether a worker, or a child of one, died while it ran a job."""
    with engine.connect() as conn:
        query = "select exists (select from vk_jobs where last_error like 'WorkerLost:%')"
        return conn.execute(text(query)).scalar_one() is True


def disagreements(
    jobs: Mapping[JobId, Deadline], found: Mapping[JobId, Outcome], *, killed: bool = False
) -> dict[JobId, str]:
    """Compare what became of the jobs with what was expected; return a line for each that differs.

    Args:
        jobs: the deadlines.
        found: their outcomes.
        killed: a worker died meanwhile: that cost what it was running one attempt more.
    """
    lines = {job_id: f"job {job_id}: nobody asked for it" for job_id in found.keys() - jobs.keys()}
    for job_id, deadline in jobs.items():
        expected, outcome = deadline.expected, found.get(job_id)
        if outcome and killed and outcome.job == Status.DONE:
            outcome = outcome._replace(attempts=min(outcome.attempts, expected.attempts))
        if outcome != expected:
            lines[job_id] = (
                f"job {job_id}, {deadline.kind} ({deadline.group}): expected {_say(expected)}; found {_say(outcome)}"
            )
    return lines


def _say(outcome: Outcome | None) -> str:
    if outcome is None:
        return "no such job"
    history = ", ".join(outcome.history) or "nothing"
    return f"{outcome.job} ({outcome.attempts} attempts failed), task {outcome.task}, changed by {history}"
