"""Every SQL statement on ``vk_jobs``, in the order of a job's life. Knows no Celery, policy or clock but Postgres'.

    enqueue            ─▶ free
    enqueue_many       ─▶ free
    lease              free, due ─▶ leased           release, free_again    leased ─▶ free
    lease_again        leased, expired ─▶ leased     cancel                 free, leased ─▶ cancelled
    claim              leased, due ─▶ running        reschedule             free, leased ─▶ free
    renew              running ─▶ running            snooze                 running ─▶ free
    settle_done        running ─▶ done               take_over              running, not ours, expired ─▶ free
    settle_failed      running ─▶ free or failed     retry                  failed, cancelled ─▶ free
    settle_dead_child  running ─▶ free or failed     give_back              running ─▶ free
                                                     prune                  done ─▶ gone

``lease_until`` is the fence. Lease, claim and renewal each write a new one by the database's clock, and whoever holds a
row says its exact value, the *token*, in every later statement. A statement that touches no row has lost the lease:
that is its result, never an error. A running row is ours while ``claimed_until = lease_until``; the original dispatcher
moves ``lease_until`` alone.

Conditions use ``statement_timestamp()``: unlike ``clock_timestamp()`` it bounds an index scan. Written values use
``clock_timestamp()``. Rows are locked with ``for no key update skip locked``, so that no statement waits for another.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, CursorResult, text
from sqlalchemy.exc import DBAPIError

from vkjobs.database import is_passing
from vkjobs.prepared import Prepared
from vkjobs.schema import TABLE, TICKS, Status

JobId = int | str
"""A job's id as JSON has it: an adopted table may use bigint, text or uuid."""

_SCAN_LIMIT = 1000  # rows that a housekeeping statement moves at most: the next tick goes on
_ADVISORY_LOCK = 0x766B6A6F6273  # "vkjobs"

_PENDING = f"status = '{Status.PENDING}'"
_FREE = f"{_PENDING} and lease_until is null"
_LEASED = f"{_PENDING} and lease_until is not null"
_RUNNING = f"status = '{Status.RUNNING}'"
_NO_CLAIM = "started_at = null, claimed_by = null, claimed_until = null"
_MADE_FREE = f"{_PENDING}, lease_until = null, {_NO_CLAIM}, updated_at = clock_timestamp()"
_HELD = f"id = :id and {_RUNNING} and lease_until in (:token, :proposed)"
# Without coalesce the planner may prefer the index of leased rows, where a whole batch has the same token.
_LEASED_BY = f"{_PENDING} and coalesce(j.lease_until, 'infinity') ="
_IN_QUEUE = "(kind = any(cast(:kinds as text[]))) = :listed"
_DUE_SOON = "run_at <= statement_timestamp() + make_interval(secs => :horizon)"
# A lease further off than any that is given counts as expired. The minute is for leases given while this statement
# waited: its statement_timestamp() is older than they are.
_EXPIRED = """(lease_until < statement_timestamp()
        or lease_until > statement_timestamp() + make_interval(secs => :lease + 60))"""
_FIRST_DAY = "timestamptz '0001-01-02 00:00:00+00'"  # psycopg2 has no datetime for what lies before year 1
_RUN_AT = f"greatest(j.run_at, {_FIRST_DAY}) as run_at"
_SUSPECT = "(coalesce(attempts, 0) > 0 or last_error is not null)"
# An adopted table may count attempts in a smallint.
_ATTEMPT = """least(coalesce(attempts, 0),
            case when pg_typeof(attempts) = cast('smallint' as regtype) then 32766 else 2147483646 end) + 1"""
# jsonb_populate_recordset gives ids and tokens the table's own types. An array is looked up by primary key; a join may,
# by what the planner believes of its size, read the whole table.
_GIVEN = f"""given as materialized (
            select id, lease_until, claimed_until
            from jsonb_populate_recordset(cast(null as {TABLE}), cast(:given as jsonb)))"""
_IS_GIVEN = "j.id = any(array(select id from given)) and j.id = given.id"
_CLOCK = "clock as materialized (select clock_timestamp() as now)"
# The same clock reading can only come twice if the clock was set back; a token must differ even then.
_FRESH = """(select clock.now + make_interval(secs => :lease)
            + case when clock.now + make_interval(secs => :lease) = j.lease_until
                   then interval '1 microsecond' else interval '0' end)"""


Refused = Callable[[JobId, DBAPIError], None]


def _ignore(id: JobId, error: DBAPIError) -> None: ...


