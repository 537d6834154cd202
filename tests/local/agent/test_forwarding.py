"""Which pod of a cluster answers a request: the one that got it, or a sibling that is less busy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

import clock_loop
from kubetorch.lib import http_server, sockets
from kubetorch.lib.asgi import Receive, Responder, Scope, Send
from kubetorch.pod.http.request_forwarder import RequestForwarder
from kubetorch.pod.membership import Membership
from kubetorch.pod.tuning import TIMING
from kubetorch.wire import routes
from kubetorch.wire.messages import Member, Members


class Siblings:
    """Agents that say how many calls they have; one that serves nothing has `None`."""

    def __init__(self, calls: Mapping[str, int | None]) -> None:
        self.calls = dict(calls)
        self.asked_pods: list[str] = []

    def agent(self, pod: str) -> http_server.Server:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            self.asked_pods.append(pod)
            assert scope["path"] == routes.LOAD
            assert (b"authorization", b"Bearer own") in scope["headers"]
            calls = self.calls[pod]
            respond = Responder(send, {})
            await respond.answer(
                503 if calls is None else 200, json.dumps({"calls": calls}).encode()
            )

        return http_server.Server(app)


@asynccontextmanager
async def pods(
    siblings: Siblings, own_calls: int, *, takes_turns: bool = False, is_on: bool = True
) -> AsyncIterator[RequestForwarder]:
    servers, members = [], [Member("own", 0, "http://127.0.0.1:1")]
    for ordinal, pod in enumerate(siblings.calls, 1):
        listener = sockets.listen("127.0.0.1", 0)
        server = siblings.agent(pod)
        await server.start(listener)
        servers.append(server)
        members.append(Member(pod, ordinal, f"http://127.0.0.1:{listener.getsockname()[1]}"))
    membership = Membership()
    membership.update(Members(epoch=1, members=(*members, Member("new", 9, ""))))
    forwarder = RequestForwarder(
        pod_name="own",
        members=membership,
        token=lambda: "own",
        load=lambda: own_calls,
        takes_turns=takes_turns,
        is_on=is_on,
    )
    try:
        yield forwarder
    finally:
        await forwarder.close()
        for server in servers:
            await server.close(1.0)


async def chosen(forwarder: RequestForwarder) -> str:
    member = await forwarder.choose()
    return "own" if member is None else member.pod


@pytest.mark.parametrize(
    ("own_calls", "calls", "expected"),
    [
        (2, {"one": 1, "two": 0}, "two"),
        (2, {"one": 2, "two": 2}, "own"),
        (1, {"one": None, "two": 3}, "own"),
        (3, {"one": None, "two": 2}, "two"),
    ],
)
def test_a_busy_pod_hands_a_request_on_to_the_least_busy_one(
    own_calls: int, calls: dict[str, int | None], expected: str
) -> None:
    async def scenario() -> None:
        async with pods(Siblings(calls), own_calls) as forwarder:
            assert await chosen(forwarder) == expected

    clock_loop.run(scenario(), clock_loop.StillLoop)


@pytest.mark.parametrize(("own_calls", "is_on"), [(0, True), (5, False)])
def test_a_pod_that_is_free_or_is_not_to_choose_keeps_a_request_and_asks_nobody(
    own_calls: int, is_on: bool
) -> None:
    async def scenario() -> None:
        siblings = Siblings({"one": 0})
        async with pods(siblings, own_calls, is_on=is_on) as forwarder:
            assert await chosen(forwarder) == "own"
            assert (forwarder.choose_by("key", [1]) is not None) == is_on
        assert siblings.asked_pods == []

    clock_loop.run(scenario(), clock_loop.StillLoop)


def test_requests_that_come_together_are_spread_without_asking_for_each() -> None:
    async def scenario() -> None:
        siblings = Siblings({"one": 0, "two": 1})
        async with pods(siblings, 3) as forwarder:
            expected = []
            for _ in range(5):
                member = await forwarder.choose()
                assert member is not None
                expected.append(member.pod)
                forwarder.begin(member)
            assert sorted(expected) == ["one", "one", "one", "two", "two"]
            assert sorted(siblings.asked_pods) == ["one", "two"]
            siblings.calls["one"] = 0
            loop = asyncio.get_running_loop()
            assert isinstance(loop, clock_loop.StillLoop)
            loop.now += 2 * TIMING.sibling_loads_valid_seconds
            # What was handed on has not ended, whatever a sibling says.
            assert await chosen(forwarder) == "two"

    clock_loop.run(scenario(), clock_loop.StillLoop)


def test_where_all_requests_come_to_one_pod_those_that_are_as_busy_take_turns() -> None:
    async def scenario() -> None:
        async with pods(Siblings({"one": 0, "two": 0}), 0, takes_turns=True) as forwarder:
            expected = [await chosen(forwarder) for _ in range(6)]
        assert [expected.count(pod) for pod in ("own", "one", "two")] == [2, 2, 2]

    clock_loop.run(scenario(), clock_loop.StillLoop)
