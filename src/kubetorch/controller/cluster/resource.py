"""A workload as an object of kind `KubetorchWorkload`. Pure.

`spec` says what is wanted: the generation, and what it is. It is written in one piece, so a
generation is there with all that it consists of, or it is not there. `status` says what became of
it, and is written later; what it says of another generation than the wanted one is not believed.

The words of a spec become those of Kubernetes (`inactivity_ttl` is `inactivityTtl`), pairs become
entries with `name` and `value`, and what has its default is left out, so that people can read it.
Nothing is lost: `load` gives back what `dump` was given, also when the API server has sorted the
keys and forgotten which numbers had a fraction.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from kubetorch.controller.access import Grant, User
from kubetorch.controller.state import Generation, Summary, WorkloadRecord
from kubetorch.errors import ProtocolError, SpecError
from kubetorch.k8s.resources import Object, Resource, seconds
from kubetorch.manifests import labels
from kubetorch.specs.image import Step
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import messages
from kubetorch.wire.messages import Creator

_T = TypeVar("_T")
#: Names and values, in the order given.
PAIRS = tuple[tuple[str, str], ...]
WORKLOADS = Resource("kubetorch.com", "v1alpha1", "kubetorchworkloads", "KubetorchWorkload")
#: Bytes that a workload may have, as JSON. etcd takes 1.5 MiB, of which the status and what the API
#: server notes about the fields are parts.
SIZE_LIMIT = 1024 * 1024
#: Bytes of a failure, and of each text in it; the log of the pod has all of it.
_FAILURE_LIMIT, _TEXT_LIMIT = 64 * 1024, 8 * 1024
#: Characters that the message of an event may have.
_MESSAGE_LIMIT = 1024
# Named by the object itself.
_IDENTITY = ("namespace", "name")


def dump(value: Any) -> Any:  # noqa: ANN401  # whatever a spec consists of
    """A spec, or a part of one, as JSON values."""
    if dataclasses.is_dataclass(value):
        found = {}
        for field in dataclasses.fields(value):
            part = getattr(value, field.name)
            if part is not None and part != default_of(field):
                found[key(field.name)] = dump(part)
        return found
    if isinstance(value, tuple):
        return [
            {"name": part[0], "value": part[1]} if isinstance(part, tuple) else dump(part)
            for part in value
        ]
    return value


def load(kind: type[_T], value: object) -> _T:
    """A spec of what `dump` made of it."""
    return messages.decode(kind, messages.encode(_words(kind, value)))


def key(field: str) -> str:
    """The name of a field in Kubernetes."""
    return re.sub("_([a-z0-9])", lambda found: found[1].upper(), field.lstrip("_"))


def default_of(field: dataclasses.Field[Any]) -> object:
    """The value of a field where nothing else is said; `MISSING` when something has to be."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def arms(kind: Any) -> list[Any]:  # noqa: ANN401  # a type, which may be a union
    """The members of a union, or the type itself, without `None`."""
    is_union = get_origin(kind) is not None and type(None) in get_args(kind)
    found = get_args(kind) if is_union else (kind,)
    return [arm for arm in found if arm is not type(None)]


def _words(kind: Any, value: object) -> object:  # noqa: ANN401  # a type, which may be a union
    """The result of `dump`, in the words of messages."""
    arm = arms(kind)[0]
    if isinstance(value, list):
        if arm == PAIRS:
            return [[one.get("name"), one.get("value")] for one in map(_mapping, value)]
        return [_words(get_args(arm)[0] if get_args(arm) else Any, one) for one in value]
    if not isinstance(value, dict):
        return value
    if arm is Step:
        return {re.sub("[A-Z]", r"_\g<0>", name).lower(): part for name, part in value.items()}
    if not dataclasses.is_dataclass(arm):
        return value
    hints = get_type_hints(arm)
    found: dict[str, object] = {}
    for field in dataclasses.fields(arm):
        if key(field.name) in value:
            found[field.name] = _words(hints[field.name], value[key(field.name)])
        elif default_of(field) is dataclasses.MISSING and type(None) in get_args(hints[field.name]):
            found[field.name] = None
    return found


