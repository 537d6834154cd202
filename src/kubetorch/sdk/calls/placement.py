"""Decides which pod runs which item of a map: a state machine, events in, decisions out.

    offer ── assign ──┬── begin ── end
       ▲              │
       └── give_back ─┘   taken back, refused, or lost before it began

Every pod has a few items more than it runs, so that the next one is there already when one ends. It
is not known how long an item takes, so items may wait in the wrong pod: once there is no further
item to send, a pod without waiting items gets items that wait in another pod.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kubetorch.sdk.tuning import LIMITS

_Item = TypeVar("_Item", bound=Hashable)
_PodT = TypeVar("_PodT", bound=Hashable)


@dataclass(eq=False)
class _Line(Generic[_Item]):
    """The items in a pod."""

    #: Items that have not begun, as far as is known, in the order in which they were sent.
    waiting: dict[_Item, None] = field(default_factory=dict)
    running: set[_Item] = field(default_factory=set)
    #: Waiting items that the pod was asked to give back.
    requested: set[_Item] = field(default_factory=set)
    #: True if an item waited in the pod and none has ended since: it runs as many as it can.
    is_full: bool = False
    #: The most items that ran at one time.
    most_running: int = 0

    @property
    def is_hungry(self) -> bool:
        return not self.waiting and not self.is_full


class Placement(Generic[_Item, _PodT]):
    """The items of one map that have not ended."""

    def __init__(self) -> None:
        self._lines: dict[_PodT, _Line[_Item]] = {}
        #: The pods that take items now.
        self._pods: dict[_PodT, None] = {}
        self._pod_of: dict[_Item, _PodT | None] = {}
        self._unplaced = 0
        self._is_filling = True
        #: Items that wait in a pod at most.
        self.read_ahead = LIMITS.read_ahead_items

    @property
    def has_pods(self) -> bool:
        return bool(self._pods)

    @property
    def has_room(self) -> bool:
        """True if one more item should be sent.

        Pods get several items at a time, once half of the items that waited in a pod have begun.
        """
        if not self._pods:
            return self._unplaced < LIMITS.read_ahead_items
        waiting = [len(self._lines[pod].waiting) for pod in self._pods]
        least = self.read_ahead if self._is_filling else self.read_ahead // 2 + 1
        self._is_filling = min(waiting) + self._unplaced < least
        return self._is_filling and sum(waiting) + self._unplaced < self.read_ahead * len(waiting)

    @property
    def most_items(self) -> int:
        """An estimate of the most items that the pods have at one time."""
        return sum(line.most_running + LIMITS.read_ahead_items for line in self._lines.values())

    @property
    def has_waiting(self) -> bool:
        return any(line.waiting for line in self._lines.values())

    def update(self, pods: Collection[_PodT]) -> None:
        """Send items to these pods from now on; items in other pods go on there."""
        self._pods = dict.fromkeys(pods)
        for pod in pods:
            if pod not in self._lines:
                self._lines[pod] = _Line()
        for pod, line in tuple(self._lines.items()):
            if pod not in self._pods and not line.waiting and not line.running:
                del self._lines[pod]

    def offer(self, item: _Item) -> None:
        """Add an item that is to go to a pod."""
        self._pod_of[item] = None
        self._unplaced += 1

    def assign(self, item: _Item) -> _PodT | None:
        """Assign an item to the pod that probably begins it first; `None` without a pod."""
        if item not in self._pod_of:
            self.offer(item)
        if not self._pods:
            return None
        lines = self._lines
        pod = min(
            self._pods,
            key=lambda pod: (len(lines[pod].waiting), lines[pod].is_full, len(lines[pod].running)),
        )
        lines[pod].waiting[item] = None
        self._pod_of[item] = pod
        self._unplaced -= 1
        return pod

    def begin(self, item: _Item) -> None:
        """Note that an item runs in its pod."""
        line = self._line_of(item)
        if line is not None and item in line.waiting:
            del line.waiting[item]
            line.requested.discard(item)
            line.running.add(item)
            line.most_running = max(line.most_running, len(line.running))

    def wait(self, item: _Item) -> None:
        """Note that an item waits again in its pod."""
        line = self._line_of(item)
        if line is not None and item in line.running:
            line.running.discard(item)
            line.waiting[item] = None
            line.is_full = True

    def give_back(self, item: _Item) -> None:
        """Note that a pod does not have an item any more, which has not ended."""
        line = self._line_of(item)
        if line is None:
            return
        is_full = item in line.requested or (line.is_full and item not in line.running)
        self._leave(item, line)
        line.is_full = is_full
        self.offer(item)

    def end(self, item: _Item) -> None:
        line = self._line_of(item)
        if line is not None:
            self._leave(item, line)
        elif item in self._pod_of:
            self._unplaced -= 1
        self._pod_of.pop(item, None)

    def take_back(self) -> list[_Item]:
        """The items to ask pods to give back, for pods that have no waiting items."""
        lines = [self._lines[pod] for pod in self._pods]
        hungry = sum(line.is_hungry for line in lines) - self._unplaced
        hungry -= sum(len(line.requested) for line in self._lines.values())
        items = []
        while hungry > 0:
            line = max(
                self._lines.values(), key=lambda line: len(line.waiting) - len(line.requested)
            )
            free = [item for item in line.waiting if item not in line.requested]
            # The only item of a pod that runs none begins there.
            if len(free) <= (not line.running and not line.is_full):
                break
            line.requested.add(free[-1])
            items.append(free[-1])
            hungry -= 1
        return items

    def _line_of(self, item: _Item) -> _Line[_Item] | None:
        pod = self._pod_of.get(item)
        return None if pod is None else self._lines[pod]

    def _leave(self, item: _Item, line: _Line[_Item]) -> None:
        line.waiting.pop(item, None)
        line.running.discard(item)
        line.requested.discard(item)
        line.is_full = False
