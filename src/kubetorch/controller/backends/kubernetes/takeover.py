"""Objects that a user had in the cluster before a deploy took them over: what they were. Pure.

An annotation of the object says it, from the first deploy to the teardown. What stands elsewhere is
not repeated there: secrets are named by the object itself, and the values of variables that the
agent's container goes on with are read from that.

Server-side apply leaves alone what others own. So the container that the agent takes the place of
is first said to be Kubetorch's, in `managedFields` alone, and goes with the apply that brings the
agent. At the teardown all that is still Kubetorch's has the value of before, or goes; what somebody
else has set meanwhile is theirs, and stays.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from kubetorch.k8s import managed_fields
from kubetorch.k8s.managed_fields import Entry, Fields, entries_of, key_of
from kubetorch.k8s.resources import Object
from kubetorch.manifests import agent_container, kinds, labels
from kubetorch.manifests.kinds import Manifest, Path, named

#: Characters of the record; an object has room for 256 KiB of annotations.
RECORD_LIMIT = 200_000
_METADATA = ("labels", "annotations")
#: What a deploy gives to pods that have none.
_ACCOUNT = agent_container.SERVICE_ACCOUNT
# What a Job's controller makes of its name, and refuses in a new one.
_OF_JOBS = ("controller-uid", "job-name")


class Before(msgspec.Struct, frozen=True):
    """An object as it was.

    Attributes:
        object: Its labels, annotations and spec.
        removed: The fields that a deploy has removed, where nobody owns them any more.
        entries: Who owned what.
        is_ended: Whether it was a job that had run.
    """

    object: Object
    removed: Fields
    entries: list[Entry]
    is_ended: bool = False


def is_recorded(one: Object) -> bool:
    return labels.BEFORE in (one["metadata"].get("annotations") or {})


def read(one: Object) -> Before | None:
    """What an object was before; `None` if a deploy has made it."""
    text = (one["metadata"].get("annotations") or {}).get(labels.BEFORE)
    try:
        return None if text is None else msgspec.json.decode(text, type=Before)
    except msgspec.MsgspecError:  # somebody has edited it
        return None


def record(there: Object, wanted: Manifest, paths: Collection[list[str]]) -> str:
    """The annotation for an object that is taken over; `paths` are of fields that go."""
    metadata = {name: dict(there["metadata"].get(name) or {}) for name in _METADATA}
    metadata["annotations"].pop(labels.LAST_APPLIED, None)
    spec = copy.deepcopy(there.get("spec") or {})
    before: Object = {"metadata": metadata, "spec": spec}
    for _, container, agents in _containers(before, wanted):
        _leave_out_values(container, agents)
    removed: Fields = {}
    for path in paths:
        removed = managed_fields.union(removed, managed_fields.nested(path, {}))
    conditions = (there.get("status") or {}).get("conditions") or ()
    is_ended = any(
        one.get("type") in ("Complete", "Failed", "Succeeded", "Completed")
        and one.get("status") == "True"
        for one in conditions
    )
    made = Before(before, removed, entries_of(there), is_ended)
    text = msgspec.json.encode(made, order="sorted").decode()
    if len(text) > RECORD_LIMIT:  # who owned what is of the least use
        text = msgspec.json.encode(msgspec.structs.replace(made, entries=[])).decode()
    return text


def replaced_fields(
    there: Object, wanted: Manifest, replaced: Collection[str]
) -> Iterator[list[str]]:
    """The fields of an object that the agent's container takes the place of.

    Args:
        there: The object.
        wanted: What it is to be.
        replaced: The names of the containers that become the agent's.
    """
    for path in _template_paths(wanted):
        steps = managed_fields.names((*path, "spec", "containers"))
        becomes = kinds.get(wanted, (*path, "spec", "containers"), [])
        for container in kinds.get(there, (*path, "spec", "containers"), []):
            name = container["name"]
            after = named(becomes, name)
            if after is None and name in replaced:
                yield [*steps, key_of(name=name)]
            elif after is not None and "args" in container and "args" not in after:
                yield [*steps, key_of(name=name), "f:args"]


def claimed(one: Object, manager: str, paths: Collection[list[str]]) -> list[Entry]:
    """The entries in which these fields, and all that were its own, are applied by a manager."""
    fields: Fields = {}
    left = []
    for entry in one["metadata"].get("managedFields") or ():
        rest = entry.get("fieldsV1") or {}
        if entry.get("manager") == manager and not entry.get("subresource"):
            fields = managed_fields.union(fields, rest)
            continue
        for path in paths:
            rest, taken = managed_fields.cut(rest, path)
            if taken is not None:
                fields = managed_fields.union(fields, managed_fields.nested(path, taken))
        left.append({**entry, "fieldsV1": rest})
    identity = {"manager": manager, "operation": "Apply", "apiVersion": one["apiVersion"]}
    return managed_fields.with_fields(left, fields, identity) if fields else left


def agents_paths(there: Object, before: Before) -> list[list[str]]:
    """The containers that came with a deploy."""
    found = []
    for path in _template_paths(there):
        where = (*path, "spec", "containers")
        was = kinds.get(before.object, where, [])
        name = _agents_name(there)
        if named(was, name) is None:
            found.append([*managed_fields.names(where), key_of(name=name)])
    return found


def restored(there: Object, before: Before, manager: str) -> Object:
    """What to apply as `manager`, so that an object is what it was but for others' changes."""
    own = managed_fields.owned(entries_of(there), lambda entry: entry.get("manager") == manager)
    fields = managed_fields.union(own, before.removed)
    found = managed_fields.values(
        before.object, {key: fields[key] for key in ("f:spec", "f:metadata") if key in fields}
    )
    for path in _template_paths(there):
        _leave_account(found, there, before, (*path, "spec"))
    return _named_as(there, _with_values(found, there, before, manager))


