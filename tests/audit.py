"""An audit of vk_jobs: a trigger records every change of every row, `check` says which of them were illegal.

A change is held to the rules of who made it. That is vkjobs, also in the host's transactions, unless the session says
otherwise by `acting`, or by ``options=-c vkjobs.actor=…`` in its URL: *host* for a test's own SQL, which may do
anything, and *original* for the original dispatcher.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from legal import SECOND, Change, History, Id, Instant, Row, Rules, check, instant, place, reason, verb_of
from sqlalchemy import Connection, text

__all__ = ["History", "Rules", "Summary", "acting", "check", "effects", "history", "install", "summary"]

Actor = Literal["host", "original"]

_TIMES = ("run_at", "lease_until", "updated_at", "started_at", "claimed_until")
_ADDED = ("started_at", "claimed_by", "claimed_until", "payload", "unique_key")

# The statement is kept only where it must name what it holds: a batch's would otherwise be kept once a row.
_INSTALL = """
    create table vk_jobs_audit (
        seq bigserial, at timestamptz not null, txid bigint, pid integer, actor text, op text not null,
        old jsonb, new jsonb, statement text);
    create function vk_jobs_audit() returns trigger language plpgsql as $$
    begin
        insert into vk_jobs_audit (at, txid, pid, actor, op, old, new, statement) values (
            clock_timestamp(), txid_current(), pg_backend_pid(), nullif(current_setting('vkjobs.actor', true), ''),
            lower(tg_op), to_jsonb(old), to_jsonb(new),
            case when tg_op = 'UPDATE' and old.lease_until is not null
                and (new.lease_until is null or new.status::text = 'running') then current_query() end);
        return null;
    end $$;
    create function vk_jobs_audit_truncate() returns trigger language plpgsql as $$
    begin
        insert into vk_jobs_audit (at, txid, pid, actor, op) values (
            clock_timestamp(), txid_current(), pg_backend_pid(), nullif(current_setting('vkjobs.actor', true), ''),
            'truncate');
        return null;
    end $$;
    create trigger vk_jobs_audit after insert or update or delete on vk_jobs
        for each row execute function vk_jobs_audit();
    create trigger vk_jobs_audit_truncate after truncate on vk_jobs
        for each statement execute function vk_jobs_audit_truncate();
    alter table vk_jobs enable always trigger vk_jobs_audit, enable always trigger vk_jobs_audit_truncate;
    insert into vk_jobs_audit (at, op, new) select clock_timestamp(), 'found', to_jsonb(j) from vk_jobs j"""

# One statement, so that the changes and the rows are of one moment.
_HISTORY = """
    select seq, to_jsonb(at) #>> '{}', txid, pid, actor, op, old, new, statement from vk_jobs_audit
    union all
    select null, null, null, null, null, 'now', null, to_jsonb(j), null from vk_jobs j
    order by seq nulls last"""


def install(conn: Connection) -> None:
    """Record from now on; rows that are there already are taken down as found. ``conn`` is in autocommit."""
    conn.exec_driver_sql(_INSTALL)


@contextmanager
def acting(conn: Connection, actor: Actor) -> Iterator[None]:
    """Mark what the connection's session changes within the block as not of vkjobs."""
    conn.execute(text("select set_config('vkjobs.actor', :actor, false)"), {"actor": actor})
    yield
    conn.execute(text("select set_config('vkjobs.actor', '', false)"))


def history(conn: Connection) -> History:
    """Read what was recorded."""
    changes: list[Change] = []
    rows: list[Row] = []
    last: dict[Id, Row] = {}
    for seq, at, txid, pid, actor, op, old, new, statement in conn.exec_driver_sql(_HISTORY):
        before, after = _row(old), _row(new)
        if op == "now":
            assert after is not None
            rows.append(after)
            continue
        if before is not None and last.get(before["id"]) == before:
            before = last[before["id"]]  # kept once
        if after is not None:
            last[after["id"]] = after
        changes.append(Change(seq, instant(at), actor, op, before, after, statement or "", txid, pid))
    return History(changes, rows)


