"""Kinds with bulk, of both forms, that leave the marks of `effects`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from effects import app, mark

import vkjobs
from vkjobs import Context, Job

__all__ = ["app"]


@vkjobs.handler("mark_bulk", bulk=500)
def mark_bulk(job: Job, ctx: Context) -> None:
    """Leave marks as `mark` does. A ref_id may say to end the process or the worker, or to be slow at first."""
    mark(job, ctx)
    if job.ref_id == "poison":
        os.kill(os.getpid(), signal.SIGKILL)
    elif job.ref_id == "deadly":
        os.killpg(0, signal.SIGKILL)
    elif job.ref_id == "slow" and job.attempts == 0:
        time.sleep(60)


@vkjobs.handler("note_bulk", bulk=500)
def note_bulk(job: Job, ctx: Context) -> None:
    """Leave a mark in the file alone, so that its settling is that of all others of the message; end poisoned."""
    with Path(os.environ["EFFECTS"]).open("a") as effects:
        effects.write(f"{job.id}\n")
    if job.ref_id == "poison":
        os.kill(os.getpid(), signal.SIGKILL)


@vkjobs.handler("mark_list", bulk=50, as_list=True)
def mark_list(jobs: list[Job], ctx: Context) -> None:
    """As `mark_bulk`, of many."""
    for job in jobs:
        mark_bulk(job, ctx)
