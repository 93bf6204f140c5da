"""The guards in what brings jobs to a process and mends what it leaves: dispatch, broker, tasks, worker, migrations."""

from __future__ import annotations

from guards.guard import Guard, guard

# fmt: off
_DISPATCH = "test_dispatch.py"
_CUT_OFF = "test_dispatch_outages.py"
_TASKS = "test_tasks.py"
_TICKS = "test_tasks_ticks.py"
_STEWARD = "test_steward.py"
_NUDGE = "test_nudge.py"
_DEAD = "system/test_dead_children.py"
_FORGED = f"{_TASKS}::test_a_message_without_authority_ends_quietly"
_DEFAULTS = "test_setup.py::test_a_hosts_defaults_for_its_tasks_are_not_those_of_ours"
_REFUSED = "test_client.py::test_what_cannot_be_stored_as_meant_is_refused_and_nothing_written"
_CONTRADICT = "test_settings.py::test_settings_that_contradict_each_other_are_refused"
_ONLINE = "test_migrations_online.py"
_AT_ONCE = f"{_ONLINE}::test_two_at_once_migrate_a_big_table_under_the_original_dispatcher"
_MISFIT = "test_migrations.py::test_a_table_that_does_not_fit_is_refused_untouched_with_the_sql_that_helps"

