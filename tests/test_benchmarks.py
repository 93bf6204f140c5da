"""The benchmarks, in their short form: that they run and print what they promise. Their figures mean nothing here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text
from workers import wait_for

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # benchmarks are no part of the package; at the end, so that vkjobs is the installed one

from benchmarks import tally  # noqa: E402
from benchmarks.adapter.telemetry import Telemetry  # noqa: E402
from benchmarks.figures import medians, percentile, ratios, spread, table  # noqa: E402
from benchmarks.pressure import verdict  # noqa: E402

SYSTEMS = {"celery", "vkjobs", "vkjobs_bulk", "procrastinate", "pgqueuer", "awa"}


@pytest.fixture
def _peers(pytestconfig: pytest.Config) -> None:
    if pytestconfig.option.markexpr != "bench":
        pytest.skip("run with -m bench")


def run(name: str) -> dict[str, Any]:
    """Run a benchmark as `make bench` does; return the last line of its output."""
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


@pytest.mark.bench
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("_peers")
def test_lateness_is_measured_side_by_side() -> None:
    figures = run("lateness")
    assert set(figures) == SYSTEMS - {"celery", "vkjobs_bulk"}
    for one in figures.values():
        assert set(one) == {"p50_ms", "p99_ms", "max_ms", "early"}
        assert one["p50_ms"] <= one["p99_ms"] <= one["max_ms"]
    assert figures["vkjobs"]["early"] == 0


@pytest.mark.bench
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("_peers")
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


MANIFEST = json.loads((ROOT / "benchmarks/adapter/adapter.json").read_text())
METRICS = {"claim_p50_ms", "claim_p95_ms", "claim_p99_ms", "enqueue_rate", "completion_rate", "queue_depth"}


def test_the_manifest_names_what_is_there(engine: Engine) -> None:
    with engine.connect() as conn:
        for name in (*MANIFEST["event_tables"], *MANIFEST["event_indexes"]):
            assert conn.scalar(text("select to_regclass(:name)"), {"name": name}), name


@pytest.fixture
def start_adapter(empty_database_url: str, redis_url: str, tmp_path: Path) -> Any:
    """Start the adapter as the open benchmark does; it has nothing but the environment."""
    started: list[subprocess.Popen[str]] = []

    def start(**environment: str) -> tuple[subprocess.Popen[str], Callable[[], list[dict[str, Any]]]]:
        out = tmp_path / "out"
        with out.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "benchmarks.adapter"],
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "DATABASE_URL": empty_database_url.replace("postgresql+psycopg2", "postgres"),
                    "VKJOBS_BROKER_URL": redis_url,
                    "SCENARIO": "long_horizon",
                    "PRODUCER_MODE": "fixed",
                    "WORKER_COUNT": "2",
                    "SAMPLE_EVERY_S": "1",
                    **environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=file,
                text=True,
            )
        started.append(process)
        return process, lambda: [json.loads(line) for line in out.read_text().splitlines() if line.endswith("}")]

    yield start
    for process in started:
        process.terminate()  # killed, it would leave its worker behind
        process.wait(30)


def test_the_adapter_says_what_the_open_benchmark_asks_for(start_adapter: Any, tmp_path: Path) -> None:
    control = tmp_path / "rate"
    control.write_text("40")
    process, said = start_adapter(PRODUCER_RATE="1", PRODUCER_RATE_CONTROL_FILE=str(control))

    def all_is_told() -> bool:
        lines = said()
        rates = [line["value"] for line in lines if line.get("metric") == "enqueue_rate"]
        return {line.get("metric") for line in lines} >= METRICS and max(rates) > 20

    wait_for(lambda: all_is_told() or process.poll() is not None, "all metrics, at the rate of the file")
    descriptor, *samples = said()
    assert {name: descriptor[name] for name in ("kind", "system", "db_name", "event_tables", "extensions")} == {
        "kind": "descriptor",
        **{name: MANIFEST[name] for name in ("system", "db_name", "event_tables", "extensions")},
    }
    assert {"version", "schema_version", "started_at"} <= set(descriptor)
    for sample in samples:
        assert set(sample) == {"t", "system", "kind", "subject_kind", "subject", "metric", "value", "window_s"}
        assert sample["t"].endswith(".000Z")  # aligned to the clock
    before = len(samples)
    control.write_text("0")
    wait_for(lambda: [s["value"] for s in said()[before:] if s.get("metric") == "enqueue_rate"][-1:] == [0], "no more")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert time.monotonic() - began < 5


def test_percentiles_are_of_what_waited_lately(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry = Telemetry(MANIFEST)
    telemetry.inserted(3)
    for waited in (0.001, 0.002, 0.003):
        telemetry.completed(waited)
    telemetry.sample(0, depth=7)
    said = {line["metric"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert {name: said[name]["value"] for name in ("claim_p50_ms", "claim_p99_ms", "queue_depth")} == {
        "claim_p50_ms": 2,
        "claim_p99_ms": 3,
        "queue_depth": 7,
    }
    assert said["queue_depth"]["t"] == "1970-01-01T00:00:00.000Z"
    assert said["enqueue_rate"]["value"] == said["completion_rate"]["value"] > 0


@pytest.mark.parametrize(
    ("done", "depths", "completed", "recovery"),
    [
        (100, [5, 5, 9, 9, 4], True, 2),
        (90, [5, 5, 9, 9, 4], False, 2),
        (100, [5, 5, 9, 9, 9], False, None),
        (100, [5, 5, 9, 5, 9], True, 1),
    ],
)
def test_a_cell_is_completed_if_it_keeps_up_and_recovers(
    done: float, depths: list[float], completed: bool, recovery: float | None
) -> None:
    metrics = {
        "enqueue_rate": [(at, 100.0) for at in range(1, 6)],
        "completion_rate": [(at, float(done if at == 3 else 100)) for at in range(1, 6)],
        "queue_depth": list(enumerate(depths, start=1)),
        "claim_p99_ms": [(1, 99.0), (2, 10.0), (3, 15.0), (4, 99.0)],
    }
    found = verdict(metrics, began=0, pressed=2, eased=3)  # type: ignore[arg-type]
    assert (found["completed"], found["recovery_s"], found["claim_p99_ratio"]) == (completed, recovery, 1.5)
    assert (found["base_depth"], found["most_depth"]) == (5, 9)
