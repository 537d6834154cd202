"""Which calls run together, in which slot, and what becomes of those that leave."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clock_loop import pause, run
from kubetorch.errors import WorkerDiedError
from kubetorch.pod.slots import BATCHES, Slots, Ticket
from kubetorch.pod.user_process.protocol import Methods
from kubetorch.specs.batching import BatchSpec
from kubetorch.specs.compute import ComputeSpec
from kubetorch.wire.frames import Chain, Progress, Retry
from tests.unit.pod.fakes import FakeCaller, FakeResults, FakeRunner, begin, line, make_calls
from tests.unit.pod.fakes import opening as opening_of
from tests.unit.pod.fakes import spec as spec_of

FAILED = b'{"error_type": "ValueError", "message": "no"}'


class Pod:
    """A pod whose function `f` is batched, and the calls of it that were begun."""

    def __init__(
        self, max_size: int = 3, wait: float = 0.5, *, concurrency: int | None = None
    ) -> None:
        self.results = FakeResults()
        self.calls, self.runner = make_calls(self.results), FakeRunner()
        self.runner.methods = Methods(batched={None: BatchSpec(max_size, wait)})
        self.spec = replace(spec_of(), compute=ComputeSpec(concurrency=concurrency))
        self.calls.serve(self.spec, self.runner)
        self.callers: list[FakeCaller] = []
        self.handles = []

    def begin(self, count: int = 1, **more) -> None:
        for _ in range(count):
            caller = FakeCaller()
            number = len(self.callers) + 1
            self.callers.append(caller)
            self.handles.append(begin(self.calls, opening(number, **more), caller))

    @property
    def batches(self) -> list[list[int]]:
        return self.runner.batches

    def end(self, batch: int) -> None:
        for number in self.batches[batch]:
            self.runner.give(number, b"1")

    def events(self, call: int) -> list[str]:
        return [kind for kind, *_ in self.callers[call].events]


def opening(number: int = 1, **more):
    return opening_of(id=f"call-{number:04}", **more)


def test_calls_that_come_within_the_wait_run_together():
    async def scenario():
        pod = Pod(max_size=10)
        pod.begin(2)
        await pause(0.4)
        pod.begin()
        assert pod.batches == []
        await pause(0.2)
        assert pod.batches == [[1, 2, 3]]
        assert pod.runner.chains[1] == pod.runner.chains[3]
        pod.end(0)
        assert [caller.events[-1][0] for caller in pod.callers] == ["result"] * 3
        assert pod.calls.running == 0

    run(scenario())


def test_a_full_batch_begins_at_once_and_one_runs_in_a_process():
    async def scenario():
        pod = Pod()
        pod.begin(8)
        assert pod.batches == [[1, 2, 3]]
        assert pod.calls.waiting == 5
        pod.end(0)
        assert pod.batches == [[1, 2, 3], [4, 5, 6]]
        await pause(1)
        assert len(pod.batches) == 2
        pod.end(1)
        await pause(1)
        assert pod.batches[2] == [7, 8]

    run(scenario())


def test_so_many_batches_run_at_once_as_the_process_has_slots():
    async def scenario():
        pod = Pod(concurrency=2)
        pod.begin(8)
        assert pod.batches == [[1, 2, 3], [4, 5, 6]]
        assert (pod.calls.queue.taken, pod.calls.queue.waiting) == (2, 2)
        pod.end(1)
        pod.begin()
        assert pod.batches[2] == [7, 8, 9]

    run(scenario())


def test_a_call_that_waited_in_the_line_for_long_does_not_wait_for_others():
    async def scenario():
        pod = Pod(wait=0.05)
        pod.begin()
        await pause(0.1)
        pod.begin(2)
        await pause(0.06)
        pod.end(0)
        assert pod.batches == [[1], [2, 3]]
        assert pod.events(1) == ["queued", "begun"]

    run(scenario())


def test_calls_that_wait_for_no_others_run_at_once():
    async def scenario():
        pod = Pod(wait=0.0)
        pod.begin(3)
        assert pod.batches == [[1]]
        pod.end(0)
        assert pod.batches == [[1], [2, 3]]
        assert pod.events(0) == ["result"]

    run(scenario())


def test_other_calls_run_beside_a_batch_of_a_process_without_a_bound():
    async def scenario():
        pod = Pod(max_size=1)
        pod.begin(2)
        assert (pod.batches, pod.calls.waiting) == ([[1]], 1)
        pod.begin(method="other")
        pod.begin(method="other", is_item=True)
        assert sorted(pod.runner.calls) == [1, 2, 3]
        assert pod.batches == [[1]]

    run(scenario())


def test_a_cancelled_call_leaves_a_batch_that_has_not_begun():
    async def scenario():
        pod = Pod()
        pod.begin(2)
        for handle in pod.handles:
            handle.revoke("enough")
        assert pod.callers[0].failure.error_type == "CallCancelledError"
        assert not pod.callers[0].failure.started
        await pause(1)
        assert pod.batches == []
        # Its slot is free again.
        pod.begin(3)
        assert pod.batches == [[1, 2, 3]]

    run(scenario())


def test_a_run_goes_on_without_a_call_that_is_cancelled_or_timed_out_and_ends_with_the_last():
    async def scenario():
        pod = Pod()
        pod.begin()
        pod.begin(timeout=1.0)
        pod.begin()
        pod.handles[0].revoke("enough")
        assert pod.callers[0].failure.error_type == "CallCancelledError"
        assert pod.callers[0].failure.started
        await pause(2)
        assert pod.callers[1].failure.error_type == "CallTimeoutError"
        assert pod.runner.cancelled == []
        pod.begin()
        assert pod.calls.waiting == 1
        pod.handles[2].revoke("enough")
        assert pod.runner.cancelled == [(3, "enough", False)]
        for number in (1, 2, 3):
            pod.runner.sink(number).on_error(FAILED)
        assert pod.callers[2].failure.error_type == "ValueError"
        assert [len(caller.events) for caller in pod.callers[:2]] == [3, 3]
        await pause(1)
        assert pod.batches[1] == [4]

    run(scenario())


def test_a_batch_has_its_slot_until_its_process_has_ended_all_its_calls():
    async def scenario():
        pod = Pod()
        pod.begin(6)
        pod.handles[2].revoke("enough")
        pod.runner.give(1, b"1")
        pod.runner.give(2, b"1")
        assert pod.batches == [[1, 2, 3]]
        pod.runner.give(3, b"1")
        assert pod.batches == [[1, 2, 3], [4, 5, 6]]

    run(scenario())


def test_what_a_batch_prints_goes_to_its_first_call_that_is_left():
    async def scenario():
        pod = Pod()
        pod.begin(3)
        pod.runner.sink(3).on_log(line("one"))
        pod.handles[0].revoke("enough")
        pod.runner.sink(1).on_log(line("two"))
        pod.runner.sink(1).on_progress(Progress(1, 2))
        news = [[event for event in caller.events if event[0] in ("log", "progress")]
                for caller in pod.callers]  # fmt: skip
        assert news == [[("log", "one")], [("log", "two"), ("progress", 1)], []]

    run(scenario())


def test_calls_whose_process_ended_run_alone_the_next_time():
    async def scenario():
        pod = Pod()
        pod.begin(3, detached=True, retry=Retry(count=1, backoff=0.1, max_backoff=0.1))
        for number in (1, 2, 3):
            pod.runner.sink(number).on_lost(WorkerDiedError("killed", exit_code=-9))
        await pause(1)
        # One after the other, and not in a batch.
        assert (sorted(pod.runner.calls), pod.batches) == ([1, 2, 3, 4], [[1, 2, 3]])
        pod.runner.give(4, b"1")
        assert sorted(pod.runner.calls) == [1, 2, 3, 4, 5]

    run(scenario())


def test_a_spawned_call_that_is_timed_out_runs_again_while_its_batch_goes_on():
    async def scenario():
        pod = Pod(concurrency=1)
        names = ("kubetorch.CallTimeoutError",)
        pod.begin(detached=True, timeout=1.0, retry=Retry(names, 1, 0.1, 0.1))
        pod.begin(2)
        await pause(2)
        assert (pod.calls.waiting, pod.batches) == (1, [[1, 2, 3]])
        pod.end(0)
        assert pod.batches == [[1, 2, 3], [4]]
        pod.end(1)
        assert pod.results.ended["call-0001"][0] == "succeeded"
        assert pod.calls.running == 0

    run(scenario())


def test_calls_of_a_batch_that_has_not_begun_wait_for_the_next_worker():
    async def scenario():
        pod = Pod(concurrency=1)
        pod.begin(2)
        pod.calls.hold(pod.spec)
        following = FakeRunner()
        following.methods = pod.runner.methods
        pod.calls.serve(pod.spec, following)
        await pause(1)
        assert (pod.batches, following.batches) == ([], [[1, 2]])

    run(scenario())


def test_calls_of_a_batch_that_has_not_begun_fail_when_nothing_serves_any_more():
    async def scenario():
        pod = Pod()
        pod.begin(2)
        pod.calls.refuse(WorkerDiedError("it fails again and again"))
        assert all(caller.failure.error_type == "WorkerDiedError" for caller in pod.callers)
        assert not pod.callers[0].failure.started

    run(scenario())


def test_a_worker_that_refuses_the_calls_of_a_batch_leaves_the_slot_free():
    async def scenario():
        pod = Pod(concurrency=1)
        pod.runner.refuses = WorkerDiedError("full")
        pod.begin(3)
        assert all(caller.failure.error_type == "WorkerDiedError" for caller in pod.callers)
        assert (pod.batches, pod.calls.queue.taken) == ([], 0)

    run(scenario())


def test_calls_that_a_batch_makes_descend_from_all_its_calls():
    async def scenario():
        pod = Pod(concurrency=1)
        pod.begin(chain="s1:c1:pod-a")
        pod.begin(chain="s2:c2:pod-b")
        pod.begin()
        slots = [ancestor.slot for ancestor in Chain.parse(pod.runner.chains[2])]
        assert set(slots[:2]) == {"s1", "s2"}
        assert len(slots) == 3

    run(scenario())


def test_a_descendant_joins_a_batch_or_opens_one_in_the_slot_of_its_ancestor():
    async def scenario():
        pod = Pod(concurrency=1)
        pod.begin(method="other")
        pod.begin()
        pod.begin(chain=pod.runner.chains[1])
        # The call that waited runs with it, in the slot of its ancestor.
        pod.begin()
        assert pod.batches == [[2, 3, 4]]

    run(scenario())


@pytest.mark.parametrize("limit", [None, 1])
def test_calls_that_are_taken_out_of_the_line_come_by_turns(limit):
    slots = Slots(limit)
    slots.add(0)
    beside = 0 if limit else BATCHES
    assert slots.offer(Ticket("first", "a", beside=beside)) is not None
    for number in range(3):
        assert slots.offer(Ticket(f"a{number}", "a", beside=beside)) is None
    slots.offer(Ticket("b", "b", beside=beside))
    slots.offer(Ticket("other", "c", beside=beside))
    assert slots.take(lambda call: call != "other", 3) == (["a0", "b", "a1"], [])
    assert slots.waiting == 2
    assert [start.call for start in slots.end("first")] in (["a2"], ["other"])
