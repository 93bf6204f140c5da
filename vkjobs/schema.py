"""What vkjobs has in Postgres, by name, and the states of a job. Knows no SQL."""

from __future__ import annotations

from enum import StrEnum

TABLE = "vk_jobs"
TICKS = "vkjobs_ticks"
"""When who ticked last, a row each; it tells workers whether beat is there."""


class Status(StrEnum):
    """The value of ``vk_jobs.status``; of a pending job, ``lease_until`` says whether it is free or leased.

                   ┌───── snooze, settle_failed, settle_dead_child, take_over ─────┐
                   ├──── release, free_again ────┐                                 │
                   ▼                             │                                 │
        enqueue ─▶ PENDING, free ── lease ──▶ PENDING, leased ── claim ──▶ RUNNING ┴─ settle_done ──▶ DONE
                   ▲      │                      │                         │
                   │      └──────── cancel ──────┤             settle_failed, settle_dead_child
                   │                             ▼                         ▼
                   └─────────── retry ────── CANCELLED                  FAILED
                   └─────────── retry ─────────────────────────────────────┘

    Each verb is a function of the ledger. Not drawn: lease_again and renew give a new lease and change no
    state; reschedule leads from pending to free; prune deletes what has long been done, if it is told to.
    """

    PENDING = "pending"
    """Waits. Free: dispatch moves it on by ``lease``. Leased, its message under way: a worker, by ``claim``;
    once the lease is over, dispatch, by ``lease_again`` or ``free_again``. Host code may ``cancel`` both."""

    RUNNING = "running"
    """A worker executes it, and moves it out by ``settle_done``, ``settle_failed`` or ``snooze``. If it
    died, others do, by ``settle_dead_child`` or ``settle_failed``; what the original dispatcher left, by
    ``take_over``."""

    DONE = "done"
    """The handler returned. Nobody moves it out, but ``prune`` may delete it."""

    FAILED = "failed"
    """The last attempt failed, or the handler gave up. People move it out, by ``retry``."""

    CANCELLED = "cancelled"
    """Called off before a worker claimed it. People move it out, by ``retry``."""


class Index(StrEnum):
    """The names of the partial indexes: one for each place in which a job can wait, and one constraint."""

    FREE = "vk_jobs_free"
    LEASED = "vk_jobs_leased"
    RUNNING = "vk_jobs_running"
    UNIQUE_KEY = "vk_jobs_unique_key"
