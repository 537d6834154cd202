"""Control messages: deploys, the session of a pod with the controller, descriptions.

All are JSON. Structs that travel on one stream are tagged by `type`. Unknown fields are ignored by
the receiver, and every field that was added later has a default: so neighbours in version
understand each other. Times are seconds since the epoch, 0 where the time is not known.

A session is the WebSocket that an agent keeps to the controller, text messages:

    agent       Hello     Observed | StageReport | LogReport | Activity | CallReport
                                   | Regroup | Probed
    controller         Welcome     Reload | Terminate | CancelCall | Members | SendBlobs
                                   | Probe | RegroupFailed

Whatever happens to the connection, the agent says in `Hello` what it runs, and the controller sends
what it should run: so both converge without memory of what was said before.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        exit_code: What it ended with, as shells count: 128 and the signal's number when killed.
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
        is_paused: The last of them is a generator whose reader takes nothing.
        waits_for: The call, of another service perhaps, that the last of them waits for.
    """

    callable: str
    began: float
    calls: int = 1
    is_paused: bool = False
    waits_for: str = ""


class QueueView(msgspec.Struct, frozen=True, omit_defaults=True):
    """The slots of a pod whose service bounds how many calls run at once.

    Attributes:
        slots, taken: Slots of all processes together, and those that are taken.
        waiting: Calls that wait for one.
        since: When the first of them began to wait.
        strays: Those of them that code of a worker made outside of the context of its call: they
            may wait for the call that waits for them.
        holders: What holds the slots, as far as a message has room.
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
        calls: Ids of all spawned calls that run or whose end is still to be reported; `None` when
            the agent does not say.
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
    calls: tuple[str, ...] | None = None


class Observed(Message, tag="observed", frozen=True):
    """The pod serves a generation, or failed to reach it and serves what it served before.

    Attributes:
        generation: The generation that was asked for.
        serving: The generation that serves calls now; 0 when none does.
        failure: Why it was not reached, as `kubetorch.wire.exceptions` has it.
    """

    generation: int
    serving: int
    failure: dict[str, Any] | None = None


class StageReport(Message, tag="stage", frozen=True):
    """The progress of a reload: `fetching`, `preloading`, `importing`, ….

    Attributes:
        warning: Whether the user should see it even when progress is not shown.
        step, steps: Which step of the image begins, of how many.
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
        is_stopping: The agent takes no more calls, and ends with those that run.
        queue: Its slots, where calls are bounded; `calls` has those that wait, too.
    """

    calls: int
    last: float
    workers: int = 0
    app: AppView | None = None
    is_stopping: bool = False
    queue: QueueView | None = None


class CallProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """The progress of a call, as the call reports it by `kt.progress`."""

    current: float
    total: float | None = None
    message: str | None = None


class CallReport(Message, tag="call", frozen=True):
    """State of a spawned call.

    Attributes:
        callable: Callable and method, `Counter.add`.
        state: `waiting` (for a slot), `running`, `succeeded`, `failed` or `cancelled`.
        result: Digest of the blob with the packed outcome (`kubetorch.wire.calls`), once ended.
        attempts: How often it has run, this time included.
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


#: States of a call that has not ended.
UNENDED = ("waiting", "running")


class Regroup(Message, tag="regroup", frozen=True):
    """A call asks that the world of a distributed service is formed again, its processes new.

    The answer is `Members` with a world of a higher epoch, or `RegroupFailed`.

    Attributes:
        epoch: Epoch that it was made in: a world that was formed since then answers it, unless a
            member of that world is lost.
        is_quorum_awaited: Whether the world is to wait for the declared quorum; else it takes the
            pods that are connected.
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
            Services; `None` from a controller that does not say.
    """

    key: str
    version: str
    protocol: int
    app_hosts: tuple[str, ...] | None = None


class Reload(Message, tag="reload", frozen=True):
    """Serve this generation.

    `replaces` says why the pod is gone that served it before, if nobody asked for that.
    """

    generation: int
    spec: WorkloadSpec
    replaces: str | None = None


