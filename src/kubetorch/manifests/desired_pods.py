"""Reads the pods that a manifest asks for, for a backend that is no Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
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


class SecretFiles(msgspec.Struct, frozen=True):
    """A secret whose values are files of a folder."""

    secret: str
    path: str
    items: tuple[tuple[str, str], ...] = ()
    optional: bool = False


class ClaimMount(msgspec.Struct, frozen=True):
    claim: str
    path: str
    read_only: bool = False
    sub_path: str = ""
    sub_path_expression: str = ""

    def expand_sub_path(self, variables: Mapping[str, str]) -> str:
        """The folder of the claim that a pod with these variables has mounted."""
        sub_path = container_variables.expand_references(self.sub_path_expression, variables)
        if "$(" in sub_path:
            raise SpecError(
                f"subPathExpr {self.sub_path_expression!r} of the claim {self.claim!r} names a "
                "variable that the container does not have",
                hint=f"env has {', '.join(variables) or 'no variables'}",
            )
        return _check_inside(sub_path, "subPathExpr") or self.sub_path


class Attached(msgspec.Struct, frozen=True):
    """The secrets and volumes of a pod's container.

    Attributes:
        other_mounts: Path and kind of the volume of mounts that are neither secret nor claim.
    """

    variables: tuple[SecretVariables, ...] = ()
    files: tuple[SecretFiles, ...] = ()
    claims: tuple[ClaimMount, ...] = ()
    other_mounts: tuple[tuple[str, str], ...] = ()

    @property
    def all_secrets(self) -> tuple[str, ...]:
        secret_names = [ref.secret for ref in self.variables] + [ref.secret for ref in self.files]
        return tuple(dict.fromkeys(secret_names))

    @property
    def required_secrets(self) -> tuple[str, ...]:
        """The secrets without which the pod cannot start."""
        secret_names = [ref.secret for ref in self.variables if not ref.optional]
        secret_names += [ref.secret for ref in self.files if not ref.optional]
        return tuple(dict.fromkeys(secret_names))

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of files and claims, which only the pod itself has."""
        return (*(files.path for files in self.files), *(claim.path for claim in self.claims))


class MountedNames(msgspec.Struct, frozen=True):
    """The names of the secrets and claims that a pod's agent and workers see.

    Attributes:
        secrets: Names of secrets whose values are variables or files.
        claims: Names of claims that are folders or devices.
        optional: Names among `secrets` that a pod can start without.
    """

    secrets: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.secrets or self.claims)


def read_mounted_names(pod: Mapping[str, Any], container: Mapping[str, Any]) -> MountedNames:
    volumes = {pod_volume["name"]: pod_volume for pod_volume in pod.get("volumes") or ()}
    mounts = [*(container.get("volumeMounts") or ()), *(container.get("volumeDevices") or ())]
    mounted_volumes = [volumes.get(mount["name"]) or {} for mount in mounts]
    secrets = [
        (variables.secret, variables.optional) for variables in _secret_variables(pod, container)
    ]
    for volume in mounted_volumes:
        sources = (volume.get("projected") or {}).get("sources") or ()
        for ref in (volume.get("secret"), *(source.get("secret") for source in sources)):
            name = ref and (ref.get("secretName") or ref.get("name"))
            if name:
                secrets.append((str(name), bool(ref.get("optional"))))
    claims = [volume.get("persistentVolumeClaim") for volume in mounted_volumes]
    needed = {name for name, is_optional in secrets if not is_optional}
    names = tuple(dict.fromkeys(name for name, _ in secrets))
    return MountedNames(
        names,
        tuple(dict.fromkeys(str(claim["claimName"]) for claim in claims if claim is not None)),
        tuple(name for name in names if name not in needed),
    )


def read_attached(pod: Mapping[str, Any], container: Mapping[str, Any]) -> Attached:
    volumes = {pod_volume["name"]: pod_volume for pod_volume in pod.get("volumes") or ()}
    files, claims, other_mounts = [], [], []
    for mount in container.get("volumeMounts") or ():
        volume = volumes.get(mount["name"]) or {}
        if "secret" in volume and not (mount.get("subPath") or mount.get("subPathExpr")):
            files.append(_secret_files(volume["secret"], mount))
        elif "persistentVolumeClaim" in volume:
            claims.append(_claim_mount(volume["persistentVolumeClaim"], mount))
        else:
            kind = next((key for key in volume if key != "name"), "unknown")
            other_mounts.append((mount["mountPath"], kind))
    return Attached(
        tuple(_secret_variables(pod, container)), tuple(files), tuple(claims), tuple(other_mounts)
    )


