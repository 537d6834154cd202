"""Calls that a thread waits for, and a warning where that blocks an event loop.

`await f(1)` and `gather(f(1), f(2))` block it, too.
"""

from __future__ import annotations

import sys
from types import FrameType

from kubetorch.lib import terminal
from kubetorch.sdk.calls import broadcast
from kubetorch.sdk.calls.attempts import Done, Invocation, RankValues, Yielded
from kubetorch.sdk.calls.call import Call, RankIterator, RemoteIterator, Rounds

# Flags of a function's code, as in `inspect`, whose import costs 10 ms.
_COROUTINE, _ASYNC_GENERATOR = 0x80, 0x200
#: Packages that run plain code in a coroutine of their own: the cells of a notebook.
_RUNNERS = ("IPython", "ipykernel")


def run(invocation: Invocation) -> Done:
    """The outcome of a call, on one pod or on all; the value of a generator's is an iterator."""
    target = invocation.target
    if invocation.broadcast is not None:
        if target.kind != "function":
            return Done(broadcast.iterate(invocation))
        done = broadcast.call(invocation)
        _await_last_lines(invocation)
        return done
    call = Call(invocation)
    if target.kind != "function" and not target.is_distributed:
        call.open()
        return Done(RemoteIterator(call))
    step = call.next()
    if isinstance(step, Yielded):
        return Done(_iterators(call, step))
    _await_last_lines(invocation)
    if step.is_streamed and step.error is None:
        return Done(_iterators(call, step))
    return step


def _await_last_lines(invocation: Invocation) -> None:
    """Show what the pods print after the call for as long as the service's logging says."""
    if invocation.target.logging.shutdown_grace_period:
        invocation.service_route.pause(invocation.target.logging.shutdown_grace_period)


def _iterators(call: Call, first: Done | Yielded) -> RemoteIterator | list[RankIterator]:
    """The values of a generator; of a distributed service an iterator for each rank."""
    if isinstance(first.value, RankValues):
        rounds = Rounds(call, first)
        return [RankIterator(rounds, rank) for rank in rounds.ranks]
    return RemoteIterator(call, first)


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
