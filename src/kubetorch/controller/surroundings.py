"""What a workload works with: the backend, the state, the clock, and the sessions of its pods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec

from kubetorch.controller.backends.base import Backend
from kubetorch.controller.state import State
from kubetorch.lib.clock import Clock
from kubetorch.wire.messages import FromController

if TYPE_CHECKING:
    from kubetorch.controller.workload import Workload


class PodSession(Protocol):
    """What a workload needs of the session of one of its pods."""

    def send(self, message: FromController) -> None:
        """Tell the agent; dropped when the session is over."""

    def send_text(self, text: bytes) -> None:
        """Tell the agent what is encoded already."""

    def close(self, reason: str) -> None:
        """End the session."""


class Surroundings(msgspec.Struct, frozen=True):
    """What all workloads share.

    Attributes:
        backend: Runs their pods.
        state: Keeps their records.
        clock: For time-outs.
        on_idle: Called when a workload was idle for its `inactivity_ttl`.
        on_lost: Called when pods of it are gone for good, with the reason of each.
    """

    backend: Backend
    state: State
    clock: Clock
    on_idle: Callable[[Workload], None]
    on_lost: Callable[[Workload, Mapping[str, str]], None]
