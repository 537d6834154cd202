"""Spawned calls whose pods refuse, forget, die or fall silent, and those who wait for them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from kubetorch.errors import (
    AgentDiedError,
    CallCancelledError,
    CallLostError,
    CallRefusedError,
    CallTimeoutError,
    ResultExpiredError,
    SerializationError,
    WorkerDiedError,
)
from kubetorch.sdk import tuning as sdk_tuning
from kubetorch.sdk.calls.attempts import Target
from kubetorch.sdk.calls.caller import Caller
from kubetorch.sdk.calls.handles import CallHandle, SpawnedCall
from kubetorch.sdk.calls.options import CallOptions
from kubetorch.sdk.calls.route import Route
from kubetorch.sdk.transport.session import Session
from kubetorch.specs.logging import LoggingConfig
from kubetorch.wire import calls, codecs, exceptions, frames
from kubetorch.wire.frames import Kind, Retry
from kubetorch.wire.messages import CallView, PodView, WorkloadView
from tests.local.calling import InThread, route_to, until, with_longer_timeouts
from tests.local.fake_controller import view
from tests.local.scripted_agent import Call, ScriptedAgent, never
from tests.local.starved import no_new_threads


class Controller:
    """Knows spawned calls, as a test says."""

    def __init__(self, agent: ScriptedAgent) -> None:
        self.agent = agent
        self.outcome: calls.Outcome | None = None
        self.answers = threading.Event()
        self.answers.set()
        self.was_asked = threading.Event()
        self.cancelled: list[str] = []

    def get_call(self, call_id: str) -> CallView:
        self.was_asked.set()
        assert self.answers.wait(60)
        return CallView(
            id=call_id,
            namespace="default",
            workload="service",
            pod=self.agent.pod,
            callable="f",
            state="running" if self.outcome is None else "succeeded",
            started=1.0,
        )

    def get_result(self, call_id: str) -> bytes:
        assert self.outcome is not None
        return calls.pack_outcome(self.outcome)

    def get_workload(self, namespace: str, name: str, *, program: str = "") -> WorkloadView:
        pod = PodView(
            name=self.agent.pod, ordinal=0, phase="Running", is_ready=True, url=self.agent.url
        )
        return msgspec.structs.replace(view(name), pods=(pod,))

    def cancel_call(self, call_id: str) -> None:
        self.cancelled.append(call_id)

    def close(self) -> None:
        """Nothing is open."""


def returned(value: object) -> calls.Returned:
    (segment,) = codecs.encode("json", value)
    return calls.Returned("json", (len(segment),), segment)


@contextmanager
def spawning(agent: ScriptedAgent, controller: Controller) -> Iterator[Callable[..., Caller]]:
    """Makes callers whose spawned calls ask the controller."""
    session = Session(lambda: controller)  # type: ignore[arg-type,return-value]  # as one
    with route_to(agent.locate) as route:
        route.session = session
        yield lambda name, level="info", **options: _caller(route, name, level, options)


def _caller(route: Route, name: str, level: str, options: dict[str, Any]) -> Caller:
    target = Target("default", "service", name, logging=LoggingConfig(level=level))
    return Caller(target, route, CallOptions(**options))


def refusing(times: int, error: Exception) -> Callable[[Call], Any]:
    """Refuses a call so many times, then returns its arguments."""
    refusals = iter(range(times))

    async def handle(call: Call) -> None:
        if next(refusals, None) is None:
            await call.result(call.args)
        else:
            call.error(error, started=False)

    return handle


def ending(value: object) -> Callable[[Call], object]:
    """Gives whoever attaches to a call its result."""
    return lambda call: asyncio.get_running_loop().create_task(call.result(value))


# ------------------------------------------------------------------- calls that nobody took


def test_a_call_that_a_pod_refused_is_sent_again_under_its_id() -> None:
    handler = refusing(3, CallRefusedError("the pod is being stopped"))
    with ScriptedAgent(f=handler) as agent, spawning(agent, Controller(agent)) as to:
        handle = to("f").spawn(7)

        assert handle.get(timeout=60) == [7]
        assert [opened.id for opened in agent.opened] == [handle.id] * 4
        assert handle.status() == "succeeded"


def test_a_call_that_a_pod_refused_is_sent_again_though_nobody_waits_for_it() -> None:
    handler = refusing(2, CallRefusedError("the pod is being stopped"))
    with ScriptedAgent(f=handler) as agent, spawning(agent, Controller(agent)) as to:
        handle = to("f").spawn(7)

        until(lambda: len(agent.opened) == 3)
        until(handle.done)
        assert handle.get(timeout=60) == [7]


def test_an_awaited_call_that_a_pod_refused_is_sent_again() -> None:
    async def main() -> object:
        return await to("f").spawn(7).get_async(timeout=60)

    handler = refusing(2, CallRefusedError("the pod is being stopped"))
    with ScriptedAgent(f=handler) as agent, spawning(agent, Controller(agent)) as to:
        assert asyncio.run(main()) == [7]


def test_a_refused_call_with_long_arguments_is_sent_again() -> None:
    handler = refusing(1, CallRefusedError("the pod is being stopped"))
    with ScriptedAgent(f=handler) as agent, spawning(agent, Controller(agent)) as to:
        assert to("f").spawn("x" * 3_000_000).get(timeout=60) == ["x" * 3_000_000]


def test_the_arguments_of_a_call_that_a_pod_has_already_are_not_sent_to_their_end() -> None:
    is_over = threading.Event()

    async def known(call: Call) -> None:
        call.send(Kind.CREDIT, frames.Credit(call.opened.body.total))
        await asyncio.get_running_loop().run_in_executor(None, is_over.wait, 60)
        await call.result("known")

    with ScriptedAgent(known=known) as agent, spawning(agent, Controller(agent)) as to:
        agent.early.add("known")
        handle = to("known").spawn("x" * 64_000_000)
        # The thread that sends chunks goes on with the arguments of other calls.
        assert len(to("echo")("x" * 20_000_000)[0]) == 20_000_000
        is_over.set()
        assert handle.get(timeout=60) == "known"


def test_arguments_that_are_too_long_to_be_kept_are_not_sent_again() -> None:
    async def refuse_later(call: Call) -> None:
        await asyncio.sleep(0.05)
        call.error(CallRefusedError("the pod is being stopped"), started=False)

    with ScriptedAgent(f=refuse_later) as agent, spawning(agent, Controller(agent)) as to:
        handle = to("f").spawn("x" * (sdk_tuning.LIMITS.kept_argument_bytes + 1))
        with pytest.raises(CallRefusedError):
            handle.get(timeout=60)
        assert len(agent.opened) == 1


def test_a_call_that_runs_is_left_to_its_parent_in_a_forked_child() -> None:
    with ScriptedAgent(never=never) as agent, spawning(agent, Controller(agent)) as to:
        to("never").spawn()
        until(lambda: agent.opened)
        child = os.fork()
        if child == 0:
            os._exit(threading.active_count() != 1)
        assert os.waitpid(child, 0)[1] == 0
        assert len(agent.opened) == 1


def test_a_call_that_runs_keeps_no_program_from_its_end() -> None:
    with ScriptedAgent(never=never) as agent:
        controller = Controller(agent)
        with spawning(agent, controller) as to:
            to("never").spawn()
            until(lambda: agent.opened)
        assert not controller.was_asked.is_set()
        assert len(agent.opened) == 1


def test_streams_that_are_lost_have_nobody_asked_about_calls_that_nobody_waits_for() -> None:
    with ScriptedAgent(never=never) as agent:
        controller = Controller(agent)
        with spawning(agent, controller) as to:
            handles = [to("never").spawn() for _ in range(20)]
            threads = threading.active_count()
            until(lambda: len(agent.opened) == 20)
            agent.die()
            until(lambda: threading.active_count() <= threads)
            assert not controller.was_asked.is_set()
            assert {handle.status() for handle in handles} == {"running"}


def test_a_call_that_no_pod_will_ever_take_is_not_sent_again() -> None:
    handler = refusing(9, SerializationError("pickle is not allowed"))
    with ScriptedAgent(f=handler) as agent, spawning(agent, Controller(agent)) as to:
        with pytest.raises(SerializationError):
            to("f").spawn(7)
        assert len(agent.opened) == 1


def test_a_call_that_is_refused_for_as_long_as_it_may_wait_raises_the_refusal() -> None:
    def attempt(timeout: float) -> bool:
        handler = refusing(10_000, CallRefusedError("the pod is being stopped"))
        with (
            ScriptedAgent(f=handler) as agent,
            spawning(agent, Controller(agent)) as to,
            pytest.raises((CallRefusedError, CallTimeoutError)) as raised,
        ):
            to("f", timeout=timeout).spawn(7)
        return isinstance(raised.value, CallRefusedError) and "being stopped" in str(raised.value)

    with_longer_timeouts(attempt)


def test_a_call_that_is_refused_again_and_again_can_be_cancelled() -> None:
    handler = refusing(10_000, CallRefusedError("the pod is being stopped"))
    with ScriptedAgent(f=handler) as agent, spawning(agent, Controller(agent)) as to:
        handle = to("f", async_=True).spawn(7)
        until(lambda: len(agent.opened) > 2)

        handle.cancel()

        with pytest.raises(CallCancelledError):
            handle.get(timeout=60)
        assert handle.status() == "cancelled"


def test_a_call_whose_pod_went_before_it_was_sent_goes_to_another() -> None:
    with ScriptedAgent(never=never) as first, ScriptedAgent() as second:
        where = [first]
        with route_to(lambda: where[0].locate()) as route:
            written = InThread(_caller(route, "never", "info", {}))
            until(lambda: first.opened)
            where[0] = second
            first.refusal = CallRefusedError("not now")
            first.cut()
            until(lambda: first.connects >= 2)  # its stream is being resumed
            handle = _caller(route, "echo", "info", {"async_": True}).spawn(2)
            first.__exit__()

            assert handle.get(timeout=60) == [2]
            assert isinstance(written.join().error, AgentDiedError)
            assert [len(agent.opened) for agent in (first, second)] == [1, 1]


def test_a_call_that_may_have_run_is_never_sent_again() -> None:
    with ScriptedAgent(never=never) as agent:
        controller = Controller(agent)
        with spawning(agent, controller) as to:
            handle = to("never").spawn()
            until(lambda: agent.opened)
            failure = exceptions.describe(AgentDiedError(agent.pod, "AgentDied"))
            controller.outcome = calls.Raised(failure)
            agent.die()

            with pytest.raises(AgentDiedError):
                handle.get(timeout=60)
            assert len(agent.opened) == 1


def test_a_call_that_nobody_knows_and_whose_agent_died_is_not_spawned() -> None:
    class Forgetful(Controller):
        def get_call(self, call_id: str) -> CallView:
            super().get_call(call_id)
            raise ResultExpiredError("there is no such call")

    async def die(call: Call) -> None:
        asyncio.get_running_loop().call_soon(agent.die_now)
        await never(call)

    with ScriptedAgent(f=die) as agent, spawning(agent, Forgetful(agent)) as to:
        agent.accepts = False
        with pytest.raises(AgentDiedError):
            to("f").spawn()


def test_a_call_whose_confirmation_is_lost_with_its_agent_is_spawned_if_it_is_known() -> None:
    async def die(call: Call) -> None:
        asyncio.get_running_loop().call_soon(agent.die_now)
        await never(call)

    with ScriptedAgent(f=die) as agent:
        agent.accepts = False
        controller = Controller(agent)
        with spawning(agent, controller) as to:
            handle = to("f").spawn()
            assert controller.was_asked.is_set()
            controller.outcome = returned("done")
            assert handle.get(timeout=60) == "done"


# ------------------------------------------------------------------- following it elsewhere


def test_a_handle_follows_its_call_however_often_its_connection_is_lost() -> None:
    with ScriptedAgent(never=never) as agent:
        session = Session(lambda: Controller(agent))  # type: ignore[arg-type,return-value]
        following = SpawnedCall("0" * 32, lambda: session, agreement=0.0)
        attached: list[Call] = []
        agent.on_attach = attached.append
        for count in range(1, 4):
            following.search()
            until(lambda count=count: len(attached) == count)
            agent.die()
            until(lambda: (following.work(), following.is_lost)[1])
        agent.on_attach = ending("there")
        following.search()
        until(lambda: (following.work(), following.outcome)[1])
        assert calls.value_of(following.outcome) == "there"  # type: ignore[arg-type]  # it is there


def test_a_pod_that_does_not_know_a_call_that_is_said_to_run_in_it_is_asked_for_a_while() -> None:
    with ScriptedAgent() as agent:
        session = Session(lambda: Controller(agent))  # type: ignore[arg-type,return-value]
        following = SpawnedCall("0" * 32, lambda: session, agreement=1.0)
        agent.on_attach = lambda call: call.error(ResultExpiredError("no call"))

        def search() -> CallLostError | None:
            following.work()
            error = following.search().error if following.is_lost else None
            assert error is None or isinstance(error, CallLostError)
            return error

        until(search)
        assert len(agent.attached) > 1
        agent.on_attach = ending("there after all")
        until(lambda: (search(), following.outcome)[1])


def test_a_call_that_is_attached_to_again_shows_what_its_caller_wanted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def finish(call: Call) -> None:
        await call.log("quiet", "logger", "INFO")
        await call.log("loud", "logger", "WARNING")
        call.progress(1, 2, "half")
        await call.result("end")

    reports: list[Any] = []
    with ScriptedAgent(never=never) as agent, spawning(agent, Controller(agent)) as to:
        agent.on_attach = lambda call: asyncio.ensure_future(finish(call))
        with_progress = to(
            "never", "warning", on_progress=lambda *report: reports.append(report)
        ).spawn()
        silent = to("never", stream_logs=False).spawn()
        until(lambda: len(agent.opened) == 2)
        agent.die()

        assert [with_progress.get(timeout=60), silent.get(timeout=60)] == ["end", "end"]
        streams_logs = {meta.id: meta.stream_logs for meta in agent.attached}
        assert streams_logs == {with_progress.id: True, silent.id: False}
        assert reports == [(1, 2, "half")]
    assert "loud" in (shown := capsys.readouterr().out)
    assert shown.count("quiet") == 1  # of the call whose agent sent it although it was not wanted


# ------------------------------------------------------------------- deadlines and options


def test_a_deadline_is_kept_while_the_controller_says_nothing() -> None:
    async def main(handle: CallHandle) -> None:
        with pytest.raises(TimeoutError):
            await handle.get_async(timeout=0.05)

    with ScriptedAgent() as agent:
        controller = Controller(agent)
        controller.answers.clear()
        session = Session(lambda: controller)  # type: ignore[arg-type,return-value]
        handle = CallHandle("0" * 32, session=session)
        try:
            with pytest.raises(TimeoutError, match="it goes on"):
                handle.get(timeout=0.05)
            asyncio.run(main(handle))
            assert controller.was_asked.wait(30)
        finally:
            controller.outcome = returned("done")
            controller.answers.set()
        assert handle.get(timeout=60) == "done"


def test_a_call_that_has_ended_is_found_however_little_time_there_is() -> None:
    async def main() -> object:
        return await CallHandle("0" * 32, session=session).get_async(timeout=0)

    with ScriptedAgent() as agent:
        controller = Controller(agent)
        controller.outcome = returned("done")
        session = Session(lambda: controller)  # type: ignore[arg-type,return-value]
        assert CallHandle("0" * 32, session=session).get(timeout=0) == "done"
        assert asyncio.run(main()) == "done"


def test_a_thread_that_cannot_be_started_is_an_error_of_those_who_wait() -> None:
    with ScriptedAgent() as agent:
        controller = Controller(agent)
        controller.outcome = returned("done")
        session = Session(lambda: controller)  # type: ignore[arg-type,return-value]
        handle = CallHandle("0" * 32, session=session)
        with no_new_threads(), pytest.raises(CallLostError, match="cannot be looked for"):
            handle.get(timeout=60)
        assert handle.get(timeout=60) == "done"


def test_progress_may_ask_how_its_call_is() -> None:
    async def finish(call: Call) -> None:
        while not handles:
            await asyncio.sleep(0.01)
        call.progress(1, 2, "half")
        await call.result("end")

    states: list[str] = []
    handles: list[CallHandle] = []
    with ScriptedAgent(f=finish) as agent, spawning(agent, Controller(agent)) as to:
        spawned = to("f", on_progress=lambda *_: states.append(handles[0].status()))
        handles.append(spawned.spawn())
        assert handles[0].get(timeout=60) == "end"
    assert len(states) == 1


def test_what_is_wrong_with_a_handle_is_raised_to_all_who_wait_and_asked_again_later() -> None:
    class Forgetful(Controller):
        def get_call(self, call_id: str) -> CallView:
            super().get_call(call_id)
            if self.outcome is None:
                raise ResultExpiredError("there is no such call")
            return super().get_call(call_id)

    async def main() -> list[object]:
        both = asyncio.gather(handle.get_async(), handle.get_async(), return_exceptions=True)
        while not controller.was_asked.is_set():
            await asyncio.sleep(0)
        controller.answers.set()
        return list(await both)

    with ScriptedAgent() as agent:
        controller = Forgetful(agent)
        controller.answers.clear()
        session = Session(lambda: controller)  # type: ignore[arg-type,return-value]
        handle = CallHandle("0" * 32, session=session)
        assert {type(error) for error in asyncio.run(main())} == {ResultExpiredError}
        controller.outcome = returned("there")
        assert handle.get(timeout=60) == "there"


def test_progress_of_a_spawned_call_is_told_to_its_caller() -> None:
    async def work(call: Call) -> None:
        call.progress(1, 2, "half")
        await call.result()

    reports: list[Any] = []
    with ScriptedAgent(work=work) as agent, spawning(agent, Controller(agent)) as to:
        to("work", on_progress=lambda *report: reports.append(report)).spawn().get(timeout=60)
    assert reports == [(1, 2, "half")]


def test_the_agent_of_a_spawned_call_makes_it_again_and_its_caller_does_not() -> None:
    async def failing(call: Call) -> None:
        call.error(WorkerDiedError("died"))

    with ScriptedAgent(failing=failing) as agent, spawning(agent, Controller(agent)) as to:
        handle = to("failing", retries=2, retry_on=(OSError,), backoff=3).spawn(1)
        with pytest.raises(WorkerDiedError):
            handle.result(timeout=60)
        (opened,) = agent.opened
        assert opened.retry == Retry(("builtins.OSError",), 2, 3.0)
