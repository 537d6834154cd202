"""Pods without a node: whether a node could ever take them, and the scheduler's reason. Pure."""

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
    NO_TROUBLE,
    Verdict,
    doomed,
    waiting,
    worst,
)
from kubetorch.controller.tuning import TIMING
from kubetorch.errors import UnschedulableError
from kubetorch.k8s.resources import Object
from kubetorch.lib import processes
from kubetorch.specs import quantity

Amounts = dict[str, Fraction]
#: Resources whose amounts are bytes.
_BYTES = ("memory", "ephemeral-storage")
_NAMES = {"cpu": "cpus", "memory": "of memory", "ephemeral-storage": "of disk"}
DEFAULT_SCHEDULER = "default-scheduler"
#: Messages of Karpenter: a request that exceeds all instance types, and the clause of each pool.
_NO_INSTANCE_TYPE = "no instance type has enough resources"
_INCOMPATIBLE_POOL = "incompatible with nodepool"


@dataclass(frozen=True)
class Misfit:
    """Why a node can never take a pod; `shortfall` is the sum of the missing shares."""

    node: str
    reasons: tuple[str, ...]
    shortfall: float

    def __str__(self) -> str:
        return f"{self.node} {', and '.join(self.reasons)}"


def misfits(pod: Object, nodes: Sequence[Object]) -> list[Misfit] | None:
    """Why each node can never take a pod, the nearest node first; `None` if a node could.

    Conditions that pass do not count: usage by other pods, taints, readiness of the node.
    """
    requested = requests(pod["spec"])
    node_misfits = []
    for node in nodes:
        reasons = [*_size_reasons(requested, node), *_selection_reasons(pod["spec"], node)]
        if not reasons:
            return None
        allocatable = _allocatable(node)
        missing_shares = [
            float(1 - allocatable.get(name, 0) / amount) for name, amount in requested.items()
        ]
        shortfall = sum(max(0.0, missing_share) for missing_share in missing_shares)
        node_misfits.append(Misfit(node["metadata"]["name"], tuple(reasons), shortfall))
    return sorted(
        node_misfits, key=lambda misfit: (len(misfit.reasons), misfit.shortfall, misfit.node)
    )


