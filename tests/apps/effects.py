"""A host app whose jobs leave marks that a test can count, in the database and in a file."""

from __future__ import annotations

import os
import time
from pathlib import Path

from celery import Celery
from sqlalchemy import text

import vkjobs
from vkjobs import Context, Job

app = Celery("effects", broker=os.environ["VKJOBS_BROKER_URL"])
app.conf.beat_scheduler = "celery.beat:Scheduler"
app.conf.broker_connection_retry_on_startup = True
vkjobs.setup(app)


@vkjobs.handler("noop")
def noop(job: Job, ctx: Context) -> None:
    """Do nothing."""


@vkjobs.handler("mark")
def mark(job: Job, ctx: Context) -> None:
    """Leave a mark in the table `effects`, and one in the file named by EFFECTS; take as long as the payload says."""
    with Path(os.environ["EFFECTS"]).open("a") as effects:
        effects.write(f"{job.id}\n")
    ctx.session.execute(text("insert into effects (job_id) values (:id)"), {"id": job.id})
    time.sleep((job.payload or {}).get("seconds", 0))


@app.task(name="hosts_own")  # type: ignore[untyped-decorator]
def hosts_own() -> int:
    """Do something of the host's."""
    return 1
