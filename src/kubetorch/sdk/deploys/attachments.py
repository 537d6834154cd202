"""The attachments of a workload: its secrets, its volumes, the files that its image copies.

The values of secrets go to the controller here and nowhere else. The resulting spec has the names
and versions of secrets and volumes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from kubetorch.config import environment
from kubetorch.config.settings import config
from kubetorch.datastore import ignore_rules
from kubetorch.datastore import scan as scanning
from kubetorch.datastore.scan import Options, Scan
from kubetorch.errors import SpecError
from kubetorch.sdk.controller import Controller
from kubetorch.sdk.secret import Secret
from kubetorch.sdk.volume import create, not_found_error
from kubetorch.specs.image import CopyStep, ImageSpec, Step
from kubetorch.specs.secret import SecretRef
from kubetorch.specs.volume import VolumeSpec, default_mount_path
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.secrets import Collision, PutSecret, SecretDraft, SecretView, StoredSecret


def provide(controller: Controller, spec: WorkloadSpec, secrets: Iterable[Secret]) -> WorkloadSpec:
    """Store the secrets and make the volumes of a workload; returns the spec with their state."""
    compute, namespace = spec.compute, spec.namespace
    ref_by_name = {
        secret.name: _provide_secret(controller, secret, namespace) for secret in secrets
    }
    refs = tuple(ref_by_name.get(ref.name, ref) for ref in compute.secrets)
    volumes = tuple(_provide_volume(controller, volume, namespace) for volume in compute.volumes)
    return replace(spec, compute=replace(compute, secrets=refs, volumes=volumes))


def _provide_secret(controller: Controller, secret: Secret, namespace: str) -> SecretRef:
    """Upload a secret if its values are here; returns its reference for pods."""
    if secret.namespace not in (None, namespace):
        raise SpecError(
            f"the secret {secret.name!r} is one of namespace {secret.namespace!r}, and pods in "
            f"{namespace!r} cannot see it",
            hint="leave out namespace=: the secret is then that of the namespace of the service",
        )
    if secret.to_upload() is None:
        return _ref_of_existing(controller.secrets.find(namespace, secret.name), secret)
    collision: Collision = "replace" if secret.override else "same"
    stored = upload_secret(controller, namespace, secret, collision)
    return replace(secret.to_ref(), version=stored.secret.version)


def upload_secret(
    controller: Controller, namespace: str, secret: Secret, collision: Collision
) -> StoredSecret:
    """Store the values of a secret, which are here."""
    values, ref = secret.to_upload(), secret.to_ref()
    if values is None:
        raise SpecError(
            f"the values of the secret {secret.name!r} are not known here",
            hint="give values=, or run this where its variables are set or its files are",
        )
    draft = SecretDraft(
        name=ref.name,
        mount_type=ref.mount_type,
        path=ref.path,
        renamed=ref.renamed,
        provider=secret.provider,
        username=config.username,
        override=secret.override,
    )
    put = PutSecret(draft=draft, values=dict(values), collision=collision)
    return controller.secrets.put(namespace, ref.object_name, put)


def _ref_of_existing(existing: SecretView, secret: Secret) -> SecretRef:
    """A secret that exists, with the keys and the path that were declared."""
    stored_ref = SecretRef(
        name=secret.name,
        object_name=existing.object_name,
        mount_type=existing.mount_type,
        keys=existing.keys,
        path=existing.path,
        renamed=existing.renamed,
        version=existing.version,
    )
    declared = secret.to_ref()
    if declared.all_keys or secret.is_found:
        return stored_ref
    for key in declared.keys:
        if key not in stored_ref.keys:
            raise SpecError(
                f"the secret {secret.name!r} exists and has no {key!r}; it has "
                f"{', '.join(stored_ref.keys)}"
            )
    return replace(
        stored_ref,
        mount_type=declared.mount_type,
        keys=declared.keys or stored_ref.keys,
        path=declared.path or stored_ref.path,
        renamed=declared.renamed if declared.keys else stored_ref.renamed,
    )


def _provide_volume(controller: Controller, spec: VolumeSpec, namespace: str) -> VolumeSpec:
    if spec.namespace not in (None, namespace):
        raise SpecError(
            f"the volume {spec.name!r} is one of namespace {spec.namespace!r}, and pods in "
            f"{namespace!r} cannot mount it",
            hint=f"kt.Compute(volumes=[{spec.claim_name!r}]) takes the one that is where the "
            "service is",
        )
    if spec.claim is None:
        create(controller, namespace, spec)
        return spec
    view = controller.volumes.get(namespace, spec.claim)
    if view is None:
        raise not_found_error(controller, spec.claim, namespace)
    is_default = spec.mount_path == default_mount_path(spec.name)
    return replace(
        spec,
        mount_path=view.spec.mount_path if is_default else spec.mount_path,
        access_mode=view.spec.access_mode,
    )


def copied_paths(image: ImageSpec) -> tuple[str, ...]:
    return tuple(step.source for step in image.steps if isinstance(step, CopyStep))


def scan_copies(image: ImageSpec, *, cache: Path) -> tuple[ImageSpec, list[Scan]]:
    """The image with the digests of the files that it copies, and the scans of these files."""
    named_paths, own_folders = copied_paths(image), environment.own_folders()
    options = Options(cache=cache, link_targets=named_paths, excluded_folders=own_folders)
    steps: list[Step] = []
    scans: list[Scan] = []
    for step in image.steps:
        if isinstance(step, CopyStep):
            copy_scan = _scan(step, options)
            scans.append(copy_scan)
            steps.append(replace(step, digest=copy_scan.digest))
        else:
            steps.append(step)
    return replace(image, steps=tuple(steps)), scans


def _scan(step: CopyStep, options: Options) -> Scan:
    if not os.path.exists(step.source):  # noqa: PTH110  # pathlib costs more than the rest
        raise SpecError(f"the image copies {step.source!r}, which is not there any more")
    if not step.is_folder:
        folder, name = os.path.split(step.source)
        return scanning.scan(Path(folder), replace(options, only=name))
    # A package is filtered as a project is; a copy sends all files but those of its own filters.
    filters = None if step.is_package else ignore_rules.parse_filters(step.filter_options or "")
    return scanning.scan(Path(step.source), replace(options, filters=filters))
