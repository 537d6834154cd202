"""The workers of an agent: starting them, calls in, results and lines out, the end of the process.

WorkerHost ── Zygotes ── ZygoteHandle ══ zygote process
    │                                        │ forks
    └─ Worker ── WorkerSocket, LogPipe ══ worker process

All of this module runs on the agent's event loop, and nothing blocks; the events of a call go to
its `CallSink` right in the loop's callback. See docs/design/workers.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import fcntl
import itertools
import json
import logging
import os
import secrets
import signal
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from kubetorch.errors import (
    CallCancelledError,
    CallRefusedError,
    CallTimeoutError,
    KubetorchError,
    OutOfMemoryError,
    WorkerDiedError,
    WorkerRecycledError,
)
from kubetorch.lib import deadlines, memory, process_watch, processes
from kubetorch.lib import tuning as lib_tuning
from kubetorch.lib.memory import Lending, Mappings, Memory
from kubetorch.lib.memory_files import MemoryFile
from kubetorch.lib.process_watch import ExitWatch
from kubetorch.pod.logs import Line, LogPipe
from kubetorch.pod.memory_references import Reference, References
from kubetorch.pod.payloads import OwnedPayload, Payload
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.pod.user_process import protocol
from kubetorch.pod.user_process.protocol import Buffer, Frame, FrameError, StreamMemory
from kubetorch.pod.user_process.tuning import LIMITS as WORKER_LIMITS
from kubetorch.pod.worker_process.stacks import StackFile
from kubetorch.pod.worker_process.zygotes import (
    LaunchedZygote,
    OnStage,
    ZygoteError,
    ZygoteHandle,
    Zygotes,
    ZygoteSpec,
)
from kubetorch.specs.callable import CallableRef
from kubetorch.wire import exceptions
from kubetorch.wire.debugger import Debugging
from kubetorch.wire.exceptions import Failure
from kubetorch.wire.frames import Open, Progress
from kubetorch.wire.messages import WorkerStacks
from kubetorch.wire.references import VALUES

#: Variable that marks the processes that a worker started.
MARKER = "KT_WORKER"
_F_SETPIPE_SZ = 1031

_HIERARCHY = Path("/sys/fs/cgroup")
# Version 1 says "no limit" by the largest number of pages that there could be.
_UNLIMITED = 1 << 60

_log = logging.getLogger(__name__)
_Error = TypeVar("_Error", bound=KubetorchError)


class WorkerSpec(msgspec.Struct, frozen=True):
    """The callable that a worker runs, and its environment."""

    generation: int
    ref: CallableRef
    python: str
    sys_path: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]
    init_args: str | None
    preload: tuple[str, ...]
    log_level: str
    modules: Mapping[str, str] = msgspec.field(default_factory=dict)
    #: Calls of `def` that it runs at the same time, and true if more calls wait, not are refused.
    threads: int = LIMITS.worker_threads
    may_wait: bool = False
    library_path: tuple[str, ...] = ()
    #: Variables of this worker alone, not of other workers of the generation.
    own_env: Mapping[str, str] = msgspec.field(default_factory=dict)
    #: The rank in a distributed service.
    rank: int | None = None
    code: str | None = None
    umask: int | None = None
    #: Folder for values that cannot travel, see `CallSink.on_kept`.
    values: str | None = None


def _shared_payload(reference: Reference) -> Payload:
    """The bytes of a reference, for one more reader."""
    memory_of_value = reference.memory
    assert memory_of_value is not None
    if isinstance(memory_of_value, MemoryFile):
        return memory_of_value.share()
    return OwnedPayload(memory_of_value)


class CallEvents(Protocol):
    """Receives what a call does until it ends."""

    def on_queued(self) -> None:
        """The call waits for a slot."""

    def on_begun(self) -> None:
        """The call waits no more, and runs."""

    def on_log(self, line: Line) -> None:
        """The call wrote a line."""

    def on_progress(self, report: Progress) -> None:
        """The call reports its progress."""

    def on_yield(self, codec: str, sizes: Sequence[int], payload: Payload) -> None:
        """The call, of a generator, yielded a value; to be answered by `grant`."""


class CallSink(CallEvents, Protocol):
    """Receives the events of one call; exactly one of result, error and lost comes, as the last."""

    def on_result(
        self, codec: str, sizes: Sequence[int], payload: Payload, *, streamed: bool
    ) -> None:
        """The call returned. In the codec `none`, two segments are content and its content type."""

    def on_error(self, failure: bytes) -> None:
        """The call raised; the failure is JSON, see `kubetorch.wire.exceptions`."""

    def on_kept(self, descriptor: int) -> None:
        """The value of the call cannot travel, as `on_error` says next; it is pickled in a file.

        The sink closes the descriptor.
        """

    def on_failing(self, failure: bytes) -> None:
        """The call has failed, and will end with `on_error`, although a part of it still runs."""

    def on_returned(self) -> None:
        """The call stood in line, has not begun, and is to run elsewhere."""

    def on_lost(self, error: KubetorchError) -> None:
        """The worker is gone, or was ended because the call did not end when it was cancelled."""


#: Receives a line of a worker, its generation, and the identity of the request of the line's call.
OnLine = Callable[[Line, int, str | None], None]


class LoadFailed(Exception):
    """The user's module or constructor raised."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.error_type}: {failure.message}")
        self.failure = failure


