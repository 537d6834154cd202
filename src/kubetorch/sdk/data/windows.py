"""`kt.BroadcastWindow`: putters and getters of tensors wait for each other."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import UnionType
from typing import Any

from kubetorch.config import environment
from kubetorch.errors import DataStoreError, SpecError
from kubetorch.sdk.data.client import ask
from kubetorch.sdk.transport.session import Session
from kubetorch.sdk.tuning import TIMING
from kubetorch.wire import introspection
from kubetorch.wire.data import JoinWindow, WindowView
from kubetorch.wire.transports import Offer

#: That a pod serves at a time.
_MOST_GETTERS = 50


@dataclass
class BroadcastWindow:
    """The participants of a transfer to many pods.

    Putters and getters of tensors wait for each other: until the first condition of any of them is
    met. A put has stored its tensors before it waits. Afterwards they go straight from the putter's
    process to those of the getters, or a get reads them from the store. Puts and gets of files
    begin at once; of them `fanout` alone has an effect.

    Attributes:
        timeout: Seconds to wait for participants, from the first one on.
        world_size: Number of participants, putters and getters.
        ips: Addresses of pods: all of them take part.
        group_id: Name of the group; if not given, the keys. Who comes when the window of a group
            is closed opens the next one.
        fanout: Getters that a pod serves at a time, up to 50, and the store up to 2; 1 is a chain.
            If not given, two as long as others have room.
        pack: From process to process, all tensors travel as one buffer; else large ones alone,
            and small ones together. That of the put decides.

    Raises:
        SpecError: There is neither `timeout` nor `world_size` nor `ips`.
    """

    timeout: float | None = None
    world_size: int | None = None
    ips: list[str] | None = None
    group_id: str | None = None
    fanout: int | None = None
    pack: bool = False

    def __post_init__(self) -> None:
        if self.timeout is None and self.world_size is None and not self.ips:
            raise SpecError(
                "kt.BroadcastWindow needs at least one of timeout, world_size and ips",
                hint="for example kt.BroadcastWindow(world_size=4, timeout=60)",
            )
        _check_number("timeout", self.timeout, int | float, inf)
        _check_number("world_size", self.world_size, int, inf)
        _check_number("fanout", self.fanout, int, _MOST_GETTERS)
        ips: object = self.ips
        if isinstance(ips, str):
            hint = 'for example ["10.0.0.7"]'
            raise SpecError(f"ips is {ips!r}; it must be a list of addresses", hint=hint)

    def to_dict(self) -> dict[str, Any]:
        """The fields that have a value."""
        return {name: value for name, value in vars(self).items() if value is not None}


def _check_number(name: str, value: object, kind: type | UnionType, most: float) -> None:
    if value is None:
        return
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if not is_number or not 0 < value <= most:  # type: ignore[operator]  # it is a number
        noun = "a whole number" if kind is int else "a number of seconds"
        limit = "" if most == inf else f", at most {most}"
        raise SpecError(f"{name} is {value!r}; it must be {noun} greater than 0{limit}")


def check_window(window: object) -> None:
    """Refuse a `broadcast` that is neither `None` nor a `kt.BroadcastWindow`."""
    if window is not None and not isinstance(window, BroadcastWindow):
        raise SpecError(
            f"broadcast is {introspection.shown(window)}",
            hint="for example kt.BroadcastWindow(world_size=4, timeout=60)",
        )


@dataclass(frozen=True)
class Members:
    """What the participants of a closed window offer, and which of them this one is."""

    participant: str
    offers: Mapping[str, Offer]


def wait(
    session: Session,
    namespace: str,
    window: BroadcastWindow,
    keys: Sequence[str],
    offer: Offer | None = None,
) -> Members:
    """Wait until one of the conditions of a participant is met.

    Raises:
        DataStoreError: None was met for `window_longest_seconds`.
    """
    join = JoinWindow(
        group=window.group_id or "\n".join(sorted(keys)),
        participant=uuid.uuid4().hex,
        ip=environment.pod_ip(),
        timeout=window.timeout,
        world_size=window.world_size,
        ips=tuple(window.ips or ()),
        offer=offer,
    )

    def joined() -> WindowView:
        return ask(session, namespace, lambda client: client.join_window(join))

    end = time.monotonic() + max(TIMING.window_longest_seconds, window.timeout or 0.0)
    while not (view := joined()).is_closed:
        if time.monotonic() > end:
            raise DataStoreError(
                f"of the participants of {window.to_dict()} {view.participants} came within "
                f"{TIMING.window_longest_seconds:.0f} s",
                hint="with timeout= as well, those that are there begin after so many seconds",
            )
        time.sleep(TIMING.window_poll_seconds)
    return Members(join.participant, view.offers)