def _leave_account(found: Object, there: Object, before: Before, where: Path) -> None:
    """Say that pods have no account of their own: left out, its older name would bring it back."""
    had = kinds.get(before.object, (*where, "serviceAccountName"))
    if not had and kinds.get(there, (*where, "serviceAccountName")) == _ACCOUNT:
        for name in ("serviceAccountName", "serviceAccount"):
            kinds.put(found, (*where, name), "")


def whole(there: Object, before: Before) -> Object:
    """An object as it was, to be made anew."""
    found = _with_values(copy.deepcopy(before.object), there, before, "")
    if there["kind"] == "Job" and not found["spec"].get("manualSelector"):
        found["spec"].pop("selector", None)
        template = found["spec"]["template"].get("metadata") or {}
        for of_one in (found["metadata"], template):
            for key in [*(of_one.get("labels") or ())]:
                if key.rpartition("/")[2] in _OF_JOBS:
                    del of_one["labels"][key]
    if there["kind"] == "Pod":
        found["spec"].pop("nodeName", None)
    return _named_as(there, found)


def given_back(made: Object, before: Before, manager: str) -> list[Entry]:
    """The entries in which fields of `manager` are again of those who had them before."""
    entries = made["metadata"].get("managedFields") or []
    own = managed_fields.owned(entries, lambda entry: entry.get("manager") == manager)
    left = [entry for entry in entries if entry.get("manager") != manager]
    for entry in before.entries:
        share = managed_fields.intersection(entry["fieldsV1"], own)
        if share:
            left = managed_fields.with_fields(left, share, entry)
    return left


def _with_values(found: Object, there: Object, before: Before, manager: str) -> Object:
    """With what the agent's containers go on with, and what others have changed in them."""
    entries = entries_of(there)
    others = managed_fields.owned(entries, lambda entry: entry.get("manager") != manager)
    for path, container, agents in _containers(found, there):
        for one in container.get("env") or ():
            if not {"value", "valueFrom"} & one.keys():
                one |= named(agents.get("env") or [], one["name"]) or {}
        if not manager or container["name"] == agents["name"]:
            continue
        where = managed_fields.names((*path, "spec", "containers"))
        _, theirs = managed_fields.cut(others, [*where, key_of(name=agents["name"])])
        for step in theirs or ():
            name = step.partition(":")[2]
            if name not in ("", "name") and name in agents:
                container[name] = agents[name]
    return found


def _leave_out_values(container: Manifest, agents: Manifest) -> None:
    """Leave out the values of variables that the agent's container has as well."""
    for one in container.get("env") or ():
        if "value" in one and named(agents.get("env") or [], one["name"]) == one:
            del one["value"]


def _containers(one: Object, equipped: Object) -> Iterator[tuple[Path, Manifest, Manifest]]:
    """Containers that the agent's took the place of, with the agent's, and where their pods are."""
    for path in _template_paths(equipped):
        where = (*path, "spec", "containers")
        theirs, agents = kinds.get(one, where, []), kinds.get(equipped, where, [])
        own = named(agents, _agents_name(equipped))
        if own is None:
            continue
        for container in theirs:
            is_agents = container["name"] == own["name"]
            if is_agents or named(agents, container["name"]) is None:
                yield path, container, own


def _agents_name(one: Object) -> str:
    kind = kinds.find(one)
    return "" if kind is None else kind.container


def _template_paths(one: Object) -> list[Path]:
    """Where the pod templates of an object are, if each has a place of its own."""
    kind = kinds.find(one)
    if kind is None or not kind.has_template:
        return []
    found = (group.template for group in (kind.primary, *kind.workers))
    return [path for path in found if not any(part.isdigit() or part == "*" for part in path)]


def _named_as(there: Object, found: Any) -> Object:  # noqa: ANN401  # a part of an object
    metadata = {**(found.get("metadata") or {}), "name": there["metadata"]["name"]}
    metadata["namespace"] = there["metadata"]["namespace"]
    return {**found, "apiVersion": there["apiVersion"], "kind": there["kind"], "metadata": metadata}
