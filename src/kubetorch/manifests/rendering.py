"""Specs → the object that a deploy applies.

    a user's manifest, or the skeleton of a kind
      → as many pods as are asked for
      → in each pod template: what the compute says beyond the manifest, then what the agent needs
      → names, labels, selectors
      → `service_template` over it all

Nothing of it changes with the code of a workload, so a deploy of code alone leaves pods alone: the
tree, its digest, init args and the generation travel in messages; the module is a label of the
object, not of its pods.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kubetorch.config.settings import DEFAULT_IMAGE
from kubetorch.errors import SpecError
from kubetorch.manifests import (
    container,
    environment,
    knative,
    labels,
    locating,
    overlay,
    pod,
    raycluster,
    reading,
    replicas,
    services,
    trainjob,
)
from kubetorch.manifests.kinds import KINDS, Kind, Manifest
from kubetorch.manifests.parameter import Parameter
from kubetorch.manifests.parameters import PARAMETERS
from kubetorch.manifests.place import Place, entry
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.frozen import thaw
from kubetorch.specs.logging import LoggingConfig
from kubetorch.specs.workload import WorkloadSpec

_DEPLOYMENT = KINDS["Deployment", "apps"]
_STATEFUL_SET = KINDS["StatefulSet", "apps"]
_CRON_JOB = KINDS["CronJob", "batch"]
# The level is said, since the default is that of the environment.
_DEFAULTS = ComputeSpec(logging=LoggingConfig(level="info"))


def of_workload(workload: WorkloadSpec) -> Manifest:
    """The object that a deploy applies.

    Raises:
        SpecError: As for `render`.
    """
    return render(
        workload.compute,
        namespace=workload.namespace,
        name=workload.name,
        callable=workload.callable,
        username=workload.username,
    )


def render(
    compute: ComputeSpec,
    *,
    namespace: str,
    name: str | None = None,
    callable: CallableRef | None = None,
    username: str | None = None,
    default_image: str = DEFAULT_IMAGE,
) -> Manifest:
    """The object for a compute; what is known only at a deploy may be left out.

    A compute that only names pods that are there (`is_selector_only`) has no object; what is
    rendered for it are the pods that it would have.

    Args:
        compute: The compute.
        namespace: Namespace of the object.
        name: Name of the service.
        callable: What is deployed.
        username: Who deploys it.
        default_image: Image of pods where nobody names one.

    Raises:
        SpecError: The user's manifest is not what it has to be, or contradicts the compute.
    """
    manifest, kind, known = _base(compute)
    replicas.PARAMETERS[0].write(locating.places(manifest, kind)[0], compute)
    changed = [one for one in PARAMETERS if _value(compute, one) != _value(known, one)]
    _check_sayable(kind, changed)
    places = locating.places(manifest, kind)
    for place in places:
        container.start(place, default_image=default_image)
        for parameter in changed:
            parameter.write(place, compute)
        if not kind.is_custom:  # who says where the pod template lies keeps the rest of it
            pod.fill(place, compute)
        if callable is not None and callable.app is not None:
            environment.write_app(place, callable.app)
    _identify(manifest, kind, namespace, name)
    own = labels.of_object(
        name=name, callable=callable, username=username, template=_template_label(compute, kind)
    )
    _label(places, own, selected=_selected(manifest))
    if kind == _DEPLOYMENT:
        # Pods of two templates would answer one call together. What is the default is said too: it
        # may have been the other one.
        several = replicas.read(manifest, kind) > 1
        strategy = "Recreate" if several else "RollingUpdate"
        manifest["spec"].setdefault("strategy", {"type": strategy})
    if kind == _STATEFUL_SET:
        _name_pods(manifest)
    if kind == _CRON_JOB:
        # Pods that serve do not end, so each run would add to those of all before it.
        manifest["spec"].setdefault("concurrencyPolicy", "Forbid")
    if not kind.has_template:
        trainjob.write(manifest, places[0].template)
    return _overlaid(manifest, kind, compute)


def _value(compute: ComputeSpec, parameter: Parameter) -> Any:  # noqa: ANN401  # fields differ
    return compute.pods if parameter.name == "replicas" else getattr(compute, parameter.name)


# ------------------------------------------------------------------------------------- the base


def _base(compute: ComputeSpec) -> tuple[Manifest, Kind, ComputeSpec]:
    """What is rendered into, its kind, and what it says already."""
    if compute.autoscaling is not None and compute.distribution is not None:
        raise SpecError(
            "autoscale() and distribute() exclude each other",
            hint="one spreads calls over pods, the other runs each call on all of them",
        )
    is_ray = compute.distribution is not None and compute.distribution.distribution_type == "ray"
    if compute.manifest is not None:
        manifest = thaw(compute.manifest)
        kind = locating.kind_of(manifest, compute.pod_template_path)
        _check_mode(compute, kind, is_ray=is_ray)
        known = reading.compute(manifest, pod_template_path=compute.pod_template_path)
        return manifest, kind, known
    if compute.autoscaling is not None:
        return knative.skeleton(), knative.KIND, _DEFAULTS
    if is_ray:
        return raycluster.skeleton(), raycluster.KIND, _DEFAULTS
    return _skeleton(), _DEPLOYMENT, _DEFAULTS


def _skeleton() -> Manifest:
    return {
        "apiVersion": _DEPLOYMENT.api_version,
        "kind": _DEPLOYMENT.kind,
        "metadata": {},
        "spec": {
            "replicas": 1,
            "selector": {},
            "template": {"metadata": {}, "spec": {"containers": [{"name": _DEPLOYMENT.container}]}},
        },
    }


def _check_mode(compute: ComputeSpec, kind: Kind, *, is_ray: bool) -> None:
    if compute.autoscaling is not None and not kind.is_autoscaled:
        raise SpecError(
            f"autoscale() needs a Knative Service; the manifest is a {kind.kind}",
            hint="leave the manifest out, or use one of kind Service, serving.knative.dev/v1",
        )
    if is_ray and kind != raycluster.KIND:
        raise SpecError(
            f'distribute("ray") needs a RayCluster; the manifest is a {kind.kind}',
            hint="leave the manifest out, or use one of kind RayCluster, ray.io/v1",
        )


def _check_sayable(kind: Kind, changed: Iterable[Parameter]) -> None:
    if kind.has_template:
        return
    for parameter in changed:
        if parameter.name in trainjob.UNSAYABLE:
            raise SpecError(
                f"a TrainJob cannot say {parameter.name}",
                hint=f"put it into the TrainJob's runtime, at {parameter.target}",
            )


# ---------------------------------------------------------------------------- names and labels


def _identify(manifest: Manifest, kind: Kind, namespace: str, name: str | None) -> None:
    metadata = entry(manifest, "metadata")
    manifest["metadata"] = {"name": metadata.get("name") or name, "namespace": namespace} | {
        key: value for key, value in metadata.items() if key not in ("name", "namespace")
    }
    if kind.has_selector and not manifest["spec"].get("selector"):
        chosen = {labels.SERVICE: name} if name else {}
        manifest["spec"]["selector"] = {"matchLabels": chosen}


def _name_pods(manifest: Manifest) -> None:
    """Have the pods of a StatefulSet start together, with the names of our headless Service.

    One call goes to all of them, and one that waits for the others would wait for ever if they
    started one after another.
    """
    spec, name = manifest["spec"], manifest["metadata"]["name"]
    spec.setdefault("podManagementPolicy", "Parallel")
    if name:
        spec.setdefault("serviceName", services.headless_name(name))


def _template_label(compute: ComputeSpec, kind: Kind) -> str:
    """What `kubetorch.com/template` says."""
    if kind == knative.KIND:
        return knative.TEMPLATE_LABEL
    return raycluster.TEMPLATE_LABEL if kind == raycluster.KIND else kind.kind.lower()


def _selected(manifest: Manifest) -> frozenset[str]:
    """Labels by which the object finds its pods: another value would orphan them."""
    selector = manifest.get("spec", {}).get("selector")
    if not isinstance(selector, dict):
        return frozenset()
    expressions = selector.get("matchExpressions") or ()
    return frozenset([*(selector.get("matchLabels") or ()), *(one["key"] for one in expressions)])


def _label(places: list[Place], own: dict[str, str], *, selected: frozenset[str]) -> None:
    of_object = (labels.MODULE, labels.TEMPLATE)
    of_pods = {key: text for key, text in own.items() if key not in of_object}
    for place in places:
        found = place.labels()
        # A Pod is its own template.
        both = [own if found[0] is not found[-1] else of_pods, of_pods]
        for target, wanted in zip(found, both[-len(found) :], strict=True):
            for key, text in wanted.items():
                # `app` is a name that others use too.
                if key not in target or (key not in selected and key != labels.APP):
                    target[key] = text


# ------------------------------------------------------------------------------------ the overlay


def _overlaid(manifest: Manifest, kind: Kind, compute: ComputeSpec) -> Manifest:
    if compute.service_template is None:
        return manifest
    before = locating.places(manifest, kind)
    merged = overlay.merge(manifest, thaw(compute.service_template))
    if kind.has_template:
        locating.kind_of(merged, compute.pod_template_path)
        for old, new in zip(before, locating.places(merged, kind), strict=False):
            overlay.keep_agent(new, old.container, old.pod.get("volumes") or [])
    return merged
