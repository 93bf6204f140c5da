"""How a scenario is told: a decorated function of a `Site` that raises AssertionError if what it expects is not so.

That nothing is lost or doubled and no change illegal is looked at after each; a scenario says only what else must hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chaos.site import Site

ALL: list[Scenario] = []


@dataclass(frozen=True)
class Scenario:
    """A scenario, and what it needs.

    Attributes:
        name: names it on the command line and in the summary.
        function: breaks things and looks.
        missing: returns what this machine lacks for it, in a line, or "".
        migrated: whether its database is migrated beforehand.
        any_broker: whether one broker is as good as another for it; the short version then takes one.
        alone: whether it is run when no other one is, because it measures fractions of a second.
    """

    name: str
    function: Callable[[Site], None]
    missing: Callable[[], str]
    migrated: bool
    any_broker: bool
    alone: bool


def scenario(
    *, missing: Callable[[], str] = str, migrated: bool = True, any_broker: bool = False, alone: bool = False
) -> Callable[[Callable[[Site], None]], Callable[[Site], None]]:
    """Add the decorated function, under its own name, to what is run."""

    def add(function: Callable[[Site], None]) -> Callable[[Site], None]:
        ALL.append(Scenario(function.__name__, function, missing, migrated, any_broker, alone))
        return function

    return add
