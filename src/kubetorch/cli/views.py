"""Services, pods and calls as `kt` shows them: as JSON objects and as rows of tables.

The JSON always has every key, with `null` for a missing value.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import asdict

from kubetorch.sdk import logs
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.data import DataMount
from kubetorch.wire.messages import (
    AppView,
    CallProgress,
    CallView,
    DeployLog,
    PodView,
    SlotHolder,
    WorkerStacks,
    WorkloadView,
    calls_that_wait,
)

Json = dict[str, Any]


def mode(service: WorkloadView) -> str:
    """The kind of a service, in the words of `kt`: `deployment`, `knative`, `job`."""
    if service.scaling is not None and service.scaling.engine != "knative":
        return "autoscaled"
    # The other kind `Service`, Kubernetes' own, has no pods.
    return "knative" if service.kind == "Service" else service.kind.lower()


def service_json(service: WorkloadView) -> Json:
    spec, ranks = service.spec, ranks_of_pods(service)
    return {
        "name": spec.name,
        "namespace": spec.namespace,
        "type": mode(service),
        "status": service.status,
        "generation": service.generation,
        "replicas": spec.compute.pods,
        "ready_pods": ready_pods(service),
        "pods": [pod_json(pod) | {"ranks": ranks.get(pod.name)} for pod in service.pods],
        "world": world_json(service),
        "callable": _callable_json(spec.callable),
        "cpus": spec.compute.cpus,
        "memory": spec.compute.memory,
        "gpus": spec.compute.gpus,
        "inactivity_ttl": spec.compute.inactivity_ttl,
        "idle_seconds_left": service.idle_seconds_left,
        "scaling": scaling_json(service),
        "volumes": [
            {"name": volume.name, "mount_path": volume.mount_path}
            for volume in spec.compute.volumes
        ],
        "data": [data_json(mount) for mount in spec.compute.data],
        "secrets": [secret.name for secret in spec.compute.secrets],
        "creator": creator(service),
        "project": None if spec.origin is None else spec.origin.name,
        "url": service.url or None,
        "created": service.created or None,
        "updated": service.updated or None,
        "last_active": service.last_active or None,
        "failure": failure_json(service.failure),
        "notes": list(service.notes),
    }


def data_json(mount: DataMount) -> Json:
    return {
        "path": mount.path,
        "key": mount.key,
        "mode": mount.mode,
        "version": mount.version or None,
    }


def scaling_json(service: WorkloadView) -> Json | None:
    """How the load decides on the number of pods; `None` if that is fixed."""
    return None if service.scaling is None else msgspec.to_builtins(asdict(service.scaling))


def creator(service: WorkloadView) -> str | None:
    return str(service.creator or "") or None


def _callable_json(callable_: CallableRef) -> Json:
    facts: Json = {"name": callable_.name, "kind": callable_.kind, "module": callable_.module}
    if callable_.app is not None:
        facts |= {
            "command": callable_.app.command,
            "port": callable_.app.port,
            "health_check": callable_.app.health_check,
            "public": callable_.app.public,
        }
    return facts


def ranks_of_pods(service: WorkloadView) -> dict[str, list[int]]:
    """The ranks of each pod of a world, lost pods included, by name."""
    world = service.world
    if world is None:
        return {}
    count = world.processes
    return {
        member.pod: list(range(node * count, (node + 1) * count))
        for node, member in enumerate(world.members)
    }


def rank_words(ranks: Sequence[int] | None) -> str:
    """Consecutive ranks, such as `3` or `0-7`."""
    if not ranks:
        return "-"
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def world_json(service: WorkloadView) -> Json | None:
    world, distribution = service.world, service.spec.compute.distribution
    if world is None or distribution is None:
        return None
    ranks = ranks_of_pods(service)
    return {
        "framework": distribution.distribution_type,
        "epoch": world.epoch,
        "generation": world.generation,
        "world_size": len(world.members) * world.processes,
        "processes": world.processes,
        "lost": [
            {
                "pod": loss.member.pod,
                "ranks": ranks[loss.member.pod],
                "reason": loss.reason,
                "message": loss.message or None,
            }
            for loss in world.lost
        ],
    }


def world_words(service: WorkloadView) -> str | None:
    world, distribution = service.world, service.spec.compute.distribution
    if distribution is None:
        return None
    if world is None:
        return f"{distribution.distribution_type}, its world is not formed yet"
    pods, count = len(world.members), world.processes
    return (
        f"{distribution.distribution_type}, {pods * count} ranks in {pods} "
        f"{'pod' if pods == 1 else 'pods'}, epoch {world.epoch}"
    )


def lost_lines(service: WorkloadView) -> list[str]:
    ranks = ranks_of_pods(service)
    return [
        f"{loss.member.pod}  ranks {rank_words(ranks[loss.member.pod])}  {loss.reason}"
        f"{': ' if loss.message else ''}{loss.message}"
        for loss in (() if service.world is None else service.world.lost)
    ]


def pod_json(pod: PodView) -> Json:
    return {
        "name": pod.name,
        "ordinal": pod.ordinal,
        "phase": pod.phase,
        "ready": pod.is_ready,
        "generation": pod.generation,
        "restarts": pod.restarts,
        "calls": pod.calls,
        "reason": pod.reason or None,
        "url": pod.url or None,
        "pid": pod.pid,
        "started": pod.started or None,
        "app": app_json(pod.app),
        "queue": None if pod.queue is None else msgspec.to_builtins(pod.queue),
        "stopped": pod.stopped,
    }


def app_json(app: AppView | None) -> Json | None:
    if app is None:
        return None
    return {
        "state": app.state,
        "pid": app.pid,
        "exit_code": app.exit_code,
        "started": app.started or None,
        "ended": app.ended or None,
    }


def failure_json(failure: Mapping[str, Any] | None) -> Json | None:
    if failure is None:
        return None
    names = ("error_type", "message", "traceback", "pod_name")
    return {name: failure.get(name) for name in names}


def call_json(call: CallView) -> Json:
    return {
        "id": call.id,
        "namespace": call.namespace,
        "service": call.workload,
        "pod": call.pod,
        "callable": call.callable,
        "state": call.state,
        "started": call.started,
        "ended": call.ended,
        "result_bytes": call.result_bytes,
        "expires": call.expires,
        "progress": None if call.progress is None else asdict(call.progress),
        "attempts": call.attempts,
        "is_replayable": call.is_replayable,
    }


def line_json(line: DeployLog) -> Json:
    names = ("time", "pod", "rank", "source", "level", "text")
    return {name: getattr(line, name) for name in names}


def stacks_json(stacks: WorkerStacks) -> Json:
    names = ("pod", "rank", "pid", "generation", "text")
    return {name: getattr(stacks, name) for name in names}


def line_text(line: DeployLog) -> str:
    return logs.text(line)


# --------------------------------------------------------------------------------------- tables


def queue_lines(service: WorkloadView, now: float) -> list[tuple[str, bool]]:
    """Lines about the slots of each pod whose calls are bounded, each with whether it warns."""
    lines = []
    for pod in service.pods:
        queue = pod.queue
        if queue is None or not (queue.taken or queue.waiting):
            continue
        wait = ""
        if queue.waiting:
            seconds = max(0.0, now - queue.since)
            wait = f", {calls_that_wait(queue.waiting)}, the first for {seconds:.0f} s"
        taken = f"{queue.taken} of {queue.slots}" if queue.taken < queue.slots else "all"
        text = f"{pod.name}: slots taken: {taken}{wait}"
        lines.append((text, bool(queue.waiting)))
        lines += [(f"  {holder_words(holder, now)}", False) for holder in queue.holders]
        is_shown = len(queue.holders) == queue.taken == queue.slots
        if queue.waiting and is_shown and all(holder.waits_for for holder in queue.holders):
            lines.append((f"  {ALL_WAIT}", True))
        if queue.strays:
            text = (
                f"  {queue.strays} of those that wait come from a thread without the context of "
                "its call, which may wait for them: contextvars.copy_context() carries it"
            )
            lines.append((text, True))
    return lines


def stopped_line(service: WorkloadView, users: Sequence[str] = ()) -> str:
    """How many programs have stopped, and these users or how to attach; empty without any."""
    count = sum(pod.stopped for pod in service.pods)
    if not count:
        return ""
    calls = "1 call is" if count == 1 else f"{count} calls are"
    if len(users) >= count:
        return f"{calls} stopped in a debugger of {', '.join(users)}"
    return f"{calls} stopped in a debugger: kt debug {service.spec.name} attaches"


ALL_WAIT = (
    "all slots wait for other calls: if those wait for this service, none of them ends; "
    "kt.Compute(concurrency=) allows more"
)


def holder_words(holder: SlotHolder, now: float) -> str:
    text = f"{holder.callable} runs for {max(0.0, now - holder.began):.0f} s"
    if holder.calls > 1:
        inner = holder.calls - 1
        text += f", and {inner} {'call' if inner == 1 else 'calls'} inside it"
    if holder.waits_for:
        return f"{text}; it waits for {holder.waits_for}"
    return f"{text}; its reader takes no values" if holder.is_paused else text


#: Columns that a narrow terminal can do without, the first to go first.
DISPENSABLE_SERVICE_COLUMNS = (
    *("LAST STATUS CHANGE", "VOLUMES", "MEMORY", "CPUs", "GPUs", "TYPE", "CREATOR", "SCALING"),
    *("TTL", "# OF PODS", "AGE", "NAMESPACE"),
)


def service_cells(
    service: WorkloadView, *, with_namespace: bool = False, with_pods: bool = False
) -> dict[str, str]:
    """The cells of a service, by column."""
    spec = service.spec
    cells = {
        **({"NAMESPACE": spec.namespace} if with_namespace else {}),
        "RESOURCE": spec.name,
        "TYPE": mode(service),
        "STATUS": service.status,
        "# OF PODS": str(len(service.pods)),
        "SCALING": "" if service.scaling is None else service.scaling.reason,
        **({"POD NAMES": "\n".join(_pod_names(service))} if with_pods else {}),
        "AGE": age(service.created),
        "VOLUMES": ", ".join(volume.name for volume in spec.compute.volumes),
        "LAST STATUS CHANGE": moment(service.updated),
        "TTL": ttl_words(service),
        "CREATOR": creator(service),
        "CPUs": spec.compute.cpus,
        "MEMORY": spec.compute.memory,
        "GPUs": spec.compute.gpus,
    }
    return {column: cell or "-" for column, cell in cells.items()}


def ttl_words(service: WorkloadView) -> str | None:
    """The idle time after which a service is torn down, with the time left while it is idle."""
    ttl, seconds_left = service.spec.compute.inactivity_ttl, service.idle_seconds_left
    return ttl if ttl is None or seconds_left is None else f"{ttl} ({duration(seconds_left)} left)"


def scaling_lines(service: WorkloadView) -> list[str]:
    """The number of pods that is wanted, with its bounds, and the reason; none if it is fixed."""
    scaling = service.scaling
    if scaling is None:
        return []
    if scaling.engine == "knative":
        return ["by Knative: kubectl describe ksvc shows its decisions"]
    bounds = f"{scaling.minimum} or more"
    if scaling.maximum:
        bounds = f"{scaling.minimum} to {scaling.maximum}"
    pods = "pod" if scaling.wanted == 1 else "pods"
    line = f"{scaling.wanted} {pods} wanted, {bounds} allowed"
    return [line, scaling.reason] if scaling.reason else [line]


#: Columns of decisions that a narrow terminal can do without.
DISPENSABLE_DECISION_COLUMNS = ("AGO",)


def decision_cells(service: WorkloadView, *, now: float, most: int) -> list[dict[str, str]]:
    """The cells of the last decisions on the number of pods, the latest first."""
    decisions = () if service.scaling is None else service.scaling.decisions
    return [
        {
            "AGO": age(decision.time, now=now),
            "PODS": f"{decision.before} → {decision.after}",
            "REASON": decision.reason,
        }
        for decision in reversed(decisions[-most:])
    ]


def _pod_names(service: WorkloadView) -> list[str]:
    """The pods of a service; of a distributed one with their ranks."""
    if service.world is None:
        return [pod.name for pod in service.pods]
    ranks = ranks_of_pods(service)
    names = [f"{pod.name}  ranks {rank_words(ranks.get(pod.name))}" for pod in service.pods]
    lost = (
        f"{loss.member.pod}  ranks {rank_words(ranks[loss.member.pod])}  lost: {loss.reason}"
        for loss in service.world.lost
    )
    return [*names, *lost]


#: Columns that a narrow terminal can do without, and the first to go.
DISPENSABLE_POD_COLUMNS = ("GENERATION", "RESTARTS", "READY", "CALLS", "AGE")


def pod_cells(service: WorkloadView) -> list[dict[str, str]]:
    """The cells of each pod of a service, with its ranks where there are any."""
    ranks = ranks_of_pods(service)
    return [
        {
            "POD": pod.name,
            **({} if service.world is None else {"RANKS": rank_words(ranks.get(pod.name))}),
            "PHASE": pod.phase,
            "READY": "yes" if pod.is_ready else "no",
            "GENERATION": str(pod.generation),
            "RESTARTS": str(pod.restarts),
            "CALLS": str(pod.calls),
            "AGE": age(pod.started),
            "REASON": pod.reason or app_words(pod.app) or "-",
        }
        for pod in service.pods
    ]


def app_words(app: AppView | None) -> str:
    """The state of a pod's app in words; empty without anything to report."""
    if app is None:
        return ""
    if app.exit_code is not None:
        return f"its app ended with exit code {app.exit_code}"
    return f"its app is {app.state}"


