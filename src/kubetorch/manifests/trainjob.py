"""TrainJob of Kubeflow Trainer: it has no pod template, but says how to change its runtime's.

What it can say of pods is read into a pod template, so that parameters are the same as everywhere,
and written back. https://www.kubeflow.org/docs/components/trainer/reference/

Trainer 2.0 takes `podSpecOverrides`; later versions take `podTemplateOverrides`, with a `spec` in
each. A manifest that has neither gets the former.
"""

from __future__ import annotations

from typing import Any

from kubetorch.errors import SpecError
from kubetorch.manifests.kinds import Manifest
from kubetorch.manifests.place import assign, entry, items, named

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

_OLD, _NEW = "podSpecOverrides", "podTemplateOverrides"
_OF_TRAINER = ("image", "command", "args", "env")
_OF_POD = ("serviceAccountName", "nodeSelector", "tolerations", "volumes", "initContainers")


def template(manifest: Manifest) -> Manifest:
    """What a TrainJob says of its pods, as a pod template.

    Raises:
        SpecError: The manifest is no TrainJob that could run.
    """
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
        assign(override, key, pod.get(key))
    if container.get("volumeMounts"):
        containers = items(override, "containers")
        changed = named(containers, NODE)
        if changed is None:
            containers.append({"name": NODE, "volumeMounts": container["volumeMounts"]})
        else:
            changed["volumeMounts"] = container["volumeMounts"]


def _override(spec: Manifest, *, is_made: bool = False) -> Manifest:
    """What changes the pods of the job `node`."""
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
