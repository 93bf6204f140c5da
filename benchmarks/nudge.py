"""How long after its insert a job that is due at once starts, if a host enqueues it on a quiet worker.

From the insert, which is a little before the commit, to what the handler writes; both by the database's clock.
"""

from __future__ import annotations

from typing import Any

from benchmarks.figures import spread, table
from benchmarks.site import Site, wait_for
from benchmarks.systems import marks, vkjobs

_JOBS, _SHORT_JOBS = 1000, 100
_WARM_UP = 20  # a child connects at its first job
_PAUSE_S = 0.03
_PRODUCER = "benchmarks.systems.vkjobs_producer"


def run(site: Site, *, short: bool) -> dict[str, Any]:
    """Return the spread of the time from insert to start."""
    number = _SHORT_JOBS if short else _JOBS
    with site.place() as place:
        place.ask(marks.TABLES)
        vkjobs.serve(place)
        place.start(_PRODUCER, str(_WARM_UP + number), str(_PAUSE_S))
        started = "select count(distinct job) from starts"
        wait_for(lambda: place.ask(started)[0][0] == _WARM_UP + number, "all jobs to start", every=0.5)
        rows = place.ask(
            """
            select extract(epoch from min(s.started_at) - j.run_at) * 1000
            from vk_jobs j join starts s on s.job = j.ref_id::int
            where s.job >= %s group by j.id""",
            _WARM_UP,
        )
    return {"jobs": number, **spread([float(late) for (late,) in rows])}


def tell(figures: dict[str, Any]) -> str:
    """Return the figures for people."""
    return table(("jobs", "p50 ms", "p99 ms", "max ms"), [list(figures.values())])
