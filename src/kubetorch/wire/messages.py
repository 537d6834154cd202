"""Control messages: deploys, the session of a pod with the controller, descriptions.

All are JSON. Structs that travel on one stream are tagged by `type`. Unknown fields are ignored by
the receiver. Times are seconds since the epoch, 0 where the time is not known.

A session is the WebSocket that an agent keeps to the controller, text messages:

    agent       Hello     Observed | StageReport | LogReport | Activity | CallReport
                                   | Regroup | Probed
    controller         Welcome     Reload | Terminate | CancelCall | Members | SendBlobs
                                   | Probe | RegroupFailed

After each connect the agent tells in `Hello` what it runs, and the controller sends what it should
run: so both converge without memory of earlier messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from kubetorch.errors import PodTerminatedError, ProtocolError
from kubetorch.lib.decoders import json_decoder
from kubetorch.specs.image import STEPS, Step
from kubetorch.specs.workload import WorkloadSpec


class AppView(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The app of a pod.

    Attributes:
        state: `starting`, `running` or `exited`.
        pid: Process id of its shell, while it lives.
        exit_code: Its exit status, as shells count: 128 and the signal's number when killed.
    """

    state: str
    pid: int | None = None
    exit_code: int | None = None
    started: float = 0.0
    ended: float = 0.0


class SlotHolder(msgspec.Struct, frozen=True, omit_defaults=True):
    """The call that a slot was taken for.

    Attributes:
        callable: Callable and method, `Counter.add`.
        began: When it began to run.
        calls: How many calls run in the slot, each made by the one before it.
        is_paused: The last of them is a generator whose reader does not read.
        waits_for: The call, perhaps of another service, that the last of them waits for.
    """

    callable: str
    began: float
    calls: int = 1
    is_paused: bool = False
    waits_for: str = ""


class QueueView(msgspec.Struct, frozen=True, omit_defaults=True):
    """The slots of a pod whose service bounds how many calls run at once.

    Attributes:
        slots, taken: Slots of all processes together, and taken slots.
        waiting: Calls that wait for a slot.
        since: When the first of them began to wait.
        strays: Waiting calls that code of a worker made outside of the context of its call: such a
            call may wait for the very call that waits for it.
        holders: The calls that hold the slots, as many as fit into a message.
    """

    slots: int
    taken: int
    waiting: int = 0
    since: float = 0.0
    strays: int = 0
    holders: tuple[SlotHolder, ...] = ()


def calls_that_wait(count: int) -> str:
    return "1 call waits" if count == 1 else f"{count} calls wait"


class Message(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag_field="type"):
    """Base of control messages."""


# --------------------------------------------------------------------- session: agent → controller


class Hello(Message, tag="hello", frozen=True):
    """First message of a session.

    Attributes:
        incarnation: Identity of the agent's process.
        url: Base URL at which the agent answers, such as `http://127.0.0.1:41234`.
        generation: Generation that serves calls; 0 when none does.
        python: Version of the interpreter that runs the user's code.
        calls: Ids of all spawned calls that run, or whose end was not reported.
        memory_socket: Path where clients of its machine pass memory files; empty without one.
    """

    namespace: str
    workload: str
    pod: str
    incarnation: str
    url: str
    protocol: int
    version: str
    generation: int = 0
    python: str = ""
    calls: tuple[str, ...] = ()
    memory_socket: str = ""


class Observed(Message, tag="observed", frozen=True):
    """The pod serves a generation, or failed to reach it and serves what it served before.

    Attributes:
        generation: The generation that `Reload` asked for.
        serving: The generation that serves calls now; 0 when none does.
        failure: Why the pod did not reach it, as a failure of `kubetorch.wire.exceptions`.
    """

    generation: int
    serving: int
    failure: dict[str, Any] | None = None


class StageReport(Message, tag="stage", frozen=True):
    """The progress of a reload: `fetching`, `preloading`, `importing`, ….

    Attributes:
        warning: Whether the user should see it even when progress is not shown.
        step, steps: The number of the image's step that begins, and the number of all steps.
    """

    generation: int
    stage: str
    message: str = ""
    warning: bool = False
    step: int | None = None
    steps: int | None = None


