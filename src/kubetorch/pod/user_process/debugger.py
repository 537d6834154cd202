"""Debuggers in the program of the user: pdb, whose terminal is elsewhere.

A stop dials the agent of the pod (`kubetorch.wire.debugger`) and waits until a terminal is
attached, or the agent says that none came. A session lasts from the first stop of a call in a
thread to the end of the call, so that one terminal sees all its stops. A call whose debugger was
left stops no more, nor do threads that know no call, such as those of a pool, until another call
begins.

A worker, an app and each process that they start may stop: the path of the agent's socket is in
their environment.
"""

from __future__ import annotations

import code
import contextlib
import ctypes
import functools
import gc
import inspect
import os
import pdb
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

from kubetorch.errors import CallCancelledError, CallTimeoutError, KubetorchError
from kubetorch.lib import private_sockets
from kubetorch.pod.user_process import current_call, foreign_traces
from kubetorch.pod.user_process.remote_terminal import STATEMENT_OUTPUT, RemoteTerminal
from kubetorch.pod.user_process.tuning import TIMING
from kubetorch.wire import debugger as wire
from kubetorch.wire.debugger import Debugging

#: Folder of this package, whose frames are not the user's.
_LIBRARY = f"{Path(__file__).parents[2]}{os.sep}"
_STANDARD_LIBRARY = f"{Path(os.__file__).parent}{os.sep}"

#: The folder of a pod that has the project of a generation.
_GENERATION = re.compile(r"^.*?[/\\]code[/\\]\d+[/\\]")

#: The sessions of this process by thread and number of the call.
_Key = tuple[int, int]


# ------------------------------------------------------------------------------------- the session


