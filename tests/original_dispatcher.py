"""The original dispatcher's algorithm, told again in Python: a program of its own, to share a table with vkjobs.

python original_dispatcher.py DATABASE_URL LEASE_S [SECONDS_PER_JOB]
"""

from __future__ import annotations

import sys
import time
import traceback
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine, text

sys.path.append(str(Path(__file__).parent / "apps"))
from recording_service import service

BATCH, MAX_ATTEMPTS, BACKOFF_S = 20, 5, 30

TAKE = """
    update vk_jobs set status = 'running', lease_until = :lease_until, updated_at = now()
    where id in (
        select id from vk_jobs
        where (status = 'pending' and run_at <= :now) or (status = 'running' and lease_until < :now)
        order by run_at limit :batch for update skip locked)
    returning id, kind, ref_id, attempts"""
DONE = "update vk_jobs set status = 'done', lease_until = null, updated_at = now() where id = :id"
FAIL = """
    update vk_jobs
    set status = :status, attempts = :attempts, run_at = :run_at, lease_until = null, last_error = :error,
        updated_at = now()
    where id = :id"""


def execute(job: Any) -> None:
    """Do what the original did for a kind."""
    if job.ref_id is None:
        raise ValueError(f"vk_jobs.ref_id missing for {job.kind}, id: {job.id}")
    if job.kind in ("open_expire", "hold_timeout", "checkpoint_miss", "contest_close"):
        service.act_as_worker(None, task_id=job.ref_id, action={"type": job.kind})
    elif job.kind in ("checkpoint_warn", "review_warn"):
        service.warn(None, task_id=job.ref_id, kind=job.kind)
    elif job.kind == "transfer_expire":
        service.expire_transfers(None, task_id=job.ref_id)
    else:
        raise ValueError(f"Unhandled job kind: {job.kind}, id: {job.id}")


def run_due(conn: Connection, lease: float, pause: float) -> int:
    """Take a batch and run it, one job after another."""
    now = datetime.now(UTC)
    until = now + timedelta(seconds=lease)
    jobs = conn.execute(text(TAKE), {"now": now, "lease_until": until, "batch": BATCH}).all()
    for job in jobs:
        time.sleep(pause)
        try:
            execute(job)
        except Exception:
            attempts = job.attempts + 1
            status = "failed" if attempts >= MAX_ATTEMPTS else "pending"
            run_at = datetime.now(UTC) + timedelta(seconds=BACKOFF_S * 2**job.attempts)
            values = {
                "status": status,
                "attempts": attempts,
                "run_at": run_at,
                "error": traceback.format_exc(),
            }
            conn.execute(text(FAIL), {"id": job.id, **values})
        else:
            conn.execute(text(DONE), {"id": job.id})
    return len(jobs)


def main(url: str, lease: str, pause: str = "0") -> None:
    """Run for ever."""
    with create_engine(url, isolation_level="AUTOCOMMIT").connect() as conn:
        while True:
            if not run_due(conn, float(lease), float(pause)):
                time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
