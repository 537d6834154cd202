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

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from kubetorch.config.settings import DEFAULT_IMAGE
from kubetorch.errors import SpecError
from kubetorch.manifests import (
    agent_container,
    knative,
    labels,
    metadata,
    parameters,
    raycluster,
    replicas,
    scheduling,
    services,
    storage,
    trainjob,
)
from kubetorch.manifests.kinds import KINDS, Kind, Manifest, entry, named
from kubetorch.manifests.parameters import PARAMETERS
from kubetorch.manifests.workload_manifest import ManifestParameter, PodTemplate, WorkloadManifest
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec, thaw
from kubetorch.specs.distribution import DistributionSpec
from kubetorch.specs.logging import LoggingConfig
from kubetorch.specs.workload import WorkloadSpec


def merge_manifests(under: Mapping[str, Any], over: Mapping[str, Any]) -> Manifest:
    """`over` laid over `under`: dictionaries key by key, all else, lists too, replaced.

    Merging the same again changes nothing.
    """
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[key] = merge_manifests(below, value) if both else value  # type: ignore[arg-type]  # both are
    return merged


def keep_agent(template: PodTemplate, container: Manifest, volumes: list[Any]) -> None:
    """Keep what the agent needs, where a list that was laid over the pod's has replaced it.

    A list of containers replaces the pod's. The one in it that is the agent's, by its name or for
    want of any, is laid over the agent's container; where there is none, the agent's stays first.
    Volumes that are still mounted stay.
    """
    found: list[Manifest] = template.spec["containers"]
    if container not in found:
        name = container["name"]
        ours = named(found, name) or next((one for one in found if not one.get("name")), {})
        template.container = merge_manifests(container, ours)
        template.spec["containers"] = [
            template.container,
            *(one for one in found if one is not ours),
        ]
    storage.restore(template, volumes)


def fill_pod(template: PodTemplate, compute: ComputeSpec) -> None:
    """Say what the agent needs and the pods do not say yet; what they say stays."""
    metadata.fill_serialization(template, compute)
    agent_container.fill_rights(template)
    raycluster.fill(template)
    agent_container.fill_probes(template, compute)
    agent_container.fill_log_level(template, compute)
    storage.fill_shared_memory(template, compute)
    scheduling.tolerate_gpus(template)


