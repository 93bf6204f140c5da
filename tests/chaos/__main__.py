"""Run the scenarios: one line each, and a JSON object as the last line. Decides what runs; breaks nothing itself.

Scenarios mostly wait, so a few lanes run them at the same time, each lane with a broker and a Postgres of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from chaos import scenarios  # noqa: F401 - fills ALL
from chaos.scenario import ALL, Scenario
from chaos.servers import RabbitMQ, Redis
from chaos.site import STOP, Site
from chaos.verdict import Result
from vkjobs.local import Postgres

BROKERS: dict[str, type[Redis | RabbitMQ]] = {"redis": Redis, "rabbitmq": RabbitMQ}
LONG = 1000
"""From so many jobs on, each scenario runs on each broker."""
LANES, LONG_LANES = 3, 2
"""So many for each broker: long scenarios wait less, and more of them would only wait for the cores."""


def main() -> int:
    """Run what the command line says; return the exit code."""
    arguments = _arguments()
    # What the workers run on is theirs alone, whatever the shell has set.
    for name in [name for name in os.environ if name.startswith(("VKJOBS_", "CELERY_"))]:
        del os.environ[name]
    chosen = [one for one in ALL if arguments.only in ("", one.name)]
    if not chosen:
        raise SystemExit(f"there is no scenario {arguments.only}: {', '.join(one.name for one in ALL)}")
    brokers = [arguments.broker] if arguments.broker else list(BROKERS)
    if "rabbitmq" in brokers and not RabbitMQ.is_installed():
        if arguments.broker:
            raise SystemExit("RabbitMQ is missing: apt-get install rabbitmq-server")
        brokers.remove("rabbitmq")
        print("skip  rabbitmq  it is not installed: apt-get install rabbitmq-server", flush=True)
    abreast = LONG_LANES if arguments.jobs >= LONG else LANES
    with ThreadPoolExecutor(len(brokers) * abreast) as lanes:
        plan = {name: [one for one in chosen if _is_for(one, name, brokers, arguments)] for name in brokers}
        together = {name: [one for one in plan[name] if not one.alone] for name in brokers}
        running = [
            lanes.submit(_lane, name, together[name][number::abreast], arguments)
            for number in range(abreast)
            for name in brokers
        ]
        try:
            results = {name: result for lane in running for name, result in lane.result().items()}
            for name in brokers:
                results |= lanes.submit(_lane, name, [one for one in plan[name] if one.alone], arguments).result()
        except KeyboardInterrupt:
            STOP.set()
            return 130
    print(json.dumps({"seed": arguments.seed, "jobs": arguments.jobs, **_summary(results)}))
    return 0 if all(result.holds for result in results.values()) else 1


def _is_for(one: Scenario, broker: str, brokers: Sequence[str], arguments: argparse.Namespace) -> bool:
    return arguments.jobs >= LONG or not one.any_broker or broker == brokers[0]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--jobs", type=int, default=200, help="of a scenario under load; 10000 is the long version")
    parser.add_argument("--seed", type=int, default=1, help="of the schedule of the faults")
    parser.add_argument("--broker", choices=BROKERS, help="this one alone")
    parser.add_argument("--only", default="", help="the scenario of this name alone")
    return parser.parse_args()


def _summary(results: dict[str, Result]) -> dict[str, object]:
    return {
        "lost": sum(result.lost for result in results.values()),
        "doubled": sum(result.doubled for result in results.values()),
        "illegal": sum(result.illegal for result in results.values()),
        "scenarios": {name: {**vars(result), "holds": result.holds} for name, result in results.items()},
    }


def _lane(broker_name: str, chosen: Sequence[Scenario], arguments: argparse.Namespace) -> dict[str, Result]:
    """Run scenarios on one broker, one after another."""
    results: dict[str, Result] = {}
    if not chosen:
        return results
    with Postgres() as postgres, BROKERS[broker_name]() as broker:
        for number, scenario in enumerate(chosen):
            if STOP.is_set():
                break
            if missing := scenario.missing():
                print(f"skip  {broker_name:9} {scenario.name:24} {missing}", flush=True)
                continue
            random = Random(f"{arguments.seed} {broker_name} {scenario.name}")
            broker.flush()
            url = postgres.create_database(f"chaos_{number}")
            folder = Path(tempfile.mkdtemp(prefix=f"vkjobs-chaos-{scenario.name}-"))
            site = Site(broker=broker, postgres=postgres, url=url, folder=folder, jobs=arguments.jobs, random=random)
            result = results[f"{broker_name}/{scenario.name}"] = _run(scenario, site)
            if not STOP.is_set():
                _say(broker_name, scenario, result)
            if result.holds or STOP.is_set():
                shutil.rmtree(folder)
            else:
                print(f"      the logs of its workers: {folder}", flush=True)
    return results


def _run(scenario: Scenario, site: Site) -> Result:
    began = time.monotonic()
    problems = []
    try:
        if scenario.migrated:
            site.migrate()
        scenario.function(site)
    except Exception as error:
        problems.append(_told(error))
    site.close()
    try:
        result = site.verdict()
    except Exception as error:
        result = Result(problem=_told(error))
    result.problem = "; ".join(filter(None, [*problems, result.problem]))
    result.seconds = round(time.monotonic() - began, 1)
    return result


def _told(error: Exception) -> str:
    expected = isinstance(error, AssertionError) and error.args
    return str(error) if expected else "".join(traceback.format_exception(error)).strip()


def _say(broker_name: str, scenario: Scenario, result: Result) -> None:
    verdict = "ok" if result.holds else "FAIL"
    seen = ", ".join(f"{value} {name}" for name, value in result.seen.items())
    print(f"{verdict:5} {broker_name:9} {scenario.name:24} {result.seconds:5.1f} s  {seen}", flush=True)
    if not result.holds:
        counts = f"lost {result.lost}, doubled {result.doubled}, illegal {result.illegal}"
        print(f"      {counts}; {result.problem}", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
