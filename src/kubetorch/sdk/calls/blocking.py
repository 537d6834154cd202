"""Warns of a call that blocks an event loop: `await f(1)` and `gather(f(1), f(2))` do, too."""

from __future__ import annotations

import sys
from types import FrameType

from kubetorch.lib import terminal

# Flags of a function's code, as in `inspect`, whose import costs 10 ms.
_COROUTINE, _ASYNC_GENERATOR = 0x80, 0x200
#: Packages that run plain code in a coroutine of their own: the cells of a notebook.
_RUNNERS = ("IPython", "ipykernel")


def warn_in_loop(name: str, instead: str) -> None:
    """Report once that a call blocks a coroutine of the user's, and all others of its loop.

    Args:
        name: The call.
        instead: The expression that a coroutine awaits instead.
    """
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or asyncio._get_running_loop() is None:
        return
    if blocks_users_coroutine(sys._getframe(1)):
        terminal.say_once(
            f"{name} blocks the event loop until it has its value, which cannot be awaited; "
            f"{instead} lets other coroutines run"
        )


def blocks_users_coroutine(frame: FrameType | None) -> bool:
    """True if the innermost coroutine that runs a frame is the user's."""
    while frame is not None and not frame.f_code.co_flags & (_COROUTINE | _ASYNC_GENERATOR):
        frame = frame.f_back
    if frame is None:
        return False
    return str(frame.f_globals.get("__name__")).partition(".")[0] not in _RUNNERS
