"""docs/guarantees.md: each of its sentences names tests or scenarios that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "guarantees.md").read_text()
SAID = re.findall(r"^- (.*?)(?=^- |^#|\n\n|\Z)", PAGE, re.MULTILINE | re.DOTALL)
PROOFS = sorted(set(re.findall(r"\[([^\]]+)\]\(\.\./(tests/[^)]+)\)", PAGE)))


def one_line(said: str) -> str:
    return " ".join(said.split())


@pytest.mark.parametrize("said", SAID, ids=lambda said: one_line(said)[:50])
def test_each_sentence_names_what_shows_it(said: str) -> None:
    assert re.search(r"[.;]\s+\(\[[^\]]+\]\(\.\./tests/[^)]+\)(,\s+\[[^\]]+\]\(\.\./tests/[^)]+\))*\)\s*$", said)


@pytest.mark.parametrize(("name", "file"), PROOFS, ids=[name for name, _ in PROOFS])
def test_what_is_named_is_there(name: str, file: str) -> None:
    source = (DOCS.parent / file).read_text()
    assert re.search(rf"^ *def (test_)?{one_line(name).replace(' ', '_')}\(", source, re.MULTILINE)


def test_every_scenario_of_chaos_but_the_phases_shows_something() -> None:
    there = {
        (name, str(file.relative_to(DOCS.parent)))
        for file in (DOCS.parent / "tests" / "chaos" / "scenarios").glob("*.py")
        for name in re.findall(r"^@scenario\(.*\)\ndef (\w+)\(", file.read_text(), re.MULTILINE)
    }
    shown = {(one_line(name).replace(" ", "_"), file) for name, file in PROOFS}
    assert {(name, file) for name, file in there if not file.endswith("phases.py")} - shown == set()


@pytest.mark.parametrize("page", ["guarantees.md", "invariants.md"])
def test_each_link_of_a_page_leads_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (DOCS / page).read_text())
    assert links
    assert [link for link in links if not (DOCS / link).exists()] == []
