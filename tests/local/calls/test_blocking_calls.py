"""Calls from threads: values, errors, generators, options, lines, signals, many at once."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

from kubetorch.errors import (
    CallTimeoutError,
    RemoteError,
    SerializationError,
    SpecError,
    WorkerDiedError,
)
from kubetorch.sdk.calls.caller import Caller, Target
from tests.local.calling import InThread, caller, route_to, until
from tests.local.scripted_agent import Call, ScriptedAgent, never


async def count(call: Call) -> None:
    """A generator."""
    for number in range(call.args[0]):
        await call.give(number)
    await call.result("returned", streamed=True)


def test_arguments_and_values_travel() -> None:
    async def describe(call: Call) -> None:
        await call.result(call.value)

    with ScriptedAgent(describe=describe) as agent, route_to(agent.locate) as route:
        value = caller(route, "describe")(1, [2, None], key={"a": 1.5})
        assert value == {"args": [1, [2, None]], "kwargs": {"key": {"a": 1.5}}}


def test_arrays_arrive_writable_aligned_and_uncopied() -> None:
    array = np.arange(3_000_000, dtype=np.float64)
    with ScriptedAgent() as agent, route_to(agent.locate) as route:
        (back,) = caller(route, "echo", serialization="pickle")(array)
        assert np.array_equal(back, array)
        assert back.flags.writeable
        assert back.ctypes.data % 64 == 0
        assert back.base is not None


def test_a_200_mb_argument_and_result_travel_while_small_calls_go_on() -> None:
    array = np.zeros(200_000_000, dtype=np.uint8)
    array[::4096] = 7

    with ScriptedAgent() as agent, route_to(agent.locate) as route:
        small = caller(route, "echo")
        small(0)
        large = InThread(caller(route, "echo", serialization="pickle"), array)
        answered = 0
        while large._thread.is_alive():
            assert small(1) == [1]
            answered += 1
        (back,) = large.join().value
        assert np.array_equal(back, array)
        assert answered > 3


def test_arguments_are_let_go_of_once_the_call_has_a_result() -> None:
    async def size(call: Call) -> None:
        await call.result(len(call.body))

    with ScriptedAgent(size=size) as agent, route_to(agent.locate) as route:
        array = np.zeros(5_000_000, dtype=np.uint8)
        reference = weakref.ref(array)
        assert caller(route, "size", serialization="pickle")(array) > 5_000_000
        del array
        until(lambda: reference() is None)


def test_the_users_exception_is_raised_as_itself_with_the_remote_traceback() -> None:
    async def fail(call: Call) -> None:
        try:
            {}["missing"]
        except KeyError as error:
            call.error(error)

    with ScriptedAgent(fail=fail) as agent, route_to(agent.locate) as route:
        with pytest.raises(KeyError, match="missing") as raised:
            caller(route, "fail")()
        error = raised.value
        assert error.pod_name == "fake-0"
        assert '{}["missing"]' in error.remote_traceback
        assert "Remote traceback in fake-0" in str(error.__cause__)
        # What the user sees of this package are two frames.
        files = [Path(entry.path).name for entry in raised.traceback]
        assert files == ["test_blocking_calls.py", "caller.py"]


def test_an_exception_that_ends_processes_arrives_as_a_remote_error() -> None:
    async def leave(call: Call) -> None:
        call.error(SystemExit(3))

    with (
        ScriptedAgent(leave=leave) as agent,
        route_to(agent.locate) as route,
        pytest.raises(RemoteError, match="SystemExit"),
    ):
        caller(route, "leave")()


def test_arguments_that_cannot_travel_are_refused_here() -> None:
    with ScriptedAgent() as agent, route_to(agent.locate) as route:
        with pytest.raises(SerializationError, match=r"^args\[0\] is an object"):
            caller(route, "echo")(object())
        target = Target("default", "service", "echo", allowed=("json",))
        with pytest.raises(SerializationError, match="'pickle' not allowed"):
            Caller(target, route)(1, serialization="pickle")
        assert agent.opened == []


def test_a_generator_is_an_iterator_whose_values_come_as_they_are_made() -> None:
    with ScriptedAgent(count=count) as agent, route_to(agent.locate) as route:
        assert list(caller(route, "count")(5)) == [0, 1, 2, 3, 4]
        assert list(caller(route, "count")(0)) == []

        def returned() -> object:
            return (yield from caller(route, "count")(2))

        generator = returned()
        assert [next(generator), next(generator)] == [0, 1]
        with pytest.raises(StopIteration) as stop:
            next(generator)
        assert stop.value.value == "returned"


def test_a_generator_known_as_one_starts_without_waiting_for_its_first_value() -> None:
    with ScriptedAgent(count=never) as agent, route_to(agent.locate) as route:
        target = Target("default", "service", "count", kind="generator")
        values = Caller(target, route)()
        until(lambda: agent.opened)
        values.close()


def test_a_generator_that_raises_after_values_raises_after_them() -> None:
    async def half(call: Call) -> None:
        await call.give(1)
        call.error(ValueError("no more"))

    with ScriptedAgent(half=half) as agent, route_to(agent.locate) as route:
        values = caller(route, "half")()
        assert next(values) == 1
        with pytest.raises(ValueError, match="no more"):
            next(values)
        with pytest.raises(StopIteration):
            next(values)


def test_a_generator_is_as_fast_as_its_consumer() -> None:
    given_count = 0

    async def blocks(call: Call) -> None:
        nonlocal given_count
        for _ in range(100):
            await call.give("x" * 1_000_000)
            given_count += 1
        await call.result(streamed=True)

    with ScriptedAgent(blocks=blocks) as agent, route_to(agent.locate) as route:
        values = caller(route, "blocks")()
        next(values)
        time.sleep(0.3)
        # A window of 8 MiB, and what was taken.
        assert given_count <= 10
        assert sum(len(value) for value in values) == 99_000_000


@pytest.mark.parametrize("ending", ["close", "forget", "with"])
def test_leaving_a_generator_cancels_it(ending: str) -> None:
    async def endless(call: Call) -> None:
        while not call.is_cancelled.is_set():
            await call.give("value" * 1000)
        call.error(RuntimeError("cancelled"))

    with ScriptedAgent(endless=endless) as agent, route_to(agent.locate) as route:
        values = caller(route, "endless")()
        next(values)
        if ending == "close":
            values.close()
        elif ending == "with":
            with values:
                next(values)
        del values
        until(lambda: agent.cancelled)


def test_lines_are_printed_in_order_before_the_value(capsys: pytest.CaptureFixture[str]) -> None:
    async def speak(call: Call) -> None:
        await call.log("plain")
        await call.log("told", "logger", "INFO")
        await call.log("hidden", "logger", "DEBUG")
        await call.log("grüße\twith [brackets] and 100 %")
        await call.result("value")

    with ScriptedAgent(speak=speak) as agent, route_to(agent.locate) as route:
        print(caller(route, "speak")())
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "(fake-0) plain"
        assert lines[1].startswith("(fake-0) 19")
        assert lines[1].endswith(" | INFO | told")
        assert lines[2:] == ["(fake-0) grüße\twith [brackets] and 100 %", "value"]


def test_lines_go_where_output_goes_at_the_time() -> None:
    async def speak(call: Call) -> None:
        await call.log("here")
        await call.result()

    with ScriptedAgent(speak=speak) as agent, route_to(agent.locate) as route:
        caller(route, "speak")
        redirected, real = io.StringIO(), sys.stdout
        sys.stdout = redirected
        try:
            caller(route, "speak")()
        finally:
            sys.stdout = real
        assert redirected.getvalue() == "(fake-0) here\n"


def test_a_closed_standard_output_is_said_once_and_disturbs_no_call() -> None:
    async def speak(call: Call) -> None:
        await call.log("one")
        await call.log("two")
        await call.result("value")

    with ScriptedAgent(speak=speak) as agent, route_to(agent.locate) as route:
        closed, real = io.StringIO(), sys.stdout
        closed.close()
        sys.stdout = closed
        try:
            with pytest.warns(UserWarning, match="cannot be written") as warned:
                assert caller(route, "speak")() == "value"
            assert len(warned) == 1
            assert caller(route, "speak")() == "value"
        finally:
            sys.stdout = real


def test_more_lines_than_fit_into_the_window_all_arrive(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def speak(call: Call) -> None:
        for number in range(3000):
            await call.log(f"{number} {'x' * 10_000}")
        await call.result()

    with ScriptedAgent(speak=speak) as agent, route_to(agent.locate) as route:
        caller(route, "speak")()
        lines = capsys.readouterr().out.splitlines()
        assert [int(line.split()[1]) for line in lines] == list(range(3000))


def test_progress_is_told_step_by_step() -> None:
    async def work(call: Call) -> None:
        for step in range(3):
            call.progress(step, 3, f"step {step}")
        await call.result("done")

    reports: list[tuple[float, float | None, str | None]] = []
    with ScriptedAgent(work=work) as agent, route_to(agent.locate) as route:
        tell = caller(route, "work", on_progress=lambda *step: reports.append(step))
        assert tell() == "done"
    assert reports == [(0, 3, "step 0"), (1, 3, "step 1"), (2, 3, "step 2")]


def test_a_timeout_is_kept_even_if_the_agent_says_nothing() -> None:
    with ScriptedAgent(never=never) as agent, route_to(agent.locate) as route:
        caller(route, "echo")(1)  # there is a connection
        begin = time.monotonic()
        with pytest.raises(CallTimeoutError, match=r"within its timeout of 1.5 s"):
            caller(route, "never", timeout=1.5)()
        assert 1.5 < time.monotonic() - begin < 60
        assert 0 < agent.opened[-1].timeout <= 1.5
        until(lambda: agent.cancelled)


def test_a_worker_that_died_is_raised_or_retried_under_the_same_key() -> None:
    async def dying(call: Call) -> None:
        if len(agent.opened) % 3:
            call.error(WorkerDiedError("the worker was killed", exit_code=-9))
        else:
            await call.result("third")

    with ScriptedAgent(dying=dying) as agent, route_to(agent.locate) as route:
        with pytest.raises(WorkerDiedError) as raised:
            caller(route, "dying")()
        assert raised.value.exit_code == -9
        agent.opened.clear()
        assert caller(route, "dying", retries=2, idempotency_key="mine")() == "third"
        assert [meta.idempotency_key for meta in agent.opened] == ["mine"] * 3


def test_options_reach_the_agent() -> None:
    with ScriptedAgent() as agent, route_to(agent.locate) as route:
        base = caller(route, "echo")
        assert base(1, stream_logs=False) == [1]
        base.options(idempotency_key="k", request_id="r")(1)
        base(1)
        first, second, third = agent.opened
        assert (first.stream_logs, second.stream_logs) == (False, True)
        assert (second.idempotency_key, second.request_id) == ("k", "r")
        assert third.idempotency_key is None
        assert len(third.request_id) == 10
        assert third.request_id != first.request_id


def test_a_reserved_keyword_that_the_user_declares_is_the_users() -> None:
    async def describe(call: Call) -> None:
        await call.result(call.value["kwargs"])

    with ScriptedAgent(describe=describe) as agent, route_to(agent.locate) as route:
        declared = frozenset({"workers", "serialization"})
        target = Target("default", "service", "describe", declared=declared)
        value = Caller(target, route)(workers=3, serialization="mine", timeout=4)
        assert value == {"workers": 3, "serialization": "mine", "timeout": 4}
        with pytest.raises(SpecError, match="workers= belongs to distributed services"):
            caller(route, "describe")(workers=3)


def test_32_threads_share_one_connection() -> None:
    with ScriptedAgent() as agent, route_to(agent.locate) as route:
        echo = caller(route, "echo")

        def work(thread: int) -> list[object]:
            return [echo(thread, number) for number in range(100)]

        threads = [InThread(work, thread) for thread in range(32)]
        for index, thread in enumerate(threads):
            assert thread.join().value == [[index, number] for number in range(100)]
        assert agent.connects == 1


def test_500_calls_at_once_with_a_slow_reader_all_end() -> None:
    async def large(call: Call) -> None:
        await call.result(call.args[0] * 100_000)

    with ScriptedAgent(large=large) as agent, route_to(agent.locate) as route:
        calls = [InThread(caller(route, "large"), chr(97 + i % 26)) for i in range(500)]
        assert all(call.join().value == chr(97 + i % 26) * 100_000 for i, call in enumerate(calls))


SCRIPT = """
import signal, sys, time
from kubetorch.sdk.calls.route import Location
from kubetorch.sdk.calls.caller import Caller, Target
from kubetorch.sdk.calls.route import Route

