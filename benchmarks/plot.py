"""Draws docs/lateness.svg and docs/scale.svg from the figures that ``--save`` has kept. Measures nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.site import ROOT, BenchmarkError

_DOCS = ROOT / "docs"
_TARGET_MS = 20
_QUANTILES = {"p50_ms": ("o", "median"), "p99_ms": ("s", "99th percentile"), "max_ms": ("|", "latest")}
_VERBS = ("lease", "claim", "settle")

mpl.rcParams.update(
    {"svg.hashsalt": "vkjobs", "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}
)


def draw(results: Path) -> list[Path]:
    """Draw a picture of each result that it knows; return the files.

    Raises:
        BenchmarkError: there is none.
    """
    drawn = []
    for name, picture in (("lateness", _lateness), ("scale", _scale)):
        if (file := results / f"{name}.json").exists():
            path = _DOCS / f"{name}.svg"
            picture(json.loads(file.read_text())).savefig(path, metadata={"Date": None})
            drawn.append(path)
    if not drawn:
        raise BenchmarkError("nothing to draw: run lateness or scale with --save first")
    return drawn


def _lateness(figures: dict[str, Any]) -> Any:
    figure = Figure(figsize=(8, 0.8 + 0.5 * len(figures)), layout="constrained")
    axes = figure.subplots()
    names = list(reversed(figures))
    for row, name in enumerate(names):
        axes.plot([figures[name]["p50_ms"], figures[name]["max_ms"]], [row, row], color="0.8", zorder=0)
    for quantile, (marker, label) in _QUANTILES.items():
        values = [figures[name][quantile] for name in names]
        axes.scatter(values, range(len(names)), marker=marker, label=label, s=50)
    axes.axvline(_TARGET_MS, color="0.6", linestyle=":", zorder=0)
    axes.set_xscale("log")
    axes.set_xlabel("start minus run_at, in ms")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.5, len(names) - 0.5)
    axes.xaxis.set_major_formatter("{x:g}")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure


def _scale(figures: dict[str, Any]) -> Any:
    figure = Figure(figsize=(8, 3), layout="constrained")
    rows = figures["rows"]
    for axes, verb in zip(figure.subplots(1, 3), _VERBS, strict=True):
        for backlog, costs in figures["costs_ms"].items():
            label = f"{int(backlog):,} due" if verb == _VERBS[0] else None
            axes.plot(list(rows.values()), [costs[name][verb] for name in rows], marker="o", label=label)
        axes.set_xscale("log")
        axes.set_ylim(0, 1.2 * max(cost[verb] for costs in figures["costs_ms"].values() for cost in costs.values()))
        axes.set_title({"lease": "lease of at most 100"}.get(verb, f"{verb} of one"))
        axes.set_xlabel("rows in the table")
    figure.axes[0].set_ylabel("ms")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure
