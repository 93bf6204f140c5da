"""The arrows of the design: who may import whom, who may write the table, what is public."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import vkjobs
from vkjobs.schema import TABLE, Status

# Each line may import from the lines below it. A package is one unit.
LAYERS = (
    ("vkjobs",),
    ("cli",),
    ("celery",),
    ("marketplace",),
    ("worker",),
    ("nudge", "steward"),
    ("tasks",),
    ("dispatch",),
    ("bulk",),
    ("execute",),
    ("client", "heartbeat"),
    ("handlers",),
    ("ledger", "migrations", "local"),
    ("prepared",),
    ("schema", "database", "report", "policy", "settings", "events", "broker", "prefetch"),
    ("errors",),
)
NO_CELERY = (
    "bulk", "client", "database", "errors", "events", "execute", "handlers", "heartbeat", "ledger", "local",
    "migrations", "policy", "prepared", "report", "schema", "settings",
)  # fmt: skip

PACKAGE = Path(vkjobs.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))


def unit_of(module: str) -> str:
    """Return the module of the package, or the package within it, that ``module`` belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def unit_in(file: Path) -> str:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return "vkjobs" if parts == ("__init__",) else parts[0]


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def imported_in(file: Path) -> Iterator[str]:
    """Give the names of all modules that ``file`` imports, at its top or anywhere else."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            yield from (
                [f"vkjobs.{alias.name}" for alias in node.names] if node.module == "vkjobs" else [str(node.module)]
            )


def imports() -> dict[str, set[str]]:
    """Return for each unit of the package the names of the modules that it imports."""
    found: dict[str, set[str]] = {}
    for file in FILES:
        found.setdefault(unit_in(file), set()).update(imported_in(file))
    return found


def ours(names: set[str]) -> set[str]:
    return {unit_of(name) for name in names if name.split(".")[0] == "vkjobs"}


def strings_in(file: Path) -> Iterator[str]:
    """Give the texts in ``file``, with what is filled into them by name; no docstrings."""
    tree = tree_of(file)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
                for part in node.values
                if isinstance(part, ast.Constant | ast.FormattedValue)
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def test_each_module_has_its_layer() -> None:
    assert sorted(unit for layer in LAYERS for unit in layer) == sorted(imports())


def test_arrows_point_down() -> None:
    rank = {unit: number for number, layer in enumerate(LAYERS) for unit in layer}
    upward = [
        f"{unit} imports {other}"
        for unit, names in imports().items()
        for other in ours(names) - {unit}
        if rank[other] <= rank[unit]
    ]
    assert upward == []


@pytest.mark.parametrize("unit", NO_CELERY)
def test_the_protocol_needs_no_celery(unit: str) -> None:
    graph = imports()
    reached, ahead = set(), {unit}
    while ahead:
        reached |= ahead
        ahead = {other for each in ahead for other in ours(graph[each])} - reached
    foreign = {name.split(".")[0] for each in reached for name in graph[each]}
    assert not foreign & {"celery", "kombu", "billiard"}


def test_nothing_but_the_ledger_and_the_migrations_writes_the_table() -> None:
    written = re.compile(
        r"\b(insert\s+into|update|delete\s+from|merge\s+into|truncate(\s+table)?|copy)\s+(only\s+)?"
        rf"({TABLE}\b|\{{(schema\.)?TABLE\}})",
        re.IGNORECASE,
    )
    writers = {unit_in(file) for file in FILES for text in strings_in(file) if written.search(text)}
    assert writers - {"migrations"} == {"ledger"}
    named = {unit_in(file) for file in FILES for text in strings_in(file) if text == TABLE}
    assert named == {"schema"}


def test_a_status_is_written_out_in_the_schema_alone() -> None:
    quoted = re.compile("'(" + "|".join(Status) + ")'")
    for file in FILES:
        # A migration stays as it was released; the demo reads the table as any host does.
        if unit_in(file) in ("schema", "migrations", "marketplace"):
            continue
        assert not [text for text in strings_in(file) if quoted.search(text)], file
        compared = [node for node in ast.walk(tree_of(file)) if isinstance(node, ast.Compare)]
        values = {part.value for node in compared for part in ast.walk(node) if isinstance(part, ast.Constant)}
        assert not values & set(Status), file


def test_each_module_says_what_it_is() -> None:
    assert [str(file) for file in FILES if not ast.get_docstring(tree_of(file))] == []


def test_the_public_names_are_those_that_are_told() -> None:
    public = {
        name for name, value in vars(vkjobs).items() if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert vkjobs.__all__ == sorted(public)
    assert all(getattr(vkjobs, name).__doc__ for name in vkjobs.__all__)
