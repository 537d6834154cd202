"""Which calls leave a record in a pod, and how long arguments stay for it."""

from dataclasses import replace

import pytest

from clock_loop import run
from kubetorch.pod.tuning import LIMITS
from kubetorch.wire import calls
from tests.unit.pod.fakes import (
    FakeCaller,
    FakeResults,
    FakeRunner,
    begin,
    make_calls,
    opening,
    spec,
)

FAILURE = b'{"error_type": "ValueError", "message": "no", "status": 500}'
ARGUMENTS = b'{"args":[1],"kwargs":{}}'


class Pod:
    def __init__(self, record="failed"):
        self.results = FakeResults()
        self.calls, self.runner = make_calls(self.results), FakeRunner()
        served = spec()
        self.calls.serve(
            replace(served, callable=replace(served.callable, record=record)), self.runner
        )

    def call(self, number=1, arguments=ARGUMENTS, **more):
        call_id = f"call-{number:04}"
        request = opening(id=call_id, size=len(arguments), **more)
        begin(self.calls, request, FakeCaller(), arguments)
        return call_id

    def fail(self, number=1, **more):
        call_id = self.call(number, **more)
        self.runner.sink(number).on_error(FAILURE)
        return call_id


def test_a_call_that_fails_leaves_its_arguments_and_its_error():
    async def scenario():
        pod = Pod()
        call_id = pod.fail(method="fit")

        record = calls.unpack_record(pod.results.records[call_id])

        assert bytes(record.arguments) == ARGUMENTS
        assert (record.callable, record.method, record.omission) == ("f", "fit", "")
        assert record.outcome.startswith("raised ")
        assert pod.results.ended[call_id][0] == "failed"
        assert pod.calls.recordable_bytes == 0

    run(scenario())


@pytest.mark.parametrize(
    ("mode", "leaving"), [("failed", [False, True]), ("all", [True, True]), ("none", [False] * 2)]
)
def test_the_mode_of_the_callable_says_which_calls_leave_one(mode, leaving):
    async def scenario():
        pod = Pod(mode)
        ids = [pod.call(1), pod.fail(2)]
        pod.runner.give(1, b"{}")
        assert [bool(pod.results.records.get(call_id)) for call_id in ids] == leaving
        assert pod.calls.recordable_bytes == 0

    run(scenario())


@pytest.mark.parametrize("detached", [False, True])
def test_the_outcome_goes_with_the_record_only_if_the_call_was_spawned(detached):
    async def scenario():
        pod = Pod("all")
        call_id = pod.call(detached=detached)
        pod.runner.give(1, b"{}")
        assert pod.results.records[call_id]
        assert (pod.results.ended[call_id][1] is not None) == detached

    run(scenario())


def test_a_controller_that_wants_no_records_gets_none():
    async def scenario():
        pod = Pod("all")
        pod.calls.may_record = False
        assert not pod.results.records.get(pod.fail())

    run(scenario())


def test_arguments_wait_for_the_outcome_within_a_bound():
    async def scenario():
        pod = Pod()
        large = b"x" * LIMITS.recorded_arguments_bytes
        most = LIMITS.recordable_arguments_bytes // len(large)
        for number in range(1, most + 1):
            pod.call(number, large)
        assert pod.calls.recordable_bytes == LIMITS.recordable_arguments_bytes

        call_id = pod.fail(most + 1)

        record = calls.unpack_record(pod.results.records[call_id])
        assert (len(record.arguments), "of all that run" in record.omission) == (0, True)
        for number in range(1, most + 1):
            pod.runner.give(number, b"{}")
        assert pod.calls.recordable_bytes == 0

    run(scenario())


def test_a_cancelled_call_leaves_none():
    async def scenario():
        pod = Pod()
        request = opening(id="call-0001", size=len(ARGUMENTS))
        call = begin(pod.calls, request, FakeCaller(), ARGUMENTS)
        call.revoke("enough")
        pod.runner.sink(1).on_error(FAILURE)
        assert not pod.results.records
        assert pod.calls.recordable_bytes == 0

    run(scenario())


def test_a_service_that_fails_again_and_again_leaves_a_bounded_number():
    async def scenario():
        pod = Pod()
        ids = [pod.fail(number) for number in range(1, LIMITS.recorded_failures + 6)]
        recorded = [call_id for call_id in ids if pod.results.records.get(call_id)]
        assert recorded == ids[: LIMITS.recorded_failures]

    run(scenario())


def test_a_record_names_the_generation_that_ran_the_call_and_not_a_later_one():
    async def scenario():
        pod = Pod()
        call_id = pod.call()
        pod.calls.serve(pod.calls.spec, FakeRunner(generation=2))
        pod.runner.sink(1).on_error(FAILURE)
        assert pod.results.generations[call_id] == pod.runner.generation == 1

    run(scenario())


def test_arguments_are_released_also_when_the_caller_cannot_be_answered():
    class LostCaller(FakeCaller):
        def on_failure(self, failure):
            raise ConnectionError("gone")

    async def scenario():
        pod = Pod()
        begin(pod.calls, opening(size=len(ARGUMENTS)), LostCaller(), ARGUMENTS)
        with pytest.raises(ConnectionError):
            pod.runner.sink(1).on_error(FAILURE)
        assert pod.calls.recordable_bytes == 0

    run(scenario())
