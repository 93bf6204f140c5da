"""The tables of guards in docs/invariants.md."""

from __future__ import annotations

import re

from guards import GUARDS
from guards.guard import ROOT, Guard

PATH = ROOT / "docs" / "invariants.md"

_TABLE = re.compile(r"^\| guard \|.*?\n(?=\n|\Z)", re.MULTILINE | re.DOTALL)


def written(page: str) -> str:
    """Return the page with the tables that the guards make: one below each numbered heading."""
    sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    numbers = [int(number) for section in sections for number in re.findall(r"^## (\d+)\.", section)]
    if unserved := {guard.serves for guard in GUARDS} - set(numbers):
        raise ValueError(f"{PATH} has no heading for {unserved}")
    return "".join(_with_table(section) for section in sections)


def _with_table(section: str) -> str:
    heading = re.match(r"## (\d+)\.", section)
    if heading is None:
        return section
    rows = [_row(guard) for guard in GUARDS if guard.serves == int(heading[1])]
    table = "\n".join(["| guard | where | tests |", "| --- | --- | --- |", *rows, ""])
    return _TABLE.sub(lambda _: table, section)


def _row(guard: Guard) -> str:
    tests = ", ".join(_linked(test) for test in guard.tests)
    return f"| {guard.name} | [{guard.file}](../vkjobs/{guard.file}) | {tests} |"


def _linked(test: str) -> str:
    file, _, name = test.partition("::")
    return f"[{name.removeprefix('test_').replace('_', ' ')}](../tests/{file})"
