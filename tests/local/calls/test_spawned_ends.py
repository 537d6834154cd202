"""Spawned calls whose program, agent or service ends: each runs, or its record says why not."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import kubetorch as kt
from shared import WHOLE
from tests.local.user_project import UserProject

#: Programs, and what each of them spawns.
PROGRAMS, CALLS = (100, 1000) if WHOLE else (1, 300)

NOTE = """
import sys
import kubetorch as kt

def note(path, number, *rest):
    with open(path, "a") as file:
        file.write(f"{number}\\n")

if __name__ == "__main__":
    remote = kt.fn(note).to(kt.Compute(cpus="0.1"))
    path, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
"""


SLEEP = """
import time
import kubetorch as kt

def sleep(seconds, path):
    with open(path, "a") as file:
        file.write("1\\n")
    time.sleep(seconds)
"""


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture
def project(tmp_path):
    yield UserProject(tmp_path / "shop")
    for view in kt.globals.controller_client().list_workloads():
        kt.Module.from_name(view.spec.name, view.spec.namespace).teardown()


def write(project: UserProject, name: str, body: str) -> Path:
    return project.write(name, NOTE + textwrap.indent(textwrap.dedent(body), "    "))


def noted(path: Path, count: int, seconds: float = 60.0) -> list[int]:
    """The numbers that calls wrote down, once there are so many."""
    end = time.monotonic() + seconds
    while True:
        lines = path.read_text().split() if path.exists() else []
        if len(lines) >= count or time.monotonic() > end:
            return sorted(map(int, lines))
        time.sleep(0.05)


def deployed(project: UserProject):
    return kt.fn(project.module(SLEEP).sleep).to(kt.Compute(cpus="0.1"))


def agent_of(remote: kt.Module) -> int:
    view = kt.globals.controller_client().get_workload("default", remote.service_name)
    (pod,) = view.pods
    assert pod.pid is not None
    return pod.pid


def test_calls_that_a_program_spawns_last_run(project, tmp_path):
    body = "for number in range(first, first + count):\n    remote.spawn(path, number)\n"
    program, path = write(project, "last.py", body), tmp_path / "noted"
    for turn in range(PROGRAMS):
        numbers = str(turn * CALLS), str(CALLS)
        completed = project.run(program, str(path), *numbers, timeout=120, KT_QUIET="true")
        assert (completed.returncode, completed.stderr) == (0, "")
    assert noted(path, PROGRAMS * CALLS) == list(range(PROGRAMS * CALLS))


def test_large_arguments_of_the_last_statement_arrive(project, tmp_path):
    program = write(project, "large.py", "remote.spawn(path, first, 'x' * 3_000_000)\n")
    path = tmp_path / "noted"
    assert project.run(program, str(path), "7", "1").returncode == 0
    assert noted(path, 1) == [7]


def test_calls_run_whose_program_is_killed(project, tmp_path):
    body = """
        import os, signal
        for number in range(first, first + count):
            remote.spawn(path, number)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    program, path = write(project, "killed.py", body), tmp_path / "noted"
    assert project.run(program, str(path), "0", "50").returncode == -signal.SIGKILL
    assert noted(path, 50) == list(range(50))


def test_calls_spawned_without_waiting_are_handed_over(project, tmp_path):
    body = """
        import asyncio
        async def main():
            for number in range(first, first + count):
                remote.spawn(path, number, "x" * 300_000 * (number % 10 == 0), async_=True)
        asyncio.run(main())
        """
    program, path = write(project, "coroutine.py", body), tmp_path / "noted"
    completed = project.run(program, str(path), "0", "100", KT_QUIET="true")
    assert (completed.returncode, completed.stderr) == (0, "")
    assert noted(path, 100) == list(range(100))


