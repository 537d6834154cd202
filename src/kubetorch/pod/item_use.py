"""Says of the items of a map that they hardly use the processor: several at once cost nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from kubetorch.lib import processes
from kubetorch.pod.logs import Line
from kubetorch.wire.frames import KUBETORCH

#: Seconds of a map after which it is looked at.
WINDOW = 5.0
#: The part of a core below which items mostly wait.
IDLE_SHARE = 0.2
# Maps that are remembered, so that none is looked at twice.
_MOST = 1000


@dataclass(eq=False)
class ItemUse:
    """The maps that ask for the line, by their identity."""

    #: The processes that run items.
    pids: Callable[[], Collection[int]]
    #: How many items of a map run, and one of them gets a line.
    running: Callable[[str], int]
    tell: Callable[[str, Line], None]
    _known: dict[str, None] = field(default_factory=dict)

    def on_begun(self, map_id: str) -> None:
        """An item of a map runs."""
        if map_id in self._known:
            return
        self._known[map_id] = None
        if len(self._known) > _MOST:
            del self._known[next(iter(self._known))]
        pids = frozenset(self.pids())
        used = seconds_used(pids)
        if used is not None:
            asyncio.get_running_loop().call_later(WINDOW, self._look, map_id, pids, used)

    def _look(self, map_id: str, pids: frozenset[int], before: float) -> None:
        running, after = self.running(map_id), seconds_used(pids)
        if not running or after is None or pids != frozenset(self.pids()):
            return
        share = (after - before) / WINDOW / running
        if share < IDLE_SHARE:
            text = (
                f"the items of this map use {max(share, 0.0):.0%} of a core each, and run one at a "
                "time in a process: kt.Compute(concurrency=N) runs N of them at once"
            )
            self.tell(map_id, Line(text, KUBETORCH, "INFO", time.time(), None))


def seconds_used(pids: Collection[int]) -> float | None:
    """Seconds of processor time that processes and what they started have used; `None`: unknown."""
    ticks = 0
    for pid in pids:
        for each in processes.descendants(pid):
            used = processes.ticks_used(each)
            if used is None and each == pid:
                return None
            ticks += used or 0
    return ticks / processes.TICKS
