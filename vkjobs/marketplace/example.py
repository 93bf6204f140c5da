"""An example of a task service, over a small ``vk_tasks`` of its own: what a host writes, in miniature.

A task is posted; somebody takes it, works on it, delivers, and is paid. A deadline is for the case that
the next step is not taken in time:

    open ──────▶ held ─────▶ working ─────▶ reviewing ─────▶ done
     │ ▲ hold_timeout │         │ checkpoint_miss   review_auto_accept
     │ └──────────────┘         ▼
     ├── open_expire ───────▶ closed
     └── contest_close, for a contest ────▶ reviewing

The arrows without a name are made by people.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ARRAY, Connection, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from vkjobs.handlers import Context

ACTIONS = {
    # deadline: applies while the task is, and makes it
    "open_expire": ("open", "closed"),
    "hold_timeout": ("held", "open"),
    "checkpoint_miss": ("working", "closed"),
    "contest_close": ("open", "reviewing"),
    "review_auto_accept": ("reviewing", "done"),
}
WARNINGS = {"checkpoint_warn": "working", "review_warn": "reviewing"}


class Base(DeclarativeBase):
    """The example's tables."""


class Task(Base):
    """A piece of work that somebody wants done.

    Attributes:
        id: names it; the ``ref_id`` of its jobs.
        template: "direct" or "hourly", or "contest": then many work at once.
        status: as in the diagram above.
        agent_id: who holds it, works on it, or won it.
        transfer_to: an agent who was asked to take it over, and has not answered.
        history: the deadlines that changed it, oldest first.
    """

    __tablename__ = "vk_tasks"

    id: Mapped[str] = mapped_column(primary_key=True)
    template: Mapped[str]
    status: Mapped[str]
    agent_id: Mapped[str | None]
    transfer_to: Mapped[str | None]
    history: Mapped[list[str]] = mapped_column(ARRAY(Text), default=list)


def create_tables(conn: Connection) -> None:
    """Create the example's own ``vk_tasks``."""
    Base.metadata.create_all(conn)


class ExampleService:
    """A `vkjobs.marketplace.TaskService`.

    ``ctx.session`` commits what is changed here together with the job's settling: each deadline takes effect
    once, however often a worker dies on the way.
    """

    def act_as_worker(self, ctx: Context, *, task_id: str, action: dict[str, Any]) -> dict[str, Any]:
        """Move the task on, if it still is where the deadline found it."""
        deadline = action["type"]
        applies_while, becomes = ACTIONS[deadline]
        task = _read(ctx, task_id)
        if task is None or task.status != applies_while:
            return _nothing_to_do(task, deadline)
        task.status = becomes
        if deadline == "hold_timeout":
            task.agent_id = None
        if winner := action.get("winner_agent_id"):
            task.agent_id = winner
        return _done(task, deadline)

    def warn(self, ctx: Context, *, task_id: str, kind: str) -> dict[str, Any]:
        """Note a warning, once. A host would send it from here, knowing that mail cannot be rolled back."""
        task = _read(ctx, task_id)
        if task is None or task.status != WARNINGS[kind] or kind in task.history:
            return _nothing_to_do(task, kind)
        return _done(task, kind)

    def expire_transfers(self, ctx: Context, *, task_id: str) -> dict[str, Any]:
        """Take back the offer to hand the task over."""
        task = _read(ctx, task_id)
        if task is None or task.transfer_to is None:
            return _nothing_to_do(task, "transfer_expire")
        task.transfer_to = None
        return _done(task, "transfer_expire")


def _read(ctx: Context, task_id: str) -> Task | None:
    """Return the task as it is now, locked, so that it stays so until the job is settled."""
    return ctx.session.get(Task, task_id, with_for_update=True, populate_existing=True)


def _done(task: Task, deadline: str) -> dict[str, Any]:
    task.history = [*task.history, deadline]
    return {"ok": True}


def _nothing_to_do(task: Task | None, deadline: str) -> dict[str, Any]:
    state = "gone" if task is None else task.status
    return {"ok": False, "reason": f"the task is {state}: nothing to do for {deadline}"}
