"""Times and limits of the client: of programs that deploy and call, and of `kt`."""

from __future__ import annotations

from kubetorch.lib.tuning import Table


class Timing(Table):
    """Times of the client; in seconds, unless a name says another unit."""

    # ------------------------------------------------------------------ the data store
    #: Pause before the second attempt to move blobs that were damaged on their way.
    data_retry_seconds: float = 0.2

    # ------------------------------------------------------------------ code in pods
    #: Pause between two values of one name that a process reports by `kt.metric`.
    metric_interval_seconds: float = 0.1

    # ------------------------------------------------------------------ a call's attempts
    #: Time that the agent gets to report itself that a call timed out.
    call_timeout_grace_seconds: float = 2.0
    #: Time before its end in which a timeout counts as over, as the waits before it may end early.
    call_timeout_early_seconds: float = 0.1
    #: Pause before the second attempt of a call that no pod took; it doubles each time.
    call_first_delay_seconds: float = 0.02
    #: Pause between two such attempts at most.
    call_longest_delay_seconds: float = 1.0
    #: Time after which a refused call had been accepted by its pod: its wait for pods begins anew.
    call_accepted_seconds: float = 1.0
    #: Time that a recalled call gets to report its end.
    recalled_call_seconds: float = 0.2

    # ------------------------------------------------------------------ the data store
    #: The store has it to answer: longer than it tries to reach its bucket, and says so.
    data_answer_seconds: float = 90.0
    #: The same for the question which keys there are, with which a get begins; it is asked twice.
    data_question_seconds: float = 45.0
    #: A get says after so long that the controller does not answer that question.
    data_silence_seconds: float = 5.0
    #: The metadata server of a node answers its pods within it; elsewhere nothing does.
    metadata_seconds: float = 1.0
    #: A pod asks so often whether there is a store of its own, and for a new token for it.
    store_connection_seconds: float = 600.0
    #: Such a store answers a pod within it, else the controller relays the pod's blobs.
    store_probe_seconds: float = 2.0
    #: Until the pod tries to reach it again.
    store_retry_seconds: float = 60.0
    #: A token for it is not used any more so long before its end: uploads begin with it.
    store_token_margin_seconds: float = 60.0
    #: The controller has it to name a pod to a get that goes on, and to hear what became of it;
    #: the get goes on without its answer.
    source_answer_seconds: float = 3.0
    #: A pod that sends nothing for so long is given up, and another one, or the store, is asked.
    peer_silence_seconds: float = 20.0
    #: The same of a pod that gets a version itself and says that nothing came: it waits for its own
    #: source, which may be silent, and the one after that, too.
    waiting_peer_seconds: float = 60.0
    #: A get that the store serves asks after so long whether a pod has room by now.
    store_question_seconds: float = 2.0
    #: Pause before a pod that gets a version itself is asked for more of it.
    peer_pause_seconds: float = 0.1
    #: A pod is given up that sends less than `slow_peer_bytes_per_second` for so long.
    peer_pace_seconds: float = 5.0
    #: Pause between two questions whether a window is closed.
    window_poll_seconds: float = 0.2
    #: A window that is not closed by then fails, unless it has a longer timeout itself.
    window_longest_seconds: float = 600.0
    #: A process that a putter does not answer offers to get tensors from no process for so long:
    #: a policy of the network may drop what it sends.
    unanswered_offer_seconds: float = 600.0
    #: Pause between two questions for the blobs of a put that runs on: the store collects blobs
    #: that no key has and were not asked for during ten minutes.
    blob_renewal_seconds: float = 240.0
    #: Age up to which a chunk in the cache of tensors is not deleted: a get makes the chunks that
    #: it will read young, and other processes put and get meanwhile.
    young_chunk_seconds: float = 600.0
    #: A collection of garbage reads the names of all blobs, and the manifests of all keys.
    collection_seconds: float = 600.0

    # ------------------------------------------------------------------ ways to pods
    #: Time for which calls wait for pods and a controller that are reached directly.
    direct_patience_seconds: float = 30.0
    #: The same through an ingress, which is restarted now and then.
    ingress_patience_seconds: float = 60.0
    #: The same through forwarded ports: an API server that restarts is away for a while.
    port_forward_patience_seconds: float = 90.0
    #: Time for which the permission to forward ports of a namespace's pods is remembered.
    forward_permission_seconds: float = 300.0
    #: Time that an API server has to answer.
    tunnel_answer_seconds: float = 10.0
    #: Time for which the tunnel repeats a request; its callers repeat for longer.
    tunnel_patience_seconds: float = 0.5
    #: Time that the tunnel's thread has to end its connections.
    background_end_seconds: float = 2.0
    #: Time that a listener on this machine has to start, and to stop.
    local_listener_seconds: float = 5.0

    # ------------------------------------------------------------------ connections to pods
    #: Time for the connection alone.
    stream_connect_seconds: float = 10.0
    #: Time for one attempt to connect a stream, the question to the controller included.
    stream_attempt_seconds: float = 5.0
    #: Pause before the second attempt; it doubles each time.
    stream_first_delay_seconds: float = 0.02
    #: Pause between two attempts at most.
    stream_longest_delay_seconds: float = 1.0
    #: Attempt of a distributed service, whose controller knows lost ranks: a question finds them
    #: sooner than a timeout.
    rank_attempt_seconds: float = 0.5
    #: Pause between two attempts of a distributed service at most.
    rank_longest_delay_seconds: float = 0.15
    #: Time for which a refusal may come from a server that still starts.
    starting_server_seconds: float = 3.0
    #: Time for which attempts go on to a pod that the controller does not know either.
    unknown_pod_seconds: float = 10.0
    #: Time that the controller has to learn why a pod ended: a kubelet reports it a second later.
    pod_end_reason_seconds: float = 3.0
    #: Pause between two checks for missing or new pods, while other pods take the calls.
    pod_check_seconds: float = 2.0
    #: Time of one request that waits for further pods.
    pod_wait_seconds: float = 10.0
    #: Time for which further pods are watched for after a call that found all pods busy.
    pod_watch_seconds: float = 2.0
    #: Pause between two reports of how many calls have no pod.
    waiting_report_seconds: float = 0.1
    #: Time after which the number is reported again, since the controller forgets it.
    waiting_refresh_seconds: float = 1.0
    #: Pause between two numbers of items that a map has not sent yet.
    waiting_items_seconds: float = 0.2
    #: Time in a pod's queue after which a call goes to a pod with room; it doubles with each move.
    queued_call_seconds: float = 0.1
    #: Time that a scaler may hold a connection before the controller is asked for the cause.
    scaler_hold_seconds: float = 10.0

    # ------------------------------------------------------------------ signs of life
    #: Silence after which the agent is asked for a sign of life; after two of them it is given up.
    stream_ping_seconds: float = 10.0
    #: The same of distributed services: a silent pod is known to be lost by then.
    rank_ping_seconds: float = 1.4
    #: The same through forwarded ports: a kubelet closes what it forwards 1 s after the pod does.
    forwarded_rank_ping_seconds: float = 0.4
    #: Time that a farewell waits for a connection that is being made again, and then for the
    #: agent's answer.
    stream_farewell_seconds: float = 1.0
    #: Pause between two looks for the answer to a farewell.
    stream_farewell_poll_seconds: float = 0.005
    #: Age up to which a pod's number of calls, those of other programs included, is valid.
    pod_load_seconds: float = 1.0

    # ------------------------------------------------------------------ threads of a connection
    #: Time for which a caller stays awake for a result: the kernel takes tens of µs to wake it.
    reader_awake_seconds: float = 0.0004
    #: Time without a caller that reads for itself after which the stream's thread reads.
    reader_idle_seconds: float = 0.1
    #: Time for which a peer counts as alive after it has sent bytes.
    live_peer_seconds: float = 0.005
    #: Time that the writer thread stays without work.
    writer_idle_seconds: float = 5.0
    #: Time after which a wait for room checks whether the connection is still the same.
    writer_room_milliseconds: int = 1000

    # ------------------------------------------------------------------ spawned calls
    #: Time for which a pod may not know a call that the controller says it runs.
    call_agreement_seconds: float = 10.0
    #: Time that a search takes at least, or a short timeout would never find the call.
    call_search_seconds: float = 2.0

    # ------------------------------------------------------------------ the controller
    #: Time that an API server has to say whether it has a controller.
    controller_detection_seconds: float = 1.5
    #: Time for which a question is repeated while a controller is away: one that restarts.
    controller_patience_seconds: float = 15.0
    #: Pause before a question is repeated; it doubles each time.
    controller_first_delay_seconds: float = 0.05
    #: Pause between two of the same questions at most.
    controller_longest_delay_seconds: float = 1.0
    #: Time for which a local service that ends may seem to run, although it does not answer.
    ending_service_seconds: float = 5.0
    #: Time that a controller has to say whether a service is there.
    service_lookup_seconds: float = 1.0
    #: Time that a requested token is valid.
    token_seconds: int = 3600
    #: Part of a token's life after which another is requested.
    token_renewal_share: float = 0.8
    #: Time after which the kubeconfig's own token is read again.
    kubeconfig_token_seconds: float = 30.0
    #: Time after which a token's file is read again; the kubelet replaces it long before it ends.
    token_file_seconds: float = 60.0

    # ------------------------------------------------------------------ deploys
    #: Pause before a deploy is sent again while a controller is away; it doubles each time.
    deploy_first_delay_seconds: float = 0.1
    #: Pause between two attempts of a deploy at most.
    deploy_longest_delay_seconds: float = 2.0
    #: Time beyond the `launch_timeout` that a silent controller gets.
    deploy_margin_seconds: float = 30.0
    #: Time that a program waits for another program that makes the id of the machine.
    machine_id_lock_seconds: float = 5.0
    #: Time beyond a step's own that the answer of the pod may take.
    image_step_margin_seconds: float = 30.0
    #: Time that `Volume.delete` waits until the volume is gone.
    volume_delete_seconds: float = 60.0

    # ------------------------------------------------------------------ logs, bars and shells
    #: Time by which a line may be older than the line above it: several processes write.
    log_disorder_seconds: float = 5.0
    #: Pause before a connection for logs is made again; it doubles each time.
    log_first_delay_seconds: float = 0.1
    #: Pause between two such connections at most.
    log_longest_delay_seconds: float = 2.0
    #: Time without an answer of a pod after which following it fails.
    log_patience_seconds: float = 60.0
    #: Time that an activity takes before it has a bar: most end before.
    bar_delay_seconds: float = 0.4
    #: Pause between two drawings of the bars.
    bar_drawing_seconds: float = 0.1
    #: Pause between two lines of an activity where there are no bars.
    bar_line_seconds: float = 5.0
    #: Time that an agent has to accept a shell.
    shell_accept_seconds: float = 10.0
    #: Time that a pod for a shell has to start: its volume may have to be made and attached first.
    shell_pod_start_seconds: float = 180.0
    #: Age at which that pod ends by itself, if the program could not delete it.
    shell_pod_seconds: int = 24 * 3600

    #: Time after which output without room to wait in checks whether the user is at a prompt.
    debug_room_seconds: float = 0.1
    #: Pause between two interrupts of a prompt whose debugger is over.
    debug_interrupt_seconds: float = 0.2
    #: Time that a debugger in a pod has to complete a name; a user who types waits no longer.
    debug_completion_seconds: float = 1.0
    #: Time that the debug adapter has to start, to attach and to end: it is on this machine.
    debug_adapter_seconds: float = 15.0
    #: Time in which a client leaves that is told that the session has ended.
    debug_farewell_seconds: float = 2.0
    #: Time in which a client of the adapter that has connected asks to attach.
    debug_client_seconds: float = 60.0
    #: Time that a browser has to send a request to the page of a debugger.
    debug_page_seconds: float = 30.0
    #: Time in which what dials the adapter begins a message, while others wait.
    debug_client_begin_seconds: float = 5.0
    #: Pause between two looks whether the debugger is over while no client has come.
    debug_client_poll_seconds: float = 0.2

    # ------------------------------------------------------------------ inside pods, and `kt`
    #: Pause between two reads of the members while pods are awaited.
    members_poll_seconds: float = 0.05
    #: Time that an API server has to answer `kt check` if api_url leads to the controller anyway.
    check_answer_seconds: float = 5.0
    #: Time that an API server has to answer a dry run, which needs the earlier values alone.
    dry_run_answer_seconds: float = 5.0
    #: Time that a pod has to answer a question about itself.
    pod_question_seconds: float = 10.0

    def __post_init__(self) -> None:
        assert self.waiting_peer_seconds > 2 * self.peer_silence_seconds, (
            "a pod that lost two sources in a row goes on before those that get from it leave it"
        )
        assert self.direct_patience_seconds < self.ingress_patience_seconds, (
            "calls wait longer where an ingress may restart, too"
        )
        assert self.ingress_patience_seconds < self.port_forward_patience_seconds, (
            "calls wait longest where the API server may restart, too"
        )
        assert self.stream_attempt_seconds < self.direct_patience_seconds, (
            "there is time for a second attempt"
        )
        assert self.forwarded_rank_ping_seconds < self.rank_ping_seconds, (
            "a kubelet adds its second to the silence of a pod"
        )
        assert self.waiting_report_seconds < self.waiting_refresh_seconds < self.pod_wait_seconds, (
            "a number is reported when it changes, and before the controller forgets it"
        )
        assert self.pod_end_reason_seconds < self.unknown_pod_seconds, (
            "the reason why a pod ended is known before its calls are lost"
        )
        assert self.stream_farewell_poll_seconds < self.stream_farewell_seconds, (
            "a farewell looks for its answer more than once"
        )
        assert self.tunnel_patience_seconds < self.tunnel_answer_seconds, (
            "the callers of the tunnel repeat a request, not the tunnel itself"
        )


