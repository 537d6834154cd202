"""`kt.progress`: how far a call has come, reported from inside it."""

from __future__ import annotations

import sys


def progress(current: float, total: float | None = None, message: str | None = None) -> None:
    """Tell the caller how far this call has come. Outside a pod it does nothing.

    Args:
        current: What is done, in any unit.
        total: What is to be done, in the same unit, when it is known.
        message: What is happening.
    """
    # A pod's worker has this module loaded; looking it up spares everybody else the import.
    context = sys.modules.get("kubetorch.pod.user_process.current_call")
    if context is not None:
        context.progress(current, total, message)
