from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

import vkjobs
from vkjobs.errors import ConfigurationError
from vkjobs.settings import Settings, load

# One value of each setting: in the configuration, in the environment, and as it is read from either.
VALUES: dict[str, tuple[Any, str, Any]] = {
    "database_url": ("postgresql://u:p@h/d", "postgresql://u:p@h/d", "postgresql://u:p@h/d"),
    "broker_url": ("amqp://h//", "amqp://h//", "amqp://h//"),
    "task_service": ("pack.module:service", "pack.module:service", "pack.module:service"),
    "contest_judge": ("pack:judges.first", "pack:judges.first", "pack:judges.first"),
    "tick": (2, "2", 2.0),
    "horizon": (0, "0", 0.0),
    "batch": (20, "20", 20),
    "window": (100_000, "100000", 100_000),
    "lease": (90.5, "90.5", 90.5),
    "foreign_grace": (timedelta(minutes=20), "1200", 1200.0),
    "max_attempts": (1, "1", 1),
    "backoff": (0.25, "0.25", 0.25),
    "backoff_cap": (timedelta(days=2), "172800", 172_800.0),
    "keep_done": (timedelta(days=7), "604800", 604_800.0),
    "pool_size": (1, "1", 1),
    "error_size": (200, "200", 200),
}

SECONDS = ("soon", "", True, float("nan"), "inf", -1, 1e9, None, [1], timedelta(days=-1))
WHOLE = ("many", "", True, 1.5, "1.5", -1, 10**9, 10**400, timedelta(seconds=5))
URLS = (5, b"redis://h", ["redis://h"])
REFERENCES = ("", "module", "module:", ":attribute", "a b:c", "module:attribute:more", "a-b:c")
IMPOSSIBLE = {
    "database_url": URLS,
    "broker_url": (*URLS, "localhost", "//h", "redis://h:port/0"),
    "task_service": REFERENCES,
    "contest_judge": REFERENCES,
    "tick": (*SECONDS, 0),
    "horizon": SECONDS,
    "batch": (*WHOLE, 0),
    "window": (*WHOLE, 0),
    "lease": (*SECONDS, 0.5),
    "foreign_grace": SECONDS,
    "max_attempts": (*WHOLE, 0),
    "backoff": SECONDS,
    "backoff_cap": SECONDS,
    "keep_done": (*SECONDS, 59),
    "pool_size": (*WHOLE, 0),
    "error_size": (*WHOLE, 199),
}
FITS = {
    "database_url": "a URL such as postgresql://user@host/database",
    "broker_url": "a URL such as redis://host:6379/0 or amqp://host//",
    "task_service": "module:attribute",
    "batch": "a whole number from 1 to 10000",
    "tick": "a number of seconds from 0.05 to 3600",
}


def conf(**keys: Any) -> Any:
    app = Celery(set_as_current=False)
    app.conf.update(keys)
    return app.conf


def django(**keys: Any) -> Celery:
    app = Celery(set_as_current=False)
    app.config_from_object(SimpleNamespace(DEBUG=True, **keys), namespace="CELERY")
    return app


def refusal(read: Callable[[], object]) -> str:
    with pytest.raises(ConfigurationError) as refused:
        read()
    line = str(refused.value)
    assert "\n" not in line
    return line


def expecting(name: str, value: Any) -> Settings:
    """Return the defaults but for one setting, and for what follows from it."""
    return Settings(**{"horizon": 2 * value if name == "tick" else Settings.horizon, name: value})


def test_these_tests_know_every_setting() -> None:
    assert list(VALUES) == list(IMPOSSIBLE) == [knob.name for knob in fields(Settings)]


def test_without_any_settings_the_defaults_hold() -> None:
    assert load(conf()) == Settings()
    assert (Settings().horizon, Settings().lease, Settings().max_attempts) == (2.0, 60.0, 5)


@pytest.mark.parametrize("name", VALUES)
def test_each_setting_is_read_from_the_configuration(name: str) -> None:
    given, _, expected = VALUES[name]
    assert load(conf(**{f"vkjobs_{name}": given})) == expecting(name, expected)


@pytest.mark.parametrize("name", VALUES)
def test_each_setting_is_read_from_the_environment_which_wins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, given, expected = VALUES[name]
    default = getattr(Settings(), name)
    monkeypatch.setenv(f"VKJOBS_{name.upper()}", given)
    assert load(conf()) == expecting(name, expected) != Settings()
    assert load(conf(**{f"vkjobs_{name}": default or None})) == expecting(name, expected)


