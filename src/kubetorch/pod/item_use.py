"""Advises to run several items of a map at once, when its items hardly use the processor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from kubetorch.lib import processes
from kubetorch.pod.logs import Line
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.wire.frames import KUBETORCH


@dataclass(eq=False)
class ItemUse:
    """Measures the maps of a pod, by their identity."""

    #: The processes that run items.
    pids: Callable[[], Collection[int]]
    #: The number of running items of a map, one of which gets the line.
    running: Callable[[str], int]
    send_line: Callable[[str, Line], None]
    _watched_maps: dict[str, None] = field(default_factory=dict)

    def on_begun(self, map_id: str) -> None:
        """Measure a map from its first running item on."""
        if map_id in self._watched_maps:
            return
        self._watched_maps[map_id] = None
        if len(self._watched_maps) > LIMITS.measured_maps:
            del self._watched_maps[next(iter(self._watched_maps))]
        pids = frozenset(self.pids())
        seconds_before = seconds_used(pids)
        if seconds_before is not None:
            asyncio.get_running_loop().call_later(
                TIMING.item_use_seconds, self._check_use, map_id, pids, seconds_before
            )

    def _check_use(self, map_id: str, pids: frozenset[int], seconds_before: float) -> None:
        running, seconds_after = self.running(map_id), seconds_used(pids)
        if not running or seconds_after is None or pids != frozenset(self.pids()):
            return
        share = (seconds_after - seconds_before) / TIMING.item_use_seconds / running
        if share < TIMING.idle_item_share:
            text = (
                f"the items of this map use {max(share, 0.0):.0%} of a core each, and run one at a "
                "time in a process: kt.Compute(concurrency=N) runs N of them at once"
            )
            self.send_line(map_id, Line(text, KUBETORCH, "INFO", time.time(), None))


def seconds_used(pids: Collection[int]) -> float | None:
    """Seconds of processor time of processes and their descendants; `None` if unknown."""
    ticks = 0
    for pid in pids:
        for process_id in processes.descendants(pid):
            used = processes.ticks_used(process_id)
            if used is None and process_id == pid:
                return None
            ticks += used or 0
    return ticks / processes.TICKS
