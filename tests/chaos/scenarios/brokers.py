"""The broker loses everything, or is away."""

from __future__ import annotations

import time

from chaos.scenario import scenario
from chaos.site import Site


@scenario()
def broker_flushed(site: Site) -> None:
    """All messages are thrown away, again and again."""
    site.add("mark", site.jobs, seconds=0.02, over=site.span(20))
    site.worker().ready()
    for _ in site.every(1, lasting=20):
        site.broker.flush()
    site.settle()
    site.no_attempt_is_spent()


@scenario()
def broker_restarted(site: Site) -> None:
    """The broker dies and comes back empty, again and again."""
    site.add("mark", site.jobs, seconds=0.02, over=site.span(20))
    site.worker().ready()
    for _ in site.every(2, lasting=20):
        with site.away(site.broker):
            time.sleep(site.random.uniform(0, 1))
    site.settle()
    site.no_attempt_is_spent()


@scenario()
def broker_away(site: Site) -> None:
    """The broker is away for 20 s, while the worker holds messages."""
    site.add("mark", site.jobs, seconds=0.02, over=site.span(30))
    site.add("mark", 20, seconds=0.5)
    site.worker().ready()
    site.until("exists (select from vk_jobs where status = 'running')", "the worker to hold messages")
    with site.away(site.broker):
        time.sleep(site.span(20))
    site.settle()
    site.no_attempt_is_spent()
