"""How late jobs are that come due, 50 a second, while a burst of 20,000 that is due already is worked off.

Once with all in one queue, where the oldest goes first, and once with a queue of their own for those that come due.
"""

from __future__ import annotations

from typing import Any

from benchmarks.figures import spread, table
from benchmarks.site import Place, Site, wait_for
from benchmarks.systems import marks, vkjobs

_BURST, _SHORT_BURST = 20_000, 1000
_PER_S = 50
_OVER_S, _SHORT_OVER_S = 40, 4
_BURST_AFTER_S = 2


def run(site: Site, *, short: bool) -> dict[str, Any]:
    """Return by queue the spread of the lateness of those that come due, and how long the burst took."""
    burst, over = (_SHORT_BURST, _SHORT_OVER_S) if short else (_BURST, _OVER_S)
    kinds = {"same_queue": vkjobs.MARK, "own_queue": vkjobs.MARK_APART}
    return {name: _measure(site, kind, burst, over) for name, kind in kinds.items()}


def _measure(site: Site, kind: str, burst: int, over: int) -> dict[str, float]:
    with site.place() as place:
        place.ask(marks.TABLES)
        vkjobs.serve(place)
        place.ask(
            """
            insert into vk_jobs (kind, ref_id, run_at)
            select %s, n::text, clock_timestamp() + make_interval(secs => %s + n / %s::float)
            from generate_series(1, %s) n""",
            kind, _BURST_AFTER_S, _PER_S, _PER_S * over,
        )  # fmt: skip
        vkjobs.add(place, vkjobs.NOOP, burst)
        wait_for(lambda: _pending(place) == 0, "all jobs to be settled", patience=60 + over + burst / 100, every=0.5)
        rows = place.ask("""
            select extract(epoch from s.started_at - j.run_at) * 1000
            from vk_jobs j join starts s on s.job = j.ref_id::int and j.kind like 'mark%%'""")
        ((seconds,),) = place.ask(
            "select extract(epoch from max(updated_at) - min(started_at)) from vk_jobs where kind = %s", vkjobs.NOOP
        )
    return {**spread([float(late) for (late,) in rows]), "burst_s": round(float(seconds), 1)}


def _pending(place: Place) -> int:
    ((count,),) = place.ask("select count(*) from vk_jobs where status in ('pending', 'running')")
    return int(count)


def tell(figures: dict[str, Any]) -> str:
    """Return the figures for people."""
    head = ("ms late", "p50", "p99", "max", "burst s")
    return table(head, [(name, *one.values()) for name, one in figures.items()])
