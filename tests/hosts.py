"""Apps of hosts, in the test's own process."""

from __future__ import annotations

from typing import Any

from celery import Celery

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
