"""The protocol as a small pure model: what each statement does to the jobs, and what it answers.

Time is a number of minutes that only the test moves: so many that none passes by itself while a test runs. A token is
an object: to hold it is to hold that very one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from legal import Rules

# No sum of these ends where a comparison turns.
LEASE, CLAIM, HORIZON, GRACE, BACKOFF = 65, 45, 10, 20, 15  # minutes
MAX_ATTEMPTS, BATCH, WINDOW = 3, 2, 3
RULES = Rules(
    max_attempts=MAX_ATTEMPTS,
    lease=60 * (LEASE - HORIZON),
    horizon=60 * HORIZON,
    backoff=60 * BACKOFF,
    foreign_grace=60 * GRACE,
)
_MARGIN = 1  # minutes; a lease is only too long if it is longer by this


@dataclass(eq=False)
class Token:
    """A lease; ``value`` is what the database has for it, once that is known."""

    until: float
    value: datetime | None = None


@dataclass(eq=False)
class Job:
    """A row."""

    id: Any
    kind: str
    run_at: float
    place: str = "free"
    token: Token | None = None
    attempts: int = 0
    by: str | None = None
    ours: bool = False
    """Of a running job: not the original's."""
    tokens: list[Token] = field(default_factory=list)
    """All that it has had."""

    @property
    def pending(self) -> bool:
        return self.place in ("free", "leased")

    @property
    def over(self) -> bool:
        return self.place in ("done", "failed", "cancelled", "gone")

    def token_of(self, value: datetime) -> Token:
        """Return the token that the database calls so; one whose value nobody has seen yet, if there is no other."""
        token = next((token for token in self.tokens if token.value == value), None)
        token = token or next(token for token in self.tokens if token.value is None and not math.isinf(token.until))
        token.value = value
        return token


Effect = dict[Job, dict[str, Any]]


