"""Counts the pods that a manifest asks for, kind by kind."""

from __future__ import annotations

import copy
from typing import Any

from kubetorch.errors import SpecError
from kubetorch.manifests import kinds
from kubetorch.manifests.kinds import Group, Kind, Manifest, Path
from kubetorch.manifests.workload_manifest import ManifestParameter, PodTemplate, WorkloadManifest
from kubetorch.specs.compute import ComputeSpec

WORKER_GROUP = "worker-group"


_REPLICAS = "https://kubernetes.io/docs/concepts/workloads/"


def read(workload: WorkloadManifest) -> int:
    """Number of pods, those of workers among them."""
    manifest, kind = workload.object, workload.kind
    called = _number(manifest, kind.primary.replicas, kind.primary.default)
    factor = _number(manifest, kind.factor, 1)
    return called * factor + sum(_workers(manifest, group) for group in kind.workers)


def running(workload: WorkloadManifest) -> int:
    """Number of pods of the latest template that run at one time, once all have started.

    It is less than `read` where a Job needs fewer pods to complete, a rolling update leaves pods of
    a StatefulSet as they are (`partition`), or a RayCluster's group is limited.
    """
    wanted = read(workload)
    manifest, kind = workload.object, workload.kind
    paths = [] if kind.primary.replicas is None else [kind.primary.replicas]
    if paths and paths[0][-1] == "parallelism":
        parallelism = _number(manifest, paths[0], kind.primary.default)
        completions = _number(manifest, (*paths[0][:-1], "completions"), parallelism)
        return wanted // max(1, parallelism) * min(parallelism, completions)
    if kind.kind == "StatefulSet":
        partition = ("spec", "updateStrategy", "rollingUpdate", "partition")
        return max(0, wanted - _number(manifest, partition, 0))
    for group in kind.workers if kind.kind == "RayCluster" else ():
        for path in kinds.expand(manifest, group.replicas or ()):
            number = _number(manifest, path, group.default)
            wanted -= max(0, number - _number(manifest, (*path[:-1], "maxReplicas"), number))
    return wanted


def _workers(manifest: Manifest, group: Group) -> int:
    if group.replicas is None:
        return 0
    paths = kinds.expand(manifest, group.replicas)
    return sum(_number(manifest, path, group.default) for path in paths)


def _number(manifest: Manifest, path: Path | None, default: int) -> int:
    found = None if path is None else kinds.get(manifest, path)
    if found is None:
        return default
    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
        assert path is not None
        raise SpecError(f"{'.'.join(path)} is {found!r}; it must be a whole number, 0 or more")
    return found


def write(workload: WorkloadManifest, wanted: int) -> None:
    if wanted == read(workload):
        return
    manifest, kind = workload.object, workload.kind
    if kind.primary.replicas is None and not kind.workers:
        raise SpecError(
            f"replicas is {wanted}; the number of pods of a {kind.kind} is not chosen by its "
            "manifest",
            hint="leave it out, or use a Deployment",
        )
    numbered = [group for group in kind.workers if group.replicas is not None]
    if numbered:
        _write_workers(manifest, kind, numbered[0], wanted)
        workload.locate_templates()
        return
    factor = _number(manifest, kind.factor, 1)
    if not factor or wanted % factor:
        assert kind.factor is not None
        raise SpecError(
            f"replicas is {wanted}; the {kind.kind} has {factor} groups of equal size, at "
            f"{'.'.join(kind.factor)}",
            hint=f"choose a multiple of {factor}, or change the manifest",
        )
    assert kind.primary.replicas is not None
    _set_number(manifest, kind.primary.replicas, wanted // factor)


def none(workload: WorkloadManifest) -> Manifest:
    """The patch that leaves an object without pods; empty for kinds that cannot be so.

    An object that is suspended has no pods either, and its controller does not take it for ended.
    """
    kind = workload.kind
    changed: Manifest = {}
    if kind.kind == "RayCluster":
        kinds.put(changed, ("spec", "suspend"), True)
    elif kind.suspend is not None:
        kinds.put(changed, kind.suspend, True)
    elif (path := kind.factor or kind.primary.replicas) is not None:
        kinds.put(changed, path, 0)
    return changed


def _set_number(manifest: Manifest, path: Path, wanted: int) -> None:
    kinds.put(manifest, path, wanted)
    completions = (*path[:-1], "completions")
    if path[-1] == "parallelism" and kinds.get(manifest, completions) is not None:
        # All pods of the job are to run side by side, so as many end.
        kinds.put(manifest, completions, wanted)


def _write_workers(manifest: Manifest, kind: Kind, group: Group, wanted: int) -> None:
    """The pods that are called stay; the first group of workers has the rest."""
    assert group.replicas is not None
    where: Path = tuple("0" if key == "*" else key for key in group.replicas[:-1])
    called = _number(manifest, kind.primary.replicas, kind.primary.default)
    others = _workers(manifest, group) - _number(manifest, (*where, "replicas"), group.default)
    number = wanted - called - others
    if number < 0:
        raise SpecError(
            f"replicas is {wanted}; the {kind.kind} has {called + others} pods beside its first "
            "group of workers",
            hint=f"{called + others} or more",
        )
    if not kinds.get(manifest, (*where, "template")):
        kinds.put(manifest, where, _like_the_called(manifest, kind))
    workers: dict[str, Any] = kinds.get(manifest, where)
    workers["replicas"] = number
    if "maxReplicas" in workers:
        workers["maxReplicas"] = max(number, workers["maxReplicas"])
        workers["minReplicas"] = min(number, workers.get("minReplicas", 0))


def _like_the_called(manifest: Manifest, kind: Kind) -> Manifest:
    """A group of workers whose pods are as those that are called."""
    called = copy.deepcopy(kinds.get(manifest, kind.primary.template[:-1]))
    if kind.kind != "RayCluster":
        return {**called, "replicas": 0}
    return {
        "groupName": WORKER_GROUP,
        "minReplicas": 0,
        "maxReplicas": 0,
        "rayStartParams": {},
        "template": called["template"],
    }


def _write(template: PodTemplate, compute: ComputeSpec) -> None:
    if template.is_primary and not template.kind.is_autoscaled:
        write(template.workload, compute.pods)


PARAMETERS = (
    ManifestParameter(
        "replicas",
        "the number of pods of the kind, such as `spec.replicas`",
        lambda template: read(template.workload),
        _write,
        _REPLICAS,
    ),
)
