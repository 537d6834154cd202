"""The manifest of a `kt.Compute`: rendered from its spec, or a user's own that becomes a spec.

Declaring resources loads none of this.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

from kubetorch._version import __version__
from kubetorch.config.settings import DEFAULT_IMAGE, config
from kubetorch.errors import SpecError
from kubetorch.manifests import agent, kinds, metadata, parameters, rendering, scheduling
from kubetorch.manifests.kinds import Manifest
from kubetorch.manifests.workload_manifest import PodTemplate, WorkloadManifest, check_containers
from kubetorch.specs import names
from kubetorch.specs.compute import MOST_LEVELS, MOST_VALUES, ComputeSpec, freeze, thaw
from kubetorch.specs.distribution import DistributionSpec
from kubetorch.specs.image import ImageSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import routes
from kubetorch.wire.messages import Equipment, Runtime

#: Label of training jobs' pods that has the job's name.
_JOB_NAME = "training.kubeflow.org/job-name"
_EXAMPLE = 'for example kt.Compute.from_manifest("deployment.yaml")'


class ComputeManifest:
    """The Kubernetes object that a deploy of a compute applies, as far as it is known before."""

    def __init__(
        self,
        spec: ComputeSpec,
        namespace: str,
        name: str | None,
        workload: WorkloadSpec | None = None,
        equipment: Equipment | None = None,
    ) -> None:
        self._spec = spec
        self._namespace = namespace
        self._name = name
        self._workload = workload
        self._equipment = equipment or _chart_equipment()

    def render(self) -> Manifest | None:
        """The whole object; `None` for a compute that only names pods."""
        if self._spec.is_selector_only:
            return None
        workload, equipment, path = self._workload, self._equipment, self._spec.pod_template_path
        manifest = rendering.render(
            self._spec,
            namespace=self._namespace,
            name=self._name,
            callable=None if workload is None else workload.callable,
            username=config.username if workload is None else workload.username,
            has_operator=equipment.has_operator,
        )
        for template in WorkloadManifest.parse(manifest, path).templates:
            agent.note_secrets(template, equipment.secrets)
        agent.equip(
            manifest,
            workload=self._name,
            runtime=equipment.runtime,
            path=path,
            working_dir=agent.WORK if workload is None else agent.working_dir(workload),
            root_images=equipment.root_images,
        )
        return manifest

    def primary(self) -> PodTemplate | None:
        """The template of the pods that calls go to."""
        manifest = self.render()
        if manifest is None:
            return None
        return WorkloadManifest.parse(manifest, self._spec.pod_template_path).primary

    def tolerations(self) -> list[Manifest]:
        return [
            scheduling.render_toleration(toleration)
            for toleration in scheduling.all_tolerations(self._spec)
        ]

    def without_pod_labels(self, keys: set[str]) -> str:
        """The user's manifest without these labels of its pods."""
        manifest = thaw(self._spec.manifest or "{}")
        for template in WorkloadManifest.parse(manifest, self._spec.pod_template_path).templates:
            labels = template.read_pods("labels")
            for key in keys & labels.keys():
                del labels[key]
        return freeze(manifest, parameter="manifest")

    def with_pod_spec(self, pod_spec: object) -> ComputeSpec:
        """The compute with another spec of its pods, and with the parameters of that spec."""
        if not isinstance(pod_spec, Mapping) or self._spec.is_selector_only:
            raise SpecError(
                "pod_spec cannot be set: this compute only names pods that are there already"
                if self._spec.is_selector_only
                else "pod_spec must be a dictionary, such as a changed copy of compute.pod_spec; "
                f"it is {reprlib.repr(pod_spec)}"
            )
        # A compute without a manifest has no name of a service yet.
        name = None if self._spec.manifest is None else self._name
        manifest = ComputeManifest(self._spec, self._namespace, name).render() or {}
        path = self._spec.pod_template_path
        before, _ = read(manifest, path)
        workload = WorkloadManifest.parse(manifest, path)
        workload.primary.body["spec"] = thaw(freeze(pod_spec, parameter="pod_spec"))
        workload.write_templates()
        after, _ = read(manifest, path)
        changed_parameters = {
            parameter.name: getattr(after, parameter.name)
            for parameter in fields(ComputeSpec)
            if getattr(before, parameter.name) != getattr(after, parameter.name)
        }
        if after.image != before.image:
            image = self._spec.image or ImageSpec()
            image_id = None if after.image is None else after.image.image_id
            changed_parameters["image"] = replace(image, image_id=image_id)
        if after.logging != before.logging:
            changed_parameters["logging"] = replace(self._spec.logging, level=after.logging.level)
        # The manifest includes the service template now.
        changes = {"service_template": None, **changed_parameters, "manifest": after.manifest}
        return replace(self._spec, **changes)

    def distribution(self, replicas: int) -> DistributionSpec | None:
        """The distribution of a call over this number of pods of the user's manifest."""
        before, path = self._spec.distribution, self._spec.pod_template_path
        if self._spec.manifest is None:
            return before
        kind = WorkloadManifest.parse(thaw(self._spec.manifest), path).kind
        if before != parameters.distribution_of(kind, self._spec.replicas):
            return before  # the user's own
        return parameters.distribution_of(kind, replicas)

    @staticmethod
    def user_labels(labels: Mapping[str, str]) -> dict[str, str]:
        """The labels that are not Kubetorch's own."""
        return {key: text for key, text in labels.items() if metadata.is_user_label(key)}

    @staticmethod
    def user_annotations(annotations: Mapping[str, str]) -> dict[str, str]:
        """The annotations that are not Kubetorch's own."""
        return {key: text for key, text in annotations.items() if metadata.is_user_annotation(key)}