#: Columns that a narrow terminal can do without, the first to go first.
DISPENSABLE_CALL_COLUMNS = ("CALLABLE", "TOOK", "AGE", "ATTEMPTS")


def call_cells(call: CallView, *, brief: bool = False) -> dict[str, str]:
    """The cells of a spawned call, by column; in brief those of a list."""
    took = "-" if call.ended is None else f"{max(0.0, call.ended - call.started):.1f}s"
    cells = {
        "ID": call.id,
        "SERVICE": call.workload,
        "CALLABLE": call.callable,
        "STATE": call.state,
        "ATTEMPTS": "-" if call.attempts == 1 else str(call.attempts),
        "PROGRESS": progress_words(call.progress, brief=brief),
    }
    if brief:
        return cells | {"AGE": age(call.started), "TOOK": took}
    result = f"{call.result_bytes} bytes" if call.ended is not None else "-"
    shown = cells | {"STARTED": moment(call.started), "TOOK": took, "RESULT": result}
    return shown | {"REPLAY": f"kt replay {call.id}"} if call.is_replayable else shown


def progress_words(progress: CallProgress | None, *, brief: bool = False) -> str:
    """The progress of a call: `40% 4/10 epoch 4`, in brief `40%`; `-` without any."""
    if progress is None:
        return "-"
    words = f"{progress.current:g}"
    if progress.total:
        share = f"{progress.current / progress.total:.0%}"
        words = share if brief else f"{share} {words}/{progress.total:g}"
    return words if brief else f"{words} {progress.message or ''}".rstrip()