class Session(pdb.Pdb):
    """A debugger of one call in one thread."""

    def __init__(
        self,
        terminal: RemoteTerminal,
        key: _Key,
        call: Any,  # noqa: ANN401  # a RunningCall
        about: dict[str, Any],
    ) -> None:
        super().__init__(stdin=terminal, stdout=terminal, nosigint=True, readrc=False)  # type: ignore[arg-type]  # what pdb uses of them
        self._terminal = terminal
        self._key = key
        self._call = call
        self._about = about
        #: The suspended frames of a coroutine, outermost first, which know no callers.
        self._coroutine: list[FrameType] = []
        self.is_over = False
        self._is_tracing = False
        #: debugpy, if the terminal that is attached brings a debug adapter.
        self._adapter: Any = None
        #: What lasts as long as the adapter is attached.
        self._attachment = contextlib.ExitStack()
        self._was_left = False
        #: Why the session is over, if that is not plain.
        self._reason = ""
        terminal.completions = self._completions
        terminal.send(wire.HELLO, about)

    # ----------------------------------------------------------------------------------- stops

    def arm(self, frame: FrameType) -> Any:  # noqa: ANN401  # a function of traces
        """Stop at the first line of this frame, which its caller has just entered."""
        self.reset()
        try:
            with self._cancellable():
                is_attached = self._attach(_position(frame, frame.f_lineno))
        finally:
            if self.is_over:
                self.close()
        if not is_attached:
            sys.settrace(None)
            return None
        if self._adapter is not None:
            self._adapter.suspend(frame)
            return frame.f_trace
        self.botframe = frame
        self.set_step()
        sys.settrace(self.trace_dispatch)
        return self.trace_dispatch

    def arm_callers(self, frame: FrameType) -> None:
        """Stop at the next line of this frame or of its callers."""
        self._trace_callers(frame)
        sys.settrace(self.trace_dispatch)

    def _trace_callers(self, frame: FrameType) -> None:
        self.reset()
        caller: FrameType | None = frame
        while caller is not None and not _is_library(caller):
            caller.f_trace = self.trace_dispatch
            self.botframe, caller = caller, caller.f_back
        self.set_step()

    def stop(self, frame: FrameType) -> None:
        self._trace_callers(frame)
        self.interaction(frame, None)
        if sys.version_info < (3, 13):  # a function of traces has its frame's names kept; this none
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        self._trace_on()

    def stop_at_await(self, frames: list[FrameType]) -> None:
        """Stop at suspended frames of a coroutine, outermost first."""
        self._coroutine = frames
        try:
            self.reset()
            self.botframe = frames[0]
            for frame in frames:
                frame.f_trace = self.trace_dispatch
            self.interaction(frames[-1], None)
        finally:
            self._coroutine = []
        self._trace_on()

    def post_mortem(self, error: BaseException, traceback: TracebackType) -> None:
        """Stop at the frame that raised this error, and end the session."""
        self._error = error
        self.reset()
        self.interaction(None, traceback)
        if not self.is_over:
            self.close()

    def _trace_on(self) -> None:
        if self._is_tracing and not self.is_over and self._adapter is None:
            sys.settrace(self.trace_dispatch)

    def trace_dispatch(self, frame: FrameType, event: str, arg: Any) -> Any:  # noqa: ANN401  # bdb's
        """As bdb's; frames that debugpy has come to trace stay with it."""
        trace = super().trace_dispatch(frame, event, arg) if self._adapter is None else None
        return trace if self._adapter is None else frame.f_trace

    def interaction(self, frame: FrameType | None, traceback: TracebackType | None) -> None:
        """Let a terminal give commands, once one is attached."""
        if traceback is not None:
            frame_at, line = _last(traceback)
        else:
            assert frame is not None
            frame_at, line = frame, frame.f_lineno
        try:
            with self._cancellable():
                if self._attach(_position(frame_at, line)):
                    self._interact(frame, traceback)
        finally:
            if self.is_over:
                self.close()

    def _interact(self, frame: FrameType | None, traceback: TracebackType | None) -> None:
        if self._adapter is not None:
            if frame is not None:
                self._adapter.suspend(frame)
            else:
                self._adapter.post_mortem(self._error)
            return
        if self._about["error"]:
            self.message(self._about["error"])
            self._about["error"] = ""
        self._is_tracing = True
        super().interaction(frame, traceback)
        if self._terminal.is_over:
            self._leave()
        elif self._call is None and not self._is_tracing and not self.is_over:
            self.is_over = True  # nothing says when code outside of calls ends
            self._reason = wire.RUNS_ON
        elif not self.is_over:
            self._terminal.send(wire.RUNS)

    def _attach(self, where: str) -> bool:
        """Wait for a terminal; false if the call is to go on without one."""
        terminal = self._terminal
        if self.is_over or terminal.is_over or not terminal.wait_for_attachment(where):
            self._leave()
        elif terminal.mode == wire.DAP and self._adapter is None:
            self._start_adapter()
        return not self.is_over

    def _start_adapter(self) -> None:
        from kubetorch.pod.user_process import dap  # noqa: PLC0415  # only where one is attached

        try:
            self._adapter = dap.AdapterSession.start(self._terminal)
        except Exception as error:  # noqa: BLE001  # debugpy's too: the call is not to fail by it
            name = "" if isinstance(error, KubetorchError) else f"debugpy: {type(error).__name__}: "
            self._reason = f"{name}{error}: the call goes on"
            self._leave()
            return
        self._attachment.callback(self._adapter.close)
        if self._call is not None:
            wait = self._call.waiting(self._terminal.wake, ("a debugger", ""), is_cleanup=None)
            self._attachment.enter_context(wait)

    @contextlib.contextmanager
    def _cancellable(self) -> Iterator[None]:
        """While the thread waits for commands: a cancellation of the call wakes it."""
        if self._call is None:
            yield
            return
        with self._call.waiting(self._terminal.wake, ("a debugger", ""), is_cleanup=None):
            yield

    def _leave(self) -> None:
        """Debug no more: the call goes on."""
        self.is_over = self._was_left = True
        self.clear_all_breaks()
        self.set_continue()

    def close(self, reason: str = "") -> None:
        self.is_over = True
        with contextlib.suppress(CallCancelledError, CallTimeoutError):  # the call raises it itself
            self._attachment.close()
        self._terminal.close(reason or self._reason)
        current_call.debug_sessions.pop(self._key, None)
        if self._call is not None:
            self._call.was_debugged = True
        elif self._was_left:  # whichever call the thread belongs to
            for call in tuple(current_call.running_calls.values()):
                call.had_debugged_threads = True

    def abandon(self) -> None:
        """Leave the session to the parent process."""
        self._terminal.abandon()
        if self._adapter is not None:
            sys.settrace(None)

    # ------------------------------------------------------------------------- what pdb asks for

    def format_stack_entry(self, frame_lineno: tuple[FrameType, int], lprefix: str = ": ") -> str:
        return _shown_path(super().format_stack_entry(frame_lineno, lprefix))

    def stop_here(self, frame: FrameType) -> bool:
        return not _is_library(frame) and super().stop_here(frame)

    def get_stack(
        self, f: FrameType | None, t: TracebackType | None
    ) -> tuple[list[tuple[FrameType, int]], int]:
        """The frames of the user, and the number of the current one."""
        if self._coroutine:
            return [(frame, frame.f_lineno) for frame in self._coroutine], len(self._coroutine) - 1
        stack, _ = super().get_stack(f, t)
        current = stack[-1] if t is not None or f is None else (f, f.f_lineno)
        users = [entry for entry in stack if not _is_library(entry[0])]
        numbers = [number for number, entry in enumerate(users) if entry[0] is current[0]]
        return (users, numbers[-1]) if numbers else (stack, len(stack) - 1)

    def lookupmodule(self, filename: str) -> str | None:
        """The file that a breakpoint names: by its name, or its path on the caller's machine."""
        suffixes = [filename, f"{filename}.py"]
        parts = Path(filename).parts
        suffixes += [str(Path(*parts[number:])) for number in range(1, len(parts))]
        modules = [*sys.modules.values()]
        loaded = [str(getattr(module, "__file__", None) or "") for module in modules]
        frames = [frame.f_code.co_filename for frame, _ in self.stack]
        for suffix in suffixes:
            for file in (*frames, *loaded):
                if file == suffix or file.endswith(f"{os.sep}{suffix}"):
                    return file
        return super().lookupmodule(filename)

    def set_continue(self) -> None:
        super().set_continue()
        self._is_tracing = bool(self.breaks)

    def set_quit(self) -> None:
        """Not as pdb, which would end the program."""
        self._leave()

    # -------------------------------------------------------------------------------- commands

    # The docstrings are the help that users read.

    def do_quit(self, arg: str) -> bool | None:
        """End the debugger: the call goes on, and stops no more."""
        self._leave()
        return True

    do_q = do_exit = do_quit

    def do_EOF(self, arg: str) -> bool | None:
        """End the debugger, as quit does."""
        self._leave()
        return True

    def default(self, line: str) -> None:
        """Run a statement; pdb would have all threads of the program print to the terminal."""
        with STATEMENT_OUTPUT.to(self._terminal):
            self.stdout = sys.stdout  # which pdb has the statement print to
            try:
                super().default(line)
            finally:
                self.stdout = self._terminal  # type: ignore[assignment]  # as in `__init__`

    def do_run(self, arg: str) -> bool | None:
        """Not for calls: call the function again."""
        self.error("a call cannot be restarted: call the function again")
        return None

    do_restart = do_run

    def do_interact(self, arg: str) -> bool | None:
        """Start an interpreter with the names of the current scope; Ctrl-D ends it."""
        assert self.curframe is not None
        # Not `f_locals`, which before Python 3.13 forgets the assignments of this prompt.
        names = {**self.curframe.f_globals, **self.curframe_locals}
        console = _Console(self._terminal, names)
        with STATEMENT_OUTPUT.to(self._terminal), contextlib.suppress(SystemExit):
            console.interact("*interactive*", exitmsg="*exit from interpreter*")
        return None

    def _completions(self, text: str, line: str, begin: int, end: int) -> list[str]:
        command = None
        if begin > 0:
            name, _, _ = self.parseline(line)
            command = getattr(self, f"complete_{name}", None) if name else None
            complete = command or self.completedefault
        else:
            complete = self.completenames
            names = list(complete(text, line, begin, end))
            if names:
                return names
            complete = self._complete_expression
        return list(complete(text, line, begin, end))

    completedefault = pdb.Pdb._complete_expression


