"""The app that ``celery -A vkjobs`` finds: vkjobs with the marketplace's kinds, set up by ``celeryconfig.py``."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

from celery import Celery

import vkjobs.marketplace  # noqa: F401 - registers its kinds
from vkjobs.dispatch import JOB_QUEUE
from vkjobs.errors import ConfigurationError
from vkjobs.tasks import settings_of, setup

_LOCAL_BROKER = "redis://localhost:6379/0"

_DEFAULTS = {
    "broker_connection_retry_on_startup": True,
    # Celery's own default keeps its schedule in a file, which nothing here needs.
    "beat_scheduler": "celery.beat:Scheduler",
    "task_default_queue": JOB_QUEUE,
}

app = Celery("vkjobs")

_config = os.environ.get("CELERY_CONFIG_MODULE", "celeryconfig")
# `celery` looks for the app in the working folder, so its configuration is looked for there too.
sys.path.insert(0, os.getcwd())  # noqa: PTH109
try:
    if importlib.util.find_spec(_config) is not None:
        app.config_from_object(_config)
finally:
    sys.path.pop(0)


@app.on_after_configure.connect
def _fill_in(sender: Celery, **_: Any) -> None:
    # What is given to app.add_defaults would hide what celeryconfig.py says.
    for key, value in _DEFAULTS.items():
        if not sender.conf.value_set_for(key):
            sender.conf[key] = value


@app.on_after_configure.connect
def _choose_broker(sender: Celery, **_: Any) -> None:
    try:
        chosen = settings_of(sender).broker_url
    except ConfigurationError:
        chosen = ""  # a worker does not start with it, and says why
    if chosen or not sender.conf.broker_url:
        sender.conf.broker_url = chosen or _LOCAL_BROKER


setup(app)
