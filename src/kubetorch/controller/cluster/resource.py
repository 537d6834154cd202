"""A workload as an object of kind `KubetorchWorkload`. Pure.

`spec` has the wanted generation, with the earlier ones that may be served again. It is written in
one piece, so a generation is stored completely or not at all. `status` has what became of the
generation, and is written later; a failure that it has of another generation is ignored.

Names of fields become those of Kubernetes (`inactivity_ttl` is `inactivityTtl`), pairs become
entries with `name` and `value`, and fields that have their default are left out, so that people can
read the object. Nothing is lost: `load` returns the value that `dump` got, also when the API server
has sorted the keys and forgotten which numbers had a fraction.
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

from kubetorch.controller.access import NO_GRANT, Grant, User
from kubetorch.controller.state import Generation, Summary, WorkloadRecord
from kubetorch.controller.tuning import LIMITS
from kubetorch.errors import ProtocolError, SpecError
from kubetorch.k8s.resources import Object, Resource, seconds
from kubetorch.manifests import labels
from kubetorch.specs.image import Step
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import messages
from kubetorch.wire.messages import Creator

_T = TypeVar("_T")
WORKLOADS = Resource("kubetorch.com", "v1alpha1", "kubetorchworkloads", "KubetorchWorkload")
#: Characters that the message of an event may have.
_MESSAGE_LIMIT = 1024
# Fields that are in the metadata of the object.
_IDENTITY = ("namespace", "name")


def dump(value: Any) -> Any:  # noqa: ANN401  # any part of a spec
    """A spec, or a part of one, as JSON values."""
    if dataclasses.is_dataclass(value):
        fields = {}
        for field in dataclasses.fields(value):
            part = getattr(value, field.name)
            if part is not None and part != default_of(field):
                fields[key(field.name)] = dump(part)
        return fields
    if isinstance(value, tuple):
        return [
            {"name": part[0], "value": part[1]} if isinstance(part, tuple) else dump(part)
            for part in value
        ]
    return value


def load(kind: type[_T], value: object) -> _T:
    """A spec from the JSON values of `dump`."""
    return messages.decode(kind, messages.encode(_to_message_fields(kind, value)))


def key(field: str) -> str:
    """The name of a field in Kubernetes."""
    return re.sub("_([a-z0-9])", lambda match: match[1].upper(), field.lstrip("_"))


def default_of(field: dataclasses.Field[Any]) -> object:
    """The default of a field; `MISSING` for a required one."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def value_of_pairs(kind: Any) -> Any:  # noqa: ANN401  # a type
    """The type of the values of pairs with names, such as `str`; `None` for another type."""
    members = get_args(kind) if get_origin(kind) is tuple else ()
    pair = get_args(members[0]) if members and get_origin(members[0]) is tuple else ()
    return pair[1] if len(pair) == 2 and pair[0] is str and pair[1] is not Ellipsis else None


def union_members(kind: Any) -> list[Any]:  # noqa: ANN401  # a type, which may be a union
    """The members of a union, or the type itself, without `None`."""
    is_union = get_origin(kind) is not None and type(None) in get_args(kind)
    members = get_args(kind) if is_union else (kind,)
    return [arm for arm in members if arm is not type(None)]


def _to_message_fields(kind: Any, value: object) -> object:  # noqa: ANN401  # a type, which may be a union
    """The result of `dump`, with the names of fields that messages have."""
    arm = union_members(kind)[0]
    if isinstance(value, list):
        if value_of_pairs(arm) is not None:
            return [[pair.get("name"), pair.get("value")] for pair in map(_mapping, value)]
        return [
            _to_message_fields(get_args(arm)[0] if get_args(arm) else Any, part) for part in value
        ]
    if not isinstance(value, dict):
        return value
    if arm is Step:
        return {re.sub("[A-Z]", r"_\g<0>", name).lower(): part for name, part in value.items()}
    if not dataclasses.is_dataclass(arm):
        return value
    hints = get_type_hints(arm)
    fields: dict[str, object] = {}
    for field in dataclasses.fields(arm):
        if key(field.name) in value:
            fields[field.name] = _to_message_fields(hints[field.name], value[key(field.name)])
        elif default_of(field) is dataclasses.MISSING and type(None) in get_args(hints[field.name]):
            fields[field.name] = None
    return fields


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
    """The labels that the controller sets; the object may have further ones."""
    workload_spec = _wanted_generation(content).spec
    label_values = {
        labels.SERVICE: workload_spec.name,
        labels.MODULE: labels.value(workload_spec.callable.module),
    }
    if workload_spec.username:
        label_values[labels.USERNAME] = labels.value(workload_spec.username)
    return {name: value for name, value in label_values.items() if value}


