"""The ledger's statements as single steps of processes that know no more than they were told; see `test_model`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from model import BACKOFF, BATCH, CLAIM, GRACE, HORIZON, LEASE, MAX_ATTEMPTS, WINDOW, Job
from processes import Known, Thing, value
from sqlalchemy import Connection

from vkjobs import ledger
from vkjobs.ledger import Claim, Failure


class Op(NamedTuple):
    """A statement: how it is executed, what the model says to its answer, and what the asker does with that."""

    run: Callable[[Connection], Any]
    judge: Callable[[Any], object]
    learn: Callable[[Any], object] = lambda _: None
    recall: Op | None = None
    """What is asked first if the answer was lost."""
    again: bool = False
    """Whether it is executed again if the answer was lost."""
    skips: bool = False
    """Whether it passes over locked rows instead of waiting for them."""
    alone: bool = False
    """Whether it waits for others of this sort."""


def equal(answer: Any, expected: Any) -> None:
    assert answer == expected


def failure(attempts: int, error: str) -> Failure:
    final = attempts + 1 >= MAX_ATTEMPTS or error.startswith("GiveUp")
    return Failure(final=final, delay=60 * BACKOFF * 2.0**attempts, error=error)


# What dispatch does.


def lease(known: Known, which: int) -> Op:
    kind = known.kind(which)
    queue: dict[str, Any] = {
        "kinds": ["listed"],
        "listed": kind == "listed",
        "lease": 60 * LEASE,
        "horizon": 60 * HORIZON,
    }
    return Op(
        lambda conn: ledger.lease(conn, batch=BATCH, window=WINDOW, **queue),
        lambda leases: known.model.lease(kind, [lease.id for lease in leases]),
        known.publish,
        skips=True,
        alone=True,
    )


def lease_again(known: Known, which: int) -> Op:
    kind = known.kind(which)
    queue: dict[str, Any] = {
        "kinds": ["listed"],
        "listed": kind == "listed",
        "lease": 60 * LEASE,
        "horizon": 60 * HORIZON,
    }
    return Op(
        lambda conn: ledger.lease_again(conn, room=BATCH, **queue),
        lambda leases: known.model.lease_again(kind, [lease.id for lease in leases]),
        known.publish,
        skips=True,
        alone=True,
    )


def free_again(known: Known, _: int) -> Op:
    return Op(
        lambda conn: ledger.free_again(conn, lease=60 * LEASE, horizon=60 * HORIZON),
        lambda answer: equal(answer, known.model.free_again()),
        skips=True,
    )


def take_over(known: Known, _: int) -> Op:
    return Op(
        lambda conn: ledger.take_over(conn, grace=60 * GRACE),
        lambda answer: equal(answer, known.model.take_over()),
        skips=True,
    )


def look_for_lost(known: Known, _: int) -> Op:
    return Op(
        lambda conn: ledger.lost(conn, lease=0),
        lambda answer: equal({lost.id for lost in answer}, known.model.lost()),
        known.find_lost,
        skips=True,
    )


def reap(known: Known, which: int) -> Op:
    corpse = known.pick(known.corpses, which)
    failed = failure(corpse.attempts, "WorkerLost: its lease expired; last held by …")
    return Op(
        lambda conn: ledger.settle_failed(conn, corpse.job.id, value(corpse.token), failed),
        lambda answer: equal(
            answer, known.model.settle_failed(corpse.job, corpse.tokens, failed.delay / 60, final=failed.final)
        ),
    )


# What workers do.


def claim(known: Known, which: int) -> Op:
    message = known.pick(known.messages, which)
    job, by = message.job, message.by(which % 2)
    return Op(
        lambda conn: ledger.claim(conn, job.id, value(message.token), lease=60 * CLAIM, by=by),
        lambda answer: equal(answer is not None, known.model.claim(job, message.token, by)),
        lambda answer: known.hold(job, answer, by),
        recall=_ask_if_claimed(known, job, by),
        again=True,
    )


def ask_if_claimed(known: Known, which: int) -> Op:
    message = known.pick(known.messages, which)
    return _ask_if_claimed(known, message.job, message.by(which % 2))


def _ask_if_claimed(known: Known, job: Job, by: str) -> Op:
    return Op(
        lambda conn: ledger.claimed(conn, job.id, by=by),
        lambda answer: equal(answer is not None, known.model.claimed(job, by)),
        lambda answer: known.hold(job, answer, by),
    )


def claim_all(known: Known, which: int) -> Op:
    """The jobs of messages that a process has: a message of many is no more to the ledger."""
    chosen = _some(known, known.messages, which)
    by = {message.job.id: message for message in chosen}
    who = chosen[-1].by(which % 2)

    def given() -> list[tuple[Any, datetime]]:
        return [(message.job.id, value(message.token)) for message in chosen]

    def judge(claims: list[Claim]) -> None:
        due = {
            message.job.id
            for message in chosen
            if message.job not in known.model.locked and known.model.claim(message.job, message.token, who)
        }
        equal({claim.id for claim in claims}, due)

    def learn(claims: list[Claim]) -> None:
        for claim in claims:
            known.hold(by[claim.id].job, claim, who)

    def judge_recalled(claims: list[Claim]) -> None:
        equal(
            {claim.id for claim in claims},
            {message.job.id for message in chosen if known.model.claimed(message.job, who)},
        )

    return Op(
        lambda conn: ledger.claim_all(conn, given(), lease=60 * CLAIM, by=who),
        judge,
        learn,
        recall=Op(lambda conn: ledger.claimed_all(conn, given(), by=who), judge_recalled, learn),
        again=True,
        skips=True,
    )


def _some(known: Known, things: list[Thing], which: int) -> list[Thing]:
    """Return a few of which each is of another job: the one that `Known.pick` chooses is the last."""
    chosen = [known.pick(things, which)]
    for thing in things[-3:]:
        if all(thing.job is not other.job for other in chosen):
            chosen.insert(0, thing)
    return chosen


def look_if_early(known: Known, which: int) -> Op:
    message = known.pick(known.messages, which)
    job = message.job

    def judge(answer: float | None) -> None:
        assert (answer is not None) is (job.place == "leased" and job.token is message.token)
        assert answer is None or (answer > 0) is (job.run_at > known.model.now)

    return Op(lambda conn: ledger.early_by(conn, job.id, value(message.token)), judge)


def release(known: Known, which: int) -> Op:
    message = known.pick(known.messages, which)
    return Op(
        lambda conn: ledger.release(conn, [(message.job.id, value(message.token))]),
        lambda answer: equal(answer, known.model.release(message.job, message.token)),
        again=True,
        skips=True,
    )


def renew(known: Known, which: int) -> Op:
    # A process holds a job once.
    held = list(
        {holding.job.id: holding for holding in [*known.holdings[-3:], known.pick(known.holdings, which)]}.values()
    )
    for holding in held:
        holding.propose(known.model.now)
    proposals = [(holding, holding.token, holding.proposed) for holding in held if holding.proposed]

    def judge(answer: set[Any]) -> None:
        equal(answer, {h.job.id for h, token, proposed in proposals if known.model.renew(h.job, token, proposed)})

    def learn(answer: set[Any]) -> None:
        for holding, _, proposed in proposals:
            if holding.job.id in answer and holding.proposed is proposed:
                holding.token, holding.proposed = proposed, None

    return Op(
        lambda conn: ledger.renew(conn, [(h.job.id, value(token), value(new)) for h, token, new in proposals]),
        judge,
        learn,
        skips=True,
    )


def settle_done(known: Known, which: int) -> Op:
    holding = known.pick(known.holdings, which)
    return Op(
        lambda conn: ledger.settle_done(conn, holding.job.id, *holding.values),
        lambda answer: equal(answer, known.model.settle_done(holding.job, holding.tokens)),
        recall=ask_if_done(known, which),
        again=True,
    )


def ask_if_done(known: Known, which: int) -> Op:
    holding = known.pick(known.holdings, which)
    return Op(
        lambda conn: ledger.settled_done(conn, holding.job.id, by=holding.by),
        lambda answer: equal(answer, known.model.settled_done(holding.job, holding.by)),
    )


def settle_all_done(known: Known, which: int) -> Op:
    chosen = _some(known, known.holdings, which)
    by = chosen[-1].by

    def held() -> list[tuple[Any, datetime, datetime]]:
        return [(holding.job.id, holding.values[0], holding.values[-1]) for holding in chosen]

    def judge(answer: set[Any]) -> None:
        free = [holding for holding in chosen if holding.job not in known.model.locked]
        equal(answer, {it.job.id for it in free if known.model.settle_done(it.job, it.tokens)})

    def judge_recalled(answer: set[Any]) -> None:
        equal(answer, {it.job.id for it in chosen if known.model.settled_done(it.job, by)})

    return Op(
        lambda conn: ledger.settle_all_done(conn, held()),
        judge,
        recall=Op(lambda conn: ledger.all_settled_done(conn, held(), by=by), judge_recalled),
        again=True,
        skips=True,
    )


def settle_failed(known: Known, which: int, error: str = "E: x") -> Op:
    holding = known.pick(known.holdings, which)
    failed = failure(holding.attempts, error)

    def run(conn: Connection) -> bool:
        token, *proposed = holding.values
        return ledger.settle_failed(conn, holding.job.id, token, failed, *proposed)

    def judge(answer: bool) -> None:
        equal(answer, known.model.settle_failed(holding.job, holding.tokens, failed.delay / 60, final=failed.final))

    return Op(run, judge, again=True)


def give_up(known: Known, which: int) -> Op:
    return settle_failed(known, which, "GiveUp: x")


def snooze(known: Known, which: int) -> Op:
    holding = known.pick(known.holdings, which)
    until = 60 * 25.0 if which % 2 else datetime.now(UTC) + timedelta(minutes=25)

    def run(conn: Connection) -> bool:
        token, *proposed = holding.values
        return ledger.snooze(conn, holding.job.id, token, until, *proposed)

    return Op(run, lambda answer: equal(answer, known.model.snooze(holding.job, holding.tokens, 25)), again=True)


def settle_dead_child(known: Known, which: int) -> Op:
    """Of the processes that got the message: the one that claimed the job, or the other."""
    message = known.pick(known.messages, which)
    job, by = message.job, message.by(which % 2)
    if which == 0 and known.holdings:
        job, by = known.pick(known.holdings, which).job, known.pick(known.holdings, which).by
    failed = failure(job.attempts, "WorkerLost: its process died")
    return Op(
        lambda conn: ledger.settle_dead_child(conn, job.id, failed, by=by),
        lambda answer: equal(answer, known.model.settle_dead_child(job, by, failed.delay / 60, final=failed.final)),
        again=True,
    )


def give_back(known: Known, which: int) -> Op:
    """Of a job that was claimed with others: by whom it was claimed, or by a reaper."""
    holding = known.pick(known.holdings, which)
    job, by = holding.job, holding.by
    if which % 2:
        return Op(
            lambda conn: ledger.give_back(conn, job.id, by=by, token=holding.values[0]),
            lambda answer: equal(answer, known.model.give_back(job, by, holding.tokens[:1])),
            again=True,
        )
    return Op(
        lambda conn: ledger.give_back(conn, job.id, by=by),
        lambda answer: equal(answer, known.model.give_back(job, by, None)),
        again=True,
    )


# What people and host code do.


def cancel(known: Known, which: int) -> Op:
    job = known.model.any(which)
    return Op(lambda conn: ledger.cancel(conn, job.id), lambda answer: equal(answer, known.model.cancel(job)))


def reschedule(known: Known, which: int) -> Op:
    job = known.model.any(which)
    run_at, due = datetime.now(UTC) + timedelta(minutes=5), known.model.now + 5
    return Op(
        lambda conn: ledger.reschedule(conn, job.id, run_at),
        lambda answer: equal(answer, known.model.reschedule(job, due)),
    )


def retry(known: Known, which: int) -> Op:
    job = known.model.any(which)
    return Op(lambda conn: ledger.retry(conn, job.id), lambda answer: equal(answer, known.model.retry(job)))


def make(known: Known, operation: Callable[[Known, int], Op], which: int) -> Op | None:
    """Return the operation; None if nobody knows yet of what it could be done to."""
    if operation in (*CLAIMS, look_if_early, release, settle_dead_child) and not known.messages:
        return None
    if operation in (renew, *SETTLINGS, ask_if_done) and not known.holdings:
        return None
    if operation is reap and not known.corpses:
        return None
    return operation(known, which)


CLAIMS = (claim, claim_all, ask_if_claimed)
SETTLINGS = (settle_done, settle_all_done, settle_failed, give_up, snooze, give_back)
RUNS = (*SETTLINGS, renew, renew, settle_dead_child)
FITTING: dict[str, tuple[Callable[[Known, int], Op], ...]] = {
    "free": (lease, cancel, reschedule),
    "leased": (*CLAIMS, claim, claim_all, release, lease_again, free_again, look_if_early, cancel, reschedule),
    "running": (*RUNS, reap, take_over, look_for_lost, ask_if_claimed, ask_if_done),
    "failed": (retry,),
    "cancelled": (retry,),
}
"""What may do something to a job, by its place."""
ALL = tuple(sorted({operation for fitting in FITTING.values() for operation in fitting}, key=lambda it: it.__name__))
