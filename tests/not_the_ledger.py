"""Statements that the ledger does not have, each with the place of the row and what the audit says of it."""

from __future__ import annotations

NOT_THE_LEDGER = {
    "settled done by id alone": (
        "ours",
        "update vk_jobs set status = 'done', lease_until = null, updated_at = clock_timestamp() where id = :id",
        "settle done: it does not name the token that it found",
    ),
    "settled done with the token of another": (
        "ours",
        """update vk_jobs set status = 'done', lease_until = null, updated_at = clock_timestamp()
        where id = :id or lease_until in ('2026-01-02 03:04:05.000006+00', '2026-01-02 03:04:05+01')""",
        "settle done: it does not name the token that it found",
    ),
    "settled twice": (
        "done",
        "update vk_jobs set status = 'failed', updated_at = clock_timestamp() where id = :id",
        "there is no way from done to failed",
    ),
    "settled once more as it was": (
        "done",
        "update vk_jobs set updated_at = clock_timestamp() where id = :id",
        "there is no way from done to done",
    ),
    "an attempt that is not counted": (
        "ours",
        """update vk_jobs set status = 'pending', lease_until = null, started_at = null, claimed_by = null,
            claimed_until = null, last_error = 'E: x', run_at = clock_timestamp() + interval '120 s',
            updated_at = clock_timestamp() where id = :id and lease_until = :token""",
        "settle failed: attempts do not rise by one",
    ),
    "a lease that is given away": (
        "leased",
        """update vk_jobs set lease_until = clock_timestamp() + interval '60 s', updated_at = clock_timestamp()
        where id = :id and lease_until = :token""",
        "lease again: the lease that it found was not expired",
    ),
    "a claim that keeps its token": (
        "leased",
        """update vk_jobs set status = 'running', started_at = x.now, claimed_by = 'me', claimed_until = lease_until,
            updated_at = x.now from (select clock_timestamp() as now) x where id = :id and lease_until = :token""",
        "claim: the token is not new",
    ),
    "a claim before its time": (
        "leased",
        """update vk_jobs set status = 'running', started_at = x.now, claimed_by = 'me', updated_at = x.now,
            lease_until = x.now + interval '60 s', claimed_until = x.now + interval '60 s'
        from (select clock_timestamp() as now) x where id = :id and lease_until = :token""",
        "claim: it starts before run_at",
    ),
    "a claim of a free row": (
        "free",
        """update vk_jobs set status = 'running', started_at = x.now, claimed_by = 'me', updated_at = x.now,
            lease_until = x.now + interval '60 s', claimed_until = x.now + interval '60 s'
        from (select clock_timestamp() as now) x where id = :id""",
        "there is no way from free to running",
    ),
    "a renewal without the token": (
        "ours",
        """update vk_jobs set lease_until = x.lease, claimed_until = x.lease, updated_at = clock_timestamp()
        from (select clock_timestamp() + interval '60 s' as lease) x where id = :id""",
        "renew: it does not name the token that it found",
    ),
    "a row of the worker's that is taken over": (
        "ours, expired",
        """update vk_jobs set status = 'pending', lease_until = null, started_at = null, claimed_by = null,
            claimed_until = null, updated_at = clock_timestamp() where id = :id""",
        "give back: it names neither the token nor the child that it found",
    ),
    "a time that is not now": (
        "ours",
        """update vk_jobs set status = 'done', lease_until = null, updated_at = now() - interval '10 minutes'
        where id = :id and lease_until = :token""",
        "settle done: updated_at is not the database's time of the change",
    ),
    "a deletion": ("done", "delete from vk_jobs where id = :id", "vkjobs may not delete"),
    "an insertion of a running row": (
        "done",
        "insert into vk_jobs (kind, status) values ('noop', 'running')",
        "enqueue: status is 'running'",
    ),
}
