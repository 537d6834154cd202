"""What the benchmarks start ends, whatever becomes of it, and says why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import ours, processes
from benchmarks.venvs import Environment, UnavailableError
from kubetorch.lib.processes import start_time
from kubetorch.local.home import Home, Running
from tests.local import commands

SILENT = "import time; time.sleep(600)"
#: Starts a child that outlives it, when it is told to end.
LATE = """
import os, signal, subprocess, sys, time
def end(*_):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(sys.argv[1], "w") as file:
        file.write(str(child.pid))
    os._exit(0)
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
open(sys.argv[2], "w").close()
time.sleep(600)
"""


def children(pid: int | None = None) -> list[psutil.Process]:
    """All processes below one, but for the servers of `kt` and programs and what they forked."""
    direct_children = [
        c for c in psutil.Process(pid).children() if c.pid not in commands.server_pids()
    ]
    return direct_children + [
        grandchild for child in direct_children for grandchild in child.children(recursive=True)
    ]


def has_ended(process: psutil.Process) -> bool:
    # An orphan that has ended stays a zombie until the machine's first process reaps it.
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(is_so) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_command_that_says_nothing_is_killed() -> None:
    with (
        pytest.raises(processes.ProgramError, match="no line within"),
        processes.speaking([sys.executable, "-c", SILENT], deadline=0.2),
    ):
        pass
    assert not children()


def test_a_command_that_ends_without_the_line_is_an_error_that_has_what_it_said() -> None:
    with (
        pytest.raises(processes.ProgramError, match="something else"),
        processes.speaking([sys.executable, "-c", "print('something else')"], "result"),
    ):
        pass


def test_a_command_is_clocked_by_the_line_that_is_wanted() -> None:
    code = "print('one'); print('result 2'); print('three')"
    with processes.speaking([sys.executable, "-c", code], "result") as (line, process):
        assert line == "result 2\n"
    assert process.returncode == 0


def test_a_command_whose_user_fails_is_killed() -> None:
    code = f"print(flush=True); {SILENT}"
    with pytest.raises(KeyError), processes.speaking([sys.executable, "-c", code]):
        raise KeyError
    assert not children()


def test_an_interrupted_run_ends_its_command_at_once() -> None:
    """In a process of its own, since the signal interrupts all of it."""
    code = (
        "import sys; from benchmarks import processes\n"
        f"processes.run([sys.executable, '-c', {SILENT!r}])"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", code], cwd=processes.ROOT, stderr=subprocess.DEVNULL
    )
    try:
        # Its second thread, the timer, runs from the moment on which it looks after the command.
        wait_until(lambda: psutil.Process(running.pid).num_threads() == 2)
        [child] = psutil.Process(running.pid).children()
        running.send_signal(signal.SIGINT)
        running.wait(60)
        wait_until(lambda: has_ended(child))
    finally:
        running.kill()
        running.wait(60)


def test_what_a_program_said_last_is_in_the_error_after_it_died() -> None:
    with (
        pytest.raises(processes.ProgramError, match="KeyError: 'no such'"),
        processes.program("killed_child") as client,
    ):
        client.ask("no such")


def test_a_program_that_died_before_it_was_asked_is_an_error() -> None:
    with (
        pytest.raises(processes.ProgramError, match="ended while it measured faults"),
        processes.program("killed_child") as client,
    ):
        [program] = children()
        os.kill(program.pid, signal.SIGKILL)
        program.wait(60)
        client.ask("faults")  # what could not be written is still there when it is closed
    assert not children()


def test_what_a_server_starts_while_it_ends_is_ended_too(tmp_path: Path) -> None:
    started, ready = tmp_path / "started", tmp_path / "ready"
    with processes.server([sys.executable, "-c", LATE, started, ready]):
        wait_until(ready.exists)
    assert not psutil.pid_exists(int(started.read_text()))


@pytest.mark.timeout(600)  # an environment is made, which takes long on a busy machine
def test_what_cannot_be_installed_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    environment = Environment("nothing", ("--no-index", "nothing-that-there-is"))
    for _ in range(2):
        with pytest.raises(UnavailableError, match="nothing-that-there-is"):
            environment.python()
    assert capsys.readouterr().err.count("installing") == 1


def test_a_service_that_does_not_stop_is_killed_and_hides_no_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(KeyError), ours.home() as env:
        running = subprocess.Popen([sys.executable, "-c", SILENT], env=processes.environment(env))
        home = Home(Path(env["KT_LOCAL_DIR"]))
        home.create()
        home.token.touch(0o600)
        began = start_time(running.pid)
        assert began is not None
        # It runs, and nobody answers where it says that it does.
        home.write_running(Running(running.pid, began, 0.0, "http://127.0.0.1:9", "0"))
        raise KeyError
    running.wait(60)
    assert start_time(running.pid) is None
    assert "127.0.0.1:9" in capsys.readouterr().err
