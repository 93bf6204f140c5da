"""The guards in what carries many jobs in one message: how they are parted, claimed, run, settled and given back."""

from __future__ import annotations

from guards.guard import Guard, guard

# fmt: off

_BULK = "test_bulk.py"
_DISPATCH = "test_dispatch_bulk.py"
_STEWARD = "test_steward.py"
_ENDS = f"{_BULK}::test_one_that_ends_in_another_way_leaves_the_others_done"
_REFUSED = f"{_BULK}::test_a_trigger_that_refuses_any_end_of_one_keeps_no_other_from_it"
_NOT_CLAIMED = f"{_BULK}::test_rows_that_cannot_be_claimed_keep_no_other_from_it"
_LOST_IN_LIST = f"{_BULK}::test_one_lost_lease_takes_the_writes_of_a_list_and_costs_the_others_nothing"
_LOCKED_AT_LAST = f"{_BULK}::test_a_row_that_is_locked_when_it_is_settled_is_settled_last"
_NO_PAYLOAD = f"{_BULK}::test_a_payload_that_cannot_be_decoded_leaves_its_job_out_of_the_list"
_DEAD_CHILD = f"{_STEWARD}::test_of_many_jobs_the_one_that_its_child_was_at_is_settled_and_the_others_are_free"
_TABLE_LOCKED = f"{_BULK}::test_a_locked_table_is_waited_for_only_briefly"
_ASKED = (
    "if not self._single.insist(lambda conn: ledger.all_settled_done(conn, held, by=self._by)):\n                raise"
)
_WRONG = f"{_BULK}::test_what_a_list_handler_may_not_return_fails_all_with_a_word"

