"""The app `effects` on a Redis whose messages are delivered again after a second, and that acknowledges late."""

from __future__ import annotations

from effects import app

__all__ = ["app"]

app.conf.broker_transport_options = {"visibility_timeout": 1}
app.conf.task_acks_late = True
app.conf.task_reject_on_worker_lost = True
