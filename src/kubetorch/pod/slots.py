"""Which call runs next, and in which process: a state machine, events in, starts out.

    offer ──┬── starts at once ─────────────┬── running ── end
            └── waits ──┬── starts later ───┘
                        └── end (no caller waits for it any more)

A *slot* is the right to run in a process, or in several at once for a call that runs on all of
them; a process has as many slots as the service declares. Calls that wait begin in the order in
which they came, callers taking turns. A call that several processes are to run takes its slots all
at once, or waits without any; no call overtakes it in a process that it waits for.

A slot is held by a *chain*: the call that took the slot, and calls that descend from that call.
A descendant runs in the slot as soon as every call that runs there is an ancestor of its own: with
one slot a process runs calls within calls as a program runs functions, and a chain does not wait
for itself. Siblings take turns there, or take other slots that are free.

A process without a bound runs all calls at once. Only where very many calls run in it, their
descendants begin one inside the other: a tree of calls ends before it has used up all threads.

Calls that say how many of their kind may run *beside* one another in a process, such as the items
of a map, have that bound alone: they wait for one another, and other calls do not wait for them.
Their descendants run in their slots. Of quick calls a process gets a few *ahead*, which it runs one
after the other.

Calls of a batch (`kubetorch.pod.batches`) run in the slot of one of them: the others are taken out
of the line.

In another pod of its service a descendant could wait for a chain that waits for its own. So where
calls wait for slots, an ancestor names its pod, and callers send its descendants there.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from kubetorch.errors import QueueFullError
from kubetorch.pod.tuning import LIMITS
from kubetorch.specs.compute import MOST_WAITING
from kubetorch.wire.frames import Ancestor
from kubetorch.wire.messages import calls_that_wait

#: `Ticket.beside` of batches: one runs in a process, and calls of another kind beside it.
BATCHES = -1


class Ticket(NamedTuple):
    """A call that wants to run.

    Attributes:
        call: Its identity.
        caller: The client, which takes turns with other clients.
        ancestors: The slots that its ancestors hold, those of the nearest ancestor last.
        size: Bytes of its arguments.
        processes: The processes that run it, all at the same time; `None` is any process.
        beside: How many calls with this same number run side by side in a process; 0 is any number,
            `BATCHES` one.
        may_be_ahead: True if a process may have the call before its turn, and lets it wait there.
    """

    call: str
    caller: str
    ancestors: tuple[Ancestor, ...] = ()
    size: int = 0
    processes: frozenset[int] | None = None
    beside: int = 0
    may_be_ahead: bool = False


class Start(NamedTuple):
    """A call is to begin now.

    Attributes:
        processes: The processes that run it.
        ancestors: The ancestors of calls that it makes.
    """

    call: str
    processes: tuple[int, ...]
    ancestors: tuple[Ancestor, ...]

    @property
    def has_own_slot(self) -> bool:
        """False for a call that runs in the slots of its ancestors."""
        return any(slot == call == self.call for slot, call, _ in self.ancestors)


class _Slot(msgspec.Struct, eq=False):
    id: str
    processes: frozenset[int]
    #: `beside` of the ticket that took the slot.
    beside: int = 0
    #: The calls that run in it, in the order in which they began.
    running: dict[str, None] = msgspec.field(default_factory=dict)
    #: Descendants that wait, by their nearest ancestor that runs in the slot; `None` if unknown.
    waiting: dict[str | None, OrderedDict[str, Ticket]] = msgspec.field(default_factory=dict)


class _Process(msgspec.Struct, eq=False):
    #: Slots that are taken, and calls that run.
    taken: int = 0
    running: int = 0
    #: True while the process gets no new calls.
    is_paused: bool = False
    #: Calls that were begun one inside the other, since there were so many.
    lane: list[str] = msgspec.field(default_factory=list)
    #: Slots that are taken for calls of a kind, by how many may run beside one another.
    beside: Counter[int] = msgspec.field(default_factory=Counter)


class _Run(NamedTuple):
    slots: tuple[_Slot, ...]
    processes: tuple[int, ...]


class Slots:
    """The slots of the processes that serve in a pod, and the calls that wait for them.

    A process is a number that is not used again for another one.
    """

    def __init__(
        self, limit: int | None = None, most_waiting: int = MOST_WAITING, pod: str = ""
    ) -> None:
        #: Slots of each process; `None` is any number.
        self.limit = limit
        self.most_waiting = most_waiting
        self.pod = pod
        #: How many calls a process may have ahead.
        self.ahead = 0
        self._processes: dict[int, _Process] = {}
        self._slots: dict[str, _Slot] = {}
        self._running: dict[str, _Run] = {}
        # Running calls that have made no calls so far, with their process and `beside`: such a call
        # gets a slot when it makes one.
        self._without_slot: dict[str, tuple[int, int]] = {}
        self._tickets: OrderedDict[str, Ticket] = OrderedDict()
        # The number of waiting calls of each kind, by how many may run beside one another.
        self._kinds: Counter[int] = Counter()
        # The waiting calls by caller; the first caller's turn is next.
        self._line: OrderedDict[str, OrderedDict[str, Ticket]] = OrderedDict()
        self._bytes = 0

    # --------------------------------------------------------------------------- what it is asked

    @property
    def running(self) -> int:
        return len(self._running) + len(self._without_slot)

    @property
    def waiting(self) -> int:
        return len(self._tickets)

    @property
    def holders(self) -> list[tuple[str, ...]]:
        """The calls in each slot that is taken, each inside the one before it."""
        return [tuple(slot.running) for slot in self._slots.values()]

    @property
    def count(self) -> int:
        """Slots of all processes together, where their number is bounded."""
        return len(self._processes) * (self.limit or 0)

    @property
    def line(self) -> list[str]:
        """The calls that wait, in the order in which they came."""
        return list(self._tickets)

    # ------------------------------------------------------------------------------------ events

    def add(self, process: int) -> list[Start]:
        """Let a process run calls from now on."""
        self._processes[process] = _Process()
        return self._fill()

    def remove(self, process: int) -> None:
        """Remove a process; the calls that run in it still have to `end`."""
        self._processes.pop(process, None)

    def resize(self, limit: int | None, most_waiting: int) -> list[Start]:
        """Change the number of slots of processes; slots that are taken stay taken."""
        self.limit, self.most_waiting = limit, most_waiting
        return self._fill()

    def pause(self, process: int) -> None:
        """Give a process no calls until `resume`: it may be about to end."""
        if process in self._processes:
            self._processes[process].is_paused = True

    def resume(self, process: int) -> list[Start]:
        state = self._processes.get(process)
        if state is None or not state.is_paused:
            return []
        state.is_paused = False
        starts = [start for slot in list(self._slots.values()) for start in self._continue(slot)]
        return starts + self._fill()

    def begin(self, call: str, beside: int = 0, *, may_be_ahead: bool = False) -> int | None:
        """Start a call without ancestors; returns its process, or `None` if it has to wait.

        This is `offer` for most calls, which need no more, at a tenth of the cost.
        """
        if self.limit is not None or (beside and self._tickets):
            return None
        process = self._least_busy(beside, self.ahead * may_be_ahead)
        if process is None:
            return None
        state = self._processes[process]
        state.running += 1
        if beside:
            state.beside[beside] += 1
        self._without_slot[call] = process, beside
        return process

    def offer(self, ticket: Ticket, *, is_first: bool = False) -> Start | None:
        """Start a call, or let it wait; with `is_first` before all other calls of its caller.

        Raises:
            QueueFullError: The call would have to wait, and too many calls wait already.
        """
        if len(ticket.ancestors) > LIMITS.named_ancestor_slots:
            ticket = ticket._replace(ancestors=ticket.ancestors[-LIMITS.named_ancestor_slots :])
        # Calls that came before are not overtaken, but in the slots of the call's ancestors.
        is_bound = self.limit is not None or ticket.beside != 0
        must_enter = is_bound and bool(self._tickets) and not is_first
        start = self._start(ticket, must_enter=must_enter)
        if start is None:
            self._admit(ticket)
            if is_first:
                self._tickets.move_to_end(ticket.call, last=False)
                self._line[ticket.caller].move_to_end(ticket.call, last=False)
            is_mixed = self.limit is not None or len(self._kinds) > 1
            if must_enter and is_mixed and any(first.beside for first in self._oldest_tickets()):
                # The calls before it may wait for their kind alone, and this call for none.
                start = next(iter(self._fill()), None)
        return start

    def end(self, call: str) -> list[Start]:
        """End a call, which may still wait."""
        light = self._without_slot.pop(call, None)
        if light is not None:
            process, beside = light
            state = self._processes.get(process)
            if state is not None:
                state.running -= 1
                if beside:
                    state.beside[beside] -= 1
            return self._fill() if self._tickets else []
        if call in self._tickets:
            self._forget(call)
            return self._fill()
        run = self._running.pop(call, None)
        if run is None:
            return []
        for process in run.processes:
            state = self._processes.get(process)
            if state is not None:
                state.running -= 1
                if call in state.lane:
                    state.lane.remove(call)
        for slot in run.slots:
            self._leave(slot, call)
        starts = [start for slot in run.slots for start in self._continue(slot)]
        return starts + self._fill()

    def take(self, is_wanted: Callable[[str], bool], most: int) -> tuple[list[str], list[Start]]:
        """Remove waiting calls, at most so many, which run in the slot of another one.

        Returns the calls in their order, and the starts of calls that waited behind them.
        """
        in_order = (ticket.call for ticket in self._in_order() if is_wanted(ticket.call))
        calls = list(islice(in_order, most))
        for call in calls:
            self._forget(call)
        return calls, self._fill() if calls else []

    def clear(self) -> list[str]:
        """Remove all waiting calls; returns them in the order in which they came."""
        calls = list(self._tickets)
        for call in calls:
            self._forget(call)
        return calls

    # ---------------------------------------------------------------------------------- waiting

    def _admit(self, ticket: Ticket) -> None:
        count = max(len(self._processes), 1)
        if len(self._tickets) >= self.most_waiting * count:
            raise QueueFullError(
                f"{calls_that_wait(len(self._tickets))} already, and no more may",
                hint="call again in a while; kt.Compute(max_queue=) says how many may wait",
            )
        if self._tickets and self._bytes + ticket.size > LIMITS.waiting_arguments_bytes * count:
            raise QueueFullError(
                f"the arguments of the {len(self._tickets)} calls that wait have {self._bytes} "
                f"bytes, and {ticket.size} more would be too many",
                hint="call again in a while, or send a name of large data instead of the data",
            )
        self._tickets[ticket.call] = ticket
        self._kinds[ticket.beside] += 1
        self._bytes += ticket.size
        self._line.setdefault(ticket.caller, OrderedDict())[ticket.call] = ticket
        if self.limit is not None or ticket.beside:
            for slot, parent in self._slots_of_ancestors(ticket):
                slot.waiting.setdefault(parent, OrderedDict())[ticket.call] = ticket

    def _forget(self, call: str) -> None:
        """Remove a call from the waiting ones."""
        ticket = self._tickets.pop(call)
        self._kinds[ticket.beside] -= 1
        if not self._kinds[ticket.beside]:
            del self._kinds[ticket.beside]
        self._bytes -= ticket.size
        line = self._line[ticket.caller]
        del line[call]
        if not line:
            del self._line[ticket.caller]
        for slot, _ in self._slots_of_ancestors(ticket):
            for children in slot.waiting.values():
                children.pop(call, None)

    def _oldest_tickets(self) -> Iterator[Ticket]:
        """The call of each caller that has waited longest."""
        return (next(iter(line.values())) for line in self._line.values())

    def _in_order(self) -> Iterator[Ticket]:
        """The waiting calls, callers taking turns; to be used up before a call starts or ends."""
        lines = [iter(line.values()) for line in self._line.values()]
        while lines:
            for line in tuple(lines):
                ticket = next(line, None)
                if ticket is None:
                    lines.remove(line)
                else:
                    yield ticket

    def _reserved(self) -> set[int]:
        """The processes that calls wait for."""
        reserved: set[int] = set()
        for ticket in self._in_order():
            reserved |= ticket.processes or self._processes.keys()
            if len(reserved) >= len(self._processes):
                break
        return reserved

    # ---------------------------------------------------------------------------------- starting

    def _fill(self) -> list[Start]:
        """Start waiting calls, in their order, as far as there are slots."""
        starts: list[Start] = []
        while self._tickets:
            if self.limit is None:
                ticket_start = self._next_nested() or self._next_of_kind()
            else:
                ticket_start = self._next_in_line()
            if ticket_start is None:
                break
            ticket, start = ticket_start
            self._forget(ticket.call)
            if ticket.caller in self._line:
                self._line.move_to_end(ticket.caller)
            starts.append(start)
        return starts

    def _next_in_line(self) -> tuple[Ticket, Start] | None:
        reserved: set[int] = set()
        for ticket in self._in_order():
            if not reserved & (ticket.processes or self._processes.keys()):
                start = self._start(ticket)
                if start is not None:
                    return ticket, start
                if ticket.beside and self._least_busy() is not None:
                    continue  # it waits for its own kind alone
            reserved |= ticket.processes or self._processes.keys()
            if len(reserved) >= len(self._processes):
                break
        return None

    def _next_nested(self) -> tuple[Ticket, Start] | None:
        """Start the latest of the calls that wait since very many run: it ends soonest."""
        for ticket in reversed(self._tickets.values()) if self._kinds[0] else ():
            start = None if ticket.beside else self._start(ticket)
            if start is not None:
                return ticket, start
        return None

    def _next_of_kind(self) -> tuple[Ticket, Start] | None:
        """Start the next of the calls that wait for others of their kind."""
        is_blocked: set[int] = set()
        for ticket in self._in_order():
            if not ticket.beside or ticket.beside in is_blocked:
                continue
            start = self._start(ticket)
            if start is not None:
                return ticket, start
            is_blocked.add(ticket.beside)
            if len(is_blocked) == len(self._kinds):
                break
        return None

    def _continue(self, slot: _Slot) -> list[Start]:
        """Start the descendant whose turn it is in a slot."""
        if not slot.running or not slot.waiting:
            return []
        last = next(reversed(slot.running))
        for parent in (last, None) if last == slot.id else (last,):
            for ticket in tuple(slot.waiting.get(parent, {}).values()):
                start = self._start(ticket, must_enter=True)
                if start is not None:
                    self._forget(ticket.call)
                    return [start]
        return []

    def _start(self, ticket: Ticket, *, must_enter: bool = False) -> Start | None:
        """Begin a call if it may begin now; `must_enter`: not before calls that wait."""
        ancestor_slots = list(self._slots_of_ancestors(ticket)) if ticket.ancestors else []
        if ticket.processes is not None:
            return self._start_on_all(
                ticket, ticket.processes, ancestor_slots, must_enter=must_enter
            )
        if self.limit is None and not ticket.beside:
            return self._start_unbounded(ticket, ancestor_slots)
        for slot, parent in ancestor_slots:
            is_right = self.limit is not None or slot.beside == ticket.beside
            if is_right and self._may_enter(slot, parent):
                return self._begin(ticket, (slot,), frozenset())
        ahead = self.ahead * ticket.may_be_ahead
        process = None if must_enter else self._least_busy(ticket.beside, ahead)
        return None if process is None else self._begin(ticket, (), frozenset((process,)))

    def _start_unbounded(
        self, ticket: Ticket, ancestor_slots: Sequence[_AncestorSlot]
    ) -> Start | None:
        process = self._least_busy()
        if process is None:
            return None
        if ancestor_slots and self._processes[process].running >= LIMITS.side_by_side_calls:
            return self._start_in_lane(ticket, ancestor_slots)
        for slot, _ in ancestor_slots:
            if process in slot.processes:
                return self._begin(ticket, (slot,), frozenset())
        return self._begin(ticket, (), frozenset((process,)))

    def _start_in_lane(
        self, ticket: Ticket, ancestor_slots: Sequence[_AncestorSlot]
    ) -> Start | None:
        """Begin a descendant although very many calls run: inside the last one in the lane."""
        for slot, parent in ancestor_slots:
            for process in slot.processes & self._processes.keys():
                state = self._processes[process]
                if not state.is_paused and (not state.lane or state.lane[-1] == parent):
                    state.lane.append(ticket.call)
                    return self._begin(ticket, (slot,), frozenset())
        return None

    def _start_on_all(
        self,
        ticket: Ticket,
        processes: frozenset[int],
        ancestor_slots: Sequence[_AncestorSlot],
        *,
        must_enter: bool,
    ) -> Start | None:
        entered = []
        rest = processes
        for slot, parent in ancestor_slots:
            if not slot.processes & rest:
                continue
            if self.limit is not None and not self._may_enter(slot, parent):
                return None
            entered.append(slot)
            rest -= slot.processes
        if not all(map(self._is_free, rest)):
            return None
        # A descendant that needs further processes does not wait for calls in line: these may wait
        # for the slot that its ancestor holds.
        if rest and must_enter and not entered and rest & self._reserved():
            return None
        return self._begin(ticket, tuple(entered), rest)

    def _slots_of_ancestors(self, ticket: Ticket) -> Iterator[_AncestorSlot]:
        """The slots of a call's ancestors, the nearest first, each with the ancestor in it."""
        for slot_id, call, _ in reversed(ticket.ancestors):
            slot = self._slots.get(slot_id) or self._slot_of(slot_id)
            if slot is not None:
                yield slot, call if call in slot.running else None

    def _slot_of(self, call: str) -> _Slot | None:
        """The slot of a call that `begin` has let run without one."""
        light = self._without_slot.pop(call, None)
        if light is None:
            return None
        process, beside = light
        slot = self._slots[call] = _Slot(call, frozenset((process,)), beside, running={call: None})
        self._running[call] = _Run((slot,), (process,))
        if process in self._processes:
            self._processes[process].taken += 1
            if not beside:
                self._processes[process].beside[0] += 1
        return slot

    def _may_enter(self, slot: _Slot, parent: str | None) -> bool:
        """True if all calls in a slot are ancestors of a call that `parent` made."""
        if any(map(self._is_paused, slot.processes)):
            return False
        # The call that took the slot is an ancestor, even if nearer ones have ended.
        return next(reversed(slot.running)) == (parent or slot.id)

    def _is_paused(self, process: int) -> bool:
        state = self._processes.get(process)
        return state is None or state.is_paused

    def _is_free(self, process: int, beside: int = 0, ahead: int = 0) -> bool:
        if self._is_paused(process):
            return False
        state = self._processes[process]
        if beside and state.beside[beside] >= abs(beside) + ahead:
            return False
        if self.limit is None:
            return True
        # Only behind calls that run one after the other is a call ahead.
        is_line = beside == self.limit == 1 and state.taken == state.beside[1]
        return state.taken < self.limit + (ahead if is_line else 0)

    def _least_busy(self, beside: int = 0, ahead: int = 0) -> int | None:
        if len(self._processes) == 1:
            [process] = self._processes
            return process if self._is_free(process, beside, ahead) else None
        free = [process for process in self._processes if self._is_free(process, beside, ahead)]
        return min(free, key=lambda process: self._processes[process].running, default=None)

    def _begin(
        self, ticket: Ticket, entered: tuple[_Slot, ...], processes: frozenset[int]
    ) -> Start:
        slots = entered
        if processes:
            slot = self._slots[ticket.call] = _Slot(ticket.call, processes, ticket.beside)
            slots = (*entered, slot)
            for process in processes:
                self._processes[process].taken += 1
                self._processes[process].beside[ticket.beside] += 1
        for slot in slots:
            slot.running[ticket.call] = None
        runs_in = ticket.processes or slots[0].processes
        for process in runs_in:
            if process in self._processes:
                self._processes[process].running += 1
        run = self._running[ticket.call] = _Run(slots, tuple(sorted(runs_in)))
        ids = {slot.id for slot in slots}
        elsewhere = (ancestor for ancestor in ticket.ancestors if ancestor.slot not in ids)
        own_slots = (Ancestor(slot.id, ticket.call, self._pod_of(slot)) for slot in slots)
        return Start(ticket.call, run.processes, (*elsewhere, *own_slots))

    def _pod_of(self, slot: _Slot) -> str:
        """The pod that descendants of a call in a slot have to run in; empty for any pod."""
        return self.pod if self.limit is not None or slot.beside else ""

    # ------------------------------------------------------------------------------------ ending

    def _leave(self, slot: _Slot, call: str) -> None:
        children = slot.waiting.pop(call, None)
        if children:
            # Each call that runs in a slot is made by those before it.
            path = list(slot.running)
            position = path.index(call)
            if position:
                slot.waiting.setdefault(path[position - 1], OrderedDict()).update(children)
        del slot.running[call]
        if slot.running:
            return
        del self._slots[slot.id]
        for process in slot.processes:
            state = self._processes.get(process)
            if state is not None:
                state.taken -= 1
                state.beside[slot.beside] -= 1


#: A slot of an ancestor, and the nearest ancestor that runs in it, if it does.
_AncestorSlot = tuple[_Slot, str | None]
