"""The five chaos phases of the open benchmark of Postgres queues, scaled down.

A producer adds jobs at a steady rate all the time; after the fault they must be done again as fast as they come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from chaos.scenario import scenario
from chaos.site import Site

RATE = 40  # jobs a second
BACK_WITHIN_S = 10
_WARM_UP_S = 1
_WINDOW_S = 2  # over which the rate is measured


@contextmanager
def steady_load(site: Site) -> Iterator[None]:
    """Add jobs at the rate, in the time before the block, in it, and until they are done at that rate again."""
    stop = threading.Event()

    def produce() -> None:
        began, produced = time.monotonic(), 0
        while not stop.wait(0.1):
            offered = int((time.monotonic() - began) * RATE)
            site.add("mark", offered - produced, seconds=0.02)
            produced = offered

    producer = threading.Thread(target=produce)
    producer.start()
    try:
        site.until(f"{_rate()} >= {0.9 * RATE}", "the base rate")
        time.sleep(_WARM_UP_S)
        yield
        ended_at = time.monotonic()
        site.until(f"{_rate()} >= {0.9 * RATE}", "the rate to come back", BACK_WITHIN_S)
        site.seen["back_after_s"] = round(time.monotonic() - ended_at, 1)
    finally:
        stop.set()
        producer.join()
    site.settle()


def _rate() -> str:
    since = f"clock_timestamp() - interval '{_WINDOW_S} s'"
    return f"(select count(*) from vk_jobs where status = 'done' and updated_at > {since}) / {_WINDOW_S}"


@scenario(any_broker=True)
def crash_recovery(site: Site) -> None:
    """One of two workers is killed, gone for 60 s, and started again."""
    victim = site.worker().ready()
    site.worker().ready()
    with steady_load(site):
        victim.kill()
        time.sleep(site.span(30))
        site.worker().ready()


@scenario(any_broker=True)
def repeated_kills(site: Site) -> None:
    """One of two workers is killed and started every 20 s, for 120 s."""
    victim = site.worker().ready()
    site.worker().ready()
    with steady_load(site):
        for _ in site.every(3, lasting=40):
            victim.kill()
            victim = site.worker().ready()


@scenario(any_broker=True)
def postgres_restart(site: Site) -> None:
    """Postgres is down for 30 s, and up again."""
    site.claims_may_be_unseen = True
    site.worker().ready()
    site.worker().ready()
    with steady_load(site), site.away(site.postgres):
        time.sleep(site.span(30))


@scenario(any_broker=True)
def pg_backend_kill(site: Site) -> None:
    """Every backend that does something is terminated twice a second, for 60 s."""
    site.worker().ready()
    site.worker().ready()
    with steady_load(site):
        for _ in site.every(0.5, lasting=30):
            site.terminate("state in ('active', 'idle in transaction')")


@scenario(any_broker=True)
def pool_exhaustion(site: Site) -> None:
    """Others hold 300 idle connections, or as many as Postgres allows, for 60 s."""
    site.worker().ready()
    site.worker().ready()
    with steady_load(site), site.all_connections(300) as site.seen["held"]:
        time.sleep(site.span(30))
