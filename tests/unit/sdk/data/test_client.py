"""Questions to the data store."""

from __future__ import annotations

from typing import Any

import pytest

from kubetorch.sdk.data.client import DataClient
from kubetorch.sdk.tuning import LIMITS
from kubetorch.wire import messages
from kubetorch.wire.data import FindKeys, KeyView, PathKey, PathKeys


class StoreWithKeys:
    """A controller whose keys have these sizes; notes the leases that it is asked for."""

    def __init__(self, *sizes: int) -> None:
        views = [KeyView(key=str(size), kind="file", manifest="", size=size) for size in sizes]
        self._answer = PathKeys(keys=tuple(PathKey(key=view) for view in views))
        self.leases: list[float] = []

    def ask(self, method: str, path: str, *, body: bytes, timeout: float) -> bytes:
        assert timeout > 0
        assert (method, path.rpartition("/")[2]) == ("POST", "find")
        self.leases.append(messages.decode(FindKeys, body).lease_seconds)
        return messages.encode(self._answer)


@pytest.mark.parametrize(("hours", "leases"), [([], [600.0]), ([0.1], [600.0])])
def test_keys_that_are_soon_read_are_asked_for_once(
    hours: list[float], leases: list[float]
) -> None:
    store: Any = StoreWithKeys(*(int(3600 * h * LIMITS.slow_get_bytes_per_second) for h in hours))
    DataClient(store, "default").find(FindKeys(path=""))
    assert store.leases == leases


def test_keys_that_take_long_to_read_are_leased_for_as_long_together() -> None:
    store: Any = StoreWithKeys(*[1800 * LIMITS.slow_get_bytes_per_second] * 2)
    DataClient(store, "default").find(FindKeys(path=""))
    assert store.leases == [600.0, 3600.0]
