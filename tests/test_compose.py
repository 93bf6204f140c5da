"""docker-compose.yml and the image: what the files say and, with ``-m docker``, what a real engine does."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMPOSE = (ROOT / "docker-compose.yml").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()
REQUIRED = set(re.findall(r"\$\{(\w+):\?", COMPOSE))

FLOWER = "http://127.0.0.1:5555"
VK_TASKS = """create table vk_tasks
    (id text primary key, template text, status text, agent_id text, transfer_to text, history text[])"""


def make_env_file(folder: Path) -> dict[str, str]:
    """Make .env by the command at the head of docker-compose.yml; return what it says."""
    command = re.search(r"^# +(\(umask .*\))$", COMPOSE, re.MULTILINE)
    assert command is not None
    subprocess.run(["sh", "-c", command[1]], cwd=folder, check=True)
    return dict(line.split("=", 1) for line in (folder / ".env").read_text().splitlines())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_the_documented_command_makes_the_env_file_that_compose_requires(tmp_path: Path) -> None:
    passwords = make_env_file(tmp_path)

    assert set(passwords) == REQUIRED
    assert all(re.fullmatch(r"[0-9a-f]{48}", password) for password in passwords.values())
    assert len(set(passwords.values())) == len(passwords)
    assert (tmp_path / ".env").stat().st_mode & 0o077 == 0


def test_every_password_comes_from_outside_the_file() -> None:
    secrets = re.findall(r"^\s+\w*(?:PASSWORD|AUTH): (.+)$", COMPOSE, re.MULTILINE)

    assert len(secrets) == 3
    for value in secrets:
        assert re.fullmatch(r"(&password |vkjobs:)?\$\{\w+:\?.+\}|\*password", value)
    assert not re.search(r"://[^\s/@]+:[^\s/@]+@", COMPOSE)


def test_the_env_file_reaches_neither_git_nor_the_image() -> None:
    ignored_by_docker = (ROOT / ".dockerignore").read_text().splitlines()

    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()
    assert next(line for line in ignored_by_docker if not line.startswith("#")) == "*"
    assert "!.env" not in ignored_by_docker


def test_ports_are_published_on_the_loopback_address_only() -> None:
    published = [json.loads(ports) for ports in re.findall(r"^\s+ports: (.*)$", COMPOSE, re.MULTILINE)]

    assert published
    assert all(port.startswith("127.0.0.1:") for ports in published for port in ports)


def test_the_image_starts_the_worker_without_a_shell_and_without_root() -> None:
    command = re.findall(r"^CMD (.+)$", DOCKERFILE, re.MULTILINE)
    user = re.findall(r"^USER (.+)$", DOCKERFILE, re.MULTILINE)

    assert [json.loads(each) for each in command] == [["celery", "-A", "vkjobs", "worker", "-B"]]
    assert int(user[-1]) > 0


class Deployment:
    """What ``docker compose`` makes of the file, under a project name of its own."""

    def __init__(self, folder: Path) -> None:
        self.passwords = make_env_file(folder)
        self._command = ["docker", "compose", "--project-name", f"vkjobs-test-{os.getpid()}"]
        self._command += ["--file", str(ROOT / "docker-compose.yml"), "--env-file", str(folder / ".env")]
        # What the shell has set would win over the file.
        self._environment = {name: value for name, value in os.environ.items() if name not in REQUIRED}
        self._environment["VKJOBS_TASK_SERVICE"] = "vkjobs.marketplace.example:ExampleService"

    def __call__(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._command, *arguments], env=self._environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def sql(self, statement: str) -> str:
        return self("exec", "-T", "postgres", "psql", "--username=vkjobs", "-Atqc", statement)

    def state(self, service: str) -> dict[str, Any]:
        container = self("ps", "--all", "--quiet", service)
        answer = subprocess.run(["docker", "inspect", container], capture_output=True, text=True, check=True)
        state: dict[str, Any] = json.loads(answer.stdout)[0]["State"]
        return state


def status_of(path: str, password: str | None = None) -> int:
    request = urllib.request.Request(FLOWER + path)
    if password is not None:
        credentials = base64.b64encode(f"vkjobs:{password}".encode()).decode()
        request.add_header("Authorization", f"Basic {credentials}")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code


@pytest.fixture(scope="module")
def deployment(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    if pytestconfig.option.markexpr != "docker":
        pytest.skip("run with -m docker")
    compose = Deployment(tmp_path_factory.mktemp("compose"))
    try:
        compose("up", "--detach", "--build", "--wait", "--wait-timeout", "300")
        compose.sql(VK_TASKS)
        yield compose
    finally:
        compose("down", "--volumes", "--timeout", "10")


@pytest.mark.docker
@pytest.mark.timeout(900)
class TestOnARealEngine:
    def test_the_worker_starts_once_the_table_is_migrated(self, deployment: Deployment) -> None:
        migrate, worker = deployment.state("migrate"), deployment.state("worker")

        assert (migrate["Status"], migrate["ExitCode"]) == ("exited", 0)
        finished, started = migrate["FinishedAt"], worker["StartedAt"]
        assert datetime.fromisoformat(finished) <= datetime.fromisoformat(started)

    def test_a_row_becomes_done_and_its_task_moves_on(self, deployment: Deployment) -> None:
        deployment.sql("insert into vk_tasks values ('a', 'direct', 'open', null, null, '{}')")
        deployment.sql(
            "insert into vk_jobs (kind, ref_id, run_at, status, attempts)"
            " values ('open_expire', 'a', now(), 'pending', 0)"
        )

        deadline = time.monotonic() + 60
        while deployment.sql("select status from vk_jobs where ref_id = 'a'") in ("pending", "running"):
            assert time.monotonic() < deadline

        assert deployment.sql("select status, last_error from vk_jobs where ref_id = 'a'") == "done|"
        assert deployment.sql("select status from vk_tasks where id = 'a'") == "closed"

    def test_nothing_of_ours_runs_as_root_or_writes_to_its_image(self, deployment: Deployment) -> None:
        for service in ("worker", "flower"):
            assert deployment("exec", "-T", service, "id", "--user") != "0"
            with pytest.raises(AssertionError, match="Read-only file system"):
                deployment("exec", "-T", service, "touch", "/app/file")

    def test_flower_refuses_whoever_lacks_the_password(self, deployment: Deployment) -> None:
        assert status_of("/workers") == 401
        assert status_of("/workers", "wrong") == 401
        assert status_of("/workers", deployment.passwords["FLOWER_PASSWORD"]) == 200

    def test_a_stopped_worker_ends_by_itself_and_starts_again(self, deployment: Deployment) -> None:
        deployment("stop", "worker")
        # 137 would say that the engine had to kill it.
        assert deployment.state("worker")["ExitCode"] == 0

        deployment("up", "--detach", "--wait", "--wait-timeout", "300", "worker")
        assert deployment.state("worker")["Health"]["Status"] == "healthy"
