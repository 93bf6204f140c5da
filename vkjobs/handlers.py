"""Kinds, the functions that handle them and their policies: what a deployment registers. Knows no Celery."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol

from sqlalchemy.orm import Session

from vkjobs.errors import ConfigurationError, VkjobsError
from vkjobs.ledger import JobId
from vkjobs.settings import Settings

MAX_KIND_LENGTH = 200
MOST_IN_BULK = 1000
_LARGEST = 31_536_000  # a year in seconds, and more attempts than one has
RESERVED = frozenset({"run_due", "enqueue", "unhandled"})
"""The names of vkjobs' own Celery tasks: a kind's task is called ``vkjobs.<kind>``."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job as its handler sees it.

    Attributes:
        id: the row's id.
        kind: what is to be done.
        ref_id: what it is to be done to, if anything.
        run_at: when it was due.
        attempts: how many attempts have failed before this one.
        payload: arguments beyond ``ref_id``; any JSON value, None if there are none.
    """

    id: JobId
    kind: str
    ref_id: str | None
    run_at: datetime
    attempts: int
    payload: Any


class UnhandledKind(VkjobsError):
    """No worker that the job met has a handler for its kind."""

    def __init__(self, job: Job) -> None:
        super().__init__(f"Unhandled job kind: {job.kind}, id: {job.id}")


class MissingRefId(VkjobsError):
    """The job's kind acts on something, and the job does not say on what."""

    def __init__(self, job: Job) -> None:
        super().__init__(f"vk_jobs.ref_id missing for {job.kind}, id: {job.id}")


class Context(Protocol):
    """What a handler may use while it runs."""

    @property
    def session(self) -> Session:
        """A session, opened at first use. Its writes are committed together with the job's settling, or not at all."""

    @property
    def settings(self) -> Settings:
        """The settings in force."""

    @property
    def lease_lost(self) -> bool:
        """True once the job is known to be no longer held here: whatever the handler does now will not be kept."""


Function = Callable[[Any, Context], object]
"""Takes a `Job`, or a list of them where its policy says so."""


class Snooze(Exception):
    """Raised by a handler to be called again later. Costs no attempt; the session's writes are rolled back.

    Args:
        until: how long from now, by the database's clock, or the time itself, with its zone.

    Raises:
        ValueError: a time without zone, or a delay that is not positive.
    """

    def __init__(self, until: timedelta | datetime) -> None:
        if isinstance(until, datetime):
            if until.utcoffset() is None:
                raise ValueError(f"Snooze({until!r}): the time has no zone; give it one, as in datetime.now(UTC)")
        elif until <= timedelta(0):
            raise ValueError(f"Snooze({until!r}): the delay must be positive")
        super().__init__(until)
        self.until = until

    def __str__(self) -> str:
        """Tell the time in words, for logs and Flower."""
        if isinstance(self.until, datetime):
            return f"until {self.until.isoformat()}"
        return f"for {self.until.total_seconds():g} s"