class WorkerProcess(msgspec.Struct, frozen=True):
    """A process that was started as a worker, with its socket, pipe and file of stacks."""

    pid: int
    pidfd: int | None
    zygote: ZygoteHandle
    sock: socket.socket
    output: int
    stacks: StackFile
    marker: str

    async def exit_status(self) -> int | None:
        """The exit status, from the zygote or, if that is gone, from the system."""
        status = await self.zygote.exit_status_of(self.pid)
        self.zygote.forget(self.pid)
        # An orphan of a zygote that is gone is a child of this process, a subreaper.
        return processes.exit_status(self.pid) if status is None else status


class _Running(msgspec.Struct):
    sink: CallSink
    request_id: str
    call_id: str
    #: How errors of other calls name it.
    label: str
    cancelled: KubetorchError | None = None
    timer: asyncio.TimerHandle | None = None
    # Values that a generator may still send.
    granted: int = WORKER_LIMITS.first_granted_values
    #: True if the agent wants the call back, unless it has begun.
    is_recalled: bool = False
    in_batch: bool = False


class Worker(msgspec.Struct, eq=False, dict=True):
    spec: WorkerSpec
    process: WorkerProcess
    pod_name: str
    service: str
    on_line: OnLine
    on_exit: Callable[[Worker, KubetorchError], None]
    stream_memory: StreamMemory
    references: References

    def __post_init__(self) -> None:
        self.pid = self.process.pid
        self.generation = self.spec.generation
        #: In a distributed service.
        self.rank = self.spec.rank
        self._loop = asyncio.get_running_loop()
        #: The methods of the callable; known once it is loaded.
        self.methods = protocol.Methods()
        self._running: dict[int, _Running] = {}
        # Numbers of the references whose values the process has.
        self._references: set[int] = set()
        # How many of them are not in a batch.
        self._alone = 0
        # The calls that run one after the other, of which the first one runs.
        self._line: dict[int, None] = {}
        self._numbers = itertools.count(1)
        self._loaded: asyncio.Future[None] = self._loop.create_future()
        self._has_loaded = False
        self._is_draining = False
        #: The calls that calls wait for, as the process reported last; see `request_waits`.
        self.waits: dict[int, str] = {}
        #: Called with each line of the process, for debuggers.
        self.listeners: list[Callable[[Line], None]] = []
        # The call whose code has called `os._exit`.
        self._exits: int | None = None
        # Calls that were cancelled and have not ended: the process may be about to go.
        self._interrupting = 0
        self._is_killed = False
        # True once the agent ends the process.
        self._is_stopping = False
        self._idle = asyncio.Event()
        self._idle.set()
        # Why the agent ended the process; `None` if it did not.
        self._reason: WorkerDiedError | None = None
        self._exiting: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        # True while callbacks of user code run before the pod ends; set once they have run.
        self._is_preempting = False
        self._preempted = asyncio.Event()
        self._kills = OomKills(self.pid)
        self._nonce = b"\x1eKT" + os.urandom(13)
        self._output = LogPipe(self.process.output, self._nonce, self._deliver)
        # At the socket's end the process is about to end too, or user code closed the socket: no
        # more frames can come.
        self._socket = WorkerSocket(
            self.process.sock, self.stream_memory, self._on_frame, self._on_socket_end
        )
        self._watch: ExitWatch | None = None
        with contextlib.suppress(OSError):  # else the end of the socket tells that of the process
            self._watch = ExitWatch(self.pid, self._end, self.process.pidfd)

    @property
    def is_alive(self) -> bool:
        return self._exiting is None

    @property
    def accepts_calls(self) -> bool:
        """True if the worker lives on: it was not killed, and each cancelled call can end."""
        return self._exiting is None and not self._is_killed and not self._interrupting

    def accepts(self, request: Open, opened: float) -> bool:
        return self.accepts_calls

    @property
    def running(self) -> int:
        return len(self._running)

    # ------------------------------------------------------------------------------------ load

    async def load(self, timeout: float) -> None:
        """Import the callable, and construct the instance of a class."""
        text = json.dumps(self._load_message()).encode()
        head = protocol.pack(protocol.LOAD, flags=protocol.DESCRIPTOR, meta=text)
        self._socket.send(head, self.process.stacks.descriptor)
        try:
            async with deadlines.timeout(timeout):
                await asyncio.shield(self._loaded)
        except TimeoutError:
            await self.kill()
            error = WorkerDiedError(
                f"{self.spec.ref.name} was not loaded within {timeout:.0f} s in {self.pod_name}",
                hint="give it more time: kt.Compute(launch_timeout=...)",
            )
            raise _in_pod(error, self.pod_name) from None
        except asyncio.CancelledError:
            self.abort(None)
            raise
        self._has_loaded = True

    def _load_message(self) -> dict[str, Any]:
        spec, ref = self.spec, self.spec.ref
        return {
            "nonce": self._nonce.hex(),
            "marker": self.process.marker,
            "pod_name": self.pod_name,
            "name": ref.name,
            "source": {
                "kind": ref.kind,
                "module": ref.module,
                "qualname": ref.qualname,
                "source_file": ref.source_file,
                "sys_path": spec.sys_path,
                "is_script": ref.is_script,
                "init_args": json.loads(spec.init_args) if spec.init_args else {},
            },
            "cwd": spec.cwd,
            "code": spec.code,
            "env": {**spec.env, **spec.own_env, MARKER: self.process.marker.partition("=")[2]},
            "umask": spec.umask,
            "log_level": spec.log_level,
            "modules": spec.modules,
            "threads": spec.threads,
            "may_wait": spec.may_wait,
            "values": spec.values,
            "memory_share": self.stream_memory.limit // LIMITS.memory_share_divisor,
        }

    # ----------------------------------------------------------------------------------- calls

    def call(
        self,
        sink: CallSink,
        request: Open,
        payload: Payload,
        chain: str = "",
        *,
        in_line: bool = False,
        in_batch: bool = False,
        takes_files: bool = False,
    ) -> int:
        """Run a call; a call in line runs after those before it, one in a batch at `run_together`.

        The calls that it makes are sent with this chain. With `takes_files` its large values come
        as a `MemoryFile`.
        """
        is_going = self._is_draining or self._is_killed or self._exiting is not None
        if is_going or (self._alone >= LIMITS.worker_calls and not in_batch):
            payload.release()
            why = "is about to end" if is_going else f"has {LIMITS.worker_calls} calls"
            raise CallRefusedError(f"the worker in {self.pod_name} {why} and takes no more")
        number = next(self._numbers)
        label = _label(request)
        self._running[number] = _Running(
            sink, request.request_id, request.id, label, in_batch=in_batch
        )
        self._alone += not in_batch
        self._idle.clear()
        if in_line:
            self._line[number] = None
        if not (in_batch or self.is_ahead(number)):
            self._output.attribute_to(number)
        retry_on = () if request.retry is None else request.retry.names or ()
        rest = protocol.pack_call(request.method, request.request_id, chain, retry_on)
        body = request.body
        if request.debug is not None:
            self.debug(number, request.debug, is_next=True)
        if request.references:
            self._send_references(request)
        flags = protocol.IN_LINE if in_line else protocol.IN_BATCH if in_batch else 0
        if takes_files:
            flags |= protocol.TAKES_FILES
        self._socket.send_payload(
            protocol.CALL, number, body.codec, body.sizes, payload, rest, flags
        )
        return number

    def _send_references(self, request: Open) -> None:
        """Send the values of references that the process did not get yet."""
        for reference in self.references.present(request.references):
            if reference.number not in self._references:
                self._references.add(reference.number)
                self._socket.send_payload(
                    protocol.REFERENCE,
                    reference.number,
                    VALUES,
                    reference.sizes,
                    _shared_payload(reference),
                    reference.identity.encode(),
                )

    def drop_reference(self, reference: Reference) -> None:
        if reference.number in self._references:
            self._references.discard(reference.number)
            self._socket.send(protocol.pack(protocol.DROP, reference.number))

    def run_together(self, numbers: Sequence[int]) -> None:
        """Run calls in one batch."""
        self._output.attribute_to(numbers[0])
        meta = protocol.pack_numbers(numbers)
        self._socket.send(protocol.pack(protocol.BATCH, numbers[0], meta=meta))

    def is_ahead(self, number: int) -> bool:
        """True for a call that begins after the calls before it in line."""
        return number in self._line and number != next(iter(self._line))

    def take_back(self, number: int) -> None:
        """Ask the process for a call in line, unless it has begun."""
        call = self._running.get(number)
        if call is not None and not call.is_recalled:
            call.is_recalled = True
            self._socket.send(protocol.pack(protocol.CANCEL, number, flags=protocol.UNLESS_BEGUN))

    def cancel(self, number: int, reason: str, *, timed_out: bool) -> None:
        """Cancel a call. If it has not ended within 2 s, the worker is killed."""
        call = self._running.get(number)
        if call is None or call.cancelled is not None:
            return
        error = (CallTimeoutError if timed_out else CallCancelledError)(reason)
        call.cancelled = _in_pod(error, self.pod_name)
        self._interrupting += 1
        flags = protocol.TIMED_OUT if timed_out else 0
        self._socket.send(protocol.pack(protocol.CANCEL, number, flags=flags, meta=reason.encode()))
        call.timer = self._loop.call_later(TIMING.call_cancel_seconds, self._recycle, call)

    def grant(self, number: int, count: int) -> None:
        """Allow a generator to send so many more values; it begins with 16."""
        call = self._running.get(number)
        if call is not None:
            call.granted += count
            self._socket.send(protocol.pack(protocol.GRANT, number, argument=count))

    def _recycle(self, call: _Running) -> None:
        if self._is_preempting:  # user code saves its state
            call.timer = self._loop.call_later(TIMING.call_cancel_seconds, self._recycle, call)
            return
        error = WorkerRecycledError(
            f"the worker in {self.pod_name} was replaced: "
            "another call on it could not be interrupted"
        )
        self.abort(_in_pod(error, self.pod_name))

    # ------------------------------------------------------------------------------- debuggers

    def debug(self, number: int, debugging: Debugging, *, is_next: bool = False) -> None:
        """Debug a call: the next one from its first line on, or one that runs from now on."""
        meta = json.dumps(debugging).encode()
        self._socket.send(protocol.pack(protocol.DEBUG, number, argument=is_next, meta=meta))

    def calls_of(self, name: str) -> list[tuple[int, str]]:
        """Number and label of the running calls with this id or request; of all if it is empty."""
        return [
            (number, call.label)
            for number, call in self._running.items()
            if not name or name in (call.call_id, call.request_id)
        ]

    def call_number(self, number: object) -> int | None:
        """The running call with this number; else the only one, whose thread or process asks."""
        if isinstance(number, int) and number in self._running:
            return number
        return next(iter(self._running)) if len(self._running) == 1 else None

    def label_of(self, number: int | None) -> str:
        call = None if number is None else self._running.get(number)
        return "" if call is None else call.label

    def drain_output(self) -> None:
        """Deliver the lines that were written up to now."""
        self._output.drain()

    def note_debugger(self, line: Line, number: int | None) -> None:
        """Deliver a line about a debugger of a call; one without a text is for its caller alone."""
        line = line._replace(rank=self.rank)
        call = None if number is None else self._running.get(number)
        if line.text:
            request_id = None if call is None else call.request_id
            self.on_line(line, self.generation, request_id)
        if call is not None:
            call.sink.on_log(line)

    def request_waits(self) -> None:
        """Ask for `waits`, which come soon."""
        if self._has_loaded and self._exiting is None:
            self._socket.send(protocol.pack(protocol.ASK))

    async def stacks(self) -> WorkerStacks:
        text = await self.process.stacks.ask(self.pid, self._socket.send)
        return WorkerStacks(self.pod_name, self.pid, self.generation, self.rank, text)

    # ------------------------------------------------------------------------------------- end

    async def preempt(self, grace: float) -> None:
        """Run the callbacks of user code before the pod ends, for so many seconds."""
        if self._has_loaded and self._exiting is None:
            self._is_preempting = True
            self._socket.send(protocol.pack(protocol.PREEMPT))
            await deadlines.wait_at_most(grace, self._preempted.wait())
            self._is_preempting = False

    async def drain(self, grace: float) -> None:
        """Accept no more calls, let the running ones end, then end the process."""
        self._is_draining = self._is_stopping = True
        await deadlines.wait_at_most(grace, self._idle.wait())
        if self._exiting is None and not self._running:
            self._reason = self._stopped()
            self._socket.send(protocol.pack(protocol.STOP))
            await deadlines.wait_at_most(TIMING.worker_stop_seconds, self._ended.wait())
        await self.kill()

    async def kill(self) -> None:
        """End the process and all processes that it started, now."""
        self._is_stopping = True
        if self._exiting is None:
            self.abort(self._stopped())
        async with deadlines.timeout(TIMING.worker_kill_seconds):
            await self._ended.wait()
            assert self._exiting is not None
            await asyncio.shield(self._exiting)

    def _stopped(self) -> WorkerRecycledError:
        text = f"the worker of generation {self.generation} in {self.pod_name} was stopped"
        return _in_pod(WorkerRecycledError(text), self.pod_name)

    def abort(self, reason: WorkerDiedError | None) -> None:
        """Kill the process; the calls on it get this error, or one that says how it ended."""
        self._reason = self._reason or reason
        self._is_killed = True
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
        if self._watch is None:
            self._end()

    def _on_socket_end(self, broken: FrameError | None) -> None:
        """The process ended, or its user's code closed the socket or wrote to it."""
        reason = None
        if broken is not None:
            _log.warning("worker broke the protocol pid=%d error=%s", self.pid, broken)
            reason = WorkerDiedError(
                f"the worker of {self.service} in {self.pod_name} was ended: something in it wrote "
                f"to its connection to the agent ({broken})"
            )
            reason.pod_name = self.pod_name
        self.abort(reason)

    def _end(self) -> None:
        if self._exiting is None:
            self._exiting = self._loop.create_task(self._finish_exit())

    async def _finish_exit(self) -> None:
        """Read the remaining frames and output of the process, and report that it is gone."""
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        self._socket.read_rest()
        status = await self.process.exit_status()
        self._output.close()
        doing = "" if self._has_loaded else f" while it loaded {self.spec.ref.name}"
        error = self._reason or death_error(
            status, pod_name=self.pod_name, service=self.service, kills=self._kills, doing=doing
        )
        for number in [n for n in reversed(self._line) if self.is_ahead(n)]:
            self._return(number, self._running[number])
        errors = self._errors_of_calls(error)
        for number, call in list(self._running.items()):
            self._forget(number, call)
            call.sink.on_lost(call.cancelled or errors[number])
        if not self._loaded.done():
            self._loaded.set_exception(error)
            self._loaded.exception()  # perhaps no task waits
        self._socket.close()
        self.process.stacks.close()
        if self._watch is not None:
            self._watch.close()
        self._ended.set()
        self._preempted.set()
        if self._has_loaded and not self._is_stopping:
            self.on_exit(self, error)
        # Processes that the worker started may have become children of this process.
        marker = self.process.marker
        for pid in await asyncio.to_thread(processes.kill_session, self.pid, marker=marker):
            process_watch.reap(pid)

    def _errors_of_calls(self, error: KubetorchError) -> dict[int, KubetorchError]:
        """The error of each running call, which names the call that ended the process, if any."""
        running = self._running
        errors = dict.fromkeys(running, error)
        if self._reason is not None or len(running) < 2:
            return errors
        guilty = running.get(self._exits) if self._exits is not None else None
        if guilty is None:
            labels = [call.label for call in running.values()]
            more = len(labels) - LIMITS.named_lost_calls
            names = ", ".join(labels[: LIMITS.named_lost_calls])
            rest = f" and {more} more" if more > 0 else ""
            text = f", with all calls that ran in it: {names}{rest}"
        else:
            text = f": {guilty.label}, which ran beside this call, called os._exit"
        for number, call in running.items():
            if call is not guilty:
                errors[number] = copy.copy(error)
                errors[number].message = error.message + text
        return errors

    # ---------------------------------------------------------------------------------- frames

    def _on_frame(self, frame: Frame) -> None:
        call = self._running.get(frame.call)
        if call is None:
            self._on_frame_of_no_call(frame)
            return
        if frame.kind in (protocol.EXITS, protocol.RETURNED, protocol.PROGRESS):
            self._on_report(frame, call)
            return
        if self._reason is not None and self.spec.ref.kind == "cls":
            if frame.descriptor is not None:
                os.close(frame.descriptor)
            return  # the state of the instance is given up, and its frames are ignored
        # Lines that were written before this frame are delivered before it.
        self._output.drain()
        if frame.kind == protocol.ERROR:
            self._forget(frame.call, call)
            if frame.descriptor is not None:
                call.sink.on_kept(frame.descriptor)
            call.sink.on_error(bytes(frame.payload))
            return
        self._on_value(frame, call)

    def _on_report(self, frame: Frame, call: _Running) -> None:
        """Handle a frame that neither ends a call nor has a value."""
        if frame.kind == protocol.EXITS:
            self._exits = frame.call
        elif frame.kind == protocol.PROGRESS:
            call.sink.on_progress(Progress(*protocol.unpack_progress(frame), self.rank))
        elif call.is_recalled:
            self._return(frame.call, call)
        else:
            raise FrameError("a call comes back that nobody has asked for")

    def _on_value(self, frame: Frame, call: _Running) -> None:
        """Handle a frame with the result of a call, or with the next value of a generator."""
        try:
            payload = self._socket.payload(frame)
        except OSError as error:  # for example no descriptor is left
            self._forget(frame.call, call)
            failure = exceptions.describe_refusal(error, pod_name=self.pod_name)
            call.sink.on_error(failure.to_json())
            self._socket.send(protocol.pack(protocol.CANCEL, frame.call))
            return
        codec, sizes, _ = protocol.unpack_sizes(frame)
        if frame.kind == protocol.YIELD:
            call.granted -= 1
            if call.granted < 0:
                raise FrameError("values of a generator that nobody has asked for")
            call.sink.on_yield(codec, sizes, payload)
            return
        self._forget(frame.call, call)
        streamed = bool(frame.flags & protocol.STREAMED)
        call.sink.on_result(codec, sizes, payload, streamed=streamed)

    def _on_frame_of_no_call(self, frame: Frame) -> None:
        if frame.kind == protocol.WAITS:
            self.waits = protocol.unpack_waits(bytes(frame.payload))
            return
        if frame.kind not in (protocol.LOADED, protocol.FAILED, protocol.PREEMPTED):
            # The call has ended meanwhile; the worker may use the file for other calls.
            if frame.flags & protocol.FILE:
                with contextlib.suppress(OSError):
                    self._socket.payload(frame)
            elif frame.descriptor is not None:
                os.close(frame.descriptor)
            return
        self._output.drain()
        if frame.kind == protocol.PREEMPTED:
            self._preempted.set()
        elif self._loaded.done():
            return
        elif frame.kind == protocol.LOADED:
            self.methods = protocol.unpack_methods(bytes(frame.payload))
            self._loaded.set_result(None)
        else:
            self._loaded.set_exception(LoadFailed(exceptions.parse_json(bytes(frame.payload))))

    def _return(self, number: int, call: _Running) -> None:
        self._forget(number, call)
        call.sink.on_returned()

    def _forget(self, number: int, call: _Running) -> None:
        """Forget a call that ends, after its last lines."""
        self._output.finish(number)
        if call.timer is not None:
            call.timer.cancel()
        self._interrupting -= call.cancelled is not None
        self._alone -= not call.in_batch
        del self._running[number]
        self._line.pop(number, None)
        begun = (n for n in reversed(self._running) if not self.is_ahead(n))
        self._output.attribute_to(next(begun, None))
        if not self._running:
            self._idle.set()

    # ---------------------------------------------------------------------------------- output

    def _deliver(self, line: Line) -> None:
        if self.rank is not None:
            line = line._replace(rank=self.rank)
        call = self._running.get(line.call) if line.call is not None else None
        self.on_line(line, self.generation, None if call is None else call.request_id)
        if call is not None:
            call.sink.on_log(line)
        for listener in self.listeners:
            listener(line)


