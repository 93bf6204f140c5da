"""vkjobs: deadline jobs from a Postgres table, run as Celery tasks."""

import vkjobs.worker  # noqa: F401 - connects Celery's signals
from vkjobs.errors import (
    BrokerUnavailable,
    ConfigurationError,
    DatabaseUnavailable,
    InvalidJobError,
    JobFailed,
    MigrationError,
    VkjobsError,
)
from vkjobs.handlers import Context, GiveUp, Job, Snooze
from vkjobs.ledger import NewJob
from vkjobs.nudge import enqueue, enqueue_many, nudge
from vkjobs.tasks import handler, setup

__all__ = [
    "BrokerUnavailable",
    "ConfigurationError",
    "Context",
    "DatabaseUnavailable",
    "GiveUp",
    "InvalidJobError",
    "Job",
    "JobFailed",
    "MigrationError",
    "NewJob",
    "Snooze",
    "VkjobsError",
    "enqueue",
    "enqueue_many",
    "handler",
    "nudge",
    "setup",
]
