"""References: a value goes once to an agent, and once from there to a worker."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

import kubetorch as kt
from agent_harness import AgentProcess, CallFailed, FakeController, StreamClient, free_port
from kubetorch.errors import CallRefusedError, ReferenceLostError
from kubetorch.lib import memory_files
from kubetorch.sdk.calls.route import Location, Route
from kubetorch.sdk.tuning import LIMITS
from kubetorch.wire import frames
from kubetorch.wire.frames import Kind
from tests.local.calling import InThread
from tests.local.memory_files.conftest import Census, method_of, serving

pytestmark = [
    pytest.mark.skipif(not memory_files.IS_AVAILABLE, reason="Linux alone seals files"),
    # Tests kill workers.
    pytest.mark.filterwarnings("ignore::kubetorch.errors.InstanceReplacedWarning"),
]

SIZE = 100_000  # numbers of 8 bytes
SOURCE = """
import os, time

class Service:
    kept = None
    def pid(self): return os.getpid()
    def first(self, array, number=0):
        return float(array[number])
    def overwrite(self, array):
        array[:] = 7
        return float(array[0])
    def keep(self, refs):
        self.kept = refs[0]
    def forget(self):
        self.kept = None
    def kept_value(self):
        return float(self.kept.get()[5])
    def nap(self, array, seconds):
        time.sleep(seconds)
        return float(array[1])
