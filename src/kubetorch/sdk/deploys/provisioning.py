"""What a deploy brings about before it is sent: secrets are uploaded, volumes made.

The values of secrets go to the controller here and nowhere else; the spec that comes out of it says
which secrets and volumes there are, and which version of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from kubetorch.config.settings import config
from kubetorch.errors import SpecError
from kubetorch.sdk.controller import Controller
from kubetorch.sdk.volume import missing
from kubetorch.specs.secret import SecretRef
from kubetorch.specs.volume import VolumeSpec, default_mount_path
from kubetorch.specs.workload import WorkloadSpec

if TYPE_CHECKING:
    from kubetorch.sdk.secrets.secret import Secret


def provide(controller: Controller, spec: WorkloadSpec, secrets: Iterable[Secret]) -> WorkloadSpec:
    """Have the secrets and volumes of a workload; the spec with what is known of them now.

    Args:
        controller: Who keeps them.
        spec: The workload.
        secrets: Its secrets.

    Raises:
        SecretConflictError: A secret exists with other values.
        SecretNotFound: One that should exist does not.
        VolumeNotFoundError: A claim that should exist does not.
        SpecError: One belongs to another namespace than the workload.
    """
    compute, namespace = spec.compute, spec.namespace
    known = dict(_provided(controller, one, namespace) for one in secrets)
    refs = tuple(known.get(ref.name, ref) for ref in compute.secrets)
    volumes = tuple(_volume(controller, one, namespace) for one in compute.volumes)
    return replace(spec, compute=replace(compute, secrets=refs, volumes=volumes))


def _provided(controller: Controller, secret: Secret, namespace: str) -> tuple[str, SecretRef]:
    """The name of a secret, and what pods see of it."""
    from kubetorch.sdk.secrets import uploading  # noqa: PLC0415  # few workloads have some

    if secret.namespace not in (None, namespace):
        raise SpecError(
            f"the secret {secret.name!r} is one of namespace {secret.namespace!r}, and pods in "
            f"{namespace!r} cannot see it",
            hint="leave its namespace out: it is then that of the service",
        )
    return secret.name, uploading.provide(controller, namespace, secret, config.username)


def _volume(controller: Controller, spec: VolumeSpec, namespace: str) -> VolumeSpec:
    if spec.namespace not in (None, namespace):
        raise SpecError(
            f"the volume {spec.name!r} is one of namespace {spec.namespace!r}, and pods in "
            f"{namespace!r} cannot mount it",
            hint=f"kt.Compute(volumes=[{spec.claim_name!r}]) takes the one that is where the "
            "service is",
        )
    if spec.claim is None:
        controller.volumes.create(namespace, spec)
        return spec
    found = controller.volumes.get(namespace, spec.claim)
    if found is None:
        raise missing(spec.claim, namespace)
    if spec.mount_path == default_mount_path(spec.name):
        return replace(spec, mount_path=found.spec.mount_path)
    return spec