class WorkerSocket:
    def __init__(
        self,
        sock: socket.socket,
        stream_memory: StreamMemory,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[FrameError | None], None],
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._on_frame = on_frame
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._receiver = protocol.Receiver(sock, stream_memory)
        # True once a frame came that no worker sends: later frames make no sense.
        self._is_broken = False
        self._lending = Lending()
        self._mappings = Mappings()
        # Bytes that the socket had no room for, each with the descriptor that goes with it.
        self._waiting: deque[tuple[memoryview, int | None]] = deque()
        self._trim: asyncio.TimerHandle | None = None
        self._loop.add_reader(sock.fileno(), self._read)

    def send(self, head: bytes, descriptor: int | None = None) -> None:
        """Send a frame without a payload, and the descriptor that it announces."""
        self._send([head], descriptor)

    def send_payload(
        self,
        kind: int,
        call: int,
        codec: str,
        sizes: Sequence[int],
        payload: Payload,
        rest: bytes,
        more_flags: int = 0,
    ) -> None:
        """Send a frame with a payload, which is released."""
        flags, meta = protocol.pack_sizes(codec, sizes)
        flags |= more_flags
        if isinstance(payload, MemoryFile):
            flags |= protocol.FILE | protocol.SEALED | protocol.DESCRIPTOR
            head = protocol.pack(kind, call, flags=flags, meta=meta + rest, length=payload.size)
            self._send([head], payload.descriptor)
            payload.release()
            return
        length = len(payload.view)
        if isinstance(payload, Memory) and length > WORKER_LIMITS.inline_bytes:
            number, descriptor = self._lending.lend(payload)
            flags |= protocol.FILE | (0 if descriptor is None else protocol.DESCRIPTOR)
            if payload.is_shared:
                flags |= protocol.SHARED
            head = protocol.pack(
                kind, call, flags=flags, argument=number, meta=meta + rest, length=length
            )
            self._send([head], descriptor)
            self._trim_later()
        else:
            head = protocol.pack(kind, call, flags=flags, meta=meta + rest, length=length)
            self._send([head, payload.view] if length else [head])
        payload.release()

    def _send(self, parts: list[Buffer], descriptor: int | None = None) -> None:
        for number, _ in self._mappings.returned():
            parts.insert(0, protocol.pack(protocol.RELEASE, argument=number))
        for number in self._lending.forgotten():
            parts.insert(0, protocol.pack(protocol.FORGET, argument=number))
        if self._waiting:
            self._wait(b"".join(parts), descriptor)
            return
        try:
            rights = [] if descriptor is None else protocol.rights(descriptor)
            sent = self._socket.sendmsg(parts, rights)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # the next read notices the end of the socket
        total = sum(map(len, parts))
        if sent < total:
            self._wait(b"".join(parts)[sent:], None if sent else descriptor)
            self._loop.add_writer(self._socket.fileno(), self._flush)

    def _wait(self, data: bytes, descriptor: int | None) -> None:
        # A duplicate: the file may be closed before its turn comes.
        duplicate = None if descriptor is None else os.dup(descriptor)
        self._waiting.append((memoryview(data), duplicate))

    def _flush(self) -> None:
        while self._waiting:
            data, descriptor = self._waiting[0]
            try:
                rights = [] if descriptor is None else protocol.rights(descriptor)
                sent = self._socket.sendmsg([data], rights)
            except BlockingIOError:
                return
            except OSError:
                break
            if descriptor is not None:
                os.close(descriptor)
            if sent < len(data):
                self._waiting[0] = data[sent:], None
                return
            self._waiting.popleft()
        self._drop_waiting()
        self._loop.remove_writer(self._socket.fileno())

    def _drop_waiting(self) -> None:
        for _, descriptor in self._waiting:
            if descriptor is not None:
                os.close(descriptor)
        self._waiting.clear()

    def payload(self, frame: Frame) -> Payload:
        """The payload of a frame; to be called in the order of the frames."""
        if not frame.flags & protocol.FILE:
            return OwnedPayload(frame.payload)
        if frame.flags & protocol.SEALED:
            return protocol.sealed_file(frame)
        self._trim_later()
        try:
            view = self._mappings.open(frame.argument, frame.length, frame.descriptor)
        except ValueError as error:
            text = f"a memory file without {frame.length} bytes, or one that can be shortened"
            raise FrameError(text) from error
        return OwnedPayload(view)

    def read_rest(self) -> None:
        """Read the frames that the worker sent before it ended."""
        with contextlib.suppress(OSError):
            # A process that the worker started may have its end of the socket, and go on writing.
            for _ in range(LIMITS.ended_worker_reads):
                if self._is_broken or self._socket.fileno() < 0 or not self._receiver.receive():
                    return
                self._dispatch()

    def _read(self) -> None:
        try:
            is_open = self._receiver.receive()
        except BlockingIOError:
            return
        except OSError:
            is_open = False
        if is_open:
            self._dispatch()
        else:
            self._loop.remove_reader(self._socket.fileno())
            self._on_end(None)

    def _dispatch(self) -> None:
        try:
            while (frame := self._receiver.next()) is not None:
                self._handle_frame(frame)
        except FrameError as error:
            self._is_broken = True
            self._receiver.close()
            self._loop.remove_reader(self._socket.fileno())
            self._on_end(error)

    def _handle_frame(self, frame: Frame) -> None:
        if frame.kind == protocol.RELEASE:
            is_spent = bool(frame.flags & protocol.SPENT)
            self._lending.take_back(frame.argument, is_spent=is_spent)
        elif frame.kind == protocol.FORGET:
            self._mappings.forget(frame.argument)
        else:
            try:
                self._on_frame(frame)
            except FrameError:
                raise
            except Exception:  # noqa: BLE001  # one sink must not stop the others
                _log.exception("a frame of a worker could not be handled kind=%d", frame.kind)

    def _trim_later(self) -> None:
        if self._trim is None:
            self._trim = self._loop.call_later(TIMING.memory_trim_interval_seconds, self._trim_now)

    def _trim_now(self) -> None:
        self._trim = None
        is_trimmed = memory.trim(lib_tuning.TIMING.idle_memory_file_seconds)
        self._send([protocol.pack(protocol.TRIM)])
        if not (is_trimmed and self._lending.is_empty and self._mappings.is_empty):
            self._trim_later()

    def close(self) -> None:
        """Close the socket; all memory is this process's again."""
        if self._socket.fileno() < 0:
            return
        if self._trim is not None:
            self._trim.cancel()
            # Memory of arguments is free at once, that of results once the callers have them.
            self._loop.call_soon(memory.trim)
            self._loop.call_later(TIMING.memory_trim_interval_seconds, memory.trim)
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._drop_waiting()
        self._receiver.close()
        self._lending.close()
        self._mappings.close()
        self._socket.close()


