"""The life of a worker process: take over the descriptors, load the callable, serve calls.

main thread      loads, then runs the event loop of `async def` calls
other threads    `kubetorch.pod.worker.threads`: read frames, run sync calls
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from kubetorch.pod.worker import capture, loader, pools, protocol
from kubetorch.pod.worker.calls import CODE, Calls
from kubetorch.pod.worker.capture import Pipe
from kubetorch.pod.worker.connection import Connection
from kubetorch.pod.worker.target import Target
from kubetorch.pod.worker.threads import Job, Threads
from kubetorch.wire import failures


def run(sock: socket.socket, output: int, numeric: pools.Pools | None) -> NoReturn:
    """Be a worker.

    Args:
        sock: The socket to the agent.
        output: The pipe for output; becomes descriptors 1 and 2.
        numeric: The pools to resize, in a fork of a zygote.
    """
    os.setsid()
    for descriptor in (sock.fileno(), output):
        os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(sock)
    frame = _first_frame(connection)
    spec = json.loads(frame.meta)
    connection.marker = spec["marker"]
    pipe = _take_output(output, bytes.fromhex(spec["nonce"]))
    _set_environment(spec)
    capture.install(pipe, spec["log_level"])
    worker = _Worker(connection, pipe, spec)
    if numeric is not None:
        numeric.resize(os.environ)
        _reseed()
    worker.start(numeric.on_thread if numeric is not None else lambda: None)
    worker.run()
    _leave()


class _Worker:
    """The parts of a running worker."""

    def __init__(self, connection: Connection, pipe: Pipe, spec: dict[str, Any]) -> None:
        self._connection = connection
        self._spec = spec
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._is_stopping = False
        self._calls = Calls(
            connection,
            self._loop,
            pipe,
            pod_name=spec["pod_name"],
            modules=dict(spec["modules"]),
        )

    def start(self, on_thread: Callable[[], None]) -> None:
        """Begin to read: the end of the agent is noticed also while user code is imported."""
        Threads(self._spec["threads"], self._read, on_thread).start()

    def run(self) -> None:
        """Load the callable and serve until told to stop."""
        if not self._load():
            return
        while not self._is_stopping:
            try:
                self._loop.run_forever()
            except BaseException:  # noqa: BLE001  # SystemExit of a task that user code made
                traceback.print_exc()

    def _load(self) -> bool:
        spec = self._spec
        try:
            os.chdir(spec["cwd"])
            source = loader.Source(
                kind=spec["kind"],
                module=spec["module"],
                qualname=spec["qualname"],
                source_file=spec["source_file"],
                sys_path=spec["sys_path"],
                is_script=spec["is_script"],
                init_args=spec["init_args"],
            )
            value = loader.load(source)
        except BaseException as error:  # noqa: BLE001  # SystemExit of user code is a failure
            failure = failures.describe(error, pod_name=spec["pod_name"], started=False, skip=CODE)
            self._connection.send(protocol.FAILED, payload=failure.to_json())
            return False
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # user code may have replaced it
                    stream.flush()
        self._calls.serve(Target(spec["name"], value, is_instance=spec["kind"] == "cls"))
        # User code may have run a loop of its own, which leaves none set.
        asyncio.set_event_loop(self._loop)
        self._connection.send(protocol.LOADED)
        return True

    def _read(self) -> Job | None:
        """Wait for the next call to run in this thread."""
        while True:
            frame = self._connection.next()
            if frame is None:
                if not self._connection.receive():
                    self._connection.end()
            elif frame.kind == protocol.STOP:
                self._is_stopping = True
                self._loop.call_soon_threadsafe(self._loop.stop)
                return None
            else:
                job = self._calls.on_frame(frame)
                if job is not None:
                    return job


def _first_frame(connection: Connection) -> protocol.Frame:
    while True:
        frame = connection.next()
        if frame is not None and frame.kind == protocol.LOAD:
            return frame
        if frame is None and not connection.receive():
            connection.end()


def _take_output(output: int, nonce: bytes) -> Pipe:
    """Make the pipe standard output and error; a private duplicate is for records."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(null)
    faulthandler.enable(file=2)
    return Pipe(output, nonce)


def _set_environment(spec: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(dict(spec["env"]))
    if hasattr(time, "tzset"):
        time.tzset()
    sys.argv = [spec["source_file"] or ""]
    # Not the file of the zygote, which spawned children would import.
    sys.modules["__main__"] = ModuleType("__main__")
    loader.prepare_path(spec["sys_path"])


def _reseed() -> None:
    """Forks must not share a random sequence; `random` sees to itself."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _leave() -> NoReturn:
    """End as a program does, but without waiting for threads that user code left behind."""
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)
