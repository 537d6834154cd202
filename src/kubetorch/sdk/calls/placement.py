"""Which pod runs which item of a map: a state machine, events in, decisions out.

    offer ── place ──┬── begin ── end
       ▲             │
       └── give_back ┘   taken back, refused, or lost before it began

Every pod is kept supplied with a few items more than it runs, so that the next one is there already
when one ends. Nobody knows how long an item takes, so these may stand in the wrong line: once
there is nothing left to send, a pod that has nothing to begin gets what waits in another one.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

#: Items that wait in a pod for others to end, and small ones.
READ_AHEAD, SMALL_AHEAD = 8, 32

_Item = TypeVar("_Item", bound=Hashable)
_PodT = TypeVar("_PodT", bound=Hashable)


@dataclass(eq=False)
class _Line(Generic[_Item]):
    """The items in a pod."""

    #: Those that have not begun, as far as is known, in the order in which they were sent.
    waiting: dict[_Item, None] = field(default_factory=dict)
    running: set[_Item] = field(default_factory=set)
    #: Those that the pod is asked for, unless they have begun.
    asked: set[_Item] = field(default_factory=set)
    #: An item waited there, and none has ended since: it runs as many as it can.
    is_full: bool = False
    #: The most that ran at one time.
    most: int = 0

    @property
    def is_hungry(self) -> bool:
        return not self.waiting and not self.is_full


class Placement(Generic[_Item, _PodT]):
    """The items of one map that have not ended."""

    def __init__(self) -> None:
        self._lines: dict[_PodT, _Line[_Item]] = {}
        # The pods that take items now.
        self._pods: dict[_PodT, None] = {}
        self._pod_of: dict[_Item, _PodT | None] = {}
        self._unplaced = 0
        self._is_filling = True
        #: Items that wait in a pod at most.
        self.read_ahead = READ_AHEAD

    @property
    def has_pods(self) -> bool:
        return bool(self._pods)

    @property
    def has_room(self) -> bool:
        """True if one more item would be at the right place in some pod.

        Pods get several at a time, once half of what waited in one of them has begun.
        """
        if not self._pods:
            return self._unplaced < READ_AHEAD
        waiting = [len(self._lines[pod].waiting) for pod in self._pods]
        least = self.read_ahead if self._is_filling else self.read_ahead // 2 + 1
        self._is_filling = min(waiting) + self._unplaced < least
        return self._is_filling and sum(waiting) + self._unplaced < self.read_ahead * len(waiting)

    @property
    def most(self) -> int:
        """Items that the pods have had at one time, about."""
        return sum(line.most + READ_AHEAD for line in self._lines.values())

    @property
    def has_waiting(self) -> bool:
        return any(line.waiting for line in self._lines.values())

    def update(self, pods: Collection[_PodT]) -> None:
        """These take items now; what is in others goes on there."""
        self._pods = dict.fromkeys(pods)
        for pod in pods:
            if pod not in self._lines:
                self._lines[pod] = _Line()
        for pod, line in tuple(self._lines.items()):
            if pod not in self._pods and not line.waiting and not line.running:
                del self._lines[pod]

    def offer(self, item: _Item) -> None:
        """An item is to go to some pod."""
        self._pod_of[item] = None
        self._unplaced += 1

    def place(self, item: _Item) -> _PodT | None:
        """Send it to the pod that begins it first, as far as is known; `None`: there is none."""
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
        """Its pod runs it."""
        line = self._line_of(item)
        if line is not None and item in line.waiting:
            del line.waiting[item]
            line.asked.discard(item)
            line.running.add(item)
            line.most = max(line.most, len(line.running))

    def wait(self, item: _Item) -> None:
        """Its pod has it, and lets it wait again."""
        line = self._line_of(item)
        if line is not None and item in line.running:
            line.running.discard(item)
            line.waiting[item] = None
            line.is_full = True

    def give_back(self, item: _Item) -> None:
        """Its pod does not have it any more, and has not run it to its end."""
        line = self._line_of(item)
        if line is None:
            return
        is_full = item in line.asked or (line.is_full and item not in line.running)
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
        """What to ask pods for, since there is nothing else to send to others."""
        lines = [self._lines[pod] for pod in self._pods]
        hungry = sum(line.is_hungry for line in lines) - self._unplaced
        hungry -= sum(len(line.asked) for line in self._lines.values())
        items = []
        while hungry > 0:
            line = max(self._lines.values(), key=lambda line: len(line.waiting) - len(line.asked))
            free = [item for item in line.waiting if item not in line.asked]
            # One that a pod has just got, and has nothing else to run, begins there.
            if len(free) <= (not line.running and not line.is_full):
                break
            line.asked.add(free[-1])
            items.append(free[-1])
            hungry -= 1
        return items

    def _line_of(self, item: _Item) -> _Line[_Item] | None:
        pod = self._pod_of.get(item)
        return None if pod is None else self._lines[pod]

    def _leave(self, item: _Item, line: _Line[_Item]) -> None:
        line.waiting.pop(item, None)
        line.running.discard(item)
        line.asked.discard(item)
        line.is_full = False
