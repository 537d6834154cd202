"""Calls through everything: the SDK, the local service, agents, workers; faults are real ones."""

from __future__ import annotations

import asyncio
import importlib
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import kubetorch as kt
from kubetorch.errors import CallRefusedError
from kubetorch.sdk import backend
from kubetorch.sdk.calls.handles import CallHandle
from kubetorch.sdk.calls.route import Location
from tests.local.calling import InThread, until, with_longer_timeouts
from tests.local.tcp_relay import Relay

#: Faults end the worker of a class that all tests share: what is said of that is tested elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore::kubetorch.errors.InstanceReplacedWarning")

LAB = """
import asyncio, logging, os, subprocess, sys, threading, time
import kubetorch as kt

class Odd(Exception):
    def __init__(self, number, *, hint):
        super().__init__(f"{number} is odd")
        self.number = number
        self.hint = hint

class Lab:
    def __init__(self):
        self.runs = 0
        self.cancelled = []

    def pid(self): return os.getpid()
    def echo(self, value): return value
    def count(self): self.runs += 1; return self.runs

    def hold(self, path, end):
        with open(path, "a") as file: file.write("ran\\n")
        while not os.path.exists(end): time.sleep(0.01)
        return "done"

    def once(self, path, seconds):
        with open(path, "a") as file: file.write("ran\\n")
        time.sleep(seconds)
        return "done"

    def odd(self, number): raise Odd(number, hint="even ones")

    def sleep(self, seconds, mark=None):
        try:
            if mark: open(mark, "a").close()
            end = time.monotonic() + seconds
            while time.monotonic() < end: time.sleep(0.01)
        except BaseException as error:
            self.cancelled.append(type(error).__name__)
            raise
        return seconds

    async def sleep_async(self, seconds, mark=None):
        try:
            if mark: open(mark, "a").close()
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled.append("async")
            raise
        return seconds

    def was_cancelled(self): return self.cancelled

    def numbers(self, count):
        for number in range(count):
            print("number", number)
            kt.progress(number, count)
            yield number
        return "end"

    async def numbers_async(self, count):
        for number in range(count):
            await asyncio.sleep(0)
            yield number

    def blocks(self, count, size):
        for _ in range(count):
            yield "x" * size

    def speak(self):
        print("printed")
        logging.getLogger("lab").warning("logged")
        sys.stderr.write("to stderr\\n")
        subprocess.run(["echo", "from a subprocess"])
        os.write(1, b"raw\\n")
        print("last")

    def bind(self, a, b=2, *, workers=None): return [a, b, workers]
    def total(self, array): return int(array.sum())
    def same(self, array): return array
    def exit(self, path):
        with open(path, "a") as file: file.write("ran\\n")
        os._exit(3)
    def nothing_json(self): return object()

    def request(self):
        print("inner")
        return sys.modules["kubetorch.pod.user_process.current_call"].request_id()

    def nested(self):
        print("before")
        inner = kt.Cls.from_name("lab").request()
        print("after")
        return [self.request(), inner]
"""