GUARDS: tuple[Guard, ...] = (
    # dispatch.py
    guard(
        "what the broker does not take is freed", 5, "dispatch.py",
        "ledger.release(conn, [(lease.id, lease.token) for lease in unsent])", "pass",
        f"{_DISPATCH}::test_what_a_broker_does_not_take_is_free_again",
        f"{_DISPATCH}::test_a_queue_that_takes_nothing_harms_no_other",
    ),
    guard(
        "a broker that does not answer is not waited for once more for each queue", 6, "dispatch.py",
        "if unsent and time.monotonic() - began > _BROKER_PATIENCE_S:", "if False:",
        f"{_CUT_OFF}::test_a_broker_that_took_long_to_refuse_is_asked_no_more",
    ),
    guard(
        "dead workers' jobs are reaped", 1, "dispatch.py",
        "        self._reap(conn)\n", "", f"{_DISPATCH}::test_a_dead_workers_job_is_counted_and_reported_by_a_tick",
    ),
    guard(
        "what another dispatcher left running is taken over", 1, "dispatch.py",
        "ledger.take_over", "(lambda *_, **__: 0)",
        f"{_CUT_OFF}::test_what_another_dispatcher_left_running_is_published_by_the_next_tick",
    ),
    guard(
        "what was moved while its message was lost is freed", 5, "dispatch.py",
        "ledger.free_again", "(lambda *_, **__: 0)",
        f"{_CUT_OFF}::test_a_row_that_was_moved_while_its_message_was_lost_is_free_again",
    ),
    guard(
        "what cannot be reaped keeps no other from it", 6, "dispatch.py",
        "if is_outage(refusal):\n                    raise\n                # Such",
        "if True:\n                    raise\n                # Such",
        f"{_CUT_OFF}::test_a_job_that_cannot_be_reaped_keeps_no_other_from_it",
    ),
    guard(
        "a row that cannot be deleted keeps nobody from being leased", 6, "dispatch.py",
        "if is_outage(refusal):\n                raise\n            if _unpruned",
        "if True:\n                raise\n            if _unpruned",
        "test_ledger_prune.py::test_a_row_that_is_kept_harms_no_tick_and_is_told_of_seldom",
    ),
    guard(
        "what was lost is published again only into free room of the queue", 7, "dispatch.py",
        " - broker.depth(self.app, lane.queue)", "",
        f"{_DISPATCH}::test_a_queue_never_holds_more_than_its_window",
    ),
    guard(
        "a lease covers the horizon too", 2, "dispatch.py",
        "return self.settings.lease + self.settings.horizon  #", "return self.settings.lease  #",
        f"{_CUT_OFF}::test_a_lease_covers_the_wait_for_its_time",
    ),
    guard(
        "a message travels with its time", 5, "dispatch.py",
        "lease.run_at if lease.run_at > self._leased_at(lease) else None", "None",
        f"{_DISPATCH}::test_a_row_due_within_the_horizon_travels_with_its_time",
    ),
    guard(
        "a kind that is not known here travels as unhandled", 1, "dispatch.py",
        "task_name(lease.kind) if known else UNHANDLED", "task_name(lease.kind)",
        f"{_DISPATCH}::test_an_unknown_kind_travels_as_unhandled",
    ),
    guard(
        "a batch has a baton", 5, "policy.py",
        "leased // 2 if leased and 2 * leased >= batch else None", "None",
        f"{_DISPATCH}::test_each_queues_batch_has_a_baton_once_it_is_half_full",
    ),
    guard(
        "behind a backlog nothing is leased ahead", 5, "dispatch.py",
        "if len(due) < room:", "if True:", f"{_DISPATCH}::test_behind_a_backlog_nothing_is_leased_ahead",
    ),
    guard(
        "a batch is as large as the workers are fast", 7, "dispatch.py",
        "policy.next_batch(baton.batch, waited, lane.batch(self.settings), ticked)", "lane.batch(self.settings)",
        f"{_DISPATCH}::test_a_baton_that_comes_late_fetches_few_and_one_later_than_a_tick_none",
    ),
    guard(
        "a forged baton is none", 8, "dispatch.py",
        "except (KeyError, OverflowError, TypeError, ValueError):", "except ZeroDivisionError:",
        f"{_DISPATCH}::test_what_is_no_baton_is_not_taken_for_one",
    ),
    guard(
        "a baton holds what it should", 8, "dispatch.py",
        "return found if fits and all(isinstance(kind, str) for kind in found.kinds) else None", "return found",
        f"{_DISPATCH}::test_what_is_no_baton_is_not_taken_for_one",
    ),
    guard(
        "a baton of a queue that is no more fetches nothing", 8, "dispatch.py",
        "if lane is None:\n            return 0", "if lane is None:\n            lane = _lanes(self.registry)[0]",
        f"{_DISPATCH}::test_a_baton_of_a_queue_that_is_no_more_fetches_nothing",
    ),
    # broker.py
    guard(
        "a broker that does not answer is waited for only so long", 6, "broker.py",
        "_TIMEOUTS.get(driver, {})", "{}", f"{_CUT_OFF}::test_a_broker_that_does_not_answer_is_given_up",
    ),
    guard(
        "a broker that does not say how deep a queue is keeps nothing from being leased", 1, "broker.py",
        "except Exception:  # noqa: BLE001 - each transport", "except ZeroDivisionError:  # each transport",
        "test_broker.py::test_a_broker_that_does_not_say_how_deep_a_queue_is_harms_nobody",
    ),
    guard(
        "a forked child has a line to the broker of its own", 2, "broker.py",
        "os.register_at_fork(after_in_child=_forget_parents_lines)", "",
        "test_broker.py::test_a_forked_child_has_a_line_of_its_own_and_leaves_the_parents_alone",
    ),
    guard(
        "a forked child leaves its parent's line open", 2, "broker.py",
        "_inherited.append(_lines)  #", "#",
        "test_broker.py::test_a_forked_child_has_a_line_of_its_own_and_leaves_the_parents_alone",
    ),
    guard("a job's message is transient", 7, "broker.py", 'delivery_mode="transient",', "", _DEFAULTS),
    guard("a job's message is JSON", 8, "broker.py", 'serializer="json",', "", _DEFAULTS),
    guard("a job's message asks for no result", 7, "broker.py", "ignore_result=True,", "", _DEFAULTS),
    # prefetch.py, tasks.py
    guard("a job is acknowledged before it runs", 7, "tasks.py", "    acks_late = False\n", "", _DEFAULTS),
    guard(
        "a job whose process died is not delivered again", 7, "tasks.py",
        "    reject_on_worker_lost = False\n", "", _DEFAULTS,
    ),
    guard("a host's rate limit is not one of jobs", 6, "tasks.py", "    rate_limit = 0  #", "    #", _DEFAULTS),
    guard(
        "a job is enqueued however long it takes", 1, "tasks.py", "    max_retries = None\n", "",
        "test_setup.py::test_a_job_that_is_to_be_enqueued_is_in_its_message_until_it_is_written",
    ),
    guard(
        "a job is enqueued when its table is there", 1, "tasks.py", " or isinstance(error, ProgrammingError)", "",
        f"{_TASKS}::test_a_job_is_enqueued_when_its_table_can_be_written_again",
    ),
    guard(
        "surplus ticks of beat do nothing", 10, "tasks.py",
        "chosen.tick / 2:\n            return 0", "chosen.tick / 2:\n            pass",
        f"{_TASKS}::test_surplus_ticks_of_beat_do_nothing_and_calls_by_hand_always_do",
    ),
    guard(
        "beat's ticks are noted", 10, "tasks.py",
        'ledger.ticked(conn, "beat")', "pass", f"{_TICKS}::test_a_tick_of_beat_is_noted_by_the_databases_clock",
    ),
    guard(
        "a worker that stops leases nothing more", 5, "tasks.py",
        'if by != "call" and _is_stopping():', "if False:",
        f"{_TICKS}::test_a_worker_that_stops_leases_nothing_more_unless_asked_by_hand",
    ),
    guard(
        "a worker stops also with an exit code of 0", 5, "tasks.py",
        "worker_state.should_stop is not None and worker_state.should_stop is not False",
        "bool(worker_state.should_stop)",
        f"{_TICKS}::test_a_worker_that_stops_leases_nothing_more_unless_asked_by_hand",
    ),
    guard(
        "a baton is passed on", 5, "tasks.py",
        "if baton:\n        _pass_on", "if False:\n        _pass_on",
        f"{_TASKS}::test_whatever_becomes_of_a_baton_job_it_fires_the_next_run",
    ),
    guard(
        "a baton that the broker does not take harms no job", 6, "tasks.py",
        "except Exception as error:  # noqa: BLE001 - whatever a transport raises, the job has ended",
        "except ZeroDivisionError as error:  # the job has ended",
        f"{_TASKS}::test_a_baton_that_the_broker_does_not_take_harms_no_job",
    ),
    guard(
        "a message's id is a number or text", 8, "tasks.py",
        "isinstance(id, int | str) and not isinstance(id, bool)", "not isinstance(id, bool)", _FORGED,
    ),
    guard("a message's id is no truth value", 8, "tasks.py", " and not isinstance(id, bool)", "", _FORGED),
    guard(
        "a message's id is text that Postgres can store", 8, "tasks.py",
        " and (isinstance(id, int) or storable(id) == id)", "", _FORGED,
    ),
    guard("a message's token is text", 8, "tasks.py", "if not isinstance(token, str) or", "if", _FORGED),
    guard("a message's token has a zone", 8, "tasks.py", "if moment.tzinfo is None:", "if False:", _FORGED),
    guard(
        "a message's token is a time", 8, "tasks.py",
        "except (ValueError, OverflowError):", "except ZeroDivisionError:", _FORGED,
    ),
    guard("a message may hold arguments that mean nothing", 8, "tasks.py", "    *_: object,\n", "    *,\n", _FORGED),
    guard("a message may hold keywords that mean nothing", 8, "tasks.py", "    **__: object,\n", "", _FORGED),
    guard(
        "a child that is told to end while it runs a job dies at once", 4, "tasks.py",
        "if heartbeat.busy:", "if False:", f"{_DEAD}::test_a_job_terminated_by_hand_counts_a_failed_attempt",
    ),
    # steward.py
    guard(
        "a worker settles the jobs of its dead children", 4, "steward.py",
        'self._child_died(f"its process died: {error}")', "pass",
        f"{_STEWARD}::test_a_child_that_died_is_settled_whatever_it_is_told_by",
    ),
    guard(
        "a dead child is known by whatever tells of it", 4, "steward.py",
        "WorkerLostError | Terminated | SystemExit | KeyboardInterrupt", "WorkerLostError",
        f"{_STEWARD}::test_a_child_that_died_is_settled_whatever_it_is_told_by",
    ),
    guard(
        "what a dead child's failure is wrapped in is taken off", 4, "steward.py",
        "error = error.exc\n", "pass\n", f"{_STEWARD}::test_a_child_that_died_is_settled_whatever_it_is_told_by",
    ),
    guard(
        "a job that was killed at its time limit is settled", 4, "steward.py",
        "if not soft:", "if False:",
        f"{_STEWARD}::test_a_job_killed_at_its_time_limit_is_settled_and_a_warned_one_is_not",
    ),
    guard(
        "a job that was warned of its time limit goes on", 4, "steward.py",
        "if not soft:", "if True:",
        f"{_STEWARD}::test_a_job_killed_at_its_time_limit_is_settled_and_a_warned_one_is_not",
    ),
    guard(
        "a job whose child died before the claim is freed", 5, "steward.py",
        "ledger.release(conn, [(id, token)])\n                return", "return",
        f"{_STEWARD}::test_a_job_whose_child_died_before_the_claim_is_free",
    ),
    guard(
        "the steward goes on after any error", 1, "steward.py",
        "except Exception as error:  # noqa: BLE001 - the thread", "except ZeroDivisionError as error:  # the thread",
        f"{_STEWARD}::test_the_steward_goes_on_after_an_error",
    ),
    guard(
        "what Postgres was away for is done when it is back", 4, "steward.py",
        "time.sleep(_RETRY_S)\n                self._work.put(work)", "pass",
        f"{_STEWARD}::test_what_postgres_was_away_for_is_done_when_it_is_back",
    ),
    guard(
        "an id that is none keeps no other job from its release", 8, "steward.py",
        "except DataError:  #", "except ZeroDivisionError:  #",
        f"{_STEWARD}::test_an_id_that_is_none_keeps_no_other_from_its_release",
    ),
    guard(
        "a worker finishes what its steward was told", 4, "steward.py",
        "self._thread.join(patience)", "pass", f"{_STEWARD}::test_what_a_steward_was_told_is_done_when_it_has_stopped",
    ),
    guard(
        "workers tick while beat does not", 5, "steward.py",
        "self._attempt(self._tick)", "pass", f"{_STEWARD}::test_a_worker_ticks_while_beat_is_silent",
    ),
    guard(
        "workers do not tick while beat does", 10, "steward.py",
        "mine = silent and", "mine =", f"{_STEWARD}::test_a_worker_does_not_tick_while_somebody_does",
    ),
    guard(
        "one worker ticks for all", 10, "steward.py",
        ' and ledger.silence(conn, "worker") > chosen.tick / 2', "",
        f"{_STEWARD}::test_a_worker_does_not_tick_while_somebody_does",
    ),
    guard(
        "a worker waits for a beat that starts beside it", 10, "steward.py",
        'min(ledger.silence(conn, "beat"), uptime)', 'ledger.silence(conn, "beat")',
        f"{_STEWARD}::test_a_worker_waits_for_a_beat_that_starts_beside_it",
    ),
    guard(
        "a worker that stops ticks no more", 5, "steward.py",
        "self._ticks = False\n        self.release(leases)", "self.release(leases)",
        f"{_STEWARD}::test_a_worker_that_stops_ticks_no_more",
    ),
    guard(
        "a job's time is told by the database's clock", 5, "steward.py",
        "eta + steward_of(self._app).clock_lead", "eta",
        f"{_STEWARD}::test_the_time_of_a_message_is_by_this_hosts_clock",
    ),
    guard(
        "the clocks of worker and database are compared", 5, "steward.py",
        "self._tell(self.compare_clocks)", "pass", f"{_STEWARD}::test_a_worker_knows_how_far_its_clock_is_ahead",
    ),
    guard(
        "a forged time ends no worker", 8, "steward.py",
        "except OverflowError:", "except ZeroDivisionError:",
        f"{_STEWARD}::test_the_time_of_a_message_is_by_this_hosts_clock",
    ),
    # worker.py
    guard(
        "what a stopping worker has not started is freed", 5, "worker.py",
        "        release_waiting(app)\n", "        pass\n",
        f"{_DEAD}::test_what_a_stopping_worker_has_not_started_is_free_at_once",
    ),
    guard(
        "a dead child is noticed at once", 5, "worker.py",
        'instance.app.steps["worker"].add(_PromptPool)', "pass",
        f"{_DEAD}::test_a_death_is_noticed_long_before_the_pool_would_look_by_itself",
    ),
    guard(
        "a job of a kind that a worker is too old for is freed", 4, "worker.py",
        "steward_of(sender.app).release(leases_of(**kwargs))", "pass",
        "test_worker.py::test_a_worker_frees_a_job_of_a_kind_that_it_is_too_old_for",
    ),
    guard(
        "a worker that could not read its messages does not start", 1, "worker.py",
        'if "application/json" not in', 'if "" in',
        "test_worker.py::test_a_worker_that_could_not_read_its_messages_does_not_start",
    ),
    # nudge.py, execute.py
    guard(
        "a nudge comes after the whole transaction", 5, "nudge.py",
        "if committed.parent is not None:\n                self.add(committed.parent, app, run_at)\n            el", "",
        f"{_NUDGE}::test_a_savepoint_nudges_when_the_whole_transaction_has_committed",
    ),
    guard(
        "a nudge of a handler comes after its settling", 5, "nudge.py",
        "isinstance(session.bind, Connection) and session.bind.in_transaction()", "False",
        f"{_NUDGE}::test_what_a_handler_enqueues_nudges_when_its_job_is_settled",
    ),
    guard(
        "a handler's nudge is not forgotten", 5, "execute.py",
        "self._session.info.pop(AFTER_COMMIT, ())", "()",
        f"{_NUDGE}::test_what_a_handler_enqueues_nudges_when_its_job_is_settled",
    ),
    guard(
        "what was not committed nudges nobody", 7, "nudge.py",
        "transaction = session.get_nested_transaction() or session", "transaction = session",
        f"{_NUDGE}::test_a_savepoint_that_was_rolled_back_nudges_nobody",
    ),
    guard(
        "where a tick waits no nudge is sent", 7, "nudge.py",
        "if not broker.depth(app, TICK_QUEUE):", "if True:",
        f"{_NUDGE}::test_where_a_tick_waits_already_none_is_sent",
    ),
    guard(
        "many commits share their nudges", 7, "nudge.py",
        "time.sleep(min(max(_SHORTEST_PAUSE_S, rate * _PAUSE_FOR_RATE_S), _LONGEST_PAUSE_S))", "pass",
        f"{_NUDGE}::test_a_thousand_commits_make_a_few_messages_and_the_last_is_not_forgotten",
    ),
    guard(
        "a broker that is away fails no nudge", 6, "nudge.py",
        "except Exception as error:  # noqa: BLE001 - whatever a transport", "except ZeroDivisionError as error:  # a",
        f"{_NUDGE}::test_while_the_broker_is_away_commits_go_on_and_one_line_is_logged",
    ),
    guard(
        "a nudge fails no commit", 6, "nudge.py",
        "except Exception as error:  # noqa: BLE001 - the caller", "except ZeroDivisionError as error:  # the caller",
        f"{_NUDGE}::test_settings_that_no_worker_takes_fail_no_commit",
        f"{_NUDGE}::test_where_no_thread_can_be_had_the_tick_does_it",
    ),
    guard(
        "a forked child nudges by a thread of its own", 6, "nudge.py",
        "os.register_at_fork(after_in_child=_start_anew)", "",
        f"{_NUDGE}::test_a_forked_child_nudges_by_a_thread_of_its_own",
    ),
    # client.py, handlers.py, settings.py, marketplace/
    guard("NUL is refused where a job is enqueued", 11, "client.py", 'if "\\0" in value:', "if False:", _REFUSED),
    guard(
        "lone surrogates are refused where a job is enqueued", 11, "client.py",
        "except UnicodeEncodeError:", "except ZeroDivisionError:", _REFUSED,
    ),
    guard(
        "a time without zone is refused where a job is enqueued", 5, "client.py",
        "if run_at.utcoffset() is None:", "if False:", _REFUSED,
    ),
    guard(
        "what JSON lacks is refused where a job is enqueued", 11, "client.py",
        "isinstance(value, float) and not math.isfinite(value)", "False", _REFUSED,
    ),
    guard(
        "the names of vkjobs' own tasks are no kinds", 10, "handlers.py",
        "if kind in RESERVED:", "if False:",
        "test_handlers.py::test_the_names_of_vkjobs_own_tasks_are_refused_as_kinds",
    ),
    guard(
        "a snooze is not for no time", 6, "handlers.py",
        "elif until <= timedelta(0):", "elif False:",
        "test_handlers.py::test_a_snooze_names_a_time_with_zone_or_a_positive_delay",
    ),
    guard("a batch fits into its window", 7, "settings.py", '("batch", "window"), ', "", _CONTRADICT),
    guard("a lease outlasts the horizon", 2, "settings.py", ', ("horizon", "lease")', "", _CONTRADICT),
    guard(
        "a forked child makes a task service of its own", 2, "marketplace/service.py",
        "os.register_at_fork(after_in_child=_forget_parents_objects)", "",
        "test_marketplace.py::test_a_forked_process_gets_a_service_of_its_own",
    ),
    # migrations/
    guard(
        "one migrates at a time", 10, "migrations/__init__.py",
        "        _lock(connection, report)\n", "        pass\n", _AT_ONCE,
    ),
    guard(
        "a migration that waits for another holds no snapshot", 6, "migrations/__init__.py",
        "select pg_try_advisory_lock({_ADVISORY_LOCK})", "select pg_advisory_lock({_ADVISORY_LOCK}) is not null",
        _AT_ONCE,
    ),
    guard(
        "a migration is not cut short by a timeout for queries", 1, "migrations/__init__.py",
        'connection.execute(text("set statement_timeout = 0"))', "pass",
        f"{_ONLINE}::test_a_timeout_for_queries_does_not_end_a_migration",
    ),
    guard(
        "a migration waits for its lock only briefly", 6, "migrations/online.py",
        'lock_timeout=f"{LOCK_TIMEOUT_S}s"', 'lock_timeout="0"',
        f"{_ONLINE}::test_a_transaction_in_the_way_is_waited_for_while_others_go_on",
    ),
    guard(
        "an index that broke off is built anew", 9, "migrations/online.py",
        "if valid is False:", "if None:", f"{_ONLINE}::test_an_index_left_invalid_by_a_killed_migration_is_built_anew",
    ),
    guard(
        "a column that would round a lease is refused", 2, "migrations/versions/r0001_vk_jobs.py",
        'r"timestamp(\\(6\\))? with time zone"', 'r"timestamp(\\(\\d\\))? with time zone"', _MISFIT,
    ),
    guard(
        "a table that forbids the lease of a pending job is refused", 1, "migrations/versions/r0001_vk_jobs.py",
        'status="pending", lease_until="2000-01-01T00:00Z"', 'status="pending"', _MISFIT,
    ),
)
