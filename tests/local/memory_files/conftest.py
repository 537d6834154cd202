"""An agent with large values, and a census of files in memory: nothing may leak."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_harness import AgentProcess, FakeController
from kubetorch.lib import memory, memory_files
from kubetorch.sdk.calls.attempts import Target
from kubetorch.sdk.calls.caller import Caller
from kubetorch.sdk.calls.options import CallOptions
from kubetorch.sdk.calls.route import Location, Route

SOURCE = """
import os, time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

class Service:
    def __init__(self):
        self.runs = self.produced = 0
    def pid(self): return os.getpid()
    def bump(self, array):
        self.runs += 1
        array += 1
        return array
    def count_runs(self):
        return self.runs
    async def bump_async(self, array):
        return array + 1
    def sealed(self, array):
        address = array.ctypes.data
        for line in Path("/proc/self/maps").read_text().splitlines():
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if begin <= address < end:
                return "kubetorch-value" in line
    def ones(self, count):
        import numpy
        return numpy.ones(count)
    def each(self, count, times):
        import numpy
        for number in range(times):
            self.produced += 1
            yield numpy.full(count, number)
    def count_produced(self):
        return self.produced
    def sleep(self, array, seconds=60):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.01)
    def nap(self, array):
        self.sleep(array, 2)
"""


class Census:
    """Sealed files in memory that a process has open or mapped."""

    def __call__(self, pid: int | None = None) -> int:
        return len(self.files(pid))

    def files(self, pid: int | None = None) -> set[int]:
        """The identities of the files."""
        if pid is None:
            gc.collect()
            memory.trim()
        folder = Path("/proc", str(pid or os.getpid()))
        lines = (folder / "maps").read_text().splitlines()
        nodes = {int(line.split()[4]) for line in lines if memory_files.NAME in line}
        for link in (folder / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it is closed by now
                if memory_files.NAME in str(link.readlink()):
                    nodes.add(link.stat().st_ino)
        return nodes

    def falls_to(self, count: int, pid: int | None = None) -> bool:
        """Whether there are so few soon: a process may still be about to close some."""
        deadline = time.monotonic() + 60
        while self(pid) > count:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


@pytest.fixture
def census() -> Census:
    return Census()


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeController]:
    controller = FakeController(tmp_path_factory.mktemp("controller"))
    yield controller
    controller.close()


@contextmanager
def serving(
    folder: Path, controller: FakeController, source: str = SOURCE, *, port: int = 0
) -> Iterator[AgentProcess]:
    """An agent that serves `Service`."""
    agent = AgentProcess(folder, controller, port=port)
    try:
        observed = controller.deploy(1, source, "Service", kind="cls")
        assert observed.failure is None, observed.failure
        yield agent
    finally:
        agent.stop()


@pytest.fixture(scope="module")
def agent(
    tmp_path_factory: pytest.TempPathFactory, controller: FakeController
) -> Iterator[AgentProcess]:
    with serving(tmp_path_factory.mktemp("agent"), controller) as agent:
        yield agent


Method = Callable[..., Any]


def method_of(route: Route, name: str, **options: Any) -> Method:
    """The caller of a method of the service."""
    kind = "generator" if name == "each" else "function"
    return Caller(Target("default", "demo", "Service", name, kind), route, CallOptions(**options))


@pytest.fixture
def method(agent: AgentProcess) -> Iterator[Callable[..., Method]]:
    """Callers of the methods of the service, on one stream."""
    url = f"http://127.0.0.1:{agent.port}"
    route = Route("demo", lambda: Location((url,), agent.token()))
    yield lambda name, **options: method_of(route, name, **options)
    route.close()
