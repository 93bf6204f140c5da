from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from vkjobs.errors import ConfigurationError
from vkjobs.handlers import Context, Job, MissingRefId, registry
from vkjobs.local import Postgres
from vkjobs.marketplace import service
from vkjobs.marketplace.kinds import MissingJudge, MissingTask
from vkjobs.settings import Settings

ACTIONS = ["open_expire", "hold_timeout", "checkpoint_miss", "contest_close"]
WARNINGS = ["checkpoint_warn", "review_warn"]
KINDS = [*ACTIONS, *WARNINGS, "transfer_expire", "review_auto_accept"]


@dataclass
class Recorder:
    """A task service that writes down its calls."""

    answer: object = None
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def act_as_worker(self, ctx: Context, **arguments: Any) -> object:
        return self._note("act_as_worker", arguments)

    def warn(self, ctx: Context, **arguments: Any) -> object:
        return self._note("warn", arguments)

    def expire_transfers(self, ctx: Context, **arguments: Any) -> object:
        return self._note("expire_transfers", arguments)

    def _note(self, method: str, arguments: dict[str, Any]) -> object:
        self.calls.append((method, arguments))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Judge:
    """A contest judge who favours one agent."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def winner(self, ctx: Context, *, task_id: str) -> str | None:
        self.asked.append(task_id)
        return "agent-7"


@dataclass
class Ctx:
    session: Session
    settings: Settings
    lease_lost: bool = False


@pytest.fixture(scope="module")
def engine(postgres: Postgres) -> Iterator[Engine]:
    engine = create_engine(postgres.create_database("marketplace"))
    yield engine
    engine.dispose()


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    """A session that sees a host's vk_tasks: more columns than vkjobs reads, and ids that are numbers."""
    with Session(engine) as session:
        session.execute(text("create table vk_tasks (title text, id bigint, template text, status text)"))
        yield session


def handle(kind: str, session: Session, ref_id: str | None = "1", **settings: Any) -> None:
    handler = registry.get(kind)
    assert handler is not None
    job = Job(id=5, kind=kind, ref_id=ref_id, run_at=datetime.now(UTC), attempts=0, payload=None)
    handler.function(job, Ctx(session, Settings(**settings)))


def add_task(session: Session, template: str, status: str) -> None:
    values = {"template": template, "status": status}
    session.execute(text("insert into vk_tasks values ('a title', 1, :template, :status)"), values)


@pytest.mark.parametrize("kind", ACTIONS)
def test_a_passed_deadline_acts_on_its_task(kind: str, session: Session) -> None:
    recorder = Recorder()
    handle(kind, session, task_service=recorder)
    assert recorder.calls == [("act_as_worker", {"task_id": "1", "action": {"type": kind}})]


@pytest.mark.parametrize("kind", WARNINGS)
def test_a_warning_says_of_which_kind_it_is(kind: str, session: Session) -> None:
    recorder = Recorder()
    handle(kind, session, task_service=recorder)
    assert recorder.calls == [("warn", {"task_id": "1", "kind": kind})]


def test_expired_transfers_are_ended(session: Session) -> None:
    recorder = Recorder()
    handle("transfer_expire", session, task_service=recorder)
    assert recorder.calls == [("expire_transfers", {"task_id": "1"})]


@pytest.mark.parametrize(
    ("template", "status"),
    [("direct", "reviewing"), ("hourly", "done"), ("contest", "open"), ("contest", "done")],
)
def test_a_review_is_accepted_without_a_judge_unless_it_is_of_a_contest(
    template: str, status: str, session: Session
) -> None:
    recorder, judge = Recorder(), Judge()
    add_task(session, template, status)
    handle("review_auto_accept", session, task_service=recorder, contest_judge=judge)
    action = {"type": "review_auto_accept", "winner_agent_id": None}
    assert recorder.calls == [("act_as_worker", {"task_id": "1", "action": action})]
    assert judge.asked == []


