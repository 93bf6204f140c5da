"""The guards in what runs one job: execution, heartbeat, connections, and the words of an error."""

from __future__ import annotations

from guards.guard import Guard, guard

# fmt: off

_SESSION = "test_execute_session.py"
_OUTAGES = "test_execute_outages.py"
_EXECUTE = "test_execute.py"
_RAISED = f"{_EXECUTE}::test_whatever_a_handler_raises_is_one_failed_attempt_logged_once"
_FORKED = "test_database.py::test_a_forked_child_gets_a_session_of_its_own_and_leaves_the_parents_alone"
_IS_OUTAGE = "test_database.py::test_an_outage_is_told_from_a_mistake"
_UNANSWERED = "test_heartbeat.py::test_a_renewal_without_an_answer_costs_nothing_whether_it_was_made_or_not"

GUARDS: tuple[Guard, ...] = (
    # execute.py
    guard(
        "a job that runs here is not started here beside itself", 2, "execute.py",
        "if self.heartbeat.holds(id):", "if False:",
        f"{_EXECUTE}::test_a_job_that_was_leased_again_while_it_runs_here_is_not_started_here_beside_itself",
    ),
    guard(
        "a claim whose answer was lost is looked for", 4, "execute.py",
        "recall=lambda conn: ledger.claimed(conn, id, by=by),", "",
        f"{_OUTAGES}::test_a_claim_that_is_cut_off_starts_its_job_once",
    ),
    guard(
        "a job is not claimed for ever", 6, "execute.py",
        "ledger.claimed(conn, id, by=by),\n                    patience=self.settings.lease,",
        "ledger.claimed(conn, id, by=by),",
        f"{_OUTAGES}::test_a_job_is_not_started_without_postgres_and_its_message_ends_in_one_line",
    ),
    guard(
        "a claim does not wait for a row that is locked for long", 6, "execute.py",
        "is_passing(error) if patience == float(\"inf\") else is_outage(error)", "is_passing(error)",
        f"{_OUTAGES}::test_a_message_whose_row_is_locked_for_long_ends_in_one_line",
    ),
    guard(
        "an early message frees its job", 5, "execute.py",
        "self.insist(lambda conn: ledger.release(conn, [(id, token)]), patience=self.settings.lease)", "pass",
        f"{_EXECUTE}::test_a_job_that_was_moved_to_later_is_freed_for_its_time",
    ),
    guard(
        "a message that is early by a little is waited for", 5, "execute.py",
        "if early > _EARLY_S:", "if early > 0:",
        f"{_EXECUTE}::test_a_job_that_is_due_within_a_second_is_waited_for_and_never_early",
    ),
    guard(
        "a forged id starts nothing and is no error", 8, "execute.py",
        "except (DataError, ValueError):", "except ZeroDivisionError:",
        f"{_EXECUTE}::test_a_message_with_a_forged_id_starts_nothing",
    ),
    guard(
        "an id is read as whatever type the column has", 8, "execute.py",
        "id = str(id)  #", "#", f"{_EXECUTE}::test_ids_may_be_texts_or_uuids_and_their_messages_forged_too",
    ),
    guard(
        "renewals stop before the settling", 2, "execute.py",
        "self.heartbeat.stop(holding)\n                    return", "return",
        f"{_EXECUTE}::test_nothing_is_renewed_any_more_when_it_is_settled",
    ),
    guard(
        "effects are committed only with the settling", 3, "execute.py",
        "if not settle(self._connection):", "if not settle(self._connection) and False:",
        f"{_SESSION}::test_what_was_written_is_rolled_back_if_the_lease_was_lost",
    ),
    guard(
        "a handler's own commit is a savepoint", 3, "execute.py",
        'join_transaction_mode="create_savepoint"', 'join_transaction_mode="control_fully"',
        f"{_SESSION}::test_a_handlers_own_commit_commits_nothing_of_a_failed_job",
        f"{_SESSION}::test_a_handlers_own_commit_is_not_seen_before_the_job_is_done",
    ),
    guard(
        "a session is read committed whatever the database's default", 3, "database.py",
        '.execution_options(isolation_level="READ COMMITTED")', '.execution_options(isolation_level="REPEATABLE READ")',
        f"{_SESSION}::test_a_session_reads_what_others_commit_whatever_the_databases_default",
    ),
    guard(
        "a session is rolled back before its attempt is settled", 3, "execute.py",
        "run.context.close()\n        if", "if", f"{_SESSION}::test_a_job_needs_one_connection_at_most",
    ),
    guard(
        "what the commit refuses is a failed attempt", 11, "execute.py",
        "except Exception as error:  # noqa: BLE001\n                ended_by = error",
        "except ZeroDivisionError as error:\n                ended_by = error",
        f"{_SESSION}::test_what_the_commit_refuses_is_a_failed_attempt_without_effects",
        f"{_SESSION}::test_a_trigger_that_refuses_the_settling_is_a_failed_attempt",
    ),
    guard(
        "a COMMIT whose answer was lost is asked again", 3, "execute.py",
        "if self.insist(settled):", "if False:",
        f"{_OUTAGES}::test_a_commit_whose_answer_is_lost_is_asked_again_and_not_taken_for_a_failure",
    ),
    guard(
        "a settling whose answer was lost is looked for", 4, "execute.py",
        "self.insist(settle, recall=settled)", "self.insist(settle)",
        f"{_OUTAGES}::test_a_settling_that_is_cut_off_is_made_again_or_found_done_and_costs_nothing",
    ),
    guard(
        "a settling waits for Postgres", 4, "execute.py",
        "if not again or time.monotonic() - began > patience:", "if True:",
        f"{_OUTAGES}::test_a_settling_that_is_cut_off_is_made_again_or_found_done_and_costs_nothing",
        f"{_OUTAGES}::test_a_settling_waits_for_a_connection_of_the_pool",
    ),
    guard(
        "a settling outwaits locks and timeouts", 4, "execute.py",
        "is_passing(error) if patience", "is_outage(error) if patience",
        f"{_OUTAGES}::test_a_settling_outwaits_a_statement_timeout",
    ),
    guard(
        "a settling that gave up its wait for a lock is back in line at once", 4, "execute.py",
        "_LOCK_PAUSE_S if locked else ", "",
        f"{_OUTAGES}::test_a_settling_waits_for_a_locked_row_only_briefly_at_a_time",
    ),
    guard(
        "the pauses between tries are capped", 5, "execute.py",
        "min(2 * pause or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)", "2 * pause or _FIRST_PAUSE_S",
        f"{_OUTAGES}::test_an_outage_of_any_length_is_a_line_a_while_and_over_within_seconds",
    ),
    guard(
        "an outage is one line a while in the log", 6, "execute.py",
        "if seldom():\n                    emit", "if True:\n                    emit",
        f"{_OUTAGES}::test_an_outage_of_any_length_is_a_line_a_while_and_over_within_seconds",
    ),
    guard(
        "a snooze beyond the end of time is a failed attempt", 11, "execute.py",
        "except DataError as error:", "except ZeroDivisionError as error:",
        f"{_EXECUTE}::test_a_snooze_beyond_the_end_of_time_is_a_failed_attempt",
    ),
    guard(
        "an error is stored whatever the database's encoding lacks", 11, "execute.py",
        "except DataError:  # the database's encoding", "except ZeroDivisionError:  # the database's encoding",
        f"{_EXECUTE}::test_an_error_is_kept_that_the_databases_encoding_lacks",
    ),
    guard(
        "whatever a handler raises ends the job alone", 11, "execute.py",
        "except BaseException as error:  # noqa: BLE001 - SystemExit too", "except Exception as error:  #", _RAISED,
    ),
    guard(
        "a payload that cannot be decoded fails its attempt", 11, "execute.py",
        "run = Run(claim, ", "job_of(claim); run = Run(claim, ",
        f"{_EXECUTE}::test_a_payload_that_python_cannot_read_is_a_failed_attempt",
    ),
    guard(
        "an exception does not say itself that it is a snooze", 11, "execute.py",
        "issubclass(type(ended_by), Snooze)", "isinstance(ended_by, Snooze)",
        f"{_EXECUTE}::test_an_exception_that_lies_about_its_class_is_a_failed_attempt",
    ),
    guard(
        "an exception does not say itself that it gives up", 11, "execute.py",
        "issubclass(type(error), GiveUp)", "isinstance(error, GiveUp)",
        f"{_EXECUTE}::test_an_exception_that_lies_about_its_class_is_a_failed_attempt",
    ),
    guard(
        "the soft limit is kept out of claim and settling", 4, "execute.py",
        "if self._inside and callable(self._handler):", "if callable(self._handler):",
        f"{_EXECUTE}::test_a_soft_limit_that_came_during_the_claim_raises_in_the_handler",
        f"{_EXECUTE}::test_the_soft_limit_does_not_disturb_the_settling",
    ),
    guard(
        "the soft limit is kept out as soon as the handler has ended", 4, "execute.py",
        "finally:\n        limit.keep_out()", "finally:\n        pass",
        f"{_EXECUTE}::test_the_soft_limit_does_not_disturb_the_settling",
    ),
    guard(
        "a soft limit that came during the claim raises in the handler", 6, "execute.py",
        "if self._came:", "if False:",
        f"{_EXECUTE}::test_a_soft_limit_that_came_during_the_claim_raises_in_the_handler",
    ),
    # heartbeat.py
    guard(
        "a job that runs is renewed", 4, "heartbeat.py",
        "self._start()\n", "pass\n", "test_heartbeat.py::test_a_job_longer_than_its_lease_is_renewed_until_it_settles",
    ),
    guard(
        "a renewal proposes a new token", 2, "heartbeat.py",
        "max(fresh, self.token + timedelta(microseconds=1))", "max(fresh, self.token)",
        "test_heartbeat.py::test_a_proposal_differs_from_the_token_whatever_its_time",
    ),
    guard(
        "a renewal proposes the same token until its answer is seen", 4, "heartbeat.py",
        "if self.proposed is None:", "if True:", "test_heartbeat.py::test_until_its_answer_is_seen_a_proposal_stays",
    ),
    guard(
        "a settling knows the proposed token", 4, "execute.py",
        "ledger.settle_done(conn, run.claim.id, run.holding.token, run.holding.proposed)",
        "ledger.settle_done(conn, run.claim.id, run.holding.token)", _UNANSWERED,
    ),
    guard(
        "a settling as failed knows the proposed token", 4, "execute.py",
        "ledger.settle_failed(conn, id, holding.token, failure, holding.proposed)",
        "ledger.settle_failed(conn, id, holding.token, failure)",
        "test_heartbeat.py::test_a_renewal_without_an_answer_is_known_to_each_settling",
    ),
    guard(
        "a snooze knows the proposed token", 4, "execute.py",
        "ledger.snooze(conn, id, holding.token, until, holding.proposed)",
        "ledger.snooze(conn, id, holding.token, until)",
        "test_heartbeat.py::test_a_renewal_without_an_answer_is_known_to_each_settling",
    ),
    guard(
        "a renewal counts from the database's time at the claim", 4, "heartbeat.py",
        "self._claimed_at + timedelta(seconds=elapsed + self._lease)",
        "datetime.now(self._claimed_at.tzinfo) + timedelta(seconds=self._lease)",
        "test_heartbeat.py::test_proposals_count_from_the_databases_time_whatever_this_hosts_clock_says",
    ),
    guard(
        "the next renewal is planned by the token", 4, "heartbeat.py",
        "self._claimed + (self.token - self._claimed_at).total_seconds()", "time.monotonic() + self._lease",
        "test_heartbeat.py::test_a_claim_that_is_told_of_late_is_renewed_before_it_expires",
    ),
    guard(
        "the heart beats sooner for a shorter lease", 4, "heartbeat.py",
        "if min((holding.renewal_due for holding in holdings), default=self._wakes_at) < self._wakes_at:", "if False:",
        "test_heartbeat.py::test_a_short_lease_is_renewed_beside_a_long_one",
    ),
    guard(
        "the heart beats on after any error", 4, "heartbeat.py",
        "except Exception as error:  # noqa: BLE001 - if this", "except ZeroDivisionError as error:  # if this",
        "test_heartbeat.py::test_the_heart_beats_on_after_any_error",
    ),
    guard(
        "a locked row is not taken for lost", 4, "heartbeat.py",
        "elif holding.id in held:", "elif False:",
        "test_heartbeat.py::test_a_locked_row_is_not_lost_and_keeps_no_other_from_its_renewal",
    ),
    guard(
        "a handler is told that its lease is lost", 2, "heartbeat.py",
        "holding.lost = True", "pass", "test_heartbeat.py::test_a_handler_sees_that_its_lease_was_stolen",
    ),
    guard(
        "an answer says nothing to what is being settled", 2, "heartbeat.py",
        "if self._held.get(holding.id) is not holding:\n                    continue",
        "if False:\n                    continue",
        "test_heartbeat.py::test_a_job_settles_while_its_renewal_is_under_way",
    ),
    guard(
        "what has ended is renewed no more", 2, "heartbeat.py",
        "finally:\n            self.stop(*holdings)", "finally:\n            pass",
        "test_heartbeat.py::test_what_has_ended_is_renewed_no_more",
    ),
    guard(
        "renewals have a connection of their own", 4, "tasks.py",
        'chosen.database_url, 1, "heartbeat")', "chosen.database_url, chosen.pool_size)",
        "test_tasks.py::test_a_job_is_renewed_while_handlers_have_all_connections_of_the_pool",
    ),
    guard(
        "a forked child renews its own jobs", 4, "tasks.py",
        "os.register_at_fork(after_in_child=_executors.clear)", "",
        "test_heartbeat.py::test_a_forked_child_renews_its_own_jobs",
    ),
    # database.py
    guard(
        "a forked child opens connections of its own", 2, "database.py",
        "engine.dispose(close=False)", "pass", _FORKED,
    ),
    guard(
        "a forked child leaves its parent's connections open", 2, "database.py",
        "engine.dispose(close=False)", "engine.dispose()", _FORKED,
    ),
    guard(
        "a fork while a thread makes an engine leaves the child no lock", 1, "database.py",
        "_lock = threading.Lock()  # another", "pass  # another", _FORKED,
    ),
    guard(
        "the fork guard is there", 2, "database.py",
        "os.register_at_fork(after_in_child=_forget_parents_connections)", "", _FORKED,
    ),
    guard(
        "a pool is bounded", 6, "database.py",
        "max_overflow=0,", "max_overflow=50,", "test_database.py::test_a_pool_is_bounded",
    ),
    guard(
        "a Postgres that does not answer is waited for only so long", 6, "database.py",
        '"connect_timeout": CONNECT_TIMEOUT_S,\n                    "application', '"application',
        "test_database.py::test_a_server_that_does_not_answer_is_given_up",
    ),
    guard(
        "whatever the database's encoding, text is sent as UTF-8", 11, "database.py",
        '"client_encoding": "utf8",', "", f"{_EXECUTE}::test_an_error_is_kept_that_the_databases_encoding_lacks",
    ),
    guard(
        "a lost connection is an outage", 4, "database.py",
        'return error.connection_invalidated or isinstance(error, OperationalError | InterfaceError)', "return False",
        _IS_OUTAGE,
    ),
    guard(
        "a wait for the pool is an outage", 4, "database.py",
        "if isinstance(error, PoolTimeout):\n        return True",
        "if isinstance(error, PoolTimeout):\n        return False",
        _IS_OUTAGE, f"{_OUTAGES}::test_a_settling_waits_for_a_connection_of_the_pool",
    ),
    guard("too few resources are an outage", 4, "database.py", '"53", ', "", _IS_OUTAGE),
    guard("a shutdown is an outage", 4, "database.py", '"57P", ', "", _IS_OUTAGE),
    guard("a read-only standby is an outage", 4, "database.py", ', "25006")', ")", _IS_OUTAGE),
    guard(
        "a session that cannot write is not kept", 1, "database.py", "context.is_disconnect = True", "pass",
        "test_prepared.py::test_a_session_that_cannot_write_is_not_kept",
    ),
    guard(
        "a session that cannot write a prepared statement is not kept", 1, "prepared.py", " or is_read_only(error)", "",
        "test_prepared.py::test_a_session_that_cannot_write_is_not_kept",
    ),
    guard(
        "an outage is told from a mistake", 6, "database.py",
        "return str(code).startswith(_OUTAGES)", "return True",
        f"{_EXECUTE}::test_a_snooze_beyond_the_end_of_time_is_a_failed_attempt",
    ),
    guard(
        "the clocks are compared by the quickest of some round trips", 5, "database.py",
        "return min(samples)[1]", "return max(samples)[1]",
        "test_database.py::test_clocks_are_compared_by_the_quickest_answer",
    ),
    # prepared.py
    guard(
        "a pooler that keeps no prepared statements is borne", 6, "prepared.py",
        "except _NOT_KEPT:", "except ZeroDivisionError:",
        "test_prepared.py::test_where_it_is_not_kept_it_is_sent_as_it_is",
    ),
    guard(
        "a statement that another client of a pooler has prepared is used", 6, "prepared.py",
        "with suppress(errors.DuplicatePreparedStatement):", "with suppress():",
        "test_prepared.py::test_another_client_of_a_pooler_may_have_prepared_it",
    ),
    # policy.py
    guard(
        "a backoff is capped", 6, "policy.py",
        "return min(cap, base", "return max(0, base",
        "test_policy.py::test_a_backoff_never_overflows_nor_exceeds_its_cap",
    ),
    guard(
        "a backoff never overflows", 6, "policy.py",
        "min(max(attempts, 0), _MAX_DOUBLINGS)", "max(attempts, 0)",
        "test_policy.py::test_a_backoff_never_overflows_nor_exceeds_its_cap",
    ),
    guard(
        "less than no attempts are none", 6, "policy.py",
        "max(attempts, 0)", "attempts", "test_policy.py::test_less_than_no_attempts_are_none",
    ),
    guard(
        "the last attempt ends a job", 4, "policy.py",
        "return attempts + 1 >= max_attempts", "return False",
        f"{_EXECUTE}::test_the_last_attempt_ends_the_job_and_is_an_error_in_the_log",
    ),
    # report.py
    guard(
        "NUL is written as an escape", 11, "report.py",
        '.replace("\\0", "\\\\x00")', "",
        "test_report.py::test_whatever_the_text_postgres_can_store_it_and_the_rest_is_as_it_was", _RAISED,
    ),
    guard(
        "lone surrogates are written as escapes", 11, "report.py",
        '.encode("utf-8", "backslashreplace").decode("utf-8")', "",
        "test_report.py::test_whatever_the_text_postgres_can_store_it_and_the_rest_is_as_it_was", _RAISED,
    ),
    guard(
        "an error's size is capped", 11, "report.py",
        "if len(text) <= size:", "if True:",
        "test_report.py::test_a_text_is_cut_to_its_size_and_says_how_much_was_left_out",
        f"{_EXECUTE}::test_of_megabytes_of_error_head_and_tail_are_kept",
    ),
    guard(
        "a traceback's depth is capped", 11, "report.py",
        "limit=-50, ", "", "test_report.py::test_of_a_deep_traceback_the_last_frames_are_told",
    ),
    guard(
        "an error without traceback is told", 11, "report.py",
        "except BaseException as failure:  # noqa: BLE001 - formatting",
        "except ZeroDivisionError as failure:  # formatting",
        "test_report.py::test_an_error_whose_traceback_cannot_be_told_is_told_without",
    ),
    guard(
        "an error without message is told", 11, "report.py",
        "except BaseException as failure:  # noqa: BLE001 - __str__", "except ZeroDivisionError as failure:  # __str__",
        _RAISED,
    ),
    guard(
        "a message is plain text", 11, "report.py",
        'message = "".join(str(error))', "message = str(error)",
        "test_report.py::test_a_message_that_is_no_plain_text_is_told",
    ),
    guard(
        "a class is named whatever its metaclass says", 11, "report.py",
        'str(type.__dict__["__name__"].__get__(type(error)))', "type(error).__name__",
        "test_report.py::test_a_class_is_named_whatever_its_metaclass_says",
    ),
)
