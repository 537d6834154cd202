"""Runs calls: arguments in, user code, result or failure out; cancellation and progress."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import faulthandler
import inspect
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, GeneratorType, ModuleType
from typing import Any

from kubetorch.errors import (
    BatchError,
    CallableNotFoundError,
    CallCancelledError,
    CallRefusedError,
    CallTimeoutError,
    KubetorchError,
    SerializationError,
    did_you_mean,
)
from kubetorch.pod.user_process import current_call, loader, protocol
from kubetorch.pod.user_process.capture import OutputPipe
from kubetorch.pod.user_process.current_call import callbacks, current, debug_sessions
from kubetorch.pod.user_process.frameworks import MonarchHosts
from kubetorch.pod.user_process.protocol import AgentSocket, Frame
from kubetorch.pod.user_process.thread_pool import Job
from kubetorch.pod.user_process.tuning import LIMITS, TIMING
from kubetorch.specs.batching import MARKER, BatchSpec
from kubetorch.specs.callable import CALLABLES
from kubetorch.wire import codecs, exceptions, introspection, retries
from kubetorch.wire.debugger import Debugging

#: Folder of the code of workers, whose frames users have no interest in.
CODE = str(Path(__file__).parent) + os.sep
_MAIN_THREAD = (
    "set handlers of signals in the constructor of a class (kt.cls), or at the top level of the "
    "module: calls may run in other threads"
)
_MISSING = object()

_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_exception.argtypes = (ctypes.c_ulong, ctypes.py_object)
_set_exception.restype = ctypes.c_int


class _LastException(BaseException):
    """Takes the place of an exception that was not delivered."""


class Interruptible:
    """A stretch of code that can be interrupted once.

    The interpreter delivers the exception at some later moment; leaving the block waits for the
    interrupter and takes an exception that was not delivered, so none ever arrives behind it:

        with call.interruptible:
            user_code()

    The permit to interrupt is an object that either side takes atomically.
    """

    def __init__(self) -> None:
        self._permits: list[int] = []
        self._gate: threading.Lock | None = None

    def __enter__(self) -> None:
        self._permits.append(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        try:
            self._permits.pop()
        except IndexError:
            gate = self._gate
            if gate is None:
                return
            # An exception that is delivered in these lines cuts them short, which does no harm:
            # then there is none left to take back.
            self._gate = None
            gate.acquire()
            # To be delivered, and not just cleared: until an exception is, the interpreter has all
            # threads look for theirs at each step, and before 3.12 a traced one looks for ever.
            try:
                _set_exception(threading.get_ident(), _LastException)
                while True:
                    pass
            except _LastException:
                pass

    @property
    def thread(self) -> int | None:
        """The thread that is in the block."""
        permits = self._permits[-1:]
        return permits[0] if permits else None

    def interrupt(self, error: type[KubetorchError]) -> None:
        """Raise `error` in the block, if a thread is in it. To be called at most once."""
        gate = threading.Lock()
        gate.acquire()
        self._gate = gate
        try:
            thread = self._permits.pop()
        except IndexError:
            self._gate = None
            return
        _set_exception(thread, error)
        gate.release()


@dataclass(eq=False)
class RunningCall:
    number: int
    request_id: str
    #: The chain that is sent with the calls that it makes.
    chain: str
    method: str | None
    codec: str
    #: Names of the errors after which it is to run again.
    retry_on: list[str]
    #: The encoded arguments; removed when they are decoded, so that memory is freed.
    segments: list[memoryview]
    agent: AgentSocket
    loop: asyncio.AbstractEventLoop
    #: True if it runs after the calls before it in the line.
    in_line: bool = False
    #: True if its caller takes large values in sealed files.
    takes_files: bool = False
    #: The run that it is part of, if its method is batched.
    batch: Batch | None = None
    debugging: Debugging | None = None

    def __post_init__(self) -> None:
        self.interruptible = Interruptible()
        #: Why the call was cancelled; `None` if it was not.
        self.cancelled: KubetorchError | None = None
        # Popped, atomically, by the thread that runs the call, or by a cancellation before.
        self._claims = [None]
        #: Set at the end of the call, if a thread waits for it.
        self.has_ended: threading.Event | None = None
        # True once its thread was interrupted; and its threads that wait for other calls.
        self._is_interrupted = False
        self._waits: list[tuple[Callable[[], object], tuple[str, str]]] = []
        #: The task that runs it, for a call on the event loop.
        self.task: asyncio.Task[Any] | None = None
        #: True once its debugger was left: it stops no more.
        self.was_debugged = False
        #: True once the debugger of a thread that knows no call was left during this call.
        self.had_debugged_threads = False
        # Values that the call's generator may still send.
        self._grant = LIMITS.first_granted_values
        self._grants: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._granted: asyncio.Future[None] | None = None
        self._progress: bytes | None = None
        self._progress_sent = 0.0

    def claim(self) -> bool:
        """Claim the call, to run it or to end it without running; true once."""
        try:
            self._claims.pop()
        except IndexError:
            return False
        return True

    # --------------------------------------------------------------------------- cancellation

    def cancel(self, reason: str, *, timed_out: bool) -> None:
        """End the call soon, by an exception in its thread or task."""
        if self.cancelled is not None:
            return
        error = CallTimeoutError if timed_out else CallCancelledError
        self.cancelled = error(reason)
        self.interruptible.interrupt(error)
        # From here on the call's own thread raises in its next step; its other threads see this.
        self._is_interrupted = True
        for wake, _ in tuple(self._waits):
            wake()
        self._grants.put(0)
        self.loop.call_soon_threadsafe(self._cancel_task)

    @property
    def is_interrupted(self) -> bool:
        """True once it is cancelled: what it begins from then on is a clean-up."""
        return self._is_interrupted

    @contextlib.contextmanager
    def waiting(
        self, wake: Callable[[], object], awaited: tuple[str, str], *, is_cleanup: bool | None
    ) -> Iterator[None]:
        """While a thread waits for another call: if this call is cancelled, wake it and raise.

        The interpreter interrupts no waiting thread. A clean-up goes on.

        Args:
            wake: Ends the wait.
            awaited: Name of the callable, and of its service if that is known.
            is_cleanup: Whether this call was cancelled when what is awaited began; `None`: it
                begins now.
        """
        if is_cleanup is None:
            is_cleanup = self._is_interrupted
        wait = (wake, awaited)
        self._waits.append(wait)
        try:
            if self._is_interrupted and not is_cleanup:
                wake()  # it was cancelled since, while no wait was there to be woken
            yield
        finally:
            self._waits.remove(wait)
        if self._is_interrupted and not is_cleanup:
            self.check()

    @property
    def waits_for(self) -> str:
        """The call that the first waiting thread of this call waits for; empty without any."""
        for _, (name, service) in tuple(self._waits):
            return f"{name} of {service}" if service else name
        return ""

    def check(self) -> None:
        if self.cancelled is not None:
            raise self.cancelled

    def _cancel_task(self) -> None:
        if self.task is not None:
            self.task.cancel()

    # ----------------------------------------------------------------------------- generators

    def grant(self, count: int) -> None:
        self._grants.put(count)
        self.loop.call_soon_threadsafe(self._wake)

    def wait_for_grant(self) -> None:
        """Wait in a thread until a value may be sent."""
        while self._grant == 0:
            self.check()
            self._grant += self._grants.get()  # ends: the agent grants, cancels, or is gone
        self.check()
        self._grant -= 1

    async def wait_for_grant_async(self) -> None:
        """Wait on the event loop until a value may be sent."""
        while True:
            while not self._grants.empty():
                self._grant += self._grants.get()
            if self._grant:
                self._grant -= 1
                return
            self._granted = self.loop.create_future()
            await self._granted

    def _wake(self) -> None:
        if self._granted is not None and not self._granted.done():
            self._granted.set_result(None)

    # ------------------------------------------------------------------------------- progress

    def progress(self, current: float, total: float | None, message: str | None) -> None:
        # Numbers of NumPy are numbers, too.
        numbers = [float(current), None if total is None else float(total)]
        text = None if message is None else _shortened(str.__str__(str(message)))
        report = json.dumps([*numbers, text]).encode()
        now = time.monotonic()
        due = self._progress_sent + TIMING.progress_interval_seconds
        if now >= due:
            self._progress, self._progress_sent = None, now
            self.agent.send(protocol.PROGRESS, self.number, report)
            return
        is_scheduled = self._progress is not None
        self._progress = report
        if not is_scheduled:
            self.loop.call_soon_threadsafe(self.loop.call_later, due - now, self.finish_progress)

    def finish_progress(self) -> None:
        """Send the last report, if it was not sent yet."""
        report, self._progress = self._progress, None
        if report is not None:
            self._progress_sent = time.monotonic()
            self.agent.send(protocol.PROGRESS, self.number, report)


@dataclass(eq=False)
class Batch(RunningCall):
    """One run for several calls, which end by themselves; its lines are those of the first call."""

    members: Sequence[RunningCall] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        #: The calls whose items the function was given, in their order.
        self.admitted: list[RunningCall] = []
        for call in self.members:
            call.batch = self

    @classmethod
    def of(cls, members: Sequence[RunningCall]) -> Batch:
        first = members[0]
        return cls(
            first.number,
            request_id=first.request_id,
            chain=first.chain,
            method=first.method,
            codec=first.codec,
            retry_on=first.retry_on,
            segments=[],
            agent=first.agent,
            loop=first.loop,
            in_line=first.in_line,
            debugging=next((call.debugging for call in members if call.debugging), None),
            members=members,
        )


class ValueFile:
    """A file on the pod's disk without a name, so that it is gone once no process has it open."""

    def __init__(self, folder: str) -> None:
        path = Path(folder, os.urandom(8).hex())
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self.descriptor = os.open(path, flags, 0o600)
        path.unlink()
        self._size = 0

    def write(self, data: protocol.Buffer) -> None:
        """Append bytes; `OSError` beyond `stored_value_bytes`, or without room."""
        view = memoryview(data).cast("B")
        self._size += len(view)
        if self._size > LIMITS.stored_value_bytes:
            raise OSError(f"it has more than {LIMITS.stored_value_bytes // 1024**3} GiB")
        while view:
            view = view[os.write(self.descriptor, view) :]

    def close(self) -> None:
        os.close(self.descriptor)


