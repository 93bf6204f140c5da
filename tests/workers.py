"""Real worker processes for tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent
PATIENCE_S = 40.0


def wait_for(fact: Callable[[], object], what: str, patience: float = PATIENCE_S, every: float = 0.02) -> None:
    """Wait until ``fact`` returns something true; fail, saying what was waited for, if it does not in time."""
    deadline = time.monotonic() + patience
    while not fact():
        assert time.monotonic() < deadline, f"waited {patience:g} s in vain for {what}"
        time.sleep(every)


class Worker:
    """``celery -A <app> worker <options>`` as a process of its own, with its own working folder."""

    def __init__(
        self, app: str, options: Sequence[str], environment: dict[str, str], folder: Path, number: int = 0
    ) -> None:
        self.folder = folder / f"worker-{number}"
        self.folder.mkdir(exist_ok=True)
        self._log = folder / f"worker-{number}.log"
        self.name = f"w{number}@test"
        command = [
            sys.executable,
            "-P",
            "-m",
            "celery",
            "-A",
            app,
            "worker",
            "-l",
            "INFO",
            "--without-mingle",
            "--without-gossip",
        ]
        command += ["-n", self.name]
        command += options
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={
                    **os.environ,
                    "PYTHONPATH": str(HERE / "apps"),
                    "PYTHONWARNINGS": "ignore:You're running the worker with superuser",
                    **environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        """What the worker has said so far."""
        return self._log.read_text(errors="replace")

    def ready(self) -> Worker:
        """Wait until the worker consumes."""
        wait_for(lambda: " ready." in self.log or self.process.poll() is not None, "the worker to be ready")
        assert self.process.poll() is None, self.log
        return self

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the main process alone."""
        self.process.send_signal(number)

    def stop(self) -> int:
        """End by SIGTERM, as a deploy does; return the exit code."""
        self.process.terminate()
        return self.process.wait(PATIENCE_S)

    def kill(self) -> None:
        """Kill the main process and all its children at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE_S)
