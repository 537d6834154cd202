"""The messages of user code to the worker that runs it: `kt.progress` and `kt.on_preempt`.

A worker has imported the module that receives them; other programs are spared the import.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from kubetorch.errors import SpecError
from kubetorch.wire import introspection

_F = TypeVar("_F", bound=Callable[[], Any])
_MODULE = "kubetorch.pod.user_process.current_call"


def progress(current: float, total: float | None = None, message: str | None = None) -> None:
    """Tell the caller how far this call has come. Outside a pod it does nothing.

    Args:
        current: What is done, in any unit.
        total: What is to be done, in the same unit, when it is known.
        message: What is happening.
    """
    worker_module = sys.modules.get(_MODULE)
    if worker_module is not None:
        worker_module.progress(current, total, message)


def on_preempt(callback: _F) -> _F:
    """Have `callback()` run when this pod has to end, such as to save a checkpoint.

    A pod has to end (`SIGTERM`) when its node is preempted or drained, and by a teardown. Until
    the grace period is over, calls that run go on, and the callbacks run, one after the other, in a
    thread of their own. What they raise is logged. Outside of a pod this does nothing.

    Args:
        callback: A function without arguments. One that is registered inside a call belongs to the
            call and is forgotten at its end; at the top level of a module or in a constructor it
            belongs to the process. Registering it again changes nothing.

    Returns:
        The callback, so that this is a decorator too.

    Raises:
        SpecError: It cannot be called, or is an `async def`, which a thread cannot run.
    """
    if not callable(callback):
        raise SpecError(
            f"on_preempt was given {introspection.shown(callback)}, which cannot be called",
            hint="for example kt.on_preempt(save_checkpoint)",
        )
    if introspection.safely(inspect.iscoroutinefunction, False, callback):
        raise SpecError(
            f"on_preempt was given {introspection.shown(callback)}, an async function; it runs in "
            "a thread",
            hint="give it a plain function",
        )
    worker_module = sys.modules.get(_MODULE)
    if worker_module is not None:
        worker_module.callbacks.add(callback)
    return callback