class WorkerHost(msgspec.Struct, eq=False, kw_only=True, dict=True):
    """Starts the workers of one agent, a pod of a service."""

    pod_name: str
    service: str
    on_line: OnLine
    on_exit: Callable[[Worker, KubetorchError], None]
    zygote: LaunchedZygote | None = None
    #: Bytes that all processes of the pod may use; `None` with a control group, or without a limit.
    memory_limit: int | None = None
    references: References = msgspec.field(default_factory=References)

    def __post_init__(self) -> None:
        self.references.on_drop.append(self._drop_reference)
        self._zygotes = Zygotes(self.zygote)
        self._stream_memory = StreamMemory(
            self.memory_limit or OomKills(os.getpid()).limit or processes.machine_memory()
        )
        self._workers: set[Worker] = set()
        self.references.limit_bytes = self.memory_bytes // LIMITS.references_divisor

    @property
    def memory_bytes(self) -> int:
        """Bytes that the pod may use."""
        return self._stream_memory.limit

    @property
    def alive(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.is_alive]

    @property
    def zygote_pid(self) -> int | None:
        """The process that workers are forked from at present."""
        return self._zygotes.pid

    async def start(self, spec: WorkerSpec, on_stage: OnStage) -> Worker:
        """Start a worker, which has loaded nothing yet.

        The worker is a fork of a zygote where that is sound, else a fresh interpreter.
        """
        stacks = StackFile()
        sock, theirs = socket.socketpair()
        output, their_output = os.pipe()
        with contextlib.suppress(OSError):
            fcntl.fcntl(output, _F_SETPIPE_SZ, LIMITS.output_pipe_bytes)
        marker = f"{MARKER}={secrets.token_hex(8)}"
        try:
            zygote, (pid, pidfd) = await self._zygotes.start(
                ZygoteSpec(spec.python, spec.env, spec.library_path, spec.preload),
                on_stage,
                lambda zygote: zygote.fork(theirs, their_output, marker),
            )
        except BaseException as error:
            sock.close()
            os.close(output)
            stacks.close()
            if isinstance(error, (OSError, ZygoteError)):
                failed = WorkerDiedError(
                    f"the interpreter {spec.python} cannot be started in {self.pod_name}: {error}",
                    hint="deploy again with an interpreter that exists there",
                )
                raise _in_pod(failed, self.pod_name) from error
            raise
        finally:
            theirs.close()
            os.close(their_output)
        worker = Worker(
            spec,
            WorkerProcess(pid, pidfd, zygote, sock, output, stacks, marker),
            pod_name=self.pod_name,
            service=self.service,
            on_line=self.on_line,
            on_exit=self.on_exit,
            stream_memory=self._stream_memory,
            references=self.references,
        )
        self._workers = {live_worker for live_worker in self._workers if live_worker.is_alive} | {
            worker
        }
        return worker

    def _drop_reference(self, reference: Reference) -> None:
        for worker in self.alive:
            worker.drop_reference(reference)

    async def prewarm(self, spec: ZygoteSpec) -> None:
        """Keep a zygote ready for workers that are started later."""
        with contextlib.suppress(ZygoteError, OSError):  # `start` meets them again and says so
            await self._zygotes.prewarm(spec)

    async def preempt(self, grace: float) -> None:
        """Give user code so many seconds for its callbacks before the pod ends."""
        await asyncio.gather(*(worker.preempt(grace) for worker in self._workers))

    async def close(self) -> None:
        await asyncio.gather(*(worker.kill() for worker in self._workers))
        await self._zygotes.close()


