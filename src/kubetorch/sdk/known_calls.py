"""`kt.calls`: calls by their ids, from any program of the same user."""

from __future__ import annotations

from kubetorch.sdk.calls.handles import CallHandle


def get(call_id: str) -> CallHandle:
    """The handle of a call that was spawned, or whose value could not travel.

    Args:
        call_id: Its identity: 32 hexadecimal digits, as `handle.id` and `kt calls list` show it.

    Raises:
        SpecError: This cannot be the identity of a call.
    """
    return CallHandle.from_id(call_id)
