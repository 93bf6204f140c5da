"""The guards in the SQL of vkjobs/ledger.py, in its order."""

from __future__ import annotations

from guards.guard import Guard, guard

# fmt: off

_FILE = "ledger.py"
_MOVES = "test_ledger.py::test_a_statement_makes_its_move_from_its_places_alone"
_STALE = "test_ledger.py::test_a_stale_token_moves_nothing_from_any_place"
_NAMED = "test_ledger.py::test_another_name_moves_nothing_from_any_place"
_PROPOSED = (
    "test_ledger.py::test_until_a_renewal_is_answered_the_old_and_the_proposed_token_are_good_and_no_third"
)
_FINDS = "test_ledger_lease.py::test_a_statement_finds_the_rows_of_its_places_alone"
_QUEUE = "test_ledger_lease.py::test_each_kind_belongs_to_one_queue_known_or_not"
_LOCKED = "test_ledger_lease.py::test_rows_that_somebody_has_locked_are_passed_over_and_found_later"
_BOUNDED = "test_ledger_lease.py::test_housekeeping_moves_a_bounded_number_at_once_and_the_rest_the_next_time"
_COST = "test_ledger_cost.py::test_a_statement_reads_its_own_index_and_no_more_rows_than_it_needs"
_NOT_READ = "test_ledger_cost.py::test_what_is_neither_due_nor_expired_is_not_read"
_CLAIM_LOCKED = "test_ledger_races.py::test_a_claim_of_many_passes_over_what_is_locked_and_not_due"
_SETTLE_LOCKED = "test_execute_outages.py::test_a_settling_waits_for_a_locked_row_only_briefly_at_a_time"
_COMMITS = "test_ledger_cost.py::test_what_settles_is_durable_and_what_leases_need_not_be"
_NO_SUCH_TIME = "test_ledger_values.py::test_times_that_python_does_not_have_keep_nobody_else_from_being_leased"
_NO_SUCH_LEASE = "test_ledger_values.py::test_a_lease_that_python_does_not_have_is_given_up_beside_others"

