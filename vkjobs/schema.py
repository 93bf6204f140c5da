"""The names of what vkjobs has in Postgres, and the states of a job. Knows no SQL: the ledger and the migrations do."""

from __future__ import annotations

from enum import StrEnum

TABLE = "vk_jobs"


class Status(StrEnum):
    """The value of ``vk_jobs.status``. With ``lease_until`` it says where a job is.

               enqueue
                  │          ┌──────── release, free_again ───────┐
                  ▼          ▼                                    │
        ┌──────── PENDING, free ──────────── lease ────▶ PENDING, leased ◀─┐
        │            ▲   ▲                                │  │        └────┘ lease_again
        │            │   └── snooze, settle_failed, ──┐   │  └─ claim ─┐
      cancel         │       settle_dead_child,       │ cancel         ▼
        │          retry     take_over                └───┼───────  RUNNING ◀─┐
        ▼            │                                    │        │  │  └────┘ renew
      CANCELLED ─────┤ ◀──────────────────────────────────┘        │  └─ settle_done ─▶ DONE
                     └──────────────── FAILED ◀────────────────────┘
                                              settle_failed, settle_dead_child

    Each verb is a function of the ledger. Not drawn: reschedule leads from pending, free or leased, to free.
    """

    PENDING = "pending"
    """Waits. Free (``lease_until`` null): dispatch moves it on by ``lease``. Leased (set): its message is under way, and
    a worker moves it on by ``claim``; once the lease is over, dispatch does by ``lease_again`` or ``free_again``. Host
    code moves both by ``cancel``."""

    RUNNING = "running"
    """A worker executes it, and moves it out by ``settle_done``, ``settle_failed`` or ``snooze``; if it died, dispatch
    does, by ``settle_dead_child`` or ``settle_failed``, or by ``take_over`` where the original dispatcher ran it."""

    DONE = "done"
    """The handler returned. Nobody moves it out."""

    FAILED = "failed"
    """The last attempt failed, or the handler gave up. People move it out by ``retry``."""

    CANCELLED = "cancelled"
    """Called off before a worker claimed it. People move it out by ``retry``."""


class Index(StrEnum):
    """The names of the partial indexes: one for each place in which a job can wait, and one constraint."""

    FREE = "vk_jobs_free"
    LEASED = "vk_jobs_leased"
    RUNNING = "vk_jobs_running"
    UNIQUE_KEY = "vk_jobs_unique_key"
