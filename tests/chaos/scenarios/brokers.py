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
            pass
    site.settle()
    site.no_attempt_is_spent()


@scenario()
def broker_away(site: Site) -> None:
    """The broker is away for 20 s."""
    site.add("mark", site.jobs, seconds=0.02, over=site.span(30))
    site.worker().ready()
    with site.away(site.broker):
        time.sleep(site.span(20))
    site.settle()
    site.no_attempt_is_spent()