def demand(spec: Object) -> tuple[object, ...]:
    """The part of a pod spec that `misfits` depends on: pods with equal demands fit equal nodes."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity")
    selection = msgspec.json.encode([spec.get("nodeSelector"), affinity], order="sorted")
    return frozenset(requests(spec).items()), selection


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
            _raise_to(largest, sidecars)
        else:
            together = dict(sidecars)
            _add(together, _requests(container))
            _raise_to(largest, together)
    _add(total, sidecars)
    _raise_to(total, largest)
    total |= _requests(spec)  # requests of a pod for all of its containers together
    _add(total, amounts(spec.get("overhead") or {}))
    return {name: amount for name, amount in total.items() if amount}


def amounts(quantities: Mapping[str, object]) -> Amounts:
    """Parse quantities of the API, without the texts that are none."""
    parsed_amounts: Amounts = {}
    for name, text in quantities.items():
        amount = quantity.parse(text)
        if amount is not None:
            parsed_amounts[name] = amount
    return parsed_amounts


def _requests(holder: Object) -> Amounts:
    resources = holder.get("resources") or {}
    # A resource with a limit and without a request is requested in the amount of the limit.
    return amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _add(total: Amounts, more: Amounts) -> None:
    for name, amount in more.items():
        total[name] = total.get(name, Fraction(0)) + amount


def _raise_to(total: Amounts, least: Amounts) -> None:
    for name, amount in least.items():
        total[name] = max(total.get(name, Fraction(0)), amount)


def _allocatable(node: Object) -> Amounts:
    status = node.get("status") or {}
    capacity = amounts(status.get("capacity") or {})
    allocatable = amounts(status.get("allocatable") or {}) or dict(capacity)
    # Missing devices may come back, when their plugin or the kubelet starts again.
    _raise_to(allocatable, {name: amount for name, amount in capacity.items() if "/" in name})
    return allocatable


def _size_reasons(requested: Amounts, node: Object) -> Iterator[str]:
    allocatable = _allocatable(node)
    for name, amount in requested.items():
        available = allocatable.get(name, Fraction(0))
        if amount > available:
            has_amount = amount_text(name, available) if available else "no"
            unit = _NAMES.get(name, name)
            yield f"has {has_amount} {unit}, {amount_text(name, amount)} are asked"


def amount_text(name: str, amount: Fraction) -> str:
    """An amount with its unit, as users write it."""
    if name in _BYTES:
        return processes.written(int(amount))
    return str(int(amount)) if amount.denominator == 1 else f"{float(amount):g}"


# --------------------------------------------------------------------------- selector, affinity


def _selection_reasons(spec: Object, node: Object) -> Iterator[str]:
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
    field_expressions = term.get("matchFields") or []
    if not expressions and not field_expressions:
        return False  # an empty term matches nothing
    return all(_matches(expression, labels) for expression in expressions) and all(
        _matches(expression, fields) for expression in field_expressions
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
    pod_verdicts = [volumes.judge(pod, events, cluster)]
    if scheduled.get("reason") == "SchedulingGated":
        pod_verdicts.append(queues.judge_gated(pod, cluster))
    elif scheduled.get("status") == "False":
        pod_verdicts.append(_judge_unschedulable(pod, scheduled, events, cluster))
    else:
        pod_verdicts.append(queues.judge_scheduler(pod, cluster))
        pod_verdicts.append(_judge_unnoticed(pod, cluster))
    return worst(pod_verdicts)


def _judge_unschedulable(
    pod: Object, scheduled: Object, events: Sequence[Object], cluster: Cluster
) -> Verdict:
    message = brief(str(scheduled.get("message") or "no node has taken it yet"))
    since = snapshot.time_of(scheduled.get("lastTransitionTime"))
    waiting_verdict = waiting(f"no node takes it yet: {message}", since)
    if scheduled.get("reason") != "Unschedulable":
        return waiting_verdict
    pod_events = snapshot.events_of(events, "Pod", pod["metadata"]["name"])
    autoscaler = cluster.autoscaler or next(
        filter(None, map(snapshot.autoscaler, pod_events)), None
    )
    if autoscaler is not None:
        return _judge_autoscaled(pod, message, events, autoscaler, since)
    knows_capacity = all(map(cluster.knows, (NODES, AUTOSCALER_STATUS, NODE_POOLS)))
    if not (knows_capacity and cluster.all(NODES)):
        return waiting_verdict
    memo_key = ("misfits", demand(pod["spec"]))
    node_misfits = cluster.memoized(memo_key, lambda: misfits(pod, cluster.all(NODES)))
    if node_misfits is None:
        return waiting_verdict
    nearest_misfit = node_misfits[0]
    hint = "correct gpu_type or node_selector (kubectl get nodes --show-labels), or add a node"
    if nearest_misfit.shortfall:
        hint = "ask for less, or add a node that is large enough"
    message = f"no node can ever take the pod: {message}; the nearest, {nearest_misfit}"
    return replace(
        doomed(UnschedulableError(message, hint=hint), since),
        settle_seconds=TIMING.unschedulable_settle_seconds,
    )


def _judge_autoscaled(
    pod: Object, message: str, events: Sequence[Object], autoscaler: str, since: float | None
) -> Verdict:
    name = pod["metadata"]["name"]
    karpenter_messages = [
        str(event.get("message", ""))
        for event in snapshot.events_of(events, "Pod", name, "FailedScheduling")
        if snapshot.reporter(event).startswith("karpenter")
    ]
    if karpenter_messages and karpenter_messages[-1].count(_NO_INSTANCE_TYPE) >= max(
        1, karpenter_messages[-1].count(_INCOMPATIBLE_POOL)
    ):
        error = UnschedulableError(
            f"no node can ever take the pod: Karpenter says: {karpenter_messages[-1]}",
            hint="ask for less, or let an administrator add larger instance types to a NodePool",
        )
        return doomed(error, since)
    return waiting(f"{autoscaler} may add a node: {message}", since)


def _judge_unnoticed(pod: Object, cluster: Cluster) -> Verdict:
    created = snapshot.time_of(pod["metadata"].get("creationTimestamp"))
    if created is None or (pod.get("status") or {}).get("conditions"):
        return NO_TROUBLE
    age = cluster.now - created
    if age < TIMING.scheduler_silence_seconds:
        return Verdict(recheck_seconds=TIMING.scheduler_silence_seconds - age)
    scheduler = pod["spec"].get("schedulerName") or DEFAULT_SCHEDULER
    return waiting(f"the scheduler {scheduler!r} has not looked at it yet", created)


def brief(message: str) -> str:
    """The scheduler's message without the parts on preemption and on claims."""
    text = re.sub(r"\.?\s*(?:no new claims to deallocate,? ?)?preemption: .*$", "", message)
    text = re.sub(r"\.?\s*(?:no new claims to deallocate|not found),?\s*$", "", text)
    return text.strip().rstrip(".,")
