"""`kt.calls`: calls by their ids, from any program of the same user."""

from __future__ import annotations

from kubetorch.sdk.calls.handles import CallHandle, HandOvers


def get(call_id: str) -> CallHandle:
    """The handle of a call that was spawned, or whose value could not travel.

    Args:
        call_id: Its identity: 32 hexadecimal digits, as `handle.id` and `kt calls list` show it.

    Raises:
        SpecError: This cannot be the identity of a call.
    """
    return CallHandle.from_id(call_id)


def flush(timeout: float | None = None) -> None:
    """Wait until pods have all calls that this program spawned with `async_=True`.

    The end of a program waits for the same, and names on stderr those that no pod took, but it
    changes no exit status.

    Args:
        timeout: Seconds to wait at most; `None` waits as long as the calls take.

    Raises:
        CallLostError: No pod took some of the calls; the message names each, and why.
        CallTimeoutError: The pods did not take all calls within `timeout`; the program goes on
            handing them over.
    """
    HandOvers.of_program().flush(timeout)
