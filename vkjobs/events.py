"""The log of vkjobs: one named event per fact, its fields behind it as ``key=value`` and on the record."""

from __future__ import annotations

import logging
import time
from typing import Any

logger = logging.getLogger("vkjobs")


def emit(level: int, event: str, /, **fields: Any) -> None:
    """Log ``event`` and its fields in one line; handlers find them as ``record.event`` and ``record.<field>``."""
    if logger.isEnabledFor(level):
        line = " ".join([event, *(f"{name}={_plain(value)}" for name, value in fields.items())])
        logger.log(level, "%s", line, extra={"event": event, **fields})


class Seldom:
    """Says yes at first and then once in ``seconds``: for what would otherwise be logged again and again."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._said = float("-inf")

    def __call__(self) -> bool:
        """Tell whether it is time to say it again."""
        now = time.monotonic()
        if now - self._said < self._seconds:
            return False
        self._said = now
        return True


def _plain(value: Any) -> str:
    text = str(value)
    return text if text and text.isprintable() and not set(' "=') & set(text) else repr(text)
