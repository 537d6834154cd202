"""Which nodes could ever take a pod: by size, selector and affinity. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import msgspec

from kubetorch.k8s.resources import Object
from kubetorch.lib import usage
from kubetorch.specs import quantity

Amounts = dict[str, Fraction]
#: Resources in which a memory-like amount is shown with its unit.
_BYTES = ("memory", "ephemeral-storage")
_NAMES = {"cpu": "cpus", "memory": "of memory", "ephemeral-storage": "of disk"}


@dataclass(frozen=True)
class Misfit:
    """Why a node can never take a pod.

    Attributes:
        node: Its name.
        reasons: One for each thing that it lacks, such as `has 2 cpus, 10 are asked`.
        shortfall: How far its size is from what is asked; 0 when the size fits.
    """

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
        found.append(Misfit(node["metadata"]["name"], tuple(reasons), _shortfall(asked, node)))
    return sorted(found, key=lambda one: (len(one.reasons), one.shortfall, one.node))


def demand(spec: Object) -> tuple[object, ...]:
    """What `misfits` looks at: two pods with the same one fit the same nodes."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity")
    chosen = msgspec.json.encode([spec.get("nodeSelector"), affinity], order="sorted")
    return frozenset(requests(spec).items()), chosen


# ------------------------------------------------------------------------------------------ size


def requests(spec: Object) -> Amounts:
    """What a pod asks for, as the scheduler counts it.

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
            _raise(largest, _sum(sidecars, _requests(container)))
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


def _sum(one: Amounts, other: Amounts) -> Amounts:
    found = dict(one)
    _add(found, other)
    return found


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
            yield f"has {_shown(name, there)}, {written(name, amount)} are asked"


def _shortfall(asked: Amounts, node: Object) -> float:
    has = _allocatable(node)
    lacks = [float(1 - has.get(name, 0) / amount) for name, amount in asked.items()]
    return sum(max(0.0, lack) for lack in lacks)


def _shown(name: str, amount: Fraction) -> str:
    return f"{written(name, amount) if amount else 'no'} {_NAMES.get(name, name)}"


def written(name: str, amount: Fraction) -> str:
    """An amount as people write it."""
    if name in _BYTES:
        return usage.written(int(amount))
    return str(int(amount)) if amount.denominator == 1 else f"{float(amount):g}"


# --------------------------------------------------------------------------- selector, affinity


def _selection(spec: Object, node: Object) -> Iterator[str]:
    labels = node["metadata"].get("labels") or {}
    for name, text in (spec.get("nodeSelector") or {}).items():
        if labels.get(name) != text:
            yield _label(labels, name, f"{text} is asked")
    affinity = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    ) or {}
    terms = affinity.get("nodeSelectorTerms") or []
    if terms and not any(_term(term, node) for term in terms):
        yield "does not match the node affinity"


def _label(labels: Mapping[str, str], name: str, asked: str) -> str:
    has = f"has {name}={labels[name]}" if name in labels else f"has no label {name}"
    return f"{has}, {asked}"


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
