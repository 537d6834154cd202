"""What becomes of calls when their connection, or the agent behind it, does not hold."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time

import pytest

from kubetorch.errors import (
    AgentDiedError,
    CallLostError,
    CallRefusedError,
    CallTimeoutError,
    PodTerminatedError,
    ServiceNotFoundError,
    UnauthorizedError,
    VersionMismatchError,
)
from kubetorch.sdk.calls.route import Location
from kubetorch.wire import frames
from kubetorch.wire.calls import new_call_id
from kubetorch.wire.frames import Kind
from kubetorch.wire.messages import Ending, PodView
from tests.local.calling import InThread, caller, cuts, route_to, until, with_longer_timeouts
from tests.local.scripted_agent import Call, ScriptedAgent, never
from tests.local.tcp_relay import Relay


class Gate:
    """A call that a test lets go on."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    async def __call__(self, call: Call) -> None:
        self.begun.set()
        await asyncio.get_running_loop().run_in_executor(None, self._open.wait, 60)
        await call.result("done")


def test_a_connection_cut_during_a_call_is_resumed_and_the_call_runs_once() -> None:
    gate = Gate()
    with ScriptedAgent(work=gate) as agent, route_to(agent.locate) as route:
        call = InThread(caller(route, "work"))
        assert gate.begun.wait(30)
        agent.cut()
        gate.open()
        assert call.join().value == "done"
        assert len(agent.opened) == 1
        assert agent.connects == 2


@pytest.mark.security
@pytest.mark.parametrize("size", [1 << 62, (1 << 64) - 1])
def test_a_pod_that_claims_a_value_beyond_all_memory_fails_that_call_alone(size: int) -> None:
    async def claim(call: Call) -> None:
        call.send(Kind.RESULT, frames.Result(frames.Body("json", (size,), size), 1, False))

    async def work(call: Call) -> None:
        await call.result("done")

    with ScriptedAgent(claim=claim, work=work) as agent, route_to(agent.locate) as route:
        failed = InThread(caller(route, "claim")).join().error
        assert isinstance(failed, MemoryError), failed
        assert InThread(caller(route, "work")).join().value == "done"


def test_values_lines_and_arguments_survive_cuts_at_any_moment() -> None:
    async def work(call: Call) -> None:
        for number in range(200):
            await call.log(f"line {number}")
            await call.give(number)
        await call.result(len(call.args[0]), streamed=True)

    with ScriptedAgent(work=work) as agent, route_to(agent.locate) as route:
        with cuts(agent):
            for _ in range(20):
                values = caller(route, "work")("x" * 3_000_000)
                assert list(values) == list(range(200))
        assert len(agent.opened) == 20


def test_an_agent_that_was_killed_fails_its_calls_with_a_typed_error() -> None:
    with ScriptedAgent(never=never) as agent, route_to(agent.locate) as route:
        call = InThread(caller(route, "never"))
        until(lambda: agent.opened)
        begin = time.monotonic()
        agent.die()
        assert isinstance(call.join().error, AgentDiedError)
        assert time.monotonic() - begin < 30
        assert caller(route, "echo")(1) == [1]


def test_a_pod_that_is_gone_for_good_fails_its_calls_at_once() -> None:
    is_gone = threading.Event()

    def resolve() -> Location:
        if is_gone.is_set():
            raise ServiceNotFoundError("service is gone")
        return agent.locate()

    with route_to(resolve) as route:
        with ScriptedAgent(never=never) as agent:
            call = InThread(caller(route, "never"))
            until(lambda: agent.opened)
            is_gone.set()
        assert isinstance(call.join().error, ServiceNotFoundError)
        with pytest.raises(ServiceNotFoundError):
            caller(route, "echo")(1)


