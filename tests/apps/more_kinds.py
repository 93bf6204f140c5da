"""Kinds that a worker learns of by ``-I``: they tell by which process and Postgres session they were run."""

from __future__ import annotations

import os
import time

from sqlalchemy import text

import vkjobs
from vkjobs import Context, Job


@vkjobs.handler("whoami")
def whoami(job: Job, ctx: Context) -> None:
    """Write down this process and its backend; take a while, so that others are asked too."""
    sql = "insert into seen (process, parent, backend) values (:process, :parent, pg_backend_pid())"
    ctx.session.execute(text(sql), {"process": os.getpid(), "parent": os.getppid()})
    time.sleep(0.2)


@vkjobs.handler("aside", queue="aside")
def aside(job: Job, ctx: Context) -> None:
    """Do nothing, in a queue of its own."""
