"""Times and limits of the controller, in a cluster and in the local service."""

from __future__ import annotations

from kubetorch.datastore.tuning import LIMITS as STORE_LIMITS
from kubetorch.k8s.tuning import LIMITS as CLIENT_LIMITS
from kubetorch.k8s.tuning import TIMING as CLIENT_TIMING
from kubetorch.lib.tuning import TIMING as LIB_TIMING
from kubetorch.lib.tuning import Table


class Timing(Table):
    """Times of the controller; all in seconds."""

    # ----------------------------------------------------------------------------------- server
    #: Requests have it to end when the controller stops.
    server_close_seconds: float = 1.0
    #: A write waits for another process that has locked the file of the state.
    database_lock_seconds: float = 5.0

    # ----------------------------------------------------------------------- sessions of agents
    #: A pod is not ready after so long without a message: three of its heartbeats.
    session_silence_seconds: float = 15.0
    #: A connection has it to send its `Hello`; agents send it at once.
    session_hello_seconds: float = 10.0

    # ----------------------------------------------------------------------------------- worlds
    #: Between two `Tick`s: a fraction of a member's silence.
    world_tick_seconds: float = 0.25
    #: After a longer time between two ticks, this process is taken to have been stopped.
    world_stall_seconds: float = world_tick_seconds + 1.0
    #: A member is suspected after so long without a message: two heartbeats of a rank, and some.
    member_silence_seconds: float = 1.25
    #: No member is suspected at first: agents connect again to a new controller.
    world_start_grace_seconds: float = 3.0
    #: No member is suspected after a stall: the messages that waited are read first.
    world_resume_grace_seconds: float = 1.0
    #: Members have it to report whether they reach a suspect: their own probe, and the way.
    suspect_probe_seconds: float = 1.2
    #: The backend has it to report why an agent ended whose session has ended.
    backend_report_seconds: float = 0.5
    #: After the begin of a session, a backend may still report the earlier agent.
    backend_lag_seconds: float = 3.0
    #: The other pods have it to connect once a quorum is connected.
    quorum_settle_seconds: float = 2.0

    # ---------------------------------------------------------------------------------- buckets
    #: A program that talks to a bucket reports progress by then, or is ended: longer than all
    #: attempts of a request.
    bucket_silence_seconds: float = 300.0
    #: Getters that wait for a bucket hear by then that it is still being pulled.
    bucket_heartbeat_seconds: float = 5.0
    #: A program has it to take back what it has half written.
    bucket_end_seconds: float = 5.0

    # ---------------------------------------------------------------------------------- scaling
    #: An idle stop is announced so long before, or when a third of its time is left.
    idle_notice_seconds: float = 60.0
    #: A client that waits for pods gets an answer by then, and asks again.
    longest_pod_wait_seconds: float = 20.0
    #: The calls of a client that waits for pods count so much longer: it asks again.
    pod_wait_gap_seconds: float = 2.0
    #: A request that waits for a pod is refused by then if pods fail to start: the next may not.
    failed_start_seconds: float = 3.0
    #: Between two decisions while calls wait for a pod: their clients may be gone.
    scaling_tick_seconds: float = 1.0

    # ---------------------------------------------------------------------------------- deploys
    #: Running agents have it to connect: the controller may have just started.
    agent_connect_seconds: float = 3.0
    #: After the start of its container, an agent may still be starting.
    agent_start_seconds: float = 15.0
    #: Lost pods are remembered, so that an answer can say why they have ended.
    remembered_loss_seconds: float = 120.0
    #: Changes of a large workload are collected so long for each of its pods.
    pod_change_delay_seconds: float = 20e-6
    #: Most that a delete waits for calls.
    delete_longest_grace_seconds: float = 3600.0

    # ------------------------------------------------------------------------------------ calls
    #: Until records that could not be written are tried again.
    call_write_retry_seconds: float = 5.0
    #: The result of a spawned call is kept: a client may ask for it on the next day.
    call_result_seconds: float = 24 * 3600.0
    #: The record of a call is kept: a failure of last week may be looked into.
    call_record_seconds: float = 7 * 24 * 3600.0
    #: The record of a call comes so long behind its end at most: pods upload it in batches.
    call_record_wait_seconds: float = 5.0
    #: The first report of a spawned call may take it: less than clients wait for an answer.
    call_first_report_seconds: float = 1.0
    #: The report of a call may take it; an idle service is kept for so much longer.
    call_report_seconds: float = 1.0
    #: After the start, until the calls of missing pods are failed: pods connect again first.
    call_sweep_delay_seconds: float = 30.0
    #: Until that is repeated: pods that were not known then may be known to be missing.
    call_sweep_interval_seconds: float = 600.0

    # ---------------------------------------------------------------------------- idle services
    #: Changes of the last call's time that are smaller are not stored.
    activity_step_seconds: float = 1.0
    #: Without a call for so long, another callable may replace a service of a cluster.
    unused_service_seconds: float = 600.0

    # ---------------------------------------------------------------------------------- scaling
    #: Between two decisions while there is load: Knative decides every 2 s.
    scaling_interval_seconds: float = 1.0
    #: Times of decisions that differ by less are the same: sums of floats are not exact.
    scaling_rounding_seconds: float = 1e-3
    #: Load that comes to an idle service is averaged over it at least: calls of a few milliseconds
    #: start no pods, and a step is decided within half a second.
    standing_start_seconds: float = 0.25
    #: Between two steps down, each of at most half of the pods: the ticks of Knative.
    scale_down_interval_seconds: float = 2.0
    #: After so long without a report, a pod is taken to have no calls: as long as a session may be
    #: silent.
    load_silence_seconds: float = session_silence_seconds
    #: After a longer time without a report, reports were lost, or there was no load: what the next
    #: one brings is spread over the time in which it came.
    load_gap_seconds: float = 2 * scaling_interval_seconds
    #: And it came within so long at least: less is no time to divide by.
    shortest_load_seconds: float = 0.001
    #: A decision that is so late was not forgotten: the clock has jumped.
    scaling_stall_seconds: float = 5.0
    #: Between two looks at the clock where a schedule sets `min_scale`: the clock may jump.
    schedule_check_seconds: float = 60.0
    #: Calls per second are counted over it.
    call_rate_seconds: float = 5.0

    # ------------------------------------------------------------------------------------ blobs
    #: A pod has it to send missing blobs, until another pod is asked.
    blob_recovery_seconds: float = 30.0
    #: The same, while a pod waits for the blobs.
    awaited_blob_recovery_seconds: float = 3.0
    #: After its last upload, a blob is never deleted: its deploy may be under way.
    young_blob_seconds: float = 600.0
    #: Between two collections, each of which reads all names of blobs.
    collection_interval_seconds: float = 1800.0
    #: From the start of the controller to the first collection: deploys come first.
    collection_first_delay_seconds: float = 20.0

    # ------------------------------------------------------------------------------------- logs
    #: An agent has it to begin its answer with lines of a log.
    agent_log_seconds: float = 5.0
    #: A token with which the controller reads the logs of pods; it is used at once.
    log_token_seconds: float = 60.0

    # ------------------------------------------------------------------------- tokens for calls
    #: A token for calls is valid for so long by default.
    call_token_seconds: float = 3600.0
    #: And at least: a shorter token could end on its way.
    call_token_shortest_seconds: float = 1.0
    #: And at most: a stolen token is good until then.
    call_token_longest_seconds: float = 30 * 86400.0

    # ---------------------------------------------------------------------------------- volumes
    #: A delete waits until a volume is deleted for so long by default.
    volume_deletion_seconds: float = 60.0
    #: And at most, if the request asks for it.
    volume_deletion_longest_seconds: float = 600.0

    # ------------------------------------------------------------------------- the local service
    #: Calls of a replaced pod have it to end.
    replaced_pod_grace_seconds: float = 30.0
    #: Calls of a pod have it to end when the service stops.
    stopped_pod_grace_seconds: float = 5.0
    #: From the end of a pod's grace to SIGKILL: the agent ends its session.
    agent_exit_seconds: float = 2.0
    #: 10 years: a token ends with its pod, since only tokens of existing pods are accepted.
    pod_token_seconds: float = 10 * 365 * 86400.0
    #: After so long a run, the delays of an agent's restarts begin anew.
    stable_agent_seconds: float = 60.0
    #: Before the second restart of an agent in a row; the first is at once.
    agent_restart_first_delay_seconds: float = 0.1
    #: And at most: a mended service starts within it.
    agent_restart_longest_delay_seconds: float = 30.0
    #: An unused spare agent is dropped, since it takes memory.
    spare_agent_seconds: float = 60.0
    #: The test of mount namespaces has it to end, on a machine that may be busy.
    mount_probe_seconds: float = 20.0

    # ------------------------------------------------------------- objects of workloads: applying
    #: An object that is to be made anew has it to disappear, with its pods.
    object_deletion_seconds: float = 60.0
    #: Between two attempts to apply an object, at first.
    apply_first_delay_seconds: float = 0.5
    #: And at most.
    apply_longest_delay_seconds: float = 5.0
    #: Between two attempts to adopt a workload, at first.
    adoption_first_delay_seconds: float = 1.0
    #: And at most.
    adoption_longest_delay_seconds: float = 30.0
    #: Between two attempts to set the number of pods of a Deployment, at first.
    scale_first_delay_seconds: float = 0.2
    #: And at most.
    scale_longest_delay_seconds: float = 10.0
    #: Between two checks whether a Service leads to a pod that is ready.
    endpoints_recheck_seconds: float = 0.2
    #: Whether the cluster has Knative is remembered: a controller that starts asks per workload.
    engine_recheck_seconds: float = 2.0
    #: A controller that starts waits for the owners of a workload's pods.
    owner_lookup_seconds: float = 2.0
    #: Between two attempts to read an owner, at first.
    owner_first_delay_seconds: float = 0.5
    #: And at most.
    owner_longest_delay_seconds: float = 15.0
    #: Each refused pod of a workload ends so much later than the one before: the owner makes a new
    #: pod at once.
    refused_pod_delay_step_seconds: float = 2.0
    #: And at most.
    refused_pod_longest_delay_seconds: float = 300.0
    #: All pods have to be listed within it when the controller starts.
    pod_list_seconds: float = 30.0
    #: The Pod Security level of a namespace is remembered, since it hardly ever changes.
    security_level_recheck_seconds: float = 300.0
    #: Before an upload of a secret is decided again because another writer was faster, at first.
    secret_first_delay_seconds: float = 0.01
    #: And at most.
    secret_longest_delay_seconds: float = 0.5

    # --------------------------------------------------------- objects of workloads: their failures
    #: A kubelet counts the ends of a container from the beginning after so long a run.
    kubelet_backoff_reset_seconds: float = 600.0
    #: The end of a container is reported for so long while the container runs again.
    restart_report_seconds: float = 10.0
    #: No node has to fit for so long before a launch fails: an autoscaler reports after the
    #: scheduler, and a node that is set up anew disappears for a moment.
    unschedulable_settle_seconds: float = 2.5
    #: A pod that no scheduler has looked at is reported after it.
    scheduler_silence_seconds: float = 4.0
    #: An object has to be missing for so long: a deploy may make a pod before its secrets.
    missing_object_settle_seconds: float = 2.0
    #: Between two searches for a kind that the cluster does not serve: a user may install it.
    absent_kind_interval_seconds: float = 30.0
    #: The last lines of a container have to arrive within it.
    container_log_seconds: float = 3.0

    # ----------------------------------------------------------------------- access in a cluster
    #: A positive answer of the API server about a user is given again without asking: so late does
    #: a withdrawn right end.
    allowed_answer_seconds: float = 10.0
    #: The same for a negative answer: so late does a new right begin.
    denied_answer_seconds: float = 2.0
    #: The API server's answer about a user may take it.
    access_review_seconds: float = 15.0
    #: The token of the pods of a namespace is valid for so long; it is renewed long before.
    namespace_token_seconds: float = 365 * 86400.0
    #: So long before its end, the next deploy makes a new token. Pods that mount the Secret see
    #: the new token by themselves.
    namespace_token_renewal_seconds: float = 90 * 86400.0
    #: The Secret with the token is not read again for so long when it exists.
    present_token_recheck_seconds: float = 10.0
    #: The same when it does not exist: a deploy makes it.
    absent_token_recheck_seconds: float = 2.0

    # --------------------------------------------------------------------------------- the leader
    #: A lease that is not renewed keeps other candidates out.
    lease_seconds: float = 10.0
    #: After a renewal the leader may change something: less than the lease, so that it stops
    #: before another candidate begins.
    lease_tenure_seconds: float = 7.0
    #: Between two renewals: a renewal that fails is repeated within the tenure.
    lease_renewal_interval_seconds: float = 2.0
    #: One request for the lease may take it.
    lease_request_seconds: float = 3.0
    #: Between two checks that the watch of the lease works: a watch that broke is retried after
    #: longer pauses.
    lease_watch_interval_seconds: float = 0.5
    #: Until pods that could not be marked are marked again.
    leader_label_retry_seconds: float = 1.0

    # ----------------------------------------------------------------------------- the data store
    #: A reader may lease what it reads for so long: the largest keys take hours on slow networks.
    longest_data_lease_seconds: float = 24 * 3600.0
    #: A participant of a window that does not ask for so long has ended.
    window_silence_seconds: float = 30.0
    #: A token for the blobs that a pod publishes: a get of a large key takes hours.
    data_token_seconds: float = 24 * 3600.0
    #: A pod's token for a store of its own; the pod gets another one before it ends.
    store_token_seconds: float = 3600.0
    #: The token of one request to such a store, which checks it when the request comes.
    relay_token_seconds: float = 60.0
    #: Such a store answers the controller itself within it: it reads and writes no blob then.
    store_answer_seconds: float = 30.0
    #: A request waits so long for such a store to listen: it may be about to start anew.
    store_patience_seconds: float = 7.0
    #: A connection to it is there within it: both are in one cluster.
    store_connect_seconds: float = 2.0
    #: Between two tries to connect to it.
    store_connect_interval_seconds: float = 0.2
    #: Until such a store, which did not answer, is asked again to end the keys of a service.
    store_retry_seconds: float = 2.0

    # ------------------------------------------------------------------------ state in a cluster
    #: All workloads have to be listed within it when the controller starts.
    workload_list_seconds: float = 60.0
    #: Between two writes of a status, and between two corrections of edits by others.
    status_interval_seconds: float = 1.0
    #: Between two writes of a status in which only the time of the last call is new.
    activity_interval_seconds: float = 60.0
    #: Until a status that was refused is tried again.
    refused_status_interval_seconds: float = 60.0
    #: Before a failed write is repeated, at first.
    state_write_first_delay_seconds: float = 0.1
    #: And at most.
    state_write_longest_delay_seconds: float = 3.0
    #: A deploy or a delete waits for an API server that does not answer: for more than one request.
    state_write_patience_seconds: float = 45.0
    #: The announcement of a new world waits until the world is written.
    world_write_seconds: float = 5.0
    #: Unwritten changes have it when the controller stops.
    state_close_seconds: float = 5.0
    #: Until a process that does not lead checks again whether it leads.
    follower_interval_seconds: float = 0.2

    def __post_init__(self) -> None:
        assert self.world_tick_seconds < self.member_silence_seconds, (
            "a silent member is seen at one of the ticks"
        )
        assert self.member_silence_seconds < self.world_start_grace_seconds, (
            "members send a message before the first of them is suspected"
        )
        assert self.member_silence_seconds < self.session_silence_seconds, (
            "a world learns of a silent member before its session ends"
        )
        assert self.standing_start_seconds <= 0.25, (
            "a step from idle is decided within half a second of its first report"
        )
        assert self.load_gap_seconds < self.load_silence_seconds, (
            "a pod whose reports are lost has its calls until it counts as silent"
        )
        assert self.awaited_blob_recovery_seconds <= self.blob_recovery_seconds, (
            "a pod that waits is a reason to ask sooner"
        )
        assert (
            self.call_token_shortest_seconds
            <= self.call_token_seconds
            <= self.call_token_longest_seconds
        ), "the default of a token is a value that a request may ask for"
        assert self.state_write_patience_seconds > CLIENT_TIMING.request_seconds, (
            "a write is tried again after a request that was not answered"
        )
        assert self.volume_deletion_seconds <= self.volume_deletion_longest_seconds, (
            "the default of a wait is a value that a request may ask for"
        )
        assert (
            self.lease_renewal_interval_seconds < self.lease_tenure_seconds < self.lease_seconds
        ), "a leader renews before it has to stop, and stops before another begins"
        assert self.lease_watch_interval_seconds < self.lease_seconds, (
            "a watch that broke is noticed before the lease ends"
        )
        assert (
            self.store_patience_seconds + self.store_connect_seconds
            < LIB_TIMING.proxy_connect_seconds
        ), "the last try to reach the store ends before the proxy gives up"
        assert self.namespace_token_renewal_seconds < self.namespace_token_seconds, (
            "a new token is not renewed at once"
        )


