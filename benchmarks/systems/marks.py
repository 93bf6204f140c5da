"""Writes down, by the database's clock, that a job has started: the same statement in all systems' handlers."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import psycopg2

TABLES = """
    create table due (job int primary key, run_at timestamptz not null);
    create table starts (job int not null, started_at timestamptz not null)"""


def mark(job: int) -> None:
    """Write that ``job`` has started."""
    with _connection(os.getpid()).cursor() as cursor:
        cursor.execute("insert into starts values (%s, clock_timestamp())", (job,))


@cache
def _connection(_pid: int) -> Any:
    connection = psycopg2.connect(os.environ["BENCH_DSN"])
    connection.autocommit = True
    return connection
