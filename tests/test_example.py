from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from vkjobs.local import Postgres
from vkjobs.marketplace import TaskService
from vkjobs.marketplace.example import ExampleService, Task, create_tables
from vkjobs.settings import Settings

STATUSES = ["open", "held", "working", "reviewing", "closed", "done"]
ACTIONS = {
    "open_expire": ("open", "closed"),
    "hold_timeout": ("held", "open"),
    "checkpoint_miss": ("working", "closed"),
    "contest_close": ("open", "reviewing"),
    "review_auto_accept": ("reviewing", "done"),
}
WARNINGS = {"checkpoint_warn": "working", "review_warn": "reviewing"}

SERVICE = ExampleService()


@dataclass
class Ctx:
    session: Session
    settings: Settings = field(default_factory=Settings)
    lease_lost: bool = False


@pytest.fixture(scope="module")
def engine(postgres: Postgres) -> Iterator[Engine]:
    engine = create_engine(postgres.create_database("example"))
    with engine.begin() as conn:
        create_tables(conn)
    yield engine
    engine.dispose()


@pytest.fixture
def ctx(engine: Engine) -> Iterator[Ctx]:
    with engine.begin() as conn:
        conn.execute(text("delete from vk_tasks"))
    with Session(engine) as session:
        yield Ctx(session)


@pytest.fixture
def add_task(ctx: Ctx) -> Callable[..., Task]:
    def add(status: str, **columns: Any) -> Task:
        task = Task(**{"id": "t1", "template": "direct", "status": status, "agent_id": "agent-1", **columns})
        ctx.session.add(task)
        ctx.session.commit()
        return task

    return add


def act(ctx: Ctx, deadline: str, **more: Any) -> dict[str, Any]:
    answer = SERVICE.act_as_worker(ctx, task_id="t1", action={"type": deadline, **more})
    ctx.session.commit()
    return answer


def test_the_example_is_a_task_service() -> None:
    service: TaskService = SERVICE
    assert callable(service.act_as_worker)


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("deadline", ACTIONS)
def test_a_deadline_moves_a_task_on_only_from_the_state_that_it_is_for(
    ctx: Ctx, add_task: Callable[..., Task], deadline: str, status: str
) -> None:
    task = add_task(status)
    applies_while, becomes = ACTIONS[deadline]
    answer = act(ctx, deadline)
    if status == applies_while:
        assert answer == {"ok": True}
        assert (task.status, task.history) == (becomes, [deadline])
    else:
        assert answer == {"ok": False, "reason": f"the task is {status}: nothing to do for {deadline}"}
        assert (task.status, task.history) == (status, [])


def test_a_repeated_deadline_does_nothing(ctx: Ctx, add_task: Callable[..., Task]) -> None:
    task = add_task("open")
    assert act(ctx, "open_expire")["ok"]
    assert not act(ctx, "open_expire")["ok"]
    assert task.history == ["open_expire"]


def test_who_held_a_task_too_long_does_not_hold_it_any_more(ctx: Ctx, add_task: Callable[..., Task]) -> None:
    task = add_task("held")
    act(ctx, "hold_timeout")
    assert task.agent_id is None


def test_the_winner_of_a_contest_gets_the_task(ctx: Ctx, add_task: Callable[..., Task]) -> None:
    task = add_task("reviewing", template="contest", agent_id=None)
    act(ctx, "review_auto_accept", winner_agent_id="agent-2")
    assert (task.status, task.agent_id) == ("done", "agent-2")


def test_who_did_the_work_keeps_it_when_there_is_no_winner(ctx: Ctx, add_task: Callable[..., Task]) -> None:
    task = add_task("reviewing")
    act(ctx, "review_auto_accept", winner_agent_id=None)
    assert (task.status, task.agent_id) == ("done", "agent-1")


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("kind", WARNINGS)
def test_a_warning_is_given_once_and_only_while_it_helps(
    ctx: Ctx, add_task: Callable[..., Task], kind: str, status: str
) -> None:
    task = add_task(status)
    answers = [SERVICE.warn(ctx, task_id="t1", kind=kind)["ok"] for _ in range(2)]
    assert answers == [status == WARNINGS[kind], False]
    assert (task.status, task.history) == (status, [kind] if answers[0] else [])


def test_a_transfer_that_nobody_took_is_taken_back_once(ctx: Ctx, add_task: Callable[..., Task]) -> None:
    task = add_task("working", transfer_to="agent-2")
    answers = [SERVICE.expire_transfers(ctx, task_id="t1")["ok"] for _ in range(2)]
    assert answers == [True, False]
    assert (task.status, task.transfer_to, task.history) == ("working", None, ["transfer_expire"])


def test_the_state_is_read_anew_on_each_call(ctx: Ctx, add_task: Callable[..., Task], engine: Engine) -> None:
    add_task("open")
    assert not act(ctx, "hold_timeout")["ok"]
    with engine.begin() as somebody_else:
        somebody_else.execute(text("update vk_tasks set status = 'held'"))
    assert act(ctx, "hold_timeout")["ok"]


def test_what_is_done_is_undone_when_the_job_is_not_settled(ctx: Ctx, add_task: Callable[..., Task]) -> None:
    task = add_task("open")
    SERVICE.act_as_worker(ctx, task_id="t1", action={"type": "open_expire"})
    ctx.session.rollback()
    assert (task.status, task.history) == ("open", [])


def test_there_is_nothing_to_do_for_a_task_that_is_gone(ctx: Ctx) -> None:
    assert act(ctx, "open_expire")["reason"] == "the task is gone: nothing to do for open_expire"
    assert not SERVICE.warn(ctx, task_id="t1", kind="review_warn")["ok"]
    assert not SERVICE.expire_transfers(ctx, task_id="t1")["ok"]
