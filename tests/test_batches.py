"""The sizes of batches, simulated: a dispatcher, its queue and workers, over jobs that take from 0.1 ms to 60 s."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count

import pytest

from vkjobs import policy
from vkjobs.settings import Settings

SETTINGS = Settings()
BATON_S = 0.005  # from the start of its carrier to the messages of the next batch


@dataclass
class Simulation:
    """Workers with so many ``slots``, whose jobs take ``job`` seconds each, before a backlog that does not end."""

    slots: int
    job: float
    free: int = 0
    started: int = 0
    batons: int = 0
    longest_wait: float = 0.0
    most_waiting: int = 0
    waiting: list[tuple[float, int | None]] = field(default_factory=list)
    """When it was leased, and the size of the batch whose baton it carries."""
    events: list[tuple[float, int, str, tuple[float, int]]] = field(default_factory=list)
    numbers: count[int] = field(default_factory=count)

    def run(self, seconds: float) -> float:
        """Run for so long; return which share of it the slots were busy."""
        self.free = self.slots
        self.at(0.0, "tick")
        while self.events[0][0] < seconds:
            now, _, event, (leased_at, size) = heapq.heappop(self.events)
            if event == "done":
                self.free += 1
            elif event == "tick":
                self.lease(now, policy.FIRST_BATCH - len(self.waiting), policy.FIRST_BATCH)
                self.at(now + SETTINGS.tick, "tick")
            else:
                self.batons += 1
                ticked = policy.FIRST_BATCH / SETTINGS.tick
                batch = policy.next_batch(size, now - leased_at, SETTINGS.batch, ticked)
                self.lease(now, batch, batch)
            self.start(now)
        return self.started * self.job / (self.slots * seconds)

    def at(self, time: float, event: str, baton: tuple[float, int] = (0.0, 0)) -> None:
        heapq.heappush(self.events, (time, next(self.numbers), event, baton))

    def lease(self, now: float, room: int, batch: int) -> None:
        leased = max(0, min(room, SETTINGS.window - len(self.waiting)))
        carrier = policy.baton(leased, batch)
        self.waiting += [(now, batch if number == carrier else None) for number in range(leased)]
        self.most_waiting = max(self.most_waiting, len(self.waiting))

    def start(self, now: float) -> None:
        number = min(self.free, len(self.waiting))
        for leased_at, size in self.waiting[:number]:
            self.longest_wait = max(self.longest_wait, now - leased_at)
            self.at(now + self.job, "done")
            if size is not None:
                self.at(now + BATON_S, "baton", (leased_at, size))
        del self.waiting[:number]
        self.free -= number
        self.started += number


@pytest.mark.parametrize("slots", [1, 2, 16, 64])
@pytest.mark.parametrize("job", [0.0001, 0.001, 0.01, 0.1, 1.0, 10.0, 60.0])
def test_no_worker_is_idle_and_nothing_waits_for_long(slots: int, job: float) -> None:
    simulation = Simulation(slots, job)
    busy = simulation.run(max(10.0, 10 * job) if slots < 16 or job > 0.001 else 3.0)
    # Of a rate that no two messages of a broker can keep up with, a part; else all but the ends.
    rate = slots / job
    assert busy > 0.95 or rate * BATON_S > SETTINGS.batch / 2
    assert rate * busy > min(rate, 10_000) * 0.9
    # What the first ticks let wait before anything is known takes its time; beyond that, seconds.
    first = policy.FIRST_BATCH * job / slots
    assert simulation.longest_wait <= max(3.0, first + 6 * job)
    assert simulation.most_waiting <= SETTINGS.window
    if job >= 1.0:
        assert simulation.most_waiting <= policy.FIRST_BATCH + 2 * slots


def test_with_jobs_of_a_second_on_two_slots_no_lease_ends_in_the_queue() -> None:
    simulation = Simulation(slots=2, job=1.0)
    assert simulation.run(600.0) > 0.99
    assert simulation.longest_wait < (SETTINGS.lease + SETTINGS.horizon) / 4
    assert simulation.most_waiting <= policy.FIRST_BATCH + 4


@pytest.mark.parametrize("job", [0.02, 0.1, 0.2, 1.0])
def test_batons_are_few_beside_the_jobs_that_they_fetch(job: float) -> None:
    simulation = Simulation(slots=2, job=job)
    simulation.run(60.0)
    assert simulation.batons <= simulation.started / 8
