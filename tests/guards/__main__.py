"""Take out each guard in turn: one line each; the exit code is 0 if all are needed."""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor

from guards import GUARDS, page
from guards.guard import Guard
from guards.proof import complaint, verdict

AT_ONCE = 2


def main() -> int:
    """Do what the command line says; return the exit code."""
    parser = argparse.ArgumentParser(prog="guards", description=__doc__)
    parser.add_argument("--docs", action="store_true", help=f"write the tables of {page.PATH.name} instead")
    parser.add_argument("--only", default="", metavar="WORDS", help="the guards with these words in name or file")
    arguments = parser.parse_args()
    if arguments.docs:
        page.PATH.write_text(page.written(page.PATH.read_text()))
        return 0
    chosen = [guard for guard in GUARDS if arguments.only in f"{guard.file}: {guard.name}"]
    if not chosen:
        raise SystemExit(f"no guard has {arguments.only!r} in its name or file")
    if found := complaint(chosen):
        raise SystemExit(found)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        needed = list(threads.map(_prove, chosen))
    print(f"{sum(needed)} of {len(needed)} guards are needed")
    return 0 if all(needed) else 1


def _prove(guard: Guard) -> bool:
    began = time.monotonic()
    reason = verdict(guard)
    line = f"{'not proven' if reason else 'needed'}  {time.monotonic() - began:5.1f} s  {guard.file}: {guard.name}"
    print(f"{line}: {reason}" if reason else line, flush=True)
    return not reason


if __name__ == "__main__":
    raise SystemExit(main())