@pytest.mark.parametrize("name", VALUES)
def test_each_setting_is_read_from_a_namespace_as_django_has_it(name: str) -> None:
    given, _, expected = VALUES[name]
    app = vkjobs.setup(django(**{f"CELERY_VKJOBS_{name.upper()}": given}))
    assert load(app.conf, app.namespace) == expecting(name, expected)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in IMPOSSIBLE.items() for value in values if value is not None]
)
def test_an_impossible_value_is_refused_in_a_line_that_says_what_fits(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = refusal(lambda: load(conf(**{f"vkjobs_{name}": value})))
    assert line.startswith(f"vkjobs_{name} is {value!r}: it must be ")
    assert FITS.get(name, "") in line
    app = django(**{f"CELERY_VKJOBS_{name.upper()}": value})
    line = refusal(lambda: load(app.conf, app.namespace))
    assert line.startswith(f"CELERY_VKJOBS_{name.upper()} is {value!r}: it must be ")
    if isinstance(value, str) and value:
        monkeypatch.setenv(f"VKJOBS_{name.upper()}", value)
        assert refusal(lambda: load(conf())).startswith(f"VKJOBS_{name.upper()} is {value!r}: it must be ")


@pytest.mark.parametrize("name", VALUES)
def test_none_and_an_empty_environment_variable_mean_unset(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, _, expected = VALUES[name]
    monkeypatch.setenv(f"VKJOBS_{name.upper()}", "")
    assert load(conf(**{f"vkjobs_{name}": None})) == Settings()
    assert load(conf(**{f"vkjobs_{name}": given})) == expecting(name, expected)


def test_a_service_and_a_judge_may_be_objects() -> None:
    service, judge = object(), object()
    chosen = load(conf(vkjobs_task_service=service, vkjobs_contest_judge=judge))
    assert (chosen.task_service, chosen.contest_judge) == (service, judge)


def test_a_typo_in_the_configuration_is_refused_with_a_suggestion() -> None:
    assert refusal(lambda: load(conf(vkjobs_laese=60))) == "vkjobs_laese is unknown: did you mean vkjobs_lease?"
    assert refusal(lambda: load(conf(vkjob_lease=60))) == "vkjob_lease is unknown: did you mean vkjobs_lease?"
    assert refusal(lambda: load(conf(vkjobs_xyz=1))) == "vkjobs_xyz is unknown: there is no such setting"


def test_a_typo_in_a_namespace_is_refused_with_a_suggestion() -> None:
    for key in ("CELERY_VKJOBS_LAESE", "CELERY_VKJOB_LEASE"):
        app = django(**{key: 60})
        line = refusal(partial(load, app.conf, app.namespace))
        assert line == f"{key} is unknown: did you mean CELERY_VKJOBS_LEASE?"


def test_a_typo_in_the_environment_is_refused_with_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKJOBS_MAX_ATEMPTS", "3")
    line = refusal(lambda: load(conf()))
    assert line == "VKJOBS_MAX_ATEMPTS is unknown: did you mean VKJOBS_MAX_ATTEMPTS?"


@pytest.mark.parametrize(("smaller", "larger"), [("batch", "window"), ("backoff", "backoff_cap"), ("horizon", "lease")])
def test_settings_that_contradict_each_other_are_refused(smaller: str, larger: str) -> None:
    keys: dict[str, Any] = {f"vkjobs_{smaller}": 31, f"vkjobs_{larger}": 30}
    pattern = rf"vkjobs_{smaller} is 31(\.0)?: it must not exceed vkjobs_{larger}, which is 30(\.0)?"
    assert re.fullmatch(pattern, refusal(lambda: load(conf(**keys))))
    keys[f"vkjobs_{larger}"] = 31
    assert getattr(load(conf(**keys)), smaller) == 31


def test_the_horizon_is_two_ticks_unless_set() -> None:
    assert load(conf(vkjobs_tick=5)).horizon == 10
    assert load(conf(vkjobs_tick=5, vkjobs_horizon=1)).horizon == 1


def test_kubernetes_service_links_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for service in ("VKJOBS", "VKJOBS_REDIS", "VKJOBS_TASK_SERVICE"):
        for link, value in {
            "SERVICE_HOST": "10.0.0.1",
            "SERVICE_PORT": "6379",
            "SERVICE_PORT_REDIS_TLS": "6379",
            "PORT": "tcp://10.0.0.1:6379",
            "PORT_6379_TCP": "tcp://10.0.0.1:6379",
            "PORT_6379_TCP_ADDR": "10.0.0.1",
            "PORT_6379_TCP_PORT": "6379",
            "PORT_6379_TCP_PROTO": "tcp",
            "PORT_53_UDP_ADDR": "10.0.0.1",
        }.items():
            monkeypatch.setenv(f"{service}_{link}", value)
    assert load(conf()) == Settings()


def test_settings_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MYVKJOBS_LEASE", "x")
    app = django(VKJOBS_LEASE=7, OTHER_VKJOBS_LEASE=8, CELERY_TASK_DEFAULT_QUEUE="mine")
    assert load(app.conf, app.namespace) == Settings(lease=7)
    assert load(conf(my_vkjobs_lease="x", vkjobsite="x")) == Settings()


@pytest.mark.parametrize("name", ["broker_url", "database_url", "tick", "batch"])
@pytest.mark.parametrize(
    "value",
    [
        ["redis://me:secret@h/0", "redis://:secret@h/0"],
        b"postgresql://me:secret@h/d",
        ("postgresql://me:secret@h/d",),
        {"url": "redis://me:s/@:secret@h"},
    ],
)
def test_a_password_in_a_refused_value_is_not_shown(name: str, value: object) -> None:
    line = refusal(lambda: load(conf(**{f"vkjobs_{name}": value})))
    assert "secret" not in line
    assert "***@h" in line


def test_a_password_in_a_refused_variable_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKJOBS_BROKER_URL", "me:secret@host:6379/0")
    assert refusal(lambda: load(conf())).startswith("VKJOBS_BROKER_URL is '***@host:6379/0': it must be ")
    monkeypatch.delenv("VKJOBS_BROKER_URL")
    monkeypatch.setenv("VKJOBS_DATABSE_URL", "postgresql://me:secret@host/d")
    assert refusal(lambda: load(conf())) == "VKJOBS_DATABSE_URL is unknown: did you mean VKJOBS_DATABASE_URL?"


def test_defaults_of_the_app_do_not_hide_a_key_of_the_namespace() -> None:
    class Configuration:
        CELERY_VKJOBS_LEASE = 7

    app = Celery("host")
    app.config_from_object(Configuration, namespace="CELERY")
    app.add_defaults({"vkjobs_lease": 3, "vkjobs_batch": 20})
    chosen = load(app.conf, app.namespace)
    assert (chosen.lease, chosen.batch) == (7, 20)
