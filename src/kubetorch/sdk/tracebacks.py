"""Shows exceptions that end a program: with the user's own frames, and the next step.

Frames of Kubetorch, and those of libraries that it calls, say nothing about the user's program.
`KT_TRACEBACK=full` shows them all. In IPython and notebooks it is the same; what tests and programs
format themselves is as Python has it.
"""

from __future__ import annotations

import opcode
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

from kubetorch.errors import KubetorchError, RemoteTraceback
from kubetorch.lib import modules, terminal
from kubetorch.wire import introspection
from kubetorch.wire.introspection import error_attribute, set_error_attribute

#: Environment variable; `full` shows all frames.
VARIABLE = "KT_TRACEBACK"

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_LIBRARIES = (f"{Path(os.__file__).parent}{os.sep}", f"{os.sep}site-packages{os.sep}", "<frozen")

#: Attribute of an interrupt: a sentence about the work that goes on or is cancelled.
_OUTCOME_OF_WORK = "_kubetorch_goes_on"
#: Such sentences for interrupts without one, by the file of Kubetorch that was interrupted.
_INTERRUPTED = {
    "sdk/calls/map.py": "The calls that run are cancelled in their pods.",
    "sdk/calls/": "The call is cancelled in its pods.",
}
_RAISES = opcode.opmap["RAISE_VARARGS"]
_NOT_AWAITABLE = re.compile(r"object .+ can't be used in 'await'|object can't be awaited")


def install() -> None:
    """Show the exceptions that end this program or a thread, unless another hook shows them."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _show_of_thread
    shell = modules.ipython_shell()
    if getattr(shell, "custom_exceptions", None) == ():
        shell.set_custom_exc((Exception, KeyboardInterrupt), _show_in_ipython)


def is_full() -> bool:
    return os.environ.get(VARIABLE) == "full"


def explain_interrupt(interrupt: BaseException, text: str) -> None:
    """Add to an interrupt that ends the program a sentence about the work that goes on."""
    setattr(interrupt, _OUTCOME_OF_WORK, text)


def interruption(error: BaseException) -> str | None:
    """The line for a Ctrl-C that ended work of Kubetorch; `None` for any other exception."""
    if not isinstance(error, KeyboardInterrupt):
        return None
    # An event loop raises another one, after the work in it was cancelled.
    chain = list(_chain(error))
    traces = [error_attribute(exception, "__traceback__") for exception in chain]
    files = [file for trace in traces for file in _files(trace) if _is_ours(file)]
    if not files:
        return None
    explanations = (introspection.attribute(exception, _OUTCOME_OF_WORK) for exception in chain)
    path_explanations = (
        text
        for path_prefix, text in _INTERRUPTED.items()
        if any(file.startswith(_PACKAGE + path_prefix) for file in files)
    )
    explanation = next(filter(None, explanations), None) or next(path_explanations, "")
    return f"Interrupted. {explanation}".rstrip()


def shorten(error: BaseException) -> TracebackType | None:
    """Leave the user's own frames in an exception and its causes; its traceback after that."""
    chain = list(_chain(error))
    for exception in chain:
        _explain_await(exception)
        if _is_intended(exception):
            set_error_attribute(
                exception,
                "__traceback__",
                _user_traceback(error_attribute(exception, "__traceback__")),
            )
    for exception in chain:
        cause = _cause(exception)
        if cause is not None and not _is_useful(cause, exception):
            set_error_attribute(exception, "__cause__", None)
            set_error_attribute(exception, "__context__", None)
    return error_attribute(error, "__traceback__")  # type: ignore[no-any-return]


def _cause(error: BaseException) -> BaseException | None:
    cause = error_attribute(error, "__cause__")
    return error_attribute(error, "__context__") if cause is None else cause  # type: ignore[no-any-return]