@pytest.mark.parametrize("flushes", [False, True])
def test_a_program_says_which_calls_it_could_not_hand_over(project, tmp_path, flushes):
    body = """
        import asyncio, atexit, os, pathlib
        atexit.register(print, "the end of others")
        remote(path, 1)
        pods = pathlib.Path(os.environ["KT_LOCAL_DIR"], "pods", "default")
        for pod in pods.iterdir():
            (pod / "results").symlink_to("/dev/full")
        async def main():
            remote.spawn(path, 2, async_=True)
            told = remote.spawn(path, 3, async_=True)
            try:
                await told
            except kt.DataStoreError:
                pass
        asyncio.run(main())
        if os.environ.get("FLUSHES"):
            try:
                kt.calls.flush(60)
            except kt.CallLostError as error:
                print(error)
            kt.calls.flush(60)  # once is enough
        sys.exit(3)
        """
    program, path = write(project, "lost.py", body), tmp_path / "noted"
    environ = {"FLUSHES": "1"} if flushes else {}
    completed = project.run(program, str(path), "0", "1", **environ)
    lines = completed.stderr.splitlines()
    reports = [line for line in lines if line.startswith("kubetorch: note (call ")]
    lost, _, last = completed.stdout.partition("the end of others\n")
    if flushes:
        reports, lost = [*reports, f"kubetorch: {lost}"], ""
    assert (completed.returncode, lost, last, len(reports)) == (3, "", "", 1)
    assert "was not spawned: DataStoreError: pod " in reports[0]
    assert noted(path, 1) == [1]


def test_ctrl_c_while_calls_are_handed_over_names_them(project, tmp_path):
    body = """
        import asyncio, os, signal, threading
        remote(path, 1)
        view = kt.globals.controller_client().get_workload("default", remote.service_name)
        os.kill(view.pods[0].pid, signal.SIGSTOP)
        print(view.pods[0].pid, flush=True)
        def notice():
            threading.main_thread().join()
            print("ends", flush=True)
        threading.Thread(target=notice).start()
        async def main():
            for number in range(3):
                remote.spawn(path, number, async_=True)
        asyncio.run(main())
        """
    program, path = write(project, "ctrl_c.py", body), tmp_path / "noted"
    command = [sys.executable, program, str(path), "0", "3"]
    with subprocess.Popen(
        command, cwd=project.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        agent = int(running.stdout.readline())
        try:
            assert running.stdout.readline() == "ends\n"
            for _ in range(5):  # Python may overlook one that comes just before it waits
                running.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    running.wait(15)
                    break
            errors = running.stderr.read()
        finally:
            os.kill(agent, signal.SIGCONT)
    assert errors.count("was not spawned: the program ended first") == 3


def test_a_call_whose_agent_is_killed_ends_with_an_error(project, tmp_path):
    remote = deployed(project)
    handle = remote.spawn(60, str(tmp_path / "noted"))
    os.kill(agent_of(remote), signal.SIGKILL)
    with pytest.raises(kt.AgentDiedError):
        handle.get(timeout=30)
    with pytest.raises(kt.AgentDiedError):
        kt.CallHandle.from_id(handle.id).get(timeout=30)
    assert handle.status() == "failed"


def test_a_call_whose_service_is_torn_down_ends_with_an_error(project, tmp_path):
    remote, path = deployed(project), tmp_path / "noted"
    handle = remote.spawn(60, str(path))
    assert noted(path, 1) == [1]
    remote.teardown()
    with pytest.raises(kt.PodTerminatedError):
        handle.get(timeout=30)
    with pytest.raises(kt.PodTerminatedError):
        kt.CallHandle.from_id(handle.id).get(timeout=30)


def test_a_spawned_call_with_the_key_of_another_has_its_result(project, tmp_path):
    remote, path = deployed(project), tmp_path / "noted"
    keyed = remote.options(idempotency_key="once")
    ids = [keyed.spawn(0.3, str(path)).id for _ in range(2)]
    assert [kt.CallHandle.from_id(call_id).get(timeout=30) for call_id in ids] == [None, None]
    ids.append(keyed.spawn(0.3, str(path)).id)
    assert kt.CallHandle.from_id(ids[2]).get(timeout=30) is None
    assert noted(path, 1) == [1]


def test_a_call_on_a_full_disk_is_refused(project, tmp_path):
    remote = deployed(project)
    view = kt.globals.controller_client().get_workload("default", remote.service_name)
    results = Path(os.environ["KT_LOCAL_DIR"], "pods", "default", view.pods[0].name, "results")
    results.symlink_to("/dev/full")
    with pytest.raises(kt.DataStoreError, match="cannot write the call to its disk"):
        remote.spawn(0, str(tmp_path / "noted"))
    assert noted(tmp_path / "noted", 1, 0.0) == []