def test_what_ended_a_pod_is_the_reason_of_its_calls_once_that_is_known() -> None:
    pods: dict[str, PodView] = {}
    agent = ScriptedAgent(never=never)
    with agent, route_to(lambda: agent.locate()._replace(pods=pods)) as route:
        call = InThread(caller(route, "never"))
        until(lambda: agent.opened)
        agent.__exit__()
        ending = Ending(reason="Evicted", message="make room")
        pods[agent.pod] = PodView(name=agent.pod, ordinal=0, phase="Gone", ended=ending)
        error = call.join().error
    assert isinstance(error, PodTerminatedError)
    assert (error.pod_name, error.evicted) == (agent.pod, True)


def test_a_pod_that_was_replaced_by_another_fails_its_calls_at_once() -> None:
    with ScriptedAgent() as new:
        old = ScriptedAgent(never=never)
        location = [old]
        with old, route_to(lambda: location[-1].locate()) as route:
            call = InThread(caller(route, "never"))
            until(lambda: old.opened)
            location.append(new)
            begin = time.monotonic()
            old.__exit__()
            assert isinstance(call.join().error, AgentDiedError)
            assert time.monotonic() - begin < 30
            assert caller(route, "echo")(1) == [1]


def test_a_call_with_retries_is_made_again_after_its_agent_died_under_the_same_key() -> None:
    attempts = 0

    async def flaky(call: Call) -> None:
        nonlocal attempts
        attempts += 1
        if attempts > 1:
            await call.result("second")

    with ScriptedAgent(flaky=flaky) as agent, route_to(agent.locate) as route:
        call = InThread(caller(route, "flaky", retries=1))
        until(lambda: attempts)
        agent.die()
        assert call.join().value == "second"
        first, second = (meta.idempotency_key for meta in agent.opened)
        assert first == second
        assert first is not None


def test_calls_wait_for_a_pod_that_comes_back() -> None:
    with ScriptedAgent() as agent:
        port = agent.port
        with route_to(agent.locate) as route:
            caller(route, "echo")(1)
            agent.__exit__()
            # Nobody reads now: that the connection has ended is noticed by the next call.
            time.sleep(0.02)
            call = InThread(caller(route, "echo"), 2)
            time.sleep(0.3)
            with ScriptedAgent(port=port):
                call.join()
                assert (call.value, call.error) == ([2], None)


def test_a_call_that_nobody_takes_in_time_says_so() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # not listening: refuses
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"

        def attempt(timeout: float) -> bool:
            with (
                route_to(lambda: Location((url,), "token")) as route,
                pytest.raises(CallTimeoutError) as raised,
            ):
                caller(route, "echo", timeout=timeout)(1)
            return isinstance(raised.value.__cause__, CallRefusedError)

        with_longer_timeouts(attempt)


def test_an_expired_token_is_refreshed_once() -> None:
    tokens = iter(["old", "new"])
    with ScriptedAgent() as agent, route_to(lambda: Location((agent.url,), next(tokens))) as route:
        agent.tokens = {"new"}
        assert caller(route, "echo")(1) == [1]
        assert agent.connects == 2


def test_a_token_that_stays_wrong_is_an_error() -> None:
    with ScriptedAgent() as agent, route_to(agent.locate) as route:
        agent.tokens = {"another"}
        with pytest.raises(UnauthorizedError):
            caller(route, "echo")(1)
        assert agent.connects == 2


def test_a_token_that_expired_meanwhile_does_not_keep_a_stream_from_resuming() -> None:
    gate = Gate()
    tokens = ["old"]
    with (
        ScriptedAgent(work=gate) as agent,
        route_to(lambda: Location((agent.url,), tokens[-1])) as route,
    ):
        call = InThread(caller(route, "work"))
        assert gate.begun.wait(30)
        tokens.append("new")
        agent.tokens = {"new"}
        agent.cut()
        gate.open()
        assert call.join().value == "done"


def test_an_agent_of_another_version_is_an_error() -> None:
    with ScriptedAgent() as agent, route_to(agent.locate) as route:
        agent.refusal = VersionMismatchError("this side speaks 2 to 2")
        with pytest.raises(VersionMismatchError):
            caller(route, "echo")(1)


