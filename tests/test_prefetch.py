"""Which messages Redis keeps a copy of while a worker has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis as redis_client
from kombu import Connection, Consumer, Producer, Queue

from vkjobs.prefetch import keep_no_copies

QUEUE = "tasks"


class Worker:
    """A consumer of one connection, and what it has received."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        keep_no_copies(connection, lambda message: message.headers["task"] == "job")
        self.received: list[Any] = []
        self.consumer = Consumer(connection, [], accept=["json"], on_message=self.received.append, prefetch_count=3)
        self.consumer.add_queue(Queue(QUEUE))
        self.consumer.consume()

    def receive(self) -> list[str]:
        """Return the bodies of all that comes."""
        while True:
            try:
                self.connection.drain_events(timeout=0.3)
            except TimeoutError:
                return [message.decode()["name"] for message in self.received]


@pytest.fixture
def broker(redis_url: str) -> Iterator[Any]:
    with redis_client.Redis.from_url(redis_url) as client:
        client.flushall()
        yield client


@pytest.fixture
def worker(redis_url: str, broker: Any) -> Iterator[Worker]:
    with Connection(redis_url) as connection:
        yield Worker(connection)


def publish(redis_url: str, *names: str) -> None:
    with Connection(redis_url) as connection:
        producer = Producer(connection)
        for name in names:
            producer.publish({"name": name}, routing_key=QUEUE, headers={"task": name.split()[0]})


def test_redis_keeps_a_copy_of_what_may_not_be_lost_alone(worker: Worker, broker: Any, redis_url: str) -> None:
    publish(redis_url, "job 1", "other 1", "job 2")
    assert worker.receive() == ["job 1", "other 1", "job 2"]
    assert broker.hlen("unacked") == 1
    for message in worker.received:
        message.ack()
    assert (broker.hlen("unacked"), broker.zcard("unacked_index")) == (0, 0)


def test_all_count_against_the_prefetch_limit(worker: Worker, redis_url: str) -> None:
    publish(redis_url, "job 1", "other 1", "job 2", "job 3", "job 4")
    assert worker.receive() == ["job 1", "other 1", "job 2"]
    worker.received.pop(0).ack()
    assert worker.receive() == ["other 1", "job 2", "job 3"]


def test_what_may_not_be_lost_goes_back_when_the_worker_ends(worker: Worker, broker: Any, redis_url: str) -> None:
    publish(redis_url, "job 1", "other 1", "job 2")
    assert len(worker.receive()) == 3
    worker.connection.close()
    assert broker.llen(QUEUE) == 1
    assert json.loads(broker.lindex(QUEUE, 0))["headers"]["task"] == "other"
    assert broker.hlen("unacked") == 0


def test_what_may_be_lost_is_not_put_back(worker: Worker, broker: Any, redis_url: str) -> None:
    publish(redis_url, "job 1", "other 1")
    assert worker.receive() == ["job 1", "other 1"]
    for message in [worker.received.pop(), worker.received.pop()]:
        message.requeue()
    assert worker.receive() == ["other 1"]
    worker.received.pop().reject()
    assert (broker.llen(QUEUE), broker.hlen("unacked")) == (0, 0)


def test_another_broker_is_left_as_it_is() -> None:
    with Connection("memory://") as connection:
        keep_no_copies(connection, lambda _message: True)
        assert type(connection.default_channel.qos).__module__ == "kombu.transport.virtual.base"