@dataclass(eq=False)
class CallRunner:
    agent: AgentSocket
    loop: asyncio.AbstractEventLoop
    pipe: OutputPipe
    pod_name: str
    modules: Mapping[str, str]
    working_dir: str
    code: str | None
    stacks: int | None
    #: True if calls wait, rather than be refused, while all threads run others.
    may_wait: bool = False
    #: Folder on the pod's disk for values that cannot travel; without one they are lost.
    values: str | None = None

    def __post_init__(self) -> None:
        self._pid = os.getpid()
        #: True once the agent has asked this process to end.
        self.is_stopped = False
        self._calls: dict[int, RunningCall] = {}
        current_call.running_calls = self._calls
        # The debuggers of calls that are about to come.
        self._debugging: dict[int, Debugging] = {}
        self._deployed: DeployedCallable
        self._hosts: MonarchHosts | None = None
        self._context: contextvars.Context

    def serve(self, deployed: DeployedCallable, hosts: MonarchHosts | None = None) -> None:
        """Set the callable and the context variables of calls, before the first call comes."""
        self._deployed = deployed
        self._hosts = hosts
        self._context = contextvars.copy_context()

    # ---------------------------------------------------------------- frames, from the reader

    def next_job(self) -> Job | None:
        """Wait for the next call to run in this thread; `None` when there will be no more."""
        while True:
            frame = self.agent.read()
            if frame.kind == protocol.CALL:
                job = self._open(frame)
                if job is not None:
                    return job
            elif frame.kind == protocol.BATCH:
                job = self._open_batch(frame)
                if job is not None:
                    return job
            elif frame.kind == protocol.STOP:
                self.is_stopped = True
                self.loop.call_soon_threadsafe(self.loop.stop)
                return None
            elif frame.kind == protocol.DUMP:
                # After that time the agent reads the stacks no more, or has asked again.
                if self.stacks is not None and time.monotonic() * 1000 < frame.call:
                    faulthandler.dump_traceback(self.stacks)
            elif frame.kind == protocol.ASK:
                self._report_waits()
            elif frame.kind == protocol.PREEMPT:
                callbacks.run(lambda: self.agent.send(protocol.PREEMPTED))
            else:
                self._control(frame)

    def _report_waits(self) -> None:
        calls = tuple(self._calls.values())
        runs = ((call.number, call.batch or call) for call in calls)
        awaited = [(number, run.waits_for[: LIMITS.waited_call_characters]) for number, run in runs]
        waits = [wait for wait in awaited if wait[1]][: LIMITS.waiting_calls]
        self.agent.send(protocol.WAITS, payload=json.dumps(dict(waits)).encode())

    def _control(self, frame: Frame) -> None:
        call = self._calls.get(frame.call)
        if frame.kind == protocol.DEBUG:
            self._debug(frame, call)
            return
        if call is None:  # it has ended meanwhile
            return
        run = call.batch or call  # the agent cancels one of a batch for all of them
        if frame.kind == protocol.GRANT:
            run.grant(frame.argument)
        elif frame.kind == protocol.CANCEL:
            if frame.flags & protocol.UNLESS_BEGUN:
                self._give_back(call, run)
                return
            timed_out = bool(frame.flags & protocol.TIMED_OUT)
            run.cancel(frame.meta.decode(), timed_out=timed_out)
            if run.cancelled is not None and run.claim():  # it waits for its turn
                self._fail(run, run.cancelled, started=False)

    def _debug(self, frame: Frame, call: RunningCall | None) -> None:
        """Debug a call that runs, or the next one."""
        debugging = Debugging(*json.loads(frame.meta))
        if frame.argument:
            self._debugging[frame.call] = debugging
        elif call is not None:
            _debugger().interrupt(call.batch or call, debugging)

    def _give_back(self, call: RunningCall, run: RunningCall) -> None:
        """Give a call back to the agent, unless it has begun."""
        if run.claim():
            del self._calls[call.number]
            self.agent.send(protocol.RETURNED, call.number)

    def _open(self, frame: Frame) -> Job | None:
        codec, sizes, meta = protocol.unpack_sizes(frame)
        method, request_id, chain, retry_on = protocol.unpack_call(meta)
        try:
            payload = memoryview(self.agent.payload(frame))
            segments = codecs.split(payload, sizes)
        except (OSError, SerializationError) as error:
            self.agent.send(protocol.ERROR, frame.call, self._failure(error, started=False))
            return None
        call = RunningCall(
            frame.call,
            request_id=request_id,
            chain=chain,
            method=method,
            codec=codec,
            retry_on=retry_on,
            segments=segments,
            agent=self.agent,
            loop=self.loop,
            in_line=bool(frame.flags & protocol.IN_LINE),
            takes_files=bool(frame.flags & protocol.TAKES_FILES),
        )
        if self._debugging:
            call.debugging = self._debugging.pop(call.number, None)
        self._calls[call.number] = call
        if frame.flags & protocol.IN_BATCH:
            return None
        is_batched = self._deployed.batch_spec(method) is not None
        return self._job(Batch.of([call]) if is_batched else call)

    def _open_batch(self, frame: Frame) -> Job | None:
        numbers = protocol.unpack_numbers(frame.meta)
        members = [self._calls[number] for number in numbers if number in self._calls]
        return self._job(Batch.of(members)) if members else None

    def _job(self, call: RunningCall) -> Job | None:
        """The job that runs a call, unless the event loop runs it."""
        context = self._context.copy()
        if self._deployed.runs_on_loop(call.method):
            self._start_async(call, None, context)
            return None
        refuse = None if self.may_wait else lambda: self._refuse(call)
        return Job(call.method, lambda: context.run(self._run, call), refuse, call.in_line)

    # ----------------------------------------------------------------------- in a thread

    def _refuse(self, call: RunningCall) -> None:
        if call.claim():
            count = len(self._calls) - 1
            error = CallRefusedError(
                f"{count} calls run in this process of {self.pod_name}, and it has no thread for "
                "one more",
                hint="kt.Compute(concurrency=) lets calls wait; kt stacks shows what they do",
            )
            self._fail(call, error, started=False)

    def _run(self, call: RunningCall) -> None:
        if not call.claim():
            return
        try:
            self._answer(call)
        except BaseException as error:  # noqa: BLE001  # this thread must go on
            self._give_up(call, error)

    def _answer(self, call: RunningCall) -> None:
        current.set(call)
        try:
            function, args, kwargs = self._prepare(call)
        except BaseException as error:  # noqa: BLE001  # unpickling may raise anything
            self._fail(call, error, started=False)
            return
        streamed = False
        try:
            with call.interruptible:
                call.check()
                if call.debugging is not None and call.debugging.stops:
                    _debugger().stop_at_start(function, call.debugging)
                value = function(*args, **kwargs)
            del args, kwargs
            if type(value) is GeneratorType and not isinstance(call, Batch):
                streamed = True
                value = self._stream(call, value)
            elif type(value) is CoroutineType or type(value) is AsyncGeneratorType:
                # A plain function that wraps an `async def`.
                call.has_ended = threading.Event()
                self._start_async(call, value, contextvars.copy_context())
                if call.in_line:
                    call.has_ended.wait()
                return
        except BaseException as error:  # noqa: BLE001  # SystemExit of user code ends its call
            self._fail(call, error, started=not _is_unbound(error))
            return
        self._succeed(call, value, streamed=streamed)

    def _stream(self, call: RunningCall, generator: Generator[Any, Any, Any]) -> object:
        """Send the values of a generator, as fast as the caller reads; returns its result."""
        try:
            while True:
                call.wait_for_grant()
                try:
                    with call.interruptible:
                        value = next(generator)
                except StopIteration as end:
                    return end.value
                self._yield(call, value)
        finally:
            generator.close()

    # ------------------------------------------------------------------- on the event loop

    def _start_async(self, call: RunningCall, value: Any, context: contextvars.Context) -> None:  # noqa: ANN401
        coroutine = self._run_async(call, value)
        self.loop.call_soon_threadsafe(self.loop.create_task, coroutine, context=context)

    async def _run_async(self, call: RunningCall, value: Any) -> None:  # noqa: ANN401  # the user's
        """Run the callable, or go on with the coroutine or generator that it returned."""
        if value is None and not call.claim():
            return
        try:
            await self._answer_async(call, value)
        except BaseException as error:  # noqa: BLE001  # the loop must go on
            self._give_up(call, error)
        finally:
            if call.has_ended is not None:
                call.has_ended.set()

    async def _answer_async(self, call: RunningCall, value: Any) -> None:  # noqa: ANN401  # the user's
        current.set(call)
        # From here on: a task that is cancelled before it runs would never answer.
        call.task = asyncio.current_task()
        started = value is not None
        streamed = False
        try:
            call.check()
            if value is None:
                function, args, kwargs = self._prepare(call)
                started = True
                if call.debugging is not None and call.debugging.stops:
                    _debugger().stop_at_start(function, call.debugging)
                value = function(*args, **kwargs)
                del args, kwargs
            if type(value) is AsyncGeneratorType and not isinstance(call, Batch):
                streamed = True
                await self._stream_async(call, value)
                value = None
            else:
                value = await value
        except BaseException as error:  # noqa: BLE001  # as in `_run`
            if introspection.is_a(value, CoroutineType):  # it may not have begun
                introspection.safely(value.close, None)
            self._fail(call, error, started=started and not _is_unbound(error))
            return
        self._succeed(call, value, streamed=streamed)

    async def _stream_async(self, call: RunningCall, generator: AsyncGenerator[Any, Any]) -> None:
        try:
            while True:
                await call.wait_for_grant_async()
                try:
                    value = await generator.__anext__()
                except StopAsyncIteration:
                    return
                self._yield(call, value)
        finally:
            await generator.aclose()

    # ------------------------------------------------------------------------------- both

    def _prepare(self, call: RunningCall) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
        function = self._deployed.find(call.method)
        try:
            os.getcwd()  # noqa: PTH109  # a call has microseconds
        except FileNotFoundError:
            self._make_working_dir()
        if isinstance(call, Batch):
            items = self._take_items(call)
            # Without any the function is not called.
            return (function if items else list), [items], {}
        args, kwargs = self._decode_arguments(call)
        if self._hosts is not None:
            self._hosts.give(function, args, kwargs)
        return function, args, kwargs

    def _decode_arguments(self, call: RunningCall) -> tuple[list[Any], dict[str, Any]]:
        segments, call.segments = call.segments, []
        args, kwargs = decode(call.codec, segments, self.modules)
        refs = sys.modules.get("kubetorch.sdk.refs")
        if refs is not None:  # loaded by the first reference, if there was any
            args = [refs.resolve(value) for value in args]
            kwargs = {name: refs.resolve(value) for name, value in kwargs.items()}
        return args, kwargs

    def _take_items(self, batch: Batch) -> list[Any]:
        """The items of the calls of a batch; a call that has no right one fails alone."""
        items = []
        for call in batch.members:
            try:
                items.append(self._deployed.item(call.method, *self._decode_arguments(call)))
            except BaseException as error:  # noqa: BLE001  # unpickling may raise anything
                self._fail(call, error, started=False)
            else:
                batch.admitted.append(call)
        return items

    def _make_working_dir(self) -> None:
        """Go back to the working directory, with the project in it: a call deleted it."""
        folder = Path(self.working_dir)
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        if self.code is not None:
            with contextlib.suppress(FileExistsError):
                folder.joinpath(Path(self.code).name).symlink_to(self.code)

    def _yield(self, call: RunningCall, value: object) -> None:
        self.agent.send_value(
            protocol.YIELD, call.number, call.codec, value, takes_files=call.takes_files
        )

    def _succeed(self, call: RunningCall, value: object, *, streamed: bool) -> None:
        if os.getpid() != self._pid:
            _leave_child(0, self.pipe)
        if isinstance(call, Batch):
            self._distribute(call, value)
            return
        self._finish(call)
        flags = protocol.STREAMED if streamed else 0
        try:
            self.agent.send_value(
                protocol.RESULT, call.number, call.codec, value, flags, takes_files=call.takes_files
            )
        except BaseException as error:  # noqa: BLE001  # encoding runs the user's code
            value_file = None
            if introspection.is_a(error, SerializationError):
                value_file = self._pickled(call, value, error)
            del value
            failure = self._failure(error, started=True, retry_on=call.retry_on)
            if value_file is None:
                self.agent.send(protocol.ERROR, call.number, failure)
            else:
                self.agent.send_failure_with_value(call.number, failure, value_file.descriptor)
                value_file.close()

    def _distribute(self, batch: Batch, value: object) -> None:
        """End the calls of a batch with what its function returned."""
        batch.finish_progress()
        calls = batch.admitted
        name = self._deployed.name_of(batch.method)
        results: list[Any] = []
        if introspection.is_a(value, list):
            results = list(value)
        if len(results) != len(calls):
            size = f"a list of {len(results)}"
            if not introspection.is_a(value, list):
                size = f"a value of type {introspection.name_of(type(value))}"
            error = BatchError(
                f"{name} is batched, and returned {size} for a list of {len(calls)}",
                hint="let it return a list with one result for each item, in their order; for an "
                "item that failed, the exception",
            )
            results = [error] * len(calls)
        for call, result in zip(calls, results, strict=True):
            try:
                if introspection.is_a(result, BaseException):
                    self._fail(call, result, started=True)
                else:
                    self._succeed(call, result, streamed=False)
            except BaseException as error:  # noqa: BLE001  # the other calls must end, too
                self._give_up(call, error)

    def _pickled(self, call: RunningCall, value: object, error: Any) -> ValueFile | None:  # noqa: ANN401
        """Pickle a value that cannot travel into a file; if that fails, the error says why."""
        if self.values is None or call.codec == "pickle":
            return None
        file: ValueFile | None = None
        try:
            file = ValueFile(self.values)
            codecs.write_pickle(file, value)
        except BaseException as failed:  # noqa: BLE001  # pickling runs the user's code
            why = introspection.summary(failed)
            if isinstance(failed, SerializationError):
                why = failed.message
            error.message += f"; nor can it be kept: {why}"
            if file is not None:
                file.close()
            return None
        return file

    def _fail(self, call: RunningCall, error: BaseException, *, started: bool) -> None:
        if os.getpid() != self._pid:
            _leave_child(introspection.safely(_exit_status, 1, error), self.pipe)
        debugging, cancelled = call.debugging, call.cancelled
        if debugging is not None and debugging.post_mortem and started and cancelled is None:
            self._debug_error(error, debugging)
            cancelled = call.cancelled
        if cancelled is not None and introspection.is_a(
            error, (asyncio.CancelledError, type(cancelled))
        ):
            trace = exceptions.trace_of(error)
            error = type(cancelled)(cancelled.message).with_traceback(trace)
        self._explain(error)
        if isinstance(call, Batch):
            call.finish_progress()
        members = call.members if isinstance(call, Batch) else [call]
        for member in members:
            if self._calls.get(member.number) is member:
                failure = self._failure(error, started=started, retry_on=member.retry_on)
                self._finish(member)
                self.agent.send(protocol.ERROR, member.number, failure)

    def _debug_error(self, error: BaseException, debugging: Debugging) -> None:
        """Let a debugger look at an error that leaves the user's function."""
        try:
            _debugger().post_mortem(error, debugging)
        except (CallCancelledError, CallTimeoutError):  # while it waited; the call ends so anyway
            return

    def _explain(self, error: BaseException) -> None:
        """Add what helps to understand an error."""
        if introspection.is_a(error, (ValueError, RuntimeError)):
            introspection.safely(_explain_signal_handlers, None, error)
        if introspection.is_a(error, (NameError, AttributeError)):
            introspection.safely(loader.explain_call, None, error, self._deployed.value)

    def _give_up(self, call: RunningCall, error: BaseException) -> None:
        """End a call whose result or failure could not be sent, so that no caller waits."""
        if os.getpid() != self._pid:
            _leave_child(1, self.pipe)
        if isinstance(call, Batch):
            for member in call.members:
                if self._calls.get(member.number) is member:
                    self._give_up(member, error)
            return
        self._calls.pop(call.number, None)
        problem = f"the end of the call could not be reported: {introspection.name_of(type(error))}"
        failure = exceptions.Failure("RemoteError", problem, pod_name=self.pod_name)
        self.agent.send(protocol.ERROR, call.number, failure.to_json())

    def _finish(self, call: RunningCall) -> None:
        if debug_sessions or call.debugging is not None:
            _debugger().finish(call)
        self._calls.pop(call.number, None)
        callbacks.forget(call.number)
        self.pipe.finish(call.number)
        call.finish_progress()

    def _failure(
        self, error: BaseException, *, started: bool, retry_on: Sequence[str] = ()
    ) -> bytes:
        failure = exceptions.describe(error, pod_name=self.pod_name, started=started, skip=CODE)
        is_named = bool(retry_on) and retries.repeats(type(error), retry_on, self.modules)
        if is_named and (started or introspection.is_a(error, SerializationError)):
            failure = replace(failure, repeats=True)
        return failure.to_json()