def pods_wanted(service: WorkloadView) -> int:
    """The wanted number of pods; the declared one while that is not known."""
    return service.pods_wanted or service.spec.compute.pods


def ready_pods(service: WorkloadView) -> int:
    """The number of pods that serve the wanted generation."""
    return sum(pod.is_ready for pod in service.pods)


def is_at_zero(service: WorkloadView) -> bool:
    """True if a service has no pods because it gets no calls."""
    is_scaled = bool(service.scaler) or service.scaling is not None
    return is_scaled and not service.pods and service.status == "Ready"


def failure_lines(failure: Mapping[str, Any]) -> list[str]:
    """A failure for people: its traceback, or else its type and message."""
    text = failure.get("traceback") or f"{failure.get('error_type')}: {failure.get('message')}"
    return str(text).rstrip().splitlines()


# ---------------------------------------------------------------------------------------- times


def age(since: float, *, now: float | None = None) -> str:
    """The time since then in its largest unit: `5s`, `12m`, `3h`, `8d`; `-` for never."""
    if since <= 0:
        return "-"
    return duration((time.time() if now is None else now) - since)


def duration(seconds: float) -> str:
    """A time in its largest unit, such as `5s` or `3h`."""
    seconds = max(0.0, seconds)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"


def moment(seconds: float | None) -> str:
    """A time of the clock here with its time zone, to the second; `-` for never."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds)) if seconds else "-"
