"""Processes of a benchmark: programs that answer requests to measure, and servers.

Each is started in a session of its own, and ended with everything that it started. What it prints
goes to a log file, whose end is part of the error when it fails.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import psutil

ROOT = Path(__file__).parents[1]
# 30 s: what an orderly end may take; Ray's is the slowest with about five.
STOP_DEADLINE = 30.0
RUN_DEADLINE = 120.0
#: Options of uvicorn: connections stay open while the other sides have their turns.
KEEP_ALIVE = ["--timeout-keep-alive", "3600"]


class ProgramError(Exception):
    """A program of a benchmark failed; the message ends with what it printed last."""


class Program:
    """A process that runs `benchmarks.programs.NAME` and measures when it is asked to.

    Args:
        name: Module in `benchmarks.programs`.
        arguments: Its command line.
        python: Interpreter, of another environment if need be.
        env: Variables on top of those of this process.
    """

    def __init__(
        self,
        name: str,
        *arguments: str,
        python: str | Path = sys.executable,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        replies, writer = os.pipe()
        with ExitStack() as opening:
            opening.callback(os.close, writer)
            self._replies = os.fdopen(replies)
            self._log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115  # closed by `close`
            self._process = subprocess.Popen(
                [python, "-m", f"benchmarks.programs.{name}", str(writer), *arguments],
                cwd=ROOT,
                env={**os.environ, **(env or {})},
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[writer],
                start_new_session=True,
                text=True,
            )

    def ask(self, measurement: str, **parameters: object) -> dict[str, float]:
        """The answer of the program: values by metric.

        Raises:
            ProgramError: It ended instead.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([measurement, parameters]) + "\n")
            self._process.stdin.flush()
            reply = self._replies.readline()
        except BrokenPipeError:
            reply = ""
        if not reply:
            self._process.wait(STOP_DEADLINE)
            raise ProgramError(f"{self.name} ended while it measured {measurement}\n{self._tail()}")
        answer: dict[str, float] = json.loads(reply)
        return answer

    def _tail(self) -> str:
        return _tail(self._log)

    def close(self) -> None:
        """End it, and everything that it started."""
        assert self._process.stdin is not None
        started = _descendants(self._process.pid)
        with ExitStack() as closing:
            closing.callback(self._log.close)
            closing.callback(self._replies.close)
            closing.callback(_end, self._process, started)
            self._process.stdin.close()


@contextmanager
def program(name: str, *arguments: str, **options: Any) -> Iterator[Program]:  # noqa: ANN401  # passed on
    """A `Program` that has started and answers, ended afterwards."""
    started = Program(name, *arguments, **options)
    try:
        started.ask("ready")
        yield started
    finally:
        started.close()


@contextmanager
def server(
    command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> Iterator[int]:
    """A server process on a port of loopback, which is listened on before the process runs.

    So nobody has to ask again and again whether it is up: connections wait for it.

    Args:
        command: `{fd}` in it becomes the number of the listening socket.
        env: Variables on top of those of this process.
        cwd: Working directory.

    Yields:
        The port.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener, tempfile.TemporaryFile("w+") as log:
        # Accepted connections inherit it. uvicorn takes any given descriptor for a Unix socket, so
        # it does not set it itself, and each answer would wait 40 ms for an acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        port: int = listener.getsockname()[1]
        descriptor = listener.fileno()
        process = subprocess.Popen(
            [str(part).replace("{fd}", str(descriptor)) for part in command],
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[descriptor],
            start_new_session=True,
        )
        listener.close()
        try:
            yield port
        except ProgramError:
            print(f"{command[0]} printed:\n{_tail(log)}", file=sys.stderr)
            raise
        finally:
            started = _descendants(process.pid)
            process.terminate()
            _end(process, started)


def run(command: Sequence[str | Path], *, cwd: Path | None = None) -> None:
    """Run a command to its end.

    `subprocess.run` with a timeout asks for the end less and less often, and so rounds what is
    clocked up by half; a timer that kills is exact.

    Raises:
        ProgramError: It failed, or took too long.
    """
    with subprocess.Popen(command, cwd=cwd, stdout=subprocess.DEVNULL) as process:
        timer = threading.Timer(RUN_DEADLINE, process.kill)
        timer.start()
        process.wait()
        timer.cancel()
    if process.returncode:
        raise ProgramError(f"{' '.join(map(str, command))} ended with {process.returncode}")


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _end(process: subprocess.Popen[Any], started: Sequence[psutil.Process]) -> None:
    """Wait until `process` has ended; then kill what is left of what it started."""
    try:
        process.wait(STOP_DEADLINE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_DEADLINE)
    _, alive = psutil.wait_procs(started, timeout=2)
    for left in alive:
        left.kill()
    psutil.wait_procs(alive, timeout=STOP_DEADLINE)


def _tail(log: IO[str]) -> str:
    log.seek(0)
    return "".join(log.readlines()[-30:])
