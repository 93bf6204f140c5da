"""How the worker of a peer says that it is ready, and waits to be told to begin."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.site import READY


def wait_to_begin() -> None:
    """Say that all is loaded and connected; return when the benchmark says so."""
    Path(os.environ[READY]).touch()
    sys.stdin.readline()