class NewJob(NamedTuple):
    """A job that is to be enqueued; the fields mean what the arguments of `vkjobs.enqueue` mean."""

    kind: str
    ref_id: str | None = None
    run_at: datetime | None = None
    payload: Any = None


class Lease(NamedTuple):
    """A row that was leased, as its message needs it."""

    id: JobId
    kind: str
    ref_id: str | None
    run_at: datetime
    attempts: int
    token: datetime
    suspect: bool
    """Whether an earlier execution has failed or was cut off."""


class Claim(NamedTuple):
    """A row that this process now runs; ``now`` is the database's time when it said so."""

    id: JobId
    kind: str
    ref_id: str | None
    run_at: datetime
    attempts: int
    payload: str | None
    """JSON as text: whoever wrote it, decoding it is a part of the attempt."""
    token: datetime
    now: datetime


class Lost(NamedTuple):
    """A running row whose worker let its lease expire."""

    id: JobId
    kind: str
    ref_id: str | None
    attempts: int
    token: datetime
    claimed_by: str
    suspect: bool
    """As of a `Lease`."""


class Failure(NamedTuple):
    """How a failed attempt leaves its row: pending again after ``delay`` seconds, or failed for good."""

    final: bool
    delay: float
    error: str


def token_text(token: datetime) -> str:
    """Return ``token`` as text that keeps its microseconds and zone."""
    return token.astimezone(UTC).isoformat()


# Outside of a transaction, each of these travels and commits with its statement. The isolation is said because a role
# or a database may have another default, under which losing a race is an error. What is lost in a crash of Postgres
# without a durable commit is a lease, not a result.
_DURABLE = "set transaction isolation level read committed; "
_CHEAP = f"{_DURABLE}set local synchronous_commit = off; "
# Long enough for the host's short transactions. Behind a long one, claims would keep their slots from all other jobs; a
# settling is tried again, and in between its process can hear signals and renew its other leases.
_BRIEFLY = "set local lock_timeout = '1s'; "
# A plan that is kept must not be one for the empty table of the first day.
_BY_KEY = "set local enable_seqscan = off; "


def _is_alone(conn: Connection) -> bool:
    return bool(conn.connection.driver_connection.autocommit)  # type: ignore[union-attr]


def _execute(
    conn: Connection, sql: str, /, *, durable: bool = True, briefly: bool = False, **values: Any
) -> CursorResult[Any]:
    if _is_alone(conn):
        sql = f"{_DURABLE if durable else _CHEAP}{_BRIEFLY if briefly else ''}{sql}"
    return conn.execute(_text(sql), values)


def _execute_prepared(
    conn: Connection, statement: Prepared, lead: str, values: dict[str, Any]
) -> tuple[Sequence[Any], int]:
    if _is_alone(conn):
        return statement.execute(conn, lead + _BY_KEY, values)
    result = conn.execute(_text(statement.sql), values)
    return result.fetchall() if result.returns_rows else [], result.rowcount


_text = lru_cache(text)


def _plain(row: Sequence[Any]) -> tuple[Any, ...]:
    # Some engines give UUIDs as objects, which a message cannot hold.
    return (str(row[0]) if isinstance(row[0], UUID) else row[0], *row[1:])


def _tokens(rows: Iterable[Sequence[Any]]) -> str:
    # Each row is an id, its token and perhaps a proposed one.
    return json.dumps(
        [{"id": row[0], "lease_until": token_text(row[1]), "claimed_until": token_text(row[-1])} for row in rows]
    )


def enqueue(conn: Connection, *, kind: str, ref_id: str | None, run_at: datetime | None, payload: Any) -> JobId:
    """Insert a job, due at ``run_at`` (None: now), in the caller's transaction; return its id."""
    sql = f"""
        insert into {TABLE} (kind, ref_id, status, run_at, attempts, updated_at, payload)
        values (:kind, :ref_id, '{Status.PENDING}', coalesce(:run_at, clock_timestamp()), 0, clock_timestamp(),
                cast(:payload as jsonb))
        returning id"""
    encoded = None if payload is None else json.dumps(payload)
    row = conn.execute(_text(sql), {"kind": kind, "ref_id": ref_id, "run_at": run_at, "payload": encoded}).one()
    return _plain(row)[0]  # type: ignore[no-any-return]


_MANY = 1000  # rows that one statement inserts: more make no row cheaper

