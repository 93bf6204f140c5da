"""Whose ticks count, and when: what `run_due` does with who fired it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from celery.worker import state
from hosts import make_app
from rows import Row
from sqlalchemy import Engine, text

import vkjobs


@pytest.fixture
def fire(redis_url: str, database_url: str) -> Callable[..., Any]:
    """Run `run_due` here, with such arguments."""
    app: Celery = vkjobs.setup(make_app(broker_url=redis_url, vkjobs_database_url=database_url))
    return lambda **kwargs: app.tasks["vkjobs.run_due"].apply(kwargs=kwargs).get()


@pytest.mark.parametrize("should_stop", [True, 0, 1])
def test_a_worker_that_stops_leases_nothing_more_unless_asked_by_hand(
    fire: Callable[..., Any], add: Callable[..., Row], monkeypatch: pytest.MonkeyPatch, should_stop: object
) -> None:
    add()
    monkeypatch.setattr(state, "should_stop", should_stop)
    assert [fire(by="beat"), fire(by="baton"), fire(by="nudge"), fire()] == [0, 0, 0, 1]


@pytest.mark.parametrize("should_stop", [None, False])
def test_a_worker_that_goes_on_leases(
    fire: Callable[..., Any], add: Callable[..., Row], monkeypatch: pytest.MonkeyPatch, should_stop: object
) -> None:
    add()
    monkeypatch.setattr(state, "should_stop", should_stop)
    assert fire(by="beat") == 1


def test_a_nudge_leases_what_is_due_and_leaves_what_went_wrong_to_the_ticks(
    fire: Callable[..., Any], add: Callable[..., Row], read: Callable[[Any], Row]
) -> None:
    expired, foreign = add(lease_until=-5), add(status="running", lease_until=-5)
    due, ahead = add(), add(run_at=1)
    assert fire(by="nudge") == 2
    assert None not in {read(due.id).lease_until, read(ahead.id).lease_until}
    assert [read(expired.id), read(foreign.id)] == [expired, foreign]
    assert fire(by="beat") == 2


def test_a_tick_of_beat_is_noted_by_the_databases_clock(fire: Callable[..., Any], engine: Engine) -> None:
    def noted() -> list[str]:
        with engine.connect() as conn:
            recent = "select source from vkjobs_ticks where ticked_at > now() - interval '1 min'"
            return list(conn.scalars(text(recent)))

    fire()
    fire(by="baton")
    fire(by="nudge")
    assert noted() == []
    fire(by="beat")
    assert noted() == ["beat"]