def test_the_judge_decides_a_contest_in_review(session: Session) -> None:
    recorder, judge = Recorder(), Judge()
    add_task(session, "contest", "reviewing")
    handle("review_auto_accept", session, task_service=recorder, contest_judge=judge)
    action = {"type": "review_auto_accept", "winner_agent_id": "agent-7"}
    assert recorder.calls == [("act_as_worker", {"task_id": "1", "action": action})]
    assert judge.asked == ["1"]


def test_a_contest_in_review_fails_while_nobody_judges(session: Session) -> None:
    recorder = Recorder()
    add_task(session, "contest", "reviewing")
    with pytest.raises(MissingJudge) as raised:
        handle("review_auto_accept", session, task_service=recorder)
    expected = "review_auto_accept for a contest needs the LLM judge, which is not assembled yet, id: 1"
    assert str(raised.value) == expected
    assert recorder.calls == []


def test_a_review_of_a_missing_task_fails(session: Session) -> None:
    recorder = Recorder()
    with pytest.raises(MissingTask) as raised:
        handle("review_auto_accept", session, task_service=recorder)
    assert str(raised.value) == "vk_tasks row missing for review_auto_accept, id: 1"
    assert recorder.calls == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_without_ref_id_fails_before_anything_else_is_looked_at(kind: str, session: Session) -> None:
    with pytest.raises(MissingRefId) as raised:
        handle(kind, session, ref_id=None)
    assert str(raised.value) == f"vk_jobs.ref_id missing for {kind}, id: 5"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("answer", [{"ok": False}, {"ok": True}, None, False])
def test_no_answer_of_the_service_makes_a_job_fail(kind: str, answer: object, session: Session) -> None:
    add_task(session, "direct", "reviewing")
    recorder = Recorder(answer)
    handle(kind, session, task_service=recorder)
    assert len(recorder.calls) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_service_raises_makes_a_job_fail(kind: str, session: Session) -> None:
    add_task(session, "direct", "reviewing")
    with pytest.raises(LookupError, match="boom"):
        handle(kind, session, task_service=Recorder(LookupError("boom")))


@pytest.mark.parametrize("kind", KINDS)
def test_jobs_fail_with_a_line_that_says_what_to_set_while_there_is_no_service(kind: str, session: Session) -> None:
    add_task(session, "direct", "reviewing")
    with pytest.raises(ConfigurationError) as raised:
        handle(kind, session)
    assert str(raised.value) == service.check(Settings())
    assert "VKJOBS_TASK_SERVICE" in str(raised.value)
    assert "module:attribute" in str(raised.value)


def test_a_start_warns_of_a_missing_service_but_not_of_a_missing_judge() -> None:
    assert registry.warnings(Settings()) == [service.NO_TASK_SERVICE]
    assert registry.warnings(Settings(task_service=Recorder())) == []


MODULE = """
calls = 0

class Service:
    def __init__(self):
        global calls
        calls += 1
    def act_as_worker(self, ctx, *, task_id, action): pass
    def warn(self, ctx, *, task_id, kind): pass
    def expire_transfers(self, ctx, *, task_id): pass

def make():
    return Service()

class Half:
    def warn(self, ctx, *, task_id, kind): pass

class Async(Service):
    async def warn(self, ctx, *, task_id, kind): pass

async def make_later(): pass
def make_half(): return Half()
def make_from(url, *, retries): pass
def make_badly(): raise OSError("no network")
half, number = Half(), 7
nested = type("Nested", (), {"make": staticmethod(make)})
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the name of a host's module, which lies in the working folder and on no path."""
    name = f"host_{abs(hash(request.node.nodeid))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield name
    sys.modules.pop(name, None)


@pytest.mark.parametrize("attribute", ["make", "Service", "nested.make"])
def test_a_function_or_class_is_called_for_the_first_job_and_not_before(host: str, attribute: str) -> None:
    settings = Settings(task_service=f"{host}:{attribute}")
    assert service.check(settings) is None
    module = sys.modules[host]
    assert module.calls == 0
    first = service.task_service(settings)
    assert isinstance(first, module.Service)
    assert service.task_service(settings) is first
    assert module.calls == 1


