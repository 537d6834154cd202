"""Runs a program on a machine that allows no new namespaces: a filter refuses the system call.

    python without_namespaces.py COMMAND...

What the program starts inherits the filter.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_MODE_FILTER = 2
#: Number of `unshare`.
_NUMBERS = {"x86_64": 272, "aarch64": 97}

_LOAD_NUMBER = 0x20
_JUMP_IF_EQUAL = 0x15
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_REFUSE = 0x00050000 | errno.EPERM


def refuse_unshare() -> None:
    """Have `unshare` fail in this process and all that it starts."""
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (_LOAD_NUMBER, 0, 0, 0),
            (_JUMP_IF_EQUAL, 0, 1, _NUMBERS[platform.machine()]),
            (_RETURN, 0, 0, _REFUSE),
            (_RETURN, 0, 0, _ALLOW),
        )
    )
    instructions = ctypes.create_string_buffer(program)
    described = struct.pack("HxxxxxxP", 4, ctypes.addressof(instructions))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, described, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    refuse_unshare()
    os.execvp(sys.argv[1], sys.argv[1:])
