"""Kinds with bulk, while everything dies."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from workers import Worker

from chaos.scenario import scenario
from chaos.site import Site


@scenario()
def bulk(site: Site) -> None:
    """Children and workers are killed and the broker flushed while many jobs travel in each message."""
    for kind in ("mark_bulk", "mark_list"):
        site.add(kind, site.jobs // 2, seconds=0.01, over=site.span(20))
    workers = [site.worker() for _ in range(2)]
    for worker in workers:
        worker.ready()
    site.seen |= {"children": 0, "workers": 0, "flushes": 0}
    for number in site.every(0.7, lasting=30):
        if number % 3 == 0:
            site.seen["children"] += _kill_a_child(site, workers)
        elif number % 3 == 1:
            site.broker.flush()
            site.seen["flushes"] += 1
        else:
            workers.pop(0).kill()
            workers.append(site.worker())
            site.seen["workers"] += 1
    site.settle()
    # A child is at one job, or at a list; of a whole worker, a job must have been alone for an attempt to count.
    for kind, jobs in (("mark_bulk", 1), ("mark_list", 50)):
        attempts = site.ask("select sum(attempts) from vk_jobs where kind = :kind", kind=kind)
        most = jobs * site.seen["children"] + 2 * site.seen["workers"]
        assert attempts <= most, f"of {kind} more attempts than jobs that were executed when their process died"


def _kill_a_child(site: Site, workers: list[Worker]) -> bool:
    """Kill a child that runs jobs, if there is one."""
    (by,) = site.row("select max(claimed_by) from vk_jobs where status = 'running' and lease_until > now()")
    if by is None:
        return False
    pid = int(by.split()[-1])
    with suppress(ProcessLookupError):
        if os.getpgid(pid) in {worker.process.pid for worker in workers}:  # else it has died, and this is another's
            os.kill(pid, signal.SIGKILL)
            return True
    return False
