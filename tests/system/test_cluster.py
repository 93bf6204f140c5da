"""Two workers in containers of the image, by pytest-celery; run with ``-m docker``, which needs an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from original import connected, execute, rows
from pytest_celery import CeleryBrokerCluster, CeleryTestSetup, CeleryTestWorker, CeleryWorkerCluster
from pytest_celery import CeleryWorkerContainer as PytestCeleryContainer
from pytest_docker_tools import build, container, fxtr, volume
from pytest_docker_tools.wrappers import Container
from sqlalchemy import text
from workers import wait_for

from vkjobs.migrations import migrate

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

JOBS = 600
HELD = "1"
KINDS = f"""
import time
import vkjobs
from sqlalchemy import text

@vkjobs.handler("mark")
def mark(job, ctx):
    ctx.session.execute(text("insert into effects values (:id)"), {{"id": job.id}})
    time.sleep(600 if job.ref_id == "{HELD}" and job.attempts == 0 else 0.02)
"""


@pytest.fixture(scope="session", autouse=True)
def _asked_for(pytestconfig: pytest.Config) -> None:
    # Of the session, as what asks for the engine first: it must not be asked for unless the tests are.
    if pytestconfig.option.markexpr != "docker":
        pytest.skip("run with -m docker")


class PostgresContainer(Container):  # type: ignore[misc]
    def ready(self) -> bool:
        # Over TCP: while it initialises, the image's Postgres answers on its socket only.
        return bool(super().ready() and self.exec_run("pg_isready --host=127.0.0.1 --username=postgres").exit_code == 0)


class WorkerContainer(PytestCeleryContainer):  # type: ignore[misc]
    """A container of the image as a deployment starts it; nothing of pytest-celery's own image is in it."""

    @classmethod
    def command(cls, *_: str, **__: Any) -> list[str]:
        return ["celery", "-A", "vkjobs", "worker", "-B", "-c", "2", "-l", "INFO", "-I", "kinds"]

    @classmethod
    def worker_name(cls) -> str:
        return "celery"


postgres_container = container(
    image="postgres:18",
    environment={"POSTGRES_PASSWORD": "cluster"},
    ports={"5432/tcp": ("127.0.0.1",)},
    tmpfs={"/var/lib/postgresql": ""},
    network="{default_pytest_celery_network.name}",
    wrapper_class=PostgresContainer,
    timeout=60,
)

worker_image = build(path=str(Path(__file__).resolve().parents[2]), tag="vkjobs:tests")
kinds = volume(initial_content={"kinds.py": KINDS.encode()})


def worker_container() -> Any:
    return container(
        image="{worker_image.id}",
        command=WorkerContainer.command(),
        environment=fxtr("worker_environment"),
        volumes={"{kinds.name}": {"bind": "/kinds", "mode": "ro"}},
        network="{default_pytest_celery_network.name}",
        wrapper_class=WorkerContainer,
        timeout=60,
    )


one_container = worker_container()
other_container = worker_container()


@pytest.fixture
def database_url(postgres_container: PostgresContainer) -> str:
    """URL, for this process, of a database with an empty vk_jobs."""
    url = f"postgresql+psycopg2://postgres:cluster@127.0.0.1:{postgres_container.ports['5432/tcp'][0]}/postgres"
    migrate(url)
    execute(url, "create table effects (job bigint)")
    return url


@pytest.fixture
def worker_environment(
    postgres_container: PostgresContainer, database_url: str, celery_broker_cluster: CeleryBrokerCluster
) -> dict[str, str]:
    return {
        "VKJOBS_DATABASE_URL": f"postgresql://postgres:cluster@{postgres_container.id[:12]}/postgres",
        "VKJOBS_BROKER_URL": celery_broker_cluster.config()["urls"][0],
        "VKJOBS_LEASE": "3",
        "VKJOBS_BACKOFF": "1",
        "PYTHONPATH": "/kinds",
    }


@pytest.fixture
def celery_broker_cluster(celery_redis_broker: Any) -> Iterator[CeleryBrokerCluster]:
    cluster = CeleryBrokerCluster(celery_redis_broker)
    yield cluster
    cluster.teardown()


@pytest.fixture
def celery_backend_cluster() -> None:
    """None: jobs have no results."""


@pytest.fixture
def celery_worker_cluster(
    one_container: WorkerContainer, other_container: WorkerContainer, default_worker_app: Any
) -> Iterator[CeleryWorkerCluster]:
    cluster = CeleryWorkerCluster(
        *(CeleryTestWorker(each, default_worker_app) for each in (one_container, other_container))
    )
    yield cluster
    cluster.teardown()


def test_a_worker_container_that_is_killed_loses_nothing_and_doubles_nothing(
    celery_setup: CeleryTestSetup, database_url: str
) -> None:
    workers = {worker.hostname(): worker for worker in celery_setup.worker_cluster}
    node = "split_part(claimed_by, ' ', 2)"
    with connected(database_url) as conn:

        def ask(query: str) -> list[Any]:
            return list(conn.scalars(text(query)))

        execute(
            database_url,
            f"insert into vk_jobs (kind, ref_id, run_at) select 'mark', n, now() from generate_series(1, {JOBS}) n",
        )
        wait_for(
            lambda: set(ask(f"select distinct {node} from vk_jobs where status = 'done'")) == set(workers),
            "both workers to have done jobs",
        )
        is_held = f"ref_id = '{HELD}' and status = 'running' and claimed_by is not null"
        wait_for(lambda: ask(f"select 1 from vk_jobs where {is_held}"), "a worker to hold the long job")
        (holder,) = ask(f"select {node} from vk_jobs where {is_held}")
        workers.pop(holder).kill()

        (survivor,) = workers
        wait_for(lambda: ask("select count(*) from vk_jobs where status = 'done'") == [JOBS], "all jobs", patience=120)
        assert ask("select job from effects order by job") == ask("select id from vk_jobs order by id")
    assert rows(database_url, f"select attempts, {node} from vk_jobs where ref_id = '{HELD}'") == [(1, survivor)]
