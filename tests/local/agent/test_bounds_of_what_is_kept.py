"""What pods keep of calls and prints: not in memory, and bounded on disk."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

import kubetorch as kt
from kubetorch.wire.messages import PodView
from tests.local.user_project import UserProject

MB = 1024 * 1024
#: What a pod may have more than before any call: pages of code, the allocator's.
SLACK = 40 * MB

SOURCE = """
import os

def make(size):
    return b"x" * size

def text(size):
    return "x" * size

def values(size, count):
    for _ in range(count):
        yield b"x" * size

def pid():
    return os.getpid()

def talk(size):
    line = "y" * 1023
    for _ in range(size // 1024):
        print(line)
"""


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture
def deploy(tmp_path):
    """Deploys a function of the module, and makes one warm call."""
    project = UserProject(tmp_path / "shop")
    module = project.module(SOURCE)

    def deploy(name: str, *warm: object):
        compute = kt.Compute(cpus="0.1", allowed_serialization=["json", "pickle"])
        remote = kt.fn(getattr(module, name), name=f"{name}{project.suffix}").to(compute)
        result = remote.options(serialization="pickle")(*warm)
        assert name != "values" or list(result)
        return remote

    yield deploy
    for view in kt.globals.controller_client().list_workloads():
        kt.Module.from_name(view.spec.name, view.spec.namespace).teardown()


def pod_of(remote: kt.Module) -> PodView:
    view = kt.globals.controller_client().get_workload("default", remote.service_name)
    return view.pods[0]


def folder_of(remote: kt.Module) -> Path:
    return Path(os.environ["KT_LOCAL_DIR"], "pods", "default", pod_of(remote).name)


def memory(remote: kt.Module) -> int:
    """Bytes that the agent has, with what it shares with its workers."""
    return psutil.Process(pod_of(remote).pid).memory_info().rss


def assert_back(remote: kt.Module, before: int, seconds: float = 40.0) -> None:
    """It is five seconds; a busy machine gets more."""
    end = time.monotonic() + seconds
    while (now := memory(remote)) > before + SLACK:
        assert time.monotonic() < end, f"{(now - before) // MB} MB are still there"
        time.sleep(0.2)


def test_values_leave_the_agent_of_an_idle_service(deploy):
    remote = deploy("make", 10)
    before = memory(remote)
    for _ in range(2):
        assert len(remote.options(serialization="pickle")(200 * MB)) == 200 * MB
    assert_back(remote, before)


def test_values_leave_the_agent_of_a_busy_service(deploy):
    remote = deploy("make", 10)
    before, stops = memory(remote), threading.Event()

    def work() -> None:
        for number in itertools.count():
            if stops.wait(0.01):
                return
            remote.options(serialization="pickle")(MB if number % 50 == 0 else 10)

    busy = threading.Thread(target=work)
    busy.start()
    try:
        remote.options(serialization="pickle")(200 * MB)
        assert_back(remote, before)
    finally:
        stops.set()
        busy.join()


def test_values_of_generators_and_of_http_leave_the_agent(deploy):
    remote = deploy("values", 10, 1)
    before = memory(remote)
    assert sum(map(len, remote.options(serialization="pickle")(50 * MB, 3))) == 150 * MB
    assert_back(remote, before)

    remote = deploy("text", 10)
    before = memory(remote)
    view = kt.globals.controller_client().get_workload("default", remote.service_name)
    request = urllib.request.Request(
        f"{view.pods[0].url}/text",
        json.dumps({"args": [30 * MB]}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {view.token}"},
    )
    for _ in range(3):
        assert len(urllib.request.urlopen(request).read()) == 30 * MB + 2
    assert_back(remote, before)


def test_a_killed_worker_leaves_nothing_in_its_agent(deploy):
    remote = deploy("make", 10)
    before = memory(remote)
    (worker,) = (
        child
        for child in psutil.Process(pod_of(remote).pid).children(recursive=True)
        if child.memory_info().rss and not child.children()
    )
    remote.options(serialization="pickle")(200 * MB)
    os.kill(worker.pid, signal.SIGKILL)
    assert_back(remote, before)


def test_kept_outcomes_lie_on_disk(deploy):
    remote = deploy("make", 10)
    before = memory(remote)
    keyed = remote.options(serialization="pickle", idempotency_key="key")
    assert len(keyed(60 * MB)) == 60 * MB
    handle = remote.options(serialization="pickle").spawn(100 * MB)
    assert_back(remote, before)
    files = list((folder_of(remote) / "outcomes").iterdir())
    assert 60 * MB <= sum(file.stat().st_size for file in files) <= 80 * MB
    assert len(keyed(1)) == 60 * MB  # the first one's
    assert len(handle.get(timeout=30)) == 100 * MB
    assert_back(remote, before)


def test_the_log_of_an_agent_is_bounded_while_it_grows(deploy):
    remote = deploy("talk", 1024)
    remote.options(stream_logs=False)(40 * MB)
    end = time.monotonic() + 20
    while True:  # in a moment of its rotation there is only one
        files = {file.name: file for file in folder_of(remote).glob("agent.log*")}
        if files.keys() == {"agent.log", "agent.log.1"} or time.monotonic() > end:
            break
        time.sleep(0.05)
    assert sorted(files) == ["agent.log", "agent.log.1"]
    assert sum(file.stat().st_size for file in files.values()) < 24 * MB
