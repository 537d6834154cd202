from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kubetorch.errors import QueueFullError
from kubetorch.pod.slots import Slots, Start, Ticket
from kubetorch.pod.tuning import LIMITS
from kubetorch.wire.frames import Ancestor


class Pod:
    """Slots, and what was started of them: a call names its parent as the worker of it would."""

    def __init__(self, limit: int | None, processes: int = 1, most_waiting: int = 10_000) -> None:
        self.slots = Slots(limit, most_waiting)
        for process in range(processes):
            assert self.slots.add(process) == []
        self.started: dict[str, Start] = {}

    def offer(self, call: str, parent: str | None = None, caller: str = "a", on=None) -> bool:
        ancestors = self.started[parent].ancestors if parent else ()
        start = self.slots.offer(Ticket(call, caller, ancestors, 0, on))
        self._note([start] if start else [])
        return start is not None

    def end(self, call: str) -> list[str]:
        starts = self.slots.end(call)
        self._note(starts)
        return [start.call for start in starts]

    def _note(self, starts: list[Start]) -> None:
        self.started |= {start.call: start for start in starts}


def test_as_many_calls_run_as_there_are_slots_and_the_others_begin_in_their_order():
    pod = Pod(2)
    assert [pod.offer(call) for call in "1234"] == [True, True, False, False]
    assert (pod.slots.running, pod.slots.waiting) == (2, 2)
    assert pod.end("2") == ["3"]
    assert pod.end("1") == ["4"]
    assert pod.end("3") == pod.end("4") == []
    assert pod.slots.holders == []


def test_callers_take_turns():
    pod = Pod(1)
    pod.offer("x")
    for number in range(3):
        pod.offer(f"a{number}", caller="a")
    pod.offer("b0", caller="b")
    pod.offer("c0", caller="c")
    order = []
    ended = "x"
    while begun := pod.end(ended):
        [ended] = begun
        order.append(ended)
    assert order == ["a0", "b0", "c0", "a1", "a2"]


def test_a_call_goes_to_the_process_with_the_fewest_calls():
    pod = Pod(2, processes=3)
    for call in "123456":
        assert pod.offer(call)
    places = [pod.started[call].processes for call in "123456"]
    assert places == [(0,), (1,), (2,), (0,), (1,), (2,)]
    assert not pod.offer("7")
    assert pod.end("5") == ["7"]
    assert pod.started["7"].processes == (1,)


def test_a_call_that_waits_can_be_taken_out_of_the_line():
    pod = Pod(1)
    pod.offer("1")
    pod.offer("2")
    pod.offer("3")
    assert pod.end("2") == []
    assert pod.end("1") == ["3"]


def test_no_more_calls_wait_than_may_and_no_more_bytes():
    slots = Slots(1, most_waiting=2)
    slots.add(0)
    for call in "123":
        slots.offer(Ticket(call, "a"))
    with pytest.raises(QueueFullError, match="2 calls wait"):
        slots.offer(Ticket("4", "b"))
    slots = Slots(1)
    slots.add(0)
    slots.offer(Ticket("1", "a"))
    slots.offer(Ticket("2", "a", size=2**30))
    with pytest.raises(QueueFullError, match="bytes"):
        slots.offer(Ticket("3", "a", size=1))


def test_a_chain_holds_one_slot_and_an_unrelated_call_waits_for_its_end():
    pod = Pod(1)
    assert pod.offer("root")
    assert not pod.offer("other", caller="b")
    parent = "root"
    for depth in range(200):
        assert pod.offer(f"call {depth}", parent)
        parent = f"call {depth}"
        assert len(pod.started[parent].ancestors) == 1
    for depth in reversed(range(200)):
        assert pod.end(f"call {depth}") == []
    assert pod.end("root") == ["other"]


def test_siblings_take_turns_in_the_slot_of_their_parent():
    pod = Pod(1)
    pod.offer("root")
    assert pod.offer("left", "root")
    assert not pod.offer("right", "root")
    assert pod.offer("inner", "left")
    assert pod.end("inner") == []
    assert pod.end("left") == ["right"]


def test_siblings_take_free_slots_but_not_ahead_of_those_who_wait():
    pod = Pod(2)
    pod.offer("root")
    assert pod.offer("left", "root")
    assert pod.offer("right", "root")
    pod.offer("third", "root")
    pod.offer("stranger", caller="b")
    assert pod.end("right") == ["third"]
    assert not pod.offer("fourth", "root")
    assert pod.end("third") == ["stranger"]
    assert pod.end("left") == ["fourth"]


def test_a_spawned_call_whose_caller_has_ended_waits_as_any_other():
    pod = Pod(1)
    pod.offer("root")
    pod.offer("left", "root")
    pod.offer("right", "root")
    pod.offer("stranger", caller="b")
    assert pod.end("root") == []  # `left` runs in its slot
    # Whoever of them began first, both do.
    [first] = pod.end("left")
    [second] = pod.end(first)
    assert {first, second} == {"right", "stranger"}


