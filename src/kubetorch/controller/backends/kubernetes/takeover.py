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
_AGENT_ACCOUNT = agent_container.SERVICE_ACCOUNT
# What a Job's controller makes of its name, and refuses in a new one.
_JOB_LABELS = ("controller-uid", "job-name")


class OriginalState(msgspec.Struct, frozen=True):
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


def is_recorded(live_object: Object) -> bool:
    return labels.BEFORE in (live_object["metadata"].get("annotations") or {})


def read(live_object: Object) -> OriginalState | None:
    """What an object was before; `None` if a deploy has made it."""
    text = (live_object["metadata"].get("annotations") or {}).get(labels.BEFORE)
    try:
        return None if text is None else msgspec.json.decode(text, type=OriginalState)
    except msgspec.MsgspecError:  # somebody has edited it
        return None


def record(live_object: Object, desired_manifest: Manifest, paths: Collection[list[str]]) -> str:
    """The annotation for an object that is taken over; `paths` are of fields that go."""
    metadata = {name: dict(live_object["metadata"].get(name) or {}) for name in _METADATA}
    metadata["annotations"].pop(labels.LAST_APPLIED, None)
    spec = copy.deepcopy(live_object.get("spec") or {})
    original_object: Object = {"metadata": metadata, "spec": spec}
    for _, container, agents_container in _containers(original_object, desired_manifest):
        _leave_out_values(container, agents_container)
    removed: Fields = {}
    for path in paths:
        removed = managed_fields.union(removed, managed_fields.at(path, {}))
    conditions = (live_object.get("status") or {}).get("conditions") or ()
    is_ended = any(
        condition.get("type") in ("Complete", "Failed", "Succeeded", "Completed")
        and condition.get("status") == "True"
        for condition in conditions
    )
    original = OriginalState(original_object, removed, entries_of(live_object), is_ended)
    text = msgspec.json.encode(original, order="sorted").decode()
    if len(text) > RECORD_LIMIT:  # who owned what is of the least use
        text = msgspec.json.encode(msgspec.structs.replace(original, entries=[])).decode()
    return text


def replaced_fields(
    live_object: Object, desired_manifest: Manifest, replaced: Collection[str]
) -> Iterator[list[str]]:
    """The fields of an object that the agent's container takes the place of.

    Args:
        live_object: The object as it is in the cluster.
        desired_manifest: The manifest that a deploy is about to apply.
        replaced: The names of the containers that become the agent's.
    """
    for path in _template_paths(desired_manifest):
        steps = managed_fields.names((*path, "spec", "containers"))
        desired_containers = kinds.get(desired_manifest, (*path, "spec", "containers"), [])
        for container in kinds.get(live_object, (*path, "spec", "containers"), []):
            name = container["name"]
            desired_container = named(desired_containers, name)
            if desired_container is None and name in replaced:
                yield [*steps, key_of(name=name)]
            elif (
                desired_container is not None
                and "args" in container
                and "args" not in desired_container
            ):
                yield [*steps, key_of(name=name), "f:args"]


def entries_with_claim(
    live_object: Object, manager: str, paths: Collection[list[str]]
) -> list[Entry]:
    """The entries in which these fields, and all that were its own, are applied by a manager."""
    fields: Fields = {}
    remaining_entries = []
    for entry in live_object["metadata"].get("managedFields") or ():
        remaining_fields = entry.get("fieldsV1") or {}
        if entry.get("manager") == manager and not entry.get("subresource"):
            fields = managed_fields.union(fields, remaining_fields)
            continue
        for path in paths:
            remaining_fields, claimed_fields = managed_fields.cut(remaining_fields, path)
            if claimed_fields is not None:
                fields = managed_fields.union(fields, managed_fields.at(path, claimed_fields))
        remaining_entries.append({**entry, "fieldsV1": remaining_fields})
    identity = {"manager": manager, "operation": "Apply", "apiVersion": live_object["apiVersion"]}
    return (
        managed_fields.given_to(remaining_entries, fields, identity)
        if fields
        else remaining_entries
    )


def agents_container_paths(live_object: Object, original: OriginalState) -> list[list[str]]:
    """The containers that came with a deploy."""
    paths = []
    for path in _template_paths(live_object):
        containers_path = (*path, "spec", "containers")
        original_containers = kinds.get(original.object, containers_path, [])
        name = _agents_container_name(live_object)
        if named(original_containers, name) is None:
            paths.append([*managed_fields.names(containers_path), key_of(name=name)])
    return paths


def restoring_manifest(live_object: Object, original: OriginalState, manager: str) -> Object:
    """What to apply as `manager`, so that an object is what it was but for others' changes."""
    owned_fields = managed_fields.owned(
        entries_of(live_object), lambda entry: entry.get("manager") == manager
    )
    fields = managed_fields.union(owned_fields, original.removed)
    manifest = managed_fields.values(
        original.object, {key: fields[key] for key in ("f:spec", "f:metadata") if key in fields}
    )
    for path in _template_paths(live_object):
        _clear_account(manifest, live_object, original, (*path, "spec"))
    return _named_as(live_object, _with_values(manifest, live_object, original, manager))