class OomKills:
    """The number of kills for lack of memory in the control group of a process.

    The process's own cgroup is asked, of either version; where its files cannot be read, the
    machine's counter.
    """

    def __init__(self, pid: int) -> None:
        self._files = [file for file in _counters(pid) if _count(file) is not None][:1]
        self._before = self._kill_count()

    def has_risen(self) -> bool:
        """True if the kernel has killed since this object was made."""
        return self._kill_count() > self._before

    @property
    def limit(self) -> int | None:
        """Bytes that the cgroup may use, if it has a limit."""
        return self._number_beside("memory.max", "memory.limit_in_bytes")

    @property
    def peak(self) -> int | None:
        """The most bytes that the cgroup used."""
        return self._number_beside("memory.peak", "memory.max_usage_in_bytes")

    def _number_beside(self, *names: str) -> int | None:
        """A number from a file beside the counter, of either version of cgroups."""
        for file in self._files:
            for name in names:
                with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                    size = int((file.parent / name).read_text())
                    return size if size < _UNLIMITED else None
        return None

    def _kill_count(self) -> int:
        return sum(_count(file) or 0 for file in self._files)


def _counters(pid: int) -> list[Path]:
    """The files that may have the counter, the most specific first."""
    files = []
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            below = path.lstrip("/")
            if "memory" in controllers.split(","):
                files.append(_HIERARCHY / "memory" / below / "memory.oom_control")
            elif not controllers:
                files.append(_HIERARCHY / below / "memory.events")
    return [
        *files,
        _HIERARCHY / "memory.events",
        _HIERARCHY / "memory" / "memory.oom_control",
        Path("/proc/vmstat"),
    ]