def _secret_variables(
    pod: Mapping[str, Any], container: Mapping[str, Any]
) -> Iterator[SecretVariables]:
    """The variables from secrets, whose names are checked to be names of objects."""
    for variable in container_variables.read_variables(pod, container):
        if isinstance(variable, SecretVariables):
            _check_name(variable.secret)
            yield variable


def _secret_files(secret: Mapping[str, Any], mount: Mapping[str, Any]) -> SecretFiles:
    items = (
        (key_to_path["key"], _check_inside(key_to_path["path"], "path"))
        for key_to_path in secret.get("items") or ()
    )
    optional = bool(secret.get("optional"))
    return SecretFiles(
        _check_name(secret["secretName"]), mount["mountPath"], tuple(items), optional
    )


def _claim_mount(claim: Mapping[str, Any], mount: Mapping[str, Any]) -> ClaimMount:
    read_only = bool(mount.get("readOnly") or claim.get("readOnly"))
    folder = _check_inside(mount.get("subPath") or "", "subPath")
    expression = mount.get("subPathExpr") or ""
    name, path = _check_name(claim["claimName"]), mount["mountPath"]
    return ClaimMount(name, path, read_only, folder, expression)


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise SpecError(
            f"{name!r} is no name of a secret or a claim",
            hint="lowercase letters, digits, '-' and '.', as Kubernetes has it",
        )
    return name


def _check_inside(path: str, field: str) -> str:
    if path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise SpecError(
            f"{field} {path!r} of a volume leads out of it",
            hint="it must be relative, without '..', as Kubernetes has it",
        )
    return path


def path_of_machine(path: str, home: str) -> str:
    """A manifest's path on this machine, whose user has another home folder than root."""
    is_home = path == HOME or path.startswith(f"{HOME}/")
    return home + path.removeprefix(HOME) if is_home else path


# Kinds that name their pods, so the old pod has to end before a new one can have its name.
_KINDS_THAT_NAME_PODS = ("Pod", "StatefulSet")


class DesiredPods(msgspec.Struct, frozen=True):
    namespace: str
    name: str
    replicas: int
    template_digest: str
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
    service_account: str = "default"
    #: Seconds from SIGTERM to SIGKILL, if declared.
    grace_seconds: float | None = None


def read(manifest: Manifest, *, pod_template_path: tuple[str, ...] | None = None) -> DesiredPods:
    workload = WorkloadManifest.parse(manifest, pod_template_path)
    kind, primary = workload.kind, workload.primary
    container, spec = primary.container, manifest.get("spec") or {}
    variables = agent_container.variables(container)
    # Pods that are processes share the machine's ports, so two pods cannot serve on the app's port.
    has_app = agent_container.APP_PORT in variables
    resources = container.get("resources") or {}
    return DesiredPods(
        namespace=manifest["metadata"]["namespace"],
        name=manifest["metadata"]["name"],
        replicas=knative.min_pods(primary) if kind.is_autoscaled else replicas.read(workload),
        # Pods stay when another number of them is wanted.
        template_digest=rendering.fingerprint(
            knative.without_scaling(primary) if kind.is_autoscaled else primary.body
        ),
        variables=tuple(container_variables.read_variables(primary.spec, container)),
        working_dir=container.get("workingDir"),
        kind=kind.kind,
        is_recreated=has_app
        or kind.kind in _KINDS_THAT_NAME_PODS
        or (spec.get("strategy") or {}).get("type") == "Recreate",
        requests=_amounts(resources, "requests"),
        limits=_amounts(resources, "limits"),
        attached=read_attached(primary.spec, container),
        gpus=int(scheduling.read_gpu_count(primary) or 0),
        labels=tuple(primary.read_pods("labels").items()),
        annotations=tuple(primary.read_pods("annotations").items()),
        service_account=primary.spec.get("serviceAccountName") or "default",
        grace_seconds=primary.spec.get("terminationGracePeriodSeconds"),
    )


def _amounts(resources: Mapping[str, Any], section: str) -> tuple[tuple[str, str], ...]:
    amounts = resources.get(section) or {}
    return tuple((name, str(amount)) for name, amount in amounts.items())