def _mapping(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


class Content(msgspec.Struct, frozen=True):
    record: WorkloadRecord
    generations: tuple[Generation, ...]


# ------------------------------------------------------------------------------------- to objects


def manifest(content: Content) -> Object:
    """The object of a workload, without its status."""
    record = content.record
    identity = {"name": record.name, "namespace": record.namespace}
    return {
        "apiVersion": WORKLOADS.api_version,
        "kind": WORKLOADS.kind,
        "metadata": {**identity, "labels": object_labels(content)},
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
    record = content.record
    found: Object = {"generation": record.generation, "good": record.good, "epoch": record.epoch}
    granted = [one for one in content.generations if one.grant is not None]
    if granted:
        found["grants"] = [_grant(one, one.grant) for one in granted if one.grant]
    if record.active:
        found["lastActive"] = _moment(record.active)
    if record.worlds:
        found["worlds"] = record.worlds
    if record.pool:
        found["pool"] = record.pool
    if record.failure:
        found["failure"] = _shortened(json.loads(record.failure))
    if summary is None:
        kept = (name for name in before if name not in ("failure", "reason"))
        return {**{name: before[name] for name in kept}, **found}
    found |= {
        "phase": summary.phase,
        "kind": summary.kind,
        "pods": summary.pods,
        "readyPods": summary.ready,
        "ready": f"{summary.ready}/{summary.pods}",
    }
    if summary.reason:
        found["reason"] = summary.reason
    if summary.ttl:
        found["ttl"] = summary.ttl
    return {**found, "conditions": [_condition(summary, before)]}


def event(before: Object | None, after: Object, now: float) -> Object | None:
    """What became of a workload between two states of its object, for `kubectl describe`."""
    was, status = (before or {}).get("status") or {}, after.get("status") or {}
    number, phase = after["spec"].get("generation"), str(status.get("phase") or "")
    if ((before or {}).get("spec") or {}).get("generation") != number:
        reason, said = "Deployed", f"generation {number}"
    elif phase and (phase, status.get("reason")) != (was.get("phase"), was.get("reason")):
        reason = status.get("reason") or phase.title().replace(" ", "")
        said = _said(status)
    else:
        return None
    regarding = {name: after["metadata"][name] for name in ("name", "namespace", "uid")}
    time = datetime.fromtimestamp(now, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{regarding['name']}.{round(now * 1e6):x}",
            "namespace": regarding["namespace"],
        },
        "involvedObject": {
            "apiVersion": WORKLOADS.api_version,
            "kind": WORKLOADS.kind,
            **regarding,
        },
        "reason": reason,
        "message": said[:_MESSAGE_LIMIT],
        "type": "Warning" if status.get("reason") and reason != "Deployed" else "Normal",
        "source": {"component": "kubetorch-controller"},
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }


def _said(status: Mapping[str, Any]) -> str:
    conditions = (one for one in status.get("conditions") or () if one.get("type") == "Ready")
    message = next((str(one.get("message") or "") for one in conditions), "")
    served = (
        f"{status['phase']}: {status.get('ready')} pods serve generation {status['generation']}"
    )
    return f"{served}: {message}" if message else served


def _wanted(content: Content) -> Generation:
    number = content.record.generation
    return next(one for one in content.generations if one.number == number)


def _generation(generation: Generation) -> Object:
    found = dump(generation.spec)
    kept = {name: value for name, value in found.items() if name not in _IDENTITY}
    return {"generation": generation.number, **kept}


def _grant(generation: Generation, grant: Grant) -> Object:
    """The user who deployed a generation, and the secrets and volumes that its pods may mount."""
    found: Object = {"generation": generation.number, "spec": _digest(generation.spec)}
    if grant.user is not None:
        user = grant.user
        found["user"] = {
            "username": user.name,
            "uid": user.uid,
            "groups": list(user.groups),
            "extra": {key: list(values) for key, values in user.extra},
        }
    for part in ("secrets", "volumes"):
        found[part] = [{"name": name, "identity": it} for name, it in getattr(grant, part)]
    if grant.creator is not None:
        found["creator"] = msgspec.to_builtins(grant.creator)
    return found


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
            found["lastTransitionTime"] = known.get("lastTransitionTime") or _moment(summary.time)
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
    try:
        return _read(found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"no workload: {type(error).__name__}: {error}") from error


def _read(found: Object) -> Content:
    metadata, wanted = found["metadata"], found["spec"]
    namespace, name = metadata["namespace"], metadata["name"]
    known = found.get("status") or {}
    generations = []
    for one in (*(wanted.get("previous") or ()), wanted):
        number = int(one["generation"])
        spec = load(WorkloadSpec, {**one, "namespace": namespace, "name": name})
        generations.append(Generation(number, spec, _granted(known, number, spec)))
    number = generations[-1].number
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
        created=seconds(metadata.get("creationTimestamp")),
        updated=seconds(wanted.get("deployedAt")),
        active=seconds(known.get("lastActive")),
        worlds=str(known.get("worlds") or ""),
        pool=str(known.get("pool") or ""),
    )
    return Content(record, tuple(sorted(generations, key=lambda one: one.number)))


def _digest(spec: WorkloadSpec) -> str:
    """The digest of a spec, whatever form the API server has given it."""
    text = json.dumps(dump(spec), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _granted(status: Mapping[str, Any], number: int, spec: WorkloadSpec) -> Grant | None:
    """The grant of a generation: none for a generation that nobody deployed as it is.

    A status without grants is that of an earlier version, which kept none.
    """
    if "grants" not in status and "generation" in status:
        return None
    for one in status.get("grants") or ():
        if one["generation"] == number and one.get("spec") == _digest(spec):
            parts = (one.get(part) or () for part in ("secrets", "volumes"))
            secrets, volumes = (
                tuple((each["name"], each["identity"]) for each in part) for part in parts
            )
            by = one.get("creator")
            creator = None if by is None else Creator(by["user"], by.get("username"))
            return Grant(_user(one.get("user")), secrets, volumes, creator)
    return Grant()


def _user(found: Mapping[str, Any] | None) -> User | None:
    if found is None:
        return None
    extra = ((key, tuple(values)) for key, values in (found.get("extra") or {}).items())
    groups = tuple(found.get("groups") or ())
    return User(found["username"], found.get("uid") or "", groups, tuple(sorted(extra)))


def _moment(time: float) -> str:
    moment = datetime.fromtimestamp(time, timezone.utc)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
