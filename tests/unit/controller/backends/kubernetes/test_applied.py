"""What is expected of a workload that was applied."""

from __future__ import annotations

from typing import Any

from kubetorch.controller.backends.kubernetes.applied import Applied
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import WorkloadSpec


def workload(**compute: Any) -> Applied:
    ref = CallableRef("fn", "web", "train", "train")
    return Applied.of(WorkloadSpec("team", "web", ref, compute=ComputeSpec(**compute)))


def seen(applied: Applied, *, generation: int, replicas: int) -> dict[str, Any]:
    """Its object, as a watch showed it."""
    assert applied.main is not None
    spec = {**applied.main["spec"], "replicas": replicas}
    metadata = {**applied.main["metadata"], "generation": generation}
    return {**applied.main, "metadata": metadata, "spec": spec}


def test_what_was_applied_counts_until_the_watch_has_shown_it() -> None:
    applied = workload(replicas=2)
    applied.applied({"metadata": {"generation": 5}})
    assert applied.expected([]) == 2
    assert applied.expected([seen(applied, generation=4, replicas=1)]) == 2
    assert applied.expected([seen(applied, generation=5, replicas=2)]) == 2


def test_then_what_somebody_else_made_of_it_does() -> None:
    applied = workload(replicas=2)
    applied.applied({"metadata": {"generation": 5}})
    assert applied.expected([seen(applied, generation=6, replicas=1)]) == 1


def test_of_pods_that_somebody_else_made_one_is_expected() -> None:
    assert workload(selector=(("app", "web"),)).expected([]) == 1
