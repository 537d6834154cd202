"""TrainJob of Kubeflow Trainer: it has no pod template, but says how to change its runtime's.

What it can say of pods is read into a pod template, so that parameters are the same as everywhere,
and written back. https://www.kubeflow.org/docs/components/trainer/reference/

Trainer 2.0 takes `podSpecOverrides`; later versions take `podTemplateOverrides`, with a `spec` in
each. A manifest that has neither gets the former.
"""

from __future__ import annotations

import copy
from typing import Any

from kubetorch.errors import SpecError
from kubetorch.manifests import labels
from kubetorch.manifests.kinds import Manifest, assign, entry, items, named

#: Name of the job, and of its container, that Trainer's runtimes train in.
NODE = "node"
#: Fields of `ComputeSpec` that a TrainJob has no word for.
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

_OLD, _NEW = "podSpecOverrides", "podTemplateOverrides"
_OF_TRAINER = ("image", "command", "args", "env")
_OF_POD = ("serviceAccountName", "nodeSelector", "tolerations", "volumes", "initContainers")


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
    container |= {key: trainer[key] for key in _OF_TRAINER if key in trainer}
    assign(container, "resources", trainer.get("resourcesPerNode"))
    changed = named(override.get("containers") or [], NODE) or {}
    assign(container, "volumeMounts", changed.get("volumeMounts"))
    pod: Manifest = {key: override[key] for key in _OF_POD if key in override}
    metadata = {key: spec[key] for key in ("labels", "annotations") if key in spec}
    return {"metadata": metadata, "spec": pod | {"containers": [container]}}


def write(manifest: Manifest, template: Manifest) -> None:
    """Say in a TrainJob what the pod template says, as far as it can be said."""
    spec, pod = manifest["spec"], template["spec"]
    container = pod["containers"][0]
    trainer = entry(spec, "trainer")
    for key in _OF_TRAINER:
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
    for key in _OF_POD:
        value = pod.get(key)
        if key == "initContainers":
            # It changes those of its runtime, and has no images of its own: see `runtime`.
            value = [one for one in value or () if "image" not in one]
        assign(override, key, value)
    if container.get("volumeMounts"):
        containers = items(override, "containers")
        changed = named(containers, NODE)
        if changed is None:
            containers.append({"name": NODE, "volumeMounts": container["volumeMounts"]})
        else:
            changed["volumeMounts"] = container["volumeMounts"]


def base_of(manifest: Manifest) -> tuple[str, str]:
    """Kind and name of the runtime that a TrainJob refers to, or did before it had its own."""
    noted = (manifest["metadata"].get("annotations") or {}).get(labels.BASE_RUNTIME)
    if noted is not None:
        kind, _, name = noted.partition("/")
        return kind, name
    ref = manifest["spec"]["runtimeRef"]
    return str(ref.get("kind") or "ClusterTrainingRuntime"), str(ref["name"])


def runtime(manifest: Manifest, base: Manifest, initial: list[Manifest]) -> Manifest:
    """A runtime like the one that a TrainJob refers to, with what a TrainJob cannot say.

    That is further init containers, and labels and annotations of its pods.
    """
    metadata = manifest["metadata"]
    spec = copy.deepcopy(base["spec"])
    jobs = _jobs(spec)
    if named(jobs, NODE) is None:
        raise SpecError(
            f"the runtime {base['metadata']['name']!r} has no job {NODE!r}, so the TrainJob "
            f"{metadata['name']!r} would have no pods",
            hint=f"its jobs are {', '.join(one['name'] for one in jobs) or 'none'}",
        )
    pods = pod_template(spec)
    pods["spec"]["initContainers"] = [*initial, *(pods["spec"].get("initContainers") or ())]
    for key in ("labels", "annotations"):
        # Those of the job itself end at its JobSet, and do not reach its pods.
        entry(entry(pods, "metadata"), key).update(manifest["spec"].get(key) or {})
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
    """Have a TrainJob refer to the `runtime` that is made for it."""
    kind, name = base_of(manifest)
    entry(entry(manifest, "metadata"), "annotations")[labels.BASE_RUNTIME] = f"{kind}/{name}"
    own = {"apiGroup": GROUP, "kind": RUNTIME_KIND, "name": _own_name(manifest)}
    manifest["spec"]["runtimeRef"] = own


def refer_to_base(manifest: Manifest) -> None:
    """Have it refer to the runtime again that it referred to before."""
    kind, name = base_of(manifest)
    noted = (manifest["metadata"].get("annotations") or {}).pop(labels.BASE_RUNTIME, None)
    if noted is not None:
        manifest["spec"]["runtimeRef"] = {"apiGroup": GROUP, "kind": kind, "name": name}


def _own_name(manifest: Manifest) -> str:
    return f"{manifest['metadata']['name']}-kubetorch"


def pod_template(spec: Manifest) -> Manifest:
    node = named(_jobs(spec), NODE) or {}
    found: Manifest = node["template"]["spec"]["template"]
    return found


def _jobs(spec: Manifest) -> list[Any]:
    return spec.get("template", {}).get("spec", {}).get("replicatedJobs") or []


def _override(spec: Manifest, *, is_made: bool = False) -> Manifest:
    key = _NEW if _NEW in spec else _OLD
    target = {"name": NODE}
    for one in spec.get(key) or ():
        if one.get("targetJobs") == [target]:
            found: Manifest = entry(one, "spec") if key == _NEW else one
            return found
    if not is_made:
        return {}
    made: dict[str, Any] = {"targetJobs": [target]}
    items(spec, key).append(made)
    return entry(made, "spec") if key == _NEW else made
