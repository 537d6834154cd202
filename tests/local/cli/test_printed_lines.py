"""What pods print, and what others call their things, on a terminal and in a pipe."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kubetorch as kt
from tests.local.user_project import UserProject

pytestmark = pytest.mark.security

TIMEOUT = 60
KT = str(Path(sys.executable).parent / "kt")
TITLE, BACKWARDS, C1 = "\x1b]0;owned\x07", "\u202egpj.exe", "\x9b2J"
BAR = "\x1b[K\x1b[32m40 %\x1b[0m"
STEERING = (TITLE, BACKWARDS, C1)
# Not as it is written: a traceback shows the line that raised.
SOURCE = f"""
TEXT = bytes.fromhex("{"".join((*STEERING, BAR)).encode().hex()}").decode()

def say():
    print(TEXT)

def fail():
    raise ValueError(TEXT)
"""


@pytest.fixture(scope="module")
def project(
    tmp_path_factory: pytest.TempPathFactory, shared_service_home: Path
) -> Iterator[UserProject]:
    project = UserProject(tmp_path_factory.mktemp("said") / "shop")
    yield project
    project.forget()


@pytest.fixture(scope="module")
def say(project: UserProject) -> Iterator[kt.Fn]:
    module = project.module(SOURCE)
    remote = kt.fn(module.say, name=f"say{project.suffix}").to(kt.Compute(cpus="0.1"))
    remote()
    yield remote
    remote.teardown()


def on_terminal(*command: str, cwd: Path | None = None) -> str:
    """What a command writes when both its streams are a terminal."""
    reading_end, writing_end = pty.openpty()
    try:
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
        process = subprocess.Popen(
            command, stdout=writing_end, stderr=writing_end, cwd=cwd, env=env
        )
    finally:
        os.close(writing_end)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while data := os.read(reading_end, 65536):
            shown += data
    os.close(reading_end)
    process.wait(TIMEOUT)
    return shown.decode()


def in_pipe(*command: str, cwd: Path | None = None) -> str:
    completed = subprocess.run(command, capture_output=True, cwd=cwd, timeout=TIMEOUT, check=False)
    return (completed.stdout + completed.stderr).decode()


def check(shown: str, *, is_raw: bool) -> None:
    for text in STEERING:
        assert (text in shown) is is_raw, shown
    for text in ("\\x1b]0;owned\\x07", "\\u202egpj.exe", "\\u009b2J"):
        assert (text in shown) is not is_raw, shown


def test_lines_of_a_log_do_not_steer_a_terminal(say: kt.Fn) -> None:
    command = (KT, "logs", say.service_name)
    shown = on_terminal(*command)
    check(shown, is_raw=False)
    assert BAR in shown
    check(on_terminal(*command, "--raw"), is_raw=True)
    check(in_pipe(*command), is_raw=True)


def test_lines_of_a_call_do_not_steer_a_terminal(say: kt.Fn, project: UserProject) -> None:
    program = project.write(
        "calls.py", f"import kubetorch as kt\nkt.fn(name={say.service_name!r})()\n"
    )
    command = (sys.executable, str(program))
    shown = on_terminal(*command, cwd=project.folder)
    check(shown, is_raw=False)
    assert BAR in shown
    check(in_pipe(*command, cwd=project.folder), is_raw=True)


def test_exceptions_do_not_steer_a_terminal(project: UserProject) -> None:
    project.write("failing.py", SOURCE)
    program = project.write(
        "fails.py",
        """
        import kubetorch as kt, failing
        failed = kt.fn(failing.fail).to(kt.Compute(cpus="0.1"))
        try:
            failed()
        finally:
            failed.teardown()
        """,
    )
    command = (sys.executable, str(program))
    check(on_terminal(*command, cwd=project.folder), is_raw=False)
    check(in_pipe(*command, cwd=project.folder), is_raw=True)