url = sys.argv[1]
route = Route("service", lambda: Location((url,), "t"))

def caller(name):
    return Caller(Target("default", "service", name), route)
"""


def _program(agent: ScriptedAgent, body: str) -> subprocess.Popen[str]:
    source = SCRIPT + textwrap.dedent(body)
    return subprocess.Popen(
        [sys.executable, "-c", source, agent.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_ctrl_c_ends_a_blocking_call_and_cancels_it_there() -> None:
    with ScriptedAgent(never=never) as agent:
        program = _program(
            agent,
            """
            begin = time.monotonic()
            try:
                caller("never")()
            except KeyboardInterrupt:
                print("interrupted")
            print(caller("echo")(1))
            """,
        )
        until(lambda: agent.opened)
        program.send_signal(signal.SIGINT)
        out, _ = program.communicate(timeout=60)
        assert out.split("\n")[:2] == ["interrupted", "[1]"]
        assert agent.cancelled == ["cancelled by the caller"]
        assert agent.connects == 1


def test_a_program_that_ends_leaves_its_calls_cancelled() -> None:
    with ScriptedAgent(never=never) as agent:
        program = _program(
            agent,
            """
            import threading
            threading.Thread(target=caller("never"), daemon=True).start()
            caller("echo")(1)
            """,
        )
        assert program.wait(60) == 0
        until(lambda: agent.close_codes == [1000])
        program.communicate()


def test_signals_that_raise_at_any_instruction_break_no_later_call() -> None:
    with ScriptedAgent() as agent:
        program = _program(
            agent,
            """
            import random, threading
            class Alarm(BaseException): pass
            is_armed = False
            def alarm(*_):
                if is_armed: raise Alarm
            signal.signal(signal.SIGALRM, alarm)
            echo = caller("echo")
            is_over, others = threading.Event(), 0
            def other():
                global others
                while not is_over.is_set():
                    assert echo("other", others) == ["other", others]
                    others += 1
            thread = threading.Thread(target=other)
            thread.start()
            right = alarms = 0
            end = time.monotonic() + 2
            while time.monotonic() < end or (
                min(right, alarms, others) <= 100 and time.monotonic() < end + 30
            ):
                try:
                    is_armed = True
                    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00002, 0.002))
                    for number in range(20):
                        assert echo(right, number) == [right, number]
                        right += 1
                    is_armed = False
                except Alarm:
                    is_armed = False
                    alarms += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            is_over.set()
            thread.join(30)
            assert not thread.is_alive()
            assert min(right, alarms, others) > 100, (right, alarms, others)
            (stream,) = route._streams.values()
            while stream.calls and time.monotonic() < end + 60:
                time.sleep(0.01)
            assert not stream.calls, stream.calls
            print("right")
            """,
        )
        out, _ = program.communicate(timeout=100)
        assert out == "right\n"


def test_fork_while_other_threads_call() -> None:
    with ScriptedAgent() as agent, route_to(agent.locate) as route:
        echo = caller(route, "echo")
        is_over = threading.Event()

        def work() -> int:
            number = 0
            while not is_over.is_set():
                number += 1
                assert echo(number) == [number]
            return number

        threads = [InThread(work) for _ in range(4)]
        try:
            for _ in range(10):
                pid = os.fork()
                if pid == 0:
                    try:
                        os._exit(0 if echo("child") == ["child"] else 1)
                    finally:
                        os._exit(2)
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        finally:
            is_over.set()
        assert all(thread.join().error is None for thread in threads)


def test_a_call_interrupted_on_a_connection_that_breaks_is_cancelled_there_all_the_same() -> None:
    with ScriptedAgent(never=never) as agent:
        program = _program(
            agent,
            """
            try:
                caller("never")()
            except KeyboardInterrupt:
                (stream,) = route._streams.values()
                stream._disconnect()
                stream._wake.put(None)
            """,
        )
        until(lambda: agent.opened)
        program.send_signal(signal.SIGINT)
        program.communicate(timeout=60)
        until(lambda: agent.close_codes == [1000])
        assert agent.cancelled == ["cancelled by the caller"]
