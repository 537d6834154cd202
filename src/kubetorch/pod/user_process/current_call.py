"""The call that runs here, for user code, the SDK and the capture of output.

The SDK finds this module with `sys.modules.get("kubetorch.pod.user_process.current_call")`, so that
a program that is no worker does not import it.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol


class CurrentCall(Protocol):
    """One call."""

    number: int
    request_id: str

    def progress(self, current: float, total: float | None, message: str | None) -> None:
        """Tell the caller how far the call has come."""


#: Whether this process is a worker; `run` of the module `process` says so.
is_worker = False

#: The call that runs in this context; `None` outside of calls, and in threads that user code
#: started without copying the context.
current: ContextVar[CurrentCall | None] = ContextVar("kubetorch_call", default=None)


def request_id() -> str | None:
    """Identity of the request that the running call belongs to."""
    call = current.get()
    return None if call is None else call.request_id


def progress(current_value: float, total: float | None = None, message: str | None = None) -> bool:
    """Tell the caller how far the running call has come; false when no call runs here."""
    call = current.get()
    if call is None:
        return False
    call.progress(current_value, total, message)
    return True
