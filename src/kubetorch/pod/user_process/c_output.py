"""The standard output of the C library, which extensions print to: written line by line.

The library would collect whole blocks for a pipe, and `os._exit`, with which a worker ends, writes
no collected block. With line buffering every whole line is in the pipe even when the process
crashes, and an unfinished line is written when its call ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable
from typing import Final

#: `_IOLBF` of the C library: each line is written when it ends.
_LINE_BUFFERED: Final = 1
_STREAM: Final = "__stdoutp" if sys.platform == "darwin" else "stdout"


class COutput:
    """`stdout` of the C library, if this interpreter shows its symbols."""

    def __init__(self) -> None:
        self._flush: Callable[[ctypes.c_void_p | None], int] = lambda _: 0
        self._stream = ctypes.c_void_p()
        with contextlib.suppress(OSError, ValueError, AttributeError):
            library = ctypes.CDLL(None)
            self._stream = ctypes.c_void_p.in_dll(library, _STREAM)
            library.fflush.argtypes = (ctypes.c_void_p,)
            library.setvbuf.argtypes = (
                ctypes.c_void_p,
                ctypes.c_void_p,
                ctypes.c_int,
                ctypes.c_size_t,
            )
            self._flush = library.fflush
            self.flush()
            library.setvbuf(self._stream, None, _LINE_BUFFERED, 0)
            # Else a child would write it once more.
            os.register_at_fork(before=self.flush)

    def flush(self) -> None:
        """Write the unfinished line of `stdout`."""
        # Not all streams: a stream that another thread reads is locked until input comes.
        self._flush(self._stream)

    def flush_all(self) -> None:
        """Write the buffers of all streams, those of files too, as at the end of a program."""
        self.flush()
        self._flush(None)
