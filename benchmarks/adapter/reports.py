"""How handlers, in whatever process, tell the adapter that a job has ended: a datagram with the time that it waited."""

from __future__ import annotations

import os
import socket
import struct
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

SOCKET = "ADAPTER_SOCKET"
"""Name of the environment variable that names the adapter's socket."""

_WAITED = struct.Struct("=d")


def waited_s(inserted_at: float) -> float:
    """Return the seconds since a job was inserted: called when its handler starts."""
    return time.time() - inserted_at


def report(waited: float) -> None:
    """Tell that a job has ended, and how long it had waited."""
    with suppress(OSError):  # the adapter is gone
        _line(os.getpid()).sendto(_WAITED.pack(waited), os.environ[SOCKET])


@cache
def _line(_pid: int) -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)


def work_s() -> float:
    """Return how long a job shall work, in seconds."""
    return float(os.environ.get("JOB_WORK_MS") or 1) / 1000


class Inbox:
    """Where reports arrive."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))

    def next(self) -> float:
        """Wait for a report; return the seconds that its job had waited."""
        (waited,) = _WAITED.unpack(self._socket.recv(_WAITED.size))
        return float(waited)
