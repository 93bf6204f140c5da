"""Counts the calls of handlers in many processes, and takes down when the first and the last one came.

Each process has a file that it and the benchmark map: a call costs less than a microsecond and waits for nobody.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

FOLDER = "BENCH_TALLY"
"""Name of the environment variable that names the folder of the files."""

_SLOT = struct.Struct("=qdd")

_map: mmap.mmap | None = None
_count = 0
_first = 0.0


def hit() -> None:
    """Count a call."""
    global _count, _first  # noqa: PLW0603
    now = time.time()
    _count += 1
    if _count == 1:
        _first = now
    _SLOT.pack_into(_map or _open(), 0, _count, _first, now)


def _open() -> mmap.mmap:
    global _map  # noqa: PLW0603
    with (Path(os.environ[FOLDER]) / str(os.getpid())).open("w+b") as file:
        file.truncate(_SLOT.size)
        _map = mmap.mmap(file.fileno(), _SLOT.size)
    return _map


def _forget() -> None:
    global _map, _count
    _map, _count = None, 0


os.register_at_fork(after_in_child=_forget)


class Total(NamedTuple):
    """How many calls there were, and the times of the first and the last, in seconds since the epoch."""

    calls: int
    first: float
    last: float


def total(folder: Path) -> Total:
    """Return what all processes have counted so far."""
    slots = [_SLOT.unpack(data) for file in folder.iterdir() if len(data := file.read_bytes()) == _SLOT.size]
    found = [slot for slot in slots if slot[0]]
    if not found:
        return Total(0, 0.0, 0.0)
    return Total(sum(slot[0] for slot in found), min(slot[1] for slot in found), max(slot[2] for slot in found))
