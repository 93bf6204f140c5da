"""cases.md: what it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROWS = [
    line.strip("| \n").split(" | ") for line in (HERE / "cases.md").read_text().splitlines() if line.startswith("| ")
]
CASES = ROWS[2:]
LINKS = sorted({link for _, _, shown in CASES for link in re.findall(r"\[([^\]]+)\]\(([^)]+)\)", shown)})


def test_each_case_is_shown_by_something() -> None:
    assert [id for id, *_ in CASES][:25] == [f"F{number:02}" for number in range(1, 26)]
    assert all("](" in shown for _, _, shown in CASES)


@pytest.mark.parametrize(("name", "file"), LINKS, ids=[name for name, _ in LINKS])
def test_what_shows_it_is_there(name: str, file: str) -> None:
    assert re.search(rf"^ *def (test_)?{name.replace(' ', '_')}\(", (HERE / file).read_text(), re.MULTILINE)
