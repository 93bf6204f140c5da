"""Ticks stop, come in crowds, come without workers; messages come twice; clocks go wrong."""

from __future__ import annotations

import time
from pathlib import Path

from celery import Celery

from chaos.scenario import scenario
from chaos.servers import depth, put, take_all
from chaos.site import LEASE_S, TICK_S, Site

WINDOW = 50


@scenario(any_broker=True)
def beat_killed(site: Site) -> None:
    """The only beat is killed while jobs come due all the time."""
    beat = site.beat()
    worker = site.worker(beat=False).ready()
    site.add("mark", 20 * int(site.span(40)), over=site.span(40))
    time.sleep(2)
    beat.kill()
    killed_at = site.ask("select clock_timestamp()")
    site.settle()
    assert "beat is silent" in worker.log, "the worker did not tick by itself"
    # Three missing ticks tell that beat is away; within three more all is as before.
    later = f"run_at > timestamptz '{killed_at}' + make_interval(secs => {6 * TICK_S})"
    site.seen |= {"latest_s": site.lateness(), "latest_later_s": site.lateness(later)}
    assert 0 < site.lateness(later) < 3 * TICK_S, "jobs are late still"


@scenario(any_broker=True)
def many_beats(site: Site) -> None:
    """Ten beats tick at once."""
    site.add("mark", site.jobs, over=5)
    for _ in range(10 if site.long else 4):
        site.beat()
    site.worker()
    site.settle()
    site.each_job_is_started_once()


@scenario()
def many_ticks(site: Site) -> None:
    """run_due is fired 2,000 times by hand while jobs are due."""
    site.add("mark", site.jobs)
    ticks = 2000 if site.long else 200
    with Celery(broker=site.broker.url) as client, client.producer_pool.acquire() as producer:
        for _ in range(ticks):
            client.send_task("vkjobs.run_due", queue="vkjobs.tick", producer=producer)
    site.worker(concurrency=4)
    site.settle()
    site.wait(lambda: depth(site.broker, "vkjobs.tick") < 10, "the ticks to end")
    site.each_job_is_started_once()


@scenario()
def messages_doubled(site: Site) -> None:
    """Every message is delivered twice, and in reverse."""
    site.add("mark", site.jobs)
    site.worker("-Q", "vkjobs.tick", concurrency=1)
    site.worker("-Q", "twice", beat=False, concurrency=4)
    while site.count("status <> 'done'"):
        messages = take_all(site.broker, "vkjobs")
        put(site.broker, "twice", [copy for message in reversed(messages) for copy in (message, message)])
        time.sleep(0.1)
    site.each_job_is_started_once()
    site.no_attempt_is_spent()


@scenario()
def workers_away(site: Site) -> None:
    """Ticks go on for ten leases without a worker for the jobs; then one comes, but none for the kind `lonely`."""
    site.lease = 1
    deepest = dict.fromkeys(("vkjobs", "lonely"), 0)

    def look() -> None:
        for queue in deepest:
            deepest[queue] = max(deepest[queue], depth(site.broker, queue))

    site.add("mark", site.jobs)
    site.add("lonely", site.jobs)
    site.worker("-Q", "vkjobs.tick", concurrency=1, VKJOBS_WINDOW=str(WINDOW), VKJOBS_BATCH=str(WINDOW)).ready()
    ends_at = time.monotonic() + 10 * site.lease
    while time.monotonic() < ends_at:
        look()
        time.sleep(0.2)
    site.worker("-Q", "vkjobs,vkjobs.tick", VKJOBS_WINDOW=str(WINDOW), VKJOBS_BATCH=str(WINDOW))
    while site.count("kind = 'mark' and status <> 'done'"):
        look()
        time.sleep(0.2)
    site.seen |= {"deepest": max(deepest.values())}
    assert max(deepest.values()) <= 2 * WINDOW, f"more than two windows: {deepest}"
    assert site.count("kind = 'lonely' and status <> 'pending'") == 0, "who ran the lonely ones?"
    site.worker("-Q", "lonely,vkjobs.tick", VKJOBS_WINDOW=str(WINDOW), VKJOBS_BATCH=str(WINDOW))
    site.settle()
    site.no_attempt_is_spent()


FAKETIME = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))


@scenario(any_broker=True, alone=True, missing=lambda: "" if FAKETIME else "apt-get install faketime")
def clocks_wrong(site: Site) -> None:
    """One worker's clock is ten minutes ahead, the other's ten behind."""
    for shift in ("+10m", "-10m"):
        site.worker(LD_PRELOAD=str(FAKETIME[-1]), FAKETIME=shift, FAKETIME_DONT_FAKE_MONOTONIC="1").ready()
    site.add("mark", site.jobs, due=2, over=site.jobs / 40)
    site.add("fail_once", 10, due=2, over=2)
    site.settle()
    site.seen["latest_s"] = site.lateness()
    assert site.count("started_at < run_at") == 0, "a job started early"
    assert site.lateness() < LEASE_S, "a message was held until its lease was over"