def fingerprint(template: Manifest) -> str:
    """A digest of all that makes it necessary to replace pods."""
    text = json.dumps(template, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_DEPLOYMENT = KINDS["Deployment", "apps"]
_STATEFUL_SET = KINDS["StatefulSet", "apps"]
_CRON_JOB = KINDS["CronJob", "batch"]
# The level is said, since the default is that of the environment.
_DEFAULTS = ComputeSpec(logging=LoggingConfig(level="info"))


def of_workload(workload: WorkloadSpec, *, has_operator: bool = True) -> Manifest:
    """The object that a deploy applies, before `agent.equip`."""
    return render(
        workload.compute,
        namespace=workload.namespace,
        name=workload.name,
        callable=workload.callable,
        username=workload.username,
        has_operator=has_operator,
    )


def operated_kind(compute: ComputeSpec) -> Kind | None:
    """The kind that a declaration without a manifest becomes if there is an operator for it."""
    if compute.manifest is not None:
        return None
    if compute.autoscaling is not None:
        return knative.KIND
    is_ray = compute.distribution is not None and compute.distribution.distribution_type == "ray"
    return raycluster.KIND if is_ray else None


def render(
    compute: ComputeSpec,
    *,
    namespace: str,
    name: str | None = None,
    callable: CallableRef | None = None,
    username: str | None = None,
    default_image: str = DEFAULT_IMAGE,
    has_operator: bool = True,
) -> Manifest:
    """The object for a compute; what is known only at a deploy may be left out.

    It is a Deployment where `operated_kind` has no operator.

    A compute that only names pods that are there (`is_selector_only`) has no object; what is
    rendered for it are the pods that it would have.
    """
    is_autoscaled = compute.autoscaling is not None
    if not has_operator:
        # Ranks of Ray start it themselves: the first pod is the head.
        plain = None if compute.distribution is None else DistributionSpec()
        compute = replace(compute, replicas=compute.pods, autoscaling=None, distribution=plain)
    workload, known = _base(compute)
    manifest, kind = workload.object, workload.kind
    replicas.PARAMETERS[0].write(workload.primary, compute)
    changed = [one for one in PARAMETERS if _value(compute, one) != _value(known, one)]
    _check_sayable(kind, changed)
    for template in workload.templates:
        agent_container.start_agent(template, default_image=default_image)
        for parameter in changed:
            parameter.write(template, compute)
        if not kind.is_custom:  # who says where the pod template lies keeps the rest of it
            fill_pod(template, compute)
            agent_container.check_port(template)
        if callable is not None and callable.app is not None:
            agent_container.write_app(template, callable.app)
    _identify(manifest, kind, namespace, name)
    own = labels.of_object(
        name=name, callable=callable, username=username, template=_template_label(compute, kind)
    )
    _carry_selector(workload, compute)
    _label(workload.templates, own, selected=_selected(manifest))
    scheduling.queue_as_group(workload, compute)
    if kind == _DEPLOYMENT:
        # Pods of two templates would answer one call together. What is the default is said too: it
        # may have been the other one.
        several = replicas.read(workload) > 1
        strategy = "Recreate" if several else "RollingUpdate"
        manifest["spec"].setdefault("strategy", {"type": strategy})
    if kind == _STATEFUL_SET:
        _name_pods(manifest)
    if kind == _CRON_JOB:
        # Pods that serve do not end, so each run would add to those of all before it.
        manifest["spec"].setdefault("concurrencyPolicy", "Forbid")
    workload.write_templates()
    found = _overlaid(workload, compute)
    if is_autoscaled and not has_operator:
        # A call goes to one of its pods, as it would with the scaler.
        found["spec"]["strategy"] = {"type": "RollingUpdate"}
        # Tells it from the Deployment that the same service may have been before.
        found["metadata"]["labels"][labels.TEMPLATE] = knative.TEMPLATE_LABEL
    return found


def _value(compute: ComputeSpec, parameter: ManifestParameter) -> Any:  # noqa: ANN401  # fields differ
    return compute.pods if parameter.name == "replicas" else getattr(compute, parameter.name)


# ------------------------------------------------------------------------------------- the base


def _base(compute: ComputeSpec) -> tuple[WorkloadManifest, ComputeSpec]:
    """The object that is rendered into, and what it says already."""
    if compute.autoscaling is not None and compute.distribution is not None:
        raise SpecError(
            "autoscale() and distribute() exclude each other",
            hint="one spreads calls over pods, the other runs each call on all of them",
        )
    if compute.manifest is not None:
        workload = WorkloadManifest.parse(thaw(compute.manifest), compute.pod_template_path)
        _check_mode(compute, workload.kind)
        return workload, parameters.read_workload(workload)
    kind = operated_kind(compute)
    if kind == raycluster.KIND:
        return WorkloadManifest(raycluster.skeleton(), kind), _DEFAULTS
    kind = kind or _DEPLOYMENT
    pods = {"metadata": {}, "spec": {"containers": [{"name": kind.container}]}}
    skeleton: Manifest = {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {},
        "spec": {"replicas": 1, "selector": {}} if kind == _DEPLOYMENT else {},
    }
    skeleton["spec"]["template"] = pods
    return WorkloadManifest(skeleton, kind), _DEFAULTS


def _check_mode(compute: ComputeSpec, kind: Kind) -> None:
    if compute.autoscaling is not None and not kind.is_autoscaled:
        raise SpecError(
            f"autoscale() needs a Knative Service; the manifest is a {kind.kind}",
            hint="leave the manifest out, or use one of kind Service, serving.knative.dev/v1",
        )
    wanted = operated_kind(replace(compute, manifest=None))
    if wanted == raycluster.KIND and kind != wanted:
        raise SpecError(
            f'distribute("ray") needs a RayCluster; the manifest is a {kind.kind}',
            hint="leave the manifest out, or use one of kind RayCluster, ray.io/v1",
        )


def _check_sayable(kind: Kind, changed: Iterable[ManifestParameter]) -> None:
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
    if kind.has_selector and manifest["spec"].get("selector") in (None, {}, {"matchLabels": {}}):
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


#: Groups of labels that controllers of Kubernetes and of operators give to pods.
_OF_CONTROLLERS = ("kubernetes.io", "k8s.io", "kubeflow.org", "ray.io", "knative.dev")


def _carry_selector(workload: WorkloadManifest, compute: ComputeSpec) -> None:
    """Have pods carry the labels that the user selects them by: else their Service finds none."""
    wanted = [
        (name, text)
        for name, text in compute.selector or ()
        if name not in labels.RESERVED and not name.partition("/")[0].endswith(_OF_CONTROLLERS)
    ]
    if any(template.read_pods("labels").items() >= set(wanted) for template in workload.templates):
        return
    for template in workload.templates:
        for name, text in wanted:
            found = template.labels()[-1].setdefault(name, text)
            if found != text:
                raise SpecError(
                    f"selector asks for pods with {name}={text}, and those of the "
                    f"{workload.kind.kind} have {name}={found}",
                    hint="correct the selector, or the labels of the pods",
                )


def _label(templates: list[PodTemplate], own: dict[str, str], *, selected: frozenset[str]) -> None:
    of_object = (labels.MODULE, labels.TEMPLATE)
    of_pods = {key: text for key, text in own.items() if key not in of_object}
    for template in templates:
        found = template.labels()
        # A Pod is its own template.
        both = [own if found[0] is not found[-1] else of_pods, of_pods]
        for target, wanted in zip(found, both[-len(found) :], strict=True):
            for key, text in wanted.items():
                # `app` is a name that others use too.
                if key not in target or (key not in selected and key != labels.APP):
                    target[key] = text


# ------------------------------------------------------------------------------------ the overlay


def _overlaid(workload: WorkloadManifest, compute: ComputeSpec) -> Manifest:
    if compute.service_template is None:
        return workload.object
    merged = merge_manifests(workload.object, thaw(compute.service_template))
    changed = WorkloadManifest.parse(merged, compute.pod_template_path)
    if workload.kind.has_template:
        for old, new in zip(workload.templates, changed.templates, strict=False):
            keep_agent(new, old.container, old.spec.get("volumes") or [])
    return merged
