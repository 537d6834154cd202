"""The scaling of one service: when its scaler is asked for the number of pods."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kubetorch.controller.scaling import Scaling
from kubetorch.errors import CallRefusedError
from kubetorch.specs.autoscaling import AutoscalingSpec
from kubetorch.specs.callable import BatchedMethod, CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.messages import PodLoad, PodWait
from tests.manual_clock import ManualClock

SPEC = WorkloadSpec(
    "team",
    "f",
    CallableRef("fn", "f", "m", "f"),
    compute=ComputeSpec(autoscaling=AutoscalingSpec(min_scale=2, max_scale=10, target=4)),
)
PODS = {"f-0", "f-1"}


class CountingClock(ManualClock):
    """Counts the timers."""

    timers = 0

    def call_later(self, delay, callback):  # type: ignore[no-untyped-def]  # as there
        self.timers += 1
        return super().call_later(delay, callback)


class Sizes:
    """A backend whose pods are counted."""

    def __init__(self, room: int | None = None) -> None:
        self.size = 0
        self.leaving: Sequence[str] = ()
        self._room = room

    def scale(self, namespace: str, name: str, size: int, leaving: Sequence[str] = ()) -> None:
        self.size, self.leaving = size, leaving

    def most_pods(self, spec: WorkloadSpec) -> int | None:
        return self._room


def scaled(**keywords: Any) -> WorkloadSpec:
    return replace(SPEC, compute=ComputeSpec(autoscaling=AutoscalingSpec(**keywords)))


def new_scaling(clock: ManualClock, backend: Sizes, spec: WorkloadSpec) -> Scaling:
    return Scaling(
        spec,
        stored="",
        backend=backend,  # type: ignore[arg-type]  # as much of a backend as scaling needs
        clock=clock,
        store=lambda text: None,
        on_change=lambda: None,
    )


def serving(clock: ManualClock, backend: Sizes, spec: WorkloadSpec = SPEC) -> Scaling:
    """A service at rest, with two pods."""
    scaling = new_scaling(clock, backend, spec)
    scaling.begin_deploy(spec)
    scaling.pods_changed(PODS, PODS)
    scaling.served()
    clock.advance(1000.0)
    return scaling


def sizes(scaling: Scaling) -> list[int]:
    """All sizes that the service has had."""
    return [decision.after for decision in scaling.view().decisions]


def report(scaling: Scaling, *, calls: int) -> None:
    for pod in sorted(PODS):
        scaling.reported(pod, PodLoad(calls))


def test_load_that_is_reported_once_adds_pods_without_another_event() -> None:
    clock, backend = ManualClock(), Sizes()
    scaling = serving(clock, backend)
    assert backend.size == 2
    report(scaling, calls=50)
    clock.advance(2.0)
    assert backend.size > 2
    scaling.close()


def test_pods_that_start_go_first_and_then_idle_ones_while_others_start() -> None:
    clock, backend = ManualClock(), Sizes()
    scaling = serving(clock, backend)
    scaling.pods_changed({"f-0", "f-1", "f-2", "f-3", "f-4"}, {"f-0", "f-1", "f-2"})
    scaling.reported("f-2", PodLoad(1))
    scaling.change({"min_scale": 5})
    scaling.change({"min_scale": 2, "max_scale": 2})
    assert (backend.size, backend.leaving) == (2, ["f-4", "f-3", "f-1"])
    scaling.close()


def test_a_first_deploy_has_its_initial_pods_until_they_have_served() -> None:
    clock, backend = ManualClock(), Sizes()
    spec = scaled(min_scale=1, initial_scale=2, max_scale=10)
    scaling = new_scaling(clock, backend, spec)
    scaling.begin_deploy(spec)
    clock.advance(1000.0)
    assert backend.size == 2
    scaling.pods_changed(PODS, PODS)
    scaling.served()
    clock.advance(1000.0)
    assert backend.size == 1
    scaling.close()


def test_only_a_deploy_of_other_pods_starts_some_for_a_service_at_zero() -> None:
    clock, backend = ManualClock(), Sizes()
    spec = scaled(min_scale=0, max_scale=10)
    scaling = serving(clock, backend, spec)
    scaling.pods_changed(set(), set())
    assert backend.size == 0
    scaling.begin_deploy(replace(spec, init_args="of other code"))
    assert backend.size == 0
    scaling.begin_deploy(replace(spec, compute=replace(spec.compute, cpus="1")))
    assert backend.size == 1
    clock.advance(1000.0)
    assert backend.size == 1
    scaling.served()
    clock.advance(1000.0)
    assert backend.size == 0
    scaling.close()


@pytest.mark.parametrize(("max_scale", "size"), [(0, 3), (10, 3), (2, 2)])
def test_the_load_adds_no_more_pods_than_there_is_room_for(max_scale: int, size: int) -> None:
    clock, backend = ManualClock(), Sizes(room=3)
    scaling = serving(clock, backend, scaled(min_scale=1, max_scale=max_scale, target=4))
    report(scaling, calls=50)
    clock.advance(2.0)
    assert backend.size == scaling.view().maximum == size
    scaling.close()


def test_a_proof_has_the_minimum_of_its_schedule() -> None:
    clock, backend = ManualClock(), Sizes()
    spec = scaled(min_schedule=(("* * * * *", 3),), max_scale=10)
    scaling = serving(clock, backend, spec)
    assert sizes(scaling) == [3]
    scaling.begin_deploy(replace(spec, compute=replace(spec.compute, cpus="1")))
    scaling.served()
    assert sizes(scaling) == [3]
    scaling.close()


def test_a_deploy_of_other_pods_keeps_as_many_as_the_load_needs() -> None:
    clock, backend = ManualClock(), Sizes()
    scaling = serving(clock, backend)
    report(scaling, calls=8)
    clock.advance(2.0)
    assert backend.size == 6
    changed = replace(SPEC.compute, cpus="1")
    scaling.begin_deploy(replace(SPEC, compute=changed))
    assert backend.size == 6
    report(scaling, calls=0)
    clock.advance(1000.0)
    assert backend.size == 6
    assert changed.autoscaling is not None
    bounded = replace(changed, autoscaling=replace(changed.autoscaling, max_scale=4))
    scaling.begin_deploy(replace(SPEC, compute=bounded))
    assert backend.size == 4
    scaling.served()
    clock.advance(1000.0)
    assert backend.size == 2
    scaling.close()


def test_the_calls_of_a_batch_need_one_slot_together() -> None:
    clock, backend = ManualClock(), Sizes()
    batched = replace(SPEC.callable, batched=(BatchedMethod("", 10),))
    bounds = AutoscalingSpec(min_scale=2, max_scale=10, concurrency=2, target_utilization=100)
    compute = ComputeSpec(autoscaling=bounds)
    scaling = serving(clock, backend, replace(SPEC, callable=batched, compute=compute))
    report(scaling, calls=20)
    clock.advance(2.0)
    assert backend.size == 2
    scaling.close()


def test_reports_between_two_decisions_cost_none() -> None:
    clock, backend = CountingClock(), Sizes()
    scaling = serving(clock, backend)
    report(scaling, calls=1)
    clock.advance(0.5)
    before = clock.timers
    for _ in range(10):
        report(scaling, calls=1)
        clock.advance(0.01)
    assert clock.timers == before
    clock.advance(1.0)
    assert clock.timers > before
    scaling.close()


def test_a_closed_scaling_lets_its_callers_go_and_changes_no_number_of_pods() -> None:
    clock, backend = ManualClock(), Sizes()
    compute = ComputeSpec(autoscaling=AutoscalingSpec(min_scale=0, max_scale=10, target=4))
    scaling = serving(clock, backend, replace(SPEC, compute=compute))

    async def close_while_callers_wait() -> None:
        held_request = asyncio.create_task(
            scaling.hold("request 1", 900.0, lambda: False, lambda: False)
        )
        wait = asyncio.create_task(
            scaling.wait(PodWait(client="c", waiting=1, pods=tuple(PODS), seconds=20.0))
        )
        await asyncio.sleep(0)
        backend.size = 7  # of another service of this name, from now on
        scaling.close()
        await asyncio.wait_for(asyncio.gather(held_request, wait), 5.0)

    asyncio.run(close_while_callers_wait())
    report(scaling, calls=50)
    scaling.pods_changed(PODS, set())
    clock.advance(1000.0)
    assert backend.size == 7


def test_no_more_than_1000_requests_are_held_for_a_service() -> None:
    clock, backend = ManualClock(), Sizes()
    scaling = serving(clock, backend)
    is_full = True

    def hold(number: int) -> asyncio.Task[None]:
        held_request = scaling.hold(f"request {number}", 900.0, lambda: not is_full, lambda: False)
        return asyncio.create_task(held_request)

    async def hold_too_many() -> None:
        nonlocal is_full
        held_requests = [hold(number) for number in range(1000)]
        await asyncio.sleep(0)
        with pytest.raises(CallRefusedError, match="1000 requests already wait"):
            await asyncio.wait_for(hold(1000), 5.0)
        held_requests[0].cancel()
        await asyncio.wait(held_requests[:1])
        another = hold(1001)
        await asyncio.sleep(0)
        is_full = False
        scaling.changes.notify()
        await asyncio.wait_for(asyncio.gather(*held_requests[1:], another), 30.0)

    asyncio.run(hold_too_many())
    assert not scaling.view().waiting
    scaling.close()
