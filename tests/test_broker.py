"""The line to the broker; what is published through it is in test_dispatch."""

from __future__ import annotations

import subprocess
import sys

FORK = """
import gc, os, sys
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
child = os.fork()
if not child:
    client.close()
    client = redis.Redis.from_url(sys.argv[1])
    client.ping()
    connected = publish()
    gc.collect()
    print("its own" if connected else "shared", flush=True)
    os._exit(0)
os.waitpid(child, 0)
print("parent's still usable" if publish() == 0 else "parent's was closed", client.llen("jobs"), "messages")
"""


def test_a_forked_child_has_a_line_of_its_own_and_leaves_the_parents_alone(redis_url: str) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK, redis_url]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["its own", "parent's still usable 4 messages"]
