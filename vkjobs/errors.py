"""The exceptions that vkjobs raises: one tree, one root.

    VkjobsError
    ├── ConfigurationError     a setting, a handler's policy or the environment is impossible
    ├── InvalidJobError        what was given to enqueue cannot become a row
    ├── MigrationError         the table cannot be made what vkjobs needs
    ├── DatabaseUnavailable    Postgres cannot be reached or refuses to work just now
    │   └── JobsLocked         somebody has locked the rows of jobs that were to start
    ├── BrokerUnavailable      the broker cannot be reached or takes no messages just now
    └── JobFailed              an attempt of a job failed; its row says how it goes on

Losing a lease is a result, not an error: no exception stands for it here.
"""

from __future__ import annotations

from collections.abc import Sequence


class VkjobsError(Exception):
    """Root of all errors of vkjobs."""


class ConfigurationError(VkjobsError):
    """A setting, a handler's policy or the environment cannot work; the message names it and what fits."""


class InvalidJobError(VkjobsError, ValueError):
    """What was given to enqueue cannot become a row; nothing was written."""


class MigrationError(VkjobsError):
    """The table cannot be made what vkjobs needs; the message says what stands in the way."""


class DatabaseUnavailable(VkjobsError):
    """Postgres cannot be reached or refuses to work just now; the next tick or attempt tries again."""


class JobsLocked(DatabaseUnavailable):
    """Somebody has locked the rows of jobs that were to start; their message is sent again for a little later.

    Attributes:
        ids: of the jobs.
    """

    def __init__(self, text: str, ids: Sequence[int | str]) -> None:
        super().__init__(text)
        self.ids = ids


class BrokerUnavailable(VkjobsError):
    """The broker cannot be reached or takes no messages just now; what was leased is free again."""


class JobFailed(VkjobsError):
    """An attempt failed. Celery and Flower show this text; the whole error is in the row's ``last_error``."""
