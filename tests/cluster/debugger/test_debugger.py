"""Debuggers, replays and notebooks with pods of a cluster, over the tunnel of the API server."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import shared
from cluster.conftest import Installed
from tests.free_ports import free_port
from tests.local.debugger.sessions import DEADLINE, PROMPT, TerminalProgram

pytestmark = pytest.mark.cluster

KT = str(Path(sys.executable).parent / "kt")
SERVICE = """
import os

def price(units, each=2):
    total = units * each
    breakpoint()
    total += 1
    return total

class Shop:
    def price(self, units):
        return price(units)

    def divide(self, x, y):
        quotient = x / y
        return quotient

    def train(self, lr):
        if lr > 0.2:
            raise ValueError(f"diverged at {lr}")
        return os.environ["POD_NAME"]
"""


@pytest.fixture(scope="module")
def folder(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose services are deployed."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "pyproject.toml").touch()
    (folder / "service.py").write_text(SERVICE)
    program = """
    from concurrent.futures import ThreadPoolExecutor
    import kubetorch as kt
    import service

    ranks = kt.Compute(cpus="10m").distribute("spmd", workers=2, num_proc=1)
    with ThreadPoolExecutor(1) as pool:
        shop = pool.submit(kt.cls(service.Shop).to, kt.Compute(cpus="10m"), stream_logs=False)
        kt.fn(service.price, name="ranks").to(ranks, stream_logs=False)
        shop.result()
    """
    installed.python(program, folder)
    return folder


@pytest.fixture
def terminal(
    installed: Installed, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., TerminalProgram]]:
    """Starts programs on terminals."""
    for name, value in installed.environ.items():
        monkeypatch.setenv(name, value)
    programs = []

    def start(*words: str) -> TerminalProgram:
        programs.append(TerminalProgram(words, folder=str(folder)))
        return programs[-1]

    yield start
    for program in programs:
        program.close()


def call(expression: str) -> tuple[str, ...]:
    """The command of a program that calls a service."""
    handles = 'ranks = kt.Fn.from_name("ranks"); shop = kt.Cls.from_name("shop")'
    return (
        sys.executable,
        "-c",
        f"import kubetorch as kt; {handles}; print('result:', {expression})",
    )


@pytest.fixture
def calling(installed: Installed, folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts programs without a terminal that call a service; each has stopped."""
    programs = []

    def start(expression: str, stops: int = 1) -> subprocess.Popen[str]:
        program = subprocess.Popen(
            call(expression),
            cwd=folder,
            env={**os.environ, **installed.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        programs.append(program)
        assert program.stdout is not None
        lines = []
        for line in program.stdout:
            lines.append(line)
            stops -= "stopped at" in line
            if not stops:
                return program
        raise AssertionError("".join(lines))

    yield start
    for program in programs:
        program.kill()
        program.communicate()


def test_a_breakpoint_gives_the_caller_a_prompt(terminal: Callable[..., TerminalProgram]) -> None:
    program = terminal(*call("shop.price(4)"))
    assert "-> breakpoint()" in program.until(PROMPT)
    assert "8" in program.command("p total")
    program.type("c\n")
    assert "result: 9" in program.end()


def test_another_terminal_attaches_to_a_call_and_to_a_rank(
    terminal: Callable[..., TerminalProgram], calling: Callable[..., subprocess.Popen[str]]
) -> None:
    program = calling("shop.price(4)")
    attached = terminal(KT, "debug", "shop")
    attached.until(PROMPT)
    assert "8" in attached.command("p total")
    attached.type("c\n")
    attached.end()
    assert attached.status == 0
    assert "result: 9" in program.communicate(timeout=DEADLINE)[0]

    program = calling("ranks(4)", stops=2)
    for rank in ("1", "0"):
        attached = terminal(KT, "debug", "ranks", "--rank", rank)
        attached.until(PROMPT)
        assert f"'{rank}'" in attached.command("p __import__('os').environ['RANK']")
        attached.type("c\n")
        attached.end()
    assert "result: [9, 9]" in program.communicate(timeout=DEADLINE)[0]


def test_an_error_waits_at_the_line_that_raised_it(
    terminal: Callable[..., TerminalProgram],
) -> None:
    program = terminal(*call("shop.divide.options(post_mortem=True)(1, 0)"))
    assert "post-mortem: ZeroDivisionError" in program.until(PROMPT)
    assert "(1, 0)" in program.command("p x, y")
    program.type("q\n")
    assert "ZeroDivisionError" in program.end().split("q\n")[-1]


def test_a_failed_call_is_replayed_here_and_in_a_pod(installed: Installed, folder: Path) -> None:
    program = """
    import kubetorch as kt

    handle = kt.Cls.from_name("shop").train.spawn(lr=0.5)
    handle.wait()
    print(handle.id)
    """
    (folder / "fails.py").write_text(textwrap.dedent(program))
    call_id = installed.run(sys.executable, "fails.py", cwd=folder).split()[-1]

    failed = replay(installed, folder, call_id)
    assert failed.returncode == 1
    assert "ValueError: diverged at 0.5" in failed.stderr
    local, remote = (
        json.loads(replay(installed, folder, call_id, "--set", "lr=0.1", "--json", *more).stdout)
        for more in ((), ("--in-pod",))
    )
    assert local.startswith(f"replay-{call_id[:8]}-")
    assert re.fullmatch(r"shop-\w+-\w+", remote)


def replay(installed: Installed, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [KT, "replay", *words],
        cwd=folder,
        env={**os.environ, **installed.environ},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )


@pytest.mark.skipif(not shared.WHOLE, reason="KT_TEST_WHOLE=1: its pod installs JupyterLab")
def test_a_notebook_of_a_pod_answers_who_has_its_token(installed: Installed, folder: Path) -> None:
    with notebook(installed, folder) as url:
        base, token = url.partition("/lab")[0], url.partition("token=")[2]
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"{base}/api/contents", timeout=DEADLINE)
        headers = {"Authorization": f"token {token}"}
        request = urllib.request.Request(f"{base}/api/contents", headers=headers)
        with urllib.request.urlopen(request, timeout=DEADLINE) as response:
            listing = json.load(response)
    assert "service.py" in [entry["name"] for entry in listing["content"]]


@contextlib.contextmanager
def notebook(installed: Installed, folder: Path) -> Iterator[str]:
    """The address of the page of a `kt notebook` that runs."""
    options = ("-p", str(free_port()), "--cpus", "10m")
    with subprocess.Popen(
        [KT, "notebook", "notes", *options],
        cwd=folder,
        env={**os.environ, **installed.environ, "KT_NO_BROWSER": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = []
        try:
            for line in process.stdout:
                lines.append(line)
                if line.startswith("JupyterLab of "):
                    yield line.split()[-1]
                    break
            else:
                raise AssertionError("".join(lines))
        finally:
            process.send_signal(signal.SIGINT)
            process.stdout.read()
