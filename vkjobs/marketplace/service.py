"""What the marketplace's kinds ask of their host, and how the host's objects are found. Knows no table."""

from __future__ import annotations

import inspect
import os
import threading
from typing import Any, Protocol

from celery.utils.imports import import_from_cwd

from vkjobs.errors import ConfigurationError
from vkjobs.handlers import Context
from vkjobs.settings import PREFIX, Settings


class TaskService(Protocol):
    """The host's rules: what a deadline does to a task.

    Every method reads the task's state anew, so that a stale or repeated job does no harm. What it returns
    makes no job fail: ``{"ok": False}`` says that there was nothing to do. What it raises does, and the job
    is tried again.
    """

    def act_as_worker(self, ctx: Context, *, task_id: str, action: dict[str, Any]) -> object:
        """Do to the task what ``action["type"]``, a kind, stands for.

        For ``review_auto_accept``, ``action["winner_agent_id"]`` is the winner of a contest, else None.
        """

    def warn(self, ctx: Context, *, task_id: str, kind: str) -> object:
        """Warn whoever must act on the task before its deadline; ``kind`` says of which."""

    def expire_transfers(self, ctx: Context, *, task_id: str) -> object:
        """End the offers to hand the task over that nobody has taken."""


class ContestJudge(Protocol):
    """Who decides a contest that its client has not reviewed in time."""

    def winner(self, ctx: Context, *, task_id: str) -> str | None:
        """Return the id of the winning agent, or None if nobody wins."""


NO_TASK_SERVICE = (
    "no task service: set vkjobs_task_service (VKJOBS_TASK_SERVICE) to module:attribute; "
    "until then the marketplace's jobs (open_expire, hold_timeout, …) fail"
)

_METHODS = {
    "task_service": ("act_as_worker", "warn", "expire_transfers"),
    "contest_judge": ("winner",),
}

_made: dict[Any, Any] = {}
_lock = threading.Lock()


def _forget_parents_objects() -> None:
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()  # another thread of the parent may have held it at the fork
    _made.clear()


os.register_at_fork(after_in_child=_forget_parents_objects)


def task_service(settings: Settings) -> TaskService:
    """Return this process's task service.

    Raises:
        ConfigurationError: none is set, or what is set is none.
    """
    service: TaskService | None = _object("task_service", settings)
    if service is None:
        raise ConfigurationError(NO_TASK_SERVICE)
    return service


def contest_judge(settings: Settings) -> ContestJudge | None:
    """Return this process's contest judge; None if none is set.

    Raises:
        ConfigurationError: what is set is no contest judge.
    """
    judge: ContestJudge | None = _object("contest_judge", settings)
    return judge


def check(settings: Settings) -> str | None:
    """Look at what the settings name, without calling it; return a line if no task service is set.

    Raises:
        ConfigurationError: what is set cannot be found or does not fit.
    """
    _find("contest_judge", settings)
    return NO_TASK_SERVICE if _find("task_service", settings) is None else None


def _object(setting: str, settings: Settings) -> Any:
    """Return the object that ``setting`` names, or that the function it names returned when first called."""
    found = _find(setting, settings)
    if not _makes_it(setting, found):
        return found
    with _lock:
        if found not in _made:
            made = found()
            _refuse_misfit(setting, settings, made, f"returned {made!r}, which")
            _made[found] = made
        return _made[found]


def _find(setting: str, settings: Settings) -> Any:
    named = getattr(settings, setting)
    if named == "":
        return None
    found = _import(setting, named) if isinstance(named, str) else named
    if _makes_it(setting, found) and not isinstance(found, type):
        _refuse_arguments(setting, settings, found)
    else:
        _refuse_misfit(setting, settings, found, "")
    return found


def _import(setting: str, named: str) -> Any:
    module_name, _, path = named.partition(":")
    try:
        # As `celery` finds apps and task modules: it has the working folder on sys.path only for that long.
        found = import_from_cwd(module_name)
    except Exception as error:
        reason = f"importing {module_name} failed with {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            reason = f"there is no module {error.name}"
        raise ConfigurationError(f"{PREFIX}{setting} is {named!r}: {' '.join(reason.split())}") from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise ConfigurationError(f"{PREFIX}{setting} is {named!r}: {module_name} has no {path}")
        found = getattr(found, name)
    return found


def _makes_it(setting: str, found: Any) -> bool:
    """Tell whether ``found`` is a class or function that returns the object, rather than the object."""
    return isinstance(found, type) or (callable(found) and bool(_missing(setting, found)))


def _missing(setting: str, found: Any) -> list[str]:
    return [name for name in _METHODS[setting] if not callable(getattr(found, name, None))]


def _refuse_misfit(setting: str, settings: Settings, found: Any, what: str) -> None:
    shown = f"{PREFIX}{setting} is {getattr(settings, setting)!r}: it {what}".rstrip()
    if missing := _missing(setting, found):
        raise ConfigurationError(f"{shown} has no method {', '.join(missing)}")
    for name in _METHODS[setting]:
        if inspect.iscoroutinefunction(getattr(found, name)):
            raise ConfigurationError(f"{shown} has an async {name}: it must be a plain def")


def _refuse_arguments(setting: str, settings: Settings, function: Any) -> None:
    shown = f"{PREFIX}{setting} is {getattr(settings, setting)!r}: it is a function"
    if inspect.iscoroutinefunction(function):
        raise ConfigurationError(f"{shown} that is async: it must be a plain def")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ConfigurationError(f"{shown} that cannot be called without arguments: {error}") from None
    except ValueError:
        return  # written in C: it does not say what it takes
