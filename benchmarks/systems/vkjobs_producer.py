"""A host that enqueues jobs that are due now, one a transaction: ``<number> <seconds between two, on average>``."""

from __future__ import annotations

import sys
import time
from random import Random

from sqlalchemy.orm import Session

import vkjobs
from benchmarks.systems.vkjobs import MARK
from benchmarks.systems.vkjobs_app import app
from vkjobs.tasks import engine_of


def main(number: int, pause: float) -> None:
    """Enqueue them, then stay: a process that ends is an error."""
    random = Random(1)
    for job in range(number):
        with Session(engine_of(app)) as session:
            vkjobs.enqueue(session, MARK, str(job), nudge=app)
            session.commit()
        time.sleep(random.expovariate(1 / pause))
    sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
