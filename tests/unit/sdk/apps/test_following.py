"""Which pods of an app are followed to their end."""

from __future__ import annotations

from kubetorch.sdk.apps import following
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.messages import PodView, WorkloadView


def test_pods_that_newer_ones_have_replaced_are_not_followed() -> None:
    spec = WorkloadSpec("ns", "job", CallableRef("fn", "job", "m", "job"))
    pods = (
        PodView(name="new", ordinal=0, phase="Running", generation=2),
        PodView(name="reconnects", ordinal=1, phase="Running"),
        PodView(name="old", ordinal=0, phase="Running", generation=1),
        PodView(name="ends", ordinal=1, phase="Terminating"),
    )
    view = WorkloadView(spec=spec, generation=2, status="Ready", pods=pods)
    assert [pod.name for pod in following.of_generation(view)] == ["new", "reconnects"]
