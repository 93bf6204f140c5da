"""A module that a worker cannot import: it registers one kind twice."""

from __future__ import annotations

import vkjobs
from vkjobs import Context, Job


@vkjobs.handler("twice")
def first(job: Job, ctx: Context) -> None:
    """Do nothing."""


@vkjobs.handler("twice")
def second(job: Job, ctx: Context) -> None:
    """Do nothing."""
