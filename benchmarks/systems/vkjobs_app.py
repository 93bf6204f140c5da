"""The host app of the benchmarks: kinds that do nothing, wait, or write down when they start."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from celery.signals import worker_ready

import vkjobs
from benchmarks.adapter.reports import report, waited_s, work_s
from benchmarks.site import READY
from benchmarks.systems.marks import mark
from benchmarks.systems.vkjobs import BULK, MARK, MARK_APART, NOOP, WAIT, WORK
from benchmarks.tally import hit
from vkjobs import Context, Job
from vkjobs.celery import app

__all__ = ["app"]


@vkjobs.handler(NOOP)
def noop(job: Job, ctx: Context) -> None:
    """Count the call."""
    hit()


@vkjobs.handler(BULK, bulk=100)
def noop_bulk(job: Job, ctx: Context) -> None:
    """Count the call."""
    hit()


@vkjobs.handler(WAIT)
def wait(job: Job, ctx: Context) -> None:
    """Wait as for somebody else's answer."""
    hit()
    time.sleep(0.005)


@vkjobs.handler(MARK_APART, queue="apart")
@vkjobs.handler(MARK)
def mark_start(job: Job, ctx: Context) -> None:
    """Write down the start."""
    mark(int(job.ref_id or 0))


@vkjobs.handler(WORK)
def work(job: Job, ctx: Context) -> None:
    """Do what the adapter asks for."""
    waited = waited_s(job.payload["at"])
    time.sleep(work_s())
    report(waited)


@worker_ready.connect
def _say_ready(**_: Any) -> None:
    Path(os.environ[READY]).touch()