class LogReport(Message, tag="log", frozen=True):
    """A line that was written while a generation was loaded: by an import or a constructor."""

    generation: int
    text: str
    source: str = "stdout"
    level: str | None = None
    time: float = 0.0


class Activity(Message, tag="activity", frozen=True):
    """Sent when the pod becomes busy or idle, and every few seconds as a heartbeat.

    Attributes:
        calls: Calls and requests that run.
        last: Time of the last begin or end of one.
        is_stopping: The agent accepts no more calls, and ends after the running calls.
        queue: Its slots, if the service bounds its calls; `calls` counts waiting calls, too.
        stopped: Programs, most of them calls, that have stopped in a debugger.
    """

    calls: int
    last: float
    workers: int = 0
    app: AppView | None = None
    is_stopping: bool = False
    queue: QueueView | None = None
    stopped: int = 0


class PodLoad(Message, tag="load", frozen=True):
    """The load of a pod of an autoscaled service: sent when it changes, and while there is any.

    The sums count from the start of the agent, so a report that is lost or repeated changes
    nothing but the delay until the load is known.

    Attributes:
        calls: Calls and requests that run or wait.
        waiting: Those of them that wait for a slot.
        call_seconds: The integral of `calls` over the time since the agent's start.
        started: Calls and requests that came since the agent's start.
        cpu_seconds: CPU time of the pod's processes since the agent's start.
        memory_bytes: Memory that these processes use.
        metrics: By name: the last value that the user's code gave to `kt.metric`, and its Unix
            time.
    """

    calls: int
    waiting: int = 0
    call_seconds: float = 0.0
    started: int = 0
    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    metrics: dict[str, tuple[float, float]] = msgspec.field(default_factory=dict)


class ScalingDecision(msgspec.Struct, frozen=True):
    """A change of the number of pods of an autoscaled service.

    Attributes:
        time: Unix time.
        before, after: The numbers of pods.
        reason: Why, in words.
    """

    time: float
    before: int
    after: int
    reason: str


