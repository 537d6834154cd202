"""Objects that a user had in the cluster before a deploy took them over: how they were. Pure.

An annotation of the object records its original state, from the first deploy to the teardown. The
record does not repeat the values of variables that the agent's container still has: they are read
from there at the teardown.

Server-side apply leaves fields of other managers alone. So Kubetorch first claims the container
that the agent replaces, in `managedFields` alone, and the apply that brings the agent removes it.
At the teardown each field that Kubetorch still owns gets its original value, or disappears; a field
that another writer has set meanwhile stays.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from kubetorch.controller.tuning import LIMITS
from kubetorch.k8s import managed_fields
from kubetorch.k8s.managed_fields import Entry, Fields, entries_of, key_of
from kubetorch.k8s.resources import Object
from kubetorch.manifests import agent_container, kinds, labels
from kubetorch.manifests.kinds import Manifest, Path, named

_METADATA = ("labels", "annotations")
#: The account that a deploy gives to pods without an account.
_AGENT_ACCOUNT = agent_container.SERVICE_ACCOUNT
# Labels that a Job's controller sets, and refuses in a new Job.
_JOB_LABELS = ("controller-uid", "job-name")


class OriginalState(msgspec.Struct, frozen=True):
    """An object as it was before its first deploy.

    Attributes:
        object: Its labels, annotations and spec.
        removed: The fields that a deploy has removed.
        entries: The `managedFields` of the object: which manager owned which field.
        is_ended: Whether the object was a job that had run.
    """

    object: Object
    removed: Fields
    entries: list[Entry]
    is_ended: bool = False


def is_recorded(live_object: Object) -> bool:
    return labels.BEFORE in (live_object["metadata"].get("annotations") or {})


def read(live_object: Object) -> OriginalState | None:
    """The original state of an object; `None` if a deploy has made the object."""
    text = (live_object["metadata"].get("annotations") or {}).get(labels.BEFORE)
    try:
        return None if text is None else msgspec.json.decode(text, type=OriginalState)
    except msgspec.MsgspecError:  # a user has edited the annotation
        return None


def record(live_object: Object, desired_manifest: Manifest, paths: Collection[list[str]]) -> str:
    """The annotation for an object that is taken over; the deploy removes the fields at `paths`."""
    metadata = {name: dict(live_object["metadata"].get(name) or {}) for name in _METADATA}
    metadata["annotations"].pop(labels.LAST_APPLIED, None)
    spec = copy.deepcopy(live_object.get("spec") or {})
    original_object: Object = {"metadata": metadata, "spec": spec}
    for _, container, agents_container in _containers(original_object, desired_manifest):
        _leave_out_values(container, agents_container)
    removed: Fields = {}
    for path in paths:
        removed = managed_fields.union(removed, managed_fields.nested(path, {}))
    conditions = (live_object.get("status") or {}).get("conditions") or ()
    is_ended = any(
        condition.get("type") in ("Complete", "Failed", "Succeeded", "Completed")
        and condition.get("status") == "True"
        for condition in conditions
    )
    original = OriginalState(original_object, removed, entries_of(live_object), is_ended)
    text = msgspec.json.encode(original, order="sorted").decode()
    if len(text) > LIMITS.takeover_record_characters:
        # The earlier field managers are the least useful part.
        text = msgspec.json.encode(msgspec.structs.replace(original, entries=[])).decode()
    return text


def replaced_fields(
    live_object: Object, desired_manifest: Manifest, replaced: Collection[str]
) -> Iterator[list[str]]:
    """The paths of the fields that the agent's container replaces in an object.

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
    """The entries of `managedFields` after a manager has claimed the fields at these paths."""
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
                fields = managed_fields.union(fields, managed_fields.nested(path, claimed_fields))
        remaining_entries.append({**entry, "fieldsV1": remaining_fields})
    identity = {"manager": manager, "operation": "Apply", "apiVersion": live_object["apiVersion"]}
    if fields:
        return managed_fields.with_fields(remaining_entries, fields, identity)
    return remaining_entries


def agents_container_paths(live_object: Object, original: OriginalState) -> list[list[str]]:
    """The paths of the agent's containers that the original object did not have."""
    paths = []
    for path in _template_paths(live_object):
        containers_path = (*path, "spec", "containers")
        original_containers = kinds.get(original.object, containers_path, [])
        name = _agents_container_name(live_object)
        if named(original_containers, name) is None:
            paths.append([*managed_fields.names(containers_path), key_of(name=name)])
    return paths


def restoring_manifest(live_object: Object, original: OriginalState, manager: str) -> Object:
    """The manifest whose apply gives all fields of `manager` their original values."""
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
    """Clear the account that a deploy gave to pods.

    A manifest without the field would not: Kubernetes copies its value from the older field
    `serviceAccount`.
    """
    original_account = kinds.get(original.object, (*pod_spec_path, "serviceAccountName"))
    if (
        not original_account
        and kinds.get(live_object, (*pod_spec_path, "serviceAccountName")) == _AGENT_ACCOUNT
    ):
        for name in ("serviceAccountName", "serviceAccount"):
            kinds.put(manifest, (*pod_spec_path, name), "")


def original_manifest(live_object: Object, original: OriginalState) -> Object:
    """The manifest with which an object can be created anew in its original state."""
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
    """The entries of `managedFields` in which the earlier managers own the fields of `manager`."""
    entries = applied_object["metadata"].get("managedFields") or []
    owned_fields = managed_fields.owned(entries, lambda entry: entry.get("manager") == manager)
    returned_entries = [entry for entry in entries if entry.get("manager") != manager]
    for entry in original.entries:
        share = managed_fields.intersection(entry["fieldsV1"], owned_fields)
        if share:
            returned_entries = managed_fields.with_fields(returned_entries, share, entry)
    return returned_entries


def _with_values(
    manifest: Object, live_object: Object, original: OriginalState, manager: str
) -> Object:
    """Fill in what the record leaves out: values of variables, and changes by other managers.

    Both are read from the agent's containers of the live object.
    """
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
    """Remove the values of variables that the agent's container has as well."""
    for variable in container.get("env") or ():
        if (
            "value" in variable
            and named(agents_container.get("env") or [], variable["name"]) == variable
        ):
            del variable["value"]


def _containers(
    original_object: Object, equipped: Object
) -> Iterator[tuple[Path, Manifest, Manifest]]:
    """Template path, replaced container and agent's container, for each replaced container."""
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
    """The paths of an object's pod templates, without templates in lists."""
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
