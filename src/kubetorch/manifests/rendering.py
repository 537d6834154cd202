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
from kubetorch.manifests.kinds import KINDS, Kind, Manifest, dictionary_at, named
from kubetorch.manifests.parameters import PARAMETERS
from kubetorch.manifests.tuning import TIMING
from kubetorch.manifests.workload_manifest import ManifestParameter, PodTemplate, WorkloadManifest
from kubetorch.specs.autoscaling import AutoscalingSpec
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
    """Keep the agent's container and volumes, where an overlay has replaced the pod's lists.

    A list of containers replaces the pod's. The container in it with the agent's name, or without
    a name, is laid over the agent's container; without such a container, the agent's stays first.
    Volumes that are still mounted stay.
    """
    containers: list[Manifest] = template.spec["containers"]
    if container not in containers:
        name = container["name"]
        agent_overlay = named(containers, name) or next(
            (candidate for candidate in containers if not candidate.get("name")), {}
        )
        template.container = merge_manifests(container, agent_overlay)
        template.spec["containers"] = [
            template.container,
            *(sibling for sibling in containers if sibling is not agent_overlay),
        ]
    storage.restore(template, volumes)


def fill_pod(template: PodTemplate, compute: ComputeSpec) -> None:
    """Add the fields that the agent needs; fields that the pods have stay."""
    metadata.fill_serialization(template, compute)
    agent_container.fill_rights(template)
    raycluster.keep_agent_command_and_ports(template)
    agent_container.fill_probes(template, compute)
    agent_container.fill_log_level(template, compute)
    storage.fill_shared_memory(template, compute)
    scheduling.tolerate_gpus(template)


