"""A worker, seen from the agent: calls in, results and lines out, the end of the process.

`kubetorch.pod.workers.host` starts them. Everything here runs on the agent's event loop; what a
call produces is handed to its `CallSink` right in the loop's callback.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kubetorch.errors import (
    CallCancelledError,
    CallRefusedError,
    CallTimeoutError,
    KubetorchError,
    WorkerDiedError,
    WorkerRecycledError,
)
from kubetorch.lib import deadlines, processes
from kubetorch.lib.processes import ExitWatch
from kubetorch.lib.records import record
from kubetorch.pod.worker import protocol
from kubetorch.pod.worker.protocol import Frame
from kubetorch.pod.workers import endings
from kubetorch.pod.workers.lines import Line, Output
from kubetorch.pod.workers.links import Link, Payload
from kubetorch.pod.workers.terms import CallSink, LoadFailed, WorkerSpec
from kubetorch.wire import failures

#: Seconds that a cancelled call has before its worker is killed.
CANCEL_GRACE = 2.0
#: Seconds that a worker without calls has for its exit handlers.
STOP_GRACE = 5.0
#: Seconds until a killed process is given up.
KILL_TIMEOUT = 10.0
#: Calls that one worker takes at a time, running or waiting for a thread.
CALL_LIMIT = 2000


@record
class WorkerProcess:
    """A process that was started as a worker, and what belongs to it.

    Attributes:
        pid: It leads a session of its own.
        pidfd: A descriptor of it, if there is one already.
        sock: The socket to it.
        output: The pipe of its output, the end for reading.
        marker: `NAME=value` for the environment of all that it starts.
        find_status: Finds out what it ended with, after it has ended.
    """

    pid: int
    pidfd: int | None
    sock: socket.socket
    output: int
    marker: str
    find_status: Callable[[], Awaitable[int | None]]


class _Running:
    """A call that runs."""

    __slots__ = ("cancelled", "sink", "timer")

    def __init__(self, sink: CallSink) -> None:
        self.sink = sink
        self.cancelled: KubetorchError | None = None
        self.timer: asyncio.TimerHandle | None = None


class Worker:
    """One worker process.

    Args:
        spec: What it runs.
        process: The process.
        pod_name: For errors.
        on_line: Told of each line that it writes, whether or not it belongs to a call.
        on_exit: Told when a worker that was loaded ended, unless `drain` or `kill` asked for it.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        process: WorkerProcess,
        *,
        pod_name: str,
        on_line: Callable[[Line, Worker], None],
        on_exit: Callable[[Worker, KubetorchError], None],
    ) -> None:
        self.pid = process.pid
        self.generation = spec.generation
        self._spec = spec
        self._process = process
        self._pod_name = pod_name
        self._on_line = on_line
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._running: dict[int, _Running] = {}
        self._numbers = itertools.count(1)
        self._loaded: asyncio.Future[None] = self._loop.create_future()
        self._has_loaded = False
        self._is_draining = False
        # Whether it was asked to end.
        self._is_asked = False
        self._idle = asyncio.Event()
        self._idle.set()
        # Why it was ended, when that was done on purpose.
        self._reason: WorkerDiedError | None = None
        self._ending: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        self._kills = endings.MemoryKills(self.pid)
        self._nonce = b"\x1eKT" + os.urandom(13)
        self._output = Output(process.output, self._nonce, self._deliver)
        self._loop.add_reader(process.output, self._read_output)
        self._link = Link(process.sock, self._on_frame, self._on_socket_end)
        self._watch: ExitWatch | None = None
        with contextlib.suppress(OSError):  # else the end of the socket tells that of the process
            self._watch = ExitWatch(self.pid, self._end, process.pidfd)

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self._ending is None

    @property
    def running(self) -> int:
        """How many calls it has that have not ended."""
        return len(self._running)

    # ------------------------------------------------------------------------------------ load

    async def load(self, timeout: float) -> None:
        """Have it import the callable, and construct it.

        Raises:
            LoadFailed: The user's code raised; the worker is gone.
            WorkerDiedError: The process ended, or took too long and was killed.
        """
        text = json.dumps(self._load_message()).encode()
        self._link.send(protocol.pack(protocol.LOAD, meta=text))
        try:
            async with deadlines.timeout(timeout):
                await asyncio.shield(self._loaded)
        except TimeoutError:
            await self.kill()
            error = WorkerDiedError(
                f"{self._spec.ref.name} was not loaded within {timeout:.0f} s in {self._pod_name}",
                hint="give it more time: kt.Compute(launch_timeout=...)",
            )
            error.pod_name = self._pod_name
            raise error from None
        except asyncio.CancelledError:
            self.condemn(None)
            raise
        self._has_loaded = True

    def _load_message(self) -> dict[str, Any]:
        spec, ref = self._spec, self._spec.ref
        return {
            "nonce": self._nonce.hex(),
            "marker": self._process.marker,
            "pod_name": self._pod_name,
            "kind": ref.kind,
            "name": ref.name,
            "module": ref.module,
            "qualname": ref.qualname,
            "source_file": ref.source_file,
            "root": ref.root,
            "is_script": ref.is_script,
            "sys_path": spec.sys_path,
            "cwd": spec.cwd,
            "env": [*spec.env, self._process.marker.split("=")],
            "init_args": json.loads(spec.init_args) if spec.init_args else {},
            "log_level": spec.log_level,
            "modules": spec.modules,
            "threads": spec.threads,
        }

    # ----------------------------------------------------------------------------------- calls

    def call(
        self,
        sink: CallSink,
        *,
        method: str | None,
        codec: str,
        sizes: Sequence[int],
        payload: Payload,
        request_id: str,
    ) -> int:
        """Have it run a call.

        Args:
            sink: Told of what it produces.
            method: Method of a class; `None` is the callable itself.
            codec: How the arguments are encoded.
            sizes: Bytes of each of their segments.
            payload: The arguments; large ones in memory of `kubetorch.lib.memory`. Released here.
            request_id: Identity of the request that it belongs to.

        Returns:
            Its number, for `cancel` and `grant`.

        Raises:
            CallRefusedError: The worker takes no more calls.
        """
        if self._is_draining or self._ending is not None or len(self._running) >= CALL_LIMIT:
            payload.release()
            raise CallRefusedError(f"the worker in {self._pod_name} takes no more calls")
        number = next(self._numbers)
        self._running[number] = _Running(sink)
        self._idle.clear()
        self._output.begin(number)
        rest = protocol.pack_call(method, request_id)
        self._link.send_payload(protocol.CALL, number, codec, sizes, payload, rest)
        return number

    def cancel(self, number: int, reason: str, *, timed_out: bool) -> None:
        """Have a call end. If it has not done so within 2 s, the worker is killed."""
        call = self._running.get(number)
        if call is None or call.cancelled is not None:
            return
        call.cancelled = (CallTimeoutError if timed_out else CallCancelledError)(reason)
        call.cancelled.pod_name = self._pod_name
        flags = protocol.TIMED_OUT if timed_out else 0
        self._link.send(protocol.pack(protocol.CANCEL, number, flags=flags, meta=reason.encode()))
        call.timer = self._loop.call_later(CANCEL_GRACE, self._recycle)

    def grant(self, number: int, count: int) -> None:
        """Let a generator send so many more values; it begins with 16."""
        if number in self._running:
            self._link.send(protocol.pack(protocol.GRANT, number, argument=count))

    def _recycle(self) -> None:
        error = WorkerRecycledError(
            f"the worker in {self._pod_name} was replaced: "
            "another call on it could not be interrupted"
        )
        error.pod_name = self._pod_name
        self.condemn(error)

    # ------------------------------------------------------------------------------------- end

    async def drain(self, grace: float) -> None:
        """Take no more calls, let those that run end, then end the process.

        Args:
            grace: Seconds after which it is killed; calls that still run are lost.
        """
        self._is_draining = self._is_asked = True
        with contextlib.suppress(TimeoutError):
            async with deadlines.timeout(grace):
                await self._idle.wait()
        if self._ending is None and not self._running:
            self._reason = self._stopped()
            self._link.send(protocol.pack(protocol.STOP))
            with contextlib.suppress(TimeoutError):
                async with deadlines.timeout(STOP_GRACE):
                    await self._ended.wait()
        await self.kill()

    async def kill(self) -> None:
        """End the process and all that it started, now."""
        self._is_asked = True
        if self._ending is None:
            self.condemn(self._stopped())
        async with deadlines.timeout(KILL_TIMEOUT):
            await self._ended.wait()
            assert self._ending is not None
            await asyncio.shield(self._ending)

    def _stopped(self) -> WorkerRecycledError:
        error = WorkerRecycledError(
            f"the worker of generation {self.generation} in {self._pod_name} was stopped"
        )
        error.pod_name = self._pod_name
        return error

    def condemn(self, reason: WorkerDiedError | None) -> None:
        """Kill the process; the calls on it get this error, or one that says how it ended."""
        self._reason = self._reason or reason
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
        if self._watch is None:
            self._end()

    def _on_socket_end(self) -> None:
        # The process is about to end, or user code closed the socket: nothing more can come.
        self.condemn(None)

    def _end(self) -> None:
        """The process has ended."""
        if self._ending is None:
            self._ending = self._loop.create_task(self._bury())

    async def _bury(self) -> None:
        """Take what the process left behind, and tell everybody that it is gone."""
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        self._link.read_rest()
        status = await self._process.find_status()
        self._loop.remove_reader(self._output.descriptor)
        self._output.close()
        doing = "" if self._has_loaded else f" while it loaded {self._spec.ref.name}"
        error = self._reason or endings.died(
            status, pod_name=self._pod_name, kills=self._kills, doing=doing
        )
        for number, call in list(self._running.items()):
            self._forget(number, call)
            call.sink.on_lost(call.cancelled or error)
        if not self._loaded.done():
            self._loaded.set_exception(error)
            self._loaded.exception()  # it may be that nobody waits
        self._link.close()
        if self._watch is not None:
            self._watch.close()
        self._ended.set()
        if self._has_loaded and not self._is_asked:
            self._on_exit(self, error)
        # What it started may have become a child of this process.
        kill = functools.partial(processes.kill_session, self.pid, marker=self._process.marker)
        for pid in await self._loop.run_in_executor(None, kill):
            processes.reap(pid)

    # ---------------------------------------------------------------------------------- frames

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind == protocol.LOADED:
            self._output.drain()
            if not self._loaded.done():
                self._loaded.set_result(None)
            return
        if frame.kind == protocol.FAILED:
            self._output.drain()
            if not self._loaded.done():
                self._loaded.set_exception(LoadFailed(failures.parse_json(bytes(frame.payload))))
            return
        call = self._running.get(frame.call)
        if call is None:
            return
        if frame.kind == protocol.PROGRESS:
            current, total, message = json.loads(frame.payload)
            call.sink.on_progress(current, total, message)
            return
        # Lines that were written before this frame are delivered before it.
        self._output.drain()
        if frame.kind == protocol.ERROR:
            self._forget(frame.call, call)
            call.sink.on_error(bytes(frame.payload))
            return
        codec, sizes, _ = protocol.unpack_sizes(frame)
        try:
            payload = self._link.payload(frame)
        except (OSError, ValueError) as error:  # for example no descriptor is left
            self._forget(frame.call, call)
            call.sink.on_error(failures.describe(error, pod_name=self._pod_name).to_json())
            self._link.send(protocol.pack(protocol.CANCEL, frame.call))
            return
        if frame.kind == protocol.YIELD:
            call.sink.on_yield(codec, sizes, payload)
            return
        self._forget(frame.call, call)
        streamed = bool(frame.flags & protocol.STREAMED)
        call.sink.on_result(codec, sizes, payload, streamed=streamed)

    def _forget(self, number: int, call: _Running) -> None:
        """A call ends: its last lines, and nothing of it stays."""
        self._output.finish(number)
        if call.timer is not None:
            call.timer.cancel()
        del self._running[number]
        self._output.end(next(reversed(self._running), None))
        if not self._running:
            self._idle.set()

    # ---------------------------------------------------------------------------------- output

    def _read_output(self) -> None:
        if not self._output.read():
            self._loop.remove_reader(self._output.descriptor)

    def _deliver(self, line: Line) -> None:
        self._on_line(line, self)
        call = self._running.get(line.call) if line.call is not None else None
        if call is not None:
            call.sink.on_log(line)
