"""Times and limits of the agent."""

from __future__ import annotations

import msgspec

from kubetorch.pod.user_process.tuning import LIMITS as WORKER_LIMITS


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the agent; all in seconds."""

    # -------------------------------------------------------------------------- the end of the pod
    #: From SIGTERM to SIGKILL by default in Kubernetes, for a pod whose grace is not known.
    kill_grace_seconds: float = 30.0
    #: Of these, left after the calls for workers, outcomes and the last answers.
    closing_seconds: float = 5.0
    #: Clients read their answers before the process ends.
    server_close_seconds: float = 2.0
    #: Workers end after their calls, which have had their own time.
    worker_close_seconds: float = 2.0
    #: Outcomes of spawned calls reach the controller; the rest stays on disk.
    outcome_upload_close_seconds: float = 2.0

    # ----------------------------------------------------------------- session with the controller
    #: Between two heartbeats: rare, since a controller has thousands of pods.
    heartbeat_seconds: float = 5.0
    #: Between two heartbeats of a rank, whose siblings must learn of its end soon.
    rank_heartbeat_seconds: float = 0.5
    #: Least time between two reports that the pod became busy or idle: short calls are not news.
    activity_edge_seconds: float = 0.2
    #: First delay until the next attempt to connect: a controller restarts within moments.
    session_first_delay_seconds: float = 0.1
    #: Longest such delay: all pods are back soon after a controller is.
    session_longest_delay_seconds: float = 2.0
    #: An attempt to connect is given up: a controller may be busy with thousands of pods.
    session_connect_seconds: float = 10.0
    #: Its TCP connection is given up: packets to a lost controller may be dropped unanswered.
    session_dial_seconds: float = 1.5
    #: A sibling has it to answer a probe, which asks whether the pod is gone.
    sibling_probe_seconds: float = 1.0
    #: After it a report that was written to a session has certainly arrived.
    report_settled_seconds: float = 30.0
    #: A request for a new world is sent again, since a session may lose it.
    world_request_interval_seconds: float = 2.0

    # ------------------------------------------------------------------------------------- clients
    #: A client has it to come back after its connection broke, before its calls are lost.
    client_linger_seconds: float = 30.0
    #: A browser keeps the cookie; the token in it may end earlier.
    app_cookie_seconds: int = 12 * 3600
    #: The agent's own tokens are good: it uses them at once.
    own_token_seconds: float = 300.0
    #: The user's own token is remembered, so that it is not compared for each request.
    user_token_seconds: float = 60.0
    #: A probe may wait for its answer at most.
    serving_wait_longest_seconds: float = 3600.0

    # --------------------------------------------------------------------------------------- calls
    #: A call without a timeout waits for a worker, which may be starting.
    worker_wait_seconds: float = 30.0
    #: Until a call that waits for new processes logs what they wait for; doubled each time.
    wait_report_first_delay_seconds: float = 5.0
    #: Between two reports of how far a spawned call has come: each goes to the controller.
    spawned_progress_interval_seconds: float = 1.0
    #: Quick items ahead of the one that runs take it together: a turn of the agent is shorter.
    items_ahead_seconds: float = 0.02
    #: An item below it has its process mostly wait for the next item.
    waiting_item_seconds: float = 0.001
    #: A process gives back items that it had ahead and has not begun.
    items_ahead_return_seconds: float = 0.1
    #: An item with a shorter timeout is never ahead: it could wait for several of these returns.
    item_ahead_least_timeout_seconds: float = 10 * items_ahead_return_seconds
    #: The use of the processor is measured, from the begin of a map on.
    item_use_seconds: float = 5.0

    # ------------------------------------------------------------------------------- kept outcomes
    #: The outcome of a call with an idempotency key is kept: a client asks again within it.
    kept_outcome_seconds: float = 600.0
    #: A value which could not travel is kept: a user reads the hint and fetches it.
    kept_value_seconds: float = 3600.0
    #: Until a kept value's file is closed, after its time: the clock of the check may be behind.
    kept_value_margin_seconds: float = 1.0
    #: An upload begins after it, so that it has more outcomes.
    outcome_batch_delay_seconds: float = 0.02
    #: Until a failed upload is tried again; doubled each time.
    outcome_retry_first_delay_seconds: float = 0.5
    #: Longest such delay: an upload has no deadline.
    outcome_retry_longest_delay_seconds: float = 30.0

    # --------------------------------------------------------------------------------------- ranks
    #: The other ranks have it to end once one has failed.
    rank_settle_seconds: float = 0.2
    #: They have it where the failure may be the consequence of a lost pod that is not known yet.
    rank_loss_settle_seconds: float = 1.0
    #: A call waits for parts that it cancelled: longer than their workers take to be killed.
    rank_cancel_seconds: float = 6.0
    #: The controller has it to report why a pod is lost whose stream has ended.
    rank_loss_reason_seconds: float = 2.0
    #: After the end of the other ranks, ranks that still run are named.
    rank_hang_report_seconds: float = 10.0
    #: Between two checks for such ranks.
    rank_hang_check_interval_seconds: float = 1.0

    # ------------------------------------------------------------------------- streams to siblings
    #: A connection that broke, or cannot be made, is tried again: a network's hiccup is shorter.
    peer_reconnect_seconds: float = 10.0
    #: One attempt may take it.
    peer_connect_seconds: float = 5.0
    #: Between two attempts at first.
    peer_first_delay_seconds: float = 0.05
    #: Longest such delay: there are enough attempts before the sibling counts as lost.
    peer_longest_delay_seconds: float = 0.5
    #: An unused stream is closed.
    peer_idle_seconds: float = 300.0

    # -------------------------------------------------------------- HTTP requests between siblings
    #: A call of all pods waits for a pod that cannot be reached: it may be starting.
    broadcast_reach_seconds: float = 30.0
    #: Between two attempts to reach it at first.
    broadcast_first_delay_seconds: float = 0.05
    #: Longest such delay; a change of the siblings ends it.
    broadcast_longest_delay_seconds: float = 1.0
    #: The other pods say how their calls ended once one has failed.
    broadcast_settle_seconds: float = 0.2
    #: One attempt to connect may take it.
    broadcast_connect_seconds: float = 5.0
    #: The siblings' numbers of calls are valid: a burst of requests asks once.
    sibling_loads_valid_seconds: float = 0.05
    #: A sibling has it to say its number, while a request waits.
    sibling_load_answer_seconds: float = 0.5
    #: Between two checks whether Knative must be kept from ending the pod: clients come back soon.
    knative_check_interval_seconds: float = 2.0
    #: Knative's queue-proxy may have the request wait behind others.
    knative_queue_seconds: float = 60.0

    # ------------------------------------------------------------------------- code, blobs, reload
    #: After a reload, blobs that are not needed any more are deleted: not while others load.
    blob_prune_delay_seconds: float = 10.0
    #: Calls of an older generation may go on after a reload.
    generation_drain_seconds: float = 3600.0
    #: Pods that have not reloaded yet may call ranks of the generation before.
    late_rank_call_seconds: float = 1.0
    #: Until a worker that died young, or failed to load, is started again: by attempt.
    restart_delays_seconds: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
    #: A worker that dies by itself within it died young.
    young_worker_seconds: float = 10.0
    #: First delay until a transfer of a blob is tried again: a controller restarts within moments.
    transfer_first_delay_seconds: float = 0.1
    #: Longest such delay.
    transfer_longest_delay_seconds: float = 2.0
    #: A transfer may go without any progress.
    transfer_stall_seconds: float = 30.0

    # ------------------------------------------------------------------ interpreters, environments
    #: One interpreter has it to report its version. A broken one fails at once; a working one may
    #: start slowly in a small pod on a full node.
    interpreter_probe_seconds: float = 30.0
    #: All interpreters have it together.
    interpreter_search_seconds: float = 60.0
    #: Environments that no agent used for so long are removed.
    venv_longest_unused_seconds: float = 14 * 86400.0
    #: An unfinished environment counts as abandoned.
    venv_abandoned_seconds: float = 86400.0

    # ------------------------------------------------------------------------------------- workers
    #: A cancelled call has it before its worker is killed.
    call_cancel_seconds: float = 2.0
    #: A worker without calls has it for its exit handlers.
    worker_stop_seconds: float = 5.0
    #: A killed process is given up: the kernel may hold it.
    worker_kill_seconds: float = 10.0
    #: Between two checks for memory files that can be given back, as long as there are any.
    memory_trim_interval_seconds: float = 1.5
    #: Between two checks of the memory that all processes use: they fill it within a second.
    memory_check_interval_seconds: float = 0.05
    #: A worker has it to answer with its stacks; a busy interpreter answers at its next switch.
    stacks_answer_seconds: float = 1.5
    #: Then its handler of the signal has it, which needs no interpreter.
    stacks_signal_seconds: float = 1.5
    #: An answer is complete after it without another byte.
    stacks_quiet_seconds: float = 0.1
    #: A preload is given up: large libraries on a slow disk.
    zygote_preload_seconds: float = 300.0
    #: A fork is given up. The first one waits for the start of an interpreter, which takes long in
    #: a small pod on a node that is full.
    zygote_fork_seconds: float = 30.0
    #: The zygote has it to tell an exit status, and to end.
    zygote_status_seconds: float = 1.0

    # -------------------------------------------------------------------------------------- output
    #: Between two states of a progress bar (text that ends in a carriage return).
    progress_bar_interval_seconds: float = 0.5

    # ---------------------------------------------------------------------------------- frameworks
    #: A node of Ray or Monarch has it to end by itself.
    framework_node_stop_seconds: float = 3.0
    #: Between two attempts to join a head of Ray that has not started yet, and two health checks.
    ray_retry_delay_seconds: float = 0.5
    #: Between two attempts to reach a host of Monarch that does not listen yet.
    monarch_retry_delay_seconds: float = 0.1
    #: One health check of Ray may take it.
    ray_health_seconds: float = 5.0

    # ---------------------------------------------------------------------------------------- apps
    #: First pause between two attempts to reach an app that starts: quick apps serve at once.
    app_probe_first_delay_seconds: float = 0.02
    #: Longest such pause.
    app_probe_longest_delay_seconds: float = 0.25
    #: One attempt may take it.
    app_probe_seconds: float = 5.0
    #: An app has fewer seconds to answer than its deploy, whose error can then say why.
    app_launch_margin_seconds: float = 5.0
    #: A command that cannot be run at all is noticed.
    app_settle_seconds: float = 0.2
    #: An app has it to listen on its own port once it listens on another one.
    app_other_port_seconds: float = 2.0
    #: A request waits for an app that is being started.
    app_serving_wait_seconds: float = 30.0
    #: The end of an app is noticed that refuses or cuts off a connection.
    app_exit_notice_seconds: float = 2.0
    #: An app has it to end after SIGTERM.
    app_stop_seconds: float = 10.0
    #: A killed app is gone.
    app_kill_seconds: float = 10.0
    #: Of these, for leftover processes of a killed app's shell.
    app_leftover_seconds: float = 5.0

    def __post_init__(self) -> None:
        last_seconds = max(self.worker_close_seconds, self.outcome_upload_close_seconds)
        assert self.server_close_seconds + last_seconds < self.closing_seconds, (
            "the last answers and outcomes fit in the time after the calls"
        )
        assert self.closing_seconds < self.kill_grace_seconds, "calls have a part of the grace"
        assert self.rank_heartbeat_seconds <= self.heartbeat_seconds, "ranks are watched closer"
        assert self.session_dial_seconds < self.session_connect_seconds, (
            "a connection is a part of the attempt"
        )
        assert (
            self.rank_settle_seconds < self.rank_loss_settle_seconds < self.rank_cancel_seconds
        ), "a failed call answers before its parts are given up"
        assert self.call_cancel_seconds < self.rank_cancel_seconds, (
            "a rank's worker is killed before the call gives its part up"
        )
        assert self.peer_connect_seconds < self.peer_reconnect_seconds, (
            "a second attempt reaches a sibling that dropped the first one"
        )
        assert self.broadcast_connect_seconds < self.broadcast_reach_seconds, (
            "a second attempt reaches a sibling that dropped the first one"
        )
        assert self.interpreter_probe_seconds < self.interpreter_search_seconds, (
            "one interpreter that hangs does not end the search"
        )
        assert self.waiting_item_seconds < self.items_ahead_seconds, "quick items go ahead"
        assert self.items_ahead_seconds < self.items_ahead_return_seconds, (
            "items that are as quick as expected do not come back"
        )
        assert self.stacks_quiet_seconds < self.stacks_answer_seconds, (
            "an answer ends before the time for it does"
        )
        assert self.app_leftover_seconds < self.app_kill_seconds, (
            "a killed app's end is reported although its leftovers stay"
        )
        assert self.venv_abandoned_seconds < self.venv_longest_unused_seconds, (
            "an unfinished environment goes before a finished one does"
        )


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes and counts that the agent has at most."""

    # ----------------------------------------------------------------- session with the controller
    #: Longest message of a controller: the siblings of a large service.
    controller_message_bytes: int = 16 * 1024 * 1024
    #: A line, or the text of a stage, that is sent.
    report_text_characters: int = 64 * 1024
    #: Lines of a loading worker that wait for the session.
    load_log_lines: int = 1000

    # ------------------------------------------------------------------------------------- clients
    #: Connections that wait to be accepted: all clients may come back at once.
    listen_backlog_connections: int = 2048
    #: Clients at one time, with or without a connection.
    clients: int = 4096
    #: Sent and not acknowledged; a client that never acknowledges gets no more.
    unacknowledged_bytes: int = 64 * 1024 * 1024
    #: Values of a generator that are granted together: fewer than a generator begins with.
    granted_values: int = 8
    #: Genuine tokens that are remembered, so that each is verified once.
    verified_tokens: int = 256
    #: Shells at one time.
    shells: int = 32
    #: Input that waits for a shell that does not read; beyond, the client is not read either.
    shell_input_bytes: int = 256 * 1024

    # ---------------------------------------------------------------------------------------- HTTP
    #: Body of a `POST`, decompressed; streams take more.
    post_body_bytes: int = 64 * 1024 * 1024
    #: JSON that is parsed in the event loop; the parser of a longer one would hold it up.
    loop_parsed_bytes: int = 1024 * 1024
    #: One value of a generator, as JSON, of a call of all pods.
    broadcast_value_bytes: int = 1024 * 1024 * 1024
    #: Siblings that are asked for their load; where there are more, chance chooses.
    asked_siblings: int = 8
    #: A sibling's answer, which is one number.
    sibling_load_answer_bytes: int = 1000
    #: Lines of the log that `GET /v1/logs` begins with, unless the request says a number.
    log_tail_lines: int = 100
    #: The largest such number.
    log_tail_longest_lines: int = 1_000_000

    # --------------------------------------------------------------------------------------- calls
    #: Calls that the pod knows at one time, whatever their state.
    pod_calls: int = 10_000
    #: The name of a method, and ids, which reports and lines repeat.
    call_name_characters: int = 1000
    #: Names of all errors after which a call runs again.
    retry_names_characters: int = 32_000
    #: The message of a report of how far a spawned call has come.
    spawned_progress_characters: int = 200
    #: Items of maps that run side by side in a process, if an event loop runs them.
    loop_items: int = 64
    #: Quick items that a process has ahead of the item it runs.
    items_ahead: int = 16
    #: Arguments of an item that may be ahead: larger ones lie in memory that is lent.
    item_ahead_bytes: int = WORKER_LIMITS.inline_bytes
    #: Maps whose use of the processor is remembered, so that none is measured twice.
    measured_maps: int = 1000
    #: Holders of slots that are named.
    named_slot_holders: int = 20
    #: Slots that a call names as those of its ancestors: the nearest ones.
    named_ancestor_slots: int = 64
    #: Arguments of calls that wait for one process.
    waiting_arguments_bytes: int = 1024**3
    #: Calls in a process without a bound from which on descendants begin one inside the other. This
    #: leaves room, below the number of threads of a process, for the longest chain of calls.
    side_by_side_calls: int = 700

    # ------------------------------------------------------------------------------- kept outcomes
    #: Outcomes of calls with an idempotency key together.
    kept_outcomes_bytes: int = 64 * 1024 * 1024
    #: The next file is begun: one file goes when all of its outcomes have.
    kept_outcomes_file_bytes: int = kept_outcomes_bytes // 8
    #: An outcome takes so much beside its own.
    kept_outcome_overhead_bytes: int = 1024
    #: A value which could not travel counts so much beside its own: the agent has its file open.
    kept_value_overhead_bytes: int = 16 * 1024 * 1024
    #: Outcomes of spawned calls that wait for the controller; beyond, the oldest go.
    waiting_outcomes_bytes: int = 1024**3
    #: Outcomes that are uploaded together.
    outcome_batch_calls: int = 64
    #: They have so many bytes; a single outcome may have more.
    outcome_batch_bytes: int = 4 * 1024 * 1024
    #: An outcome that stays in memory until the controller has it.
    small_outcome_bytes: int = 4096
    #: Written and read at a time; longer outcomes are written in a thread.
    outcome_piece_bytes: int = 1024 * 1024
    #: Outdated lines in the list of calls before it is written anew.
    outdated_call_lines: int = 10_000

    # --------------------------------------------------------------------------------------- ranks
    #: Failures of other ranks that are attached to the first one.
    attached_failures: int = 16
    #: Their JSON, so that the failure of the call stays below that of one failure.
    attached_failures_bytes: int = 512 * 1024
    #: The values of all ranks together from which on they lie in a memory file.
    joined_memory_file_bytes: int = 1024 * 1024

    # ------------------------------------------------------------------------- streams to siblings
    #: Rounds of a generator that a sibling may send before the caller reads one.
    peer_rounds_ahead: int = 16
    #: A value from this size on lies in a memory file.
    peer_memory_file_bytes: int = 1024 * 1024

    # ------------------------------------------------------------------------- code, blobs, reload
    #: Older generations that may still have calls; with one more, the oldest is ended.
    draining_generations: int = 2
    #: Threads that fetch at one time, and as many that send: each may hold a blob in memory.
    transfer_threads: int = 8
    #: Names of files of the project that a warning lists.
    warned_names: int = 5

    # -------------------------------------------------------------------------------------- images
    #: Request to run a step now.
    step_body_bytes: int = 1024 * 1024
    #: Lines that wait for a slow client; further ones are dropped, and counted.
    step_waiting_lines: int = 10_000
    #: Lines of a step's output that its error shows.
    step_error_lines: int = 30
    #: The pod's latest environments, which its workers may still use.
    recent_venvs: int = 4
    #: Environments that an agent keeps locked: those of the generations that it may still serve.
    locked_venvs: int = 8
    #: All environments together, before unused environments are removed.
    venvs_bytes: int = 20 * 1024**3

    # ------------------------------------------------------------------------------------- workers
    #: Calls that one worker has at a time, running or waiting for a thread.
    worker_calls: int = 2000
    #: Threads that calls of `def` may have.
    worker_threads: int = 1000
    #: Calls that an error about a lost worker names.
    named_lost_calls: int = 10
    #: Reads of the frames that an ended worker left in its socket, of which there are hundreds.
    ended_worker_reads: int = 1000
    #: The pipe of output holds it; where that is not allowed, it keeps the system's size.
    output_pipe_bytes: int = 256 * 1024
    #: Read of an answer with stacks.
    stacks_bytes: int = 1024 * 1024
    #: Zygotes that may be lost over one preload before it is not tried any more.
    preload_losses: int = 2
    #: Attempts to start a worker: one more than are lost over its preload.
    worker_start_attempts: int = preload_losses + 1
    #: One message from a zygote.
    zygote_message_bytes: int = 1024 * 1024

    # -------------------------------------------------------------------------------------- output
    #: A line; a longer line arrives as several lines.
    line_bytes: int = 64 * 1024
    #: Unfinished lines that wait, over all calls and processes; beyond, the oldest is delivered.
    unfinished_lines: int = 256
    #: One segment of the log; there are two.
    log_segment_bytes: int = 8 * 1024 * 1024
    #: Text of one line of the log that is kept.
    log_text_characters: int = 64 * 1024
    #: Lines that wait for one slow follower; the oldest go first.
    follower_lines: int = 10_000
    #: Lines that a follower gets in one piece.
    follower_piece_lines: int = 500

    # ---------------------------------------------------------------------------- frameworks, apps
    #: Lines of a framework node's output that an error shows.
    framework_node_error_lines: int = 15
    #: The answer of Ray's health check, which is one word.
    ray_health_answer_bytes: int = 1000
    #: Lines that an error about an app ends with.
    app_error_lines: int = 20
    #: Requests and WebSockets at one time.
    app_requests: int = 2000

    def __post_init__(self) -> None:
        assert self.side_by_side_calls < self.worker_threads <= self.worker_calls, (
            "a worker has threads for a chain of calls, and knows the calls that they run"
        )
        assert self.worker_calls <= self.pod_calls, "a pod knows the calls of its worker"
        assert self.granted_values <= WORKER_LIMITS.first_granted_values, (
            "a generator does not wait for its first grant"
        )
        assert self.recent_venvs <= self.locked_venvs, "environments in use stay locked"
        assert self.draining_generations + 2 <= self.recent_venvs, (
            "generations that have calls, that serves and that loads keep their environments"
        )
        assert self.log_tail_lines <= self.log_tail_longest_lines, "the usual tail is allowed"
        assert WORKER_LIMITS.unfinished_line_bytes <= self.line_bytes, (
            "a line that the worker collects arrives as one"
        )


TIMING = Timing()
LIMITS = Limits()
