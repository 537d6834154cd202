"""Which pod runs which item of a map."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kubetorch.sdk import tuning as sdk_tuning
from kubetorch.sdk.calls.placement import Placement


class Pods:
    """Pods of so many processes each, with an item at a time in each, and the map over them."""

    def __init__(self, *processes: int) -> None:
        self.processes = dict(enumerate(processes))
        self.placement: Placement[int, int] = Placement()
        self.placement.update(self.processes)
        self.lines: dict[int, list[int]] = {pod: [] for pod in self.processes}
        self.running: dict[int, list[int]] = {pod: [] for pod in self.processes}
        self.ran: list[int] = []

    def send(self, item: int) -> None:
        self.placement.offer(item)
        self.put_in_line(item)

    def put_in_line(self, item: int) -> None:
        pod = self.placement.assign(item)
        assert pod is not None
        self.lines[pod].append(item)

    def begin_some(self) -> None:
        """What a pod can run begins, in the order in which it was sent."""
        for pod, line in self.lines.items():
            while line and len(self.running[pod]) < self.processes[pod]:
                item = line.pop(0)
                self.running[pod].append(item)
                self.placement.begin(item)

    def take_back(self) -> int:
        """Whatever is asked for and waits goes elsewhere; how many items moved."""
        requested_items = self.placement.take_back()
        moved = 0
        for item in requested_items:
            for line in self.lines.values():
                if item in line:
                    line.remove(item)
                    self.placement.give_back(item)
                    self.put_in_line(item)
                    moved += 1
                    break
        return moved

    def end(self, item: int) -> None:
        for running in self.running.values():
            if item in running:
                running.remove(item)
        self.placement.end(item)
        self.ran.append(item)


def test_items_go_to_the_pods_in_turns_and_a_few_wait_in_each() -> None:
    pods = Pods(1, 1, 1)
    count = 0
    while pods.placement.has_room:
        pods.send(count)
        count += 1
    assert count == 3 * sdk_tuning.LIMITS.read_ahead_items
    assert {len(line) for line in pods.lines.values()} == {sdk_tuning.LIMITS.read_ahead_items}
    while len(pods.lines[0]) > sdk_tuning.LIMITS.read_ahead_items // 2:
        assert not pods.placement.has_room
        pods.begin_some()
        pods.end(pods.running[0][0])
    assert pods.placement.has_room


def test_the_pod_that_is_free_first_gets_the_next_item() -> None:
    pods = Pods(1, 1)
    for item in range(2 * sdk_tuning.LIMITS.read_ahead_items):
        pods.send(item)
    pods.begin_some()
    pods.send(2 * sdk_tuning.LIMITS.read_ahead_items)
    pods.send(2 * sdk_tuning.LIMITS.read_ahead_items + 1)
    [quick] = pods.running[1]
    pods.end(quick)
    pods.begin_some()
    pods.send(100)
    assert pods.lines[1][-1] == 100


def test_an_item_behind_a_long_one_is_taken_back_for_a_pod_that_has_nothing_to_do() -> None:
    pods = Pods(1, 1)
    for item in range(4):
        pods.send(item)
    pods.begin_some()
    assert pods.take_back() == 0
    for _ in range(2):
        pods.end(pods.running[1][0])
        pods.begin_some()
    assert pods.lines[0] == [2]
    assert pods.take_back() == 1
    pods.begin_some()
    assert pods.running == {0: [0], 1: [2]}


def test_no_item_goes_to_and_fro_between_pods_that_are_busy() -> None:
    pods = Pods(1, 2)
    for item in range(4):
        pods.send(item)
    pods.begin_some()
    moves = 0
    while moved := pods.take_back():
        moves += moved
        pods.begin_some()
        assert moves <= 2


def test_a_pod_that_comes_takes_part_and_one_that_goes_gets_nothing_more() -> None:
    pods = Pods(1)
    for item in range(sdk_tuning.LIMITS.read_ahead_items):
        pods.send(item)
    assert not pods.placement.has_room
    pods.placement.update([0, "new"])  # type: ignore[list-item]
    assert pods.placement.has_room
    assert pods.placement.assign(100) == "new"  # type: ignore[comparison-overlap]
    pods.placement.update([])
    assert pods.placement.assign(101) is None


@settings(max_examples=300, deadline=None)
@given(
    processes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    count=st.integers(0, 60),
    seed=st.integers(0, 2**32),
)
def test_every_item_runs_once_and_no_process_is_idle_while_an_item_waits(
    processes: list[int], count: int, seed: int
) -> None:
    chance = random.Random(seed)
    pods = Pods(*processes)
    sent = 0
    while len(pods.ran) < count:
        while sent < count and pods.placement.has_room:
            pods.send(sent)
            sent += 1
        pods.begin_some()
        if sent == count:
            moves = 0
            while moved := pods.take_back():
                moves += moved
                assert moves <= sum(processes) + len(processes)
                pods.begin_some()
        idle = sum(n - len(pods.running[pod]) for pod, n in pods.processes.items())
        waiting = sum(map(len, pods.lines.values()))
        assert not idle or not waiting or sent < count
        running = [item for items in pods.running.values() for item in items]
        if chance.random() < 0.1:  # its process ended, and it is to run again
            item = chance.choice(running)
            next(items for items in pods.running.values() if item in items).remove(item)
            pods.placement.give_back(item)
            pods.put_in_line(item)
        else:
            pods.end(chance.choice(running))
    assert sorted(pods.ran) == list(range(count))
    assert pods.placement.take_back() == []
    assert not pods.placement.has_waiting


def test_an_item_that_a_pod_lets_wait_again_goes_to_another_one() -> None:
    pods = Pods(2, 1)
    for item in range(3):
        pods.send(item)
    pods.begin_some()
    assert pods.take_back() == 0
    pods.running[0].remove(2)
    pods.lines[0].append(2)
    pods.placement.wait(2)
    assert pods.take_back() == 1
    assert pods.lines == {0: [], 1: [2]}
