"""Functions of traces for threads that run already, which Python before 3.12 has no way to set.

The interpreter has: `_PyEval_SetTrace` takes the state of any thread. The caller holds the
interpreter's lock during each of these functions of C. The thread must not end meanwhile: threads
of calls last as long as their process.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

#: True where these functions have the forms below.
IS_POSSIBLE = (
    sys.implementation.name == "cpython"
    and sys.version_info < (3, 12)
    and hasattr(ctypes.pythonapi, "_PyEval_SetTrace")
)

_Function = Callable[[FrameType, str, Any], Any]
_Trace = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.py_object, ctypes.py_object, ctypes.c_int, ctypes.c_void_p
)


def _trace_thread(function: _Function, frame: FrameType, _event: int, _argument: object) -> int:
    # The rest is the interpreter's: what the function raises would not leave this one.
    sys.settrace(function)
    traced_frame: FrameType | None = frame
    while traced_frame is not None:
        traced_frame.f_trace = function
        traced_frame = traced_frame.f_back
    return 0


#: Never freed: a thread may have it.
_on_event = _Trace(_trace_thread)


def set_trace(thread: int, function: _Function) -> bool:
    """Have a thread trace itself and its frames by this function, as `sys.settrace` would.

    Returns:
        False if the thread was on its way to another frame, or has ended.
    """
    python = ctypes.pythonapi
    interpreter = _prototype("PyInterpreterState_Get", ctypes.c_void_p)()
    first_thread = _prototype("PyInterpreterState_ThreadHead", ctypes.c_void_p, ctypes.c_void_p)
    next_thread = _prototype("PyThreadState_Next", ctypes.c_void_p, ctypes.c_void_p)
    frame_of = _prototype("PyThreadState_GetFrame", ctypes.c_void_p, ctypes.c_void_p)
    install = _prototype(
        "_PyEval_SetTrace", ctypes.c_int, ctypes.c_void_p, _Trace, ctypes.py_object
    )
    release = python.Py_DecRef
    frame = sys._current_frames().get(thread)
    state = first_thread(interpreter)
    while frame is not None and state:
        address = frame_of(state)
        if address:
            release(ctypes.c_void_p(address))
        if address == id(frame):
            return bool(install(state, _on_event, function) == 0)
        state = next_thread(state)
    return False


def _prototype(name: str, result: Any, *arguments: Any) -> Any:  # noqa: ANN401  # types of ctypes
    """A function of the interpreter, which keeps its lock."""
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))