_ENQUEUE_MANY = f"""
    insert into {TABLE} (kind, ref_id, status, run_at, attempts, updated_at, payload)
    select kind, ref_id, '{Status.PENDING}', coalesce(run_at, clock_timestamp()), 0, clock_timestamp(), payload
    from rows from (
        jsonb_to_recordset(cast(:jobs as jsonb)) as (kind text, ref_id text, run_at timestamptz, payload jsonb)
    ) with ordinality as given (kind, ref_id, run_at, payload, position)
    order by position
    returning id"""


def enqueue_many(conn: Connection, jobs: Sequence[NewJob]) -> list[JobId]:
    """As `enqueue`, of many jobs; return their ids in the order of the jobs."""
    ids: list[JobId] = []
    for start in range(0, len(jobs), _MANY):
        given = [
            {**job._asdict(), "run_at": job.run_at and job.run_at.isoformat()} for job in jobs[start : start + _MANY]
        ]
        rows = conn.execute(_text(_ENQUEUE_MANY), {"jobs": json.dumps(given)})
        ids += [_plain(row)[0] for row in rows]
    return ids


_TAKE = f"""
    update {TABLE} j
    set lease_until = {_FRESH}, {_NO_CLAIM}, updated_at = clock.now
    from clock where j.id = any(array(select id from taken))
    returning j.id, j.kind, j.ref_id, {_RUN_AT}, coalesce(j.attempts, 0) as attempts, j.lease_until as token,
        {_SUSPECT} as suspect"""

# One run leases at a time, so that many at once cannot fill a queue past its window. The lock lasts for one round trip.
_ONE_AT_A_TIME = f"set local lock_timeout = '5s'; select pg_advisory_xact_lock({_ADVISORY_LOCK}); "

# Kinds are found by a loose index scan, then each is read from its own oldest row: a kind that is not to be leased now
# costs nothing, however many rows it has. The CTE is materialized so that nothing makes it lock more than its limit.
_FOUND = f"""
    found (kind) as (
        (select kind from {TABLE} where {_FREE} order by kind limit 1)
        union all
        select (select j.kind from {TABLE} j where {_FREE} and j.kind > found.kind order by j.kind limit 1)
        from found where found.kind is not null
    )"""
_LISTED = "found (kind) as (select unnest(cast(:kinds as text[])))"


def _mark(name: str) -> str:
    return f"coalesce(cast(:{name} as timestamptz), '-infinity')"


def _lease_sql(found: str) -> str:
    return f"""
    with recursive {_CLOCK}, {found},
    room (n) as materialized (
        select greatest(0, least(:batch, :window - (
            select count(*) from (
                select from {TABLE} where {_LEASED} and lease_until >= {_mark("since")} and {_IN_QUEUE} limit :window
            ) waiting)))
    ),
    taken as materialized (
        select due.id
        from found cross join lateral (
            select j.id, j.run_at from {TABLE} j
            where {_FREE} and j.kind = found.kind and j.run_at >= {_mark("after")} and {_DUE_SOON}
            order by j.run_at limit (select n from room)
            for no key update skip locked
        ) due
        where (select n from room) > 0 and (found.kind = any(cast(:kinds as text[]))) = :listed
        order by due.run_at limit (select n from room)
    )"""


class _Taking(NamedTuple):
    """A statement that leases the rows of its common table expression ``taken``, and that expression alone."""

    found: str
    take: Prepared


def _taking(name: str, found: str) -> _Taking:
    return _Taking(found, Prepared(name, found + _TAKE))


_LEASE = {
    False: _taking("lease_others", _lease_sql(_FOUND)),
    True: _taking("lease_listed", _lease_sql(_LISTED)),
}
_LEASE_AGAIN = _taking(
    "lease_again",
    f"""
    with {_CLOCK}, taken as materialized (
        select id from {TABLE}
        where {_LEASED} and {_EXPIRED} and {_IN_QUEUE} and {_DUE_SOON}
        order by lease_until limit :room
        for no key update skip locked
    )""",
)


def lease(
    conn: Connection,
    *,
    kinds: Sequence[str],
    listed: bool,
    batch: int,
    window: int,
    lease: float,
    horizon: float,
    after: datetime | None = None,
    since: datetime | None = None,
    refused: Refused = _ignore,
) -> list[Lease]:
    """Lease the oldest free rows of one queue that are due within ``horizon`` seconds, for ``lease`` seconds.

    Takes at most ``batch`` rows, and only as many as the queue's leased rows leave free of its ``window``. Entries of
    rows that are gone stay in an index while somebody's snapshot is open: ``after`` and ``since`` step over them.

    Args:
        conn: a connection in autocommit.
        kinds: the kinds of the queue if ``listed``; else all kinds but these are the queue's.
        listed: what ``kinds`` means.
        batch: rows.
        window: rows.
        lease: seconds from now; it should cover the horizon.
        horizon: seconds.
        after: leaves out rows that were due before.
        since: leaves out, of those that fill the window, the rows whose token is older.
        refused: is told of a row that cannot be leased; the others are.
    """
    values = {"kinds": list(kinds), "listed": listed, "batch": batch, "window": window}
    marks = {"after": after, "since": since}
    return _leases(conn, _LEASE[listed], refused, lease=lease, horizon=horizon, **values, **marks)


