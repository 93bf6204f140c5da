"""Every knob of vkjobs: name, default, unit, check.

Read from a Celery app's configuration and from the environment, checked together, once, at start. Knows nothing
of what the values are used for.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from vkjobs.errors import ConfigurationError

PREFIX = "vkjobs_"

# Kubernetes gives every pod such variables for each Service of the namespace, "vkjobs" and "vkjobs-redis" included.
_SERVICE_LINK = re.compile(
    r"VKJOBS_(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)?)"
)
_CREDENTIALS = re.compile(r"[^\s'\"]*:[^\s'\"]*@")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _url(value: Any) -> str:
    for one in _text(value).split(";") if value else ():
        if not re.match(r"[a-z][a-z0-9+]*://", one) or urlsplit(one).port == 0:  # asking for the port checks it
            raise ValueError
    return _text(value)


def _reference(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", value):
        raise ValueError
    return value


def _number(low: float, high: float) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        number = value.total_seconds() if isinstance(value, timedelta) else float(value)
        if isinstance(value, bool) or not math.isfinite(number) or not low <= number <= high:
            raise ValueError
        return number

    return read


def _integer(low: int, high: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        number = int(value)
        if isinstance(value, bool) or number != float(value) or not low <= number <= high:
            raise ValueError
        return number

    return read


def _knob(default: Any, unit: str, meaning: str, fits: str, read: Callable[[Any], Any]) -> Any:
    return field(default=default, metadata={"unit": unit, "meaning": meaning, "fits": fits, "read": read})


def _seconds(default: float | None, meaning: str, low: float, high: float) -> Any:
    return _knob(default, "s", meaning, f"a number of seconds from {low:g} to {high:g}", _number(low, high))


def _count(default: int, unit: str, meaning: str, low: int, high: int) -> Any:
    return _knob(default, unit, meaning, f"a whole number from {low} to {high}", _integer(low, high))


@dataclass(frozen=True)
class Settings:
    """All settings, checked. A field ``x`` is ``vkjobs_x`` in Celery's configuration and ``VKJOBS_X`` outside."""

    database_url: str = _knob(
        "",
        "URL",
        "Postgres with the table `vk_jobs`, as an SQLAlchemy or libpq URL; a worker needs it",
        "a URL such as postgresql://user@host/database",
        _text,
    )
    broker_url: str = _knob(
        "",
        "URL",
        "broker of the app `vkjobs` itself, before its `broker_url`; a host app keeps its own",
        "a URL such as redis://host:6379/0 or amqp://host//",
        _url,
    )
    task_service: Any = _knob(
        "",
        "module:attribute",
        "the marketplace's `TaskService`, or a function without arguments that returns it",
        "module:attribute",
        _reference,
    )
    contest_judge: Any = _knob(
        "",
        "module:attribute",
        "the marketplace's `ContestJudge`, or a function without arguments that returns it; none: contests "
        "in review fail",
        "module:attribute",
        _reference,
    )
    tick: float = _seconds(1.0, "beat fires `run_due` this often", 0.05, 3600)
    horizon: float = _seconds(2.0, "`run_due` leases what is due within this time too; default: two ticks", 0, 7200)
    batch: int = _count(100, "rows", "most rows that one lease takes", 1, 10_000)
    window: int = _count(200, "messages", "most leased jobs that wait in one queue at once", 1, 100_000)
    lease: float = _seconds(
        60.0, "a leased or running job whose worker is silent this long is taken from it", 1, 86_400
    )
    foreign_grace: float = _seconds(
        0.0,
        "how long past its lease a running job of another dispatcher is left alone; 1200 while the original "
        "runs beside vkjobs",
        0,
        86_400,
    )
    max_attempts: int = _count(5, "attempts", "failed attempts after which a job ends as failed", 1, 1_000_000)
    backoff: float = _seconds(30.0, "delay after the first failed attempt; each further one doubles it", 0, 31_536_000)
    backoff_cap: float = _seconds(86_400.0, "longest delay after a failed attempt", 0, 31_536_000)
    # Not shorter: a settling whose answer was lost is looked for in its row.
    keep_done: float | None = _seconds(
        None, "a job that has been done this long is deleted; default: none is", 60, 315_360_000
    )
    pool_size: int = _count(
        5,
        "connections",
        "most Postgres connections of one process (prefork: of each child), beside one that renews leases",
        1,
        1000,
    )
    error_size: int = _count(
        10_000, "characters", "longest `last_error`; of a longer one head and tail are kept", 200, 1_000_000
    )

    def __post_init__(self) -> None:
        """Check what must agree.

        Raises:
            ConfigurationError: naming both settings.
        """
        for smaller, larger in (("batch", "window"), ("backoff", "backoff_cap"), ("horizon", "lease")):
            if getattr(self, smaller) > getattr(self, larger):
                raise ConfigurationError(
                    f"{PREFIX}{smaller} is {getattr(self, smaller)!r}: it must not exceed {PREFIX}{larger}, "
                    f"which is {getattr(self, larger)!r}"
                )


def load(conf: Mapping[str, Any], namespace: str | None = None) -> Settings:
    """Read the settings from a Celery app's ``conf`` and from the environment, which wins.

    Args:
        conf: the configuration of a Celery app.
        namespace: the app's ``namespace``, as Django projects use it (``CELERY_VKJOBS_LEASE``).

    Raises:
        ConfigurationError: a key is unknown or its value impossible; one line names it and what fits.
    """
    known = {PREFIX + knob.name: knob for knob in fields(Settings)}
    values: dict[str, Any] = {}
    for shown, name, value in [*_from_conf(conf, namespace), *_from_environment()]:
        knob = known.get(name)
        if knob is None:
            raise ConfigurationError(f"{shown} is unknown: {_suggestion(shown, name, known)}")
        try:
            values[knob.name] = knob.metadata["read"](value)
        except (TypeError, ValueError, OverflowError):
            found = _CREDENTIALS.sub("***@", repr(value))
            raise ConfigurationError(f"{shown} is {found}: it must be {knob.metadata['fits']}") from None
    values.setdefault("horizon", 2 * values.get("tick", Settings.tick))
    return Settings(**values)


def _suggestion(shown: str, name: str, known: Iterable[str]) -> str:
    words = [key.removeprefix(PREFIX) for key in known]
    close = difflib.get_close_matches(name.partition("_")[2], words, n=1)
    if not close:
        return "there is no such setting"
    right = shown[: len(shown) - len(name)] + PREFIX + close[0]
    return f"did you mean {right.upper() if shown.isupper() else right}?"


def _from_conf(conf: Mapping[str, Any], namespace: str | None) -> Iterator[tuple[str, str, Any]]:
    lead = f"{namespace.rstrip('_').lower()}_" if namespace else ""
    # Those of the namespace come last and win: what was given to app.add_defaults must not hide them.
    for key in sorted(conf, key=lambda key: str(key).lower().startswith(lead) if lead else False):
        name = str(key).lower().removeprefix(lead)
        # The second form catches "vkjob_lease"; a host's own settings never begin so.
        if re.match(r"vkjobs?_", name) and (value := conf[key]) is not None:
            yield str(key), name, value


def _from_environment() -> Iterator[tuple[str, str, str]]:
    for key, value in os.environ.items():
        if key.startswith(PREFIX.upper()) and value and not _SERVICE_LINK.fullmatch(key):
            yield key, key.lower(), value
