"""Processes of a benchmark: programs that answer requests to measure, and servers.

Each is started in a session of its own, and ended with everything that it started. What it prints
goes to a log file, whose end is part of the error when it fails.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil

ROOT = Path(__file__).parents[1]
# 30 s: what an orderly end may take; Ray's is the slowest with about five.
STOP_DEADLINE = 30.0
RUN_DEADLINE = 120.0
# 900 s: a hundred deployments on a small cluster, before the first answer.
ASK_DEADLINE = 900.0
# 1024: thousands of sessions are opened at once.
BACKLOG = 1024
#: Options of uvicorn: connections stay open while the other sides have their turns.
KEEP_ALIVE = ["--timeout-keep-alive", "3600"]


class ProgramError(Exception):
    """A program of a benchmark failed; the message ends with what it printed last."""


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of what is started: that of this process, and these variables.

    What configures Kubetorch for who runs the benchmarks is none of it.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KT_")}
    return {**inherited, **(env or {})}


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
        self._started: set[psutil.Process] = set()
        replies, writer = os.pipe()
        with ExitStack() as opening:
            opening.callback(os.close, writer)
            self._replies = _Lines(replies)
            self._log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115  # closed by `close`
            self._process = subprocess.Popen(
                [python, "-m", f"benchmarks.programs.{name}", str(writer), *arguments],
                cwd=ROOT,
                env=environment(env),
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
            ProgramError: It ended instead, or did not answer in time.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([measurement, parameters]) + "\n")
            self._process.stdin.flush()
            reply = self._replies.next(time.monotonic() + ASK_DEADLINE)
        except BrokenPipeError:
            reply = ""
        except TimeoutError:
            self._started |= _descendants(self._process.pid)
            os.killpg(self._process.pid, signal.SIGKILL)
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
        self._started |= _descendants(self._process.pid)
        with ExitStack() as closing:
            closing.callback(self._log.close)
            closing.callback(self._replies.close)
            closing.callback(_end, self._process, self._started)
            # A request that it did not live to read is in the way of nothing.
            with suppress(BrokenPipeError):
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
    """As `serving`; gives the port alone."""
    with serving(command, env=env, cwd=cwd) as (port, _):
        yield port


@contextmanager
def serving(
    command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> Iterator[tuple[int, psutil.Process]]:
    """A server process on a port of loopback, which is listened on before the process runs.

    So nobody has to ask again and again whether it is up: connections wait for it.

    Args:
        command: `{fd}` in it becomes the number of the listening socket.
        env: Variables on top of those of this process.
        cwd: Working directory.

    Yields:
        The port, and the process.
    """
    address = ("127.0.0.1", 0)
    with (
        socket.create_server(address, backlog=BACKLOG) as listener,
        tempfile.TemporaryFile("w+") as log,
    ):
        # Accepted connections inherit it. uvicorn takes any given descriptor for a Unix socket, so
        # it does not set it itself, and each answer would wait 40 ms for an acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        port: int = listener.getsockname()[1]
        descriptor = listener.fileno()
        process = subprocess.Popen(
            [str(part).replace("{fd}", str(descriptor)) for part in command],
            cwd=cwd,
            env=environment(env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[descriptor],
            start_new_session=True,
        )
        listener.close()
        try:
            yield port, psutil.Process(process.pid)
        except Exception:
            print(f"{command[0]} printed:\n{_tail(log)}", file=sys.stderr)
            raise
        finally:
            started = _descendants(process.pid)
            process.terminate()
            _end(process, started)


@contextmanager
def speaking(
    command: Sequence[str | Path],
    expected_text: str = "",
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    deadline: float = RUN_DEADLINE,
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A command that has printed a line with `expected_text` in it, by default its first line.

    The command ends by itself, or the caller ends it; else it is killed.

    Yields:
        The line, and the process.

    Raises:
        ProgramError: No such line came in time.
    """
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        try:
            yield _line(process.stdout, expected_text, deadline), process
        except BaseException:
            process.kill()
            raise
        try:
            process.wait(deadline)
        except subprocess.TimeoutExpired:
            process.kill()


def run(command: Sequence[str | Path], *, cwd: Path | None = None) -> None:
    """Run a command to its end.

    `subprocess.run` with a timeout asks for the end less and less often, and so rounds what is
    clocked up by half; a timer that kills is exact.

    Raises:
        ProgramError: It failed, or took too long.
    """
    with subprocess.Popen(
        command, cwd=cwd, env=environment(), stdout=subprocess.DEVNULL
    ) as process:
        timer = threading.Timer(RUN_DEADLINE, process.kill)
        timer.daemon = True
        try:
            timer.start()
            process.wait()
        finally:
            timer.cancel()
            process.kill()  # nothing happens to one that has ended
    if process.returncode:
        raise ProgramError(f"{' '.join(map(str, command))} ended with {process.returncode}")


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill processes, and wait until they have ended."""
    alive = list(processes)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=STOP_DEADLINE)


class _Lines:
    """Lines from a pipe, each with a deadline."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""

    def next(self, deadline: float) -> str:
        """The next line; empty at the end. `TimeoutError` at this moment of `time.monotonic`."""
        while b"\n" not in self._rest:
            remaining_seconds = max(0.0, deadline - time.monotonic())
            if not select.select([self._descriptor], [], [], remaining_seconds)[0]:
                raise TimeoutError
            received = os.read(self._descriptor, 65536)
            if not received:
                return ""
            self._rest += received
        line, _, self._rest = self._rest.partition(b"\n")
        return f"{line.decode()}\n"

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._descriptor)


def _line(source: IO[bytes], expected_text: str, deadline: float) -> str:
    lines, lines_so_far = _Lines(source.fileno()), []
    end = time.monotonic() + deadline
    try:
        while line := lines.next(end):
            lines_so_far.append(line)
            if expected_text in line:
                return line
    except TimeoutError:
        raise ProgramError(
            f"no line within {deadline:.0f} s: {expected_text!r} in {lines_so_far}"
        ) from None
    raise ProgramError(f"ended without a line: {expected_text!r} in {lines_so_far}")


def complain(error: subprocess.CalledProcessError | subprocess.TimeoutExpired) -> None:
    """Print why a clean-up failed, without hiding why the benchmark ended."""
    print(error, file=sys.stderr)
    if error.stderr:
        error_text = error.stderr if isinstance(error.stderr, str) else error.stderr.decode()
        print(error_text, file=sys.stderr)


def _descendants(pid: int) -> set[psutil.Process]:
    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def _end(process: subprocess.Popen[Any], started: set[psutil.Process]) -> None:
    """Wait until `process` has ended; then kill the processes that it started.

    They are listed again and again, since a process may start others while it ends.
    """
    end = time.monotonic() + STOP_DEADLINE
    while process.poll() is None:
        started |= _descendants(process.pid)
        if time.monotonic() > end:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(STOP_DEADLINE)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    _, alive = psutil.wait_procs(started | _session(process.pid), timeout=2)
    kill(alive)


def _session(leader: int) -> set[psutil.Process]:
    """The processes of a session, also when its leader and their parents have ended."""
    session_processes = set()
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == leader:
                session_processes.add(process)
    return session_processes


def _tail(log: IO[str]) -> str:
    log.seek(0)
    return "".join(log.readlines()[-30:])
