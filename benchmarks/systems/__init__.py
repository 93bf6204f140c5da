"""The systems that are measured, each behind the same few verbs."""

from __future__ import annotations

from typing import Protocol

from benchmarks.site import Place


class System(Protocol):
    """A way to run jobs.

    Attributes:
        name: as it stands in the figures.
        first_guess: jobs a second that it may run; only sizes the first, uncounted round.
    """

    name: str
    first_guess: int

    def begin(self, place: Place, number: int) -> None:
        """Let two worker processes run ``number`` jobs that do nothing but count themselves."""

    def settled(self, place: Place) -> tuple[int, float]:
        """Return how many jobs are settled, and when the last one was, in seconds since the epoch."""


class Scheduler(Protocol):
    """A way to run jobs at a time.

    Attributes:
        name: as it stands in the figures.
    """

    name: str

    def serve(self, place: Place) -> None:
        """Start a worker for two jobs at once, with the defaults that people get."""

    def schedule(self, place: Place) -> None:
        """Add a job for each row of the table ``due``; see `benchmarks.lateness`."""
