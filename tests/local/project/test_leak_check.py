"""The leak check finds what it is there for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import leaks

SLEEPER = [sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"]


def only_leak(before: leaks.Census) -> str:
    [line] = before.leaks_since(grace=0)
    return line


def test_a_child_process_that_lives_on_is_a_leak() -> None:
    before = leaks.Census.take()
    with subprocess.Popen(SLEEPER, stdout=subprocess.PIPE) as child:
        assert f"process {child.pid}: " in only_leak(before)
        child.kill()
    assert before.leaks_since(grace=0) == []


def test_a_child_process_that_nobody_reaped_is_a_leak() -> None:
    before = leaks.Census.take()
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", "pass"], os.environ)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert "nobody reaped it" in only_leak(before)
    os.waitpid(child, 0)


def test_a_grandchild_is_a_leak() -> None:
    before = leaks.Census.take()
    code = f"import subprocess; subprocess.run({SLEEPER!r})"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert len(before.leaks_since(grace=0)) == 2
        os.killpg(child.pid, signal.SIGKILL)


def test_a_thread_that_keeps_the_program_alive_is_a_leak() -> None:
    before = leaks.Census.take()
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="forgotten")
    thread.start()
    assert only_leak(before) == "thread forgotten"
    release.set()
    thread.join()


def test_a_listening_socket_is_a_leak() -> None:
    before = leaks.Census.take()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert only_leak(before) == f"listening on 127.0.0.1:{listener.getsockname()[1]}"


def test_a_temporary_file_is_a_leak() -> None:
    before = leaks.Census.take()
    with tempfile.NamedTemporaryFile() as file:
        assert only_leak(before) == f"temporary file {Path(file.name).name}"


def test_a_process_that_left_the_family_is_found_by_its_home(tmp_path: Path) -> None:
    code = f"import subprocess; subprocess.Popen({SLEEPER!r}, start_new_session=True)"
    environment = {**os.environ, "KT_LOCAL_DIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        parent.wait()
        [orphan] = leaks.processes_of(tmp_path)
        assert leaks.processes_left_of(tmp_path, grace=0) != []
        orphan.kill()
    assert leaks.processes_left_of(tmp_path) == []
