"""Times and limits of the agent."""

from __future__ import annotations

from kubetorch.lib.tuning import Table
from kubetorch.pod.user_process.tuning import LIMITS as WORKER_LIMITS
from kubetorch.pod.user_process.tuning import TIMING as WORKER_TIMING


class Timing(Table):
    """Times of the agent; in seconds, but for shares."""

    # -------------------------------------------------------------------------- the end of the pod
    #: Time from SIGTERM to SIGKILL by default in Kubernetes, for a pod that is not told its own.
    kill_grace_seconds: float = 30.0
    #: Part of it that is left after the calls for workers, outcomes and the last answers.
    closing_seconds: float = 5.0
    #: Time until the kubelet of a pod whose service is torn down sends SIGTERM; a pod that is not
    #: deleted starts anew then.
    deletion_seconds: float = 30.0
    #: New connections to a leaving pod of an autoscaled Service are served for so long: a
    #: kube-proxy changes its rules once a second, some time after the pod was ended.
    service_update_seconds: float = 3.0
    #: Pause between two checks whether all calls have ended.
    closing_check_interval_seconds: float = 0.02
    #: Time for killed shells to be gone, with all that they started.
    shell_kill_seconds: float = 0.5
    #: Time that clients have to read their answers.
    server_close_seconds: float = 2.0
    #: Time that workers have for what still runs; calls have had their own time.
    worker_close_seconds: float = 2.0
    #: Time for outcomes of spawned calls to reach the controller; the rest stays on disk.
    outcome_upload_close_seconds: float = 2.0

    # ----------------------------------------------------------------- session with the controller
    #: Pause between two heartbeats: a controller has thousands of pods.
    heartbeat_seconds: float = 4.5
    #: Pause between two heartbeats of a rank, whose siblings must learn of its end soon.
    rank_heartbeat_seconds: float = 0.5
    #: Pause between two reports that the pod became busy or idle at least: short calls are no news.
    activity_edge_seconds: float = 0.2
    #: Pause before the second attempt to connect: a controller restarts within moments.
    session_first_delay_seconds: float = 0.1
    #: Pause between two attempts at most: all pods are back soon after their controller.
    session_longest_delay_seconds: float = 2.0
    #: Pause between two reports of the load of an autoscaled service that changes: a controller
    #: has thousands of pods.
    load_change_seconds: float = 0.2
    #: Pause between two reports of a load that stays, and of metrics of user code.
    load_report_seconds: float = 1.0
    #: Pause between two reports of the CPU time and the memory of a pod without load.
    idle_usage_report_seconds: float = 5.0
    #: Part of a processor that measuring CPU time and memory takes at most.
    usage_measure_share: float = 0.05
    #: Time for one attempt, the upgrade included: thousands of pods may connect at once.
    session_connect_seconds: float = 10.0
    #: Time for its TCP connection: packets to a lost controller may be dropped unanswered.
    session_dial_seconds: float = 1.5
    #: Time that a stopped program waits for a terminal, as in release 0.5; then the call goes on.
    debugger_wait_seconds: float = 300.0
    #: Time that a running call has to stop, which works on threads that run Python code.
    debugger_interrupt_seconds: float = WORKER_TIMING.debugger_interrupt_seconds
    #: Time after which a terminal that waits for that is told so.
    debugger_notice_seconds: float = 3.0
    #: Time that users may let it wait: a slot that is held for a day is forgotten.
    debugger_longest_wait_seconds: float = 24 * 3600.0
    #: Time that a sibling has to answer when the controller asks whether it is reached.
    sibling_probe_seconds: float = 1.0
    #: Age from which a report that was written to a session has certainly arrived.
    report_settled_seconds: float = 30.0
    #: Pause before a request for a new world is sent again, since a session may lose it.
    world_request_interval_seconds: float = 2.0

    # ------------------------------------------------------------------------------------- clients
    #: Pause before connections for memory files are accepted again: the agent may open no file.
    accept_pause_seconds: float = 1.0
    #: Time that a client has to come back after its connection broke; then its calls are lost.
    client_linger_seconds: float = 30.0
    #: Time that a client has to open its shell, which takes the place of another one meanwhile.
    shell_open_seconds: float = 10.0
    #: Time that a browser keeps the cookie; the token in it may end earlier.
    app_cookie_seconds: int = 12 * 3600
    #: Time for which the agent's own tokens are good: it uses them at once.
    own_token_seconds: float = 300.0
    #: Time for which the user's own token is remembered, so that it is not compared each time.
    user_token_seconds: float = 60.0
    #: Time that a request may wait until the pod serves, at most.
    serving_wait_longest_seconds: float = 3600.0

    # --------------------------------------------------------------------------------------- calls
    #: Time that a call without a timeout waits for a worker, which may be starting.
    worker_wait_seconds: float = 30.0
    #: Time until a call that waits for new processes logs what they wait for; doubled each time.
    wait_report_first_delay_seconds: float = 5.0
    #: Pause between two reports of how far a spawned call has come: each goes to the controller.
    spawned_progress_interval_seconds: float = 1.0
    #: Time that the quick items which a process has ahead of its item take together.
    items_ahead_seconds: float = 0.02
    #: Duration of an item below which its process mostly waits for the next item.
    waiting_item_seconds: float = 0.001
    #: Time after which a process gives back items that it had ahead and has not begun.
    items_ahead_return_seconds: float = 0.1
    #: Timeout from which on an item may be ahead: it waits for a few items before it.
    item_ahead_least_timeout_seconds: float = 10 * items_ahead_return_seconds
    #: Time for which the use of the processor is measured, from the begin of a map on.
    item_use_seconds: float = 5.0
    #: Part of a core below which items mostly wait.
    idle_item_share: float = 0.2

    # ------------------------------------------------------------------------------- kept outcomes
    #: Time for which the outcome of a call with an idempotency key is kept, to answer it again.
    kept_outcome_seconds: float = 600.0
    #: Time for which a value is kept that could not travel: its error says how to fetch it.
    kept_value_seconds: float = 3600.0
    #: Time of `recorded_failures`.
    recorded_failures_seconds: float = 3600.0
    #: Time by which its file is closed later, so that it has expired by then.
    kept_value_margin_seconds: float = 1.0
    #: Pause before an upload, so that it has more outcomes.
    outcome_batch_delay_seconds: float = 0.02
    #: Pause before a failed upload is tried again; it doubles each time.
    outcome_retry_first_delay_seconds: float = 0.5
    #: Pause between two attempts at most: an upload has no deadline.
    outcome_retry_longest_delay_seconds: float = 30.0

    # --------------------------------------------------------------------------------------- ranks
    #: Time that the other ranks have to end once one has failed.
    rank_settle_seconds: float = 0.2
    #: The same where the failure may be the consequence of a lost pod that is not known yet.
    rank_loss_settle_seconds: float = 1.0
    #: Time that a call waits for parts that it cancelled: their workers may have to be killed.
    rank_cancel_seconds: float = 6.0
    #: Time that the controller has to report why a pod is lost whose stream has ended.
    rank_loss_reason_seconds: float = 2.0
    #: Time after the end of the other ranks after which ranks that still run are named.
    rank_hang_report_seconds: float = 10.0
    #: Pause between two checks for such ranks.
    rank_hang_check_interval_seconds: float = 1.0

    # ------------------------------------------------------------------------- streams to siblings
    #: Time for which a connection that broke, or cannot be made, is tried again.
    peer_reconnect_seconds: float = 10.0
    #: Time for one attempt.
    peer_connect_seconds: float = 5.0
    #: Pause before the second attempt; it doubles each time.
    peer_first_delay_seconds: float = 0.05
    #: Pause between two attempts at most: the first calls come while siblings start.
    peer_longest_delay_seconds: float = 0.5
    #: Time after which an unused stream is closed.
    peer_idle_seconds: float = 300.0

    # -------------------------------------------------------------- HTTP requests between siblings
    #: Time that a call of all pods waits for one that cannot be reached: it may be starting.
    broadcast_reach_seconds: float = 30.0
    #: Pause before the second attempt to reach it; it doubles each time.
    broadcast_first_delay_seconds: float = 0.05
    #: Pause between two attempts at most; a change of the siblings ends it.
    broadcast_longest_delay_seconds: float = 1.0
    #: Time that the other pods have to say how their calls ended once one has failed.
    broadcast_settle_seconds: float = 0.2
    #: Time for one attempt to connect.
    broadcast_connect_seconds: float = 5.0
    #: Age up to which the siblings' numbers of calls are valid: a burst of requests asks once.
    sibling_loads_valid_seconds: float = 0.05
    #: Time that a sibling has to say its number, while a request waits.
    sibling_load_answer_seconds: float = 0.5
    #: Pause between two checks whether Knative has to keep the pod: a client is back in moments.
    knative_check_interval_seconds: float = 2.0
    #: Time that Knative's queue-proxy may have the request for it wait behind others.
    knative_queue_seconds: float = 60.0

    # ------------------------------------------------------------------------- code, blobs, reload
    #: Time after a reload until blobs that are not needed any more are deleted.
    blob_prune_delay_seconds: float = 10.0
    #: Time that calls of an older generation have after a reload.
    generation_drain_seconds: float = 3600.0
    #: Time in which pods that have not reloaded yet may call ranks of the generation before.
    late_rank_call_seconds: float = 1.0
    #: Pause before a worker that died young, or failed to load, starts again, by attempt.
    restart_delays_seconds: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
    #: Age below which a worker that ends by itself died young.
    young_worker_seconds: float = 10.0
    #: Pause before a transfer of a blob is tried again: a controller restarts within moments.
    transfer_first_delay_seconds: float = 0.1
    #: Pause between two attempts at most.
    transfer_longest_delay_seconds: float = 2.0
    #: Time that a transfer may go without any progress.
    transfer_stall_seconds: float = 30.0

    #: How often an agent looks for blobs that a program of the pod is getting, while another pod
    #: waits for them.
    arrival_check_seconds: float = 0.05
    #: The same while none comes: the pause doubles up to this.
    arrival_longest_check_seconds: float = 0.4
    #: Time after which such an answer ends, so that the other pod sees that this one is alive.
    arrival_seconds: float = 2.0

    # ------------------------------------------------------------------ interpreters, environments
    #: Time that one interpreter has to report its version. A broken one fails at once; a working
    #: one may start slowly in a small pod on a full node.
    interpreter_probe_seconds: float = 30.0
    #: Time for all interpreters together.
    interpreter_search_seconds: float = 60.0
    #: Time after which an environment that no agent used is removed.
    venv_longest_unused_seconds: float = 14 * 86400.0
    #: Age from which an unfinished environment counts as abandoned.
    venv_abandoned_seconds: float = 86400.0

    # ------------------------------------------------------------------------------------- workers
    #: Time that a cancelled call has to end before its worker is killed.
    call_cancel_seconds: float = 2.0
    #: Time that a worker without calls has for its exit handlers.
    worker_stop_seconds: float = 5.0
    #: Time until a killed process is given up: the kernel may hold it.
    worker_kill_seconds: float = 10.0
    #: Pause between two checks for memory files that can be given back, while there are any.
    memory_trim_interval_seconds: float = 1.5
    #: Pause between two checks of the memory of all processes, which fill it within a second.
    memory_check_interval_seconds: float = 0.05
    #: Part of a processor that these checks take at most.
    memory_check_share: float = 0.05
    #: Time that a worker has to answer with its stacks.
    stacks_answer_seconds: float = 1.5
    #: Time that its handler of a signal has after that, which needs no thread that reads.
    stacks_signal_seconds: float = 1.5
    #: Time without another byte after which an answer is complete.
    stacks_quiet_seconds: float = 0.1
    #: Time for a preload: large libraries come from a slow disk.
    zygote_preload_seconds: float = 300.0
    #: Time for a fork. The first one waits for the start of an interpreter, which takes long in a
    #: small pod on a node that is full.
    zygote_fork_seconds: float = 30.0
    #: Time that a zygote has to tell an exit status, and to end.
    zygote_status_seconds: float = 1.0

    # -------------------------------------------------------------------------------------- output
    #: Pause between two states of a progress bar (text that ends in a carriage return).
    progress_bar_interval_seconds: float = 0.5

    # ---------------------------------------------------------------------------------- frameworks
    #: Time that a node of Ray or Monarch has to end by itself.
    framework_node_stop_seconds: float = 3.0
    #: Pause between two attempts to join a head of Ray that has not started, and two health checks.
    ray_retry_delay_seconds: float = 0.5
    #: Pause between two attempts to reach a host of Monarch that does not listen yet.
    monarch_retry_delay_seconds: float = 0.1
    #: Time for one health check of Ray.
    ray_health_seconds: float = 5.0

    # ---------------------------------------------------------------------------------------- apps
    #: Pause before the second attempt to reach an app that starts; it doubles each time.
    app_probe_first_delay_seconds: float = 0.02
    #: Pause between two attempts at most: a deploy waits for the app.
    app_probe_longest_delay_seconds: float = 0.25
    #: Time for one attempt.
    app_probe_seconds: float = 5.0
    #: Time by which an app has less to answer than its deploy, whose error can then say why.
    app_launch_margin_seconds: float = 5.0
    #: Time in which a command is noticed that cannot be run at all.
    app_settle_seconds: float = 0.2
    #: Time that an app has to listen on its own port once it listens on another one.
    app_other_port_seconds: float = 2.0
    #: Time that a request waits for an app that is being started.
    app_serving_wait_seconds: float = 30.0
    #: Time in which the end of an app is noticed that refuses or cuts off a connection.
    app_exit_notice_seconds: float = 2.0
    #: Time that an app has to end after SIGTERM.
    app_stop_seconds: float = 10.0
    #: Time for a killed app to be gone.
    app_kill_seconds: float = 10.0
    #: Part of it for leftover processes of a killed app's shell.
    app_leftover_seconds: float = 5.0

    def __post_init__(self) -> None:
        last_seconds = max(self.worker_close_seconds, self.outcome_upload_close_seconds)
        answer_seconds = self.shell_kill_seconds + self.server_close_seconds
        assert answer_seconds + last_seconds < self.closing_seconds, (
            "the last answers and outcomes fit in the time after the calls"
        )
        assert self.closing_seconds < self.kill_grace_seconds, "calls have a part of the grace"
        assert self.rank_heartbeat_seconds <= self.heartbeat_seconds, "ranks are watched closer"
        assert (
            self.load_change_seconds < self.load_report_seconds < self.idle_usage_report_seconds
        ), "the more happens, the more reports there are"
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


