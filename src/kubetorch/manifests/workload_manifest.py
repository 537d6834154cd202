"""A manifest whose kind is known, and the pod templates in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kubetorch.errors import SpecError
from kubetorch.lib.frozen_values import FrozenValue
from kubetorch.manifests import kinds, labels, trainjob
from kubetorch.manifests.kinds import Kind, Manifest, Path, dictionary_at, named
from kubetorch.specs import quantity
from kubetorch.specs.compute import ComputeSpec


@dataclass(slots=True)
class PodTemplate:
    """One pod template of an object, and the container in it that the agent runs in.

    The parameters of a compute are written into it, and read from it.
    """

    workload: WorkloadManifest
    body: Manifest
    container: Manifest
    is_primary: bool = True

    @property
    def kind(self) -> Kind:
        return self.workload.kind

    @property
    def spec(self) -> Manifest:
        spec: Manifest = self.body["spec"]
        return spec

    def labels(self) -> list[dict[str, str]]:
        """The labels to write into: the object's, for the primary template; last the pods'."""
        return self._metadata("labels")

    def annotations(self) -> list[dict[str, str]]:
        """The dictionaries of annotations to write into, as `labels`."""
        return self._metadata("annotations")

    def _metadata(self, key: str) -> list[dict[str, str]]:
        owners = [self.workload.object, self.body] if self.is_primary else [self.body]
        return [dictionary_at(dictionary_at(owner, "metadata"), key) for owner in owners]

    def annotations_of_object(self) -> dict[str, str]:
        return dictionary_at(dictionary_at(self.workload.object, "metadata"), "annotations")

    def read_object(self, key: str) -> dict[str, str]:
        """The object's `labels` or `annotations`."""
        pairs: dict[str, str] = (self.workload.object.get("metadata") or {}).get(key) or {}
        return pairs

    def read_pods(self, key: str) -> dict[str, str]:
        """The `labels` or `annotations` of the pods."""
        pairs: dict[str, str] = (self.body.get("metadata") or {}).get(key) or {}
        return pairs


class WorkloadManifest:
    """An object of a known kind, and its pod templates: first that of the pods that are called.

    Groups of workers that the object does not have are left out.
    """

    def __init__(self, manifest: Manifest, kind: Kind) -> None:
        self.object = manifest
        self.kind = kind
        self.templates: list[PodTemplate] = []
        self.locate_templates()

    @classmethod
    def parse(cls, manifest: Manifest, path: Path | None = None) -> WorkloadManifest:
        """The object of a user, whose pod template is at `path` if its kind does not say.

        Raises:
            SpecError: The kind is not known, or there is no pod template.
        """
        return cls(manifest, _kind(manifest, path))

    @property
    def primary(self) -> PodTemplate:
        return self.templates[0]

    def locate_templates(self) -> None:
        """Find the templates in the object; again after a group of workers was added."""
        kind = self.kind
        if not kind.has_template:
            self.templates = [self._template(trainjob.template(self.object))]
            return
        self.templates = [self._template(kinds.get(self.object, kind.primary.template))]
        for group in kind.workers:
            for path in kinds.expand(self.object, group.template):
                body = kinds.get(self.object, path)
                if isinstance(body, Mapping) and kinds.get(body, ("spec", "containers")):
                    self.templates.append(self._template(body, is_primary=False))

    def _template(self, body: Any, *, is_primary: bool = True) -> PodTemplate:  # noqa: ANN401  # a node
        containers = body["spec"]["containers"]
        container = named(containers, self.kind.container) or containers[0]
        return PodTemplate(self, body, container, is_primary)

    def write_templates(self) -> None:
        """Write the templates back into a TrainJob, which has no pod template in it."""
        if not self.kind.has_template:
            trainjob.write(self.object, self.primary.body)


class ManifestParameter(FrozenValue):
    """One field of `ComputeSpec` in a manifest.

    Attributes:
        target: The place of the field: M is the object, PT its pod template, P the pod's spec, C
            the agent's container.
        source: The documentation that defines the target.
    """

    name: str
    target: str
    read: Callable[[PodTemplate], Any]
    write: Callable[[PodTemplate, ComputeSpec], None]
    source: str


_PATH_PARAMETER = "pod_template_path"


def _kind(manifest: Mapping[str, Any], path: Path | None) -> Kind:
    for key in ("apiVersion", "kind"):
        if not isinstance(manifest.get(key), str) or not manifest[key]:
            raise SpecError(
                f"the manifest has no {key!r}", hint="it must be a Kubernetes object, such as a Job"
            )
    if manifest["apiVersion"].partition("/")[0] == labels.PREFIX.rstrip("/"):
        raise SpecError(
            f"a {manifest['kind']} can be no service: Kubetorch makes it itself, of each service",
            hint="give the object whose pods are to be called, such as a Deployment",
        )
    if path is not None:
        row = kinds.custom(manifest, path)
    else:
        known_kind = kinds.find(manifest)
        if known_kind is None:
            raise _unknown(manifest)
        row = known_kind
        _check_unique(manifest, row)
    if row.has_template:
        _check_template(manifest, row)
    return row


