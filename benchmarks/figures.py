"""Figures of many samples, and tables of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the smallest sample that is not exceeded by ``percent`` per cent of them (nearest rank)."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def spread(samples_ms: Sequence[float]) -> dict[str, float]:
    """Return median, 99th percentile and maximum of milliseconds."""
    return {
        "p50_ms": round(percentile(samples_ms, 50), 2),
        "p99_ms": round(percentile(samples_ms, 99), 2),
        "max_ms": round(max(samples_ms), 2),
    }


def medians(rounds: Iterable[Mapping[str, float]], digits: int = 0) -> dict[str, float]:
    """Return by name the median over the rounds in which the name occurs."""
    values: dict[str, list[float]] = {}
    for one in rounds:
        for name, value in one.items():
            values.setdefault(name, []).append(value)
    return {name: round(median(found), digits) for name, found in values.items()}


def ratios(values: Mapping[str, float], pairs: Iterable[tuple[str, str]]) -> dict[str, float]:
    """Return ``{"a/b": a divided by b}`` for the pairs whose values are known."""
    return {f"{a}/{b}": round(values[a] / values[b], 2) for a, b in pairs if a in values and values.get(b)}


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table for people, in Markdown: names to the left, figures to the right."""
    lines = [[*map(str, head)], *([*map(_shown, row)] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.rjust(width) if number else cell.ljust(width) for number, (cell, width) in cells) + " |"
        for cells in (list(enumerate(zip(line, widths, strict=True))) for line in [lines[0], rule, *lines[1:]])
    )


def _shown(value: object) -> str:
    return f"{value:,.0f}" if isinstance(value, int | float) and abs(value) >= 1000 else str(value)
