"""``python -P -m benchmarks <name>``: run a benchmark, print a table; with ``--json`` the last line is its figures."""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
from pathlib import Path

from benchmarks.site import BenchmarkError, open_site

RESULTS = Path(__file__).resolve().parent / "results"
NAMES = ("lateness", "throughput", "scale", "enqueue", "nudge", "burst", "workers", "memory")


def main() -> int:
    """Run what the command line asks for."""
    arguments = _arguments()
    benchmark = importlib.import_module(f"benchmarks.{arguments.name}")
    try:
        with open_site() as site:
            figures = benchmark.run(site, short=arguments.short)
    except BenchmarkError as error:
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
    parser = argparse.ArgumentParser(prog="benchmarks", description="Measure vkjobs.")
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON in the last line")
    parser.add_argument("--short", action="store_true", help="only see that it runs: the figures mean nothing")
    parser.add_argument("--save", action="store_true", help="keep the JSON under benchmarks/results/, for `plot`")
    return parser.parse_args()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
