"""Secrets that a pod sees, as variables or files, and the objects that hold them.

No function here is given a value of a secret: objects are shells, and whoever uploads one adds its
`data`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator

from kubetorch.errors import SpecError
from kubetorch.manifests import labels, storage
from kubetorch.manifests.kinds import Manifest, items
from kubetorch.manifests.workload_manifest import ManifestParameter, PodTemplate
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.secret import SecretRef
from kubetorch.wire.podenv import HOME

_VOLUME_PREFIX = "secrets-"
_OBJECT_PREFIX = "kt.secret."
# 0600: ssh refuses keys that others may read. With `fsGroup` Kubernetes lets the group read too.
_FILE_MODE = 0o600

_SECRETS = "https://kubernetes.io/docs/concepts/configuration/secret/"


def path_in_pod(path: str) -> str:
    """The path with `~` replaced."""
    return HOME + path[1:] if path == "~" or path.startswith("~/") else path


def _write(template: PodTemplate, compute: ComputeSpec) -> None:
    for one in compute.secrets:
        if one.mount_type == "volume":
            _write_files(template, one)
        elif one.all_keys:
            _write_all_variables(template, one)
        else:
            _write_variables(template, one, taken=dict(compute.env_vars))


def _write_files(template: PodTemplate, one: SecretRef) -> None:
    volume = {
        "name": storage.volume_name(f"{_VOLUME_PREFIX}{one.name}"),
        "secret": {"secretName": one.object_name, "defaultMode": _FILE_MODE},
    }
    storage.mount(template, volume, path_in_pod(one.path or "~"), read_only=True)


def _write_all_variables(template: PodTemplate, one: SecretRef) -> None:
    found = items(template.container, "envFrom")
    wanted = {"secretRef": {"name": one.object_name}}
    if wanted not in found:
        found.append(wanted)


def _write_variables(template: PodTemplate, one: SecretRef, *, taken: Collection[str]) -> None:
    found = items(template.container, "env")
    known = {there.get("name"): there for there in reversed(found)}
    for variable, key in one.variables:
        source = {"secretKeyRef": {"name": one.object_name, "key": key}}
        there = known.get(variable)
        if there is None:
            known[variable] = {"name": variable, "valueFrom": source}
            found.append(known[variable])
        elif there.get("valueFrom") != source:
            other = "env_vars" if variable in taken else "what the manifest has"
            raise SpecError(
                f"the variable {variable} comes from the secret {one.name!r} and from {other}",
                hint="leave one of them out",
            )


def _read(template: PodTemplate) -> tuple[SecretRef, ...] | None:
    return (*_variables(template), *_all_variables(template), *_files(template)) or None


def _variables(template: PodTemplate) -> Iterator[SecretRef]:
    variables: dict[str, dict[str, str]] = {}
    for variable in template.container.get("env") or ():
        source = (variable.get("valueFrom") or {}).get("secretKeyRef")
        if source is not None:
            variables.setdefault(source["name"], {})[source["key"]] = variable["name"]
    for object_name, found in variables.items():
        renamed = tuple((key, name) for key, name in found.items() if key != name)
        name = _name(object_name)
        yield SecretRef(name, object_name, "env", keys=tuple(found), renamed=renamed)


def _all_variables(template: PodTemplate) -> Iterator[SecretRef]:
    for source in template.container.get("envFrom") or ():
        if "secretRef" in source and not source.get("prefix"):
            object_name = source["secretRef"]["name"]
            yield SecretRef(_name(object_name), object_name, "env", all_keys=True)


def _files(template: PodTemplate) -> Iterator[SecretRef]:
    paths = storage.mount_paths(template)
    for volume in template.spec.get("volumes") or ():
        is_ours = volume["name"].startswith(_VOLUME_PREFIX) and "secret" in volume
        path = paths.get(volume["name"]) if is_ours else None
        if path is not None:
            name = volume["name"].removeprefix(_VOLUME_PREFIX)
            yield SecretRef(name, volume["secret"]["secretName"], "volume", path=path)


def _name(object_name: str) -> str:
    """Name that the user knows a secret by."""
    is_ours = object_name.startswith(_OBJECT_PREFIX)
    return object_name.removeprefix(_OBJECT_PREFIX).partition(".")[2] if is_ours else object_name


PARAMETERS = (
    ManifestParameter(
        "secrets",
        "C.env: valueFrom.secretKeyRef; C.envFrom; P.volumes: secrets-<name>; C.volumeMounts",
        _read,
        _write,
        _SECRETS,
    ),
)


def shell(
    one: SecretRef,
    *,
    namespace: str,
    username: str | None = None,
    provider: str | None = None,
    override: bool = False,
) -> Manifest:
    """The Secret without its values."""
    known = {
        labels.MOUNT_TYPE: one.mount_type,
        labels.SECRET_NAME: labels.value(one.name),
        labels.USERNAME: username,
        labels.PROVIDER: provider,
    }
    annotations = {labels.OVERRIDE: str(override)}
    if one.mount_type == "volume":
        annotations |= {
            labels.SECRET_PATH: one.path or "~",
            labels.SECRET_FILENAMES: json.dumps(list(one.keys)),
        }
    if one.renamed:
        annotations[labels.SECRET_VARIABLES] = json.dumps(dict(one.renamed))
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {
            "name": one.object_name,
            "namespace": namespace,
            "labels": {name: text for name, text in known.items() if text},
            "annotations": annotations,
        },
    }
