"""What the demo shows: how far the jobs are while it runs, and how they ended. Changes nothing."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, TextIO

from sqlalchemy import Engine, text

from vkjobs.ledger import JobId
from vkjobs.marketplace.scenario import Deadline

_WRONG_SHOWN = 20


def say(line: str, file: TextIO | None = None) -> None:
    """Print a line at once, also into a pipe."""
    file = file or sys.stdout
    file.write(f"{line}\n")
    file.flush()


class Row(NamedTuple):
    """How far the jobs of a kind are, or all of them; lateness in milliseconds."""

    kind: str
    pending: int
    running: int
    done: int
    failed: int
    retries: int
    p50: float | None
    p99: float | None
    max: float | None

    def cells(self) -> list[str]:
        """Return the row as text."""
        late = ["" if value is None else f"{value:.0f}" for value in self[6:]]
        return [self.kind, *map(str, self[1:6]), *late]


# A job is late by what passed from run_at to its start. A failed attempt moves run_at: a retry has its own.
# What was due before the worker was up was overdue: its lateness says nothing about vkjobs.
_PROGRESS = """
    with worker as (select min(started_at) as up from vk_jobs where status = 'done'),
    job as (
        select kind, status, attempts,
            case when run_at >= worker.up and status in ('running', 'done')
                 then extract(epoch from started_at - run_at) * 1000 end as late
        from vk_jobs, worker
    )
    select coalesce(kind, 'all'),
        count(*) filter (where status = 'pending'), count(*) filter (where status = 'running'),
        count(*) filter (where status = 'done'), count(*) filter (where status = 'failed'),
        sum(attempts) - count(*) filter (where status = 'failed'),
        percentile_disc(0.5) within group (order by late), percentile_disc(0.99) within group (order by late),
        max(late)
    from job group by grouping sets ((kind), ()) order by grouping(kind), kind"""
_COLUMNS = ["kind", "pending", "running", "done", "failed", "retries", "p50", "p99", "max"]
_CAPTION = "p50, p99, max: lateness in ms, from run_at to start"

Show = Callable[[float, list[Row], bool], None]
"""Takes the seconds that have passed, the rows, and whether they are the last."""


def progress(engine: Engine) -> list[Row]:
    """Return a row for each kind, and last the one for all."""
    with engine.connect() as conn:
        return [Row(*row) for row in conn.execute(text(_PROGRESS))]


def screen() -> AbstractContextManager[Show]:
    """Return what shows the rows: a live table on a terminal, else a line per second and a last table."""
    return _live_table() if sys.stdout.isatty() else _lines()


@contextmanager
def _live_table() -> Iterator[Show]:
    from rich import box  # noqa: PLC0415 - only a terminal needs it
    from rich.live import Live  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    def draw(seconds: float, rows: list[Row], _: bool) -> None:
        title = f"{seconds:.1f} s"
        table = Table(*_COLUMNS, title=title, caption=_CAPTION, box=box.SIMPLE, show_footer=True)
        table.padding = (0, 1, 0, 0)
        for column, total in zip(table.columns, rows[-1].cells(), strict=True):
            column.footer = total
            column.justify = "left" if column is table.columns[0] else "right"
        for row in rows[:-1]:
            table.add_row(*row.cells())
        live.update(table, refresh=True)

    with Live(auto_refresh=False) as live:
        yield draw


@contextmanager
def _lines() -> Iterator[Show]:
    told = 0.0

    def tell(seconds: float, rows: list[Row], over: bool) -> None:
        nonlocal told
        if over:
            for cells in [_COLUMNS, *(row.cells() for row in rows)]:
                say(f"  {cells[0]:<20}" + "".join(f"{cell:>9}" for cell in cells[1:]))
            say(f"  {_CAPTION}")
        elif seconds - told >= 1:
            told = seconds
            numbers = zip(_COLUMNS[1:], rows[-1].cells()[1:], strict=True)
            say(f"  {seconds:4.1f} s  " + "  ".join(f"{name} {number}" for name, number in numbers if number))

    yield tell


def summarise(jobs: Mapping[JobId, Deadline], wrong: Mapping[JobId, str]) -> None:
    """Print how many of each group ended as expected, and which did not."""
    sizes = Counter(deadline.group for deadline in jobs.values())
    bad = Counter(jobs[job_id].group for job_id in wrong if job_id in jobs)
    say("As expected, by what they were there to show:")
    for group, size in sizes.most_common():
        say(f"  {group:<36} {size - bad[group]:>4} of {size}")
    for line in list(wrong.values())[:_WRONG_SHOWN]:
        say(f"  WRONG: {line}")
    if wrong:
        say(f"{len(wrong)} of {len(jobs)} deadlines did not end as expected.")
    else:
        say(f"All {len(jobs)} deadlines, and their tasks, ended as expected.")