class _Console(code.InteractiveConsole):
    def __init__(self, terminal: RemoteTerminal, names: dict[str, Any]) -> None:
        super().__init__(names)
        self._terminal = terminal

    def raw_input(self, prompt: str = "") -> str:
        self._terminal.write(prompt)
        line = self._terminal.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def write(self, data: str) -> None:
        self._terminal.write(data)


def _is_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_LIBRARY)


def _position(frame: FrameType, line: int) -> str:
    return _shown_path(f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}")


def _shown_path(position: str) -> str:
    """A position without the folder of the generation, which fills a line of a terminal."""
    return _GENERATION.sub("", position)


def _last(traceback: TracebackType) -> tuple[FrameType, int]:
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback.tb_frame, traceback.tb_lineno


# ------------------------------------------------------------------------------------------- stops


def deep_breakpoint(frame: FrameType, port: int, mode: str) -> None:
    """Stop at this frame of the user, for `breakpoint()`."""
    session = _session("breakpoint", port, mode)
    if session is not None:
        session.stop(frame)


def stop_at_start(function: object, debugging: Debugging) -> None:
    """Stop in the frame of this function, before its first line, when the thread calls it."""
    target = _code_of(function)
    if target is None:
        print(f"debug=: {function!r} has no code of Python to stop in", file=sys.stderr)  # noqa: T201  # to the log of the call
        return

    def trace(frame: FrameType, event: str, _: object) -> Any:  # noqa: ANN401  # a function of traces
        if event != "call" or frame.f_code is not target:
            return None
        session = _session("debug=", debugging.port, debugging.mode)
        if session is None:
            sys.settrace(None)
            return None
        return session.arm(frame)

    trace.__dict__["call"] = current_call.current.get()
    sys.settrace(trace)


