"""Two workers in containers of the image, by pytest-celery; run with ``-m docker``, which needs an engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from original import execute
from pytest_celery import (
    CeleryBrokerCluster,
    CeleryTestSetup,
    CeleryTestWorker,
    CeleryWorkerCluster,
    CeleryWorkerContainer,
)
from pytest_docker_tools import build, container, fxtr
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from workers import wait_for

from vkjobs.database import url_of
from vkjobs.local import Postgres

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
KINDS = """
import time
import vkjobs
from sqlalchemy import text

@vkjobs.handler("mark")
def mark(job, ctx):
    ctx.session.execute(text("insert into effects values (:id)"), {"id": job.id})
    time.sleep(0.02)
"""


@pytest.fixture(autouse=True)
def _asked_for(pytestconfig: pytest.Config) -> None:
    if pytestconfig.option.markexpr != "docker":
        pytest.skip("run with -m docker")


class Worker(CeleryWorkerContainer):  # type: ignore[misc]
    """A container of the image as a deployment starts it; the modules of pytest-celery's own are not needed."""

    @classmethod
    def command(cls, *args: str, **_: Any) -> list[str]:
        return ["celery", "-A", "vkjobs", "worker", "-B", "-c", "2", "-l", "INFO", "-I", "kinds", *args]


@pytest.fixture
def database_url(postgres: Postgres) -> str:
    url = postgres.create_database(f"cluster_{os.getpid()}", template="migrated")
    execute(url, "create table effects (job bigint)")
    return url


@pytest.fixture
def worker_env(database_url: str, celery_broker_cluster: Any) -> dict[str, str]:
    return {
        "VKJOBS_DATABASE_URL": database_url,
        "VKJOBS_BROKER_URL": celery_broker_cluster.config()["urls"][0],
        "VKJOBS_LEASE": "3",
        "PYTHONPATH": "/kinds",
    }


@pytest.fixture
def worker_volumes(database_url: str, tmp_path: Path) -> dict[str, dict[str, str]]:
    (tmp_path / "kinds.py").write_text(KINDS)
    tmp_path.chmod(0o755)
    socket = str(make_url(database_url).query["host"])  # Postgres listens on no other
    return {str(tmp_path): {"bind": "/kinds", "mode": "ro"}, socket: {"bind": socket, "mode": "rw"}}


@pytest.fixture
def worker_user(database_url: str) -> str:
    """Return the id of the only user who may reach that socket."""
    return str(Path(str(make_url(database_url).query["host"])).stat().st_uid)


image = build(path=str(ROOT), tag="vkjobs:tests")


def worker_container() -> Any:
    return container(
        image="{image.id}",
        command=Worker.command(),
        environment=fxtr("worker_env"),
        volumes=fxtr("worker_volumes"),
        user=fxtr("worker_user"),
        network="{default_pytest_celery_network.name}",
        wrapper_class=Worker,
        timeout=60,
    )


one_container = worker_container()
other_container = worker_container()


@pytest.fixture
def celery_broker_cluster(celery_redis_broker: Any) -> Iterator[Any]:
    cluster = CeleryBrokerCluster(celery_redis_broker)
    yield cluster
    cluster.teardown()


@pytest.fixture
def celery_backend_cluster() -> None:
    """None: jobs have no results."""


@pytest.fixture
def celery_worker_cluster(
    one_container: Worker, other_container: Worker, default_worker_app: Any
) -> Iterator[CeleryWorkerCluster]:
    cluster = CeleryWorkerCluster(
        *(CeleryTestWorker(one, default_worker_app) for one in (one_container, other_container))
    )
    yield cluster
    cluster.teardown()


def test_a_worker_container_that_is_killed_loses_nothing_and_doubles_nothing(
    celery_setup: CeleryTestSetup, database_url: str
) -> None:
    execute(
        database_url,
        "insert into vk_jobs (kind, ref_id, run_at) select 'mark', n, now() from generate_series(1, 600) n",
    )
    engine = create_engine(url_of(database_url), isolation_level="AUTOCOMMIT")
    with engine.connect() as conn:

        def count(what: str) -> int:
            return int(conn.scalar(text(f"select count(*) from {what}")) or 0)

        wait_for(lambda: count("effects") > 100, "both workers to be at work")
        wait_for(
            lambda: (
                count("(select distinct split_part(claimed_by, ' ', 2) from vk_jobs where claimed_by <> '') x") == 2
            ),
            "both workers to have run a job",
        )
        celery_setup.worker_cluster[0].kill()
        wait_for(lambda: count("vk_jobs where status = 'done'") == 600, "all jobs to be done", patience=120)
        assert count("effects") == 600
        assert count("(select distinct job from effects) x") == 600
    engine.dispose()
