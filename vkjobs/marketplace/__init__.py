"""The marketplace: the kinds of its deadlines, registered by this import, and what a host implements."""

from vkjobs.marketplace import kinds
from vkjobs.marketplace.service import ContestJudge, TaskService

__all__ = ["ContestJudge", "TaskService", "kinds"]