def fingerprint(template: Manifest) -> str:
    """A digest of all fields whose change makes it necessary to replace pods."""
    text = json.dumps(template, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_DEPLOYMENT = KINDS["Deployment", "apps"]
_STATEFUL_SET = KINDS["StatefulSet", "apps"]
_CRON_JOB = KINDS["CronJob", "batch"]
# With a level: the default would be that of this process's environment.
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
    """The object for a compute; arguments that are known only at a deploy may be left out.

    The object is a Deployment where `operated_kind` has no operator. That of an autoscaled service
    says no number of pods, which its scaler decides, and its pods depend on no number of it.

    A compute that only selects existing pods (`is_selector_only`) has no object; the result for it
    has the pods that it would have.
    """
    is_autoscaled = compute.autoscaling is not None
    scaling = None if has_operator else compute.autoscaling
    if not has_operator:
        # Ranks of Ray start it themselves: the first pod is the head.
        plain = None if compute.distribution is None else DistributionSpec()
        pod_count = compute.pods if scaling is None else 1
        compute = replace(compute, replicas=pod_count, autoscaling=None, distribution=plain)
    workload, manifest_compute = _base(compute)
    manifest, kind = workload.object, workload.kind
    replicas.PARAMETERS[0].write(workload.primary, compute)
    changed = [
        manifest_parameter
        for manifest_parameter in PARAMETERS
        if _value(compute, manifest_parameter) != _value(manifest_compute, manifest_parameter)
    ]
    _check_sayable(kind, changed)
    for template in workload.templates:
        agent_container.start_agent(template, default_image=default_image)
        for parameter in changed:
            parameter.write(template, compute)
        if not kind.is_custom:  # a user who gives the path of the pod template keeps its fields
            fill_pod(template, compute)
            agent_container.check_port(template)
        if callable is not None and callable.app is not None:
            agent_container.write_app(template, callable.app)
        if callable is not None and compute.autoscaling is not None:
            knative.admit_batches(template, callable)
    _identify(manifest, kind, namespace, name)
    workload_labels = labels.of_object(
        name=name, callable=callable, username=username, template=_template_label(compute, kind)
    )
    _carry_selector(workload, compute)
    _label(workload.templates, workload_labels, selected=_selected(manifest))
    scheduling.queue_as_group(workload, compute)
    _fill_object(workload)
    if scaling is not None:
        _leave_to_scaler(workload, scaling)
    workload.write_templates()
    rendered = _overlaid(workload, compute)
    if is_autoscaled and "replicas" in rendered["spec"]:
        raise SpecError(
            f"service_template has spec.replicas = {rendered['spec']['replicas']!r}, and the "
            "number of pods of an autoscaled service follows its load",
            hint="leave it out; .autoscale(min_scale=..., max_scale=...) bounds the number",
        )
    return rendered


def _fill_object(workload: WorkloadManifest) -> None:
    """Fill in how the kind replaces and names its pods, where the user's object does not say."""
    manifest = workload.object
    if workload.kind == _DEPLOYMENT:
        # Pods of two templates would answer one call together. The default is written too: an
        # earlier deploy may have set the other strategy.
        several = replicas.read(workload) > 1
        strategy = "Recreate" if several else "RollingUpdate"
        manifest["spec"].setdefault("strategy", {"type": strategy})
    if workload.kind == _STATEFUL_SET:
        _name_pods(manifest)
    if workload.kind == _CRON_JOB:
        # Pods that serve do not end, so each run would add to those of all before it.
        manifest["spec"].setdefault("concurrencyPolicy", "Forbid")


def _leave_to_scaler(workload: WorkloadManifest, scaling: AutoscalingSpec) -> None:
    """Let the scaler of Kubetorch decide on the number of pods of a Deployment."""
    # Another deploy does not change the number: it would end pods that work. An update replaces pod
    # by pod, as of a single one: a call goes to one of the pods, so two templates may mix.
    del workload.object["spec"]["replicas"]
    # Distinguishes it from the Deployment that the same service may have been before.
    workload.object["metadata"]["labels"][labels.TEMPLATE] = knative.TEMPLATE_LABEL
    annotations = knative.extra_annotations(scaling)
    if annotations:
        workload.primary.annotations_of_object().update(annotations)
    # A pod that leaves takes no new calls, and finishes those that run.
    grace_seconds = TIMING.scaled_pod_grace_seconds
    workload.primary.spec.setdefault("terminationGracePeriodSeconds", grace_seconds)


def _value(compute: ComputeSpec, parameter: ManifestParameter) -> Any:  # noqa: ANN401  # fields differ
    return compute.pods if parameter.name == "replicas" else getattr(compute, parameter.name)


# ------------------------------------------------------------------------------------- the base


def _base(compute: ComputeSpec) -> tuple[WorkloadManifest, ComputeSpec]:
    """The object to render into, and the compute that the object has already."""
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
    needed_kind = operated_kind(replace(compute, manifest=None))
    if needed_kind == raycluster.KIND and kind != needed_kind:
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
    metadata = dictionary_at(manifest, "metadata")
    manifest["metadata"] = {"name": metadata.get("name") or name, "namespace": namespace} | {
        key: value for key, value in metadata.items() if key not in ("name", "namespace")
    }
    if kind.has_selector and manifest["spec"].get("selector") in (None, {}, {"matchLabels": {}}):
        chosen = {labels.SERVICE: name} if name else {}
        manifest["spec"]["selector"] = {"matchLabels": chosen}


def _name_pods(manifest: Manifest) -> None:
    """Have the pods of a StatefulSet start together, with the names of our headless Service.

    One call goes to all pods. A pod that waits for the others would wait for ever if pods started
    one after another.
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
    """Keys of the labels by which the object finds its pods: other values would orphan them."""
    selector = manifest.get("spec", {}).get("selector")
    if not isinstance(selector, dict):
        return frozenset()
    expressions = selector.get("matchExpressions") or ()
    return frozenset(
        [*(selector.get("matchLabels") or ()), *(expression["key"] for expression in expressions)]
    )


#: Groups of labels that controllers of Kubernetes and of operators give to pods.
_CONTROLLER_DOMAINS = ("kubernetes.io", "k8s.io", "kubeflow.org", "ray.io", "knative.dev")


def _carry_selector(workload: WorkloadManifest, compute: ComputeSpec) -> None:
    """Add the labels of the user's selector to the pods, or their Service would find none."""
    selector_labels = [
        (name, text)
        for name, text in compute.selector or ()
        if name not in labels.RESERVED and not name.partition("/")[0].endswith(_CONTROLLER_DOMAINS)
    ]
    if any(
        template.read_pods("labels").items() >= set(selector_labels)
        for template in workload.templates
    ):
        return
    for template in workload.templates:
        for name, text in selector_labels:
            pod_label = template.labels()[-1].setdefault(name, text)
            if pod_label != text:
                raise SpecError(
                    f"selector asks for pods with {name}={text}, and those of the "
                    f"{workload.kind.kind} have {name}={pod_label}",
                    hint="correct the selector, or the labels of the pods",
                )


def _label(
    templates: list[PodTemplate], workload_labels: dict[str, str], *, selected: frozenset[str]
) -> None:
    object_only = (labels.MODULE, labels.TEMPLATE)
    pod_labels = {key: text for key, text in workload_labels.items() if key not in object_only}
    for template in templates:
        label_dicts = template.labels()
        # A Pod is its own template.
        object_and_pod_labels = [
            workload_labels if label_dicts[0] is not label_dicts[-1] else pod_labels,
            pod_labels,
        ]
        for label_dict, new_labels in zip(
            label_dicts, object_and_pod_labels[-len(label_dicts) :], strict=True
        ):
            for key, text in new_labels.items():
                # `app` is a label that other projects use too.
                if key not in label_dict or (key not in selected and key != labels.APP):
                    label_dict[key] = text


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
