"""The line to the broker; what is published through it is in test_dispatch."""

from __future__ import annotations

import subprocess
import sys

import redis as redis_client
from hosts import make_app
from messages import waiting

from vkjobs import broker
from vkjobs.broker import Message
from vkjobs.local import Redis

FORK = """
import gc, os, sys, weakref
import redis
from celery import Celery
from vkjobs import broker

app = Celery("forking", set_as_current=False, broker=sys.argv[1])
client = redis.Redis.from_url(sys.argv[1])

def publish():
    before = {each["id"] for each in client.client_list()}
    broker.publish(app, broker.Message("jobs", "task", {}, "{}"))
    return len({each["id"] for each in client.client_list()} - before)

assert publish() > 0
assert publish() == 0
parents = weakref.ref(broker._line(app))
child = os.fork()
if not child:
    client.close()
    client = redis.Redis.from_url(sys.argv[1])
    client.ping()
    connected = publish()
    gc.collect()
    print("its own" if connected and broker._line(app) is not parents() else "shared")
    # One that is collected says goodbye through the parent's socket.
    print("parent's is kept" if parents() else "parent's was collected", flush=True)
    os._exit(0)
os.waitpid(child, 0)
print("parent's still usable" if publish() == 0 else "parent's was closed", client.llen("jobs"), "messages")
"""


def test_a_forked_child_has_a_line_of_its_own_and_leaves_the_parents_alone(redis_url: str) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK, redis_url]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["its own", "parent's is kept", "parent's still usable 4 messages"]


def test_a_batch_goes_out_although_the_broker_has_closed_the_line_meanwhile() -> None:
    with Redis() as server:
        app = make_app(broker_url=server.url)
        batch = [Message("jobs", "task", {"number": number}, "{}") for number in range(3)]
        assert broker.publish_all(app, batch) == {}
        with redis_client.Redis.from_url(server.url) as client:
            client.client_kill_filter(_type="normal")
        assert broker.publish_all(app, batch) == {}
        assert [message.kwargs["number"] for message in waiting(server.url, "jobs")] == [0, 1, 2] * 2


def test_to_ask_for_a_queue_that_is_not_there_costs_no_new_connection(redis_url: str) -> None:
    app = make_app(broker_url=redis_url)
    with redis_client.Redis.from_url(redis_url) as client:
        broker.publish(app, Message("jobs", "task", {}, "{}"))
        connected = {each["id"] for each in client.client_list()}
        assert [broker.depth(app, queue) for queue in ("jobs", "nowhere", "jobs")] == [1, 0, 1]
        assert {each["id"] for each in client.client_list()} == connected


def test_a_broker_that_does_not_say_how_deep_a_queue_is_harms_nobody() -> None:
    with Redis() as server:
        app = make_app(broker_url=server.url)
    assert broker.depth(app, "jobs") == 0