def test_threads_that_need_the_service_at_once_get_the_same_one() -> None:
    together = threading.Barrier(4)
    made = []

    def make() -> Recorder:
        made.append(Recorder())
        return made[-1]

    def get(_: int) -> service.TaskService:
        together.wait()
        return service.task_service(Settings(task_service=make))

    with ThreadPoolExecutor(4) as threads:
        got = set(map(id, threads.map(get, range(4))))
    assert got == {id(made[0])}
    assert len(made) == 1


def test_a_factory_that_raises_is_called_again_for_the_next_job() -> None:
    answers = iter([OSError("no network"), Recorder()])

    def make() -> object:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(OSError, match="no network"):
        service.task_service(Settings(task_service=make))
    assert isinstance(service.task_service(Settings(task_service=make)), Recorder)


FORK = """
import os
from vkjobs.local import Postgres
from vkjobs.marketplace import service
from vkjobs.settings import Settings

class Service:
    def __init__(self): self.made_in = os.getpid()
    def act_as_worker(self): pass
    warn = expire_transfers = act_as_worker

settings = Settings(task_service=Service)
assert service.task_service(settings).made_in == os.getpid()
if child := os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert service.task_service(settings).made_in == os.getpid()
"""


def test_a_forked_process_gets_a_service_of_its_own() -> None:
    result = subprocess.run([sys.executable, "-c", FORK], check=False, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("named", "complaint"),
    [
        ("no_such_host:service", "there is no module no_such_host"),
        ("no_such_host.parts:service", "there is no module no_such_host"),
        ("{host}.parts:service", "there is no module {host}.parts"),
        ("{host}:sevrice", "{host} has no sevrice"),
        ("{host}:nested.sevrice", "{host} has no nested.sevrice"),
        ("{host}:number", "it has no method act_as_worker, warn, expire_transfers"),
        ("{host}:half", "it has no method act_as_worker, expire_transfers"),
        ("{host}:Half", "it has no method act_as_worker, expire_transfers"),
        ("{host}:Async", "it has an async warn: it must be a plain def"),
        ("{host}:make_later", "it is a function that is async: it must be a plain def"),
        ("{host}:make_from", "it is a function that cannot be called without arguments"),
    ],
)
def test_what_cannot_be_a_service_is_refused_at_start_in_one_line(host: str, named: str, complaint: str) -> None:
    named = named.format(host=host)
    with pytest.raises(ConfigurationError) as raised:
        service.check(Settings(task_service=named))
    assert str(raised.value).startswith(f"vkjobs_task_service is {named!r}: {complaint.format(host=host)}")
    assert "\n" not in str(raised.value)


def test_a_judge_that_judges_nothing_is_refused_at_start(host: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        service.check(Settings(contest_judge=f"{host}:half"))
    assert str(raised.value) == f"vkjobs_contest_judge is '{host}:half': it has no method winner"


def test_a_module_that_breaks_at_import_is_refused_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_host.py").write_text("import no_such_library")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError) as raised:
        service.check(Settings(task_service="broken_host:service"))
    expected = "importing broken_host failed with ModuleNotFoundError: No module named 'no_such_library'"
    assert str(raised.value) == f"vkjobs_task_service is 'broken_host:service': {expected}"


def test_a_factory_that_returns_no_service_fails_the_job_with_one_line(host: str) -> None:
    settings = Settings(task_service=f"{host}:make_half")
    assert service.check(settings) is None
    with pytest.raises(ConfigurationError, match=r"it returned .*, which has no method act_as_worker, expire_t"):
        service.task_service(settings)


def test_anything_with_the_methods_may_be_the_service() -> None:
    module = SimpleNamespace(act_as_worker=print, warn=print, expire_transfers=print)
    assert service.task_service(Settings(task_service=module)) is module