class Limits(Table):
    """Bytes and counts that the client keeps or sends at most."""

    # ------------------------------------------------------------------ debuggers
    #: What a pod answers about its debuggers, and what a command for this program writes in a pod.
    pod_answer_bytes: int = 1024 * 1024
    #: Messages of a debugger that wait to be shown; the rest stays in the pod. At a prompt half of
    #: them may be output, and the rest of it is dropped.
    debug_messages: int = 64
    #: The name of an account, of a metadata server.
    metadata_bytes: int = 4096
    #: Output of one command on the page of a debugger, which a browser has to lay out.
    debug_page_bytes: int = 1024 * 1024
    #: Line of the header of a message of a debug adapter.
    debug_adapter_header_bytes: int = 1024
    #: Message of a debug adapter: a value that a client asks for in full.
    debug_adapter_message_bytes: int = 256 * 1024 * 1024
    #: Error of a replayed call on the one line that counts how runs end.
    replay_error_characters: int = 200
    #: Commands in the history of debuggers.
    debug_history_lines: int = 1000

    # ------------------------------------------------------------------ the data store
    #: Blobs that one request names: with their lengths they take less than a controller reads.
    named_blobs: int = 100_000
    #: Pods that fetch new versions of their data at once, for one `refresh_data`.
    refreshed_pods: int = 32
    #: Bytes that a get receives in a second at least: the store keeps for it what it reads, though
    #: the keys are put again meanwhile.
    slow_get_bytes_per_second: int = 10_000_000
    #: A pod that sends less is worse than the store, however busy that is.
    slow_peer_bytes_per_second: int = 50_000
    #: A get in a pod of so many bytes gets them from the pods that get them, too, at the same time:
    #: that costs two questions.
    joined_get_bytes: int = 4 * 1024**2
    #: Streams of one put or get: two keep both ends of a fast network busy, the others hide its
    #: delays.
    data_streams: int = 3
    #: Blobs of one stream; streams times this is what a put has in memory.
    data_batch_bytes: int = 4 * 1024**2
    #: Piece of a blob that is copied into a request.
    data_piece_bytes: int = 512 * 1024
    #: Attempts to send a blob that was damaged on its way, or to read files that change.
    data_attempts: int = 3

    # ------------------------------------------------------------------ calls
    #: Pods that may refuse a call because another one is less busy; the next one takes it.
    call_passes: int = 16
    #: Calls wait evenly in pods where one has no more than this fraction (4: a quarter) above the
    #: others: each move costs as much as a small call.
    uneven_share: int = 4
    #: Turns without a call that waits in a pod's queue after which nothing looks for such calls.
    idle_turns: int = 10
    #: Arguments that are kept beyond the time that it takes to send them, to send them again.
    kept_argument_bytes: int = 4 * 1024 * 1024
    #: Characters of all names in `retry_on`.
    retry_on_characters: int = 16_000
    #: Waits in a row that sleep at once, after others that stayed awake in vain.
    sleeping_waits: int = 1023
    #: Reports that a service runs other code.
    code_reports: int = 10
    #: Characters of one such report.
    code_report_characters: int = 2000

    # ------------------------------------------------------------------ code in pods
    #: Names of `kt.metric` in one process; as many have all processes of a pod together.
    metric_names: int = 100

    # ------------------------------------------------------------------ `map`
    #: Items that are under way or have a result that waits, unless there are many pods.
    map_items: int = 64
    #: Items that wait in a pod while others run.
    read_ahead_items: int = 8
    #: Small items that do, since they end sooner.
    small_read_ahead_items: int = 32
    #: Full batches of items that a process of a batched function is offered: one runs, one waits.
    offered_batches: int = 2
    #: Arguments of a small item.
    small_item_bytes: int = 16 * 1024
    #: Items that begin before the map wakes to send more; the end of an item always wakes it.
    begun_items_per_wakeup: int = read_ahead_items // 2

    # ------------------------------------------------------------------ connections to pods
    #: Message that is copied into one buffer.
    joined_message_bytes: int = 64 * 1024
    #: Payload from which on it lies in memory of its own, aligned as pages are.
    mapped_payload_bytes: int = 1024 * 1024
    #: Arguments that an event loop writes into a memory file itself; larger ones, a thread does.
    memory_file_at_once_bytes: int = 4 * 1024 * 1024
    #: Value of a reference from which on it lies in a memory file, which takes a descriptor.
    reference_memory_file_bytes: int = 256 * 1024
    #: References among the arguments of one call, whose identities travel in one frame.
    call_references: int = 250
    #: How often a call is made again since its pod lacks the value of a reference.
    reference_attempts: int = 2
    #: Reports of progress that wait for their reader; the oldest go first.
    progress_reports: int = 256
    #: Bytes that wait for the tunnel's thread before reading the far side pauses.
    tunnel_pause_bytes: int = 1024 * 1024
    #: Bytes that still wait when reading the far side goes on.
    tunnel_resume_bytes: int = 256 * 1024
    #: Kubelet's error about a connection that is logged.
    kubelet_error_bytes: int = 1000

    # ------------------------------------------------------------------ deploys
    #: Attempts of a deploy: the controller may go away or lack blobs, a file may change.
    deploy_attempts: int = 6
    #: Files that are read: what a deployed module imports beyond them is not preloaded.
    read_files: int = 2000
    #: Value that a notebook's file may have: each edit sends the file again.
    notebook_value_bytes: int = 16 << 20
    #: Characters of a literal that is easy to read, and quick to compile.
    literal_characters: int = 10_000
    #: Characters of a name that the controller accepts.
    origin_name_characters: int = 4096
    #: Amount of memory below which it is probably meant in another unit.
    little_memory_bytes: int = 2**16

    # ------------------------------------------------------------------ logs and deletions
    #: Lines of a pod that are remembered, to leave them out when they come again.
    remembered_lines: int = 10_000
    #: Lines that are requested beyond those that are shown: some are lines of agents, and two
    #: streams are joined at the lines that both have.
    margin_lines: int = 1000
    #: Lines that a new stream repeats from before the break.
    repeated_lines: int = 1000
    #: Deletions that run at the same time.
    parallel_deletions: int = 8

    def __post_init__(self) -> None:
        assert self.tunnel_resume_bytes < self.tunnel_pause_bytes, (
            "a side does not pause and go on with each message"
        )
        assert self.begun_items_per_wakeup < self.read_ahead_items < self.map_items, (
            "a pod has items left while the map wakes"
        )
        assert self.repeated_lines <= self.remembered_lines, "what a stream repeats is recognised"


TIMING = Timing()
LIMITS = Limits()
