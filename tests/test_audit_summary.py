"""What an audit's summary counts, by histories made by hand, and effects compared with their jobs on real Postgres."""

from __future__ import annotations

import math

import audit
import pytest
from audit import summary
from histories import DEAD, DONE, FAILED, FOREIGN, FREE, LEASED, LEGAL, NOW, OURS, at, counted, of
from legal import Change, History
from places import full
from rows import add_row
from sqlalchemy import Engine, text


def test_a_summary_counts_verbs_claims_settlings_and_places() -> None:
    told = summary(counted("lease", "claim", "renew", "settle failed", "lease", "claim", "settle done"))
    assert told.jobs == 1
    assert told.places == {"done": 1}
    assert told.verbs == {"lease": 2, "claim": 2, "renew": 1, "settle failed": 1, "settle done": 1}
    assert told.attempts == {"raised": 1}
    assert told.claims == told.settled == {7: 2}
    assert told.lateness == [10.0]
    assert not told.doubled
    assert not told.lost
    assert not told.unfinished


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("WorkerLost: its lease expired; last held by x", "reaped"),
        ("WorkerLost: its process died: signal 9", "child died"),
        ("WorkerLost: its process was killed at the time limit of 1 s", "child died"),
        ("GiveUp: x", "gave up"),
        ("ValueError: GiveUp", "raised"),
    ],
)
def test_a_summary_tells_why_attempts_failed(error: str, said: str) -> None:
    old = LEGAL["settle failed"][0]
    told = summary(of([old, old | LEGAL["settle failed"][1] | {"last_error": error}]))
    assert told.attempts == {said: 1}


def test_a_settling_without_a_claim_of_its_own_is_doubled() -> None:
    late = counted("claim", "settle done")
    again = late.rows[0] | {"attempts": 1, "status": "pending"}
    last = Change(9, at(9), None, "update", late.rows[0], again)
    told = summary(History([*late.changes, last], [again]))
    assert told.doubled == [7]
    assert told.settled == {7: 2}
    assert summary(of([LEASED, LEASED | {"status": "done"}])).doubled == [7]
    assert summary(of([DONE, DONE | {"status": "failed"}])).doubled == [7]
    assert summary(of([FAILED, FREE])).doubled == []
    assert summary(of([DONE, DONE | {"status": "failed"}], actor="original")).doubled == []


def test_jobs_that_are_gone_or_can_never_move_are_lost_and_others_unfinished() -> None:
    for row in (FREE, LEASED, OURS, DEAD, FOREIGN):
        told = summary(of([FREE, row]))
        assert (told.lost, told.unfinished) == ([], [7])
    for row in (OURS | {"lease_until": math.inf}, FREE | {"status": "odd"}):
        told = summary(of([FREE, row]))
        assert (told.lost, told.unfinished) == ([7], [])
    gone = [Change(1, NOW, "host", "insert", None, FREE), Change(2, NOW, None, "delete", FREE, None)]
    assert summary(History(gone, [])).lost == [7]
    assert summary(History([gone[0], gone[1]._replace(actor="host")], [])).lost == []
    assert summary(History([gone[0], gone[1]._replace(op="truncate", old=None)], [])).lost == [7]


def test_effects_are_compared_with_what_became_of_their_jobs(engine: Engine) -> None:
    with engine.connect() as conn:
        conn.exec_driver_sql("create table effects (job_id bigint)")
        places = ("done", "done", "done", "failed", "failed", "free", "ours")
        ids = [add_row(conn, **full(place, unique_key=None)).id for place in places]
        other = add_row(conn, **full("done", kind="other")).id
        happened = [ids[0], ids[2], ids[2], ids[3], ids[5], other + 1]
        conn.execute(text("insert into effects values (:id)"), [{"id": id} for id in happened])
        assert audit.effects(conn, "effects", ["noop"]) == [
            f"job {ids[1]}, done: its session's effect is there 0 times",
            f"job {ids[2]}, done: its session's effect is there 2 times",
            f"job {ids[3]}, failed: its session's effect is there 1 times",
            f"job {ids[5]}, pending: its session's effect is there 1 times",
            f"job {other + 1}, gone: its session's effect is there 1 times",
        ]
