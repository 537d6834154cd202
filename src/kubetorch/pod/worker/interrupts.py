"""Raising an exception in the thread that runs a call, and in no other code than the call's."""

from __future__ import annotations

import ctypes
import threading

from kubetorch.errors import KubetorchError

_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_exception.argtypes = (ctypes.c_ulong, ctypes.py_object)
_set_exception.restype = ctypes.c_int
_take_back = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)


class Interruptible:
    """A stretch of code that can be interrupted once.

    The interpreter delivers the exception at some later moment; leaving the block waits for the
    interrupter and takes back what was not delivered, so none ever arrives behind it:

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
            _take_back(threading.get_ident(), None)

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