#: The reason of `Terminate` when no pod of the service is to be left.
TORN_DOWN = "the service is torn down"
#: `WorkloadView.status` of such a service until nothing of it is left.
TERMINATING = "Terminating"


class Terminate(Message, tag="terminate", frozen=True):
    """The pod will be stopped: refuse new calls, let running ones end for `grace` seconds."""

    grace: float
    reason: str


class Ending(Message, tag="ending", frozen=True):
    """The reason for which the pod is ended, or has ended: the errors of its calls name it.

    `reason` is Kubernetes' word, such as `Evicted`; `message` is a sentence.
    """

    reason: str
    message: str = ""
    time: float = 0.0

    def error(self, pod: str) -> PodTerminatedError:
        event = {"timestamp": self.time or None, "reason": self.reason, "message": self.message}
        return PodTerminatedError(pod, self.reason, events=[event] if self.message else [])


class CancelCall(Message, tag="cancel", frozen=True):
    """Cancel a spawned call, if it still runs; its `CallReport` says what became of it."""

    id: str
    reason: str = ""


class Member(msgspec.Struct, frozen=True, omit_defaults=True):
    """One pod of the workload, for its siblings.

    Attributes:
        pod, ordinal, url: Which pod it is, and where its agent answers; empty while it does not.
        incarnation: Identity of the agent's process, of a member of a world.
    """

    pod: str
    ordinal: int
    url: str
    incarnation: str = ""

    @property
    def host(self) -> str:
        """The pod's address; empty while its agent does not answer."""
        return urlsplit(self.url).hostname or ""


class LostMember(msgspec.Struct, frozen=True, omit_defaults=True):
    """A member of the world that is gone.

    `reason` is one word, such as `Deleted`, `OOMKilled` or `unreachable`; `message` is a sentence.
    """

    member: Member
    reason: str
    message: str = ""


def called_together(spec: WorkloadSpec, pool: Sequence[int]) -> tuple[int, ...] | None:
    """Ordinals of the pods that each call goes to, with a result of each; `None`: one of them."""
    count = spec.compute.broadcast
    if count is not None:
        return tuple(range(count))
    return tuple(pool) if spec.compute.is_pool and len(pool) > 1 else None


class World(msgspec.Struct, frozen=True, omit_defaults=True):
    """The pods that ranks are counted over.

    Attributes:
        epoch: Its number; a later world has a higher one.
        members: Its pods by ordinal: the index of a member is its node rank.
        processes: Processes of each pod.
        ports: Free ports of the first pod for the rendezvous, or one for each rank on its pod.
        lost: Members that are gone since it was formed.
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
        members: All pods, also those that are not in the world.
        pool: Ordinals of the pods that each call goes to, where a selector has found them.
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
    """Try whether a sibling answers, and say so within a second."""

    id: str
    url: str


class SendBlobs(Message, tag="send_blobs", frozen=True):
    """The controller lost blobs of generations that it keeps: upload those that are there.

    Attributes:
        blobs: Digests; those that the pod does not have are none of its business.
        trees: Digests of trees, which are wanted with all files that they name.
    """

    blobs: tuple[str, ...] = ()
    trees: tuple[str, ...] = ()


FromAgent = Hello | Observed | StageReport | LogReport | Activity | CallReport | Regroup | Probed
FromController = (
    Welcome | Reload | Terminate | Ending | CancelCall | Members | SendBlobs | RegroupFailed | Probe
)

# ----------------------------------------------------------------------------------------- deploy


class Deploy(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Head of a deploy request's body.

    The body is this as JSON, a newline, and then blobs that the controller may lack as
    `kubetorch.wire.blobs` packs them (possibly none).

    Attributes:
        id: Identity of this deploy: a repeated request with the same one joins the first.
        stream_logs: Whether lines written while loading are wanted as events.
        replace: Whether it may replace the service of another creator, project or callable.
        program: The process of this machine that deploys, as `processes.identity` has it; empty
            where the controller is elsewhere.
        renames: The callable of the service, if the program saw that its file has it no more.
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
    """The generation exists; it has not `changed` if it is the one that was deployed before."""

    generation: int
    changed: bool = True


class Stage(Message, tag="progress", frozen=True):
    """A step on the way of a deploy.

    Attributes:
        stage: `starting`, `fetching`, `preloading`, `importing`, `ready`, `event`, …
        ready, pods: How many pods are ready, of how many.
        warning: Whether the user should see it even when progress is not shown.
        step, steps: Which step of the image begins in the pod, of how many.
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
    """Last event of a deploy that failed, as `kubetorch.wire.exceptions` has it."""

    failure: dict[str, Any]