def post_mortem(error: BaseException, debugging: Debugging) -> None:
    """Stop at the frame of the user's code that raised an error."""
    trace = error.__traceback__
    while trace is not None and _is_library(trace.tb_frame):
        trace = trace.tb_next
    if trace is None:
        return
    summary = f"post-mortem: {type(error).__name__}: {error}"
    session = _session("post-mortem", debugging.port, debugging.mode, error=summary)
    if session is not None:
        session.post_mortem(error, trace)


def interrupt(call: Any, debugging: Debugging) -> None:  # noqa: ANN401  # a RunningCall
    """Stop a running call in whatever it does, from another thread, also if it was left before."""
    call.was_debugged = False
    if call.task is not None:
        call.loop.call_soon_threadsafe(_stop_task, call, debugging)
        return
    call.debugging = call.debugging or debugging  # the end of the call ends its trace
    name, args = "kubetorch-debugger", (call, debugging)
    threading.Thread(target=_stop_thread, args=args, name=name, daemon=True).start()


def _stop_task(call: Any, debugging: Debugging) -> None:  # noqa: ANN401  # a RunningCall
    """Stop at the frame in which the coroutine of a call awaits; runs in the loop's thread."""
    frames: list[FrameType] = []
    coroutine = call.task.get_coro()
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None)
        if frame is not None and not _is_library(frame):
            frames.append(frame)
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    while len(frames) > 1 and frames[-1].f_code.co_filename.startswith(_STANDARD_LIBRARY):
        frames.pop()
    if not frames or call.task.done():
        return
    session = _session("kt debug --call", debugging.port, debugging.mode, call=call)
    if session is not None:
        session.stop_at_await(frames)


def _stop_thread(call: Any, debugging: Debugging) -> None:  # noqa: ANN401  # a RunningCall
    """Have the thread of a call, which may not have begun, stop at its next line.

    There it begins to trace itself.
    """
    is_done = threading.Event()

    def on_event(frame: FrameType | None) -> None:
        if threading.get_ident() != call.interruptible.thread or is_done.is_set():
            return
        while frame is not None and _is_library(frame):
            frame = frame.f_back
        running = current_call.current.get()
        if frame is None or (running is not None and running is not call):
            return  # the call has not come to the user's function yet
        is_done.set()
        session = _session("kt debug --call", debugging.port, debugging.mode, call=call)
        if session is not None:
            session.arm_callers(frame)

    if foreign_traces.IS_POSSIBLE:
        _trace_thread(call, on_event, is_done)
        return
    with _events(on_event):
        is_done.wait(TIMING.debugger_interrupt_seconds)


def _trace_thread(
    call: Any,  # noqa: ANN401  # a RunningCall
    on_event: Callable[[FrameType | None], None],
    is_done: threading.Event,
) -> None:
    """Call this function at each line that the thread of a call begins, until that is done."""

    def trace(frame: FrameType, event: str, _: object) -> Any:  # noqa: ANN401  # a function of traces
        running = current_call.current.get()
        if is_done.is_set() or (running is not None and running is not call):
            if sys.gettrace() is trace:  # not yet that of a debugger
                sys.settrace(None)
            return None
        if event == "line":
            on_event(frame)
        return frame.f_trace if is_done.is_set() else trace

    trace.__dict__["call"] = call
    deadline = time.monotonic() + TIMING.debugger_interrupt_seconds
    is_set = False
    while not is_done.wait(TIMING.debugger_poll_seconds) and time.monotonic() < deadline:
        thread = call.interruptible.thread
        if not is_set and thread is not None:
            is_set = foreign_traces.set_trace(thread, trace)
    is_done.set()


@contextlib.contextmanager
def _events(on_event: Callable[[FrameType | None], None]) -> Iterator[None]:
    """Call this function often in each thread, at each line if this Python and its tools let us."""
    tool = None if sys.version_info < (3, 12) else _take_tool()
    with _collections(on_event) if tool is None else _lines(on_event, tool):
        yield


