"""Apps of hosts, in the test's own process."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery
from celery.contrib.testing.worker import start_worker

_alive: list[Celery] = []


def make_app(**conf: Any) -> Celery:
    """Return an app that lives as long as the process, as apps do: one that goes leaves its connections open."""
    app = Celery("host", set_as_current=False)
    app.conf.update(conf)
    return keep(app)


def keep(app: Celery) -> Celery:
    """Keep an app that something else has made."""
    _alive.append(app)
    return app


@contextmanager
def worker_thread(app: Celery, **options: Any) -> Iterator[object]:
    """Run a worker of the app in a thread of the test's; in the end it leaves no log handler and no connection."""
    found = logging.root.handlers[:]
    with start_worker(app, perform_ping_check=False, loglevel="WARNING", **options) as worker:
        yield worker
    for handler in [handler for handler in logging.root.handlers if handler not in found]:
        logging.root.removeHandler(handler)
    with warnings.catch_warnings():
        # Celery leaves open what a worker's process would have taken with it.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