def test_a_descendant_by_way_of_another_service_runs_in_the_slot_of_its_ancestor():
    pod, other_pod = Pod(1), Pod(1)
    pod.offer("root")
    other_pod.started["root"] = pod.started["root"]
    assert other_pod.offer("elsewhere", "root")
    pod.started["elsewhere"] = other_pod.started["elsewhere"]
    assert pod.offer("back", "elsewhere")
    assert not pod.offer("stranger")


def test_a_tree_of_calls_ends_in_one_slot_one_inside_the_other():
    assert _grow(Pod(1), 10) == (2047, 11)


def test_a_tree_of_calls_in_a_process_without_a_bound_leaves_threads_free():
    count, most = _grow(Pod(None), 10)
    assert count == 2047
    assert LIMITS.side_by_side_calls <= most <= LIMITS.side_by_side_calls + 11


def test_without_a_bound_unrelated_calls_begin_at_once():
    pod = Pod(None)
    assert all(pod.offer(str(number)) for number in range(5000))


def _grow(pod: Pod, depth: int) -> tuple[int, int]:
    """Calls that each make two and wait for both; how many there were, and ran at one time.

    Each that begins makes its calls at once, and nothing ends before all have done so.
    """
    waits_for: dict[str, int] = {}
    most = 0
    leaves: list[str] = []
    new = ["t"]
    pod.offer("t")
    while new or leaves:
        most = max(most, pod.slots.running)
        if new:
            call = new.pop(0)
            waits_for[call] = 0
            if len(call) > depth:
                leaves.append(call)
                continue
            for child in (call + "0", call + "1"):
                waits_for[call] += 1
                if pod.offer(child, call):
                    new.append(child)
            continue
        call = leaves.pop()
        while call and waits_for[call] == 0:
            new += pod.end(call)
            call = call[:-1]
            if call:
                waits_for[call] -= 1
    assert (pod.slots.running, pod.slots.waiting) == (0, 0)
    return len(waits_for), most


def test_a_call_that_began_without_a_slot_has_one_once_it_makes_a_call():
    slots = Slots(None)
    slots.add(0)
    assert slots.begin("root") == 0
    for number in range(LIMITS.side_by_side_calls):
        assert slots.begin(str(number)) == 0
    assert slots.running == LIMITS.side_by_side_calls + 1
    ancestors = (Ancestor("root", "root"),)
    slot = slots.offer(Ticket("left", "a", ancestors))
    assert slot is not None
    assert slot.ancestors == (Ancestor("root", "left"),)
    assert slots.offer(Ticket("right", "a", ancestors)) is None
    assert [start.call for start in slots.end("left")] == ["right"]
    assert slots.end("right") == slots.end("root") == []
    assert slots.running == LIMITS.side_by_side_calls
    assert Slots(1).begin("bounded") is None


def test_a_paused_process_takes_nothing_until_it_is_resumed():
    pod = Pod(1, processes=2)
    pod.slots.pause(0)
    assert pod.offer("1")
    assert pod.started["1"].processes == (1,)
    assert not pod.offer("2")
    assert [start.call for start in pod.slots.resume(0)] == ["2"]


def test_what_waits_for_a_process_that_is_gone_starts_in_the_one_that_takes_its_place():
    pod = Pod(1)
    pod.offer("1")
    pod.offer("2")
    pod.slots.remove(0)
    assert pod.end("1") == []
    assert [start.call for start in pod.slots.add(1)] == ["2"]


def test_a_collective_takes_all_its_slots_or_none():
    pod = Pod(1, processes=3)
    assert pod.offer("one", on=frozenset({1}))
    assert not pod.offer("all", on=frozenset({0, 1, 2}))
    # It has nothing, and yet is not overtaken where it waits.
    assert pod.slots.holders == [("one",)]
    assert not pod.offer("late", caller="b", on=frozenset({2}))
    assert pod.end("one") == ["all"]
    assert pod.started["all"].processes == (0, 1, 2)
    assert pod.end("all") == ["late"]


def test_a_collective_that_each_rank_makes_inside_a_collective_runs_in_its_slots():
    pod = Pod(1, processes=2)
    everywhere = frozenset({0, 1})
    assert pod.offer("outer", on=everywhere)
    assert not pod.offer("stranger", caller="b", on=everywhere)
    assert pod.offer("of rank 0", "outer", on=everywhere)
    assert not pod.offer("of rank 1", "outer", on=everywhere)
    assert pod.end("of rank 0") == ["of rank 1"]
    assert pod.end("of rank 1") == []
    assert pod.end("outer") == ["stranger"]


