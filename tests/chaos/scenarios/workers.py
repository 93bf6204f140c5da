"""Workers and their children die, stand still, or are replaced."""

from __future__ import annotations

import os
import signal
import time

from chaos.scenario import scenario
from chaos.site import Site


@scenario()
def worker_killed(site: Site) -> None:
    """The main process of a worker is killed every 2 s, alone or with its children."""
    site.add("mark", site.jobs, seconds=0.05, over=site.span(30))
    workers = [site.worker() for _ in range(2)]
    for kills in site.every(2, lasting=30):
        victim = workers.pop(0).ready()
        workers.append(site.worker())
        if site.random.random() < 0.5:
            victim.signal(signal.SIGKILL)
        else:
            victim.kill()
        site.seen["kills"] = kills + 1
    site.settle()
    assert site.attempts() <= 2 * site.seen["kills"], "more attempts than jobs that ran when their worker was killed"


@scenario(any_broker=True, alone=True)
def child_killed(site: Site) -> None:
    """A child is killed in the middle of a job, again and again."""
    site.lease = 3600  # so that nothing but the worker's main process can have settled the job
    site.add("mark", site.jobs // 20, seconds=0.5)
    site.worker().ready()
    just_started = "from vk_jobs where status = 'running' and started_at > clock_timestamp() - interval '0.3 s'"
    slowest = 0.0
    for kills in site.every(0.5, lasting=10):
        site.until(f"exists (select {just_started})", "a job to run")
        attempts = site.attempts()
        (by,) = site.row(f"select claimed_by {just_started} order by started_at desc limit 1")
        began = time.monotonic()
        os.kill(int(by.split()[-1]), signal.SIGKILL)
        site.until(f"sum(attempts) > {attempts} from vk_jobs", "the attempt to be counted")
        slowest = max(slowest, time.monotonic() - began)
        site.seen |= {"kills": kills + 1, "slowest_settle_s": round(slowest, 2)}
    site.settle()
    assert site.attempts() == site.seen["kills"], "each kill is one attempt"
    assert slowest < 1, "settled late"


@scenario(any_broker=True)
def poison(site: Site) -> None:
    """Kinds that always kill their process, among many others."""
    site.max_attempts = 3
    site.lease = 60
    for kind in ("kill", "segfault", "memory", "exit"):
        site.add(kind, 2, fails=True)
    site.add("mark", site.jobs)
    site.worker().ready()
    site.settle()
    assert site.count("kind = 'mark' and attempts > 0") == 0, "a job beside the poisonous ones lost an attempt"


@scenario(any_broker=True)
def worker_stopped(site: Site) -> None:
    """A worker stands still in a handler for twice the lease, and goes on when another has done its job."""
    site.lease = 2
    site.add("mark", 1, seconds=1)
    first = site.worker().ready()
    site.until("exists (select from vk_jobs where status = 'running')", "the job to run")
    os.killpg(first.process.pid, signal.SIGSTOP)
    site.worker().ready()
    time.sleep(2 * site.lease)
    site.settle()
    outcome = site.row("select claimed_by, updated_at, attempts from vk_jobs")
    os.killpg(first.process.pid, signal.SIGCONT)
    site.wait(lambda: "lease lost" in first.log, "the late one to be refused")
    assert site.row("select claimed_by, updated_at, attempts from vk_jobs") == outcome, "the successor's outcome stands"
    assert first.name not in outcome[0], "the successor settled it"


@scenario()
def rolling_deploy(site: Site) -> None:
    """Each of five workers gets SIGTERM and is replaced, under load."""
    site.lease = 20
    workers = [site.worker() for _ in range(5 if site.long else 3)]
    for worker in workers:
        worker.ready()
    site.add("mark", site.jobs, over=site.jobs / 30, seconds=0.05)
    for worker in workers:
        replacement = site.worker().ready()
        assert worker.stop() == 0, worker.log
        assert replacement.process.poll() is None, replacement.log
    site.settle()
    site.seen["latest_s"] = site.lateness()
    site.no_attempt_is_spent()
    assert site.lateness() < site.lease, "a job waited for a lease to expire"
