"""A user's own manifest as a compute: `kt.Compute.from_manifest`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from kubetorch.errors import SpecError
from kubetorch.manifests import reading
from kubetorch.specs import names
from kubetorch.specs.compute import ComputeSpec

#: Label of training jobs' pods that has the job's name.
_JOB_NAME = "training.kubeflow.org/job-name"
_EXAMPLE = 'for example kt.Compute.from_manifest("deployment.yaml")'


def is_here(manifest: object) -> bool:
    """Whether a manifest is no file, or one of this machine."""
    if not isinstance(manifest, (str, PathLike)):
        return True
    return Path(manifest).expanduser().is_file()


def load(manifest: object) -> Mapping[str, Any]:
    """The manifest that a user gave: a dictionary, or the path of a YAML file with one object.

    Raises:
        SpecError: It is neither, or the file cannot be read.
    """
    if isinstance(manifest, Mapping):
        return manifest
    if not isinstance(manifest, (str, PathLike)) or not str(manifest).strip():
        raise SpecError(
            f"manifest is {manifest!r}; it must be a dictionary, or the path of a YAML file",
            hint=_EXAMPLE,
        )
    path = Path(manifest).expanduser()
    return _only_object(path, _objects(path))


def _objects(path: Path) -> list[object]:
    import yaml  # noqa: PLC0415  # 13 ms, only where there is a file

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SpecError(
            f"manifest is {str(path)!r}, which cannot be read: {reason}",
            hint=f"the working directory is {Path.cwd()}",
        ) from error
    try:
        return [one for one in yaml.safe_load_all(text) if one is not None]
    except (yaml.YAMLError, ValueError) as error:
        raise SpecError(f"manifest is {str(path)!r}, which is no valid YAML: {error}") from error


def _only_object(path: Path, found: list[object]) -> Mapping[str, Any]:
    if len(found) != 1 or not isinstance(found[0], Mapping):
        kinds = [str(one.get("kind")) for one in found if isinstance(one, Mapping)]
        has = f"{len(found)} objects ({', '.join(kinds)})" if len(kinds) > 1 else "no object"
        raise SpecError(
            f"manifest is {str(path)!r}, which has {has}; a compute is of one",
            hint="give the one whose pods are called as a dictionary, or in a file of its own",
        )
    return found[0]


def declared(
    manifest: Mapping[str, Any], pod_template_path: str | Sequence[str | int] | None
) -> ComputeSpec:
    """The spec of a manifest.

    Raises:
        SpecError: It is not what a manifest has to be.
    """
    return reading.declared(manifest, pod_template_path=pod_template_path)


def name(manifest: Mapping[str, Any], selector: Mapping[str, str] | None) -> str | None:
    """Name of the service: that of the manifest, or of the training job that is selected.

    Raises:
        SpecError: It cannot be that of a service.
    """
    found = reading.name(manifest) or (selector or {}).get(_JOB_NAME) or None
    if found is None:
        return None
    if names.clean(found) != found or len(found) > names.SERVICE_LIMIT:
        raise SpecError(
            f"the manifest has the name {found!r}; that of a service has at most "
            f"{names.SERVICE_LIMIT} lower-case letters, digits and '-'",
            hint="change metadata.name, or leave it out",
        )
    return found


def namespace(manifest: Mapping[str, Any]) -> str | None:
    """Namespace of the manifest, if it says."""
    return reading.namespace(manifest)
