"""A workload as an object of kind `KubetorchWorkload`. Pure.

`spec` says what is wanted: the generation, and what it is. It is written in one piece, so a
generation is there with all that it consists of, or it is not there. `status` says what became of
it, and is written later; what it says of another generation than the wanted one is not believed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import msgspec

from kubetorch.controller.cluster import fields
from kubetorch.controller.state import Generation, WorkloadRecord
from kubetorch.controller.summary import Summary
from kubetorch.errors import ProtocolError, SpecError
from kubetorch.k8s.resources import Object, Resource
from kubetorch.manifests import labels
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import messages

WORKLOADS = Resource("kubetorch.com", "v1alpha1", "kubetorchworkloads", "KubetorchWorkload")
#: Bytes that a workload may have, as JSON. etcd takes 1.5 MiB, of which the status and what the API
#: server notes about the fields are parts.
SIZE_LIMIT = 1024 * 1024
#: Bytes of a failure, and of each text in it; the log of the pod has all of it.
_FAILURE_LIMIT, _TEXT_LIMIT = 64 * 1024, 8 * 1024
# Named by the object itself.
_IDENTITY = ("namespace", "name")


class Content(msgspec.Struct, frozen=True):
    """What is kept of one workload."""

    record: WorkloadRecord
    generations: tuple[Generation, ...]


# ------------------------------------------------------------------------------------- to objects


def manifest(content: Content) -> Object:
    """The object of a workload, without its status.

    Raises:
        SpecError: It is larger than the cluster can keep.
    """
    record = content.record
    return {
        "apiVersion": WORKLOADS.api_version,
        "kind": WORKLOADS.kind,
        "metadata": {
            "name": record.name,
            "namespace": record.namespace,
            "labels": object_labels(content),
        },
        "spec": spec(content),
    }


def object_labels(content: Content) -> dict[str, str]:
    """The labels that are ours; there may be others."""
    wanted = _wanted(content).spec
    found = {labels.SERVICE: wanted.name, labels.MODULE: labels.value(wanted.callable.module)}
    if wanted.username:
        found[labels.USERNAME] = labels.value(wanted.username)
    return {name: value for name, value in found.items() if value}


def spec(content: Content) -> Object:
    """What is wanted.

    Raises:
        SpecError: It is larger than the cluster can keep.
    """
    wanted = _wanted(content)
    earlier = [one for one in content.generations if one.number != wanted.number]
    found = {
        **_generation(wanted),
        "deployedAt": _moment(content.record.updated),
        **({"previous": [_generation(one) for one in earlier]} if earlier else {}),
    }
    size = len(msgspec.json.encode(found))
    if size > SIZE_LIMIT:
        raise SpecError(
            f"the declaration of {wanted.spec.name} has {size:,} bytes, with those of the "
            f"generations before that are kept; a cluster keeps at most {SIZE_LIMIT:,}",
            hint="make its manifest, environment and image steps shorter; data belongs into a "
            "volume, a secret, or the project",
        )
    return found


def status(content: Content, summary: Summary | None, before: Mapping[str, Any]) -> Object:
    """What became of it.

    Args:
        content: The workload.
        summary: How it is at this moment, if that is known.
        before: The status that is there, for what stays.
    """
    record = content.record
    found: Object = {"generation": record.generation, "good": record.good, "epoch": record.epoch}
    if record.active:
        found["lastActive"] = _moment(record.active)
    if record.failure:
        found["failure"] = _shortened(json.loads(record.failure))
    if summary is None:
        return {**{name: value for name, value in before.items() if name != "failure"}, **found}
    found |= {
        "phase": summary.phase,
        "kind": summary.kind,
        "pods": summary.pods,
        "readyPods": summary.ready,
        "ready": f"{summary.ready}/{summary.pods}",
    }
    if summary.ttl:
        found["ttl"] = summary.ttl
    return {**found, "conditions": [_condition(summary, before)]}


def _wanted(content: Content) -> Generation:
    number = content.record.generation
    return next(one for one in content.generations if one.number == number)


def _generation(generation: Generation) -> Object:
    found = fields.dump(generation.spec)
    kept = {name: value for name, value in found.items() if name not in _IDENTITY}
    return {"generation": generation.number, **kept}


def _condition(summary: Summary, before: Mapping[str, Any]) -> Object:
    state = "True" if summary.is_ready else "False"
    found = {
        "type": "Ready",
        "status": state,
        "reason": summary.phase.replace(" ", ""),
        "message": _cut(summary.message),
        "lastTransitionTime": _moment(summary.time),
    }
    for known in before.get("conditions") or ():
        if known.get("type") == "Ready" and known.get("status") == state:
            found["lastTransitionTime"] = (
                known.get("lastTransitionTime") or found["lastTransitionTime"]
            )
    return found


def _shortened(failure: dict[str, Any]) -> dict[str, Any]:
    """A failure that is small enough, without what is not said in it."""
    found = {name: _cut(value) for name, value in failure.items() if value is not None}
    for name in ("members", "args", "state", "cause"):
        if len(json.dumps(found)) > _FAILURE_LIMIT:
            found.pop(name, None)
    # As the API server gives it back: numbers, texts and the like.
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(found))
    return plain


def _cut(value: Any) -> Any:  # noqa: ANN401  # any value of a failure
    if not isinstance(value, str) or len(value) <= _TEXT_LIMIT:
        return value
    half = _TEXT_LIMIT // 2
    return f"{value[:half]}\n…\n{value[-half:]}"


# ----------------------------------------------------------------------------------- from objects


def read(found: Object) -> Content:
    """The workload that an object is.

    Raises:
        ProtocolError: It is none that can be read.
    """
    try:
        return _read(found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"no workload: {type(error).__name__}: {error}") from error


def _read(found: Object) -> Content:
    metadata, wanted = found["metadata"], found["spec"]
    namespace, name = metadata["namespace"], metadata["name"]
    generations = [
        Generation(
            int(one["generation"]),
            fields.load(WorkloadSpec, {**one, "namespace": namespace, "name": name}),
        )
        for one in (*(wanted.get("previous") or ()), wanted)
    ]
    number = generations[-1].number
    known = found.get("status") or {}
    is_current = known.get("generation") == number
    good = int(known.get("good") or 0)
    failure = known.get("failure") if is_current else None
    record = WorkloadRecord(
        namespace,
        name,
        generation=number,
        good=good if any(one.number == good for one in generations) else 0,
        failure="" if failure is None else messages.encode(failure).decode(),
        epoch=int(known.get("epoch") or 0),
        created=_seconds(metadata.get("creationTimestamp")),
        updated=_seconds(wanted.get("deployedAt")),
        active=_seconds(known.get("lastActive")),
    )
    return Content(record, tuple(sorted(generations, key=lambda one: one.number)))


def _moment(seconds: float) -> str:
    """A time as Kubernetes writes it."""
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _seconds(moment: str | None) -> float:
    if not moment:
        return 0.0
    return datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()
