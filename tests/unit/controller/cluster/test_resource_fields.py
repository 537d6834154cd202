"""Specs as fields of an object: nothing is lost on the way, and people can read it."""

from __future__ import annotations

import dataclasses
import json
import runpy
from inspect import isclass
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import kubetorch as kt
from kubetorch.controller.cluster import resource
from kubetorch.errors import ProtocolError
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.endpoint import Endpoint
from kubetorch.specs.image import CopyStep, EnvStep, ImageSpec, PipStep, RunStep
from kubetorch.specs.logging import LoggingConfig
from kubetorch.specs.workload import WorkloadSpec

EXAMPLE = Path(__file__).parents[4] / "examples/everything.py"
SPEC = WorkloadSpec("ns", "f", CallableRef("fn", "f", "m", "f"))


def through_a_server(value: object) -> object:
    """Keys are sorted there, and whole numbers lose their fraction."""
    text = json.dumps(value, sort_keys=True)
    return json.loads(
        text,
        parse_float=lambda number: int(float(number)) if number[-2:] == ".0" else float(number),
    )


def same(spec: WorkloadSpec) -> WorkloadSpec:
    return resource.load(WorkloadSpec, through_a_server(resource.dump(spec)))


def test_every_kind_of_compute_comes_back_as_it_was() -> None:
    before = kt.config.username
    example_values = runpy.run_path(str(EXAMPLE)).values()
    kt.config.username = before  # the example sets one
    computes = [
        value.to_spec()
        for value in example_values
        if hasattr(value, "to_spec") and not isclass(value)
    ]
    specs = [compute for compute in computes if isinstance(compute, ComputeSpec)]
    assert len(specs) > 10
    for compute in specs:
        spec = dataclasses.replace(SPEC, compute=compute)
        assert same(spec) == spec


def test_a_schedule_comes_back_as_it_was() -> None:
    compute = kt.Compute(cpus=1).autoscale(
        min_scale={"0 8 * * 1-5": 4, "0 20 * * *": 0},
        timezone="Europe/Berlin",
        panic_window_percentage=20.0,
    )
    spec = dataclasses.replace(SPEC, compute=compute.to_spec())
    assert same(spec) == spec
    fields = resource.dump(spec)
    assert fields["compute"]["autoscaling"]["minSchedule"] == [
        {"name": "0 20 * * *", "value": 0},
        {"name": "0 8 * * 1-5", "value": 4},
    ]


def test_steps_and_endpoints_come_back_as_they_were() -> None:
    image = ImageSpec(
        steps=(
            PipStep("torch>=2", force=True),
            EnvStep("A", "1"),
            RunStep("true"),
            CopyStep("/a", "b", is_folder=True, digest="0" * 64),
        ),
        entrypoint="bash",
        cmd=("-c", "true"),
    )
    compute = ComputeSpec(
        image=image,
        selector=(),
        env_vars=(("B", "2"), ("A", "1")),
        endpoint=Endpoint(selector={"app": "x"}),
        logging=LoggingConfig(grace_period=3.0),
    )
    spec = dataclasses.replace(SPEC, compute=compute)
    assert same(spec) == spec


def test_what_has_its_default_is_left_out() -> None:
    callable = {"kind": "fn", "name": "f", "module": "m", "qualname": "f"}
    assert resource.dump(SPEC) == {
        "namespace": "ns",
        "name": "f",
        "callable": callable,
    }


def test_words_are_those_of_kubernetes() -> None:
    compute = ComputeSpec(inactivity_ttl="5m", env_vars=(("A", "1"),))
    assert resource.dump(compute) == {
        "inactivityTtl": "5m",
        "envVars": [{"name": "A", "value": "1"}],
    }


@pytest.mark.parametrize("kind", [WorkloadSpec, ComputeSpec, ImageSpec, CallableRef])
def test_what_may_be_nothing_is_nothing_where_it_is_left_out(kind: type) -> None:
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if type(None) in get_args(hints[field.name]):
            assert resource.default_of(field) in (None, dataclasses.MISSING)


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        {"namespace": "ns"},
        {**resource.dump(SPEC), "compute": {"replicas": "two"}},
        {**resource.dump(SPEC), "compute": {"envVars": ["A=1"]}},
        {**resource.dump(SPEC), "compute": {"image": {"steps": [{"fly": "away"}]}}},
    ],
)
def test_what_is_no_spec_is_refused(wrong: object) -> None:
    with pytest.raises(ProtocolError):
        resource.load(WorkloadSpec, wrong)
