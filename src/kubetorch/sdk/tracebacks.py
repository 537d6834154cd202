"""How exceptions that end a program are shown: with the user's own frames, and what goes on.

Frames of Kubetorch, and those of libraries that it calls, say nothing about the user's program.
`KT_TRACEBACK=full` shows them all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from kubetorch.errors import KubetorchError, RemoteTraceback
from kubetorch.lib import terminal

#: Environment variable; `full` shows all frames.
VARIABLE = "KT_TRACEBACK"

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_LIBRARIES = (f"{Path(os.__file__).parent}{os.sep}", f"{os.sep}site-packages{os.sep}", "<frozen")

#: What a program was doing that Ctrl-C ended, by where it was, and what became of that.
_INTERRUPTED = {
    "sdk/deploys/": "What was sent of the deploy goes on: kt list shows the "
    "service, kt teardown ends it.",
    "sdk/calls/handles.py": "The spawned call goes on: kt calls shows it.",
    "sdk/calls/": "The call is cancelled in its pods.",
}


def install() -> None:
    """Show the exceptions that end this program, if nobody else does."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    is_full = os.environ.get(VARIABLE) == "full"
    if not is_full:
        if isinstance(error, KeyboardInterrupt) and any(map(_is_ours, _files(trace))):
            sys.stderr.write(f"\nInterrupted. {_what_goes_on(trace)}".rstrip() + "\n")
            return
        for one in _chain(error):
            if _is_told(one):
                one.__traceback__ = _users(one.__traceback__)
        trace = error.__traceback__
    if terminal.is_terminal(sys.stderr):
        import traceback  # noqa: PLC0415  # once, as the program ends

        text = "".join(traceback.format_exception(kind, error, trace))
        if terminal.visible(text) != text:
            sys.stderr.write(terminal.visible(text))
            return
    sys.__excepthook__(kind, error, trace)


def _what_goes_on(trace: TracebackType | None) -> str:
    files = [file.removeprefix(_PACKAGE) for file in _files(trace) if _is_ours(file)]
    found = (
        text for place, text in _INTERRUPTED.items() if any(f.startswith(place) for f in files)
    )
    return next(found, "")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception with those that it follows from."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [one.__cause__, one.__context__]


def _is_told(error: BaseException) -> bool:
    """Whether an exception was raised on purpose, and is no defect of Kubetorch."""
    if isinstance(error, KubetorchError) or isinstance(error.__cause__, RemoteTraceback):
        return True
    last = list(_files(error.__traceback__))[-1:]
    return not any(map(_is_ours, last))


def _users(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without our frames, and without those of libraries that we called."""
    kept: list[TracebackType] = []
    is_within = False
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        is_within = _is_ours(file) or (is_within and _is_library(file))
        if not is_within:
            kept.append(trace)
        trace = trace.tb_next
    found: TracebackType | None = None
    for one in reversed(kept):
        found = TracebackType(found, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return found


def _files(trace: TracebackType | None) -> Iterator[str]:
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename
        trace = trace.tb_next


def _is_ours(file: str) -> bool:
    return file.startswith(_PACKAGE)


def _is_library(file: str) -> bool:
    return any(place in file for place in _LIBRARIES)
