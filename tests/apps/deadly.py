"""Kinds that end their own process, each in its own way."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time

from effects import app

import vkjobs
from vkjobs import Context, Job

__all__ = ["app"]


@vkjobs.handler("kill")
def kill(job: Job, ctx: Context) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@vkjobs.handler("exit")
def exit(job: Job, ctx: Context) -> None:
    os._exit(3)


@vkjobs.handler("segfault")
def segfault(job: Job, ctx: Context) -> None:
    ctypes.string_at(0)


@vkjobs.handler("memory")
def memory(job: Job, ctx: Context) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    bytearray(1 << 31)


@vkjobs.handler("hang", time_limit=1)
def hang(job: Job, ctx: Context) -> None:
    time.sleep(60)


@vkjobs.handler("slow", soft_time_limit=1)
def slow(job: Job, ctx: Context) -> None:
    time.sleep(60)


@vkjobs.handler("long")
def long(job: Job, ctx: Context) -> None:
    time.sleep(60)