DeployEvent = Missing | Accepted | Stage | DeployLog | Ready | Failed

# ------------------------------------------------------------------------------------ descriptions


class WorkerStacks(msgspec.Struct, frozen=True, omit_defaults=True):
    """The stacks of a worker's threads.

    `text` has those of the threads that run code of the user, or says why there are none.
    """

    pod: str
    pid: int
    generation: int
    rank: int | None
    text: str


class PodView(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A pod, as lists and clients see it.

    Attributes:
        phase: Kubernetes' phase: `Pending`, `Running`, `Failed`, `Terminating`; `Unknown` while a
            pod that should run has no connection to the controller, and `Gone` after its end.
        is_ready: Whether calls should go to it: it serves them, and no newer pod is to take them.
        url: Base URL of its agent; empty while there is none.
        restarts: How often its agent was started again.
        reason: Why it is not ready.
        pid: Process id of the agent, on the local backend.
        ended: Why it has ended, once that is certain.
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


class Creator(msgspec.Struct, frozen=True, omit_defaults=True):
    """The user who deployed a workload; for a workload that a pod deployed, the pod's creator.

    `user` is the authenticated one, empty on one machine; `username` is what was configured.
    """

    user: str
    username: str | None = None

    def __str__(self) -> str:
        return self.username or self.user


class Runtime(msgspec.Struct, frozen=True, omit_defaults=True):
    """The image from which pods get their agent, and its owner.

    Attributes:
        image: Image that the agent is copied from into pods of other images.
        default_image: Image of pods whose compute names none, which has the agent.
    """

    image: str
    default_image: str
    controller_url: str
    pull_policy: str | None = None


class Equipment(msgspec.Struct, frozen=True, omit_defaults=True):
    """The additions of a cluster to the object of a workload.

    Attributes:
        root_images: If its pods comply with the Pod Security level `restricted`: its images that
            are known to run as root.
        secrets: Version of the secrets that its pods see.
        has_operator: Whether what was only declared has become the kind that is meant for it.
    """

    runtime: Runtime
    root_images: tuple[str, ...] | None = None
    secrets: str = ""
    has_operator: bool = True


class WorkloadView(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A workload, as lists and clients see it.

    Attributes:
        generation: The wanted generation.
        status: One of the words of `kt list`: `Ready`, `Creating`, `Failed`, ….
        url: Base URL for calls.
        scaler: Where calls go to a scaler, which counts them and makes pods for them; empty where
            they go to pods. There may be none then.
        token: A token for calls, when the reader may call; it expires at `token_expires`.
        failure: Why the wanted generation is not served.
        notes: What the backend cannot honour, one sentence each.
        reason: Why there are fewer pods than there should be.
        lost: Pods that went away in the last minutes, each with the reason.
        app_host: Host of its app behind the controller's ingress, where each has one of its own.
        is_own: Whether that is the authenticated user who reads this.
        pods_wanted: Number of pods that there should be, as its object says or its scaler; 0 while
            that is not known.
        equipment: What its cluster adds to its object; nothing where there are no such objects.
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


class CallView(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A spawned call, as lists and handles see it; see `CallReport` for the fields."""

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


class TokenView(msgspec.Struct, frozen=True):
    token: str
    expires: float


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
    """A step of an image: dataclasses have no tag, so its first field says which one it is."""
    found = next((STEPS[name] for name in value if name in STEPS), None)
    if kind is not Step or found is None:
        raise ValueError(f"no step of an image: {value!r}")
    json_decoder(found, _decode_step)  # so that no two threads look at the type at the same time
    return msgspec.convert(value, found)