def _count(file: Path) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    return None


def _label(request: Open) -> str:
    """The name of a call in the errors of other calls."""
    name = f"{request.callable}.{request.method}" if request.method else request.callable
    if request.item is not None:
        return f"item {request.item} of a map of {name}"
    return f"{name} (request {request.request_id})"


def death_error(
    status: int | None, *, pod_name: str, service: str, kills: OomKills, doing: str = ""
) -> WorkerDiedError:
    error: WorkerDiedError
    if status == -signal.SIGKILL and kills.has_risen():
        limit = kills.limit
        text = (
            f"the worker of {service} in {pod_name} ran out of memory and was killed by the "
            f"kernel{doing}"
        )
        error = OutOfMemoryError(
            text if limit is None else f"{text}: its pod may use {processes.written(limit)}",
            exit_code=status,
            hint="its machine had no more: ask for what it needs, kt.Compute(memory=...)"
            if limit is None
            else "resources.limits.memory in the manifest, or in service_template, allows more",
        )
        error.limit_bytes, error.used_bytes = limit, kills.peak
    else:
        error = WorkerDiedError(
            f"the worker of {service} in {pod_name} {describe_exit(status)}{doing}",
            exit_code=status,
            hint=f"kt logs {service} shows what it printed before",
        )
    return _in_pod(error, pod_name)


def _in_pod(error: _Error, pod_name: str) -> _Error:
    """The error, which names the pod."""
    error.pod_name = pod_name
    return error


def describe_exit(status: int | None) -> str:
    if status is None:
        return "ended"
    if status < 0:
        return f"was killed by {processes.signal_name(-status)}"
    return f"ended with exit code {status}"