class ScalingView(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The scaling of an autoscaled service.

    Attributes:
        engine: `kubetorch`, or `knative` where Knative decides.
        wanted: Number of pods that the engine asks for.
        minimum, maximum: The bounds of that number now; a maximum of 0 is none.
        calls: Calls and requests that run or wait, in all pods and before the first one.
        waiting: Those of them that wait.
        rate: Calls and requests per second, over the last seconds.
        metrics: The sums of the user's own metrics over the pods.
        reason: Why the number of pods is what it is.
        decisions: The last changes of the number, the oldest first.
        settings: The keywords of `autoscale()` that were changed since the deploy, by name.
    """

    engine: str
    wanted: int
    minimum: int = 0
    maximum: int = 0
    calls: int = 0
    waiting: int = 0
    rate: float = 0.0
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    reason: str = ""
    decisions: tuple[ScalingDecision, ...] = ()
    settings: dict[str, Any] = msgspec.field(default_factory=dict)


class CallProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """The progress of a call, reported by `kt.progress`."""

    current: float
    total: float | None = None
    message: str | None = None


class CallReport(Message, tag="call", frozen=True):
    """State of a spawned call, or of a call that has left a record, and has no result then.

    Attributes:
        callable: Callable and method, `Counter.add`.
        state: `waiting` (for a slot), `running`, `succeeded`, `failed` or `cancelled`.
        result: Digest of the blob with the packed outcome (`kubetorch.wire.calls`), once ended.
        attempts: How often it has run, this time included.
        record: Digest of the blob with its record (`kubetorch.wire.calls`), if it has one.
        generation: The generation that ran it, if it has a record.
    """

    id: str
    callable: str
    state: str
    started: float
    ended: float | None = None
    result: str | None = None
    result_bytes: int = 0
    progress: CallProgress | None = None
    attempts: int = 1
    record: str | None = None
    record_bytes: int = 0
    generation: int = 0


#: States of a call that has not ended.
UNENDED = ("waiting", "running")


class Regroup(Message, tag="regroup", frozen=True):
    """A call asks for a new world of a distributed service, with new processes.

    The answer is `Members` with a world of a higher epoch, or `RegroupFailed`.

    Attributes:
        epoch: Epoch of the world of that call: a world that was formed since then answers it,
            unless a member of that world is lost.
        is_quorum_awaited: Whether the world waits for the declared quorum; else it has the pods
            that are connected.
    """

    id: str
    epoch: int = 0
    is_quorum_awaited: bool = True


class Probed(Message, tag="probed", frozen=True):
    """The answer to `Probe`: true if the sibling answers."""

    id: str
    is_reached: bool


# --------------------------------------------------------------------- session: controller → agent


class Welcome(Message, tag="welcome", frozen=True):
    """First message of a controller in a cluster.

    Attributes:
        key: Key of the workload's tokens (`kubetorch.wire.tokens.workload_key`), in hex.
        app_hosts: Host names by which browsers may call the workload's app, beside those of its
            Services.
        records: Whether calls may leave records, with their arguments.
    """

    key: str
    version: str
    protocol: int
    app_hosts: tuple[str, ...] = ()
    records: bool = True


class Reload(Message, tag="reload", frozen=True):
    """Serve this generation.

    `replaces` is the reason why the pod before this one ended, if no user or deploy ended it.
    """

    generation: int
    spec: WorkloadSpec
    replaces: str | None = None


#: The reason of `Terminate` when all pods of the service end.
TORN_DOWN = "the service is torn down"
#: `WorkloadView.status` of such a service until all its objects are deleted.
TERMINATING = "Terminating"


class Terminate(Message, tag="terminate", frozen=True):
    """The pod will be stopped: refuse new calls, and let running calls end for `grace` seconds."""

    grace: float
    reason: str


class Ending(Message, tag="ending", frozen=True):
    """The reason for which the pod ends or has ended, for the errors of its calls.

    `reason` is Kubernetes' word, such as `Evicted`; `message` is a sentence.
    """

    reason: str
    message: str = ""
    time: float = 0.0

    def error(self, pod: str) -> PodTerminatedError:
        event = {"timestamp": self.time or None, "reason": self.reason, "message": self.message}
        return PodTerminatedError(pod, self.reason, events=[event] if self.message else [])


class CancelCall(Message, tag="cancel", frozen=True):
    """Cancel a spawned call, if it still runs; its `CallReport` has its state then."""

    id: str
    reason: str = ""


class Member(msgspec.Struct, frozen=True, omit_defaults=True):
    """One pod of the workload, for its siblings.

    Attributes:
        pod, ordinal, url: The pod, and the base URL of its agent; empty while it does not answer.
        incarnation: Identity of the agent's process; only of a member of a world.
        address: IP address of the pod where it is not the host of `url`.
    """

    pod: str
    ordinal: int
    url: str
    incarnation: str = ""
    address: str = ""

    @property
    def host(self) -> str:
        """The pod's address; empty while its agent does not answer."""
        return (self.url and self.address) or urlsplit(self.url).hostname or ""


class LostMember(msgspec.Struct, frozen=True, omit_defaults=True):
    """A member of the world that was lost.

    `reason` is one word, such as `Deleted`, `OOMKilled` or `unreachable`; `message` is a sentence.
    """

    member: Member
    reason: str
    message: str = ""


def called_together(spec: WorkloadSpec, pool: Sequence[int]) -> tuple[int, ...] | None:
    """Ordinals of the pods that each call runs on, each with a result; `None` for a single pod."""
    count = spec.compute.broadcast
    if count is not None:
        return tuple(range(count))
    return tuple(pool) if spec.compute.is_pool and len(pool) > 1 else None


class World(msgspec.Struct, frozen=True, omit_defaults=True):
    """The pods whose processes are the ranks of a distributed service.

    Attributes:
        epoch: Its number; a later world has a higher one.
        members: Its pods by ordinal: the index of a member is its node rank.
        processes: Processes of each pod.
        ports: Free ports of the first pod for the rendezvous, or one for each rank on its pod.
        lost: Members that were lost since it was formed.
    """

    epoch: int
    generation: int
    members: tuple[Member, ...]
    processes: int = 1
    ports: tuple[int, ...] = ()
    lost: tuple[LostMember, ...] = ()


class Members(Message, tag="members", frozen=True):
    """The pods of the workload in the order of their ordinals, with the number of this list.

    Attributes:
        members: All pods, also pods outside of the world.
        pool: Ordinals of the pods that each call goes to, of a service with a selector.
    """

    epoch: int
    members: tuple[Member, ...]
    world: World | None = None
    pool: tuple[int, ...] = ()


class RegroupFailed(Message, tag="regroup_failed", frozen=True):
    """No world could be formed for a `Regroup`; see `kubetorch.wire.exceptions` for the failure."""

    id: str
    failure: dict[str, Any]


class Probe(Message, tag="probe", frozen=True):
    """Try whether a sibling answers, and send `Probed` within a second."""

    id: str
    url: str


class SendBlobs(Message, tag="send_blobs", frozen=True):
    """The controller lost blobs of generations that it keeps: upload them.

    Attributes:
        blobs: Digests; the pod skips blobs that it does not have.
        trees: Digests of trees, each to be uploaded with all its files.
    """

    blobs: tuple[str, ...] = ()
    trees: tuple[str, ...] = ()


FromAgent = (
    Hello | Observed | StageReport | LogReport | Activity | PodLoad | CallReport | Regroup | Probed
)
FromController = (
    Welcome | Reload | Terminate | Ending | CancelCall | Members | SendBlobs | RegroupFailed | Probe
)

# ----------------------------------------------------------------------------------------- deploy


class Deploy(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Head of a deploy request's body.

    The body is this message as JSON, a newline, and then blobs that the controller may lack, packed
    by `kubetorch.wire.blobs` (possibly none).

    Attributes:
        id: Identity of this deploy: a repeated request with the same id joins the first request.
        stream_logs: Whether the client wants lines that loading writes as events.
        replace: Whether it may replace the service of another creator, project or callable.
        program: The process of this machine that deploys, from `processes.identity`; empty for a
            controller on another machine.
        renames: The callable of the service, if its file does not have it any more.
    """

    id: str
    spec: WorkloadSpec
    protocol: int
    version: str
    stream_logs: bool = True
    replace: bool = False
    program: str = ""
    renames: str = ""


class Missing(Message, tag="missing", frozen=True):
    """The only event when blobs are missing: upload them and repeat the request."""

    blobs: tuple[str, ...]


class Accepted(Message, tag="accepted", frozen=True):
    """The generation exists; `changed` is false for the generation that was deployed before."""

    generation: int
    changed: bool = True


class Stage(Message, tag="progress", frozen=True):
    """The progress of a deploy.

    Attributes:
        stage: `starting`, `fetching`, `preloading`, `importing`, `ready`, `event`, …
        ready, pods: The number of ready pods, and the number of all pods.
        warning: Whether the user should see it even when progress is not shown.
        step, steps: The number of the image's step that begins, and the number of all steps.
    """

    stage: str
    message: str = ""
    pod: str | None = None
    ready: int | None = None
    pods: int | None = None
    warning: bool = False
    step: int | None = None
    steps: int | None = None


class DeployLog(Message, tag="log", frozen=True):
    """A line that the user's code, or a step of its image, wrote while it was loaded."""

    text: str
    pod: str
    source: str = "stdout"
    level: str | None = None
    time: float = 0.0
    rank: int | None = None


class Ready(Message, tag="ready", frozen=True):
    """Last event of a deploy that succeeded: every pod serves the generation."""

    generation: int
    workload: WorkloadView


class Failed(Message, tag="error", frozen=True):
    """Last event of a deploy that failed; see `kubetorch.wire.exceptions` for the failure."""

    failure: dict[str, Any]


DeployEvent = Missing | Accepted | Stage | DeployLog | Ready | Failed

# ------------------------------------------------------------------------------------ descriptions


class WorkerStacks(msgspec.Struct, frozen=True, omit_defaults=True):
    """The stacks of a worker's threads.

    `text` has the stacks of threads that run code of the user, or the reason why it has none.
    """

    pod: str
    pid: int
    generation: int
    rank: int | None
    text: str


class DebugView(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A program that has stopped for a debugger.

    Attributes:
        session: Identity of the session in its pod.
        call: The name of its call, for users; empty outside of calls.
        why: `breakpoint`, `debug=`, `post-mortem` or `kt debug --call`.
        where: File, line and function.
        since, until: When it stopped first, and until when it waits for a terminal.
        host: Address of the pod, if others reach it by that.
        user: The user whose terminal is attached.
    """

    session: str
    pod: str
    rank: int | None = None
    pid: int = 0
    call: str = ""
    why: str = ""
    where: str = ""
    mode: str = "pdb"
    port: int = 0
    host: str = ""
    since: float = 0.0
    until: float | None = None
    user: str = ""


class PodView(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A pod, for lists and clients.

    Attributes:
        phase: Kubernetes' phase: `Pending`, `Running`, `Failed`, `Terminating`; `Unknown` while a
            pod that should run has no connection to the controller, and `Gone` after its end.
        is_ready: Whether calls should go to it: it serves them, and no newer pod replaces it.
        url: Base URL of its agent; empty without an agent.
        restarts: How often its agent was started again.
        reason: Why it is not ready.
        pid: Process id of the agent, on the local backend.
        ended: Why it has ended, once it is certain that it has.
        address: IP address of the pod where it is not the host of `url`.
        memory_socket: Path on its machine where clients pass large values in memory files.
        stopped: Programs, most of them calls, that have stopped in a debugger.
        lines: The last lines that it wrote while it loaded the code, of a pod that is not ready;
            only one pod of a workload has them.
    """

    name: str
    ordinal: int
    phase: str
    is_ready: bool = False
    url: str = ""
    generation: int = 0
    restarts: int = 0
    reason: str = ""
    pid: int | None = None
    calls: int = 0
    started: float = 0.0
    app: AppView | None = None
    ended: Ending | None = None
    queue: QueueView | None = None
    address: str = ""
    memory_socket: str = ""
    stopped: int = 0
    lines: tuple[str, ...] = ()


class Creator(msgspec.Struct, frozen=True, omit_defaults=True):
    """The user who deployed a workload; for a workload that a pod deployed, the pod's creator.

    `user` is the authenticated user, empty on one machine; `username` is the configured name.
    """

    user: str
    username: str | None = None

    def __str__(self) -> str:
        return self.username or self.user


class Runtime(msgspec.Struct, frozen=True, omit_defaults=True):
    """The image from which pods get their agent, and its owner.

    Attributes:
        image: Image from which the agent is copied into pods of other images.
        default_image: Image of pods whose compute names no image; it has the agent.
        node_data: Folder of nodes where pods share declared data; empty if they do not.
    """

    image: str
    default_image: str
    controller_url: str
    pull_policy: str | None = None
    node_data: str = ""


class Equipment(msgspec.Struct, frozen=True, omit_defaults=True):
    """The additions of a cluster to the object of a workload.

    Attributes:
        root_images: Its images that are known to run as root, if its pods comply with the Pod
            Security level `restricted`.
        secrets: Version of the secrets that its pods see.
        has_operator: Whether the cluster has the operator of the workload's kind.
    """

    runtime: Runtime
    root_images: tuple[str, ...] | None = None
    secrets: str = ""
    has_operator: bool = True


def last_lines(pods: Iterable[PodView]) -> str:
    """The last lines of a pod that is not ready, as the end of an error's message."""
    pod = next((pod for pod in pods if pod.lines), None)
    if pod is None:
        return ""
    return "".join([f"; the last lines of pod {pod.name}:", *(f"\n  {line}" for line in pod.lines)])


class WorkloadView(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A workload, for lists and clients.

    Attributes:
        generation: The generation of the last deploy.
        status: One of the words of `kt list`: `Ready`, `Creating`, `Failed`, ….
        url: Base URL for calls.
        scaler: Base URL of the scaler that counts calls and makes pods for them, perhaps from none;
            empty for a service whose calls go to pods.
        token: A token for calls, when the reader may call; it expires at `token_expires`.
        failure: Why this generation is not served.
        notes: What the backend cannot honour, one sentence each.
        reason: Why there are fewer pods than there should be.
        lost: Pods that ended in the last minutes, each with the reason.
        app_host: Host of its app behind the controller's ingress, if each app has its own host.
        creator: The user who deployed it.
        is_own: Whether the creator is the authenticated user who reads this.
        pods_wanted: Number of pods that its object or its scaler asks for; 0 while unknown.
        equipment: The additions of its cluster to its object; `None` without such an object.
        scaling: How the load decides on the number of its pods; `None` if that is fixed.
        idle_seconds_left: Until it is torn down if nothing calls it; `None` while it is used, or
            without `inactivity_ttl`.
    """

    spec: WorkloadSpec
    generation: int
    status: str
    pods: tuple[PodView, ...] = ()
    url: str = ""
    scaler: str = ""
    token: str = ""
    token_expires: float = 0.0
    created: float = 0.0
    updated: float = 0.0
    last_active: float = 0.0
    failure: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()
    kind: str = "Deployment"
    reason: str = ""
    lost: tuple[PodView, ...] = ()
    app_host: str = ""
    world: World | None = None
    pool: tuple[int, ...] = ()
    creator: Creator | None = None
    is_own: bool = False
    equipment: Equipment | None = None
    pods_wanted: int = 0
    scaling: ScalingView | None = None
    idle_seconds_left: float | None = None


class PodWait(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A client waits for pods: the body of `POST …/wait`, answered with the `WorkloadView`.

    The answer comes once the ready pods are others than `pods`, at the latest after `seconds`. The
    waiting calls are load until then.

    Attributes:
        client: Identity of the waiting route; its later requests replace the number of its calls.
        waiting: Calls of the client that are in no pod.
        pods: Names of the ready pods that the client knows.
        seconds: The longest time until the answer; 0 only notes the calls.
    """

    client: str
    waiting: int = 0
    pods: tuple[str, ...] = ()
    seconds: float = 0.0


class ScaleChange(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Keywords of `autoscale()` to change while a service runs: the body of `POST …/scale`.

    The answer is the `WorkloadView`. A keyword with the value `None` is as deployed again.
    """

    settings: dict[str, Any] = msgspec.field(default_factory=dict)


class CallView(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A spawned call, for lists and handles; see `CallReport` for the fields."""

    id: str
    namespace: str
    workload: str
    pod: str
    callable: str
    state: str
    started: float
    ended: float | None = None
    result: str | None = None
    result_bytes: int = 0
    expires: float | None = None
    progress: CallProgress | None = None
    attempts: int = 1
    is_replayable: bool = False


class RecordView(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What a call was, so that it can be replayed, without its arguments.

    Attributes:
        spec: The generation that ran it, without values of variables.
        variables: Names of the variables that `kt.Compute` and `kt.Image` set.
        creator: The user who had deployed it; for what a pod deployed, the account of the pod.
        is_own: Whether the creator is the authenticated user who reads this.
    """

    call: CallView
    spec: WorkloadSpec
    variables: tuple[str, ...] = ()
    creator: Creator | None = None
    is_own: bool = False
    expires: float


class TokenView(msgspec.Struct, frozen=True):
    token: str
    expires: float


class Teardown(msgspec.Struct, frozen=True, kw_only=True):
    """What the end of a service took along, and what it leaves.

    Attributes:
        remaining: The user's objects that remain, in words.
        keys: Keys of the data store that ended with the service.
    """

    deleted: str
    remaining: tuple[str, ...] = msgspec.field(name="left", default=())
    keys: int = 0


class StatusView(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    protocol: int
    pid: int
    started: float
    workloads: int
    backend: str


# ------------------------------------------------------------------------------- encode and decode

_T = TypeVar("_T")
_encoder = msgspec.json.Encoder()


def encode(message: object) -> bytes:
    """A message, or a list of them, as JSON text on one line."""
    return _encoder.encode(message)


def decode(kind: type[_T], data: bytes | bytearray | memoryview | str) -> _T:
    try:
        return json_decoder(kind, _decode_step).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a {getattr(kind, '__name__', kind)}: {error}") from error


def _decode_step(kind: type[Any], value: Any) -> Any:  # noqa: ANN401  # as msgspec calls it
    """A step of an image: dataclasses have no tag, so its first field identifies its class."""
    step_type = next((STEPS[name] for name in value if name in STEPS), None)
    if kind is not Step or step_type is None:
        raise ValueError(f"no step of an image: {value!r}")
    json_decoder(step_type, _decode_step)  # so that no two threads inspect the type at once
    return msgspec.convert(value, step_type)
