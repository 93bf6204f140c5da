from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from vkjobs.ledger import JobId
from vkjobs.marketplace import scenario
from vkjobs.marketplace.example import Base, Task
from vkjobs.marketplace.scenario import Deadline, FlakyService, Outcome
from vkjobs.settings import Settings

EXPECTED = Outcome("done", 0, "closed", ("open_expire",))
JOBS: dict[JobId, Deadline] = {7: Deadline("a group", "open_expire", 0.0, EXPECTED)}


@dataclass
class Ctx:
    session: Session
    settings: Settings = field(default_factory=Settings)
    lease_lost: bool = False


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with Session(engine.execution_options(isolation_level="READ COMMITTED")) as session:
        yield session


def test_the_demo_shows_all_that_it_promises() -> None:
    deadlines = list(scenario.deadlines())
    kinds = Counter(deadline.kind for deadline in deadlines)
    assert len(deadlines) >= 500
    assert len([kind for kind, size in kinds.items() if size > 50]) == 8
    assert [kind for kind, size in kinds.items() if size == 1] == ["daily_report"]
    assert sum(deadline.task is None for deadline in deadlines) == 1
    assert min(deadline.due_s for deadline in deadlines) < -60
    assert 9 < max(deadline.due_s for deadline in deadlines) <= 10
    assert sum(deadline.expected.task == "cancelled" for deadline in deadlines) > 40
    assert sum(deadline.expected.job == "done" and deadline.failures > 0 for deadline in deadlines) > 20
    ids = Counter(deadline.task["id"] for deadline in deadlines if deadline.task)
    assert max(ids.values()) == 1


def test_every_deadline_becomes_a_job_and_most_of_them_have_a_task(session: Session) -> None:
    conn = session.connection()
    jobs = scenario.fill(conn, datetime.now(UTC))
    count = "select (select count(*) from vk_jobs), (select count(*) from vk_tasks)"
    assert tuple(conn.execute(text(count)).one()) == (len(jobs), len(jobs) - 1)


def test_outcomes_are_read_from_job_and_task(session: Session, engine: Engine) -> None:
    jobs = scenario.fill(session.connection(), datetime.now(UTC))
    session.execute(text("update vk_jobs set status = 'done', attempts = 2 where kind = 'open_expire'"))
    session.execute(text("update vk_tasks set status = 'closed', history = '{open_expire}'"))
    session.commit()
    found = scenario.outcomes(engine)
    assert found.keys() == jobs.keys()
    for job_id, deadline in jobs.items():
        status, attempts = ("done", 2) if deadline.kind == "open_expire" else ("pending", 0)
        if deadline.task is None:
            assert found[job_id] == Outcome(status, attempts, None, ())
        else:
            assert found[job_id] == Outcome(status, attempts, "closed", ("open_expire",))


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_a_flaky_call_fails_as_often_as_it_is_meant_to_although_the_job_rolls_back(
    session: Session, failures: int
) -> None:
    Base.metadata.create_all(session.connection())
    session.add(Task(id="t1", template="direct", status="open"))
    session.add(scenario.Outage(task_id="t1", failures=failures))
    session.commit()
    act = partial(FlakyService().act_as_worker, Ctx(session), task_id="t1", action={"type": "open_expire"})
    for _ in range(failures):
        with pytest.raises(ConnectionError, match="the agent of t1 does not answer"):
            act()
        session.rollback()
    assert act() == {"ok": True}


def test_nothing_disagrees_if_all_is_as_expected() -> None:
    assert scenario.disagreements(JOBS, {7: EXPECTED}) == {}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (EXPECTED._replace(job="pending"), "found pending (0 attempts failed)"),
        (EXPECTED._replace(attempts=1), "found done (1 attempts failed)"),
        (EXPECTED._replace(task="open"), "task open"),
        (EXPECTED._replace(task=None), "task None"),
        (EXPECTED._replace(history=()), "changed by nothing"),
        (EXPECTED._replace(history=("open_expire",) * 2), "changed by open_expire, open_expire"),
    ],
)
def test_any_difference_is_told_with_both_sides(found: Outcome, words: str) -> None:
    wrong = scenario.disagreements(JOBS, {7: found})
    assert list(wrong) == [7]
    expected = "expected done (0 attempts failed), task closed, changed by open_expire; found "
    assert wrong[7].startswith(f"job 7, open_expire (a group): {expected}")
    assert words in wrong[7]


def test_a_lost_job_and_one_too_many_disagree() -> None:
    assert scenario.disagreements(JOBS, {7: EXPECTED, 8: EXPECTED}) == {8: "job 8: nobody asked for it"}
    assert scenario.disagreements(JOBS, {})[7].endswith("found no such job")


def test_a_lost_worker_is_seen_in_what_it_left(session: Session, engine: Engine) -> None:
    scenario.fill(session.connection(), datetime.now(UTC))
    session.execute(text("update vk_jobs set last_error = 'ConnectionError: WorkerLost: no'"))
    session.commit()
    assert not scenario.lost_a_worker(engine)
    session.execute(text("update vk_jobs set last_error = 'WorkerLost: yes' where kind = 'daily_report'"))
    session.commit()
    assert scenario.lost_a_worker(engine)


def test_only_a_killed_worker_excuses_one_attempt_more() -> None:
    again: dict[JobId, Outcome] = {7: EXPECTED._replace(attempts=1)}
    assert scenario.disagreements(JOBS, again, killed=True) == {}
    assert list(scenario.disagreements(JOBS, again)) == [7]
    unfinished: dict[JobId, Outcome] = {7: EXPECTED._replace(attempts=1, job="failed")}
    assert list(scenario.disagreements(JOBS, unfinished, killed=True)) == [7]
