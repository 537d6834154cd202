"""Pods that no node has taken: whether one ever could, and what the scheduler says. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import msgspec

from kubetorch.controller.backends.kubernetes.launch_failures import queues, snapshot, volumes
from kubetorch.controller.backends.kubernetes.launch_failures.snapshot import (
    AUTOSCALER_STATUS,
    NODE_POOLS,
    NODES,
    Cluster,
)
from kubetorch.controller.backends.kubernetes.launch_failures.verdicts import (
    NOTHING,
    Verdict,
    doomed,
    waiting,
    worst,
)
from kubetorch.errors import UnschedulableError
from kubetorch.k8s.resources import Object
from kubetorch.lib import processes
from kubetorch.specs import quantity

Amounts = dict[str, Fraction]
#: Resources in which a memory-like amount is shown with its unit.
_BYTES = ("memory", "ephemeral-storage")
_NAMES = {"cpu": "cpus", "memory": "of memory", "ephemeral-storage": "of disk"}
DEFAULT_SCHEDULER = "default-scheduler"
#: Seconds for which no node may be able to take a pod: an autoscaler speaks after the scheduler,
#: and a node that is set up anew is away for a moment.
SETTLE = 2.5
#: Seconds after which a pod that no scheduler has looked at is worth a line.
_SILENCE = 4.0
#: Karpenter's word for an offer that no instance type can meet; each pool has its own clause.
_NO_INSTANCE = "no instance type has enough resources"
_POOL = "incompatible with nodepool"


@dataclass(frozen=True)
class Misfit:
    node: str
    reasons: tuple[str, ...]
    shortfall: float

    def __str__(self) -> str:
        return f"{self.node} {', and '.join(self.reasons)}"


def misfits(pod: Object, nodes: Sequence[Object]) -> list[Misfit] | None:
    """Why each node can never take a pod, the nearest node first; `None` if one could.

    What passes is not looked at: what other pods use, taints, whether the node is ready.
    """
    asked = requests(pod["spec"])
    found = []
    for node in nodes:
        reasons = [*_size(asked, node), *_selection(pod["spec"], node)]
        if not reasons:
            return None
        has = _allocatable(node)
        lacks = [float(1 - has.get(name, 0) / amount) for name, amount in asked.items()]
        shortfall = sum(max(0.0, lack) for lack in lacks)
        found.append(Misfit(node["metadata"]["name"], tuple(reasons), shortfall))
    return sorted(found, key=lambda one: (len(one.reasons), one.shortfall, one.node))


def demand(spec: Object) -> tuple[object, ...]:
    """The part of a pod that `misfits` depends on: pods with the same one fit the same nodes."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity")
    chosen = msgspec.json.encode([spec.get("nodeSelector"), affinity], order="sorted")
    return frozenset(requests(spec).items()), chosen


# ------------------------------------------------------------------------------------------ size


def requests(spec: Object) -> Amounts:
    """The amounts that a pod requests, as the scheduler counts them.

    https://kubernetes.io/docs/concepts/workloads/pods/sidecar-containers/#resource-sharing-within-containers
    """
    total: Amounts = {}
    for container in spec.get("containers") or ():
        _add(total, _requests(container))
    sidecars: Amounts = {}
    largest: Amounts = {}
    for container in spec.get("initContainers") or ():
        if container.get("restartPolicy") == "Always":
            _add(sidecars, _requests(container))
            _raise(largest, sidecars)
        else:
            together = dict(sidecars)
            _add(together, _requests(container))
            _raise(largest, together)
    _add(total, sidecars)
    _raise(total, largest)
    total |= _requests(spec)  # what a pod says for all of its containers
    _add(total, amounts(spec.get("overhead") or {}))
    return {name: amount for name, amount in total.items() if amount}


def amounts(given: Mapping[str, object]) -> Amounts:
    """Quantities of the API; what is none is left out."""
    found: Amounts = {}
    for name, text in given.items():
        amount = quantity.parse(text)
        if amount is not None:
            found[name] = amount
    return found


def _requests(holder: Object) -> Amounts:
    resources = holder.get("resources") or {}
    # What is only limited is asked for in the same amount.
    return amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _add(total: Amounts, more: Amounts) -> None:
    for name, amount in more.items():
        total[name] = total.get(name, Fraction(0)) + amount


def _raise(total: Amounts, least: Amounts) -> None:
    for name, amount in least.items():
        total[name] = max(total.get(name, Fraction(0)), amount)


def _allocatable(node: Object) -> Amounts:
    status = node.get("status") or {}
    whole = amounts(status.get("capacity") or {})
    found = amounts(status.get("allocatable") or {}) or dict(whole)
    # Devices that cannot be had now may come back: their plugin, or the kubelet, starts again.
    _raise(found, {name: amount for name, amount in whole.items() if "/" in name})
    return found


def _size(asked: Amounts, node: Object) -> Iterator[str]:
    has = _allocatable(node)
    for name, amount in asked.items():
        there = has.get(name, Fraction(0))
        if amount > there:
            has_amount = written(name, there) if there else "no"
            unit = _NAMES.get(name, name)
            yield f"has {has_amount} {unit}, {written(name, amount)} are asked"


