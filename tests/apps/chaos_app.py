"""The host app of the chaos scenarios: the kinds of `deadly`, and a few with a policy of their own."""

from __future__ import annotations

import os
import select
import time
from typing import SupportsIndex

import bulky  # noqa: F401 - registers its kinds
from deadly import app
from effects import mark

import vkjobs
from vkjobs import Context, Job

__all__ = ["app"]

if "FAKETIME" in os.environ:
    # libfaketime 0.9.10 has no working clock_nanosleep, by which Python 3.11 sleeps.

    def _sleep(seconds: SupportsIndex | float, /) -> None:
        select.select([], [], [], float(seconds))

    time.sleep = _sleep


vkjobs.handler("lonely", queue="lonely")(mark)


@vkjobs.handler("fail_once", backoff=2)
def fail_once(job: Job, ctx: Context) -> None:
    """Fail at the first attempt; leave marks as `mark` does."""
    mark(job, ctx)
    if job.attempts == 0:
        raise RuntimeError("once")
