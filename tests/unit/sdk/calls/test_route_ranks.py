"""What a caller of distributed ranks knows of pods that are lost."""

from __future__ import annotations

from typing import Any, cast

from kubetorch.sdk.calls.route import Location
from kubetorch.sdk.transport.session import Session
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.messages import LostMember, Member, PodView, WorkloadView, World


def located(world: World | None) -> Location:
    spec = WorkloadSpec("team", "train", CallableRef("fn", "f", "m", "f"), compute=ComputeSpec())
    pods = tuple(PodView(name=f"train-{n}", ordinal=n, phase="Running") for n in range(2))
    view = WorkloadView(spec=spec, generation=1, status="Ready", pods=pods, world=world)
    return Location.of_service(cast("Session", None), view)


def test_a_member_that_is_lost_has_ended_for_its_caller_though_its_pod_is_still_there() -> None:
    members = tuple(Member(f"train-{n}", n, f"http://{n}") for n in range(2))
    lost = LostMember(members[1], "unreachable", "nobody reaches it")
    location = located(World(1, 1, members, lost=(lost,)))
    assert location.is_distributed
    assert location.pods["train-0"].ended is None
    ended: Any = location.pods["train-1"].ended
    assert (ended.reason, ended.message) == ("unreachable", "nobody reaches it")
    assert location.only([]).is_distributed


def test_pods_without_a_world_are_as_they_are() -> None:
    location = located(None)
    assert not location.is_distributed
    assert all(pod.ended is None for pod in location.pods.values())