def spec(content: Content) -> Object:
    wanted_generation = _wanted_generation(content)
    number = wanted_generation.number
    earlier = [generation for generation in content.generations if generation.number != number]
    spec_fields = {
        **_generation_fields(wanted_generation),
        "deployedAt": _timestamp(content.record.updated),
    }
    if earlier:
        spec_fields["previous"] = [_generation_fields(generation) for generation in earlier]
    size = len(msgspec.json.encode(spec_fields))
    if size > LIMITS.workload_bytes:
        raise SpecError(
            f"the declaration of {wanted_generation.spec.name} has {size:,} bytes, with those of "
            f"the generations before that are kept; a cluster keeps at most "
            f"{LIMITS.workload_bytes:,}",
            hint="make its manifest, environment and image steps shorter; data belongs into a "
            "volume, a secret, or the project",
        )
    return spec_fields


def status(content: Content, summary: Summary | None, earlier_status: Mapping[str, Any]) -> Object:
    record = content.record
    status_fields: Object = {
        "generation": record.generation,
        "good": record.good,
        "epoch": record.epoch,
        "grants": [_grant_fields(generation) for generation in content.generations],
    }
    if record.active:
        status_fields["lastActive"] = _timestamp(record.active)
    if record.worlds:
        status_fields["worlds"] = record.worlds
    if record.pool:
        status_fields["pool"] = record.pool
    if record.scaling:
        status_fields["scaling"] = record.scaling
    if record.failure:
        status_fields["failure"] = _shortened(json.loads(record.failure))
    if summary is None:
        kept_names = (name for name in earlier_status if name not in ("failure", "reason"))
        return {**{name: earlier_status[name] for name in kept_names}, **status_fields}
    status_fields |= {
        "phase": summary.phase,
        "kind": summary.kind,
        "pods": summary.pods,
        "readyPods": summary.ready,
        "ready": f"{summary.ready}/{summary.pods}",
    }
    if summary.reason:
        status_fields["reason"] = summary.reason
    if summary.ttl:
        status_fields["ttl"] = summary.ttl
    return {**status_fields, "conditions": [_condition(summary, earlier_status)]}


def event(before: Object | None, after: Object, now: float) -> Object | None:
    """The event of a change between two states of a workload's object; `None` without one."""
    earlier_status, status = (before or {}).get("status") or {}, after.get("status") or {}
    number, phase = after["spec"].get("generation"), str(status.get("phase") or "")
    if ((before or {}).get("spec") or {}).get("generation") != number:
        reason, message = "Deployed", f"generation {number}"
    elif phase and (phase, status.get("reason")) != (
        earlier_status.get("phase"),
        earlier_status.get("reason"),
    ):
        reason = status.get("reason") or phase.title().replace(" ", "")
        message = _status_message(status)
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
        "message": message[:_MESSAGE_LIMIT],
        "type": "Warning" if status.get("reason") and reason != "Deployed" else "Normal",
        "source": {"component": "kubetorch-controller"},
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }


def _status_message(status: Mapping[str, Any]) -> str:
    all_conditions = status.get("conditions") or ()
    conditions = (condition for condition in all_conditions if condition.get("type") == "Ready")
    message = next((str(condition.get("message") or "") for condition in conditions), "")
    phase_in_words = (
        f"{status['phase']}: {status.get('ready')} pods serve generation {status['generation']}"
    )
    return f"{phase_in_words}: {message}" if message else phase_in_words


def _wanted_generation(content: Content) -> Generation:
    number = content.record.generation
    return next(generation for generation in content.generations if generation.number == number)


def _generation_fields(generation: Generation) -> Object:
    all_fields = dump(generation.spec)
    spec_fields = {name: value for name, value in all_fields.items() if name not in _IDENTITY}
    return {"generation": generation.number, **spec_fields}


def _grant_fields(generation: Generation) -> Object:
    """The user who deployed a generation, and the secrets and volumes that its pods may mount."""
    grant = generation.grant
    grant_fields: Object = {"generation": generation.number, "spec": _digest(generation.spec)}
    if grant.user is not None:
        user = grant.user
        grant_fields["user"] = {
            "username": user.name,
            "uid": user.uid,
            "groups": list(user.groups),
            "extra": {key: list(values) for key, values in user.extra},
        }
    for part in ("secrets", "volumes"):
        grant_fields[part] = [{"name": name, "identity": it} for name, it in getattr(grant, part)]
    if grant.creator is not None:
        grant_fields["creator"] = msgspec.to_builtins(grant.creator)
    return grant_fields


