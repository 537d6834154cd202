"""Running calls: arguments in, user code, result or failure out."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import sys
import traceback
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from kubetorch.errors import SerializationError
from kubetorch.pod.worker import protocol
from kubetorch.pod.worker.call import Call
from kubetorch.pod.worker.capture import Pipe
from kubetorch.pod.worker.connection import Connection
from kubetorch.pod.worker.context import current
from kubetorch.pod.worker.protocol import Frame
from kubetorch.pod.worker.target import Target
from kubetorch.pod.worker.threads import Job
from kubetorch.wire import codecs, failures, guarding

#: Folder of the code of workers, whose frames users have no interest in.
CODE = str(Path(__file__).parent) + os.sep


class Calls:
    """The calls that run in this process.

    Args:
        connection: The socket to the agent.
        loop: The main thread's event loop, where `async def` callables run.
        pipe: Where output goes.
        pod_name: Named in failures.
        modules: Modules to look up under another name when arguments are unpickled.
    """

    def __init__(
        self,
        connection: Connection,
        loop: asyncio.AbstractEventLoop,
        pipe: Pipe,
        *,
        pod_name: str,
        modules: Mapping[str, str],
    ) -> None:
        self._connection = connection
        self._loop = loop
        self._pipe = pipe
        self._pod_name = pod_name
        self._modules = modules
        self._pid = os.getpid()
        self._calls: dict[int, Call] = {}
        self._target: Target
        self._context: contextvars.Context

    def serve(self, target: Target) -> None:
        """What is called, and with what context variables; before the first call comes."""
        self._target = target
        self._context = contextvars.copy_context()

    # ---------------------------------------------------------------- frames, from the reader

    def on_frame(self, frame: Frame) -> Job | None:
        """Take a frame; what is to be run in this very thread is returned."""
        if frame.kind == protocol.CALL:
            return self._open(frame)
        call = self._calls.get(frame.call)
        if call is None:  # it has ended meanwhile
            return None
        if frame.kind == protocol.GRANT:
            call.grant(frame.argument)
        elif frame.kind == protocol.CANCEL:
            timed_out = bool(frame.flags & protocol.TIMED_OUT)
            call.cancel(frame.meta.decode(), timed_out=timed_out)
            if call.cancelled is not None and call.claim():  # it waits for its turn
                self._fail(call, call.cancelled, started=False)
        return None

    def _open(self, frame: Frame) -> Job | None:
        codec, sizes, meta = protocol.unpack_sizes(frame)
        method, request_id = protocol.unpack_call(meta)
        try:
            payload = memoryview(self._connection.payload(frame))
            segments = codecs.split(payload, sizes)
        except (OSError, SerializationError) as error:
            self._send_failure(frame.call, error, started=False)
            return None
        call = Call(
            frame.call,
            request_id=request_id,
            method=method,
            codec=codec,
            segments=segments,
            connection=self._connection,
            loop=self._loop,
        )
        self._calls[call.number] = call
        context = self._context.copy()
        if self._target.runs_on_loop(method):
            self._start_async(call, None, context)
            return None
        return Job(method, lambda: context.run(self._run, call))

    # ----------------------------------------------------------------------- in a thread

    def _run(self, call: Call) -> None:
        if not call.claim():
            return
        try:
            self._answer(call)
        except BaseException as error:  # noqa: BLE001  # this thread must go on
            self._give_up(call, error)

    def _answer(self, call: Call) -> None:
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
                value = function(*args, **kwargs)
            del args, kwargs
            if isinstance(value, GeneratorType):
                streamed = True
                value = self._stream(call, value)
            elif inspect.iscoroutine(value) or isinstance(value, AsyncGeneratorType):
                # A plain function that wraps an `async def`.
                self._start_async(call, value, contextvars.copy_context())
                return
        except BaseException as error:  # noqa: BLE001  # SystemExit of user code ends its call
            self._fail(call, error, started=not _is_unbound(error))
            return
        self._succeed(call, value, streamed=streamed)

    def _stream(self, call: Call, generator: Generator[Any, Any, Any]) -> object:
        """Send what a generator yields, as fast as the caller takes it; what it returns."""
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

    def _start_async(self, call: Call, value: Any, context: contextvars.Context) -> None:  # noqa: ANN401
        coroutine = self._run_async(call, value)
        self._loop.call_soon_threadsafe(self._loop.create_task, coroutine, context=context)

    async def _run_async(self, call: Call, value: Any) -> None:  # noqa: ANN401  # the user's
        """Run the callable, or go on with what it returned."""
        if value is None and not call.claim():
            return
        try:
            await self._answer_async(call, value)
        except BaseException as error:  # noqa: BLE001  # the loop must go on
            self._give_up(call, error)

    async def _answer_async(self, call: Call, value: Any) -> None:  # noqa: ANN401  # the user's
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
                value = function(*args, **kwargs)
                del args, kwargs
            if isinstance(value, AsyncGeneratorType):
                streamed = True
                await self._stream_async(call, value)
                value = None
            else:
                value = await value
        except BaseException as error:  # noqa: BLE001  # as in `_run`
            if guarding.is_a(value, CoroutineType):  # it may not have begun
                guarding.tell(value.close, None)
            self._fail(call, error, started=started and not _is_unbound(error))
            return
        self._succeed(call, value, streamed=streamed)

    async def _stream_async(self, call: Call, generator: AsyncGenerator[Any, Any]) -> None:
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

    def _prepare(self, call: Call) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
        function = self._target.find(call.method)
        segments, call.segments = call.segments, []
        args, kwargs = decode(call.codec, segments, self._modules)
        return function, args, kwargs

    def _yield(self, call: Call, value: object) -> None:
        self._connection.send_value(protocol.YIELD, call.number, call.codec, value)

    def _succeed(self, call: Call, value: object, *, streamed: bool) -> None:
        if os.getpid() != self._pid:
            _leave_child(0)
        self._finish(call)
        flags = protocol.STREAMED if streamed else 0
        try:
            self._connection.send_value(protocol.RESULT, call.number, call.codec, value, flags)
        except BaseException as error:  # noqa: BLE001  # encoding runs the user's code
            self._send_failure(call.number, error, started=True)

    def _fail(self, call: Call, error: BaseException, *, started: bool) -> None:
        if os.getpid() != self._pid:
            _leave_child(guarding.tell(_exit_status, 1, error))
        self._finish(call)
        cancelled = call.cancelled
        if cancelled is not None and guarding.is_a(
            error, (asyncio.CancelledError, type(cancelled))
        ):
            trace = guarding.trace_of(error)
            error = type(cancelled)(cancelled.message).with_traceback(trace)
        self._send_failure(call.number, error, started=started)

    def _give_up(self, call: Call, error: BaseException) -> None:
        """End a call whose end itself failed: nobody is to wait for it."""
        if os.getpid() != self._pid:
            _leave_child(1)
        self._calls.pop(call.number, None)
        what = f"the end of the call could not be told: {guarding.name_of(type(error))}"
        told = failures.Failure("RemoteError", what, pod_name=self._pod_name)
        self._connection.send(protocol.ERROR, call.number, told.to_json())

    def _finish(self, call: Call) -> None:
        self._calls.pop(call.number, None)
        self._pipe.finish(call.number)
        call.finish_progress()

    def _send_failure(self, number: int, error: BaseException, *, started: bool) -> None:
        failure = failures.describe(error, pod_name=self._pod_name, started=started, skip=CODE)
        self._connection.send(protocol.ERROR, number, failure.to_json())


def decode(
    codec: str, segments: list[memoryview], modules: Mapping[str, str]
) -> tuple[list[Any], dict[str, Any]]:
    """The positional and keyword arguments of a call.

    Raises:
        SerializationError: They are not what a call needs.
    """
    found = codecs.decode(codec, segments, modules=modules)
    if found is None:
        return [], {}
    args = found.get("args", []) if isinstance(found, dict) else None
    kwargs = found.get("kwargs", {}) if isinstance(found, dict) else None
    if not isinstance(args, (list, tuple)) or not isinstance(kwargs, dict):
        raise SerializationError(
            'arguments must be {"args": [...], "kwargs": {...}}, '
            f"not a value of type {type(found).__name__}"
        )
    return list(args), kwargs


def _is_unbound(error: BaseException) -> bool:
    """Whether the arguments did not fit the function, so that nothing of it ran."""
    trace = guarding.trace_of(error)
    # The only frame is ours, which made the call.
    return guarding.is_a(error, TypeError) and trace is not None and trace.tb_next is None


def _exit_status(error: BaseException) -> int:
    """What a program ends with that lets this exception out; it is shown as by Python."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return error.code or 0
    traceback.print_exception(error)
    return 1


def _leave_child(status: int) -> None:
    """End a process that user code forked and that returned into ours."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(status)
