"""``python -P -m benchmarks <name>``: run a benchmark, print a table; with ``--json`` the last line is its figures."""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
from pathlib import Path

from benchmarks.site import BenchmarkError, open_site
from vkjobs.errors import VkjobsError

RESULTS = Path(__file__).resolve().parent / "results"
BENCHMARKS = {
    "lateness": "how late jobs start, beside the peers",
    "throughput": "jobs a second, beside bare Celery and the peers",
    "enqueue": "rows a second that a host writes",
    "nudge": "from enqueue to start, for jobs that are due at once",
    "burst": "how late jobs start while a burst is worked off",
    "scale": "lease, claim and settle at 10 million rows, and under an open transaction",
    "workers": "jobs a second on 1 to 8 workers",
    "pressure": "the pressure cells of the open benchmark of Postgres queues, beside the peers",
    "memory": "growth of a worker over a million jobs",
    "plot": "draw docs/lateness.svg and docs/scale.svg from what --save has kept",
}


def main() -> int:
    """Run what the command line asks for."""
    arguments = _arguments()
    try:
        if arguments.name == "plot":
            for path in importlib.import_module("benchmarks.plot").draw(RESULTS):
                print(path)
            return 0
        benchmark = importlib.import_module(f"benchmarks.{arguments.name}")
        with open_site() as site:
            figures = benchmark.run(site, short=arguments.short)
    except (BenchmarkError, VkjobsError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(benchmark.tell(figures))
    line = json.dumps(figures)
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{arguments.name}.json").write_text(f"{line}\n")
    if arguments.json:
        print(line)
    return 0


def _arguments() -> argparse.Namespace:
    listed = "\n".join(f"  {name:12}{what}" for name, what in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="benchmarks", epilog=f"benchmarks:\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=BENCHMARKS, metavar="name", help="one of those below")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON in the last line")
    parser.add_argument("--short", action="store_true", help="only see that it runs: the figures mean nothing")
    parser.add_argument("--save", action="store_true", help="keep the JSON under benchmarks/results/, for `plot`")
    return parser.parse_args()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
