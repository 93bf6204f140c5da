from __future__ import annotations

import importlib
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

import vkjobs
from vkjobs.errors import ConfigurationError
from vkjobs.handlers import Context, GiveUp, Job, Policy, Registry, Snooze, registry
from vkjobs.settings import Settings


def work(job: Job, ctx: Context) -> None:
    pass


def refusal(registry: Registry, kind: Any, function: Any = work, **policy: Any) -> str:
    before = list(registry)
    with pytest.raises(ConfigurationError) as refused:
        registry.register(kind, function, Policy(**policy))
    assert list(registry) == before
    line = str(refused.value)
    assert "\n" not in line
    assert line.startswith(f"kind {kind!r}: ")
    return line.removeprefix(f"kind {kind!r}: ")


@pytest.mark.parametrize("kind", ["a", "k" * 200, "open_expire", "team.kind-2", "приём", "🎉", "'\"%s{}", "run_due2"])
def test_a_kind_is_any_name_without_white_space(kind: str) -> None:
    own = Registry()
    handler = own.register(kind, work, Policy())
    assert own.get(kind) is handler
    assert (handler.kind, handler.function) == (kind, work)
    assert list(own) == [handler]


@pytest.mark.parametrize(
    "kind", ["", "k" * 201, "a b", " a", "a\n", "a\tb", "a\u00a0b", "a\0b", "a\x7f", None, 5, b"kind", work]
)
def test_what_is_no_name_is_refused_as_kind(kind: object) -> None:
    assert refusal(Registry(), kind) == "a kind is a name of 1 to 200 characters without white space"


@pytest.mark.parametrize("kind", ["run_due", "enqueue", "unhandled"])
def test_the_names_of_vkjobs_own_tasks_are_refused_as_kinds(kind: str) -> None:
    assert refusal(Registry(), kind) == f"the name is taken by the Celery task vkjobs.{kind}; choose another"


def test_a_kind_has_one_handler() -> None:
    own = Registry()
    first = own.register("kind", work, Policy())
    for again in (work, lambda job, ctx: None):
        assert refusal(own, "kind", again) == f"has a handler already, {__name__}.work"
    assert own.get("kind") is first


def test_a_handler_is_callable() -> None:
    assert refusal(Registry(), "kind", "module.work") == "'module.work' is no function (job, ctx)"


def test_a_class_instance_may_be_the_handler_and_is_named_in_a_refusal() -> None:
    class Work:
        def __call__(self, job: Job, ctx: Context) -> None:
            pass

    own = Registry()
    own.register("kind", Work(), Policy())
    assert "has a handler already, " in refusal(own, "kind")


SECONDS = ("max_attempts", "backoff", "lease", "time_limit", "soft_time_limit")


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("value", ["5", True, -1, float("nan"), float("inf"), 1e9, timedelta(seconds=5), [5]])
def test_a_number_of_the_policy_that_cannot_work_is_refused(name: str, value: object) -> None:
    what = "a whole number of attempts" if name == "max_attempts" else "a number of seconds"
    assert refusal(Registry(), "kind", **{name: value}).startswith(f"{name} is {value!r}: it must be {what}, ")


@pytest.mark.parametrize(
    ("name", "refused", "lowest"),
    [
        ("max_attempts", 0, 1),
        ("max_attempts", 1.5, 1),
        ("lease", 0.5, 1),
        ("time_limit", 0, 0.001),
        ("soft_time_limit", 0, 0.001),
        ("backoff", -0.1, 0),
    ],
)
def test_the_lowest_number_of_the_policy_is_told_and_works(name: str, refused: object, lowest: object) -> None:
    assert refusal(Registry(), "kind", **{name: refused}).endswith(f", {lowest} or more")
    policy: dict[str, Any] = {name: lowest}
    assert Registry().register("kind", work, Policy(**policy)).policy == Policy(**policy)


def test_the_soft_time_limit_comes_before_the_hard_one() -> None:
    for soft in (10, 11):
        line = refusal(Registry(), "kind", soft_time_limit=soft, time_limit=10)
        assert line == f"soft_time_limit is {soft}: it must be shorter than time_limit, which is 10"
    Registry().register("kind", work, Policy(soft_time_limit=9.9, time_limit=10))


@pytest.mark.parametrize("bulk", ["5", True, 0, -1, 1.5, [5], float("inf")])
def test_a_bulk_that_is_no_number_of_jobs_is_refused(bulk: object) -> None:
    line = refusal(Registry(), "kind", bulk=bulk)
    assert line == f"bulk is {bulk!r}: it must be a whole number of jobs, 1 or more"


def test_a_message_carries_a_thousand_jobs_at_most() -> None:
    assert refusal(Registry(), "kind", bulk=1001) == "bulk is 1001: it must be at most 1000"
    for bulk in (1, 1000):
        assert Registry().register("kind", work, Policy(bulk=bulk)).policy.bulk == bulk