def _row(found: Row | None) -> Row | None:
    if found is not None:
        for name in _ADDED:
            found.setdefault(name)  # before the migration
        for name in _TIMES:
            if found[name] is not None:
                found[name] = instant(found[name])
    return found


@dataclass
class Summary:
    """What happened, counted; of the changes of vkjobs alone, unless it says otherwise."""

    jobs: int = 0
    """Rows that are there in the end."""
    places: Counter[str] = field(default_factory=Counter)
    """Rows in the end, by place."""
    verbs: Counter[str] = field(default_factory=Counter)
    attempts: Counter[str] = field(default_factory=Counter)
    """Failed attempts by reason: reaped, child died, gave up, raised."""
    claims: Counter[Id] = field(default_factory=Counter)
    settled: Counter[Id] = field(default_factory=Counter)
    """Times that a job was settled; one less than it was claimed while it runs."""
    doubled: list[Id] = field(default_factory=list)
    """Jobs settled once more than they were claimed, an entry for each time."""
    lost: list[Id] = field(default_factory=list)
    """Jobs that vkjobs has deleted, or that no statement will ever move on."""
    unfinished: list[Id] = field(default_factory=list)
    """Jobs that are not over in the end, lost ones apart: they wait or run."""
    lateness: list[float] = field(default_factory=list)
    """Seconds from a job's run_at, or its insertion if that is later, to its start; of each first claim."""


def summary(history: History) -> Summary:
    """Count what happened."""
    told = Summary(jobs=len(history.rows))
    inserted: dict[Id, Instant] = {}
    running: set[Id] = set()
    gone: dict[Id, None] = {}
    for change in history.changes:
        if change.op == "truncate":
            gone |= dict.fromkeys(inserted) if change.actor != "host" else {}
            continue
        id, old, new = change.id, change.old, change.new
        inserted.setdefault(id, change.at)
        if new is None:
            running.discard(id)
            if change.actor != "host":
                gone[id] = None
            continue
        gone.pop(id, None)
        if old is not None and change.actor is None:
            _count(told, change, old, new, inserted[id], open_=id in running)
        (running.add if new["status"] == "running" else running.discard)(id)
    told.lost = list(gone)
    for row in history.rows:
        told.places[place(row)] += 1
        if row["status"] in ("done", "failed", "cancelled"):
            continue
        stuck = row["status"] not in ("pending", "running") or (
            row["status"] == "running" and row["lease_until"] == math.inf
        )
        (told.lost if stuck else told.unfinished).append(row["id"])
    return told


def _count(told: Summary, change: Change, old: Row, new: Row, inserted: Instant, *, open_: bool) -> None:
    verb = verb_of(old, new)
    told.verbs[verb or "illegal"] += 1
    if verb == "claim":
        told.claims[change.id] += 1
        if told.claims[change.id] == 1:
            told.lateness.append((new["started_at"] - max(new["run_at"], inserted)) / SECOND)
    if verb.startswith("settle failed"):
        told.attempts[reason(new)] += 1
    counts = new["status"] in ("done", "failed") or (new["attempts"] or 0) > (old["attempts"] or 0)
    if counts or verb in ("snooze", "give back"):
        told.settled[change.id] += 1
        if not open_:
            told.doubled.append(change.id)


def effects(conn: Connection, table: str, kinds: Sequence[str]) -> list[str]:
    """Return where ``table`` differs from one row a done job, and none for others, a line each.

    The handlers of ``kinds`` insert their job's id as ``job_id`` through their session; nothing makes it unique.
    """
    sql = f"""
        select coalesce(j.id::text, e.id), j.status, coalesce(e.times, 0)
        from (select id, status from vk_jobs where kind = any(:kinds)) j
            full join (select job_id::text as id, count(*) as times from {table} group by 1) e on e.id = j.id::text
        where coalesce(e.times, 0) <> case when j.status::text = 'done' then 1 else 0 end
        order by 1"""
    rows = conn.execute(text(sql.replace("::", "\\:\\:")), {"kinds": list(kinds)})
    return [f"job {id}, {status or 'gone'}: its session's effect is there {times} times" for id, status, times in rows]