def _is_useful(cause: BaseException, error: BaseException) -> bool:
    """True if the cause of an error was raised at a line of the user's."""
    if isinstance(cause, RemoteTraceback):
        return 'File "' in str(cause)
    return error_attribute(cause, "__traceback__") is not None or not isinstance(
        error, KubetorchError
    )


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not is_full():
        line = interruption(error)
        if line is not None:
            sys.stderr.write(f"\n{line}\n")
            return
        trace = shorten(error)
    if terminal.is_terminal(sys.stderr):
        import traceback  # noqa: PLC0415  # once, as the program ends

        text = "".join(traceback.format_exception(kind, error, trace))
        if terminal.visible(text) != text:
            sys.stderr.write(terminal.visible(text))
            return
    sys.__excepthook__(kind, error, trace)


def _show_of_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not is_full():
        trace = shorten(args.exc_value)
        args = threading.ExceptHookArgs((args.exc_type, args.exc_value, trace, args.thread))
    threading.__excepthook__(args)


def _show_in_ipython(
    shell: object,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
    tb_offset: int | None = None,
) -> None:
    if not is_full():
        line = interruption(error)
        if line is not None:
            shell._showtraceback(kind, error, [line])  # type: ignore[attr-defined]  # IPython's
            return
        trace = shorten(error)
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset)  # type: ignore[attr-defined]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception with its causes and contexts."""
    seen_ids: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        exception = pending.pop()
        if exception is not None and id(exception) not in seen_ids:
            seen_ids.add(id(exception))
            yield exception
            pending += [
                error_attribute(exception, "__cause__"),
                error_attribute(exception, "__context__"),
            ]


def _is_intended(error: BaseException) -> bool:
    """True if an exception was raised on purpose, and is no defect of Kubetorch."""
    cause = error_attribute(error, "__cause__")
    if isinstance(error, KubetorchError) or isinstance(cause, RemoteTraceback):
        return True
    last: TracebackType | None = error_attribute(error, "__traceback__")
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or not _is_ours(last.tb_frame.f_code.co_filename):
        return True
    return last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISES


def _user_traceback(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without our frames, and without those of libraries that we called."""
    user_entries: list[TracebackType] = []
    is_within = False
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        is_within = _is_ours(file) or (is_within and _is_library(file))
        if not is_within:
            user_entries.append(trace)
        trace = trace.tb_next
    shortened: TracebackType | None = None
    for entry in reversed(user_entries):
        shortened = TracebackType(shortened, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shortened


def _files(trace: TracebackType | None) -> Iterator[str]:
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename
        trace = trace.tb_next


def _is_ours(file: str) -> bool:
    return file.startswith(_PACKAGE)


def _is_library(file: str) -> bool:
    return any(library_path in file for library_path in _LIBRARIES)


def _explain_await(error: BaseException) -> None:
    """Add to Python's error about `await remote(1)` how a call is awaited."""
    if type(error) is not TypeError or not _NOT_AWAITABLE.search(str(error)):
        return
    last = error_attribute(error, "__traceback__")
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    # Values of the program may raise when they are looked at.
    name = None if last is None else introspection.safely(_first_remote, None, last.tb_frame)
    if name is not None:
        hint = f"await {name}(..., async_=True): without it, a call returns its value"
        error.args = (f"{error}\nhint: {hint}",)


def _first_remote(frame: FrameType) -> str | None:
    return next(_remotes(frame), None)


def _remotes(frame: FrameType) -> Iterator[str]:
    """The expressions in the code of a frame that may have called a pod."""
    remote = sys.modules.get("kubetorch.sdk.calls.remote")
    module = sys.modules.get("kubetorch.sdk.module")
    if remote is None or module is None:
        return
    callable_types = remote.RemoteCallable
    code = frame.f_code
    for name in (*code.co_varnames, *code.co_freevars, *code.co_names):
        value = frame.f_locals.get(name, frame.f_globals.get(name))
        if isinstance(value, remote.RemoteCallable):
            yield name
        elif isinstance(value, module.Module):
            methods = (method for method in code.co_names if not hasattr(module.Module, method))
            yield from (f"{name}.{method}" for method in methods if method not in frame.f_globals)
        else:
            members = getattr(value, "__dict__", {})
            member_names = (member for member in code.co_names if member in members)
            yield from (
                f"{name}.{member}"
                for member in member_names
                if isinstance(members[member], callable_types)
            )