@pytest.mark.parametrize(
    "limit", [{"time_limit": 60}, {"soft_time_limit": 60}, {"time_limit": 60, "soft_time_limit": 9}]
)
def test_a_kind_with_bulk_has_no_time_limits(limit: dict[str, Any]) -> None:
    line = refusal(Registry(), "kind", bulk=10, **limit)
    assert line == "time limits end a whole message: a kind with bulk can have none"


def test_a_list_needs_bulk() -> None:
    assert refusal(Registry(), "kind", as_list=True) == "as_list needs bulk, such as bulk=100"
    assert Registry().register("kind", work, Policy(bulk=10, as_list=True)).policy.as_list


@pytest.mark.parametrize("queue", ["", "a b", "a\n", "a,b", "q" * 201, 5, ["a"]])
def test_a_queue_that_celery_could_not_read_is_refused(queue: object) -> None:
    assert refusal(Registry(), "kind", queue=queue).startswith(f"queue is {queue!r}: it must be a name of letters, ")


@pytest.mark.parametrize("queue", ["slow", "team.slow-1:eu@west", "q" * 200])
def test_a_kind_may_have_a_queue_of_its_own(queue: str) -> None:
    assert Registry().register("kind", work, Policy(queue=queue)).policy.queue == queue


def test_a_kind_has_the_lease_of_its_policy_before_that_of_the_settings() -> None:
    own = Registry()
    assert own.register("a", work, Policy()).lease(Settings(lease=70.0)) == 70.0
    assert own.register("b", work, Policy(lease=600)).lease(Settings(lease=70.0)) == 600


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(registry, "_handlers", {})
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, source: str) -> str:
        (tmp_path / f"{name}.py").write_text(f"import vkjobs\n{source}")
        importlib.invalidate_caches()
        return name

    return write


def test_the_decorator_gives_the_function_back_and_takes_several_kinds(write_module: Any) -> None:
    name = write_module(
        "handlers_of_two_kinds",
        "@vkjobs.handler('one', backoff=2)\n@vkjobs.handler('two', queue='slow')\n"
        "def work(job, ctx): return 'worked'\n",
    )
    module = importlib.import_module(name)
    assert module.work(None, None) == "worked"
    assert [(each.kind, each.function, each.policy) for each in registry] == [
        ("two", module.work, Policy(queue="slow")),
        ("one", module.work, Policy(backoff=2)),
    ]


@pytest.mark.parametrize(
    ("decorator", "line"),
    [
        ("@vkjobs.handler('taken')", "kind 'taken': has a handler already, handlers_refused.first"),
        ("@vkjobs.handler('run_due')", "kind 'run_due': the name is taken by the Celery task vkjobs.run_due; "),
        ("@vkjobs.handler('a', max_attempts=0)", "kind 'a': max_attempts is 0: it must be a whole number of attempts"),
        ("@vkjobs.handler", "kind <function second at 0x"),
    ],
)
def test_a_wrong_handler_is_an_error_where_it_is_imported(write_module: Any, decorator: str, line: str) -> None:
    first = "@vkjobs.handler('taken')\ndef first(job, ctx): pass\n"
    name = write_module("handlers_refused", f"{first}{decorator}\ndef second(job, ctx): pass\n")
    with pytest.raises(ConfigurationError) as refused:
        importlib.import_module(name)
    assert str(refused.value).startswith(line)
    assert [each.kind for each in registry] == ["taken"]


def test_requirements_warn_or_refuse_when_asked() -> None:
    own = Registry()
    assert own.warnings(Settings()) == []
    own.require(lambda settings: None)
    own.require(lambda settings: f"a lease of {settings.lease:g} s is short" if settings.lease < 60 else None)
    assert own.warnings(Settings()) == []
    assert own.warnings(Settings(lease=5.0)) == ["a lease of 5 s is short"]

    def refuse(settings: Settings) -> str | None:
        raise ConfigurationError("no")

    own.require(refuse)
    with pytest.raises(ConfigurationError, match="no"):
        own.warnings(Settings())


def test_a_snooze_names_a_time_with_zone_or_a_positive_delay() -> None:
    moment = datetime(2030, 1, 31, 12, tzinfo=timezone(timedelta(hours=1)))
    assert (Snooze(moment).until, str(Snooze(moment))) == (moment, "until 2030-01-31T12:00:00+01:00")
    assert str(Snooze(timedelta(minutes=1.5))) == "for 90 s"
    with pytest.raises(ValueError, match="the time has no zone"):
        Snooze(datetime(2030, 1, 31, 12))  # noqa: DTZ001
    for delay in (timedelta(0), timedelta(seconds=-1)):
        with pytest.raises(ValueError, match="the delay must be positive"):
            Snooze(delay)


def test_outcomes_of_a_handler_are_no_errors_of_vkjobs() -> None:
    for outcome in (Snooze(datetime.now(UTC)), GiveUp("why")):
        assert not isinstance(outcome, vkjobs.VkjobsError)
    assert str(GiveUp("why")) == "why"


def test_a_snooze_at_the_end_of_time_can_be_told() -> None:
    last = datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-12)))
    assert str(vkjobs.Snooze(last)) == "until 9999-12-31T23:00:00-12:00"