@settings(max_examples=300, deadline=None)
@given(
    limit=st.sampled_from([1, 2, 3, None]),
    processes=st.integers(1, 3),
    is_collective=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_whatever_happens_no_slot_holds_strangers_and_every_call_begins(
    limit, processes, is_collective, seed
):
    chance = random.Random(seed)
    pod = Pod(limit, processes)
    parents: dict[str, str | None] = {}
    ended: set[str] = set()
    begun: set[str] = set()

    def end(call: str) -> None:
        ended.add(call)
        pod.end(call)

    def ancestors(call: str) -> set[str]:
        ancestor_calls = set()
        while (parent := parents[call]) is not None:
            ancestor_calls.add(parent)
            call = parent
        return ancestor_calls

    def check() -> None:
        begun.update(pod.started)
        per_process = dict.fromkeys(range(processes), 0)
        for holder in pod.slots.holders:
            for process in pod.started[holder[0]].processes:
                per_process[process] += 1
            if limit is not None and not is_collective:
                for call, outer in zip(holder[1:], holder, strict=False):
                    assert outer in ancestors(call)
        if limit is not None and not is_collective:
            assert all(taken <= limit for taken in per_process.values())

    for number in range(60):
        running = [call for call in pod.started if call not in ended]
        if chance.random() < 0.6 or not running:
            call = str(number)
            parent = chance.choice([*running, None])
            on = frozenset(range(processes)) if is_collective else None
            parents[call] = parent
            pod.offer(call, parent, chance.choice("abc"), on)
        else:
            end(chance.choice(running))
        check()
    while running := [call for call in pod.started if call not in ended]:
        end(chance.choice(running))
        check()
    assert begun == parents.keys()
    assert (pod.slots.running, pod.slots.waiting, pod.slots.holders) == (0, 0, [])


def _item(pod: Pod, call: str, parent: str | None = None, beside: int = 1, caller: str = "a"):
    ancestors = pod.started[parent].ancestors if parent else ()
    start = pod.slots.offer(Ticket(call, caller, ancestors, beside=beside))
    pod.started |= {call: start} if start else {}
    return start is not None


def test_items_run_one_in_each_process_and_other_calls_beside_them():
    pod = Pod(None, processes=2)
    assert [_item(pod, call) for call in "1234"] == [True, True, False, False]
    assert {pod.started[call].processes for call in "12"} == {(0,), (1,)}
    assert pod.offer("direct")
    assert pod.slots.begin("light") is not None
    assert pod.end("light") == pod.end("direct") == []
    assert pod.end("2") == ["3"]
    assert pod.started["3"].processes == pod.started["2"].processes
    assert pod.end("1") == ["4"]


def test_the_items_of_two_maps_take_turns():
    pod = Pod(None)
    _item(pod, "x")
    for number in range(2):
        assert not _item(pod, f"a{number}", caller="a")
    assert not _item(pod, "b0", caller="b")
    order, ended = [], "x"
    while begun := pod.end(ended):
        [ended] = begun
        order.append(ended)
    assert order == ["a0", "b0", "a1"]


def test_items_that_an_item_makes_run_in_its_place_one_after_the_other():
    pod = Pod(None)
    assert _item(pod, "root")
    assert not _item(pod, "stranger", caller="b")
    assert _item(pod, "left", "root")
    assert not _item(pod, "right", "root")
    assert pod.offer("direct", "left")
    assert _item(pod, "inner", "direct")
    assert pod.end("inner") == pod.end("direct") == []
    assert pod.end("left") == ["right"]
    assert pod.end("right") == []
    assert pod.end("root") == ["stranger"]


def test_items_that_a_loop_runs_wait_for_their_own_kind_alone():
    pod = Pod(None)
    assert all(_item(pod, f"loop {number}", beside=3) for number in range(3))
    assert not _item(pod, "loop 3", beside=3)
    assert _item(pod, "thread")
    assert not _item(pod, "thread 2")
    assert pod.end("loop 0") == ["loop 3"]
    assert pod.end("thread") == ["thread 2"]


def test_calls_that_are_made_again_run_one_at_a_time_and_keep_no_other_from_its_slot():
    pod = Pod(2)
    assert _item(pod, "again 1")
    assert not _item(pod, "again 2")
    assert pod.offer("other 1")
    assert not pod.offer("other 2")
    assert pod.end("again 1") == ["again 2"]
    assert pod.end("other 1") == ["other 2"]


def test_an_item_that_waits_for_a_process_that_is_gone_runs_in_the_next_one():
    pod = Pod(None)
    _item(pod, "1")
    _item(pod, "2")
    pod.slots.remove(0)
    assert pod.end("1") == []
    assert [start.call for start in pod.slots.add(1)] == ["2"]


def test_quick_items_go_ahead_behind_an_item_that_holds_the_only_slot_and_behind_no_other_call():
    slots = Slots(1)
    slots.add(0)
    slots.ahead = 2
    item = {"beside": 1, "may_be_ahead": True}
    assert slots.offer(Ticket("first", "a", **item)) is not None
    assert slots.offer(Ticket("ahead", "a", **item)) is not None
    assert slots.offer(Ticket("plain", "b")) is None
    assert slots.offer(Ticket("later", "a", **item)) is None
    assert slots.end("first") == []
    assert [start.call for start in slots.end("ahead")] == ["plain"]
    assert [start.call for start in slots.end("plain")] == ["later"]
