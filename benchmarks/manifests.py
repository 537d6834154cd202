"""Rendering: one compute that says everything, and a thousand services with ten replicas."""

from __future__ import annotations

import copy
import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kubetorch as kt
from benchmarks.figures import Figure, Limit, Row
from benchmarks.programs import driving
from benchmarks.rounds import OURS, Measure, Side, compare
from kubetorch.manifests import rendering
from kubetorch.specs.compute import ComputeSpec

COPY = "copy.deepcopy"
TIMES = 50
SERVICES = 1000

_EXAMPLE = Path(__file__).parents[1] / "examples/everything.py"

FIGURES = (
    Figure("render a compute with everything", "one", "ms", {COPY: Limit(4.0)}, scale=1e3),
    Figure("render 1,000 services of 10 replicas", "many", "ms", {COPY: Limit(4.0)}, scale=1e3),
)


def run(rounds: int) -> list[Row]:
    """Measure."""
    return compare(FIGURES, [Side(OURS, "ours", _ours), Side(COPY, "floor", _copied)], rounds)


@contextmanager
def _ours() -> Iterator[Measure]:
    everything, service = _everything(), _service()
    yield lambda: {
        "one": driving.median(lambda: _render(everything, 0), TIMES),
        "many": driving.clock(lambda: _render_all(service)),
    }


@contextmanager
def _copied() -> Iterator[Measure]:
    """The least that making such dictionaries costs: copying them."""
    everything, service = _render(_everything(), 0), _render(_service(), 0)
    yield lambda: {
        "one": driving.median(lambda: copy.deepcopy(everything), TIMES),
        "many": driving.clock(lambda: [copy.deepcopy(service) for _ in range(SERVICES)]),
    }


def _everything() -> ComputeSpec:
    compute: kt.Compute = runpy.run_path(str(_EXAMPLE))["deployment"]
    return compute.to_spec()


def _service() -> ComputeSpec:
    return ComputeSpec(cpus="1", memory="2Gi", env_vars=(("STAGE", "test"),), replicas=10)


def _render(compute: ComputeSpec, number: int) -> dict[str, Any]:
    return rendering.render(compute, namespace="default", name=f"service-{number}")


def _render_all(compute: ComputeSpec) -> list[dict[str, Any]]:
    return [_render(compute, number) for number in range(SERVICES)]
