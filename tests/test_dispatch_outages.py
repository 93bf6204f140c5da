"""What dispatch does when the broker does not answer, and with rows whose way has been cut off."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from hosts import make_app
from messages import waiting
from places import moment
from rows import Row
from sqlalchemy import Engine, text
from workers import wait_for

import vkjobs
from vkjobs import broker, dispatch
from vkjobs.dispatch import Dispatcher
from vkjobs.errors import BrokerUnavailable
from vkjobs.handlers import Policy, Registry
from vkjobs.local import Redis
from vkjobs.settings import Settings

Add = Callable[..., Row]
Read = Callable[[Any], Row]
Dispatch = Callable[..., int]


@pytest.fixture
def own_redis() -> Iterator[Redis]:
    with Redis() as server:
        yield server


@pytest.fixture
def run_due(own_redis: Redis, engine: Engine) -> Dispatch:
    """Run due with two queues, to a Redis that the test may stop: ``run_due(lease=…)`` with such settings."""
    app = vkjobs.setup(make_app(broker_url=own_redis.url))
    known = Registry()
    known.register("noop", lambda job, ctx: None, Policy())
    known.register("slow", lambda job, ctx: None, Policy(queue="slow"))
    return lambda **settings: Dispatcher(app, engine, Settings(**settings), known).run_due(housekeeping=True)


@pytest.mark.timeout(60)
def test_a_broker_that_does_not_answer_is_given_up(
    run_due: Dispatch, own_redis: Redis, add: Add, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = {"redis": {"socket_timeout": 0.3, "socket_connect_timeout": 0.3}}
    monkeypatch.setattr(broker, "_TIMEOUTS", impatient)
    row = add()
    os.kill(own_redis.pid or 0, signal.SIGSTOP)
    try:
        with pytest.raises(BrokerUnavailable):
            run_due()
    finally:
        os.kill(own_redis.pid or 0, signal.SIGCONT)
    assert read(row.id).lease_until is None
    assert run_due() == 1


def test_a_broker_that_took_long_to_refuse_is_asked_no_more(
    run_due: Dispatch, own_redis: Redis, add: Add, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_BROKER_PATIENCE_S", 0.0)  # any refusal took long
    for kind in ("noop", "slow"):
        add(kind=kind)
    own_redis.stop()
    with pytest.raises(BrokerUnavailable, match=r"^1 of 1 jobs"):
        run_due()


def test_what_another_dispatcher_left_running_is_published_by_the_next_tick(
    run_due: Dispatch, own_redis: Redis, add: Add, read: Read
) -> None:
    row = add(status="running", lease_until=-5)
    assert run_due() == 1
    assert [message.kwargs["job_id"] for message in waiting(own_redis.url)] == [row.id]
    assert (read(row.id).status, read(row.id).attempts) == ("pending", 0)


def test_a_row_that_was_moved_while_its_message_was_lost_is_free_again(run_due: Dispatch, add: Add, read: Read) -> None:
    row = add(lease_until=-5, run_at=3600)
    assert run_due() == 0
    assert read(row.id).lease_until is None


def test_a_lease_covers_the_wait_for_its_time(run_due: Dispatch, add: Add, read: Read) -> None:
    row = add(run_at=25)
    assert run_due(lease=30, horizon=30) == 1
    after = read(row.id)
    assert moment(after.lease_until or "") - moment(after.run_at) > timedelta(seconds=30)


def test_a_job_that_cannot_be_reaped_keeps_no_other_from_it(
    run_due: Dispatch, engine: Engine, add: Add, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    lost = {"status": "running", "lease_until": "2020-01-01T00:00Z", "claimed_until": "2020-01-01T00:00Z"}
    held, other = add(**lost), add(**lost)
    with engine.connect() as conn:
        conn.exec_driver_sql("""
            create function refuse() returns trigger language plpgsql as $$ begin raise 'not this one'; end $$""")
        conn.exec_driver_sql(f"""
            create trigger refuse before update on vk_jobs
                for each row when (old.id = {held.id}) execute function refuse()""")
    try:

        def reaped() -> bool:
            run_due(lease=1, horizon=0)
            return read(other.id).attempts == 1

        wait_for(reaped, "Postgres to be up for a lease")
        assert read(held.id) == held
        said = {record.getMessage() for record in caplog.records if getattr(record, "job_id", None) == held.id}
        assert said == {f"job cannot be reaped job_id={held.id} kind=noop error='not this one'"}
    finally:
        with engine.connect() as conn:
            conn.execute(text("drop function refuse cascade"))
