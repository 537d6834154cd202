"""Reads the pods that a manifest asks for, for a backend that is no Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kubetorch.errors import SpecError
from kubetorch.manifests import (
    agent_container,
    container_variables,
    knative,
    rendering,
    replicas,
    scheduling,
)
from kubetorch.manifests.container_variables import SecretVariables, Variable
from kubetorch.manifests.kinds import Manifest
from kubetorch.manifests.workload_manifest import WorkloadManifest
from kubetorch.wire.podenv import HOME

_NAME = re.compile("[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?")


@dataclass(frozen=True)
class SecretFiles:
    """A secret whose values are files of a folder."""

    secret: str
    path: str
    items: tuple[tuple[str, str], ...] = ()
    optional: bool = False


@dataclass(frozen=True)
class ClaimMount:
    claim: str
    path: str
    read_only: bool = False
    sub_path: str = ""


@dataclass(frozen=True)
class Attached:
    variables: tuple[SecretVariables, ...] = ()
    files: tuple[SecretFiles, ...] = ()
    claims: tuple[ClaimMount, ...] = ()
    others: tuple[tuple[str, str], ...] = ()

    @property
    def all_secrets(self) -> tuple[str, ...]:
        named = [one.secret for one in self.variables] + [one.secret for one in self.files]
        return tuple(dict.fromkeys(named))

    @property
    def secrets(self) -> tuple[str, ...]:
        """The secrets without which the pod cannot start."""
        needed = [one.secret for one in self.variables if not one.optional]
        needed += [one.secret for one in self.files if not one.optional]
        return tuple(dict.fromkeys(needed))

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of files and claims, for which a pod needs paths of its own."""
        return (*(one.path for one in self.files), *(one.path for one in self.claims))


class Mounted(msgspec.Struct, frozen=True):
    """The names of the secrets and claims that a pod's agent and workers see, in whatever way.

    Attributes:
        secrets, claims: All of them.
        optional: The secrets without which it starts, too.
    """

    secrets: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.secrets or self.claims)


def read_mounted(pod: Mapping[str, Any], container: Mapping[str, Any]) -> Mounted:
    volumes = {one["name"]: one for one in pod.get("volumes") or ()}
    places = [*(container.get("volumeMounts") or ()), *(container.get("volumeDevices") or ())]
    seen = [volumes.get(place["name"]) or {} for place in places]
    secrets = [(one.secret, one.optional) for one in _variables(pod, container)]
    for volume in seen:
        sources = (volume.get("projected") or {}).get("sources") or ()
        for ref in (volume.get("secret"), *(source.get("secret") for source in sources)):
            if ref is not None:
                name = ref.get("secretName") or ref.get("name")
                secrets.append((str(name), bool(ref.get("optional"))))
    claims = [volume.get("persistentVolumeClaim") for volume in seen]
    needed = {name for name, is_optional in secrets if not is_optional}
    names = tuple(dict.fromkeys(name for name, _ in secrets))
    return Mounted(
        names,
        tuple(dict.fromkeys(str(one["claimName"]) for one in claims if one is not None)),
        tuple(name for name in names if name not in needed),
    )


def read_attached(pod: Mapping[str, Any], container: Mapping[str, Any]) -> Attached:
    volumes = {one["name"]: one for one in pod.get("volumes") or ()}
    files, claims, others = [], [], []
    for mount in container.get("volumeMounts") or ():
        volume = volumes.get(mount["name"]) or {}
        if "secret" in volume and not mount.get("subPath"):
            files.append(_files(volume["secret"], mount))
        elif "persistentVolumeClaim" in volume:
            claims.append(_claim(volume["persistentVolumeClaim"], mount))
        else:
            kind = next((key for key in volume if key != "name"), "unknown")
            others.append((mount["mountPath"], kind))
    return Attached(tuple(_variables(pod, container)), tuple(files), tuple(claims), tuple(others))