GUARDS: tuple[Guard, ...] = (
    # bulk.py
    guard(
        "where a process is counts for that process alone", 4, "bulk.py",
        "return owner == pid and at in", "return at in",
        f"{_STEWARD}::test_where_another_child_was_is_not_taken_for_where_this_one_was",
    ),
    guard(
        "a list was executed as a whole", 4, "bulk.py",
        "at in (number, ALL)", "at == number",
        f"{_STEWARD}::test_of_a_list_each_job_that_was_claimed_was_executed",
    ),
    guard(
        "a process says at which job it is", 4, "bulk.py",
        "position.set(self._number(run.claim))", "pass",
        f"{_BULK}::test_where_a_process_is_shows_from_outside",
        "system/test_bulk_workers.py::test_of_a_child_that_was_killed_the_job_that_it_was_at_has_an_attempt_and_no_other",
    ),
    guard(
        "a process says that it is at no job any more", 4, "bulk.py",
        "finally:\n            position.set(NONE)", "finally:\n            pass",
        f"{_BULK}::test_where_a_process_is_shows_from_outside",
    ),
    guard(
        "a process says that it is at a list", 4, "bulk.py",
        "position.set(ALL)", "pass",
        f"{_BULK}::test_where_a_process_is_shows_from_outside",
    ),
    guard(
        "a process says at which single job of a message it is", 4, "bulk.py",
        "position.set(self._numbers[str(id)])", "pass",
        f"{_BULK}::test_where_a_process_is_shows_from_outside",
    ),
    guard(
        "an id that is written in another way starts nothing twice", 8, "bulk.py",
        "self._numbers.get(str(claim.id), NONE)", "self._numbers[str(claim.id)]",
        f"{_BULK}::test_an_id_that_is_repeated_or_written_in_another_way_is_run_once",
    ),
    guard(
        "a claim of many whose answer was lost is looked for", 4, "bulk.py",
        "recall=lambda conn: ledger.claimed_all(conn, free, by=self._by) or None,", "",
        f"{_BULK}::test_a_claim_of_many_that_is_cut_off_starts_each_once",
    ),
    guard(
        "many jobs are not claimed for ever", 6, "bulk.py",
        "or None,\n                patience=self._single.settings.lease,", "or None,",
        f"{_BULK}::test_many_jobs_are_not_started_without_postgres_and_their_message_ends_in_one_line",
    ),
    guard(
        "an id that is none keeps no other from its claim", 8, "bulk.py",
        "except (DataError, ValueError):", "except ZeroDivisionError:",
        f"{_BULK}::test_an_id_that_is_none_keeps_no_other_from_its_claim",
    ),
    guard(
        "what could not be claimed with the others is tried alone", 6, "bulk.py",
        "self._run_singly([lease for", "len([lease for", _NOT_CLAIMED,
        f"{_BULK}::test_a_locked_row_is_claimed_when_its_lock_goes_soon",
    ),
    guard(
        "a row that is locked for long keeps no other of its message from its start", 6, "bulk.py",
        "if time.monotonic() - began > self._single.settings.lease:\n", "if True:\n", _NOT_CLAIMED,
    ),
    guard(
        "what waits for Postgres in vain ends when its leases have expired", 6, "bulk.py",
        "if time.monotonic() - began > self._single.settings.lease:\n", "if False:\n",
        f"{_BULK}::test_one_that_waits_for_postgres_in_vain_ends_the_message_when_the_leases_have_expired",
    ),
    guard(
        "what has lost its lease before its turn is not started", 2, "bulk.py",
        "if run.holding.lost:\n", "if False:\n",
        f"{_BULK}::test_one_that_has_lost_its_lease_before_its_turn_is_not_started",
    ),
    guard(
        "whatever a handler raises ends its own job alone", 6, "bulk.py",
        "except BaseException as error:  # noqa: BLE001 - SystemExit too", "except KeyError as error:  #", _ENDS,
    ),
    guard(
        "writes are committed with the settling of their own job", 3, "bulk.py",
        "if ended_by is None and not run.context.used_session:", "if ended_by is None:", _ENDS,
    ),
    guard(
        "a payload that cannot be decoded fails its own job alone", 6, "bulk.py",
        "jobs.append(job_of(run.claim))\n            except Exception",
        "jobs.append(job_of(run.claim))\n            except KeyError", _NO_PAYLOAD,
    ),
    guard(
        "the settling of a list is one with its writes", 3, "bulk.py",
        "if done and context.used_session:", "if False:",
        f"{_BULK}::test_the_writes_of_a_list_and_its_settling_are_one_transaction",
    ),
    guard(
        "one lost lease undoes the writes of a list", 3, "bulk.py",
        "settle_all_done(conn, held)) == len(held))", "settle_all_done(conn, held)) > 0)", _LOST_IN_LIST,
    ),
    guard(
        "the commit of a list whose answer was lost is asked for", 4, "bulk.py",
        _ASKED,
        "raise",
        f"{_BULK}::test_a_commit_of_writes_whose_answer_is_lost_is_asked_again",
    ),
    guard(
        "a list that was not committed is no list that is done", 3, "bulk.py",
        _ASKED,
        "",
        f"{_BULK}::test_a_list_whose_session_is_cut_off_fails_as_a_whole_without_effects",
    ),
    guard(
        "what cannot be settled keeps no other from its settling", 6, "bulk.py",
        "except Exception as error:  # noqa: BLE001 - the others are to go on", "except KeyError as error:",
        _REFUSED,
    ),
    guard(
        "what cannot be settled is told", 6, "bulk.py",
        "self._errors.append(error)\n        finally:", "\n        finally:", _REFUSED,
    ),
    guard(
        "what is done is settled while others run", 5, "bulk.py",
        "time.sleep(_SETTLE_EVERY_S)", "time.sleep(3600)",
        f"{_BULK}::test_what_is_done_is_settled_while_others_still_run",
    ),
    guard(
        "what is done is settled without a thread too", 1, "bulk.py",
        "with suppress(RuntimeError):", "with suppress(KeyError):",
        f"{_BULK}::test_without_a_thread_all_is_settled_in_the_end",
    ),
    guard(
        "a settling of many whose answer was lost is looked for", 4, "bulk.py",
        "recall=lambda conn: ledger.all_settled_done(conn, held, by=self._by) or None,", "",
        f"{_BULK}::test_a_settling_of_many_that_is_cut_off_is_made_again_or_found_done",
    ),
    guard(
        "what a trigger refuses to be done is settled alone", 6, "bulk.py",
        "except Exception:  # noqa: BLE001\n            self", "except KeyError:  # noqa: BLE001\n            self",
        f"{_BULK}::test_a_trigger_that_refuses_that_one_is_done_fails_that_one",
    ),
    guard(
        "a locked row is no lost lease", 1, "bulk.py",
        "locked = [run for run in left if run.claim.id in still]", "locked = []", _LOCKED_AT_LAST,
    ),
    guard(
        "what waits for a lock is renewed", 2, "bulk.py",
        "self._single.heartbeat.resume(*(run.holding for run in locked))", "pass",
        f"{_BULK}::test_what_waits_for_its_lock_keeps_its_lease",
    ),
    # handlers.py
    guard(
        "a list handler ends no job that it was not given", 6, "handlers.py",
        "all(id in ids and isinstance", "all(isinstance", _WRONG,
    ),
    guard(
        "what ends a job of a list is an exception", 6, "handlers.py",
        "id in ids and isinstance(error, BaseException) for", "id in ids for", _WRONG,
    ),
    # ledger.py
    guard(
        "settle all done waits for no locked row where it is alone", 6, "ledger.py",
        '_settle_all_done("skip locked")', '_settle_all_done("")',
        "test_ledger_races.py::test_a_settling_of_many_passes_over_what_is_locked_alone_and_waits_for_it_in_a_transaction",
        _LOCKED_AT_LAST,
    ),
    guard(
        "settle all done waits for locked rows in a transaction", 3, "ledger.py",
        '_settle_all_done("")', '_settle_all_done("skip locked")',
        "test_ledger_races.py::test_a_settling_of_many_passes_over_what_is_locked_alone_and_waits_for_it_in_a_transaction",
    ),
    guard(
        "a question of many waits for a commit that is under way", 4, "ledger.py",
        "where {_IS_GIVEN} for share of j", "where {_IS_GIVEN}",
        "test_ledger_races.py::test_a_question_of_many_waits_for_a_commit_that_is_under_way",
        f"{_BULK}::test_a_commit_of_many_that_is_still_under_way_when_the_connection_breaks_is_waited_for",
    ),
    guard(
        "what a reaper gives back has not been renewed since", 2, "ledger.py",
        "and lease_until = coalesce(:token, lease_until)", "and coalesce(:token, lease_until) is not null",
        f"{_DISPATCH}::test_a_job_that_is_renewed_after_all_is_not_put_back",
        "test_ledger.py::test_a_stale_token_moves_nothing_from_any_place",
    ),
    guard(
        "who has failed is a suspect", 4, "ledger.py",
        "(coalesce(attempts, 0) > 0 or last_error is not null)", "(last_error is not null)",
        "test_ledger.py::test_a_job_is_a_suspect_once_it_has_failed_or_its_worker_was_lost",
    ),
    guard(
        "whose worker was lost is a suspect", 4, "ledger.py",
        "(coalesce(attempts, 0) > 0 or last_error is not null)", "(coalesce(attempts, 0) > 0)",
        "test_ledger.py::test_a_job_is_a_suspect_once_it_has_failed_or_its_worker_was_lost",
        f"{_DISPATCH}::test_the_jobs_of_a_worker_that_died_are_tried_alone_before_an_attempt_counts",
    ),
    # dispatch.py
    guard(
        "of a message whose worker died no attempt counts", 4, "dispatch.py",
        "(handler.policy.bulk or 1) > 1 and not job.suspect", "False",
        f"{_DISPATCH}::test_the_jobs_of_a_worker_that_died_are_tried_alone_before_an_attempt_counts",
    ),
    guard(
        "a suspect whose worker died has had an attempt", 4, "dispatch.py",
        "(handler.policy.bulk or 1) > 1 and not job.suspect", "(handler.policy.bulk or 1) > 1",
        f"{_DISPATCH}::test_the_jobs_of_a_worker_that_died_are_tried_alone_before_an_attempt_counts",
    ),
    guard(
        "of a kind without bulk an attempt counts at once", 4, "dispatch.py",
        "(handler.policy.bulk or 1) > 1 and not job.suspect", "not job.suspect",
        f"{_DISPATCH}::test_of_a_kind_without_bulk_an_attempt_counts_at_once",
    ),
    guard(
        "a suspect travels alone", 6, "dispatch.py",
        "return together and not one.suspect and not other.suspect", "return together",
        f"{_DISPATCH}::test_a_suspect_travels_alone",
    ),
    guard(
        "jobs of different tokens share no message", 2, "dispatch.py",
        "(one.token, self._eta(one)) == (other.token, self._eta(other))", "self._eta(one) == self._eta(other)",
        f"{_DISPATCH}::test_leases_of_different_tokens_share_no_message",
    ),
    guard(
        "jobs of different times share no message", 5, "dispatch.py",
        "(one.token, self._eta(one)) == (other.token, self._eta(other))", "one.token == other.token",
        f"{_DISPATCH}::test_jobs_of_the_same_moment_to_come_share_a_message_and_no_others",
    ),
    guard(
        "a message carries no more jobs than the kind's bulk", 7, "dispatch.py",
        "len(part) < lane.bulk and ", "",
        f"{_DISPATCH}::test_one_message_carries_as_many_jobs_as_the_kinds_bulk",
    ),
    guard(
        "a baton of a bulk kind fetches for it alone", 8, "dispatch.py",
        "and (lane.bulk == 1 or list(lane.kinds) == baton.kinds)", "",
        f"{_DISPATCH}::test_a_baton_fetches_for_its_own_lane_alone",
    ),
    guard(
        "the window of a bulk kind is bounded", 7, "dispatch.py",
        "return settings.window * self.bulk", "return 1_000_000",
        f"{_DISPATCH}::test_the_window_of_a_bulk_kind_is_of_messages",
    ),
    # what somebody has locked
    guard(
        "a job that somebody has locked is tried again before its lease ends", 6, "tasks.py",
        "if self.request.is_eager or not _send_again(self, {**jobs, \"token\": token}):", "if True:",
        "field/test_field_workers.py::test_a_table_that_somebody_locks_is_waited_for_and_costs_nothing",
    ),
    guard(
        "a claim of many waits only briefly for a locked table", 6, "ledger.py",
        "_execute_prepared(conn, _CLAIM_ALL, _CHEAP + _BRIEFLY, values)",
        "_execute_prepared(conn, _CLAIM_ALL, _CHEAP, values)", _TABLE_LOCKED,
    ),
    guard(
        "a statement is prepared only as long as its execution may wait", 6, "prepared.py",
        "cursor.execute(lead + self._prepare)", "cursor.execute(self._prepare)", _TABLE_LOCKED,
    ),
    guard(
        "of many locked rows a few are waited for", 6, "bulk.py",
        "if len(self._locked) >= _LOCKED_IN_A_MESSAGE:", "if False:",
        f"{_BULK}::test_of_many_locked_rows_a_few_are_waited_for_and_all_are_named",
    ),
    # steward.py
    guard(
        "of a dead child's message the job that it was at is settled", 4, "steward.py",
        "if len(leases) == 1 or bulk.position.is_at(self.worker_pid, number):", "if len(leases) == 1:", _DEAD_CHILD,
    ),
    guard(
        "of a dead child's message no other job has an attempt", 4, "steward.py",
        "if len(leases) == 1 or bulk.position.is_at(self.worker_pid, number):", "if True:", _DEAD_CHILD,
    ),
    guard(
        "what a dead child had claimed and not begun is free", 1, "steward.py",
        "steward.not_run(*lease, by=by)", "pass", _DEAD_CHILD,
    ),
    guard(
        "what a dead child had not claimed is free", 1, "steward.py",
        "if not ledger.give_back(conn, id, by=by):", "if ledger.give_back(conn, id, by=by):", _DEAD_CHILD,
    ),
)
