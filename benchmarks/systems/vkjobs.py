"""vkjobs, from rows to settled rows, at its default settings."""

from __future__ import annotations

from benchmarks.site import Place, Process
from vkjobs.migrations import migrate

APP = "benchmarks.systems.vkjobs_app"
NOOP, BULK, WAIT, MARK, MARK_APART, WORK = "noop", "noop_bulk", "wait", "mark", "mark_apart", "work"


def serve(place: Place, *, concurrency: int = 2) -> Process:
    """Migrate, and start a worker with beat; return it once it consumes."""
    migrate(place.url)
    return work(place, "-B", concurrency=concurrency)


def work(place: Place, *options: str, concurrency: int = 2, name: str = "w") -> Process:
    """Start a worker; return it once it consumes."""
    worker = place.start("celery", "-A", APP, "worker", "-c", str(concurrency), "-n", f"{name}@bench", *options)
    worker.ready()
    return worker


def add(place: Place, kind: str, number: int) -> None:
    """Add jobs that are due now, in one transaction."""
    sql = """
        insert into vk_jobs (kind, ref_id, run_at)
        select %s, 'r' || i, clock_timestamp() from generate_series(1, %s) i"""
    place.ask(sql, kind, number)


def settled(place: Place) -> tuple[int, float]:
    """Return how many jobs are done, and when the last one was settled, in seconds since the epoch."""
    sql = "select count(*), coalesce(extract(epoch from max(updated_at)), 0) from vk_jobs where status = 'done'"
    ((count, last),) = place.ask(sql)
    return count, float(last)


class System:
    """See `systems.System`."""

    def __init__(self, name: str = "vkjobs", kind: str = NOOP, first_guess: int = 800) -> None:
        self.name = name
        self.first_guess = first_guess
        self._kind = kind

    def begin(self, place: Place, number: int) -> None:
        """Start a worker, then add the jobs: they begin at the next tick."""
        serve(place)
        add(place, self._kind, number)

    def settled(self, place: Place) -> tuple[int, float]:
        """Read the rows."""
        return settled(place)


class Scheduler:
    """See `systems.Scheduler`."""

    name = "vkjobs"

    def serve(self, place: Place) -> None:
        """Start a worker with beat."""
        serve(place)

    def schedule(self, place: Place) -> None:
        """Add rows, as a host does in SQL."""
        place.ask(f"insert into vk_jobs (kind, ref_id, run_at) select '{MARK}', job::text, run_at from due")