class Model:
    """All jobs. A method is a statement of that name and returns its answer."""

    def __init__(self) -> None:
        self.now = 0.0
        self.jobs: list[Job] = []
        self.touched: set[Job] = set()
        """Whose rows have been written since this was last cleared."""
        self.locked: set[Job] = set()
        """Whose rows are locked by somebody, so that statements which skip locked rows pass over them."""

    def try_out(self, statement: Callable[[], object]) -> Effect:
        """Return what a statement changes, and leave all as it is."""
        before = {job: vars(job) | {"tokens": list(job.tokens)} for job in self.jobs}
        touched, self.touched = self.touched, set()
        statement()
        effect = {job: dict(vars(job)) for job in self.touched}
        self.put(before)
        self.touched = touched
        return effect

    def put(self, effect: Effect) -> None:
        """Change what `try_out` found."""
        self.touched.update(effect)
        for job, columns in effect.items():
            vars(job).update(columns)

    def any(self, which: int) -> Job:
        """Return a job, mostly one that is not over."""
        jobs = [job for job in self.jobs if not job.over] if which < 5 else []
        jobs = jobs or self.jobs
        return jobs[-1 - which % len(jobs)]

    @contextmanager
    def locking(self, effect: Effect) -> Iterator[None]:
        """Have the rows locked, in the block, that a transaction has changed."""
        self.locked = set(effect)
        yield
        self.locked = set()

    def mint(self, job: Job, minutes: float) -> None:
        """Give the job a new token."""
        self.give(job, Token(self.now + minutes))

    def give(self, job: Job, token: Token | None) -> None:
        self.touched.add(job)
        job.token = token
        if token is not None and token not in job.tokens:
            job.tokens.append(token)

    def free(self, job: Job, run_at: float | None = None) -> None:
        self.give(job, None)
        job.place, job.by, job.ours = "free", None, False
        job.run_at = job.run_at if run_at is None else run_at

    def end(self, job: Job, place: str) -> None:
        self.give(job, None)
        job.place = place

    def due_soon(self, job: Job) -> bool:
        return job.run_at <= self.now + HORIZON

    def expired(self, job: Job) -> bool:
        assert job.token is not None
        return job.token.until < self.now or job.token.until > self.now + LEASE + _MARGIN

    def _unlocked(self, place: str) -> list[Job]:
        return [job for job in self.jobs if job.place == place and job not in self.locked]

    # What dispatch does. Which of several jobs a statement takes is told to the model, which says whether it may.

    def lease(self, kind: str, taken: Sequence[Any]) -> None:
        due = [job for job in self._unlocked("free") if job.kind == kind and self.due_soon(job)]
        leased = sum(job.place == "leased" and job.kind == kind for job in self.jobs)
        self._take(due, taken, min(BATCH, max(0, WINDOW - leased)), lambda job: job.run_at)

    def lease_again(self, kind: str, taken: Sequence[Any]) -> None:
        late = [
            job for job in self._unlocked("leased") if job.kind == kind and self.due_soon(job) and self.expired(job)
        ]
        self._take(late, taken, BATCH, lambda job: job.token.until if job.token else math.nan)

    def _take(self, candidates: list[Job], taken: Sequence[Any], limit: int, order: Callable[[Job], float]) -> None:
        chosen = [job for job in candidates if job.id in taken]
        left = [job for job in candidates if job.id not in taken]
        assert len(chosen) == len(taken) == min(limit, len(candidates))
        assert max(map(order, chosen), default=-math.inf) <= min(map(order, left), default=math.inf)
        for job in chosen:
            self.free(job)
            job.place = "leased"
            self.mint(job, LEASE)

    def free_again(self) -> int:
        moved = [job for job in self._unlocked("leased") if self.expired(job) and not self.due_soon(job)]
        for job in moved:
            self.free(job)
        return len(moved)

    def take_over(self) -> int:
        orphaned = [
            job
            for job in self._unlocked("running")
            if job.token is None or (not job.ours and job.token.until < self.now - GRACE)
        ]
        for job in orphaned:
            self.free(job)
        return len(orphaned)

    def lost(self) -> set[Any]:
        late = {job for job in self._unlocked("running") if job.ours and job.token and job.token.until < self.now}
        self.touched |= late  # it locks them, for as long as its transaction lasts
        return {job.id for job in late}

    def release(self, job: Job, token: Token) -> int:
        held = job.place == "leased" and job.token is token and job not in self.locked
        if held:
            self.free(job)
        return int(held)

    # What workers do.

    def claim(self, job: Job, token: Token, by: str) -> bool:
        if job.place != "leased" or job.token is not token or job.run_at > self.now:
            return False
        self.mint(job, CLAIM)
        job.place, job.by, job.ours = "running", by, True
        return True

    def claimed(self, job: Job, by: str) -> bool:
        return job.place == "running" and job.by == by and job.ours

    def holds(self, job: Job, tokens: Sequence[Token | None]) -> bool:
        return job.place == "running" and job.token is not None and job.token in tokens

    def renew(self, job: Job, token: Token, proposed: Token) -> bool:
        held = self.holds(job, (token, proposed)) and job not in self.locked
        if held:
            self.give(job, proposed)
        return held

    def settle_done(self, job: Job, tokens: Sequence[Token | None]) -> bool:
        held = self.holds(job, tokens)
        if held:
            self.end(job, "done")
        return held

    def settled_done(self, job: Job, by: str) -> bool:
        self.touched.add(job)  # it locks the row, for as long as its transaction lasts
        return job.place == "done" and job.by == by

    def settle_failed(self, job: Job, tokens: Sequence[Token | None], delay: float, *, final: bool) -> bool:
        held = self.holds(job, tokens)
        if held:
            self._fail(job, delay, final=final)
        return held

    def settle_dead_child(self, job: Job, by: str, delay: float, *, final: bool) -> bool:
        held = self.claimed(job, by)
        if held:
            self._fail(job, delay, final=final)
        return held

    def _fail(self, job: Job, delay: float, *, final: bool) -> None:
        job.attempts += 1
        if final:
            self.end(job, "failed")
            job.run_at = self.now + delay
        else:
            self.free(job, self.now + delay)

    def give_back(self, job: Job, by: str, tokens: Sequence[Token | None] | None) -> bool:
        held = self.claimed(job, by) and (tokens is None or self.holds(job, tokens))
        if held:
            self.free(job)
        return held

    def snooze(self, job: Job, tokens: Sequence[Token | None], delay: float) -> bool:
        held = self.holds(job, tokens)
        if held:
            self.free(job, self.now + delay)
        return held

    # What people and host code do.

    def cancel(self, job: Job) -> bool:
        pending = job.pending
        if pending:
            self.end(job, "cancelled")
        return pending

    def reschedule(self, job: Job, run_at: float) -> bool:
        pending = job.pending
        if pending:
            self.free(job, run_at)
        return pending

    def retry(self, job: Job) -> bool:
        ended = job.place in ("failed", "cancelled")
        if ended:
            self.free(job, self.now)
            job.attempts = 0
        return ended

    # What the original dispatcher does.

    def original_takes(self, job: Job) -> bool:
        due = job.pending and job.run_at <= self.now
        late = job.place == "running" and job.token is not None and job.token.until < self.now
        if due or late:
            self.mint(job, LEASE)
            job.place, job.ours = "running", False
        return due or late

    def original_settles(self, job: Job, place: str, delay: float) -> None:
        self.end(job, place)
        job.ours = False
        if place != "done":
            job.attempts += 1
            job.run_at = self.now + delay