GUARDS: tuple[Guard, ...] = (
    # The fence: what every statement says of the row that it wants to change.
    guard(
        "settle done names the token", 2, _FILE,
        'clock_timestamp() where {_HELD}"""', 'clock_timestamp() where id = :id and {_RUNNING}"""',
        _STALE, "test_ledger_races.py::test_a_renewal_in_flight_cannot_take_a_row_back_that_was_leased_to_another",
    ),
    guard(
        "settle failed names the token", 2, _FILE,
        "_fail(failure) + _HELD", '_fail(failure) + f"id = :id and {_RUNNING}"',
        _STALE, "test_execute.py::test_a_worker_that_lost_its_lease_changes_nothing_and_says_so_once",
    ),
    guard(
        "snooze names the token", 2, _FILE,
        "run_at = {moment} where {_HELD}", "run_at = {moment} where id = :id and {_RUNNING}", _STALE,
    ),
    guard(
        "a settling is of a running row", 2, _FILE,
        "id = :id and {_RUNNING} and lease_until in", "id = :id and lease_until in", _MOVES,
    ),
    guard(
        "a settling accepts the token of a renewal whose answer was lost", 4, _FILE,
        "lease_until in (:token, :proposed)", "lease_until = :token", _PROPOSED,
    ),
    guard(
        "claim names the token", 8, _FILE,
        "j.{_LEASED_BY} :token and j.run_at", "j.{_PENDING} and j.run_at",
        _STALE, "test_tasks.py::test_a_late_message_of_an_earlier_lease_changes_nothing",
    ),
    guard(
        "claim is of a pending row", 2, _FILE,
        "f\"{_PENDING} and coalesce(j.lease_until, 'infinity') =\"", "\"coalesce(j.lease_until, 'infinity') =\"",
        _MOVES,
    ),
    guard(
        "the look at an early job names the token", 8, _FILE,
        'from {TABLE} j where j.id = :id and j.{_LEASED_BY} :token"""', 'from {TABLE} j where j.id = :id"""', _STALE,
    ),
    guard(
        "release names the token", 8, _FILE,
        "j.{_LEASED_BY} given.lease_until\n", "j.{_PENDING}\n", _STALE,
    ),
    guard(
        "renew names the token", 2, _FILE,
        " and j.lease_until in (given.lease_until, given.claimed_until)", "", _STALE,
    ),
    guard(
        "renew is of a running row", 2, _FILE,
        "{_IS_GIVEN} and j.{_RUNNING} and j.lease_until in", "{_IS_GIVEN} and j.lease_until in", _MOVES,
    ),
    guard(
        "renew accepts the token of a renewal whose answer was lost", 4, _FILE,
        "j.lease_until in (given.lease_until, given.claimed_until)", "j.lease_until = given.lease_until",
        "test_ledger.py::test_a_renewal_whose_answer_was_lost_is_made_again",
    ),
    guard(
        "settle for a dead child names that very child", 2, _FILE,
        'claimed_by = :by and claimed_until = lease_until"\n', 'claimed_until = lease_until"\n', _NAMED,
    ),
    guard(
        "settle for a dead child is of a row of ours", 2, _FILE,
        'claimed_by = :by and claimed_until = lease_until"\n', 'claimed_by = :by"\n', _MOVES,
    ),
    guard(
        "settle for a dead child is of a running row", 2, _FILE,
        'f"id = :id and {_RUNNING} and claimed_by', 'f"id = :id and claimed_by', _MOVES,
    ),
    guard(
        "a claim is found again by who made it", 2, _FILE,
        "j.id = :id and j.{_RUNNING} and j.claimed_by = :by and", "j.id = :id and j.{_RUNNING} and", _NAMED,
    ),
    guard(
        "a claim is found again only while it is ours", 2, _FILE,
        "j.id = :id and j.{_RUNNING} and j.claimed_by = :by and j.claimed_until = j.lease_until",
        "j.id = :id and j.{_RUNNING} and j.claimed_by = :by", _MOVES,
    ),
    guard(
        "a settling is found again by who made it", 3, _FILE,
        "' and claimed_by = :by from", "' from", _NAMED,
    ),
    guard(
        "the look for a settling waits for a commit that is under way", 3, _FILE,
        "where id = :id for share", "where id = :id",
        "test_execute_outages.py::test_a_commit_that_is_still_under_way_when_the_connection_breaks_is_waited_for",
    ),
    guard(
        "cancel is of a pending row", 2, _FILE,
        'where id = :id and {_PENDING}"""', 'where id = :id"""',
        "test_ledger.py::test_a_statement_makes_its_move_from_its_places_alone",
    ),
    guard(
        "reschedule is of a pending row", 2, _FILE,
        'where id = :id and {_PENDING}"\n', 'where id = :id"\n', _MOVES,
    ),
    guard(
        "reschedule takes the token from the message under way", 8, _FILE,
        "{_MADE_FREE}, run_at = :run_at", "run_at = :run_at", _MOVES,
    ),
    guard(
        "retry is of a failed or cancelled row", 2, _FILE,
        "where id = :id and status in (", "where id = :id and '' not in (", _MOVES,
    ),
    # The same of many rows at once.
    guard(
        "claim all names the tokens", 8, _FILE,
        "j.{_LEASED_BY} given.lease_until and j.run_at", "j.{_PENDING} and j.run_at", _STALE,
    ),
    guard(
        "claim all looks whether the jobs are due", 5, _FILE,
        "given.lease_until and j.run_at <= clock.now", "given.lease_until", _CLAIM_LOCKED,
    ),
    guard(
        "claim all writes new tokens", 2, _FILE,
        "lease_until = {_FRESH}, claimed_until = {_FRESH}\n    from clock\n    where j.id = any",
        "claimed_until = j.lease_until\n    from clock\n    where j.id = any", _MOVES,
    ),
    guard(
        "claim all passes over what is locked", 6, _FILE,
        "j.run_at <= clock.now\n        for no key update of j skip locked",
        "j.run_at <= clock.now\n        for no key update of j", _CLAIM_LOCKED,
    ),
    guard(
        "claims are found again by who made them", 2, _FILE,
        "{_IS_GIVEN} and j.{_RUNNING} and j.claimed_by = :by and", "{_IS_GIVEN} and j.{_RUNNING} and", _NAMED,
    ),
    guard(
        "settle all done names the tokens", 2, _FILE,
        "select j.id from {TABLE} j, given where {_STILL_HELD} for no key update of j {locked}",
        "select j.id from {TABLE} j, given where {_IS_GIVEN} and j.{_RUNNING} for no key update of j {locked}", _STALE,
    ),
    guard(
        "settle all done is durable", 1, _FILE,
        "_SETTLE_UNLOCKED_DONE, _DURABLE", "_SETTLE_UNLOCKED_DONE, _CHEAP", _COMMITS,
    ),
    guard(
        "settlings are found again by who made them", 3, _FILE,
        "select id from asked where status = '{Status.DONE}' and claimed_by = :by",
        "select id from asked where status = '{Status.DONE}' and cast(:by as text) is not null", _NAMED,
    ),
    guard(
        "what is given back is of that very child", 2, _FILE,
        "claimed_by = :by and claimed_until = lease_until\n",
        "claimed_until = lease_until and cast(:by as text) is not null\n", _NAMED,
    ),
    guard(
        "what is given back is ours", 2, _FILE,
        "claimed_by = :by and claimed_until = lease_until\n", "claimed_by = :by\n", _MOVES,
    ),
    # A new token each time.
    guard(
        "claim writes a new token", 2, _FILE,
        "lease_until = {_FRESH}, claimed_until = {_FRESH}\n    from clock\n    where j.id = :id",
        "claimed_until = j.lease_until\n    from clock\n    where j.id = :id",
        _MOVES, "test_audit.py::test_the_ledgers_own_changes_are_accepted_whatever_way_a_job_goes",
    ),
    guard(
        "a new token differs from the one found even if the clock was set back", 2, _FILE,
        "interval '1 microsecond' else", "interval '0' else",
        "test_ledger_values.py::test_a_new_token_differs_from_the_one_found_even_if_the_clock_was_set_back",
    ),
    guard(
        "lease clears the claim of an earlier execution", 2, _FILE,
        "lease_until = {_FRESH}, {_NO_CLAIM}, updated_at", "lease_until = {_FRESH}, updated_at", _FINDS,
    ),
    guard(
        "what makes a row free clears its claim", 2, _FILE,
        "lease_until = null, {_NO_CLAIM}, updated_at", "lease_until = null, updated_at", _MOVES,
    ),
    guard(
        "a token keeps its microseconds", 2, _FILE,
        "token.astimezone(UTC).isoformat()", 'token.astimezone(UTC).isoformat(timespec="milliseconds")',
        "test_ledger.py::test_a_token_keeps_its_microseconds_in_any_zone",
        "test_tasks.py::test_a_job_whose_message_comes_twice_runs_once",
    ),
    # When.
    guard(
        "claim looks whether the job is due", 5, _FILE,
        ":token and j.run_at <= clock.now", ":token",
        "test_ledger_values.py::test_a_claim_is_never_early_by_a_microsecond",
        "test_execute.py::test_a_job_that_is_due_within_a_second_is_waited_for_and_never_early",
        "test_execute.py::test_a_job_that_was_moved_to_later_is_freed_for_its_time",
    ),
    guard(
        "lease takes what is due within the horizon", 7, _FILE,
        " and {_DUE_SOON}\n            order by j.run_at", "\n            order by j.run_at",
        _FINDS, "test_ledger_values.py::test_a_lease_takes_what_is_due_within_the_horizon_and_not_a_microsecond_more",
    ),
    guard(
        "lease again takes what is due within the horizon", 7, _FILE,
        "{_IN_QUEUE} and {_DUE_SOON}\n", "{_IN_QUEUE}\n", _FINDS,
    ),
    guard(
        "lease again is of an expired lease", 10, _FILE,
        "{_EXPIRED} and {_IN_QUEUE}", "{_IN_QUEUE}", _FINDS,
        "test_ledger_lease.py::test_an_expired_lease_is_given_again_once_however_many_ask",
    ),
    guard(
        "free again is of an expired lease", 2, _FILE,
        "{_EXPIRED} and not {_DUE_SOON}", "not {_DUE_SOON}", _FINDS,
    ),
    guard(
        "free again leaves what is due to lease again", 5, _FILE,
        " and not {_DUE_SOON}", "", _FINDS,
    ),
    guard(
        "a lease further off than any that is given counts as expired", 1, _FILE,
        "or lease_until > statement_timestamp() + make_interval(secs => :lease + 60))",
        "or :lease < 0)", _FINDS,
    ),
    guard(
        "take over is of a row that is not ours", 2, _FILE,
        "or claimed_until is distinct from lease_until\n                and lease_until <", "or lease_until <", _FINDS,
    ),
    guard(
        "take over leaves the original its time of grace", 2, _FILE,
        "lease_until < statement_timestamp() - make_interval(secs => :grace))", ":grace >= 0)",
        _FINDS, "test_ledger_lease.py::test_a_foreign_job_is_taken_over_when_its_grace_has_passed",
    ),
    guard(
        "take over finds a running row without a lease", 1, _FILE,
        "{_RUNNING} and (lease_until is null or", "{_RUNNING} and (", _FINDS,
    ),
    guard(
        "take over finds a lease of a time that Python does not have", 1, _FILE,
        "or lease_until < {_FIRST_DAY}\n", "\n", _NO_SUCH_LEASE,
    ),
    guard(
        "lost is of a row of ours", 2, _FILE,
        "{_RUNNING} and claimed_until = lease_until\n", "{_RUNNING}\n", _FINDS,
    ),
    guard(
        "lost is of an expired lease", 2, _FILE,
        " and lease_until < statement_timestamp()\n            and pg_", "\n            and pg_", _FINDS,
    ),
    guard(
        "nobody is lost until Postgres has been up for a lease", 4, _FILE,
        "pg_postmaster_start_time() + make_interval(secs => :lease) <",
        "pg_postmaster_start_time() + :lease * interval '0' <",
        "test_ledger_lease.py::test_nobody_is_lost_until_postgres_has_been_up_for_a_lease",
    ),
    guard(
        "lost leaves alone a lease of a time that Python does not have", 6, _FILE,
        "lease_until >= {_FIRST_DAY} and lease_until < statement", "lease_until < statement", _NO_SUCH_LEASE,
    ),
    guard(
        "a time before all years is told as one that Python has", 6, _FILE,
        'f"greatest(j.run_at, {_FIRST_DAY}) as run_at"', '"j.run_at"',
        _NO_SUCH_TIME, "test_execute.py::test_a_job_that_was_due_before_all_years_runs",
    ),
    # How many, and whose.
    guard(
        "lease counts the messages of the queue", 7, _FILE,
        "least(:batch, :window - (", "least(:batch, :window - 0 * (",
        "test_ledger_lease.py::test_a_lease_takes_a_batch_and_no_more_than_the_window_has_room_for",
        "test_dispatch.py::test_a_queue_never_holds_more_than_its_window",
    ),
    guard(
        "lease takes no more than a batch", 7, _FILE,
        "least(:batch, :window - (", "least(:batch + :window, :window - (",
        "test_ledger_lease.py::test_a_lease_takes_a_batch_and_no_more_than_the_window_has_room_for",
    ),
    guard(
        "lease takes the oldest of all kinds", 6, _FILE,
        "order by due.run_at limit", "limit",
        "test_ledger_lease.py::test_the_oldest_are_leased_first_whatever_their_kinds",
    ),
    guard(
        "lease takes the oldest of a kind", 6, _FILE,
        "order by j.run_at limit", "limit",
        "test_ledger_lease.py::test_the_oldest_are_leased_first_whatever_their_kinds",
    ),
    guard(
        "lease is of one queue's kinds", 6, _FILE,
        " and (found.kind = any(cast(:kinds as text[]))) = :listed", "",
        "test_ledger_lease.py::test_a_backlog_of_another_queue_takes_no_place_in_the_batch",
    ),
    guard(
        "the window is counted for one queue", 6, _FILE,
        " and {_IN_QUEUE} limit", " limit",
        "test_ledger_lease.py::test_the_window_is_counted_per_queue",
    ),
    guard(
        "lease again is of one queue's kinds", 6, _FILE,
        "{_EXPIRED} and {_IN_QUEUE} and", "{_EXPIRED} and", _QUEUE,
    ),
    guard(
        "lease again takes no more than there is room for", 7, _FILE,
        "order by lease_until limit :room", "order by lease_until",
        "test_ledger_lease.py::test_no_more_are_leased_again_than_there_is_room",
    ),
    guard(
        "one run leases at a time", 10, _FILE,
        "select pg_advisory_xact_lock({_ADVISORY_LOCK}); ", "",
        "test_ledger_lease.py::test_a_lease_waits_for_one_that_is_not_over_yet_and_counts_what_it_took",
    ),
    guard(
        "free again takes a bounded number at once", 9, _FILE,
        "not {_DUE_SOON}\n            limit {_SCAN_LIMIT}", "not {_DUE_SOON}\n           ", _BOUNDED,
    ),
    guard(
        "take over takes a bounded number at once", 9, _FILE,
        "make_interval(secs => :grace))\n            limit {_SCAN_LIMIT}",
        "make_interval(secs => :grace))\n           ", _BOUNDED,
    ),
    # Nobody waits for anybody.
    guard(
        "lease passes over what is locked", 6, _FILE,
        "limit (select n from room)\n            for no key update skip locked",
        "limit (select n from room)\n            for no key update", _LOCKED,
    ),
    guard(
        "lease again passes over what is locked", 6, _FILE,
        "limit :room\n        for no key update skip locked", "limit :room\n        for no key update", _LOCKED,
    ),
    guard(
        "free again passes over what is locked", 6, _FILE,
        "not {_DUE_SOON}\n            limit {_SCAN_LIMIT} for no key update skip locked",
        "not {_DUE_SOON}\n            limit {_SCAN_LIMIT} for no key update", _LOCKED,
    ),
    guard(
        "take over passes over what is locked", 6, _FILE,
        ":grace))\n            limit {_SCAN_LIMIT} for no key update skip locked",
        ":grace))\n            limit {_SCAN_LIMIT} for no key update", _LOCKED,
    ),
    guard(
        "lost passes over what is locked", 6, _FILE,
        "order by lease_until limit {_SCAN_LIMIT}\n        for no key update skip locked",
        "order by lease_until limit {_SCAN_LIMIT}\n        for no key update",
        "test_ledger_races.py::test_a_lost_row_that_somebody_has_locked_is_told_of_later",
    ),
    guard(
        "renew passes over what is locked", 6, _FILE,
        "where {_STILL_HELD}\n            for no key update of j skip locked",
        "where {_STILL_HELD}\n            for no key update of j",
        "test_ledger_races.py::test_a_renewal_waits_for_nobody_and_tells_the_locked_from_the_lost",
        "test_heartbeat.py::test_a_locked_row_is_not_lost_and_keeps_no_other_from_its_renewal",
    ),
    guard(
        "release passes over what is locked", 6, _FILE,
        "given.lease_until\n            for no key update of j skip locked",
        "given.lease_until\n            for no key update of j",
        "test_ledger_races.py::test_a_release_waits_for_nobody_and_leaves_the_locked_to_their_lease",
    ),
    guard(
        "lease takes rows that others refer to by foreign key", 6, _FILE,
        "limit (select n from room)\n            for no key update",
        "limit (select n from room)\n            for update",
        "test_ledger_lease.py::test_a_row_that_somebody_refers_to_by_foreign_key_is_leased_all_the_same",
    ),
    guard(
        "claim waits for a locked row only briefly", 6, _FILE,
        "_CLAIM, _CHEAP + _BRIEFLY", "_CLAIM, _CHEAP",
        "test_ledger_races.py::test_a_claim_does_not_wait_for_long_for_a_row_that_somebody_has_locked",
    ),
    guard(
        "settle done waits for a locked row only briefly at a time", 6, _FILE,
        "_DURABLE + _BRIEFLY, values)\n    return touched", "_DURABLE, values)\n    return touched", _SETTLE_LOCKED,
    ),
    guard(
        "settle failed waits for a locked row only briefly at a time", 6, _FILE,
        "_fail(failure) + _HELD, briefly=True", "_fail(failure) + _HELD", _SETTLE_LOCKED,
    ),
    guard(
        "lease waits for another run only for a while", 10, _FILE,
        "set local lock_timeout = '5s'; ", "",
        "test_ledger_lease.py::test_a_lease_does_not_wait_for_ever_for_one_that_hangs",
    ),
    # What it costs.
    guard(
        "what is due is found by a time that bounds an index", 9, _FILE,
        "run_at <= statement_timestamp() +", "run_at <= clock_timestamp() +", _NOT_READ,
    ),
    guard(
        "what has expired is found by a time that bounds an index", 9, _FILE,
        "(lease_until < statement_timestamp()\n", "(lease_until < clock_timestamp()\n", _NOT_READ,
    ),
    guard(
        "lost finds by a time that bounds an index", 9, _FILE,
        "and lease_until < statement_timestamp()\n            and pg_",
        "and lease_until < clock_timestamp()\n            and pg_", _NOT_READ,
    ),
    guard(
        "lease reads no more of a kind than it takes", 9, _FILE,
        "order by j.run_at limit (select n from room)\n", "order by j.run_at\n", _COST,
    ),
    guard(
        "lease counts no further than the window", 9, _FILE,
        "{_IN_QUEUE} limit :window", "{_IN_QUEUE}", _NOT_READ,
    ),
    guard(
        "a leased row is found by its id, not by its lease", 9, _FILE,
        "coalesce(j.lease_until, 'infinity') =", "j.lease_until =", _COST,
    ),
    guard(
        "what was leased is found by primary key", 9, _FILE,
        "from clock where j.id = any(array(select id from taken))", "from clock, taken where j.id = taken.id", _COST,
    ),
    guard(
        "what is given is found by primary key", 9, _FILE,
        "j.id = any(array(select id from given)) and ", "", _COST,
    ),
    guard(
        "a plan that is kept is one for a full table", 9, _FILE,
        "lead + _BY_KEY, values", "lead, values",
        "test_ledger_cost.py::test_a_plan_that_was_kept_when_the_table_was_empty_reads_no_more_when_it_is_full",
    ),
    # What is deleted.
    guard(
        "prune deletes what is done alone", 1, _FILE,
        "where {where} and status = '{Status.DONE}'\n            and updated_at", "where {where} and updated_at",
        "test_ledger_prune.py::test_only_what_has_long_been_done_is_deleted",
    ),
    guard(
        "prune keeps what is young", 1, _FILE,
        "- make_interval(secs => :keep)", "+ make_interval(secs => :keep)",
        "test_ledger_prune.py::test_only_what_has_long_been_done_is_deleted",
    ),
    guard(
        "prune reads a stretch of the table alone", 9, _FILE,
        "{_old(_IN_STRETCH)} {_DELETE}", "{_old('true')} {_DELETE}",
        "test_ledger_cost.py::test_a_prune_reads_its_stretch_of_the_table_and_no_more",
    ),
    guard(
        "prune passes over what is locked", 6, _FILE,
        "{order} limit {_SCAN_LIMIT} for update skip locked", "{order} limit {_SCAN_LIMIT} for update",
        "test_ledger_prune.py::test_rows_that_somebody_has_locked_are_passed_over_and_found_later",
    ),
    guard(
        "prune does not wait for what a cascade meets", 6, _FILE,
        "_BRIEFLY + _PRUNE, durable", "_PRUNE, durable",
        "test_ledger_prune.py::test_a_lock_behind_a_cascade_is_not_waited_for",
    ),
    guard(
        "rows that refuse to be deleted stand before no others", 6, _FILE,
        "'order by random()'", "'order by id'",
        "test_ledger_prune.py::test_many_that_are_kept_are_tried_in_another_order_each_time",
    ),
    # How it commits.
    guard(
        "a settling is durable", 1, _FILE,
        "durable: bool = True", "durable: bool = False", _COMMITS,
    ),
    guard(
        "settle done is durable", 1, _FILE,
        "_SETTLE_DONE, _DURABLE +", "_SETTLE_DONE, _CHEAP +", _COMMITS,
    ),
    guard(
        "a statement is read committed whatever the database's default", 2, _FILE,
        '"set transaction isolation level read committed; "', '""',
        "test_ledger_races.py::test_of_two_that_reach_for_a_row_the_first_wins_and_the_second_waits_and_changes_nothing",
    ),
    # Any number of attempts.
    guard(
        "attempts never overflow", 6, _FILE,
        "else 2147483646 end", "else 2147483647 end",
        "test_ledger_values.py::test_attempts_count_on_from_any_number_and_never_overflow",
    ),
    guard(
        "attempts of an adopted table never overflow", 6, _FILE,
        "then 32766 else", "then 2147483646 else",
        "test_ledger_values.py::test_attempts_that_an_adopted_table_counts_in_a_smallint_never_overflow",
    ),
    guard(
        "attempts count on from none", 4, _FILE,
        "least(coalesce(attempts, 0),", "least(attempts,",
        "test_ledger_values.py::test_attempts_count_on_from_any_number_and_never_overflow",
    ),
    guard(
        "an id of any type can be in a message", 1, _FILE,
        "str(row[0]) if isinstance(row[0], UUID) else row[0]", "row[0]",
        "test_ledger_values.py::test_each_statement_works_on_an_adopted_table",
    ),
)