def _condition(summary: Summary, earlier_status: Mapping[str, Any]) -> Object:
    state = "True" if summary.is_ready else "False"
    condition = {
        "type": "Ready",
        "status": state,
        "reason": summary.phase.replace(" ", ""),
        "message": _shortened_text(summary.message),
        "lastTransitionTime": _timestamp(summary.time),
    }
    for earlier_condition in earlier_status.get("conditions") or ():
        if earlier_condition.get("type") == "Ready" and earlier_condition.get("status") == state:
            condition["lastTransitionTime"] = earlier_condition.get(
                "lastTransitionTime"
            ) or _timestamp(summary.time)
    return condition


def _shortened(failure: dict[str, Any]) -> dict[str, Any]:
    """A failure cut to the size limit, without the fields that are `None`."""
    failure_fields = {
        name: _shortened_text(value) for name, value in failure.items() if value is not None
    }
    for name in ("members", "args", "state", "cause"):
        if len(json.dumps(failure_fields)) > LIMITS.failure_bytes:
            failure_fields.pop(name, None)
    # Through JSON, so that it equals the status that the API server returns.
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(failure_fields))
    return plain


def _shortened_text(value: Any) -> Any:  # noqa: ANN401  # any value of a failure
    if not isinstance(value, str) or len(value) <= LIMITS.failure_text_characters:
        return value
    half = LIMITS.failure_text_characters // 2
    return f"{value[:half]}\n…\n{value[-half:]}"


# ----------------------------------------------------------------------------------- from objects


def read(workload_object: Object) -> Content:
    try:
        return _read(workload_object)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"no workload: {type(error).__name__}: {error}") from error


def _read(workload_object: Object) -> Content:
    metadata, spec_fields = workload_object["metadata"], workload_object["spec"]
    namespace, name = metadata["namespace"], metadata["name"]
    status_fields = workload_object.get("status") or {}
    generations = []
    for generation_fields in (*(spec_fields.get("previous") or ()), spec_fields):
        number = int(generation_fields["generation"])
        spec = load(WorkloadSpec, {**generation_fields, "namespace": namespace, "name": name})
        generations.append(Generation(number, spec, _granted(status_fields, number, spec)))
    number = generations[-1].number
    is_current = status_fields.get("generation") == number
    good = int(status_fields.get("good") or 0)
    failure = status_fields.get("failure") if is_current else None
    record = WorkloadRecord(
        namespace,
        name,
        generation=number,
        good=good if any(generation.number == good for generation in generations) else 0,
        failure="" if failure is None else messages.encode(failure).decode(),
        epoch=int(status_fields.get("epoch") or 0),
        created=seconds(metadata.get("creationTimestamp")),
        updated=seconds(spec_fields.get("deployedAt")),
        active=seconds(status_fields.get("lastActive")),
        worlds=str(status_fields.get("worlds") or ""),
        pool=str(status_fields.get("pool") or ""),
        scaling=str(status_fields.get("scaling") or ""),
    )
    return Content(record, tuple(sorted(generations, key=lambda generation: generation.number)))


def _digest(spec: WorkloadSpec) -> str:
    """The digest of a spec, which does not depend on the form that the API server gives it."""
    text = json.dumps(dump(spec), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _granted(status: Mapping[str, Any], number: int, spec: WorkloadSpec) -> Grant:
    """The grant of a generation: `NO_GRANT` if a user wrote or edited it by hand."""
    for grant_fields in status.get("grants") or ():
        if grant_fields["generation"] == number and grant_fields.get("spec") == _digest(spec):
            parts = (grant_fields.get(part) or () for part in ("secrets", "volumes"))
            secrets, volumes = (
                tuple((mount["name"], mount["identity"]) for mount in part) for part in parts
            )
            creator_fields = grant_fields.get("creator")
            creator = None
            if creator_fields is not None:
                creator = Creator(creator_fields["user"], creator_fields.get("username"))
            return Grant(_user(grant_fields.get("user")), secrets, volumes, creator)
    return NO_GRANT


def _user(user_fields: Mapping[str, Any] | None) -> User | None:
    if user_fields is None:
        return None
    extra = ((key, tuple(values)) for key, values in (user_fields.get("extra") or {}).items())
    groups = tuple(user_fields.get("groups") or ())
    return User(user_fields["username"], user_fields.get("uid") or "", groups, tuple(sorted(extra)))


def _timestamp(time: float) -> str:
    moment = datetime.fromtimestamp(time, timezone.utc)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