class Limits(Table):
    """Bytes and counts that the controller keeps at most."""

    # ---------------------------------------------------------------------------------- buckets
    #: Programs that talk to buckets at once: each has some 48 MiB of objects in memory.
    bucket_programs: int = 4
    #: Of them for one namespace, so that no namespace keeps the others waiting.
    bucket_programs_of_namespace: int = 2
    #: Addresses that are pulled, or wait for it.
    bucket_runs: int = 64
    #: Of them those of one namespace.
    bucket_runs_of_namespace: int = 16
    #: A line of such a program: its failure may name an object of a long path.
    bucket_line_bytes: int = 1024**2

    # ---------------------------------------------------------------------------------- scaling
    #: Lines about a service that readers of its logs get from the controller.
    notices: int = 20
    #: Requests of plain HTTP that wait for a pod of one service.
    held_requests: int = 1_000
    #: Programs and requests that wait for a pod of one service.
    waiting_clients: int = 10_000
    #: Waiting calls that one client may name; more scale nothing further.
    waiting_calls: int = 1_000_000

    # ---------------------------------------------------------------------------------- requests
    #: The body of a request by default; blobs and their names have limits of their own.
    request_body_bytes: int = 4 * 1024 * 1024
    #: The head of a deploy: rendering it takes tens of milliseconds.
    deploy_head_bytes: int = 128 * 1024
    #: Connections that wait to be accepted: all pods of a large workload may connect at once.
    waiting_connections: int = 1024
    #: Groups of a user that are named in a line of the audit log.
    audited_groups: int = 20
    #: Lines per minute about requests of senders that were not identified, so that they cannot
    #: fill the log.
    unidentified_lines: int = 60

    # ------------------------------------------------------------------------ sessions of agents
    #: Longest message of an agent: a failure with its traceback.
    session_message_bytes: int = 4 * 1024 * 1024
    #: Longest `Hello` of any sender.
    hello_bytes: int = 16 * 1024
    #: Longest `Hello` of a pod of a workload, which may name tens of thousands of spawned calls.
    pod_hello_bytes: int = 1024 * 1024
    #: Sessions of one identity that have not said `Hello`.
    waiting_sessions: int = 4

    # ------------------------------------------------------------------------------------ worlds
    #: Members that try to reach a suspect.
    probing_pods: int = 3
    #: Members that are looked at to find these.
    probing_candidate_pods: int = 64
    #: Suspects that are added by one tick: a broken network must not order thousands of probes.
    suspects_per_tick: int = 500
    #: Stored worlds, unpacked.
    stored_world_bytes: int = 64 * 1024 * 1024

    # ----------------------------------------------------------------------------------- deploys
    #: Lines of loading code in the events of one deploy; logs have all lines.
    deploy_log_lines: int = 10_000
    #: And their characters.
    deploy_log_characters: int = 2 * 1024 * 1024
    #: Messages about progress in the events of one deploy.
    deploy_stages: int = 10_000
    #: Deploys that a repeated request can join.
    remembered_deploys: int = 32
    #: Secrets and volumes that a workload may have.
    mounted_stores: int = 200
    #: A user name and each part of an origin; paths have no more.
    origin_text_characters: int = 4096
    #: Lost pods that are remembered.
    remembered_lost_pods: int = 100
    #: From this number of pods on, changes are collected.
    debounced_pods: int = 100

    # ------------------------------------------------------------------------------------- calls
    #: Records in memory; beyond, the oldest are lost.
    unwritten_calls: int = 10_000
    #: All results together; beyond, the oldest are dropped.
    call_result_bytes: int = 1024**3
    #: Bytes below that down to which results are dropped: the search for the oldest reads all
    #: records.
    call_result_slack_bytes: int = call_result_bytes // 16
    #: Records of calls in a namespace; beyond, the oldest are dropped.
    namespace_record_bytes: int = 1024**3
    #: Their number; beyond, the same: a list of calls reads all of them.
    namespace_records: int = 10_000
    #: One part in so many of both bounds is freed beyond that: the search reads all records.
    record_slack_divisor: int = 16
    #: Calls that are remembered, with or without a result.
    remembered_calls: int = 10_000
    #: Calls beyond that before the oldest are dropped: the search reads all records.
    surplus_calls: int = 1000

    # ---------------------------------------------------------------------------------- scaling
    #: Decisions of a service that are remembered.
    scaling_decisions: int = 20
    #: Pods per ready pod that one decision asks for at most: Knative's rate.
    scale_up_factor: int = 1000
    #: One part in so many of the ready pods stays at least when pods go: Knative's rate.
    scale_down_divisor: int = 2
    #: A value of a user's metric above this is no measurement: sums of such values lose all others.
    metric_value: int = 10**15
    #: The use of CPU or memory may be so far from the target: that of Kubernetes' autoscaler.
    scaling_tolerance_percent: int = 10
    #: The part of a pod that calls need no pod for: reports that come a little early or late move
    #: some percent of a short window.
    scaling_jitter_percent: int = 10

    # ------------------------------------------------------------------------------------- blobs
    #: Files of trees that are remembered, of all namespaces: three of the largest trees.
    remembered_files: int = 300_000
    #: Threads that receive, send and read blobs: more would keep the loop waiting for its turn.
    blob_threads: int = 2
    #: Threads that do so for keys whose blobs a bucket has: mostly they wait. With `blob_threads`
    #: they are as many as a process has on two cores.
    bucket_threads: int = 4
    #: Pods that are named in a reason.
    named_pods: int = 3
    #: Blobs that are deleted between two checks which blobs are needed.
    collection_batch_blobs: int = 100
    #: All blobs in one request, decompressed.
    upload_bytes: int = 4 * 1024**3
    #: A request that names digests: those of the largest tree, twice.
    blob_names_bytes: int = 20 * 1024 * 1024
    #: A blob that is sent as the delta to another is in memory, with the other: chunks of tensors
    #: have 4 MiB.
    delta_bytes: int = 16 * 1024**2

    # ----------------------------------------------------------------------------- the data store
    #: Bytes that are verified between two lines: seconds of a slow disk, which no client takes for
    #: silence.
    verified_piece_bytes: int = 256 * 1024**2
    #: A row of an encoded manifest, a file or a chunk, has about so many bytes: 64 are of a digest.
    #: So room is made for the rows before they are read.
    manifest_row_bytes: int = 70
    #: Pods that a getter is told: some may be gone, or have changed files.
    named_sources: int = 4
    #: Keys of a namespace: all of them are in memory, in some KiB each.
    namespace_keys: int = 100_000
    #: Pods that are known to have a manifest: a getter is told few of them.
    manifest_holders: int = 1_000
    #: Getters of a version that the store, or a pod, serves at a time as long as others have room:
    #: in a tree of two, the store sends two copies to however many pods that get it at once.
    source_getters: int = 2
    #: The same if all are full; of a pod also the largest fan-out of a `kt.BroadcastWindow`.
    source_most_getters: int = 50
    #: Getters that got nothing from a pod that gets a version itself, until no more are sent there:
    #: the first one may be cut off itself.
    complaints: int = 2
    #: The name of a get, or of a participant of a window.
    getter_characters: int = 64
    #: The name of a group of participants: by default the keys of the transfer.
    group_characters: int = 4096
    #: How a participant can pass tensors to others: a key, and the names of 16 GPUs.
    offer_bytes: int = 4096
    #: The services of a namespace and their pods, as a store of its own is told: 100,000 pods.
    namespace_services_bytes: int = 16 * 1024 * 1024
    #: States of the services of a namespace that such a store takes for known: requests that run
    #: at the same time may name different ones.
    remembered_service_states: int = 64
    #: How often a request to such a store is sent, which may have started anew in between.
    store_attempts: int = 3
    #: Faults of one key that are named.
    named_faults: int = 100

    # -------------------------------------------------------------------------------------- logs
    #: Lines that are shown by default.
    shown_log_lines: int = 100
    #: Lines by which a stream that broke is joined to the next stream.
    joined_log_lines: int = 1000
    #: Lines that wait for a slow reader.
    waiting_log_lines: int = 10_000
    #: One line: agents cut theirs at far less.
    log_line_bytes: int = 1024 * 1024
    #: Lines that are sent as one chunk.
    log_chunk_lines: int = 500

    # -------------------------------------------------------------------------- the local service
    #: Unshared memory of an agent, at the least: a workload that needs more is refused.
    agent_least_bytes: int = 20 * 2**20
    #: The same of a worker, which shares more.
    worker_least_bytes: int = 5 * 2**20
    #: Exits in a row, without readiness in between, after which a pod counts as failed.
    failed_starts: int = 3
    #: Last lines of `agent.log` in the error of a failed pod.
    failed_agent_lines: int = 20
    #: `agent.log`; a start begins a new one beyond.
    agent_log_bytes: int = 8 * 1024 * 1024
    #: Rounds of SIGKILL: a process may start others before it is killed.
    kill_rounds: int = 5

    # ---------------------------------------------------------------------- objects of workloads
    #: Launches that are repeated because their pods were refused for their rights or their users.
    launch_repeats: int = 3
    #: Owners above an object: a Service is owned by a Route, which a Knative Service owns.
    object_owners: int = 4
    #: Owners between a pod and the applied object: a worker of a LeaderWorkerSet has four.
    pod_owners: int = 8
    #: Workloads that are adopted at the same time.
    concurrent_adoptions: int = 16
    #: Annotations that are written at the same time.
    concurrent_annotations: int = 16
    #: Uploads of a secret that are decided again because another writer was faster.
    secret_attempts: int = 8
    #: The record of a takeover; an object has room for 256 KiB of annotations.
    takeover_record_characters: int = 200_000
    #: Namespaces of which the Pod Security level is remembered.
    remembered_security_levels: int = 1000
    #: Different events that are reported of one launch.
    reported_events: int = 500
    #: Last lines of a container's log in an error.
    container_log_lines: int = 20
    #: And their characters.
    container_log_characters: int = 4000

    # ------------------------------------------------------------------------ access in a cluster
    #: A token of a user; those of Kubernetes have one or two thousand.
    user_token_characters: int = 32 * 1024
    #: Reviews at one time: fewer than the client's requests at one time, so that strangers with
    #: many tokens hold up each other and no other request of the controller.
    concurrent_reviews: int = 12
    #: Answers of each kind that are remembered.
    remembered_answers: int = 4096
    #: Questions that wait for an answer at one time; further ones are refused.
    open_questions: int = 512

    # ------------------------------------------------------------------------- state in a cluster
    #: A workload, as JSON. etcd takes 1.5 MiB, of which the status and what the API server notes
    #: about the fields are parts.
    workload_bytes: int = 1024 * 1024
    #: A failure in a status; the log of the pod has all of it.
    failure_bytes: int = 64 * 1024
    #: Each text in such a failure.
    failure_text_characters: int = 8 * 1024
    #: Writes at the same time.
    concurrent_writes: int = 16

    def __post_init__(self) -> None:
        assert self.hello_bytes <= self.pod_hello_bytes <= self.session_message_bytes, (
            "a session that said `Hello` may send more than before"
        )
        assert self.probing_pods <= self.probing_candidate_pods, "enough members are looked at"
        assert self.call_result_slack_bytes < self.call_result_bytes, "some results stay"
        assert self.failure_text_characters < self.failure_bytes < self.workload_bytes, (
            "a workload has room for its failure, and a failure for its texts"
        )
        # 64 digits, two quotes and a comma.
        assert 2 * 67 * STORE_LIMITS.tree_entries < self.blob_names_bytes, (
            "one request can name the digests of the largest tree"
        )
        assert STORE_LIMITS.tree_files_bytes < self.upload_bytes, (
            "one request can have the files of the largest tree"
        )
        assert self.concurrent_reviews < CLIENT_LIMITS.concurrent_requests, (
            "reviews leave a turn for other requests"
        )


TIMING = Timing()
LIMITS = Limits()