"""
Method = Callable[..., Any]


@pytest.fixture(scope="module")
def agent(
    tmp_path_factory: pytest.TempPathFactory, controller: FakeController
) -> Iterator[AgentProcess]:
    with serving(tmp_path_factory.mktemp("agent"), controller, SOURCE) as agent:
        yield agent


@pytest.fixture(autouse=True)
def _leaves_nothing(census: Census, agent: AgentProcess) -> Iterator[None]:
    before = census()
    yield
    gc.collect()
    assert census.falls_to(before)
    assert agent.process.poll() is not None or census.falls_to(0, agent.pid)


def numbers(begin: float = 0) -> numpy.ndarray[Any, Any]:
    return numpy.arange(begin, begin + SIZE)


def test_all_calls_use_the_memory_that_the_program_wrote(
    method: Callable[..., Method], census: Census, agent: AgentProcess
) -> None:
    first, worker = method("first"), method("pid")()
    ref = kt.ref(numbers())
    assert [first(ref, number) for number in range(20)] == list(range(20))
    assert [first(array=ref, number=3), first(number=4, array=ref)] == [3, 4]
    assert census.files(worker) == census.files(agent.pid) == census.files()
    assert census() == 1
    del ref
    assert census.falls_to(0, worker)
    assert census.falls_to(0, agent.pid)


def test_a_call_that_writes_changes_its_own_view_alone(method: Callable[..., Method]) -> None:
    first, overwrite = method("first"), method("overwrite")
    ref = kt.ref(numbers())
    mine = ref.get()
    assert [overwrite(ref), first(ref, 9), overwrite(ref)] == [7, 9, 7]
    mine[:] = 3
    assert (ref.get()[9], first(ref, 9), mine[9]) == (9, 9, 3)


def test_a_reference_that_an_object_in_the_pod_keeps_outlives_the_one_of_the_program(
    method: Callable[..., Method], census: Census, agent: AgentProcess
) -> None:
    worker = method("pid")()
    ref = kt.ref(numbers())
    method("keep")([ref])
    del ref
    assert census.falls_to(0, agent.pid)
    assert method("kept_value")() == 5
    method("forget")()
    assert census.falls_to(0, worker)


def test_a_call_keeps_its_value_although_the_program_deletes_the_reference(
    method: Callable[..., Method],
) -> None:
    ref = kt.ref(numbers())
    call = InThread(method("nap"), ref, 0.3)
    del ref
    assert call.join().value == 1


def test_values_that_cannot_go_in_files_go_on_the_stream_once(
    method: Callable[..., Method], agent: AgentProcess, census: Census
) -> None:
    folder = agent.root / "memory"
    folder.chmod(0o755)
    try:
        first, ref = method("first"), kt.ref(numbers())
        assert [first(ref, number) for number in range(5)] == list(range(5))
        assert census(agent.pid) == 1
        assert not census.files(agent.pid) & census.files()
        small = kt.ref(numpy.arange(3.0))
        assert [first(small, number) for number in range(3)] == [0, 1, 2]
    finally:
        folder.chmod(0o700)


def test_a_new_worker_gets_the_value_from_its_agent(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, census: Census
) -> None:
    controller = FakeController(tmp_path_factory.mktemp("controller"))
    ref = kt.ref(numbers())
    with contextlib.closing(controller), serving(tmp_path, controller, SOURCE) as agent:
        route = Route("demo", lambda: Location((f"http://127.0.0.1:{agent.port}",), agent.token()))
        first, pid = method_of(route, "first", retries=3), method_of(route, "pid", retries=3)
        assert first(ref, 1) == 1
        os.kill(pid(), signal.SIGKILL)
        assert first(ref, 2) == 2
        assert census.files(pid()) == census.files()
        route.close()


def test_an_agent_that_was_killed_and_comes_back_gets_the_value_again(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    port, ref = free_port(), kt.ref(numbers())
    controller = FakeController(tmp_path_factory.mktemp("controller"))
    agents: list[AgentProcess] = []
    route = Route("demo", lambda: Location((f"http://127.0.0.1:{port}",), agents[-1].token()))
    first = method_of(route, "first")
    for name in "ab":
        with serving(tmp_path / name, controller, SOURCE, port=port) as agent:
            agents.append(agent)
            assert first(ref, 5) == 5
            assert first(ref, 6) == 6
            agent.kill()
    route.close()
    controller.close()


def test_a_program_that_lacks_the_value_names_the_reference_and_its_creator(
    method: Callable[..., Method],
) -> None:
    lost = kt.Ref("x" * 22, "laptop, process 7", 800, None, {})
    with pytest.raises(ReferenceLostError, match=r"x{8}….*laptop, process 7.*is not in"):
        lost.get()
    with pytest.raises(ReferenceLostError, match="is not in this pod") as raised:
        method("first")(lost)
    assert raised.value.reference == "x" * 22


def test_a_call_may_have_so_many_references(method: Callable[..., Method]) -> None:
    ref = kt.ref(3)
    assert method("keep")([ref] * (LIMITS.call_references + 1)) is None
    method("forget")()
    refs = [kt.ref(number) for number in range(LIMITS.call_references + 1)]
    with pytest.raises(kt.SerializationError, match="251 references; at most 250"):
        method("keep")(refs)


# ------------------------------------------------------------------------- hostile clients


def send_value(client: StreamClient, number: int, identity: str, **body: Any) -> dict[str, Any]:
    """The failure of a value that a client sends, empty if the agent takes it."""
    declared = {"codec": "values", "sizes": (3,), "total": 3} | body
    meta = frames.Open(f"value-{number}", "", frames.Body(**declared), reference=identity)
    client.send(Kind.OPEN, number, meta, b"[7]" if declared["total"] == 3 else b"")
    try:
        client.result(number)
    except CallFailed as failed:
        return dict(failed.failure)
    return {}


def test_hostile_values_are_refused_and_the_stream_goes_on(agent: AgentProcess) -> None:
    client = agent.client()
    with contextlib.closing(client):
        assert send_value(client, 1, "../../etc")["code"] == "serialization"
        assert send_value(client, 2, "y" * 22, sizes=(2,))["code"] == "serialization"
        huge = send_value(client, 3, "y" * 22, sizes=(2**50,), total=2**50)
        assert huge["code"] == CallRefusedError.code
        assert "no room" in huge["message"]
        client.open(4, 0, name="Service", method="first", references=("y" * 22,))
        with pytest.raises(CallFailed, match="is not in this pod"):
            client.result(4)
        client.send(Kind.RELEASE, 0, frames.Release(("y" * 22, "../")))
        assert send_value(client, 5, "y" * 22) == {}
        assert send_value(client, 6, "y" * 22) == {}
        assert client.call(7, [1.5], name="Service", method="first", references=("y" * 22,)) == 1.5