def _clear_account(
    manifest: Object, live_object: Object, original: OriginalState, pod_spec_path: Path
) -> None:
    """Say that pods have no account of their own: left out, its older name would bring it back."""
    original_account = kinds.get(original.object, (*pod_spec_path, "serviceAccountName"))
    if (
        not original_account
        and kinds.get(live_object, (*pod_spec_path, "serviceAccountName")) == _AGENT_ACCOUNT
    ):
        for name in ("serviceAccountName", "serviceAccount"):
            kinds.put(manifest, (*pod_spec_path, name), "")


def original_manifest(live_object: Object, original: OriginalState) -> Object:
    """An object as it was, to be made anew."""
    manifest = _with_values(copy.deepcopy(original.object), live_object, original, "")
    if live_object["kind"] == "Job" and not manifest["spec"].get("manualSelector"):
        manifest["spec"].pop("selector", None)
        template = manifest["spec"]["template"].get("metadata") or {}
        for metadata in (manifest["metadata"], template):
            for key in [*(metadata.get("labels") or ())]:
                if key.rpartition("/")[2] in _JOB_LABELS:
                    del metadata["labels"][key]
    if live_object["kind"] == "Pod":
        manifest["spec"].pop("nodeName", None)
    return _named_as(live_object, manifest)


def entries_given_back(
    applied_object: Object, original: OriginalState, manager: str
) -> list[Entry]:
    """The entries in which fields of `manager` are again of those who had them before."""
    entries = applied_object["metadata"].get("managedFields") or []
    owned_fields = managed_fields.owned(entries, lambda entry: entry.get("manager") == manager)
    returned_entries = [entry for entry in entries if entry.get("manager") != manager]
    for entry in original.entries:
        share = managed_fields.intersection(entry["fieldsV1"], owned_fields)
        if share:
            returned_entries = managed_fields.given_to(returned_entries, share, entry)
    return returned_entries


def _with_values(
    manifest: Object, live_object: Object, original: OriginalState, manager: str
) -> Object:
    """With what the agent's containers go on with, and what others have changed in them."""
    entries = entries_of(live_object)
    foreign_fields = managed_fields.owned(entries, lambda entry: entry.get("manager") != manager)
    for path, container, agents_container in _containers(manifest, live_object):
        for variable in container.get("env") or ():
            if not {"value", "valueFrom"} & variable.keys():
                variable |= named(agents_container.get("env") or [], variable["name"]) or {}
        if not manager or container["name"] == agents_container["name"]:
            continue
        containers_path = managed_fields.names((*path, "spec", "containers"))
        _, container_fields = managed_fields.cut(
            foreign_fields, [*containers_path, key_of(name=agents_container["name"])]
        )
        for step in container_fields or ():
            name = step.partition(":")[2]
            if name not in ("", "name") and name in agents_container:
                container[name] = agents_container[name]
    return manifest


def _leave_out_values(container: Manifest, agents_container: Manifest) -> None:
    """Leave out the values of variables that the agent's container has as well."""
    for variable in container.get("env") or ():
        if (
            "value" in variable
            and named(agents_container.get("env") or [], variable["name"]) == variable
        ):
            del variable["value"]


def _containers(
    original_object: Object, equipped: Object
) -> Iterator[tuple[Path, Manifest, Manifest]]:
    """Containers that the agent's took the place of, with the agent's, and where their pods are."""
    for path in _template_paths(equipped):
        containers_path = (*path, "spec", "containers")
        original_containers, equipped_containers = (
            kinds.get(original_object, containers_path, []),
            kinds.get(equipped, containers_path, []),
        )
        agents_container = named(equipped_containers, _agents_container_name(equipped))
        if agents_container is None:
            continue
        for container in original_containers:
            is_agents = container["name"] == agents_container["name"]
            if is_agents or named(equipped_containers, container["name"]) is None:
                yield path, container, agents_container


def _agents_container_name(manifest: Object) -> str:
    kind = kinds.find(manifest)
    return "" if kind is None else kind.container


def _template_paths(manifest: Object) -> list[Path]:
    """Where the pod templates of an object are, if each has a place of its own."""
    kind = kinds.find(manifest)
    if kind is None or not kind.has_template:
        return []
    paths = (group.template for group in (kind.primary, *kind.workers))
    return [path for path in paths if not any(part.isdigit() or part == "*" for part in path)]


def _named_as(live_object: Object, manifest: Any) -> Object:  # noqa: ANN401  # a part of an object
    metadata = {**(manifest.get("metadata") or {}), "name": live_object["metadata"]["name"]}
    metadata["namespace"] = live_object["metadata"]["namespace"]
    return {
        **manifest,
        "apiVersion": live_object["apiVersion"],
        "kind": live_object["kind"],
        "metadata": metadata,
    }
