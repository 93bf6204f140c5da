"""The chaos program itself: that it runs as `make chaos` runs it, and that it cannot be fooled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from chaos.servers import Redis
from chaos.site import Site

from vkjobs.local import Postgres

TESTS = Path(__file__).parent.parent


def chaos(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-P", "-m", "chaos", *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_scenario_is_one_line_and_the_last_line_tells_of_all_in_json() -> None:
    run = chaos("--broker", "redis", "--only", "messages_doubled", "--jobs", "50", "--seed", "7")
    assert run.returncode == 0, run.stdout + run.stderr
    first, last = run.stdout.splitlines()
    assert first.split()[:3] == ["ok", "redis", "messages_doubled"]
    told = json.loads(last)
    assert (told["lost"], told["doubled"], told["illegal"], told["seed"]) == (0, 0, 0, 7)
    assert told["scenarios"]["redis/messages_doubled"]["seen"]["jobs"] == 50


def test_an_unknown_scenario_is_refused_in_a_line_that_names_those_there_are() -> None:
    run = chaos("--only", "poisson")
    assert run.returncode == 1
    assert "there is no scenario poisson: " in run.stderr
    assert " poison," in run.stderr


@pytest.fixture
def site(postgres: Postgres, empty_database_url: str, tmp_path: Path) -> Iterator[Site]:
    with Redis() as broker:
        site = Site(broker=broker, postgres=postgres, url=empty_database_url, folder=tmp_path, jobs=9, random=Random(1))
        site.migrate()
        site.add("mark", 9)
        yield site
        site.close()


def test_nothing_that_is_done_behind_its_back_escapes_the_verdict(site: Site) -> None:
    site.worker()
    site.settle()
    result = site.verdict()
    assert result.holds
    for tamper, told in [
        ("delete from vk_jobs where id = 1", "lost"),
        ("insert into vk_jobs (kind, run_at) values ('mark', now() + interval '1 hour')", "lost"),
        ("insert into effects select job_id from effects where job_id = 2", "doubled"),
        ("delete from effects where job_id = 3", "doubled"),
        ("update vk_jobs set status = 'pending' where id = 4", "illegal"),
        ("update vk_jobs set attempts = attempts + 1 where id = 5", "illegal"),
    ]:
        before = getattr(result, told)
        site.ask(tamper)
        result = site.verdict()
        assert getattr(result, told) > before, tamper
        assert not result.holds


def test_a_handler_that_was_called_without_a_claim_does_not_escape_the_verdict(site: Site) -> None:
    site.worker()
    site.settle()
    with (site.folder / "effects").open("a") as effects:
        effects.write("6\n")
    assert "job 6 was claimed 1 times, and its handler called 2 times" in site.verdict().problem