def _take_tool() -> int | None:
    """A free number of `sys.monitoring`, now ours; `None` if debuggers and the like have all."""
    for number in (3, 4, 5, 2, 1, 0):  # the first two are reserved for nothing
        with contextlib.suppress(ValueError):  # it is taken
            sys.monitoring.use_tool_id(number, "kubetorch")  # type: ignore[attr-defined,unused-ignore]  # of Python 3.12
            return number
    return None


@contextlib.contextmanager
def _lines(on_event: Callable[[FrameType | None], None], tool: int) -> Iterator[None]:
    """Call this function at each line that a thread begins, in the thread."""
    monitoring = sys.monitoring  # type: ignore[attr-defined,unused-ignore]  # of Python 3.12
    line = monitoring.events.LINE
    monitoring.register_callback(tool, line, lambda *_: on_event(sys._getframe(1)))
    monitoring.set_events(tool, line)
    try:
        yield
    finally:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, line, None)
        monitoring.free_tool_id(tool)


@contextlib.contextmanager
def _collections(on_event: Callable[[FrameType | None], None]) -> Iterator[None]:
    """Call this function where a thread makes an object, in the thread.

    Where all tools are taken no thread can trace another one. But a thread that makes an object may
    have to collect garbage, and calls `gc.callbacks`.
    """

    def on_collection(phase: str, _: object) -> None:
        if phase == "start":
            on_event(sys._getframe(1))

    was_enabled, thresholds = gc.isenabled(), gc.get_threshold()
    gc.callbacks.insert(0, on_collection)
    try:
        gc.enable()
        gc.set_threshold(1, *thresholds[1:])
        yield
    finally:
        gc.set_threshold(*thresholds)
        if not was_enabled:
            gc.disable()
        gc.callbacks.remove(on_collection)


def finish(call: Any) -> None:  # noqa: ANN401  # a RunningCall
    """End the debugger of a call that ends in this thread, which other calls use next."""
    session = current_call.debug_sessions.get((threading.get_ident(), call.number))
    if session is not None:
        session.clear_all_breaks()
        session.close("the call has ended, and its debugger")
    trace = sys.gettrace()
    owner = getattr(trace, "__self__", None) or getattr(trace, "call", None)
    if owner is not None and owner in (session, call, call.batch):
        sys.settrace(None)


def _session(
    why: str,
    port: int,
    mode: str,
    *,
    error: str = "",
    call: Any = None,  # noqa: ANN401  # a RunningCall
) -> Session | None:
    """The session of the call of this thread; `None` if it is to stop no more, or cannot."""
    call = current_call.current.get() if call is None else call
    number = 0 if call is None else call.number
    key = (threading.get_ident(), number)
    session: Session | None = current_call.debug_sessions.get(key)
    if session is not None:
        return session
    if call is not None and (call.was_debugged or call.cancelled is not None):
        return None
    running_calls = tuple(current_call.running_calls.values())
    if call is None and running_calls and all(run.had_debugged_threads for run in running_calls):
        return None
    path = os.environ.get(wire.SOCKET, "")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(TIMING.debugger_connect_seconds)
        connection.connect(path)
        private_sockets.check_user(connection, may_be_root=True)
        connection.settimeout(None)
    except OSError as failure:
        connection.close()
        print(  # noqa: T201  # to the log of the call
            f"{why} does not stop: the agent of the pod takes no debugger ({failure})",
            file=sys.stderr,
        )
        return None
    about = {
        "worker": os.environ.get("KT_WORKER", ""),
        "pid": os.getpid(),
        "call": number,
        "thread": threading.current_thread().name,
        "why": why,
        "mode": mode,
        "port": port,
        "wait": os.environ.get(wire.WAIT, ""),
        "error": error,
    }
    session = Session(RemoteTerminal(connection), key, call, about)
    current_call.debug_sessions[key] = session
    return session


def _code_of(function: Any) -> CodeType | None:  # noqa: ANN401  # the user's
    """The code of the user's own function, under its decorators."""
    with contextlib.suppress(ValueError):  # a cycle
        function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    code_object = getattr(function, "__code__", None)
    if code_object is None:
        code_object = getattr(getattr(type(function), "__call__", None), "__code__", None)  # noqa: B004  # the method itself
    return code_object if isinstance(code_object, CodeType) else None


def _forget_sessions() -> None:
    """Leave the sessions to the parent process."""
    for session in current_call.debug_sessions.values():
        session.abandon()
    current_call.debug_sessions.clear()


os.register_at_fork(after_in_child=_forget_sessions)