def now(conn: Connection) -> datetime:
    """Return the database's time."""
    moment: datetime = _execute(conn, "select clock_timestamp()").scalar_one()
    return moment


_READY = Prepared(
    "ready",
    f"""
    select count(*) from (
        select from {TABLE}
        where {_LEASED} and {_IN_QUEUE} and lease_until >= statement_timestamp() and run_at <= statement_timestamp()
        limit :limit) waiting""",
)


def ready(conn: Connection, *, kinds: Sequence[str], listed: bool, limit: int) -> int:
    """Return how many leased rows of one queue, ``limit`` at most, wait for a worker although they are due."""
    values = {"kinds": list(kinds), "listed": listed, "limit": limit}
    ((waiting,),), _ = _execute_prepared(conn, _READY, _DURABLE, values)
    return int(waiting)


def lease_again(
    conn: Connection,
    *,
    kinds: Sequence[str],
    listed: bool,
    room: int,
    lease: float,
    horizon: float,
    refused: Refused = _ignore,
) -> list[Lease]:
    """Lease again at most ``room`` rows of a queue whose lease expired unclaimed: their messages are lost or late."""
    values = {"kinds": list(kinds), "listed": listed, "room": room}
    return _leases(conn, _LEASE_AGAIN, refused, lease=lease, horizon=horizon, **values)


_LEASE_ONE = f"""
    with {_CLOCK}, taken as materialized (
        select id from {TABLE}
        where id = :id and {_PENDING} and (lease_until is null or {_EXPIRED}) and {_DUE_SOON}
        for no key update skip locked
    )"""


def _leases(conn: Connection, taking: _Taking, refused: Refused, **values: Any) -> list[Lease]:
    try:
        rows, _ = _execute_prepared(conn, taking.take, _CHEAP + _ONE_AT_A_TIME, values)
    except DBAPIError as error:
        if is_passing(error):
            raise
        rows = _one_by_one(conn, taking.found, refused, values)
    return sorted((Lease(*_plain(row)) for row in rows), key=lambda lease: lease.run_at)


def _one_by_one(conn: Connection, found: str, refused: Refused, values: dict[str, Any]) -> list[Any]:
    # Such as a trigger of the host's that refuses one row: the others go on, those behind it too.
    most = values.get("batch") or values.get("room") or 0
    wide = {
        name: max(value, _SCAN_LIMIT) if name in {"batch", "window", "room"} else value
        for name, value in values.items()
    }
    rows: list[Any] = []
    for id in _execute(conn, found + " select id from taken", **wide).scalars().all():
        try:
            rows += _execute(conn, _LEASE_ONE + _TAKE, durable=False, id=id, **_times(values)).all()
        except DBAPIError as error:
            if is_passing(error):
                raise
            refused(id, error)
        if len(rows) == most:
            break
    return rows