class GiveUp(Exception):
    """Raised by a handler to end its job as failed at once, whatever attempts are left."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


@dataclass(frozen=True)
class Policy:
    """How the jobs of one kind are tried; None: as the settings say.

    Attributes:
        max_attempts: failed attempts after which a job ends as failed.
        backoff: seconds after the first failed attempt; each further one doubles it, up to ``vkjobs_backoff_cap``.
        lease: seconds without a sign of life after which a running job is taken from its worker.
        time_limit: seconds after which the worker kills a running attempt; prefork pools only.
        soft_time_limit: seconds after which SoftTimeLimitExceeded is raised in the handler.
        queue: the Celery queue of the kind's messages, if it shall have one of its own.
        bulk: most jobs that one message carries; they are claimed in one statement, and those that are done are settled
            in one.
        as_list: the handler is called once for the jobs of a message, as ``(jobs, ctx)``. It returns None, or for jobs
            that are not done ``{job.id: exception}``, in place of raising it; what it raises is so for all.
    """

    max_attempts: int | None = None
    backoff: float | None = None
    lease: float | None = None
    time_limit: float | None = None
    soft_time_limit: float | None = None
    queue: str | None = None
    bulk: int | None = None
    as_list: bool = False

    def check(self, kind: str) -> None:
        """Raise ConfigurationError, naming the kind and the value, if the policy cannot work."""
        for name, whole, low in (
            ("max_attempts", True, 1),
            ("backoff", False, 0),
            ("lease", False, 1),
            ("time_limit", False, 0.001),
            ("soft_time_limit", False, 0.001),
            ("bulk", True, 1),
        ):
            value = getattr(self, name)
            fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            if value is not None and not (fits and low <= value <= _LARGEST):
                what = (
                    f"a whole number of {'jobs' if name == 'bulk' else 'attempts'}" if whole else "a number of seconds"
                )
                raise ConfigurationError(f"kind {kind!r}: {name} is {value!r}: it must be {what}, {low} or more")
        if self.bulk is not None and self.bulk > MOST_IN_BULK:
            raise ConfigurationError(f"kind {kind!r}: bulk is {self.bulk}: it must be at most {MOST_IN_BULK}")
        if self.bulk and (self.time_limit or self.soft_time_limit):
            raise ConfigurationError(f"kind {kind!r}: time limits end a whole message: a kind with bulk can have none")
        if self.as_list and not self.bulk:
            raise ConfigurationError(f"kind {kind!r}: as_list needs bulk, such as bulk=100")
        if self.soft_time_limit and self.time_limit and self.soft_time_limit >= self.time_limit:
            raise ConfigurationError(
                f"kind {kind!r}: soft_time_limit is {self.soft_time_limit}: it must be shorter than time_limit, "
                f"which is {self.time_limit}"
            )
        if self.queue is not None and not (
            isinstance(self.queue, str) and re.fullmatch(r"[\w.:@-]{1,200}", self.queue)
        ):
            raise ConfigurationError(
                f"kind {kind!r}: queue is {self.queue!r}: it must be a name of letters, digits and any of . : @ _ -"
            )


@dataclass(frozen=True)
class Handler:
    """A kind, the function that handles its jobs, and its policy."""

    kind: str
    function: Function
    policy: Policy

    def call(self, job: Job, ctx: Context) -> None:
        """Call the function with one job; raise what ends the job, if it is not done."""
        if not self.policy.as_list:
            self.function(job, ctx)
        else:
            for error in self.call_with_list([job], ctx).values():
                raise error

    def call_with_list(self, jobs: list[Job], ctx: Context) -> dict[JobId, BaseException]:
        """Call a function that takes a list; return by id what ends the jobs that are not done.

        Raises:
            TypeError: the function returned something else.
        """
        ends: Any = self.function(jobs, ctx)
        if ends is None:
            return {}
        ids = {job.id for job in jobs}
        told: dict[Any, Any] = dict(ends) if isinstance(ends, Mapping) else {None: None}
        if not all(id in ids and isinstance(error, BaseException) for id, error in told.items()):
            raise TypeError(
                f"the handler of {self.kind} returned {ends!r}: "
                "of a list of jobs it returns None or {job.id: exception}"
            )
        return told

    def lease(self, settings: Settings) -> float:
        """Return the seconds that a running job of this kind may be silent."""
        return self.policy.lease or settings.lease


def check_kind(kind: object) -> None:
    """Raise ConfigurationError unless ``kind`` is a name that a kind may have."""
    if not isinstance(kind, str) or not re.fullmatch(r"[^\s\x00-\x1f\x7f]+", kind) or len(kind) > MAX_KIND_LENGTH:
        raise ConfigurationError(
            f"kind {kind!r}: a kind is a name of 1 to {MAX_KIND_LENGTH} characters without white space"
        )


class Registry:
    """The kinds that this process knows."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._requirements: list[Callable[[Settings], str | None]] = []

    def register(self, kind: str, function: Function, policy: Policy) -> Handler:
        """Add a kind.

        Raises:
            ConfigurationError: the kind is taken, is no fitting name, or its policy cannot work.
        """
        check_kind(kind)
        if kind in RESERVED:
            raise ConfigurationError(
                f"kind {kind!r}: the name is taken by the Celery task vkjobs.{kind}; choose another"
            )
        if not callable(function):
            raise ConfigurationError(f"kind {kind!r}: {function!r} is no function (job, ctx)")
        if kind in self._handlers:
            raise ConfigurationError(f"kind {kind!r}: has a handler already, {_name(self._handlers[kind].function)}")
        policy.check(kind)
        handler = self._handlers[kind] = Handler(kind, function, policy)
        return handler

    def get(self, kind: str) -> Handler | None:
        """Return the kind's handler, if there is one."""
        return self._handlers.get(kind)

    def require(self, requirement: Callable[[Settings], str | None]) -> None:
        """Add a check of what the kinds need, made when a worker starts.

        It returns a line that the worker logs as a warning, or None; it raises ConfigurationError if the worker must
        not start. It must open no connection: prefork workers have not forked yet.
        """
        self._requirements.append(requirement)

    def warnings(self, settings: Settings) -> list[str]:
        """Make all checks; return what they warn of."""
        return [line for requirement in self._requirements if (line := requirement(settings))]

    def __iter__(self) -> Iterator[Handler]:
        """Go through all handlers."""
        return iter(list(self._handlers.values()))


def _name(function: Function) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"


registry = Registry()
"""The kinds of this process: what `vkjobs.handler` fills and a worker runs."""
