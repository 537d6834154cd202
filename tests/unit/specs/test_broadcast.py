"""Which services answer with a list: what was asked for decides."""

from __future__ import annotations

import json

import pytest

from kubetorch.specs.autoscaling import AutoscalingSpec
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.distribution import DistributionSpec

KNATIVE = json.dumps({"apiVersion": "serving.knative.dev/v1", "kind": "Service"})
DEPLOYMENT = json.dumps({"apiVersion": "apps/v1", "kind": "Deployment"})


@pytest.mark.parametrize(
    ("compute", "pods"),
    [
        (ComputeSpec(), None),
        (ComputeSpec(replicas=1), None),
        (ComputeSpec(replicas=3), 3),
        (ComputeSpec(replicas=3, manifest=DEPLOYMENT), 3),
        (ComputeSpec(replicas=3, manifest=KNATIVE), None),
        (ComputeSpec(replicas=3, autoscaling=AutoscalingSpec()), None),
        (ComputeSpec(replicas=3, distribution=DistributionSpec("ray")), None),
        (ComputeSpec(distribution=DistributionSpec("monarch", workers=4)), None),
        (ComputeSpec(distribution=DistributionSpec("spmd", workers=4)), None),
        (ComputeSpec(distribution=DistributionSpec("pytorch", workers=1)), None),
        (ComputeSpec(replicas=2, selector=(("app", "mine"),)), None),
    ],
)
def test_the_number_of_pods_that_each_call_goes_to(compute: ComputeSpec, pods: int | None) -> None:
    assert compute.broadcast == pods