def _chart_equipment() -> Equipment:
    """The additions of the chart; the default image stands for the image of the installation."""
    runtime = Runtime(
        image=f"ghcr.io/kubetorch/kubetorch:{__version__}",
        default_image=DEFAULT_IMAGE,
        controller_url=routes.controller_url(config.install_namespace),
        pull_policy="IfNotPresent",
    )
    return Equipment(runtime)


def check(spec: ComputeSpec) -> None:
    """Refuse a spec from which no manifest can be made."""
    if spec.gpu_type is not None:
        label = scheduling.gpu_node_label(spec.gpu_type)
        key = scheduling.GPU_PRODUCT_LABEL if label is None else label[0]
        values = scheduling.gpu_products(spec.gpu_type) if label is None else [label[1]]
        selected_value = dict(spec.node_selector).get(key, values[0])
        if selected_value not in values:
            raise SpecError(
                f"gpu_type asks for nodes with {key}: {values[0]}, node_selector for "
                f"{key}: {selected_value}",
                hint="leave one parameter out",
            )
    if not spec.is_selector_only:
        manifest = rendering.render(spec, namespace="default", name="checked")
        check_containers(WorkloadManifest.parse(manifest, spec.pod_template_path))


# ------------------------------------------------------------------------ a user's own manifest


def is_on_this_machine(manifest: object) -> bool:
    """True if a manifest is no file, or a file of this machine."""
    if not isinstance(manifest, (str, PathLike)):
        return True
    return os.path.isfile(Path(manifest).expanduser())  # noqa: PTH113  # may be in a closed folder


def load(manifest: object) -> Mapping[str, Any]:
    """The manifest that a user gave: a dictionary, or the path of a YAML file with one object."""
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
        _check_aliases(path, yaml.compose_all(text, Loader=yaml.SafeLoader))
        return [document for document in yaml.safe_load_all(text) if document is not None]
    except SpecError:
        raise
    except RecursionError as error:
        raise _too_deep(path) from error
    except (yaml.YAMLError, ValueError) as error:
        raise SpecError(f"manifest is {str(path)!r}, which is no valid YAML: {error}") from error


def _check_aliases(path: Path, documents: Iterable[Any]) -> None:
    """Refuse a file whose aliases stand for more values than a manifest can have."""
    sizes: dict[int, int] = {}

    def size(node: Any, depth: int = 0) -> int:  # noqa: ANN401  # a node of YAML
        if depth > MOST_LEVELS:
            raise _too_deep(path)
        if id(node) in sizes:
            return sizes[id(node)]
        sizes[id(node)] = MOST_VALUES + 1  # until it is known: a node may contain itself
        pairs = node.value if isinstance(node.value, list) else ()
        children = (
            child for pair in pairs for child in (pair if isinstance(pair, tuple) else (pair,))
        )
        sizes[id(node)] = 1 + sum(size(child, depth + 1) for child in children)
        return sizes[id(node)]

    for document in documents:
        sizes.clear()  # the nodes of the document before are gone
        if document is None or size(document) <= MOST_VALUES:
            continue
        raise SpecError(
            f"manifest is {str(path)!r}, whose aliases stand for more than {MOST_VALUES:,} values",
            hint="write the values out, or leave the anchors of YAML out",
        )


def _too_deep(path: Path) -> SpecError:
    return SpecError(
        f"manifest is {str(path)!r}, which is nested more than {MOST_LEVELS} levels deep"
    )


def _only_object(path: Path, documents: list[object]) -> Mapping[str, Any]:
    if len(documents) != 1 or not isinstance(documents[0], Mapping):
        contents = [
            str(document.get("kind")) if isinstance(document, Mapping) else "no object"
            for document in documents
        ]
        content = f"{len(documents)} documents ({', '.join(contents)})"
        if len(documents) < 2:
            content = "no object"
        raise SpecError(
            f"manifest is {str(path)!r}, which has {content}; a compute has one object",
            hint="give the object whose pods are called as a dictionary, or in a file of its own",
        )
    return documents[0]


def read(
    manifest: Mapping[str, Any], pod_template_path: str | Sequence[str | int] | None
) -> tuple[ComputeSpec, str | None]:
    """The spec that a manifest stands for, and its namespace.

    The additions of Kubetorch to a manifest that was applied, or shown, are left out.
    """
    path = None if pod_template_path is None else kinds.path(pod_template_path)
    manifest = thaw(freeze(manifest, parameter="manifest"))
    agent.strip(manifest, path)
    check_containers(WorkloadManifest.parse(manifest, path))
    spec = parameters.read_manifest(manifest, pod_template_path=pod_template_path)
    return spec, parameters.namespace_of(manifest)


def service_name(manifest: Mapping[str, Any], selector: Mapping[str, str] | None) -> str | None:
    """Name of the service: the name of the manifest, or of the training job that is selected."""
    name = parameters.name_of(manifest) or (selector or {}).get(_JOB_NAME) or None
    if name is None:
        return None
    if names.clean(name) != name or len(name) > names.SERVICE_CHARACTERS:
        raise SpecError(
            f"the manifest has the name {name!r}; that of a service has at most "
            f"{names.SERVICE_CHARACTERS} lower-case letters, digits and '-'",
            hint="change metadata.name, or leave it out",
        )
    return name
