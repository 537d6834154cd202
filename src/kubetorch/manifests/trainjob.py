"""TrainJob of Kubeflow Trainer: it has no pod template, but changes that of its TrainingRuntime.

Its fields for pods are read into a pod template, so that parameters are the same as for other
kinds, and written back. https://www.kubeflow.org/docs/components/trainer/reference/

Trainer 2.0 takes `podSpecOverrides`; later versions take `podTemplateOverrides`, with a `spec` in
each. A manifest that has neither gets the former.
"""

from __future__ import annotations

import copy
from typing import Any

from kubetorch.errors import SpecError
from kubetorch.manifests import labels
from kubetorch.manifests.kinds import Manifest, assign, dictionary_at, list_at, named

#: Name of the job in Trainer's runtimes that trains, and of its container.
NODE = "node"
#: Fields of `ComputeSpec` that a TrainJob has no field for.
UNSAYABLE = (
    "gpu_anti_affinity",
    "image_pull_policy",
    "priority_class_name",
    "queue",
    "server_port",
    "working_dir",
)

GROUP = "trainer.kubeflow.org"
#: Kind of the runtimes of one namespace.
RUNTIME_KIND = "TrainingRuntime"

_SPEC_OVERRIDES, _TEMPLATE_OVERRIDES = "podSpecOverrides", "podTemplateOverrides"
_TRAINER_FIELDS = ("image", "command", "args", "env")
_POD_FIELDS = ("serviceAccountName", "nodeSelector", "tolerations", "volumes", "initContainers")


def template(manifest: Manifest) -> Manifest:
    spec = manifest.get("spec")
    if not isinstance(spec, dict) or not spec.get("runtimeRef"):
        raise SpecError(
            "the TrainJob has no spec.runtimeRef, so there are no pods",
            hint='runtimeRef: {name: "torch-distributed"}',
        )
    trainer = spec.get("trainer") or {}
    override = _override(spec)
    container: Manifest = {"name": NODE}
    container |= {key: trainer[key] for key in _TRAINER_FIELDS if key in trainer}
    assign(container, "resources", trainer.get("resourcesPerNode"))
    container_override = named(override.get("containers") or [], NODE) or {}
    assign(container, "volumeMounts", container_override.get("volumeMounts"))
    pod: Manifest = {key: override[key] for key in _POD_FIELDS if key in override}
    metadata = {key: spec[key] for key in ("labels", "annotations") if key in spec}
    return {"metadata": metadata, "spec": pod | {"containers": [container]}}


def write(manifest: Manifest, template: Manifest) -> None:
    """Write a pod template's fields into a TrainJob, as far as it has fields for them."""
    spec, pod = manifest["spec"], template["spec"]
    container = pod["containers"][0]
    trainer = dictionary_at(spec, "trainer")
    for key in _TRAINER_FIELDS:
        assign(trainer, key, container.get(key))
    assign(trainer, "resourcesPerNode", container.get("resources"))
    if container.get("envFrom"):
        raise SpecError(
            "a TrainJob cannot take all variables of a secret",
            hint="name its keys, or put the secret into the TrainJob's runtime",
        )
    for key in ("labels", "annotations"):
        assign(spec, key, template.get("metadata", {}).get(key))
    override = _override(spec, is_made=True)
    for key in _POD_FIELDS:
        value = pod.get(key)
        if key == "initContainers":
            # A TrainJob can only change its runtime's init containers: those with an image are
            # added to the runtime, see `runtime`.
            value = [
                init_container for init_container in value or () if "image" not in init_container
            ]
        assign(override, key, value)
    mounts = container.get("volumeMounts")
    container_override = named(override.get("containers") or [], NODE)
    if container_override is not None:
        assign(container_override, "volumeMounts", mounts)
    elif mounts:
        list_at(override, "containers").append({"name": NODE, "volumeMounts": mounts})