def _debugger() -> ModuleType:
    from kubetorch.pod.user_process import debugger  # noqa: PLC0415  # pdb: 10 ms, only where used

    return debugger


def decode(
    codec: str, segments: list[memoryview], modules: Mapping[str, str]
) -> tuple[list[Any], dict[str, Any]]:
    """The positional and keyword arguments of a call."""
    decoded = codecs.decode(codec, segments, modules=modules)
    if decoded is None:
        return [], {}
    args = decoded.get("args", []) if isinstance(decoded, dict) else None
    kwargs = decoded.get("kwargs", {}) if isinstance(decoded, dict) else None
    if not isinstance(args, (list, tuple)) or not isinstance(kwargs, dict):
        raise SerializationError(
            'arguments must be {"args": [...], "kwargs": {...}}, '
            f"not a value of type {type(decoded).__name__}"
        )
    return list(args), kwargs


def _shortened(text: str) -> str:
    """The message of a report, of so many bytes that it fits into a frame."""
    data = text.encode(errors="replace")
    if len(data) > LIMITS.progress_message_bytes:
        data = data[: LIMITS.progress_message_bytes - 3] + "…".encode()
    return data.decode(errors="ignore")


def _is_unbound(error: BaseException) -> bool:
    """True if the arguments did not fit the function, so that none of its code ran."""
    trace = exceptions.trace_of(error)
    # The only frame is Kubetorch's, which made the call.
    return introspection.is_a(error, TypeError) and trace is not None and trace.tb_next is None


