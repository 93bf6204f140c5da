"""What a scenario left behind: what was lost, doubled or illegal, by the audit and by the effects of the handlers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import audit
from audit import Summary
from legal import Rules, check
from sqlalchemy import Connection

_SHOWN = 3  # of each sort of complaint

MARKING = ("mark", "lonely", "fail_once", "mark_bulk", "mark_list")
"""The kinds that leave a row in the table `effects`, through their session, and a line in the file of that name."""


@dataclass
class Result:
    """What a scenario left behind; ``problem`` is what it expected in vain, and the first of all complaints."""

    lost: int = 0
    doubled: int = 0
    illegal: int = 0
    problem: str = ""
    seen: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether all is as it must be."""
        return not (self.lost or self.doubled or self.illegal or self.problem)


def judge(conn: Connection, rules: Rules, *, fails: set[str], starts: Counter[str] | None) -> Result:
    """Hold what became of the jobs to the protocol.

    Args:
        conn: to the scenario's database.
        rules: under which its workers ran.
        fails: the kinds whose jobs must have failed; all others must be done.
        starts: how often each job's handler was called, by its own word; None if not all claims are known.
    """
    history = audit.history(conn)
    told = audit.summary(history)
    kinds = {"fail_once": Rules(**{**vars(rules), "backoff": 2})}
    illegal = check(history, rules, kinds)
    effects = audit.effects(conn, "effects", MARKING)
    elsewhere = {row["id"] for row in history.rows if row["status"] != ("failed" if row["kind"] in fails else "done")}
    complaints = [illegal, effects, [] if starts is None else _odd_starts(told, starts)]
    return Result(
        lost=len(elsewhere.union(told.lost, told.unfinished)),
        doubled=len(told.doubled) + len(effects),
        illegal=len(illegal),
        problem="; ".join(complaint for some in complaints for complaint in some[:_SHOWN]),
        seen={"jobs": told.jobs, **told.attempts},
    )


def _odd_starts(told: Summary, starts: Counter[str]) -> list[str]:
    return [
        f"job {id} was claimed {told.claims[int(id)]} times, and its handler called {called} times"
        for id, called in starts.items()
        if called > told.claims[int(id)]
    ]