def base_of(manifest: Manifest) -> tuple[str, str]:
    """Kind and name of the runtime that the user's TrainJob refers to."""
    noted = (manifest["metadata"].get("annotations") or {}).get(labels.BASE_RUNTIME)
    if noted is not None:
        kind, _, name = noted.partition("/")
        return kind, name
    ref = manifest["spec"]["runtimeRef"]
    return str(ref.get("kind") or "ClusterTrainingRuntime"), str(ref["name"])


def runtime(manifest: Manifest, base: Manifest, first_init_containers: list[Manifest]) -> Manifest:
    """A copy of a TrainJob's runtime with fields that a TrainJob lacks.

    These are further init containers, and labels and annotations of its pods.
    """
    metadata = manifest["metadata"]
    spec = copy.deepcopy(base["spec"])
    jobs = _jobs(spec)
    if named(jobs, NODE) is None:
        raise SpecError(
            f"the runtime {base['metadata']['name']!r} has no job {NODE!r}, so the TrainJob "
            f"{metadata['name']!r} would have no pods",
            hint=f"its jobs are {', '.join(job['name'] for job in jobs) or 'none'}",
        )
    pods = pod_template(spec)
    pods["spec"]["initContainers"] = [
        *first_init_containers,
        *(pods["spec"].get("initContainers") or ()),
    ]
    for key in ("labels", "annotations"):
        # The job's own labels and annotations end at its JobSet, and do not reach its pods.
        dictionary_at(dictionary_at(pods, "metadata"), key).update(manifest["spec"].get(key) or {})
    return {
        "apiVersion": base["apiVersion"],
        "kind": RUNTIME_KIND,
        "metadata": {
            "name": _own_name(manifest),
            "namespace": metadata["namespace"],
            "labels": {**(base["metadata"].get("labels") or {}), **(metadata.get("labels") or {})},
        },
        "spec": spec,
    }


def refer_to_own(manifest: Manifest) -> None:
    """Have a TrainJob refer to its own `runtime`, and note the one that it referred to."""
    kind, name = base_of(manifest)
    dictionary_at(dictionary_at(manifest, "metadata"), "annotations")[labels.BASE_RUNTIME] = (
        f"{kind}/{name}"
    )
    runtime_ref = {"apiGroup": GROUP, "kind": RUNTIME_KIND, "name": _own_name(manifest)}
    manifest["spec"]["runtimeRef"] = runtime_ref


def refer_to_base(manifest: Manifest) -> None:
    """Undo `refer_to_own`."""
    kind, name = base_of(manifest)
    noted = (manifest["metadata"].get("annotations") or {}).pop(labels.BASE_RUNTIME, None)
    if noted is not None:
        manifest["spec"]["runtimeRef"] = {"apiGroup": GROUP, "kind": kind, "name": name}


def _own_name(manifest: Manifest) -> str:
    return f"{manifest['metadata']['name']}-kubetorch"


def pod_template(spec: Manifest) -> Manifest:
    node = named(_jobs(spec), NODE) or {}
    node_template: Manifest = node["template"]["spec"]["template"]
    return node_template


def _jobs(spec: Manifest) -> list[Any]:
    return spec.get("template", {}).get("spec", {}).get("replicatedJobs") or []


def _override(spec: Manifest, *, is_made: bool = False) -> Manifest:
    key = _TEMPLATE_OVERRIDES if _TEMPLATE_OVERRIDES in spec else _SPEC_OVERRIDES
    target = {"name": NODE}
    for override in spec.get(key) or ():
        if override.get("targetJobs") == [target]:
            override_spec: Manifest = (
                dictionary_at(override, "spec") if key == _TEMPLATE_OVERRIDES else override
            )
            return override_spec
    if not is_made:
        return {}
    new_override: dict[str, Any] = {"targetJobs": [target]}
    list_at(spec, key).append(new_override)
    return dictionary_at(new_override, "spec") if key == _TEMPLATE_OVERRIDES else new_override