def _unknown(manifest: Mapping[str, Any]) -> SpecError:
    namesakes = [
        "/".join(filter(None, (row.group, row.versions[0])))
        for row in kinds.KINDS.values()
        if row.kind == manifest["kind"]
    ]
    candidate_paths = [".".join(path) for path in _candidates(manifest) if path]
    hint = "nothing in it looks like a pod template (a `spec` with `containers`)"
    if candidate_paths:
        which = "it seems to be" if len(candidate_paths) == 1 else "it may be one of"
        hint = f"{which} " + ", ".join(f'{_PATH_PARAMETER}="{path}"' for path in candidate_paths)
    if namesakes:
        hint = f"did you mean apiVersion {' or '.join(namesakes)}? Else, {hint}"
    return SpecError(
        f"the kind {manifest['kind']!r} of {manifest['apiVersion']!r} is not known, so "
        f"{_PATH_PARAMETER} has to say where its pod template lies",
        hint=hint,
    )


def _check_unique(manifest: Mapping[str, Any], row: Kind) -> None:
    """Refuse a list of several pod templates where the row's path takes its first."""
    if "0" not in row.primary.template:
        return
    before = row.primary.template[: row.primary.template.index("0")]
    several = kinds.get(manifest, before, [])
    if len(several) > 1:
        rest = row.primary.template[len(before) + 1 :]
        paths = [".".join((*before, str(number), *rest)) for number in range(len(several))]
        raise SpecError(
            f"the {row.kind} has {len(several)} pod templates at {'.'.join(before)}, so "
            f"{_PATH_PARAMETER} has to say which one is called",
            hint=" or ".join(f'{_PATH_PARAMETER}="{path}"' for path in paths),
        )


def _check_template(manifest: Mapping[str, Any], row: Kind) -> None:
    template_path = row.primary.template
    template = kinds.get(manifest, template_path)
    shown = ".".join(template_path) or "its top"
    if not isinstance(template, Mapping) or not isinstance(template.get("spec"), Mapping):
        candidate_paths = [
            ".".join(path) for path in _candidates(manifest) if path != template_path
        ]
        hint = (
            f"a pod template has a `spec` with `containers`; {_PATH_PARAMETER} says where it lies"
        )
        if candidate_paths and not candidate_paths[0]:
            hint = f"its own spec has `containers`: put them, with a `spec`, below {shown}"
        elif candidate_paths:
            hint = f'there is one at {candidate_paths[0]}: {_PATH_PARAMETER}="{candidate_paths[0]}"'
        raise SpecError(f"the {row.kind} has no pod template at {shown}", hint=hint)
    containers = template["spec"].get("containers")
    if not isinstance(containers, list) or not containers:
        raise SpecError(
            f"the pod template of the {row.kind} at {shown} has no containers",
            hint=f"one, with an image, is enough: it may be named {row.container!r}",
        )
    if not all(isinstance(container, Mapping) for container in containers):
        shown_list = ".".join((*template_path, "spec", "containers"))
        raise SpecError(f"{shown_list} of the {row.kind} is no list of dictionaries")


def _candidates(manifest: Mapping[str, Any]) -> Iterator[Path]:
    """Paths of nodes that look like a pod template."""
    pending: list[tuple[Path, Any]] = [((), manifest)]
    while pending:
        path, node = pending.pop(0)
        if isinstance(node, Mapping):
            spec = node.get("spec")
            if isinstance(spec, Mapping) and isinstance(spec.get("containers"), list):
                yield path
                continue
            pending += [((*path, str(key)), value) for key, value in node.items()]
        elif isinstance(node, list):
            pending += [((*path, str(number)), value) for number, value in enumerate(node)]


# ----------------------------------------------------------- containers that a cluster refuses

_AMOUNT_HINT = 'for example "512Mi", "2Gi" or "1G" of memory, "500m" or 2 of cpu'


def check_containers(workload: WorkloadManifest) -> None:
    """Refuse variables whose values are no text, and impossible amounts of resources."""
    for template in workload.templates:
        for section in ("initContainers", "containers"):
            for container in template.spec.get(section) or ():
                where = f"the container {container.get('name', '')!r}"
                _check_variables(container, where)
                _check_resources(container, where)


def _check_variables(container: Mapping[str, Any], where: str) -> None:
    for variable in container.get("env") or ():
        name, value = variable.get("name"), variable.get("value")
        if not isinstance(name, str) or not name:
            raise SpecError(f"{where} has a variable with the name {name!r}; it must be text")
        if value is not None and not isinstance(value, str):
            text = str(value).lower() if isinstance(value, bool) else str(value)
            raise SpecError(
                f"{where} has the variable {name!r} with the value {value!r}, which is no text",
                hint=f'write value: "{text}"; a cluster takes text alone',
            )
        if value and variable.get("valueFrom"):
            raise SpecError(
                f"{where} has the variable {name!r} with both value and valueFrom",
                hint="leave one of them out",
            )


def _check_resources(container: Mapping[str, Any], where: str) -> None:
    resources = container.get("resources") or {}
    limits, requests = (resources.get(section) or {} for section in ("limits", "requests"))
    for section, amounts in (("limits", limits), ("requests", requests)):
        for name, value in amounts.items():
            parsed = None if isinstance(value, bool) else quantity.parse(value)
            if parsed is None:
                raise SpecError(
                    f"{where} has resources.{section}.{name} {value!r}, which is not a Kubernetes "
                    "quantity",
                    hint=quantity.suggestion(str(value), _AMOUNT_HINT),
                )
    for name in requests.keys() & limits.keys():
        request, limit = quantity.parse(requests[name]), quantity.parse(limits[name])
        assert request is not None
        assert limit is not None
        if request > limit or ("/" in name and request != limit):
            relation = "other than" if "/" in name else "above"
            raise SpecError(
                f"{where} asks for {name} {requests[name]}, {relation} its limit {limits[name]}",
                hint=f"set resources.limits.{name} in the manifest or in service_template, or ask "
                "for as much",
            )