class Limits(Table):
    """Bytes and counts that the agent has at most."""

    # ----------------------------------------------------------------- session with the controller
    #: Longest message of a controller, which may name the pods of a large service.
    controller_message_bytes: int = 16 * 1024 * 1024
    #: Line of a log, or text of a stage, that is sent.
    report_text_characters: int = 64 * 1024
    #: Lines of a loading worker that are sent; kt logs has the others.
    load_log_lines: int = 1000
    #: Names of metrics of user code, over all processes of the pod.
    metric_names: int = 100
    #: Processes that have reported metrics and live.
    metric_processes: int = 1000
    #: Line with a value of a metric, which its process writes at once: POSIX allows 512 bytes.
    metric_line_bytes: int = 512
    #: Bytes that are read from the pipe of metrics at one time; then it is the turn of calls.
    metric_read_bytes: int = 64 * 1024

    # ------------------------------------------------------------------------------------- clients
    #: Connections that wait to be accepted: all clients may come at once.
    listen_backlog_connections: int = 2048
    #: Clients at one time, with or without a connection.
    clients: int = 4096
    #: Bytes that are sent and not acknowledged; a client that never acknowledges gets no more.
    unacknowledged_bytes: int = 64 * 1024 * 1024
    #: Values of a generator that are granted together.
    granted_values: int = 8
    #: Genuine tokens that are remembered, so that each is verified once.
    verified_tokens: int = 256
    #: Shells at one time.
    shells: int = 32
    #: Stopped programs of one pod, each with a connection: every rank and thread may stop.
    debug_sessions: int = 128
    #: Those of them without a terminal at which callers had their calls stop (debug=True): whoever
    #: may call a service must not hold all its slots by that.
    requested_stops: int = 8
    #: Path of a Unix socket, on every system.
    socket_path_bytes: int = 100
    #: Name of the user at a terminal, which another user is shown.
    debug_user_characters: int = 100
    #: Running calls that are named when the one that is to stop does not run.
    debug_named_calls: int = 5
    #: Input that waits for a shell that does not read; beyond, the client is not read either.
    shell_input_bytes: int = 256 * 1024

    # ---------------------------------------------------------------------------------------- HTTP
    #: Body of a `POST`, decompressed; streams take more.
    post_body_bytes: int = 64 * 1024 * 1024
    #: JSON that is parsed in the event loop; a thread parses longer bodies.
    loop_parsed_bytes: int = 1024 * 1024
    #: One value of a generator, as JSON, in a call of all pods.
    broadcast_value_bytes: int = 1024 * 1024 * 1024
    #: Siblings that are asked how many calls they have; where there are more, chance chooses.
    asked_siblings: int = 8
    #: A sibling's answer to that, which is one number.
    sibling_load_answer_bytes: int = 1000
    #: Lines of the log that `GET /v1/logs` begins with, unless the request says a number.
    log_tail_lines: int = 100
    #: The largest such number.
    log_tail_longest_lines: int = 1_000_000

    # --------------------------------------------------------------------------------------- calls
    #: Calls that the pod knows at one time, whatever their state.
    pod_calls: int = 10_000
    #: Name of a method, and an id, which reports and lines repeat.
    call_name_characters: int = 1000
    #: Names of all errors after which a call runs again.
    retry_names_characters: int = 32_000
    #: Message of a report of how far a spawned call has come.
    spawned_progress_characters: int = 200
    #: Items of maps that run side by side in a process, if an event loop runs them.
    loop_items: int = 64
    #: Quick items that a process has ahead of the item it runs.
    items_ahead: int = 16
    #: Arguments of an item that may be ahead: larger ones lie in memory that is lent.
    item_ahead_bytes: int = WORKER_LIMITS.inline_bytes
    #: Maps that are remembered, so that the use of the processor is measured once for each.
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
    #: Size of a file from which on the next one is begun; a file goes with its last outcome.
    kept_outcomes_file_bytes: int = kept_outcomes_bytes // 8
    #: Memory that an outcome counts beside its own bytes.
    kept_outcome_overhead_bytes: int = 1024
    #: The same of a value that could not travel, whose file the agent has open.
    kept_value_overhead_bytes: int = 16 * 1024 * 1024
    #: Outcomes of spawned calls that wait for the controller; beyond, the oldest is given up.
    waiting_outcomes_bytes: int = 1024**3
    #: Arguments that the record of a call may have; of larger ones it says the size.
    recorded_arguments_bytes: int = 16 * 1024 * 1024
    #: Arguments of all calls that run, which wait for the outcomes.
    recordable_arguments_bytes: int = 128 * 1024 * 1024
    #: Records of failed calls that were not spawned, in `recorded_failures_seconds`: a service that
    #: fails again and again must not push out what other calls have left.
    recorded_failures: int = 100
    #: Records that wait for the controller, in memory; further ones are given up.
    waiting_records_bytes: int = 64 * 1024 * 1024
    #: Outcomes that are uploaded together.
    outcome_batch_calls: int = 64
    #: Their bytes, but for a single outcome.
    outcome_batch_bytes: int = 4 * 1024 * 1024
    #: Outcome that stays in memory until the controller has it.
    small_outcome_bytes: int = 4096
    #: Part of an outcome that is written or read at a time; a thread writes longer outcomes.
    outcome_piece_bytes: int = 1024 * 1024
    #: Outdated lines in the list of calls before it is written anew.
    outdated_call_lines: int = 10_000

    # --------------------------------------------------------------------------------------- ranks
    #: Failures of other ranks that are attached to the first one.
    attached_failures: int = 16
    #: Their JSON together, so that the failure still travels in one frame.
    attached_failures_bytes: int = 512 * 1024
    #: Values of all ranks together from which on they lie in a memory file.
    joined_memory_file_bytes: int = 1024 * 1024

    # ------------------------------------------------------------------------- streams to siblings
    #: Proof that a connection for memory files belongs to a stream; most of it is a token.
    stream_proof_bytes: int = 16 * 1024
    #: Connections for memory files that have proved nothing yet; the oldest go first.
    silent_file_connections: int = 64
    #: Rounds of a generator that a sibling may send before the caller reads one.
    peer_rounds_ahead: int = 16
    #: Value of a sibling from which on it lies in a memory file.
    peer_memory_file_bytes: int = 1024 * 1024

    # ------------------------------------------------------------------------- code, blobs, reload
    #: Older generations that may still have calls; with one more, the oldest is ended.
    draining_generations: int = 2
    #: Threads that read what the pod publishes: each has a blob in memory.
    publishing_threads: int = 4
    #: A request that names such blobs.
    blob_names_bytes: int = 20 * 1024 * 1024
    #: Threads that fetch at one time, and as many that send: each may hold a blob in memory.
    transfer_threads: int = 8
    #: Names that a warning lists.
    warned_names: int = 5

    # -------------------------------------------------------------------------------------- images
    #: Request to run a step.
    step_body_bytes: int = 1024 * 1024
    #: Lines that wait for a slow client; further ones are dropped, and counted.
    step_waiting_lines: int = 10_000
    #: Lines of a step's output that its error shows.
    step_error_lines: int = 30
    #: Versions of the data at a path: the latest, and the one before for readers of several files.
    shown_versions: int = 2
    #: Part of the time to launch for which a pod waits until another pod of its node has fetched
    #: the data: the rest is for a fetch of its own.
    shared_fetch_share: float = 0.5
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
    #: Values of references that an agent has, each of which may take a descriptor; more than a call
    #: may name.
    references: int = 1000
    #: The same in bytes, where the memory of the pod is unknown.
    references_bytes: int = 1024**3
    #: Part of the pod's memory, as a divisor, that they may take.
    references_divisor: int = 2
    #: Part of the pod's memory, as a divisor, that views of one process keep in files of another.
    memory_share_divisor: int = 4
    #: Calls that an error about a lost worker names.
    named_lost_calls: int = 10
    #: Reads of the frames that an ended worker left in its socket, of which there are hundreds.
    ended_worker_reads: int = 1000
    #: Output that a worker's pipe holds; where that is not allowed, it keeps the system's size.
    output_pipe_bytes: int = 256 * 1024
    #: Answer with the stacks of a worker that is read.
    stacks_bytes: int = 1024 * 1024
    #: Zygotes that may be lost over one preload before it is not tried any more.
    preload_losses: int = 2
    #: Attempts to start a worker: one more than zygotes may be lost.
    worker_start_attempts: int = preload_losses + 1
    #: One message from a zygote.
    zygote_message_bytes: int = 1024 * 1024

    # -------------------------------------------------------------------------------------- output
    #: Line; a longer line arrives as several lines.
    line_bytes: int = 64 * 1024
    #: Unfinished lines that wait, over all calls and processes; beyond, the oldest is delivered.
    unfinished_lines: int = 256
    #: One segment of the log; there are two.
    log_segment_bytes: int = 8 * 1024 * 1024
    #: Text of one line that the log keeps.
    log_text_characters: int = 64 * 1024
    #: Lines that wait for one slow follower; the oldest go first.
    follower_lines: int = 10_000
    #: Lines that a follower gets in one piece.
    follower_piece_lines: int = 500

    # ---------------------------------------------------------------------------- frameworks, apps
    #: Lines of a framework node's output that an error shows.
    framework_node_error_lines: int = 15
    #: Answer of Ray's health check, which is one word.
    ray_health_answer_bytes: int = 1000
    #: Lines that an error about an app ends with.
    app_error_lines: int = 20
    #: Requests and WebSockets of an app at one time.
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
            "the generation that loads, the one before it, and those with calls keep environments"
        )
        assert self.log_tail_lines <= self.log_tail_longest_lines, "the usual tail is allowed"
        assert WORKER_LIMITS.unfinished_line_bytes <= self.line_bytes, (
            "a line that the worker collects arrives as one"
        )


TIMING = Timing()
LIMITS = Limits()
