"""What the processes around the model know: messages, claims, and what a reaper has read; see `test_model`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from model import CLAIM, Job, Model, Token

from vkjobs.ledger import Claim, Lease, Lost

KINDS = ("ordinary", "listed")
"""One for the queue of all kinds but some, one for a queue of its own."""


@dataclass(eq=False)
class Message:
    """A message that was published; it may be delivered any number of times, to two processes."""

    job: Job
    token: Token
    number: int

    @property
    def tokens(self) -> tuple[Token, ...]:
        return (self.token,)

    def by(self, pid: int) -> str:
        return f"task-{self.number} w@host {pid}"


@dataclass(eq=False)
class Holding:
    """What a process knows of a job that it runs, or ran."""

    job: Job
    token: Token
    attempts: int
    by: str
    proposed: Token | None = None

    @property
    def tokens(self) -> tuple[Token, ...]:
        return (self.token,) if self.proposed is None else (self.token, self.proposed)

    @property
    def values(self) -> tuple[datetime, ...]:
        return tuple(value(token) for token in self.tokens)

    def propose(self, now: float) -> None:
        if self.proposed is None:
            fresh = datetime.now(UTC) + timedelta(minutes=CLAIM)
            later = max(fresh, value(self.token) + timedelta.resolution)  # also if the clock was set back
            self.proposed = Token(max(now + CLAIM, self.token.until), later)


@dataclass(eq=False)
class Corpse:
    """What a reaper has read of a job whose lease is over."""

    job: Job
    token: Token
    attempts: int

    @property
    def tokens(self) -> tuple[Token, ...]:
        return (self.token,)


def value(token: Token) -> datetime:
    assert token.value is not None
    return token.value


Thing = TypeVar("Thing", Message, Holding, Corpse)


class Known:
    """What all processes together know; they share nothing else."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.messages: list[Message] = []
        self.holdings: list[Holding] = []
        self.corpses: list[Corpse] = []
        self.favourite: Job | None = None

    def pick(self, things: Sequence[Thing], which: int) -> Thing:
        """Return one: first come those of the favourite, and those whose token is still good."""
        ordered = sorted(
            things,
            key=lambda it: (it.job is self.favourite, not it.job.over, it.job.token in it.tokens),
        )
        return ordered[-1 - which % len(ordered)]

    def kind(self, which: int) -> str:
        """Return a kind; 0 is the favourite's."""
        first = KINDS.index(self.favourite.kind) if self.favourite else 0
        return KINDS[(first + which) % 2]

    def held_by_any(self, job: Job) -> bool:
        """Tell whether any process knows that it has the job, by a message or a claim."""
        known: list[Message | Holding] = [*self.messages, *self.holdings]
        return any(it.job is job and job.token in it.tokens for it in known)

    def publish(self, leases: list[Lease]) -> None:
        for lease in leases:
            job = self.job(lease.id)
            self.messages.append(Message(job, job.token_of(lease.token), len(self.messages)))

    def hold(self, job: Job, claim: Claim | None, by: str) -> None:
        if claim is not None:
            self.holdings.append(Holding(job, job.token_of(claim.token), claim.attempts, by))

    def find_lost(self, found: list[Lost]) -> None:
        for lost in found:
            job = self.job(lost.id)
            self.corpses.append(Corpse(job, job.token_of(lost.token), lost.attempts))

    def job(self, id: Any) -> Job:
        return next(job for job in self.model.jobs if job.id == id)