def test_a_call_refused_while_the_pod_drains_is_sent_again() -> None:
    refusals = 0

    async def draining(call: Call) -> None:
        nonlocal refusals
        refusals += 1
        if refusals < 3:
            call.error(CallRefusedError("the pod drains"), started=False)
        else:
            await call.result("taken")

    with ScriptedAgent(draining=draining) as agent, route_to(agent.locate) as route:
        assert caller(route, "draining")() == "taken"


def test_an_error_of_a_call_that_ran_is_never_a_reason_to_run_it_again() -> None:
    async def refusing(call: Call) -> None:
        call.error(CallRefusedError("too late"))

    with ScriptedAgent(refusing=refusing) as agent, route_to(agent.locate) as route:
        with pytest.raises(CallRefusedError, match="too late"):
            caller(route, "refusing")()
        assert len(agent.opened) == 1


def test_after_goaway_calls_go_elsewhere_and_those_that_run_go_on() -> None:
    gate = Gate()
    with ScriptedAgent(work=gate) as old, ScriptedAgent() as new:
        location = [old.locate()]
        with route_to(lambda: location[-1]) as route:
            call = InThread(caller(route, "work"))
            assert gate.begun.wait(30)
            location.append(new.locate())
            old.send_all(frames.encode(Kind.GOAWAY, 0, frames.Goaway("the pod stops")))
            route.locate(None)
            until(lambda: caller(route, "echo")(1) and new.opened)
            gate.open()
            assert call.join().value == "done"


def test_a_peer_that_falls_silent_is_noticed_and_left() -> None:
    gate = Gate()
    with (
        ScriptedAgent(work=gate) as agent,
        Relay(agent.port) as relay,
        route_to(lambda: Location((relay.url,), "t"), ping_after=0.2) as route,
    ):
        call = InThread(caller(route, "work"))
        assert gate.begun.wait(30)
        before = relay.accepted
        relay.hold()
        until(lambda: relay.accepted > before)
        relay.release()
        until(lambda: agent.connects > before)
        gate.open()
        assert call.join().value == "done"
        assert len(agent.opened) == 1


def test_streams_are_closed_politely_so_that_plain_calls_are_cancelled() -> None:
    with ScriptedAgent(never=never) as agent:
        with route_to(agent.locate) as route:
            call = InThread(caller(route, "never"))
            until(lambda: agent.opened)
        assert isinstance(call.join().error, CallLostError)
        assert agent.closed.wait(30)
        assert agent.close_codes == [1000]


def test_a_forked_child_has_ids_of_calls_of_its_own() -> None:
    new_call_id()  # some are made ahead
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, new_call_id().encode())
        os._exit(0)
    os.waitpid(pid, 0)
    theirs = os.read(reading, 100).decode()
    os.close(reading)
    os.close(writing)
    assert len(theirs) == 32
    assert theirs not in {new_call_id() for _ in range(100)}


def test_a_forked_child_has_connections_of_its_own() -> None:
    with ScriptedAgent() as agent, route_to(agent.locate) as route:
        assert caller(route, "echo")("parent") == ["parent"]
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(0 if caller(route, "echo")("child") == ["child"] else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert caller(route, "echo")("parent") == ["parent"]
        assert agent.connects == 2


def test_calls_go_to_the_pods_in_turn() -> None:
    with ScriptedAgent() as first_agent, ScriptedAgent() as second_agent:
        location = Location((first_agent.url, second_agent.url), "t")
        with route_to(lambda: location) as route:
            for number in range(10):
                assert caller(route, "echo")(number) == [number]
        assert (len(first_agent.opened), len(second_agent.opened)) == (5, 5)


def test_a_pod_that_cannot_be_reached_is_left_out() -> None:
    with ScriptedAgent() as alive, ScriptedAgent() as dead:
        dead_url = dead.url
    with ScriptedAgent() as alive:
        location = Location((dead_url, alive.url), "t")
        with route_to(lambda: location) as route:
            for number in range(4):
                assert caller(route, "echo")(number) == [number]
