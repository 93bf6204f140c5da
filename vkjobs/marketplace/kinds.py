"""The marketplace's kinds: which call of the host's task service each deadline is.

Of the host's ``vk_tasks`` it reads ``id``, ``template`` and ``status``, and writes nothing.
"""

from __future__ import annotations

from sqlalchemy import text

from vkjobs.errors import VkjobsError
from vkjobs.handlers import Context, Job, MissingRefId, registry
from vkjobs.marketplace import service
from vkjobs.tasks import handler


class MissingTask(VkjobsError):
    """There is no task of the job's ``ref_id``."""


class MissingJudge(VkjobsError):
    """A contest must be decided, and nobody is set to decide it."""


@handler("open_expire")
@handler("hold_timeout")
@handler("checkpoint_miss")
@handler("contest_close")
def act(job: Job, ctx: Context) -> None:
    """Let the service act on the task in the name of the deadline that passed."""
    task_id = _task_id(job)
    service.task_service(ctx.settings).act_as_worker(ctx, task_id=task_id, action={"type": job.kind})


@handler("checkpoint_warn")
@handler("review_warn")
def warn(job: Job, ctx: Context) -> None:
    """Let the service warn of a deadline that comes near."""
    task_id = _task_id(job)
    service.task_service(ctx.settings).warn(ctx, task_id=task_id, kind=job.kind)


@handler("transfer_expire")
def expire_transfers(job: Job, ctx: Context) -> None:
    """Let the service end the task's transfers that nobody has taken."""
    task_id = _task_id(job)
    service.task_service(ctx.settings).expire_transfers(ctx, task_id=task_id)


@handler("review_auto_accept")
def accept(job: Job, ctx: Context) -> None:
    """Let the service accept what its client has not reviewed; of a contest, what the judge chooses."""
    task_id = _task_id(job)
    query = text("select template, status from vk_tasks where id = :id")
    task = ctx.session.execute(query, {"id": task_id}).one_or_none()
    if task is None:
        raise MissingTask(f"vk_tasks row missing for {job.kind}, id: {task_id}")
    winner = None
    if (task.template, task.status) == ("contest", "reviewing"):
        judge = service.contest_judge(ctx.settings)
        if judge is None:
            raise MissingJudge(
                f"{job.kind} for a contest needs the LLM judge, which is not assembled yet, id: {task_id}"
            )
        winner = judge.winner(ctx, task_id=task_id)
    action = {"type": job.kind, "winner_agent_id": winner}
    service.task_service(ctx.settings).act_as_worker(ctx, task_id=task_id, action=action)


def _task_id(job: Job) -> str:
    if job.ref_id is None:
        raise MissingRefId(job)
    return job.ref_id


registry.require(service.check)
