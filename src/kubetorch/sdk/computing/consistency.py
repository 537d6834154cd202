"""What parameters of `kt.Compute` say together: whether it is possible, and what follows of it."""

from __future__ import annotations

from dataclasses import replace

from kubetorch.errors import AutoScalingError, SpecError
from kubetorch.sdk.computing.field import ABSENT
from kubetorch.specs import autoscaling
from kubetorch.specs.compute import ComputeSpec

#: More than any cluster runs for one service.
_MOST_PODS = 10_000
#: What shapes pods that are still to be made: of no use for pods that are there.
_OF_NEW_PODS = (
    *("replicas", "volumes", "node_selector", "service_template", "tolerations", "secrets"),
    *("priority_class_name", "service_account_name", "image_pull_policy", "gpu_anti_affinity"),
    *("working_dir", "shared_memory_limit", "queue_name", "queue", "pod_labels"),
    *("autoscaling", "distribution"),
)


def settled(spec: ComputeSpec, before: ComputeSpec) -> ComputeSpec:
    """The spec, with what follows of a change: the deadline of a revision, of the launch timeout.

    Args:
        spec: The compute as it was changed.
        before: The compute as it was.
    """
    scaling = spec.autoscaling
    if scaling is None or spec.launch_timeout == before.launch_timeout:
        return spec
    if scaling.progress_deadline != autoscaling.progress_deadline(before.launch_timeout):
        return spec
    deadline = autoscaling.progress_deadline(spec.launch_timeout)
    return replace(spec, autoscaling=replace(scaling, progress_deadline=deadline))


def check(spec: ComputeSpec) -> None:
    """Refuse what cannot be.

    Raises:
        SpecError: Two parameters contradict each other, or have no manifest together.
    """
    _check_modes(spec)
    if spec.is_selector_only:
        _check_pool(spec)
    _check_numbers(spec)
    _check_nodes(spec)
    if spec.manifest or spec.service_template or spec.volumes or spec.secrets:
        # What else the manifest cannot be is said where it is made.
        from kubetorch.manifests import rendering  # noqa: PLC0415  # few declarations need it

        if not spec.is_selector_only:
            rendering.render(spec, namespace="default", name="checked")


def _check_modes(spec: ComputeSpec) -> None:
    if spec.autoscaling is not None and spec.distribution is not None:
        raise SpecError(
            "autoscale() and distribute() exclude each other",
            hint="one spreads calls over pods, the other runs each call on all of them",
        )
    if spec.autoscaling is not None and spec.replicas != 1 and spec.manifest is None:
        raise SpecError(
            f"replicas is {spec.replicas}, and autoscale() decides on the number of pods",
            hint=f"autoscale(min_scale={spec.replicas}) keeps so many, initial_scale= begins with "
            "them",
        )


def _check_pool(spec: ComputeSpec) -> None:
    useless = [name for name in _OF_NEW_PODS if getattr(spec, name) != ABSENT[name]]
    if useless:
        raise SpecError(
            f"selector names pods that are there, and {', '.join(useless)} is for pods that are "
            "still to be made",
            hint="leave it out, or say what new pods are to have, such as cpus=",
        )


def _check_numbers(spec: ComputeSpec) -> None:
    if spec.pods > _MOST_PODS:
        raise SpecError(f"replicas is {spec.pods}; at most {_MOST_PODS} are possible")
    distribution = spec.distribution
    if distribution is not None and (distribution.quorum_workers or 0) > spec.pods:
        raise SpecError(
            f"quorum_workers is {distribution.quorum_workers}, of {spec.pods} workers",
            hint=f"distribute(workers={distribution.quorum_workers}) asks for so many",
        )
    scaling = spec.autoscaling
    if scaling is not None and scaling.progress_deadline is not None:
        deadline = autoscaling.seconds(scaling.progress_deadline)
        if spec.manifest is None and deadline < spec.launch_timeout:
            raise AutoScalingError(
                f"progress_deadline is {scaling.progress_deadline!r}, shorter than launch_timeout, "
                f"which is {spec.launch_timeout} s",
                hint="raise progress_deadline or lower launch_timeout",
            )


def _check_nodes(spec: ComputeSpec) -> None:
    if spec.gpu_type is None or not spec.node_selector:
        return
    from kubetorch.manifests import gpus  # noqa: PLC0415  # few declarations need it

    key, value = gpus.node_label(spec.gpu_type)
    other = dict(spec.node_selector).get(key, value)
    if other != value:
        raise SpecError(
            f"gpu_type asks for nodes with {key}: {value}, node_selector for {key}: {other}",
            hint="leave one of them out",
        )