def _times(values: dict[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in ("lease", "horizon")}


def free_again(conn: Connection, *, lease: float, horizon: float) -> int:
    """Free rows whose lease expired and that are no longer due within ``horizon`` seconds; return how many."""
    sql = f"""
        with moved as materialized (
            select id from {TABLE} where {_LEASED} and {_EXPIRED} and not {_DUE_SOON}
            limit {_SCAN_LIMIT} for no key update skip locked
        )
        update {TABLE} set {_MADE_FREE} where id = any(array(select id from moved))"""
    return _execute(conn, sql, durable=False, lease=lease, horizon=horizon).rowcount


def take_over(conn: Connection, *, grace: float) -> int:
    """Free running rows that are not ours and whose lease is null or expired ``grace`` seconds ago; return how many."""
    sql = f"""
        with orphaned as materialized (
            select id from {TABLE}
            where {_RUNNING} and (lease_until is null or lease_until < {_FIRST_DAY}
                or claimed_until is distinct from lease_until
                and lease_until < statement_timestamp() - make_interval(secs => :grace))
            limit {_SCAN_LIMIT} for no key update skip locked
        )
        update {TABLE} set {_MADE_FREE} where id = any(array(select id from orphaned))"""
    return _execute(conn, sql, durable=False, grace=grace).rowcount


def stuck(conn: Connection, *, lease: float) -> int:
    """Return how many running rows have a lease that ends further off than any that is given: nothing frees them."""
    sql = f"""
        select count(*) from (
            select from {TABLE}
            where {_RUNNING} and lease_until > statement_timestamp() + make_interval(secs => :lease)
            limit {_SCAN_LIMIT}) stuck"""
    return int(_execute(conn, sql, lease=lease).scalar_one())


def lost(conn: Connection, *, lease: float) -> list[Lost]:
    """Return running rows of ours whose lease expired: their worker died or was cut off. Reaped by `settle_failed`.

    None until Postgres has been up for ``lease`` seconds: after its restart the living renew first. Not those that
    somebody has locked: to settle one would wait for that, and the others are to go on.
    """
    sql = f"""
        select id, kind, ref_id, coalesce(attempts, 0), lease_until, coalesce(claimed_by, ''), {_SUSPECT}
        from {TABLE}
        where {_RUNNING} and claimed_until = lease_until
            and lease_until >= {_FIRST_DAY} and lease_until < statement_timestamp()
            and pg_postmaster_start_time() + make_interval(secs => :lease) < statement_timestamp()
        order by lease_until limit {_SCAN_LIMIT}
        for no key update skip locked"""
    return [Lost(*_plain(row)) for row in _execute(conn, sql, durable=False, lease=lease)]


_CLAIM_COLUMNS = f"""
    j.id, j.kind, j.ref_id, {_RUN_AT}, coalesce(j.attempts, 0) as attempts, cast(j.payload as text) as payload,
    j.lease_until as token, clock_timestamp() as now"""


_CLAIM = Prepared(
    "claim",
    f"""
    with {_CLOCK}
    update {TABLE} j
    set {_RUNNING}, claimed_by = :by, started_at = clock.now, updated_at = clock.now,
        lease_until = {_FRESH}, claimed_until = {_FRESH}
    from clock
    where j.id = :id and j.{_LEASED_BY} :token and j.run_at <= clock.now
    returning {_CLAIM_COLUMNS}""",
)


def claim(conn: Connection, id: JobId, token: datetime, *, lease: float, by: str) -> Claim | None:
    """Start running a leased row that is due, for ``lease`` seconds; None if its token is gone or it is not yet due.

    Raises SQLAlchemy's OperationalError if somebody has the row locked and does not free it soon.

    Args:
        conn: a connection in autocommit.
        id: the job's id.
        token: the one that its message brought.
        lease: seconds.
        by: names the execution; `settle_dead_child` and `claimed` find the row by it.
    """
    values = {"id": id, "token": token, "lease": lease, "by": by}
    rows, _ = _execute_prepared(conn, _CLAIM, _CHEAP + _BRIEFLY, values)
    return Claim(*_plain(rows[0])) if rows else None


_CLAIM_ALL = Prepared(
    "claim_all",
    f"""
    with {_CLOCK}, {_GIVEN}, free as materialized (
        select j.id from {TABLE} j, given, clock
        where {_IS_GIVEN} and j.{_LEASED_BY} given.lease_until and j.run_at <= clock.now
        for no key update of j skip locked
    )
    update {TABLE} j
    set {_RUNNING}, claimed_by = :by, started_at = clock.now, updated_at = clock.now,
        lease_until = {_FRESH}, claimed_until = {_FRESH}
    from clock
    where j.id = any(array(select id from free))
    returning {_CLAIM_COLUMNS}""",
)


def claim_all(conn: Connection, leases: Iterable[tuple[JobId, datetime]], *, lease: float, by: str) -> list[Claim]:
    """As `claim`, of many rows by id and token; of a row that is locked, not yet due or moved on, nothing is said.

    Raises SQLAlchemy's OperationalError if somebody has the table locked and does not free it soon.
    """
    values = {"given": _tokens(leases), "lease": lease, "by": by}
    rows, _ = _execute_prepared(conn, _CLAIM_ALL, _CHEAP + _BRIEFLY, values)
    return [Claim(*_plain(row)) for row in rows]


def claimed_all(conn: Connection, leases: Iterable[tuple[JobId, datetime]], *, by: str) -> list[Claim]:
    """Return those of the rows that ``by`` runs: asked when the answer to a `claim_all` was lost."""
    sql = f"""
        with {_GIVEN} select {_CLAIM_COLUMNS} from {TABLE} j, given
        where {_IS_GIVEN} and j.{_RUNNING} and j.claimed_by = :by and j.claimed_until = j.lease_until"""
    return [Claim(*_plain(row)) for row in _execute(conn, sql, given=_tokens(leases), by=by)]


def claimed(conn: Connection, id: JobId, *, by: str) -> Claim | None:
    """Return the row if ``by`` runs it: asked when the answer to a `claim` was lost."""
    sql = f"""
        select {_CLAIM_COLUMNS} from {TABLE} j
        where j.id = :id and j.{_RUNNING} and j.claimed_by = :by and j.claimed_until = j.lease_until"""
    row = _execute(conn, sql, id=id, by=by).one_or_none()
    return None if row is None else Claim(*_plain(row))


def early_by(conn: Connection, id: JobId, token: datetime) -> float | None:
    """Return the seconds until a leased row is due; None if its token is gone."""
    sql = f"""
        select extract(epoch from least(run_at, clock_timestamp() + interval '1 year') - clock_timestamp())
        from {TABLE} j where j.id = :id and j.{_LEASED_BY} :token"""
    seconds = _execute(conn, sql, id=id, token=token).scalar_one_or_none()
    return None if seconds is None else float(seconds)


_STILL_HELD = f"{_IS_GIVEN} and j.{_RUNNING} and j.lease_until in (given.lease_until, given.claimed_until)"


def renew(conn: Connection, held: Sequence[tuple[JobId, datetime, datetime]]) -> set[JobId]:
    """Move the leases of running rows from their token to the proposed one; return the ids of those that moved.

    The new token comes from the caller, so that it knows both if the answer is lost; then either is accepted. What did
    not move is lost, or locked by somebody just now: see `still_held`.

    Args:
        conn: a connection in autocommit.
        held: id, token, proposed token.
    """
    sql = f"""
        with {_GIVEN}, free as materialized (
            select j.id, given.claimed_until as proposed from {TABLE} j, given where {_STILL_HELD}
            for no key update of j skip locked
        )
        update {TABLE} j
        set lease_until = free.proposed, claimed_until = free.proposed, updated_at = clock_timestamp()
        from free where j.id = free.id
        returning j.id"""
    return {_plain(row)[0] for row in _execute(conn, sql, durable=False, given=_tokens(held))}


def still_held(conn: Connection, held: Sequence[tuple[JobId, datetime, datetime]]) -> set[JobId]:
    """Return the ids of the running rows whose token is the given or the proposed one; arguments as of `renew`."""
    sql = f"with {_GIVEN} select j.id from {TABLE} j, given where {_STILL_HELD}"
    return {_plain(row)[0] for row in _execute(conn, sql, given=_tokens(held))}


_SETTLE_DONE = Prepared(
    "settle_done",
    f"""
    update {TABLE} set status = '{Status.DONE}', lease_until = null, updated_at = clock_timestamp() where {_HELD}""",
)


def settle_done(conn: Connection, id: JobId, token: datetime, proposed: datetime | None = None) -> bool:
    """Settle a running row as done, in the caller's transaction if there is one; False if the lease is lost.

    Args:
        conn: a connection.
        id: the job's id.
        token: the one held.
        proposed: the token of a renewal whose answer is not known.
    """
    values = {"id": id, "token": token, "proposed": proposed or token}
    _, touched = _execute_prepared(conn, _SETTLE_DONE, _DURABLE + _BRIEFLY, values)
    return touched == 1


def _settle_all_done(locked: str) -> str:
    return f"""
    with {_GIVEN}, free as materialized (
        select j.id from {TABLE} j, given where {_STILL_HELD} for no key update of j {locked}
    )
    update {TABLE} j set status = '{Status.DONE}', lease_until = null, updated_at = clock_timestamp()
    where j.id = any(array(select id from free))
    returning j.id"""


_SETTLE_ALL_DONE = _settle_all_done("")
_SETTLE_UNLOCKED_DONE = Prepared("settle_all_done", _settle_all_done("skip locked"))


def settle_all_done(conn: Connection, held: Sequence[tuple[JobId, datetime, datetime]]) -> set[JobId]:
    """As `settle_done`, of many rows by id, token and proposed token; return the ids of those that are settled.

    In a transaction of the caller's it waits for rows that somebody has locked. Alone it leaves them for a later call:
    the others need not wait for them.
    """
    values = {"given": _tokens(held)}
    if _is_alone(conn):
        rows, _ = _execute_prepared(conn, _SETTLE_UNLOCKED_DONE, _DURABLE, values)
    else:
        rows = conn.execute(_text(_SETTLE_ALL_DONE), values).all()
    return {_plain(row)[0] for row in rows}


def all_settled_done(conn: Connection, held: Sequence[tuple[JobId, datetime, datetime]], *, by: str) -> set[JobId]:
    """Return the ids of the rows that ``by`` settled as done: asked when the answer to a commit was lost."""
    # As of `settled_done`, the lock waits; what the row says is looked at behind it.
    sql = f"""
        with {_GIVEN}, asked as materialized (
            select j.id, j.status, j.claimed_by from {TABLE} j, given where {_IS_GIVEN} for share of j
        )
        select id from asked where status = '{Status.DONE}' and claimed_by = :by"""
    return {_plain(row)[0] for row in _execute(conn, sql, briefly=True, given=_tokens(held), by=by)}


def settled_done(conn: Connection, id: JobId, *, by: str) -> bool:
    """Tell whether ``by`` settled the row as done: asked when the answer to a commit was lost."""
    # The lock waits for a commit that is still under way.
    sql = f"select status = '{Status.DONE}' and claimed_by = :by from {TABLE} where id = :id for share"
    return _execute(conn, sql, briefly=True, id=id, by=by).scalar_one_or_none() is True


def _fail(failure: Failure) -> str:
    place = (
        f"status = '{Status.FAILED}', lease_until = null, updated_at = clock_timestamp()"
        if failure.final
        else _MADE_FREE
    )
    return f"""
        update {TABLE}
        set {place}, attempts = {_ATTEMPT}, last_error = :error,
            run_at = clock_timestamp() + make_interval(secs => :delay)
        where """


def settle_failed(
    conn: Connection, id: JobId, token: datetime, failure: Failure, proposed: datetime | None = None
) -> bool:
    """Count a failed attempt of a running row and free it after a delay, or end it; False if the lease is lost."""
    values: dict[str, Any] = {"id": id, "token": token, "proposed": proposed or token}
    values |= {"delay": failure.delay, "error": failure.error}
    return _execute(conn, _fail(failure) + _HELD, briefly=True, **values).rowcount == 1


def settle_dead_child(conn: Connection, id: JobId, failure: Failure, *, by: str) -> bool:
    """As `settle_failed`, by the main process of a worker whose child died as ``by``, and whose token is not known."""
    sql = _fail(failure) + f"id = :id and {_RUNNING} and claimed_by = :by and claimed_until = lease_until"
    values: dict[str, Any] = {"id": id, "by": by, "delay": failure.delay, "error": failure.error}
    return _execute(conn, sql, briefly=True, **values).rowcount == 1


def give_back(conn: Connection, id: JobId, *, by: str, token: datetime | None = None, error: str | None = None) -> bool:
    """Free a running row of ``by`` that was not executed, or may not have been; no attempt.

    Args:
        conn: a connection.
        id: the job's id.
        by: who claimed it.
        token: touches the row only with this one.
        error: makes the row a suspect.
    """
    sql = f"""
        update {TABLE} set {_MADE_FREE}, last_error = coalesce(:error, last_error)
        where id = :id and {_RUNNING} and claimed_by = :by and claimed_until = lease_until
            and lease_until = coalesce(:token, lease_until)"""
    return _execute(conn, sql, briefly=True, id=id, by=by, token=token, error=error).rowcount == 1


def snooze(
    conn: Connection, id: JobId, token: datetime, run_at: datetime | float, proposed: datetime | None = None
) -> bool:
    """Free a running row until ``run_at``, a time or seconds from now; no attempt; False if the lease is lost."""
    moment = ":run_at" if isinstance(run_at, datetime) else "clock_timestamp() + make_interval(secs => :run_at)"
    sql = f"update {TABLE} set {_MADE_FREE}, run_at = {moment} where {_HELD}"
    values: dict[str, Any] = {"id": id, "token": token, "proposed": proposed or token, "run_at": run_at}
    return _execute(conn, sql, briefly=True, **values).rowcount == 1


def release(conn: Connection, leases: Iterable[tuple[JobId, datetime]]) -> int:
    """Free leased rows whose messages will not be run, by id and token; return how many that were.

    A row that somebody has locked is left to its lease.
    """
    sql = f"""
        with {_GIVEN}, free as materialized (
            select j.id from {TABLE} j, given where {_IS_GIVEN} and j.{_LEASED_BY} given.lease_until
            for no key update of j skip locked
        )
        update {TABLE} set {_MADE_FREE} where id = any(array(select id from free))"""
    return _execute(conn, sql, durable=False, given=_tokens(leases)).rowcount


def cancel(conn: Connection, id: JobId) -> bool:
    """End a pending row as cancelled; False if there is none, or it runs, or is over."""
    sql = f"""
        update {TABLE} set status = '{Status.CANCELLED}', lease_until = null, updated_at = clock_timestamp()
        where id = :id and {_PENDING}"""
    return _execute(conn, sql, id=id).rowcount == 1


def reschedule(conn: Connection, id: JobId, run_at: datetime) -> bool:
    """Free a pending row for another time; False if there is none, or it runs, or is over."""
    sql = f"update {TABLE} set {_MADE_FREE}, run_at = :run_at where id = :id and {_PENDING}"
    return _execute(conn, sql, id=id, run_at=run_at).rowcount == 1


def retry(conn: Connection, id: JobId) -> bool:
    """Free a failed or cancelled row, due now, with no attempt counted; False if it is in another place."""
    sql = f"""
        update {TABLE} set {_MADE_FREE}, attempts = 0, run_at = clock_timestamp()
        where id = :id and status in ('{Status.FAILED}', '{Status.CANCELLED}')"""
    return _execute(conn, sql, id=id).rowcount == 1


_MOST_REFUSED = 10  # rows that one run of prune tries in vain: each is an error in Postgres' log

# What is over has no index. To read a random stretch of the table's pages costs the same whatever their number, needs
# no mark of how far an earlier run came, and keeps runs at the same time apart.
_STRETCH = f"""
    stretch (first) as materialized (
        select trunc(:chance * ceil(
            pg_relation_size(cast('{TABLE}' as regclass)) / (cast(current_setting('block_size') as numeric) * :pages)
        )) * :pages
    )"""
_IN_STRETCH = """ctid >= (select cast('(' || first || ',0)' as tid) from stretch)
            and ctid < (select cast('(' || first + :pages || ',0)' as tid) from stretch)"""


def _old(where: str, order: str = "") -> str:
    return f"""
    old as materialized (
        select ctid, id from {TABLE}
        where {where} and status = '{Status.DONE}'
            and updated_at < statement_timestamp() - make_interval(secs => :keep)
        {order} limit {_SCAN_LIMIT} for update skip locked
    )"""


# By ctid no index is read; a row that moves on after it was found is not there any more.
_DELETE = f"delete from {TABLE} where ctid = any(array(select ctid from old))"
_PRUNE = f"with {_STRETCH}, {_old(_IN_STRETCH)} {_DELETE}"
_PRUNE_ONE = f"with {_old('id = :id')} {_DELETE}"
# In any order: rows that are always refused must not stand before all others.
_TO_PRUNE = f"with {_STRETCH}, {_old(_IN_STRETCH, 'order by random()')} select id from old"


def prune(conn: Connection, *, keep: float, pages: int = 500) -> int:
    """Delete rows that have been done for ``keep`` seconds, those in a random stretch of the table; return how many.

    Raises SQLAlchemy's DBAPIError if some cannot be deleted, such as for a foreign key of the host's. No other is
    kept by these for ever.

    Args:
        conn: a connection in autocommit.
        keep: seconds.
        pages: the length of the stretch; a table that is no longer is covered whole.
    """
    values: dict[str, Any] = {"keep": keep, "pages": pages, "chance": random.random()}  # noqa: S311
    try:
        return _execute(conn, _BRIEFLY + _PRUNE, durable=False, **values).rowcount
    except DBAPIError as error:
        if is_passing(error):
            raise
    pruned, refusals = 0, []
    for id in _execute(conn, _TO_PRUNE, **values).scalars().all():
        try:
            pruned += _execute(conn, _BRIEFLY + _PRUNE_ONE, durable=False, id=id, keep=keep).rowcount
        except DBAPIError as error:
            refusals.append(error)
            if is_passing(error) or len(refusals) == _MOST_REFUSED:
                break
    if refusals:
        raise refusals[-1]
    return pruned


def ticked(conn: Connection, source: str) -> None:
    """Note that ``source``, "beat" or "worker", ticks now."""
    sql = f"""
        insert into {TICKS} as t (source, ticked_at) values (:source, clock_timestamp())
        on conflict (source) do update set ticked_at = excluded.ticked_at"""
    _execute(conn, sql, durable=False, source=source)


def silence(conn: Connection, source: str) -> float:
    """Return the seconds since ``source`` last ticked; infinity if it never did."""
    sql = f"select extract(epoch from clock_timestamp() - ticked_at) from {TICKS} where source = :source"
    seconds = _execute(conn, sql, source=source).scalar_one_or_none()
    return float("inf") if seconds is None else float(seconds)
