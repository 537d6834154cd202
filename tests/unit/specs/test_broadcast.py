"""Which services answer with a list: what was asked for decides."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kubetorch.specs.autoscaling import AutoscalingSpec
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.distribution import DistributionSpec
from kubetorch.specs.endpoint import Endpoint
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.messages import called_together

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


POOL = ComputeSpec(selector=(("app", "workers"),))


@pytest.mark.parametrize(
    ("compute", "pool", "called"),
    [
        (POOL, (0, 2, 5), (0, 2, 5)),
        (POOL, (1,), None),
        (POOL, (), None),
        (replace(POOL, distribution=DistributionSpec()), (0, 1), None),
        (replace(POOL, endpoint=Endpoint(url="http://x")), (0, 1), None),
        (ComputeSpec(replicas=3), (), (0, 1, 2)),
        (ComputeSpec(), (), None),
    ],
)
def test_a_call_goes_to_the_pods_that_a_selector_found(compute, pool, called):
    spec = WorkloadSpec("ns", "f", CallableRef("fn", "f", "m", "f"), compute)
    assert called_together(spec, pool) == called
