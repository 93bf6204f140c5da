"""The benchmarks, in their short form: that they run and print what they promise. Their figures mean nothing here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # benchmarks are no part of the package; at the end, so that vkjobs is the installed one

from benchmarks import tally  # noqa: E402
from benchmarks.figures import medians, percentile, ratios, spread, table  # noqa: E402

SYSTEMS = {"celery", "vkjobs", "vkjobs_bulk", "procrastinate", "pgqueuer", "awa"}


def run(name: str) -> dict[str, Any]:
    """Run a benchmark as `make bench` does; return the last line of its output."""
    for peer in ("procrastinate", "pgqueuer", "awa"):
        pytest.importorskip(peer, reason="pip install 'vkjobs[bench]'")
    result = subprocess.run(
        [sys.executable, "-P", "-m", "benchmarks", name, "--short", "--json"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    *told, last = result.stdout.splitlines()
    assert told[0].startswith("| ")
    figures: dict[str, Any] = json.loads(last)
    return figures


@pytest.mark.timeout(400)
def test_lateness_is_measured_side_by_side() -> None:
    figures = run("lateness")
    assert set(figures) == SYSTEMS - {"celery", "vkjobs_bulk"}
    for one in figures.values():
        assert set(one) == {"p50_ms", "p99_ms", "max_ms", "early"}
        assert one["p50_ms"] <= one["p99_ms"] <= one["max_ms"]
    assert figures["vkjobs"]["early"] == 0


@pytest.mark.timeout(400)
def test_throughput_is_measured_side_by_side() -> None:
    figures = run("throughput")
    assert set(figures["rates"]) == SYSTEMS
    assert all(rate > 0 for rate in figures["rates"].values())
    for name, ratio in figures["ratios"].items():
        one, other = name.split("/")
        assert ratio == pytest.approx(figures["rates"][one] / figures["rates"][other], rel=0.02, abs=0.01)
    assert {"vkjobs/celery", "vkjobs/procrastinate", "vkjobs_bulk/pgqueuer"} <= set(figures["ratios"])
    assert [set(one) for one in figures["rounds"]] == [SYSTEMS, SYSTEMS]


@pytest.mark.parametrize(
    ("samples", "percent", "expected"),
    [
        ([1], 50, 1),
        ([3, 1, 2], 50, 2),
        ([4, 3, 2, 1], 50, 2),
        (range(1, 101), 99, 99),
        (range(1, 101), 100, 100),
        (range(1, 1001), 99, 990),
        ([5, 1], 0, 1),
    ],
)
def test_a_percentile_is_a_sample(samples: list[float], percent: float, expected: float) -> None:
    assert percentile(samples, percent) == expected


def test_a_spread_has_median_99th_percentile_and_maximum() -> None:
    assert spread([1.0] * 50 + [2.0] * 49 + [3.004]) == {"p50_ms": 1.0, "p99_ms": 2.0, "max_ms": 3.0}


def test_a_median_is_of_the_rounds_that_have_the_name() -> None:
    assert medians([{"a": 1, "b": 10}, {"a": 5}, {"a": 2, "b": 20}]) == {"a": 2, "b": 15}


def test_ratios_are_of_what_is_known() -> None:
    assert ratios({"a": 3, "b": 2, "zero": 0}, [("a", "b"), ("a", "zero"), ("a", "c"), ("c", "a")]) == {"a/b": 1.5}


def test_a_table_aligns_names_left_and_figures_right() -> None:
    assert table(("", "jobs/s"), [("a", 12345.6), ("long", 0.5)]).splitlines() == [
        "|      | jobs/s |",
        "| ---- | ------ |",
        "| a    | 12,346 |",
        "| long |    0.5 |",
    ]


def test_calls_of_many_processes_are_counted(tmp_path: Path) -> None:
    source = """
import os, sys
from benchmarks.tally import hit
hit()
if os.fork() == 0:
    hit()
    hit()
else:
    assert os.wait()[1] == 0
    hit()
"""
    assert tally.total(tmp_path) == (0, 0.0, 0.0)
    subprocess.run(
        [sys.executable, "-P", "-c", source],
        env={**os.environ, "PYTHONPATH": str(ROOT), tally.FOLDER: str(tmp_path)},
        check=True,
    )
    total = tally.total(tmp_path)
    assert total.calls == 4
    assert len(list(tmp_path.iterdir())) == 2
    assert 0 < total.first < total.last
