"""The jobs that this process runs: one token each, renewed while the job runs. Knows no handler and no Celery."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta

from sqlalchemy import Engine

from vkjobs import ledger
from vkjobs.database import in_a_line
from vkjobs.events import Seldom, emit
from vkjobs.ledger import Claim, JobId

_RENEWALS_PER_LEASE = 3  # two may fail before the lease is lost
_RETRY_S = 1.0
_LOG_EVERY_S = 30.0


class Holding:
    """A running job of this process: its tokens, and whether it is still held."""

    def __init__(self, claim: Claim, lease: float) -> None:
        self.id = claim.id
        self.token = claim.token
        self.proposed: datetime | None = None
        self.lost = False
        self._lease = lease
        self._claimed_at = claim.now
        self._claimed = time.monotonic()
        self._plan_renewal()

    def propose(self) -> datetime:
        """Return the token of the next renewal; until its answer is seen both it and the old one are good.

        It counts from the database's time at claim by this process's monotonic clock: no other clock has a say.
        """
        if self.proposed is None:
            elapsed = time.monotonic() - self._claimed
            fresh = self._claimed_at + timedelta(seconds=elapsed + self._lease)
            self.proposed = max(fresh, self.token + timedelta(microseconds=1))
        return self.proposed

    def renewed(self) -> None:
        """Take the proposed token: the database has it."""
        self.token, self.proposed = self.proposed or self.token, None
        self._plan_renewal()

    def _plan_renewal(self) -> None:
        # By the token: after an outage, less than a lease may be left of it.
        ends = self._claimed + (self.token - self._claimed_at).total_seconds()
        self.renewal_due = ends - self._lease * (1 - 1 / _RENEWALS_PER_LEASE)

    def retry_soon(self) -> None:
        """Put the renewal off a little: the database did not answer, or somebody has locked the row."""
        self.renewal_due = time.monotonic() + min(_RETRY_S, self._lease / _RENEWALS_PER_LEASE)


class Heartbeat:
    """Renews the leases of all jobs that run in this process, in one statement, from a thread of its own."""

    def __init__(self, engine: Callable[[], Engine]) -> None:
        self._engine = engine
        self._held: dict[JobId, Holding] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._wakes_at = float("inf")
        self._seldom = Seldom(_LOG_EVERY_S)

    @contextmanager
    def hold(self, claim: Claim, lease: float) -> Iterator[Holding]:
        """Renew the lease of ``claim``, each time for ``lease`` seconds, until the block ends or `stop` is called."""
        with self.hold_all([claim], lease) as (holding,):
            yield holding

    @contextmanager
    def hold_all(self, claims: Sequence[Claim], lease: float) -> Iterator[list[Holding]]:
        """As `hold`, for many jobs."""
        holdings = [Holding(claim, lease) for claim in claims]
        try:
            self.resume(*holdings)
            yield holdings
        finally:
            self.stop(*holdings)

    def resume(self, *holdings: Holding) -> None:
        """Renew these again that were stopped, until they are stopped again."""
        with self._changed:
            self._held.update((holding.id, holding) for holding in holdings)
            self._start()
            if min((holding.renewal_due for holding in holdings), default=self._wakes_at) < self._wakes_at:
                self._changed.notify()

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="vkjobs-heartbeat", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system has no thread to give; jobs shorter than their lease do without
                emit(logging.ERROR, "no heartbeat", error=error)
            else:
                self._thread = thread

    def stop(self, *holdings: Holding) -> None:
        """Renew these no more. A renewal that is under way may still happen: its token is the proposed one."""
        with self._changed:
            for holding in holdings:
                if self._held.get(holding.id) is holding:
                    del self._held[holding.id]

    def holds(self, id: JobId) -> bool:
        """Tell whether the job runs in this process now."""
        with self._changed:
            return id in self._held

    @property
    def busy(self) -> bool:
        """Whether any job runs in this process now; asked in signal handlers, so it takes no lock."""
        return bool(self._held)

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                due = [(h, h.token, h.propose()) for h in self._held.values() if h.renewal_due <= now]
                if not due:
                    self._wakes_at = min((h.renewal_due for h in self._held.values()), default=float("inf"))
                    wait = None if self._wakes_at == float("inf") else self._wakes_at - now
                    self._changed.wait(wait)
                    continue
            self._renew(due)

    def _renew(self, due: list[tuple[Holding, datetime, datetime]]) -> None:
        given = [(h.id, token, proposed) for h, token, proposed in due]
        try:
            with self._engine().connect() as conn:
                renewed = ledger.renew(conn, given)
                held = ledger.still_held(conn, given) if len(renewed) < len(given) else renewed
        except Exception as error:  # noqa: BLE001 - if this thread ended, every job here would lose its lease
            if self._seldom():
                emit(logging.WARNING, "renewal failed", jobs=len(due), error=in_a_line(error))
            with self._changed:
                for holding, _, _ in due:
                    holding.retry_soon()
            return
        with self._changed:
            for holding, _, _ in due:
                if self._held.get(holding.id) is not holding:
                    continue  # it is being settled, with both its tokens
                if holding.id in renewed:
                    holding.renewed()
                elif holding.id in held:
                    holding.retry_soon()
                else:
                    holding.lost = True
                    del self._held[holding.id]
