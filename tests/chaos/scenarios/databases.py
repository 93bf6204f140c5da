"""Postgres ends connections, crashes, is full, is locked, is behind a PgBouncer, or is migrated just now."""

from __future__ import annotations

import time

from original import make_original

from chaos.scenario import scenario
from chaos.servers import PgBouncer
from chaos.site import Site


@scenario(any_broker=True)
def backends_terminated(site: Site) -> None:
    """Every connection to the database is ended every second."""
    site.add("mark", site.jobs, seconds=0.02, over=site.span(20))
    for worker in [site.worker(), site.worker()]:
        worker.ready()
    for _ in site.every(1, lasting=20):
        site.terminate()
    site.settle()


@scenario(any_broker=True)
def postgres_crashed(site: Site) -> None:
    """Postgres crashes and recovers, twice."""
    site.claims_may_be_unseen = True
    site.add("mark", site.jobs, seconds=0.02, over=site.span(20))
    for worker in [site.worker(), site.worker()]:
        worker.ready()
    for _ in range(2):
        site.until("exists (select from vk_jobs where status = 'running')", "jobs to run")
        with site.away(site.postgres):
            time.sleep(site.span(3))
        time.sleep(site.random.uniform(1, 3))
    site.settle()


@scenario(any_broker=True)
def connections_exhausted(site: Site) -> None:
    """Others hold all the connections that Postgres allows for 15 s."""
    site.add("mark", site.jobs, seconds=0.02, over=site.span(20))
    worker = site.worker().ready()
    with site.all_connections() as site.seen["held"]:
        time.sleep(site.span(15))
    site.settle()
    assert worker.process.poll() is None, "the worker ended"


@scenario(any_broker=True)
def rows_locked(site: Site) -> None:
    """Somebody locks rows in every place for 10 s; another one's transaction is open all the time."""
    site.lease = 6
    places = ("status = 'running'", "lease_until is not null and status = 'pending'", "lease_until is null")
    some = [f"(select id from vk_jobs where {place} order by random() limit 4)" for place in places]
    with site.transaction("select count(*) from vk_jobs", "REPEATABLE READ"):
        site.add("mark", site.jobs, seconds=0.02)
        site.worker(concurrency=6).ready()
        site.until("count(*) > 10 from vk_jobs where status = 'done'", "the worker to be in the middle")
        with site.transaction(f"select id from vk_jobs where id in ({' union all '.join(some)}) for update") as locked:
            done = [site.count("status = 'done'")]
            for _ in range(2):
                time.sleep(max(6, site.span(10)) / 2)
                done.append(site.count("status = 'done'"))
        site.seen |= {"locked": len(locked), "done_meanwhile": done[-1] - done[0]}
        assert done[2] > done[1] or done[2] >= site.jobs - len(locked), "the others did not go on"
        site.settle()
    site.no_attempt_is_spent()


@scenario(any_broker=True, missing=lambda: "" if PgBouncer.is_installed() else "apt-get install pgbouncer")
def pgbouncer(site: Site) -> None:
    """Eight children share two connections, through a PgBouncer in transaction mode."""
    site.add("mark", site.jobs)
    with PgBouncer(site.url, size=2) as bouncer:
        site.worker(concurrency=8, VKJOBS_DATABASE_URL=bouncer.url)
        site.settle()
    site.no_attempt_is_spent()


@scenario(any_broker=True, migrated=False)
def migrated_while_ticking(site: Site) -> None:
    """The original's table is migrated while workers tick on it already."""
    site.claims_may_be_unseen = True  # what runs between the migration and the audit's beginning
    make_original(site.url)
    site.add("mark", site.jobs)
    worker = site.worker(concurrency=4).ready()
    site.wait(lambda: "nothing was leased" in worker.log, "a tick")
    site.migrate()
    site.settle()
    site.no_attempt_is_spent()
    site.each_job_is_started_once()
    assert site.count("true") == site.jobs, "the migration lost rows"
