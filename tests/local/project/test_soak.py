"""Calls and edits for a while: none fails, and nothing that serves them grows beyond a bound."""

from __future__ import annotations

import threading
import time

import psutil
import pytest

import kubetorch as kt
from shared import WHOLE
from tests.local.user_project import UserProject

MB = 1024 * 1024
#: Seconds of the soak; what is there after a third of them is compared with the end.
SECONDS = 600.0 if WHOLE else 6.0
#: Seconds from one edit to the next.
BETWEEN_EDITS = 1.0
CALLERS = 3
#: What a process may have more at the end, such as pages of the allocator; a leak has it per call.
SLACK, MORE_FILES = 30 * MB, 10

SOURCE = """
EDIT = 0

def double(number):
    print("doubles", number)
    return [2 * number, EDIT]
"""


@pytest.fixture(autouse=True)
def service(service_home):
    return service_home


class Soak:
    """Callers, and what they saw."""

    def __init__(self, remote: kt.Fn) -> None:
        self._remote = remote
        self._is_over = threading.Event()
        self.calls = 0
        self.edits_seen: set[int] = set()
        self.wrong: list[object] = []
        self._threads = [threading.Thread(target=self._call) for _ in range(CALLERS)]

    def __enter__(self) -> Soak:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(30)

    def wait_for(self, edit: int) -> None:
        """Until a call has met an edit, or something is wrong."""
        deadline = time.monotonic() + 30
        while edit not in self.edits_seen and not self.wrong:
            assert time.monotonic() < deadline, "no call came to an end"
            time.sleep(0.01)

    def _call(self) -> None:
        number = 0
        while not self._is_over.wait(0.005):
            number += 1
            try:
                if number % 10:
                    doubled, edit = self._remote(number)
                else:
                    doubled, edit = self._remote.spawn(number).get(timeout=30)
            except Exception as error:
                self.wrong.append(error)
                return
            self.calls += 1
            self.edits_seen.add(edit)
            if doubled != 2 * number:
                self.wrong.append((number, doubled))


def used(remote: kt.Fn) -> dict[str, tuple[int, int]]:
    """Memory and open files of the agent, the controller and this program."""
    client = kt.globals.controller_client()
    (pod,) = client.get_workload("default", remote.service_name).pods
    pids = {"agent": pod.pid, "controller": client.get_status().pid, "program": None}
    processes = {name: psutil.Process(pid) for name, pid in pids.items()}
    return {
        name: (process.memory_info().rss, process.num_fds()) for name, process in processes.items()
    }


@pytest.mark.timeout(SECONDS + 90)
def test_soak_of_calls_and_edits(project: UserProject) -> None:
    remote = kt.fn(project.module(SOURCE).double, name="soak").to(kt.Compute(cpus="0.1"))
    begun, edits = time.monotonic(), 0
    before: dict[str, tuple[int, int]] = {}
    with Soak(remote) as soak:
        while time.monotonic() - begun < SECONDS and not soak.wrong:
            edits += 1
            edited = project.module(SOURCE.replace("EDIT = 0", f"EDIT = {edits}"))
            kt.fn(edited.double, name="soak").to(remote.compute)
            time.sleep(BETWEEN_EDITS)
            soak.wait_for(edits)
            if not before and time.monotonic() - begun > SECONDS / 3:
                before = used(remote)
    assert soak.wrong == []
    assert remote(1) == [2, edits]
    after = used(remote)
    print(f"{soak.calls} calls, {edits} edits, {len(soak.edits_seen)} seen: {before} -> {after}")
    assert len(soak.edits_seen) >= edits
    for name, (memory, files) in after.items():
        assert memory < before[name][0] + SLACK, (name, before, after)
        assert files <= before[name][1] + MORE_FILES, (name, before, after)
    remote.teardown()