@pytest.fixture(scope="module")
def lab(shared_service_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("laboratory")
    (folder / "pyproject.toml").touch()
    (folder / "lab_module.py").write_text(LAB)
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module("lab_module")
        compute = kt.Compute(cpus="0.1", allowed_serialization=["json", "pickle"])
        yield kt.cls(module.Lab).to(compute)
    finally:
        sys.path.remove(str(folder))
        backend.route(backend.session(), *_name()).close()


def _name() -> tuple[str, str]:
    return "default", "lab"


def _agent_of(lab: Any) -> psutil.Process:
    view = backend.session().ask(lambda session: session.get_workload(*_name()))
    assert view.pods[0].pid
    return psutil.Process(view.pods[0].pid)


def test_values_state_and_signatures(lab: Any) -> None:
    assert lab.echo({"a": [1, None, "ü"]}) == {"a": [1, None, "ü"]}
    first = lab.count()
    assert lab.count() == first + 1
    assert lab.bind(1, b=3, workers=4) == [1, 3, 4]
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        lab.bind()
    with pytest.raises(kt.SpecError, match="workers= belongs to distributed services"):
        lab.echo(1, workers=2)
    with pytest.raises(AttributeError, match="absent"):
        lab.absent()
    with pytest.raises(kt.SerializationError, match=r"^result is an object"):
        lab.nothing_json()


def test_the_users_own_exception_arrives_with_its_attributes(lab: Any) -> None:
    with pytest.raises(sys.modules["lab_module"].Odd) as raised:
        lab.odd(3)
    error = raised.value
    assert (error.number, error.hint, str(error)) == (3, "even ones", "3 is odd")
    assert "in odd" in error.remote_traceback
    assert error.pod_name.startswith("lab-")


def test_generators_of_both_kinds(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    values = lab.numbers(3)
    assert list(values) == [0, 1, 2]
    lines = [line.partition(") ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["number 0", "number 1", "number 2"]
    assert list(lab.numbers_async(4)) == [0, 1, 2, 3]

    async def main() -> list[int]:
        return [value async for value in lab.numbers(3, async_=True)]

    assert asyncio.run(main()) == [0, 1, 2]


def test_a_slow_consumer_holds_its_generator_back(lab: Any) -> None:
    blocks = lab.blocks(60, 1_000_000)
    next(blocks)
    time.sleep(0.5)
    before = psutil.Process(lab.pid()).memory_info().rss
    assert sum(map(len, blocks)) == 59_000_000
    assert before < 400_000_000


def test_all_that_a_call_writes_arrives_in_order(
    lab: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.speak()
    lines = [line.partition(") ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "printed"
    assert lines[1].endswith("| WARNING | logged")
    assert lines[2:] == ["to stderr", "from a subprocess", "raw", "last"]


def test_lines_of_a_nested_call_reach_the_caller_once_under_its_request(
    lab: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    outer, inner = lab.nested.options(request_id="0123456789")()
    assert outer == inner == "0123456789"
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(") ")[2] for line in lines] == ["before", "inner", "after", "inner"]


def test_progress_reaches_a_callback(lab: Any) -> None:
    reports: list[tuple[float, float | None, str | None]] = []
    list(lab.numbers.options(on_progress=lambda *step: reports.append(step))(3))
    # A worker tells of the latest step now and then.
    assert reports[0] == (0, 3, None)
    assert reports[-1] == (2, 3, None)


def test_arrays_travel_both_ways(lab: Any) -> None:
    array = np.arange(25_000_000, dtype=np.float64)
    assert lab.total(array, serialization="pickle") == int(array.sum())
    back = lab.same(array, serialization="pickle")
    assert np.array_equal(back, array)
    assert back.flags.writeable


@pytest.mark.faults
def test_fault_a_worker_killed_in_a_call_is_a_typed_error_at_once(lab: Any, tmp_path: Path) -> None:
    pid = lab.pid()
    call = InThread(lab.sleep, 60, str(tmp_path / "mark"))
    until((tmp_path / "mark").exists)
    begin = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    error = call.join().error
    assert isinstance(error, kt.WorkerDiedError)
    assert error.exit_code == -9
    assert time.monotonic() - begin < 59
    assert lab.pid() != pid


@pytest.mark.faults
def test_fault_a_worker_that_exits_is_retried_when_asked(lab: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with pytest.raises(kt.WorkerDiedError) as raised:
        lab.exit(str(trace))
    assert raised.value.exit_code == 3
    with pytest.raises(kt.WorkerDiedError):
        lab.exit.options(retries=2)(str(trace))
    assert trace.read_text() == "ran\n" * 4


@pytest.mark.faults
def test_fault_an_agent_killed_in_a_call_is_a_typed_error(lab: Any, tmp_path: Path) -> None:
    agent = _agent_of(lab)
    call = InThread(lab.sleep, 60, str(tmp_path / "mark"))
    until((tmp_path / "mark").exists)
    agent.kill()
    assert isinstance(call.join().error, kt.AgentDiedError)
    assert lab.echo("again") == "again"


@pytest.mark.faults
def test_fault_an_agent_stopped_in_a_call_is_a_timeout(lab: Any) -> None:
    agent = _agent_of(lab)
    lab.echo(1)
    agent.suspend()
    try:
        begin = time.monotonic()
        with pytest.raises(kt.CallTimeoutError):
            lab.echo.options(timeout=0.3)(1)
        assert time.monotonic() - begin < 59
    finally:
        agent.resume()
    assert lab.echo("again") == "again"


@pytest.mark.faults
def test_fault_a_connection_cut_in_a_call_resumes_and_runs_once(lab: Any, tmp_path: Path) -> None:
    lab.echo(1)
    route = backend.route(backend.session(), *_name())
    view = backend.session().ask(lambda session: session.get_workload(*_name()))
    trace = tmp_path / "trace"
    with Relay(int(view.pods[0].url.rpartition(":")[2])) as relay:
        route.locate(Location((relay.url,), view.token))
        call = InThread(lab.hold, str(trace), str(tmp_path / "end"))
        until(trace.exists)
        relay.cut()
        until(lambda: relay.accepted >= 2)
        (tmp_path / "end").touch()
        assert call.join().value == "done"
        assert trace.read_text() == "ran\n"
        route.locate(None)


@pytest.mark.faults
def test_fault_a_local_service_killed_does_not_disturb_calls(lab: Any) -> None:
    pid = backend.controller_client().get_status().pid
    call = InThread(lab.sleep, 0.5)
    time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    assert call.join().value == 0.5
    assert lab.echo(2) == 2
    assert backend.session().ask(lambda session: session.get_status()).pid != pid


@pytest.mark.parametrize("method", ["sleep", "sleep_async"])
def test_a_timeout_reaches_the_process(lab: Any, tmp_path: Path, method: str) -> None:
    pid = lab.pid()
    before = len(lab.was_cancelled())

    def attempt(timeout: float) -> bool:
        mark = tmp_path / str(timeout)
        with pytest.raises(kt.CallTimeoutError):
            getattr(lab, method).options(timeout=timeout)(600, str(mark))
        return mark.exists()

    with_longer_timeouts(attempt)
    until(lambda: len(lab.was_cancelled()) > before)
    assert lab.pid() == pid


def test_ctrl_c_reaches_the_process(lab: Any, tmp_path: Path) -> None:
    before = len(lab.was_cancelled())
    mark = tmp_path / "mark"
    program = _program(
        f"""
        try:
            lab.sleep(60, {str(mark)!r})
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        """
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    until(mark.exists)
    program.send_signal(signal.SIGINT)
    assert program.communicate(timeout=60)[0] == "interrupted\n"
    until(lambda: len(lab.was_cancelled()) == before + 1)


def test_500_calls_at_once(lab: Any) -> None:
    async def main() -> list[int]:
        echo = lab.echo.options(async_=True)
        return await asyncio.gather(*(echo(number) for number in range(500)))

    assert asyncio.run(main()) == list(range(500))
    assert list(lab.echo.map(range(500), window=100)) == list(range(500))


def test_a_spawned_call_is_found_by_its_id_from_another_process(lab: Any, tmp_path: Path) -> None:
    end = tmp_path / "end"
    handle = lab.hold.spawn(str(tmp_path / "trace"), str(end))
    assert handle.status() == "running"
    assert not handle.done()
    program = _program(
        f"""
        handle = CallHandle.from_id({handle.id!r})
        print(handle.get(timeout=60), handle.status())
        """
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    end.touch()
    out, _ = program.communicate(timeout=60)
    assert out == "done succeeded\n"
    assert handle.get() == "done"
    assert handle.done()
    assert pickle.loads(pickle.dumps(handle)).get(timeout=30) == "done"
    assert handle in CallHandle.list(*_name())


def test_a_spawned_call_outlives_its_program(lab: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    program = _program(f"print(lab.once.spawn({str(trace)!r}, 0.5).id)")
    out, _ = program.communicate(timeout=60)
    call_id = out.split()[1]
    assert CallHandle.from_id(call_id).get(timeout=60) == "done"
    assert trace.read_text() == "ran\n"


def test_spawned_calls_fail_are_cancelled_awaited_and_forgotten(lab: Any) -> None:
    failing = lab.odd.spawn(3)
    with pytest.raises(sys.modules["lab_module"].Odd, match="3 is odd"):
        failing.get(timeout=60)
    assert failing.status() == "failed"
    with pytest.raises(sys.modules["lab_module"].Odd, match="3 is odd"):
        CallHandle.from_id(failing.id).get(timeout=60)

    endless = lab.sleep.spawn(60)
    with pytest.raises(TimeoutError, match="it goes on"):
        endless.get(timeout=0.1)
    until(lambda: endless.id in [handle.id for handle in CallHandle.list(*_name())])
    CallHandle.from_id(endless.id).cancel()
    with pytest.raises(kt.CallCancelledError):
        endless.get(timeout=60)
    assert endless.status() == "cancelled"
    endless = lab.sleep.spawn(60)
    endless.cancel()
    with pytest.raises(kt.CallCancelledError):
        endless.get(timeout=60)

    async def main() -> list[Any]:
        return await asyncio.gather(*(lab.echo.spawn(number) for number in range(5)))

    assert asyncio.run(main()) == [0, 1, 2, 3, 4]
    with pytest.raises(kt.ResultExpiredError):
        CallHandle.from_id("0" * 32).get(timeout=30)


def test_an_idempotency_key_makes_two_calls_one(lab: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    once = lab.once.options(idempotency_key=f"key-{tmp_path}")
    calls = [InThread(once, str(trace), 0.3) for _ in range(3)]
    assert [call.join().value for call in calls] == ["done"] * 3
    assert once(str(trace), 0.3) == "done"
    assert trace.read_text() == "ran\n"


def test_each_item_of_a_map_has_an_idempotency_key_of_its_own(lab: Any, tmp_path: Path) -> None:
    keyed = lab.echo.options(idempotency_key=f"map-{tmp_path}")
    assert list(keyed.map([1, 2, 3])) == [1, 2, 3]
    assert list(keyed.map([4, 5, 6])) == [1, 2, 3]
    assert list(keyed.starmap([(7,)], ordered=False)) == [1]

    async def values() -> list[int]:
        return [value async for value in keyed.map_async([8, 9])]

    assert asyncio.run(values()) == [1, 2]


def test_a_generator_that_is_repeated_with_its_key_is_an_error_and_not_empty(
    lab: Any, tmp_path: Path
) -> None:
    keyed = lab.numbers.options(idempotency_key=f"numbers-{tmp_path}")
    assert list(keyed(3)) == [0, 1, 2]
    begun = time.monotonic()
    with pytest.raises(CallRefusedError, match="streams its values, which are not kept"):
        list(keyed(3))
    running = lab.blocks.options(idempotency_key=f"blocks-{tmp_path}")
    with running(1000, 100_000) as values:
        next(values)
        with pytest.raises(CallRefusedError, match="nobody can join it"):
            list(running(1000, 100_000))
    assert time.monotonic() - begun < 30
    none = lab.numbers.options(idempotency_key=f"none-{tmp_path}")
    assert list(none(0)) == list(none(0)) == []


def test_threads_share_one_connection_and_leave_none_behind(lab: Any) -> None:
    threads = [InThread(lambda: [lab.echo(n) for n in range(50)]) for _ in range(16)]
    assert all(thread.join().value == list(range(50)) for thread in threads)
    assert len(backend.route(backend.session(), *_name())._streams) == 1
    assert threading.active_count() < 30


def _program(body: str) -> subprocess.Popen[str]:
    source = textwrap.dedent(
        """
        import kubetorch as kt
        from kubetorch.sdk.calls.handles import CallHandle
        lab = kt.Cls.from_name("lab")
        lab.echo(1)
        print("ready", flush=True)
        """
    ) + textwrap.dedent(body)
    return subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
