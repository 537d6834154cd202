"""Calls of a service that the controller scales: they wait for pods, and move to further ones."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kubetorch.errors import CallRefusedError, CallTimeoutError
from kubetorch.sdk.calls.attempts import Target
from kubetorch.sdk.calls.caller import Caller
from kubetorch.sdk.calls.options import CallOptions
from kubetorch.sdk.calls.route import Location, Route, Scaling
from kubetorch.wire import frames
from kubetorch.wire.frames import Kind
from kubetorch.wire.messages import PodView, PodWait
from tests.local.calling import InThread, until, with_longer_timeouts
from tests.local.scripted_agent import Call, ScriptedAgent


class Pod(ScriptedAgent):
    """A pod with one slot, whose calls of `work` and `count` hold it until `release` is set."""

    def __init__(self, ordinal: int) -> None:
        super().__init__(work=self._work, count=self._count, echo=self._echo)
        self.pod, self.ordinal = f"service-{ordinal}", ordinal
        self.release = threading.Event()
        self.begun = 0
        self._slot = asyncio.Lock()

    async def _work(self, call: Call) -> None:
        if await self._begins(call):
            await call.result(self.pod)
            self._slot.release()

    async def _count(self, call: Call) -> None:
        if await self._begins(call):
            for number in range(2):
                await call.give((self.pod, number))
            await call.result(streamed=True)
            self._slot.release()

    async def _echo(self, call: Call) -> None:
        await call.result(self.pod)

    async def _begins(self, call: Call) -> bool:
        """Take the slot and hold it; false if the call was taken back before it got the slot."""
        if self._slot.locked():
            call.send(Kind.QUEUED)
            turn = asyncio.ensure_future(self._slot.acquire())
            end = asyncio.ensure_future(call.is_cancelled.wait())
            await asyncio.wait([turn, end], return_when=asyncio.FIRST_COMPLETED)
            end.cancel()
            if not turn.done():
                turn.cancel()
                call.error(CallRefusedError("taken back"), started=False)
                return False
            call.send(Kind.BEGUN)
        else:
            await self._slot.acquire()
        self.begun += 1
        while not self.release.is_set():
            await asyncio.sleep(0.005)
        return True


class Controller:
    """Describes the pods that a test makes ready, and keeps the waits of the route.

    Attributes:
        waiting: The number of calls without a pod, as reported last, and its earlier values.
    """

    def __init__(self, slots: int | None, failure: str) -> None:
        self.pods: list[Pod] = []
        self.scaling = Scaling(30, slots, 4, failure, "0 pods: nothing was called for 10m")
        self.waiting = [0]
        self._changed = threading.Condition()

    def add(self, pod: Pod) -> None:
        with self._changed:
            self.pods.append(pod)
            self._changed.notify_all()

    def remove(self, pod: Pod) -> None:
        with self._changed:
            self.pods.remove(pod)
            self._changed.notify_all()

    def locate(self) -> Location:
        views = {
            pod.pod: PodView(
                name=pod.pod, ordinal=pod.ordinal, phase="Running", is_ready=True, url=pod.url
            )
            for pod in self.pods
        }
        return Location(
            tuple(pod.url for pod in self.pods),
            "token",
            tuple(pod.ordinal for pod in self.pods),
            pods=views,
            scaling=self.scaling,
        )

    def wait(self, wait: PodWait) -> Location:
        with self._changed:
            if wait.waiting != self.waiting[-1]:
                self.waiting.append(wait.waiting)
            self._changed.wait_for(
                lambda: {pod.pod for pod in self.pods} != set(wait.pods), min(wait.seconds, 1.0)
            )
            return self.locate()


@contextmanager
def growing(*pods: Pod, slots: int | None = 1, failure: str = "") -> Iterator[Any]:
    """The route to a service with these pods, and its controller."""
    controller = Controller(slots, failure)
    controller.pods.extend(pods)
    route = Route("service", controller.locate, controller.locate(), wait=controller.wait)
    try:
        yield route, controller
    finally:
        route.close()


def caller(route: Route, name: str, **options: Any) -> Caller:
    return Caller(
        Target("default", "service", name, is_balanced=True), route, CallOptions(**options)
    )


def test_a_call_without_a_pod_is_reported_and_goes_to_the_first_pod() -> None:
    with Pod(0) as pod, growing() as (route, controller):
        calls = [InThread(caller(route, "echo")) for _ in range(3)]
        until(lambda: controller.waiting[-1] == 3)
        controller.add(pod)
        assert [call.join().value for call in calls] == ["service-0"] * 3
        until(lambda: controller.waiting[-1] == 0)


def test_a_call_that_gives_up_is_no_load_and_its_error_says_what_it_waited_for() -> None:
    def attempt(timeout: float) -> bool:
        with growing() as (route, controller):
            with pytest.raises(CallTimeoutError) as raised:
                caller(route, "echo", timeout=timeout)()
            until(lambda: controller.waiting[-1] == 0)
        assert max(controller.waiting) <= 1
        return 1 in controller.waiting and "nothing was called for 10m" in str(raised.value)

    with_longer_timeouts(attempt)


def test_a_service_whose_pods_cannot_start_fails_with_their_error() -> None:
    with growing(failure="ImagePullError: no such image") as (route, controller):
        with pytest.raises(CallRefusedError, match=r"no pod of service can start: .*no such image"):
            caller(route, "echo")()
        until(lambda: controller.waiting[-1] == 0)


def test_calls_that_wait_in_a_pod_move_to_a_new_one() -> None:
    async def awaited(route: Route) -> object:
        return await caller(route, "work")(async_=True)

    with Pod(0) as old, Pod(1) as new, growing(old) as (route, controller):
        first = InThread(caller(route, "work"))
        until(lambda: old.begun)
        plain = InThread(caller(route, "work"))
        in_loop = InThread(lambda: asyncio.run(awaited(route)))
        values = InThread(lambda: list(caller(route, "count")()))
        until(lambda: len(old.opened) == 4)
        new.release.set()
        controller.add(new)
        assert plain.join().value == in_loop.join().value == "service-1"
        assert values.join().value == [["service-1", 0], ["service-1", 1]]
        assert old.begun == 1
        old.release.set()
        assert first.join().value == "service-0"


def test_a_call_stays_in_its_queue_while_no_other_pod_has_room() -> None:
    with Pod(0) as first, Pod(1) as second, growing(first, second) as (route, _):
        calls = [InThread(caller(route, "work")) for _ in range(3)]
        until(lambda: first.begun + second.begun == 2 and len(first.opened + second.opened) == 3)
        until(lambda: len(route.queued_calls) == 1)
        route.queued_calls.balance()
        assert not first.cancelled and not second.cancelled
        for pod in (first, second):
            pod.release.set()
        assert {call.join().error for call in calls} == {None}


def test_a_call_moves_to_a_pod_that_has_become_free() -> None:
    with Pod(0) as first, Pod(1) as second, growing(first, second) as (route, _):
        calls = [InThread(caller(route, "work")) for _ in range(3)]
        until(lambda: len(first.opened + second.opened) == 3)
        full, free = sorted((first, second), key=lambda pod: -len(pod.opened))
        free.release.set()
        until(lambda: sum(call.value == free.pod for call in calls) == 2)
        full.release.set()
        assert {call.join().value for call in calls} == {first.pod, second.pod}


def test_calls_of_a_pod_that_leaves_go_to_another_one() -> None:
    with Pod(0) as old, Pod(1) as new, growing(old) as (route, controller):
        assert caller(route, "echo")() == "service-0"
        controller.add(new)
        controller.remove(old)
        old.refusal = CallRefusedError("the pod is being stopped")
        old.send_all(frames.encode(Kind.GOAWAY, 0, frames.Goaway("it leaves")))
        until(lambda: caller(route, "echo")() == "service-1")
        assert {caller(route, "echo")() for _ in range(4)} == {"service-1"}


def test_items_that_were_not_sent_are_load_and_go_to_new_pods() -> None:
    with Pod(0) as old, Pod(1) as new, growing(old) as (route, controller):
        values = InThread(lambda: list(caller(route, "work").map(range(60))))
        until(lambda: controller.waiting[-1] >= 20)
        new.release.set()
        controller.add(new)
        until(lambda: new.begun >= 20)
        old.release.set()
        assert set(values.join().value) == {"service-0", "service-1"}
        until(lambda: controller.waiting[-1] == 0)


def test_a_map_offers_as_many_items_as_the_pods_could_run_at_max_scale() -> None:
    with Pod(0) as pod, growing(slots=50) as (route, controller):  # and 4 pods at most
        values = InThread(lambda: list(caller(route, "echo").map(range(300))))
        until(lambda: controller.waiting[-1] == 200)
        controller.add(pod)
        assert len(values.join().value) == 300


def test_a_call_finds_the_pod_of_its_ancestor_that_is_newer_than_its_route() -> None:
    with Pod(0) as old, Pod(1) as new, growing(old) as (route, controller):
        controller.add(new)
        route.find_ancestors(["other-1"])
        assert route.nearest(["other-1"]) is None
        route.find_ancestors(["other-1", "service-1"])
        pod_route = route.nearest(["other-1", "service-1"])
        assert pod_route is not None
        assert caller(pod_route, "echo")() == "service-1"
