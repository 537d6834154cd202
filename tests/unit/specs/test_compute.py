"""What a compute is as a value: it compares, hashes, pickles, travels, and its repr rebuilds it."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
from hypothesis import given

import kubetorch.specs.autoscaling
import kubetorch.specs.compute
import kubetorch.specs.distribution
import kubetorch.specs.endpoint
import kubetorch.specs.image
import kubetorch.specs.logging
import kubetorch.specs.secret
import kubetorch.specs.volume
from kubetorch.errors import ProtocolError
from kubetorch.specs.autoscaling import AutoscalingSpec
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.distribution import DistributionSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import messages
from unit.specs.strategies import COMPUTES, SETTINGS

NAMES = {
    name: value
    for module in (
        kubetorch.specs.autoscaling,
        kubetorch.specs.compute,
        kubetorch.specs.distribution,
        kubetorch.specs.endpoint,
        kubetorch.specs.image,
        kubetorch.specs.logging,
        kubetorch.specs.secret,
        kubetorch.specs.volume,
    )
    for name, value in vars(module).items()
    if isinstance(value, type)
}


@given(COMPUTES)
def test_a_copy_is_equal_and_has_the_same_hash(compute: ComputeSpec) -> None:
    copy = pickle.loads(pickle.dumps(compute))
    assert copy == compute
    assert hash(copy) == hash(compute)


@given(COMPUTES)
def test_its_repr_rebuilds_it(compute: ComputeSpec) -> None:
    assert eval(repr(compute), dict(NAMES)) == compute


@given(COMPUTES)
def test_it_travels_in_a_workload(compute: ComputeSpec) -> None:
    workload = WorkloadSpec("ns", "name", CallableRef("fn", "f", "m", "f"), compute)
    assert messages.decode(WorkloadSpec, messages.encode(workload)) == workload


def test_the_strategies_know_every_field() -> None:
    special = {
        "selector",
        "endpoint",
        "service_template",
        "manifest",
        "pod_template_path",
        "autoscaling",
        "distribution",
    }
    assert {item.name for item in dataclasses.fields(ComputeSpec)} == {*SETTINGS, *special}


def test_a_step_that_nobody_knows_is_no_message() -> None:
    with pytest.raises(ProtocolError, match="no step of an image"):
        messages.decode(kubetorch.specs.image.ImageSpec, b'{"steps": [{"command_line": "x"}]}')


def test_a_selector_without_resources_asks_for_no_pods() -> None:
    selector = (("app", "workers"),)
    assert ComputeSpec(selector=selector).is_selector_only
    assert not ComputeSpec(selector=selector, cpus="1").is_selector_only
    assert not ComputeSpec(selector=selector, manifest="{}").is_selector_only
    assert not ComputeSpec().is_selector_only


def test_workers_go_before_replicas() -> None:
    assert ComputeSpec(replicas=3).pods == 3
    assert ComputeSpec(replicas=3, distribution=DistributionSpec()).pods == 3
    assert ComputeSpec(replicas=3, distribution=DistributionSpec(workers=5)).pods == 5


def test_an_autoscaled_service_begins_with_its_fewest_pods() -> None:
    assert ComputeSpec(autoscaling=AutoscalingSpec()).pods == 1
    assert ComputeSpec(autoscaling=AutoscalingSpec(min_scale=0)).pods == 1
    assert ComputeSpec(autoscaling=AutoscalingSpec(min_scale=3)).pods == 3
    schedule = (("0 8 * * *", 4), ("0 20 * * *", 2))
    assert ComputeSpec(autoscaling=AutoscalingSpec(min_schedule=schedule)).pods == 2