def _variables(pod: Mapping[str, Any], container: Mapping[str, Any]) -> Iterator[SecretVariables]:
    """The secrets that variables are of, whose names can be those of objects."""
    for one in container_variables.read_variables(pod, container):
        if isinstance(one, SecretVariables):
            _named(one.secret)
            yield one


def _files(secret: Mapping[str, Any], mount: Mapping[str, Any]) -> SecretFiles:
    items = ((one["key"], _inside(one["path"], "path")) for one in secret.get("items") or ())
    optional = bool(secret.get("optional"))
    return SecretFiles(_named(secret["secretName"]), mount["mountPath"], tuple(items), optional)


def _claim(claim: Mapping[str, Any], mount: Mapping[str, Any]) -> ClaimMount:
    read_only = bool(mount.get("readOnly") or claim.get("readOnly"))
    folder = _inside(mount.get("subPath") or "", "subPath")
    return ClaimMount(_named(claim["claimName"]), mount["mountPath"], read_only, folder)


def _named(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise SpecError(
            f"{name!r} is no name of a secret or a claim",
            hint="lowercase letters, digits, '-' and '.', as Kubernetes has it",
        )
    return name


def _inside(path: str, field: str) -> str:
    if path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise SpecError(
            f"{field} {path!r} of a volume leads out of it",
            hint="it must be relative, without '..', as Kubernetes has it",
        )
    return path


def path_of_machine(path: str, home: str) -> str:
    """A path of a manifest as a path of this machine, whose user has another home than root."""
    is_home = path == HOME or path.startswith(f"{HOME}/")
    return home + path.removeprefix(HOME) if is_home else path


# Kinds whose pods have names of their own, which no two of them can have at a time.
_NAMED = ("Pod", "StatefulSet")


class DesiredPods(msgspec.Struct, frozen=True):
    namespace: str
    name: str
    replicas: int
    template: str
    variables: tuple[Variable, ...]
    working_dir: str | None
    kind: str
    is_recreated: bool
    requests: tuple[tuple[str, str], ...]
    limits: tuple[tuple[str, str], ...] = ()
    attached: Attached = Attached()
    gpus: int = 0
    pretends_gpus: bool = False
    labels: tuple[tuple[str, str], ...] = ()
    annotations: tuple[tuple[str, str], ...] = ()
    account: str = "default"


def read(manifest: Manifest, *, pod_template_path: tuple[str, ...] | None = None) -> DesiredPods:
    workload = WorkloadManifest.parse(manifest, pod_template_path)
    kind, primary = workload.kind, workload.primary
    container, spec = primary.container, manifest.get("spec") or {}
    variables = agent_container.variables(container)
    # Pods that are processes share the ports of the machine, so two cannot have one app.
    has_app = agent_container.APP_PORT in variables
    resources = container.get("resources") or {}
    return DesiredPods(
        namespace=manifest["metadata"]["namespace"],
        name=manifest["metadata"]["name"],
        replicas=knative.least(primary) if kind.is_autoscaled else replicas.read(workload),
        template=rendering.fingerprint(primary.body),
        variables=tuple(container_variables.read_variables(primary.spec, container)),
        working_dir=container.get("workingDir"),
        kind=kind.kind,
        is_recreated=has_app
        or kind.kind in _NAMED
        or (spec.get("strategy") or {}).get("type") == "Recreate",
        requests=_amounts(resources, "requests"),
        limits=_amounts(resources, "limits"),
        attached=read_attached(primary.spec, container),
        gpus=int(scheduling.read_gpu_count(primary) or 0),
        labels=tuple(primary.read_pods("labels").items()),
        annotations=tuple(primary.read_pods("annotations").items()),
        account=primary.spec.get("serviceAccountName") or "default",
    )


def _amounts(resources: Mapping[str, Any], section: str) -> tuple[tuple[str, str], ...]:
    found = resources.get(section) or {}
    return tuple((name, str(amount)) for name, amount in found.items())
