"""Secrets that a pod sees, as variables or files, and the objects that hold them.

No function here gets a value of a secret: the objects have no `data`, which the upload adds.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator

from kubetorch.errors import SpecError
from kubetorch.manifests import labels, storage
from kubetorch.manifests.kinds import Manifest, list_at
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
    """The path in the pod, with `~` replaced by the pod's home folder."""
    return HOME + path[1:] if path == "~" or path.startswith("~/") else path


def _write(template: PodTemplate, compute: ComputeSpec) -> None:
    for secret in compute.secrets:
        if secret.mount_type == "volume":
            _write_files(template, secret)
        elif secret.all_keys:
            _write_all_variables(template, secret)
        else:
            _write_variables(template, secret, taken=dict(compute.env_vars))


def _write_files(template: PodTemplate, secret: SecretRef) -> None:
    volume = {
        "name": storage.volume_name(f"{_VOLUME_PREFIX}{secret.name}"),
        "secret": {"secretName": secret.object_name, "defaultMode": _FILE_MODE},
    }
    storage.mount(template, volume, path_in_pod(secret.path or "~"), read_only=True)


def _write_all_variables(template: PodTemplate, secret: SecretRef) -> None:
    sources = list_at(template.container, "envFrom")
    secret_source = {"secretRef": {"name": secret.object_name}}
    if secret_source not in sources:
        sources.append(secret_source)


def _write_variables(template: PodTemplate, secret: SecretRef, *, taken: Collection[str]) -> None:
    container_variables = list_at(template.container, "env")
    variables_by_name = {present.get("name"): present for present in reversed(container_variables)}
    for variable, key in secret.variables:
        source = {"secretKeyRef": {"name": secret.object_name, "key": key}}
        present_variable = variables_by_name.get(variable)
        if present_variable is None:
            variables_by_name[variable] = {"name": variable, "valueFrom": source}
            container_variables.append(variables_by_name[variable])
        elif present_variable.get("valueFrom") != source:
            other_source = "env_vars" if variable in taken else "what the manifest has"
            raise SpecError(
                f"the variable {variable} comes from the secret {secret.name!r} and from "
                f"{other_source}",
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
    for object_name, names_by_key in variables.items():
        renamed = tuple((key, name) for key, name in names_by_key.items() if key != name)
        name = _name(object_name)
        yield SecretRef(name, object_name, "env", keys=tuple(names_by_key), renamed=renamed)


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
    """The user's name of a secret, from the name of its object."""
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


def secret_manifest(
    secret: SecretRef,
    *,
    namespace: str,
    username: str | None = None,
    provider: str | None = None,
    override: bool = False,
) -> Manifest:
    """The Secret without its values."""
    object_labels = {
        labels.MOUNT_TYPE: secret.mount_type,
        labels.SECRET_NAME: labels.value(secret.name),
        labels.USERNAME: username,
        labels.PROVIDER: provider,
    }
    annotations = {labels.OVERRIDE: str(override)}
    if secret.mount_type == "volume":
        annotations |= {
            labels.SECRET_PATH: secret.path or "~",
            labels.SECRET_FILENAMES: json.dumps(list(secret.keys)),
        }
    if secret.renamed:
        annotations[labels.SECRET_VARIABLES] = json.dumps(dict(secret.renamed))
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {
            "name": secret.object_name,
            "namespace": namespace,
            "labels": {name: text for name, text in object_labels.items() if text},
            "annotations": annotations,
        },
    }
