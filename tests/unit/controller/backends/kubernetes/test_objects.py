"""What is expected of a workload that was applied."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kubetorch.controller.backends.kubernetes.objects import AppliedWorkload
from kubetorch.manifests import parameters
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.distribution import DistributionSpec
from kubetorch.specs.endpoint import Endpoint
from kubetorch.specs.workload import WorkloadSpec
from unit.manifests.users import manifests


def workload(**compute: Any) -> AppliedWorkload:
    return workload_of(ComputeSpec(**compute))


def workload_of(compute: ComputeSpec) -> AppliedWorkload:
    ref = CallableRef("fn", "web", "train", "train")
    return AppliedWorkload.of(WorkloadSpec("team", "web", ref, compute=compute))


def shown_object(applied: AppliedWorkload, *, generation: int, replicas: int) -> dict[str, Any]:
    """Its object, as a watch showed it."""
    assert applied.main is not None
    spec = {**applied.main["spec"], "replicas": replicas}
    metadata = {**applied.main["metadata"], "generation": generation}
    return {**applied.main, "metadata": metadata, "spec": spec}


def test_what_was_applied_counts_until_the_watch_has_shown_it() -> None:
    applied = workload(replicas=2)
    applied.note_applied({"metadata": {"generation": 5}})
    assert applied.expected([]) == 2
    assert applied.expected([shown_object(applied, generation=4, replicas=1)]) == 2
    assert applied.expected([shown_object(applied, generation=5, replicas=2)]) == 2


def test_then_what_somebody_else_made_of_it_does() -> None:
    applied = workload(replicas=2)
    applied.note_applied({"metadata": {"generation": 5}})
    assert applied.expected([shown_object(applied, generation=6, replicas=1)]) == 1


def test_of_pods_that_somebody_else_made_one_is_expected() -> None:
    assert workload(selector=(("app", "web"),)).expected([]) == 1


def test_of_a_distributed_selector_as_many_are_expected_as_it_names() -> None:
    pool = workload(selector=(("app", "web"),), distribution=DistributionSpec(workers=3))
    assert pool.expected([]) == 3


@pytest.mark.parametrize(
    ("framework", "endpoint", "is_any"),
    [
        (None, None, False),
        ("spmd", None, True),
        ("ray", None, False),
        ("spmd", Endpoint(selector={"role": "head"}), False),
    ],
)
def test_ranks_are_called_by_any_of_their_pods_as_the_master_may_be_lost(
    framework: str | None, endpoint: Endpoint | None, is_any: bool
) -> None:
    kind = "RayCluster" if framework == "ray" else "PyTorchJob"
    settings: dict[str, Any] = {"distribution": None}
    if framework is not None:
        settings["distribution"] = DistributionSpec(framework, workers=3)
    compute = parameters.read_manifest(manifests()[kind])
    applied = workload_of(replace(compute, replicas=1, endpoint=endpoint, **settings))
    assert (not applied.called_labels) == is_any
