"""What a manifest means on a machine that is no cluster: what runs, what does not, and who says so.

The table of docs/kinds.md, as code. Warnings are said at a deploy: the service is something else
than its manifest says. Notes stand in `kt describe`: a part of the manifest has no meaning here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from kubetorch.config.settings import DEFAULT_IMAGE
from kubetorch.controller.backends.base import Manifest
from kubetorch.errors import SpecError
from kubetorch.manifests import deployment, kinds, locating
from kubetorch.manifests.deployment import Wanted
from kubetorch.manifests.gpus import RESOURCE
from kubetorch.manifests.place import Place
from kubetorch.specs.compute import ComputeSpec

#: Kinds that are here what they are in a cluster.
WHOLE = ("Deployment", "ReplicaSet", "StatefulSet", "Job", "Pod")
_CHOOSING = ("nodeSelector", "affinity", "priorityClassName")


def refuse(manifest: Manifest) -> None:
    """Refuse an object that cannot be run.

    Raises:
        SpecError: Its kind is not known here.
    """
    if kinds.find(manifest) is None:
        raise SpecError(
            f"the kind {manifest.get('kind')!r} of {manifest.get('apiVersion')!r} cannot be run on "
            "this machine, which has no operator for it",
            hint=f"a cluster can; {', '.join(WHOLE)} run here",
        )


def warnings(manifest: Manifest) -> tuple[str, ...]:
    """What is said at a deploy."""
    kind = kinds.find(manifest)
    if kind is None or (kind.kind in WHOLE and not kind.is_autoscaled):
        return ()
    count = deployment.read(manifest).replicas
    pods = "1 pod" if count == 1 else f"{count} pods"
    if kind.is_autoscaled:
        return (f"there is no Knative here, so it does not scale: it runs on {pods} (min_scale)",)
    if kind.kind == "RayCluster":
        return (f"there is no Ray operator here: its {pods} are plain ones, without Ray",)
    if kind.kind == "DaemonSet":
        return ("a DaemonSet has one pod here, since this machine is one node",)
    if kind.kind == "CronJob":
        return (f"a CronJob has no schedule here: its {pods} start now, and stay",)
    return (
        f"there is no operator of {kind.kind} here: its {pods} are plain ones, without the "
        "variables that join them (RANK, MASTER_ADDR, …)",
    )


def notes(compute: ComputeSpec, manifest: Manifest) -> tuple[str, ...]:
    """What stands in `kt describe`."""
    kind = kinds.find(manifest)
    if kind is None:
        return (f"a {manifest.get('kind')} cannot be run on this machine",)
    primary = locating.places(manifest, kind)[0]
    found = (*_resources(deployment.read(manifest)), *_pod(primary), *_endpoint(compute))
    return (*found, *warnings(manifest))


def _resources(wanted: Wanted) -> Iterator[str]:
    requests = [(name, amount) for name, amount in wanted.requests if name != RESOURCE]
    if requests:
        asked = ", ".join(f"{name} {amount}" for name, amount in requests)
        yield f"the requests ({asked}) reserve nothing on this machine"
    kept = (RESOURCE, "memory") if sys.platform == "linux" else (RESOURCE,)
    limits = [(name, amount) for name, amount in wanted.limits if name not in kept]
    if limits:
        allowed = ", ".join(f"{name} {amount}" for name, amount in limits)
        yield f"the limits ({allowed}) are not kept on this machine"
    if wanted.working_dir is not None:
        yield f"the working directory {wanted.working_dir} is a folder of each pod's own here"


def _endpoint(compute: ComputeSpec) -> Iterator[str]:
    endpoint = compute.endpoint
    if endpoint is not None and endpoint.selector is not None:
        labels = ", ".join(f"{name}={value}" for name, value in endpoint.selector.items())
        yield f"the endpoint's selector ({labels}) chooses nothing: calls go to any pod"


def _pod(place: Place) -> Iterator[str]:
    image = place.container.get("image")
    if image not in (None, DEFAULT_IMAGE):
        yield f"the image {image} is not run: pods have the packages of this machine's Python"
    others = [
        str(one.get("name"))
        for one in (*place.pod.get("initContainers", ()), *place.pod.get("containers", ()))
        if one is not place.container
    ]
    if others:
        yield f"the other containers ({', '.join(others)}) are not run"
    chosen = [
        key for key in ("nodeSelector", "affinity", "priorityClassName") if place.pod.get(key)
    ]
    if chosen:
        yield f"{', '.join(chosen)} choose nothing: there is one node, this machine"