def _explain_signal_handlers(error: BaseException) -> None:
    """Explain where handlers of signals can be set."""
    if not str(error).endswith("only works in main thread of the main interpreter"):
        return
    exceptions.set_attribute(error, "hint", _MAIN_THREAD)
    exceptions.add_note(error, f"hint: {_MAIN_THREAD}")


def _exit_status(error: BaseException) -> int:
    """The exit status of a program that ends with this exception; its traceback is shown."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return error.code or 0
    traceback.print_exception(error)
    return 1


def _leave_child(status: int, pipe: OutputPipe) -> None:
    """End a process that user code forked and that returned into this module."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    pipe.c_output.flush_all()
    os._exit(status)


class DeployedCallable:
    """A function, or the one instance of a class."""

    def __init__(self, name: str, value: object, *, is_instance: bool) -> None:
        self._name = name
        self.value = value
        self._is_instance = is_instance
        self._async: dict[str | None, bool] = {}
        self._batch_specs: dict[str | None, BatchSpec | None] = {}

    def runs_on_loop(self, method: str | None) -> bool:
        """True if the event loop runs the method: `async def`, with or without `yield`.

        For a method that does not exist, or raises when it is looked up, `find` raises the error.
        """
        cached_answer = self._async.get(method)
        if cached_answer is not None:
            return cached_answer
        try:
            is_async = _is_async(self.find(method))
        except BaseException:  # noqa: BLE001  # the user's __getattr__; the thread that reads asks
            return False
        self._async[method] = is_async
        return is_async

    def name_of(self, method: str | None) -> str:
        return f"{self._name}.{method}" if self._is_instance and method else self._name

    def item(self, method: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401  # the user's
        """The one argument of a call of a batched method."""
        if len(args) == 1 and not kwargs:
            return args[0]
        signature = introspection.safely(inspect.signature, None, self.find(method))
        names = [] if signature is None else list(signature.parameters)[:1]
        if not args and [*kwargs] == names:
            return kwargs[names[0]]
        arguments = [f"{len(args)} positional"] if args else []
        arguments += [f"{name}=" for name in kwargs]
        raise BatchError(
            f"{self.name_of(method)}{signature or '(...)'} is batched: each call has one argument, "
            f"an item of its list; this call has {', '.join(arguments) or 'none'}",
            hint="put what belongs together into one item, such as a tuple or a dict",
        )

    def find(self, method: str | None) -> Callable[..., Any]:
        """The function that a call of `method`, or of the callable itself, runs."""
        if not self._is_instance:
            if method is not None:
                raise CallableNotFoundError(
                    f"{self._name!r} is a function; it has no method {method!r}"
                )
            return self.value  # type: ignore[return-value]  # a callable, or calling it says so
        if method is None:
            if not callable(self.value):
                raise CallableNotFoundError(
                    f"{self._name!r} is a class without __call__; call one of its methods",
                    hint=self._methods_hint(),
                )
            return self.value
        if method == CALLABLES:
            return self.callables
        if method.startswith("_") and method != "__call__":
            raise CallableNotFoundError(f"{self._name}.{method} is private and cannot be called")
        if isinstance(inspect.getattr_static(type(self.value), method, None), property):
            raise self._no_method(method, "is a property")
        # Not None, which an attribute may be.
        member = getattr(self.value, method, _MISSING)
        if member is _MISSING:
            raise CallableNotFoundError(
                f"{self._name!r} has no method {method!r}", hint=self._methods_hint(method)
            )
        if not callable(member):
            kind = introspection.name_of(type(member))
            raise self._no_method(method, f"is a value of type {kind}")
        return member

    def callables(self, name: str) -> dict[str, Any]:
        """The names that can be called, and why `wanted` cannot be: empty if it can."""
        missing = ""
        try:
            self.find(name)
        except CallableNotFoundError as error:
            missing = str(error)
        return {"names": sorted(self._callables()), "missing": missing}

    @property
    def methods(self) -> protocol.Methods:
        names = [*self._callables(), "__call__", None] if self._is_instance else [None]
        specs = {name: self.batch_spec(name) for name in names}
        return protocol.Methods(
            frozenset(filter(self.runs_on_loop, names)),
            {name: spec for name, spec in specs.items() if spec is not None},
        )

    def batch_spec(self, method: str | None) -> BatchSpec | None:
        """Which calls of the method run together; `None` for a method that is not batched."""
        if method not in self._batch_specs:
            self._batch_specs[method] = introspection.safely(self._find_batch_spec, None, method)
        return self._batch_specs[method]

    def _find_batch_spec(self, method: str | None) -> BatchSpec | None:
        function: Any = self.find(method)
        of_class = getattr(type(function), "__call__", None)  # noqa: B004  # the method itself
        specs = (getattr(candidate, MARKER, None) for candidate in (function, of_class))
        return next((spec for spec in specs if isinstance(spec, BatchSpec)), None)

    @property
    def is_sync(self) -> bool:
        """True for a function that is no `async def`, and for a class without such methods."""
        return self.is_sync_class if self._is_instance else not self.runs_on_loop(None)

    @property
    def is_sync_class(self) -> bool:
        """True for an instance of a class without `async def` methods that can be called."""
        if not self._is_instance:
            return False
        own_call = introspection.safely(getattr, None, type(self.value), "__call__", None)
        return not any(map(_is_async, (*self._callables().values(), own_call)))

    def _no_method(self, method: str, problem: str) -> CallableNotFoundError:
        return CallableNotFoundError(
            f"{self._name}.{method} {problem}, not a method",
            hint=f"give {self._name} a method that returns it",
        )

    def _methods_hint(self, name: str = "") -> str:
        names = sorted(self._callables())
        meant = did_you_mean(name, names, likeness=0.6)
        if meant:
            return meant
        return f"it has {', '.join(names[:20])}" if names else "it has no public methods"

    def _callables(self) -> dict[str, Callable[..., Any]]:
        """The public callables of the class and of the instance."""
        cls, safely = type(self.value), introspection.safely
        names: list[str] = safely(dir, [], cls)
        members: dict[str, Any] = {name: safely(getattr, None, cls, name, None) for name in names}
        members |= safely(lambda: dict(vars(self.value)), dict[str, Any]())
        return {
            name: member
            for name, member in members.items()
            if type(name) is str and not name.startswith("_") and callable(member)
        }


def _is_async(function: object) -> bool:
    """True for `async def`; false for an object whose attributes raise."""
    return introspection.safely(_looks_async, False, function)


def _looks_async(function: object) -> bool:
    functions = [function]
    if not inspect.isroutine(function):
        functions.append(getattr(type(function), "__call__", function))  # noqa: B004  # the method itself
    return any(inspect.iscoroutinefunction(f) or inspect.isasyncgenfunction(f) for f in functions)