def written(name: str, amount: Fraction) -> str:
    """An amount as people write it."""
    if name in _BYTES:
        return processes.written(int(amount))
    return str(int(amount)) if amount.denominator == 1 else f"{float(amount):g}"


# --------------------------------------------------------------------------- selector, affinity


def _selection(spec: Object, node: Object) -> Iterator[str]:
    labels = node["metadata"].get("labels") or {}
    for name, text in (spec.get("nodeSelector") or {}).items():
        if labels.get(name) != text:
            has = f"has {name}={labels[name]}" if name in labels else f"has no label {name}"
            yield f"{has}, {text} is asked"
    affinity = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    ) or {}
    terms = affinity.get("nodeSelectorTerms") or []
    if terms and not any(_term(term, node) for term in terms):
        yield "does not match the node affinity"


def _term(term: Object, node: Object) -> bool:
    labels = node["metadata"].get("labels") or {}
    fields = {"metadata.name": node["metadata"]["name"]}
    expressions = term.get("matchExpressions") or []
    of_fields = term.get("matchFields") or []
    if not expressions and not of_fields:
        return False  # an empty term matches nothing
    return all(_matches(one, labels) for one in expressions) and all(
        _matches(one, fields) for one in of_fields
    )


def _matches(expression: Object, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values") or []
    operator = expression.get("operator")
    if operator == "In":
        return value in values
    if operator == "NotIn":
        return value not in values
    if operator == "Exists":
        return value is not None
    if operator == "DoesNotExist":
        return value is None
    try:
        number, bound = int(value or ""), int(values[0])
    except (ValueError, IndexError):
        return False
    return number > bound if operator == "Gt" else number < bound


def judge(pod: Object, events: Sequence[Object], cluster: Cluster) -> Verdict:
    """Judge a pod that has no node."""
    scheduled = snapshot.condition(pod, "PodScheduled")
    found = [volumes.judge(pod, events, cluster)]
    if scheduled.get("reason") == "SchedulingGated":
        found.append(queues.judge_gated(pod, cluster))
    elif scheduled.get("status") == "False":
        found.append(_unschedulable(pod, scheduled, events, cluster))
    else:
        found.append(queues.judge_scheduler(pod, cluster))
        found.append(_unnoticed(pod, cluster))
    return worst(found)


def _unschedulable(
    pod: Object, scheduled: Object, events: Sequence[Object], cluster: Cluster
) -> Verdict:
    message = brief(str(scheduled.get("message") or "no node has taken it yet"))
    since = snapshot.time_of(scheduled.get("lastTransitionTime"))
    waits = waiting(f"no node takes it yet: {message}", since)
    if scheduled.get("reason") != "Unschedulable":
        return waits
    said = snapshot.about(events, "Pod", pod["metadata"]["name"])
    autoscaler = cluster.autoscaler or next(filter(None, map(snapshot.autoscaler, said)), None)
    if autoscaler is not None:
        return _autoscaled(pod, message, events, autoscaler, since)
    knows_capacity = all(map(cluster.knows, (NODES, AUTOSCALER_STATUS, NODE_POOLS)))
    if not (knows_capacity and cluster.all(NODES)):
        return waits
    asked = ("misfits", demand(pod["spec"]))
    found = cluster.once(asked, lambda: misfits(pod, cluster.all(NODES)))
    if found is None:
        return waits
    near = found[0]
    hint = "correct gpu_type or node_selector (kubectl get nodes --show-labels), or add a node"
    if near.shortfall:
        hint = "ask for less, or add a node that is large enough"
    message = f"no node can ever take the pod: {message}; the nearest, {near}"
    return replace(doomed(UnschedulableError(message, hint=hint), since), settles=SETTLE)


def _autoscaled(
    pod: Object, message: str, events: Sequence[Object], autoscaler: str, since: float | None
) -> Verdict:
    name = pod["metadata"]["name"]
    said = [
        str(event.get("message", ""))
        for event in snapshot.about(events, "Pod", name, "FailedScheduling")
        if snapshot.reporter(event).startswith("karpenter")
    ]
    if said and said[-1].count(_NO_INSTANCE) >= max(1, said[-1].count(_POOL)):
        error = UnschedulableError(
            f"no node can ever take the pod: Karpenter says: {said[-1]}",
            hint="ask for less, or let an administrator add larger instance types to a NodePool",
        )
        return doomed(error, since)
    return waiting(f"{autoscaler} may add a node: {message}", since)


def _unnoticed(pod: Object, cluster: Cluster) -> Verdict:
    made = snapshot.time_of(pod["metadata"].get("creationTimestamp"))
    if made is None or (pod.get("status") or {}).get("conditions"):
        return NOTHING
    age = cluster.now - made
    if age < _SILENCE:
        return Verdict(again=_SILENCE - age)
    scheduler = pod["spec"].get("schedulerName") or DEFAULT_SCHEDULER
    return waiting(f"the scheduler {scheduler!r} has not looked at it yet", made)


def brief(message: str) -> str:
    """The scheduler's message without what it says of preemption and of claims."""
    kept = re.sub(r"\.?\s*(?:no new claims to deallocate,? ?)?preemption: .*$", "", message)
    kept = re.sub(r"\.?\s*(?:no new claims to deallocate|not found),?\s*$", "", kept)
    return kept.strip().rstrip(".,")
