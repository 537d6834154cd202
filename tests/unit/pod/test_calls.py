import asyncio
import json
import os
import sys
from dataclasses import replace

import pytest

from clock_loop import pause, run
from kubetorch.errors import (
    CallableNotFoundError,
    CallRefusedError,
    KubetorchError,
    PodTerminatedError,
    ProtocolError,
    SerializationError,
    WorkerDiedError,
)
from kubetorch.pod.calls import Call
from kubetorch.pod.payloads import OwnedPayload
from kubetorch.pod.results import Outcomes
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.specs.callable import CALLABLES, CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.distribution import DistributionSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import exceptions
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.calls import Raised, Returned
from kubetorch.wire.exceptions import Failure
from kubetorch.wire.frames import Body, Open, Progress
from kubetorch.wire.messages import CallProgress, Ending
from tests.unit.pod.fakes import (
    FakeCaller,
    FakeResults,
    FakeRunner,
    begin,
    line,
    make_calls,
    opening,
    spec,
)


def started(results=None):
    calls, runner = make_calls(results), FakeRunner()
    calls.serve(spec(), runner)
    return calls, runner


@pytest.mark.parametrize("name", ["method", "request_id", "id"])
def test_a_name_that_reports_repeat_is_bounded(name):
    async def scenario():
        calls, _ = started()
        with pytest.raises(ProtocolError, match="more than 1000 characters"):
            calls.check(opening(**{name: "m" * 1001}))
        calls.check(opening(**{name: "m" * 1000}))

    run(scenario())


def test_a_call_runs_at_once_and_its_caller_is_told_everything_in_order():
    async def scenario():
        calls, runner = started()
        caller = FakeCaller()
        begin(calls, opening(method="m", request_id="r"), caller, b"[]")
        assert runner.payloads[1] == b"[]"
        assert runner.calls[1][1] == opening(method="m", request_id="r")
        assert calls.running == 1
        sink = runner.sink(1)
        sink.on_log(line("hello"))
        sink.on_progress(Progress(1, 2))
        runner.give(1, b"42")
        assert caller.events == [("log", "hello"), ("progress", 1), ("result", b"42", 1)]
        assert (calls.running, calls.total, calls.failed) == (0, 1, 0)

    run(scenario())


def test_an_error_is_passed_on_as_it_came():
    async def scenario():
        calls, runner = started()
        caller = FakeCaller()
        begin(calls, opening(), caller)
        runner.sink(1).on_error(b'{"error_type": "ValueError", "message": "no"}')
        assert (caller.failure.error_type, caller.failure.message) == ("ValueError", "no")
        assert (calls.running, calls.failed) == (0, 1)

    run(scenario())


def test_a_call_whose_worker_is_gone_is_lost_with_its_cause():
    async def scenario():
        calls, runner = started()
        caller = FakeCaller()
        begin(calls, opening(), caller)
        runner.sink(1).on_lost(WorkerDiedError("killed", exit_code=-9))
        assert caller.failure.error_type == "WorkerDiedError"
        assert caller.failure.state["exit_code"] == -9
        assert caller.failure.started
        assert caller.failure.pod_name == "demo-0"
        assert calls.lost_with == runner.pid

    run(scenario())


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (opening("other"), CallableNotFoundError),
        (opening(codec="pickle"), SerializationError),
        (opening(codec="yaml"), SerializationError),
        (opening(timeout=-1.0), ProtocolError),
        (opening(timeout=float("nan")), ProtocolError),
        (opening(timeout=float("inf")), ProtocolError),
        (opening(detached=True, id="../x"), CallRefusedError),
        (opening(detached=True, id=""), CallRefusedError),
        (opening(size=wire_tuning.LIMITS.arguments_bytes + 1), CallRefusedError),
        (Open("call-0001", "f", Body("json", (-1,), -1)), SerializationError),
        (Open("call-0001", "f", Body("json", (1, 1), 2)), SerializationError),
        (Open("call-0001", "f", Body("json", (), 5)), SerializationError),
    ],
)
def test_what_cannot_run_is_refused_before_its_arguments_come(request_, error):
    async def scenario():
        calls, runner = started()
        with pytest.raises(error):
            calls.open(request_, FakeCaller())
        assert (calls.running, runner.calls) == (0, {})

    run(scenario())


def test_a_refusal_that_is_raised_again_and_again_does_not_grow():
    async def scenario():
        calls = make_calls()
        for _ in range(3):
            with pytest.raises(CallRefusedError) as caught:
                calls.open(opening(), FakeCaller())
        depth, trace = 0, caught.value.__traceback__
        while trace is not None:
            depth, trace = depth + 1, trace.tb_next
        assert depth <= 4

    run(scenario())


def test_no_more_calls_than_the_limit_are_taken():
    async def scenario():
        calls, _ = started()
        for number in range(LIMITS.pod_calls):
            calls.open(opening(id=f"call-{number}"), FakeCaller())
        with pytest.raises(CallRefusedError, match="10000 calls"):
            calls.open(opening(id="one-more"), FakeCaller())

    run(scenario())


def test_calls_wait_for_a_worker_and_run_in_their_order():
    async def scenario():
        calls, runner = make_calls(), FakeRunner()
        calls.hold(spec())
        for number in range(3):
            begin(calls, opening(id=f"call-{number}"), FakeCaller(), b"%d" % number)
        assert not runner.calls
        calls.serve(spec(), runner)
        assert list(runner.payloads.values()) == [b"0", b"1", b"2"]

    run(scenario())


def test_a_call_that_waits_too_long_for_a_worker_is_refused():
    async def scenario():
        calls = make_calls()
        calls.hold(spec())
        caller = FakeCaller()
        begin(calls, opening(), caller)
        await pause(TIMING.worker_wait_seconds - 1)
        assert caller.events == [("queued",)]
        await pause(2)
        assert caller.failure.error_type == "CallRefusedError"
        assert not caller.failure.started
        assert calls.running == 0

    run(scenario())


def test_calls_that_wait_are_refused_with_the_reason_when_no_worker_comes():
    async def scenario():
        calls = make_calls()
        calls.hold(spec())
        caller = FakeCaller()
        begin(calls, opening(), caller)
        calls.refuse(CallRefusedError("generation 1 could not be loaded"))
        assert caller.failure.message == "generation 1 could not be loaded"
        assert not caller.failure.started
        calls.hold(spec())
        begin(calls, opening(), FakeCaller())

    run(scenario())


def test_a_call_that_comes_while_the_worker_is_dying_waits_for_the_next_one():
    async def scenario():
        calls, runner = started()
        runner.accepts_calls = False
        begin(calls, opening(), FakeCaller())
        assert not runner.calls
        after = FakeRunner(pid=11)
        calls.serve(spec(), after)
        assert list(after.calls) == [1]

    run(scenario())


def test_calls_that_wait_for_an_interruption_run_once_that_has_ended():
    async def scenario():
        calls, runner = started()
        begin(calls, opening(), FakeCaller())
        runner.accepts_calls = False
        begin(calls, opening(id="call-0002"), FakeCaller())
        begin(calls, opening(id="call-0003"), FakeCaller())
        assert list(runner.calls) == [1]
        runner.accepts_calls = True
        runner.sink(1).on_error(b"{}")
        assert list(runner.calls) == [1, 2, 3]

    run(scenario())


def of_class(on_replace="warn"):
    callable_ref = CallableRef("cls", "f", "jobs", "f", on_replace=on_replace)
    return WorkloadSpec("default", "f", callable_ref)


def test_every_program_that_knew_the_instance_before_is_told_of_the_new_one_once():
    async def scenario():
        calls = make_calls()
        calls.serve(of_class(), FakeRunner())
        instance_before = calls.instance
        calls.serve(of_class(), FakeRunner(pid=11), "it was killed")

        def announced_instances(call_id, instance):
            caller = FakeCaller()
            begin(calls, opening(id=call_id, instance=instance), caller)
            return [event[2] for event in caller.events if event[0] == "replaced"]

        assert announced_instances("call-0001", None) == [calls.instance]
        assert announced_instances("call-0002", None) == []
        assert announced_instances("call-0003", instance_before) == [calls.instance]
        assert announced_instances("call-0004", calls.instance) == []

    run(scenario())


def test_a_deploy_makes_an_instance_without_a_word():
    async def scenario():
        calls = make_calls()
        calls.serve(of_class(), FakeRunner())
        instance_before = calls.instance
        calls.serve(of_class(), FakeRunner(pid=11))
        caller = FakeCaller()
        begin(calls, opening(instance=instance_before), caller)
        assert caller.events == []
        assert calls.instance != instance_before

    run(scenario())


def test_a_call_is_refused_instead_when_the_class_says_so():
    async def scenario():
        calls, runner = make_calls(), FakeRunner()
        calls.serve(of_class("error"), runner, "it was killed")
        caller = FakeCaller()
        begin(calls, opening(), caller)
        assert caller.failure.error_type == "InstanceReplacedError"
        assert caller.failure.state["instance"] == calls.instance
        assert "it was killed" in caller.failure.message
        assert (runner.calls, caller.failure.started) == ({}, False)
        begin(calls, opening(id="call-0002"), FakeCaller())
        assert list(runner.calls) == [1]

    run(scenario())


def test_a_call_that_a_full_worker_refuses_is_refused():
    async def scenario():
        calls, runner = started()
        runner.refuses = CallRefusedError("the worker takes no more calls")
        caller = FakeCaller()
        begin(calls, opening(), caller)
        assert caller.failure.message == "the worker takes no more calls"
        assert not caller.failure.started
        assert calls.running == 0

    run(scenario())


@pytest.mark.parametrize(
    "changed", [spec("other"), spec(allowed=("pickle",))], ids=["callable", "codec"]
)
def test_a_call_is_checked_again_when_something_else_was_deployed_before_it_runs(changed):
    async def scenario():
        calls, runner = make_calls(), FakeRunner()
        calls.hold(spec())
        waiting, uploading = FakeCaller(), FakeCaller()
        begin(calls, opening(id="call-0001"), waiting)
        slow = calls.open(opening(id="call-0002"), uploading)
        calls.serve(changed, runner)
        slow.begin(OwnedPayload(b"{}"))
        for caller in (waiting, uploading):
            assert caller.failure.error_type in ("CallableNotFoundError", "SerializationError")
            assert not caller.failure.started
        assert not runner.calls

    run(scenario())


# ------------------------------------------------------------------------------------- slots


def bounded(concurrency=1, **more):
    calls, runner = make_calls(), FakeRunner()
    compute = ComputeSpec(concurrency=concurrency, **more)
    calls.serve(replace(spec(), compute=compute), runner)
    return calls, runner


def test_a_call_waits_for_a_slot_and_its_caller_is_told_that_and_when_it_begins():
    async def scenario():
        calls, runner = bounded()
        first, second = FakeCaller(), FakeCaller()
        begin(calls, opening(), first)
        begin(calls, opening(timeout=5.0, queue_timeout=60.0), second)
        assert second.events == [("queued",)]
        assert (calls.running, calls.waiting, len(runner.calls)) == (2, 1, 1)
        await pause(20)  # no part of its timeout
        runner.give(1, b"1")
        assert second.events == [("queued",), ("begun",)]
        await pause(4)
        runner.give(2, b"2")
        assert second.events[-1] == ("result", b"2", 1)
        assert calls.running == calls.waiting == 0

    run(scenario())


def test_a_call_that_waits_for_its_turn_is_given_back_to_its_caller():
    async def scenario():
        calls, runner = bounded()
        callers = [FakeCaller() for _ in range(3)]
        waiting = [
            begin(calls, opening(id=f"call-000{n}", idempotency_key=f"k{n}"), caller)
            for n, caller in enumerate(callers)
        ][1]
        waiting.take_back()
        failure = callers[1].failure
        assert (failure.code, failure.started) == ("call_refused", False)
        assert (calls.running, calls.waiting, calls.total, calls.failed) == (2, 1, 2, 0)
        # It was never here: its key is free, and the next one in the line has its turn.
        assert calls.find_earlier(opening(idempotency_key="k1")) is None
        runner.give(1, b"1")
        assert [request.id for _, request in runner.calls.values()] == ["call-0000", "call-0002"]

    run(scenario())


def test_a_call_that_has_begun_or_has_others_that_wait_for_it_is_not_given_back():
    async def scenario():
        calls, runner = bounded()
        callers = [FakeCaller() for _ in range(4)]
        running = begin(calls, opening(), callers[0])
        spawned = begin(calls, opening(id="call-0002", detached=True), callers[1])
        shared = begin(calls, opening(id="call-0003", idempotency_key="k"), callers[2])
        shared.join(callers[3])
        for call in (running, spawned, shared):
            call.take_back()
        assert (calls.running, calls.waiting, calls.total) == (3, 2, 3)
        for number in (1, 2, 3):
            runner.give(number, b"1")
        assert [caller.events[-1][0] for caller in callers] == ["result"] * 4
        running.take_back()  # too late
        assert calls.total == 3

    run(scenario())


def test_calls_that_wait_for_a_worker_are_given_back_and_leave_nothing():
    async def scenario():
        calls = make_calls()
        calls.hold(spec())
        for _ in range(3):
            caller = FakeCaller()
            call = begin(calls, opening(), caller)
            assert (caller.events, calls.not_begun) == ([("queued",)], 1)
            call.take_back()
            assert caller.failure.code == "call_refused"
            assert (calls.running, calls.not_begun, calls.total) == (0, 0, 0)
        begin(calls, opening(), FakeCaller()).revoke("cancelled")
        assert calls.not_begun == 0
        runner = FakeRunner()
        calls.serve(spec(), runner)
        assert runner.calls == {}

    run(scenario())


def test_a_call_that_waits_too_long_for_its_turn_ends_without_running():
    async def scenario():
        calls, runner = bounded()
        begin(calls, opening(), FakeCaller())
        caller = FakeCaller()
        begin(calls, opening(queue_timeout=5.0), caller)
        await pause(6)
        assert caller.failure.error_type == "CallTimeoutError"
        assert not caller.failure.started
        runner.give(1, b"1")
        assert len(runner.calls) == 1

    run(scenario())


def test_a_call_that_begins_within_its_queue_timeout_may_run_for_longer():
    async def scenario():
        calls, runner = bounded()
        begin(calls, opening(), FakeCaller())
        caller = FakeCaller()
        begin(calls, opening(queue_timeout=5.0), caller)
        runner.give(1, b"1")
        await pause(6)
        runner.give(2, b"2")
        assert caller.events == [("queued",), ("begun",), ("result", b"2", 1)]

    run(scenario())


def test_a_call_that_waits_for_its_turn_can_be_cancelled():
    async def scenario():
        calls, runner = bounded()
        begin(calls, opening(), FakeCaller())
        caller, last = FakeCaller(), FakeCaller()
        waiting = begin(calls, opening(), caller)
        begin(calls, opening(), last)
        waiting.cancel(caller, "not needed")
        assert caller.failure.error_type == "CallCancelledError"
        runner.give(1, b"1")
        assert (len(runner.calls), last.events) == (2, [("queued",), ("begun",)])

    run(scenario())


def test_a_call_that_the_running_one_makes_runs_in_its_slot():
    async def scenario():
        calls, runner = bounded()
        begin(calls, opening(), FakeCaller())
        begin(calls, opening(), FakeCaller("b"))
        begin(calls, opening(chain=runner.chains[1]), FakeCaller())
        assert list(runner.calls) == [1, 2]
        # A third one is the same chain, seen from one call deeper.
        assert runner.chains[1] != runner.chains[2]
        assert runner.chains[1].partition(":")[0] == runner.chains[2].partition(":")[0]
        runner.give(2, b"")
        assert calls.waiting == 1

    run(scenario())


def test_calls_that_wait_for_a_slot_run_in_the_worker_that_comes_next():
    async def scenario():
        calls, runner = bounded()
        begin(calls, opening(), FakeCaller())
        callers = [FakeCaller() for _ in range(3)]
        for caller in callers:
            begin(calls, opening(), caller)
        calls.hold(calls.spec)
        following = FakeRunner(generation=2)
        calls.serve(calls.spec, following)
        assert list(following.calls) == [1]
        # The slot of the process before it is no slot of this one.
        runner.give(1, b"1")
        assert list(following.calls) == [1]
        for number in (1, 2, 3):
            following.give(number, b"1")
        assert [caller.events[-1][0] for caller in callers] == ["result"] * 3

    run(scenario())


def test_a_worker_that_refuses_ends_all_calls_that_wait_for_it_one_after_the_other():
    async def scenario():
        calls, runner = bounded()
        begin(calls, opening(), FakeCaller())
        callers = [FakeCaller() for _ in range(3000)]
        for caller in callers:
            begin(calls, opening(), caller)
        runner.refuses = CallRefusedError("the worker takes no more calls")
        runner.give(1, b"1")
        assert {caller.failure.error_type for caller in callers} == {"CallRefusedError"}
        assert calls.running == calls.waiting == 0

    run(scenario())


def test_as_many_calls_wait_as_may_whatever_a_pod_runs():
    async def scenario():
        calls, _ = bounded()
        for _ in range(1 + 10_000):
            begin(calls, opening(), FakeCaller())
        assert calls.waiting == 10_000
        caller = FakeCaller()
        begin(calls, opening(), caller)
        assert caller.failure.error_type == "QueueFullError"

    run(scenario())


def test_more_calls_than_may_wait_are_refused_by_name():
    async def scenario():
        calls, _ = bounded(max_queue=1)
        for _ in range(2):
            begin(calls, opening(), FakeCaller())
        caller = FakeCaller()
        begin(calls, opening(), caller)
        assert (caller.failure.error_type, caller.failure.status) == ("QueueFullError", 429)
        assert not caller.failure.started

    run(scenario())


# ---------------------------------------------------------------------------- ends from outside


def test_the_caller_of_a_call_is_told_of_its_timeout_at_once_and_of_nothing_later():
    async def scenario():
        calls, runner = started()
        caller = FakeCaller()
        begin(calls, opening(timeout=4.98, whole_timeout=5.0), caller)
        await pause(6)
        assert caller.failure.error_type == "CallTimeoutError"
        assert caller.failure.message.endswith("within its timeout of 5 s")
        assert caller.failure.started
        assert [(number, timed_out) for number, _, timed_out in runner.cancelled] == [(1, True)]
        assert calls.running == 1
        runner.give(1, b"late")
        assert len(caller.events) == 1
        assert calls.running == 0

    run(scenario())


def test_a_timeout_counts_from_the_begin_of_the_run_and_not_while_a_worker_is_awaited():
    async def scenario():
        calls, runner = started()
        begin(calls, opening(), FakeCaller())
        runner.accepts_calls = False  # a call is being interrupted
        caller = FakeCaller()
        begin(calls, opening(id="call-0002", timeout=5.0), caller)
        await pause(10)
        runner.accepts_calls = True
        runner.sink(1).on_error(b"{}")
        assert caller.events == [("queued",), ("begun",)]
        await pause(4)
        assert not runner.cancelled
        await pause(2)
        assert caller.failure.error_type == "CallTimeoutError"
        assert caller.failure.started
        assert [number for number, _, _ in runner.cancelled] == [2]

    run(scenario())


def test_a_call_whose_queue_timeout_ends_before_a_worker_is_there_does_not_run():
    async def scenario():
        calls = make_calls()
        calls.hold(spec())
        caller = FakeCaller()
        begin(calls, opening(timeout=1.0, queue_timeout=5.0), caller)
        await pause(4)
        assert caller.events == [("queued",)]
        await pause(2)
        assert caller.failure.error_type == "CallTimeoutError"
        assert not caller.failure.started
        runner = FakeRunner()
        calls.serve(spec(), runner)
        assert not runner.calls

    run(scenario())


def test_a_call_that_ended_has_no_timeout_any_more():
    async def scenario():
        calls, runner = started()
        caller = FakeCaller()
        begin(calls, opening(timeout=5.0), caller)
        runner.give(1, b"1")
        await pause(10)
        assert len(caller.events) == 1
        assert not runner.cancelled

    run(scenario())


def test_a_cancelled_call_ends_when_the_worker_says_so():
    async def scenario():
        calls, runner = started()
        caller = FakeCaller()
        call = begin(calls, opening(), caller)
        call.cancel(caller, "enough")
        call.cancel(caller, "again")
        assert runner.cancelled == [(1, "enough", False)]
        assert not caller.events
        runner.sink(1).on_error(b'{"error_type": "CallCancelledError", "message": "enough"}')
        assert caller.failure.error_type == "CallCancelledError"

    run(scenario())


def test_a_call_is_cancelled_while_it_waits_or_while_its_arguments_come():
    async def scenario():
        calls, runner = make_calls(), FakeRunner()
        calls.hold(spec())
        waiting, uploading = FakeCaller(), FakeCaller()
        begin(calls, opening(id="call-0001"), waiting).cancel(waiting, "no")
        slow = calls.open(opening(id="call-0002"), uploading)
        slow.cancel(uploading, "no")
        for caller in (waiting, uploading):
            assert caller.failure.error_type == "CallCancelledError"
            assert not caller.failure.started
        calls.serve(spec(), runner)
        slow.begin(OwnedPayload(b"{}"))
        assert not runner.calls
        await pause(100)
        assert calls.running == 0

    run(scenario())


def test_a_plain_call_that_its_caller_leaves_is_cancelled_and_a_detached_one_is_not():
    async def scenario():
        calls, runner = started()
        plain, detached = FakeCaller(), FakeCaller()
        begin(calls, opening(id="call-0001"), plain).leave(plain)
        assert [number for number, *_ in runner.cancelled] == [1]
        begin(calls, opening(id="call-0002", detached=True), detached).leave(detached)
        assert [number for number, *_ in runner.cancelled] == [1]

    run(scenario())


# ------------------------------------------------------------------------------ more than one


def test_a_second_call_with_a_key_joins_the_first_or_gets_its_outcome():
    async def scenario():
        calls, runner = started()
        first_caller, second_caller = FakeCaller(), FakeCaller()
        begin(calls, opening(idempotency_key="k"), first_caller)
        running = calls.find_earlier(opening(id="call-0002", idempotency_key="k"))
        assert isinstance(running, Call)
        running.join(second_caller)
        runner.give(1, b"42")
        assert first_caller.events == second_caller.events == [("result", b"42", 1)]
        assert calls.find_earlier(opening(idempotency_key="k")) == Returned(
            "json", (2,), b"42", False, 1
        )
        assert calls.find_earlier(opening(idempotency_key="other")) is None
        assert calls.find_earlier(opening(method="m", idempotency_key="k")) is None

    run(scenario())


def test_a_failure_is_kept_for_its_key_too():
    async def scenario():
        calls, runner = started()
        begin(calls, opening(idempotency_key="k"), FakeCaller())
        runner.sink(1).on_error(b'{"error_type": "ValueError", "message": "no"}')
        earlier_outcome = calls.find_earlier(opening(idempotency_key="k"))
        assert isinstance(earlier_outcome, Raised)
        assert earlier_outcome.failure.error_type == "ValueError"

    run(scenario())


def test_a_call_that_never_ran_can_be_sent_again_with_its_key():
    async def scenario():
        calls = make_calls()
        calls.hold(spec())
        caller = FakeCaller()
        begin(calls, opening(idempotency_key="k"), caller)
        calls.refuse(CallRefusedError("generation 1 could not be loaded"))
        assert not caller.failure.started
        assert calls.find_earlier(opening(idempotency_key="k")) is None

    run(scenario())


def test_a_generator_cannot_be_joined_once_it_has_yielded():
    async def scenario():
        calls, runner = started()
        call = begin(calls, opening(idempotency_key="k"), FakeCaller())
        runner.give_one(1, b"1")
        with pytest.raises(CallRefusedError, match="streams its values"):
            call.join(FakeCaller())

    run(scenario())


def test_grants_reach_the_worker_until_the_call_ends():
    async def scenario():
        calls, runner = started()
        call = begin(calls, opening(), FakeCaller())
        call.grant(8)
        runner.give(1, b"null", streamed=True)
        call.grant(8)
        assert runner.granted == [(1, 8)]

    run(scenario())


def test_detached_calls_are_recorded_and_found_by_their_id():
    async def scenario():
        results = FakeResults()
        calls, runner = started(results)
        call = begin(calls, opening(id="call-0001", detached=True), FakeCaller())
        assert results.begun == ["call-0001"]
        assert calls.find("call-0001") is call
        with pytest.raises(CallRefusedError, match="already"):
            calls.open(opening(id="call-0001", detached=True), FakeCaller())
        runner.give(1, b"42")
        assert results.ended["call-0001"] == ("succeeded", calls.find("call-0001"))
        assert calls.find("another") is None

    run(scenario())


def test_a_detached_call_is_recorded_while_it_waits_for_a_worker():
    async def scenario():
        results = FakeResults()
        calls = make_calls(results)
        calls.hold(spec())
        begin(calls, opening(id="call-0001", detached=True), FakeCaller())
        assert results.begun == ["call-0001"]

    run(scenario())


def test_a_detached_generator_is_ended_with_the_reason():
    async def scenario():
        results = FakeResults()
        calls, runner = started(results)
        caller = FakeCaller()
        begin(calls, opening(id="call-0001", detached=True), caller)
        runner.give_one(1, b"1")
        assert "is a generator" in caller.failure.message
        assert isinstance(results.ended["call-0001"][1], Raised)
        assert runner.cancelled[0][0] == 1

    run(scenario())


def test_a_generator_that_has_ended_cannot_be_joined_either():
    async def scenario():
        calls, runner = started()
        begin(calls, opening(idempotency_key="k"), FakeCaller())
        runner.give_one(1, b"1")
        runner.give(1, b"null", streamed=True)
        earlier_outcome = calls.find_earlier(opening(idempotency_key="k"))
        assert isinstance(earlier_outcome, Raised)
        assert "streams its values" in earlier_outcome.failure.message

    run(scenario())


def test_a_spawned_call_does_not_get_the_values_of_a_generator_with_its_key():
    async def scenario():
        results = FakeResults()
        calls, runner = started(results)
        call = begin(calls, opening(idempotency_key="k"), FakeCaller())
        runner.give_one(1, b"1")
        with pytest.raises(CallRefusedError, match="streams its values"):
            calls.add_twin(call, opening(id="call-0002", detached=True, idempotency_key="k"))
        assert results.begun == []

    run(scenario())


def test_a_spawned_call_that_cannot_be_written_down_does_not_run():
    async def scenario():
        results, caller = FakeResults(), FakeCaller()
        calls, runner = started(results)
        results.is_full = True
        begin(calls, opening(detached=True), caller)
        assert caller.failure.error_type == "DataStoreError"
        assert "cannot write the call to its disk: no space left" in caller.failure.message
        assert not caller.failure.started
        assert runner.calls == {}

    run(scenario())


def test_of_a_spawned_call_is_reported_how_far_it_has_come_as_json_can_say_it():
    async def scenario():
        results = FakeResults()
        calls, runner = started(results)
        begin(calls, opening(detached=True), FakeCaller())
        nothing, endless = float("nan"), float("inf")
        for report in (Progress(nothing, 9.0), Progress(1, endless, "x" * 500), Progress(2, 9.0)):
            runner.sink(1).on_progress(report)
            await pause(TIMING.spawned_progress_interval_seconds + 0.1)
        cut = "x" * LIMITS.spawned_progress_characters
        reports = [(status.id, status.state, status.progress) for status in results.reports]
        assert reports == [
            ("call-0001", "running", CallProgress(1, None, cut)),
            ("call-0001", "running", CallProgress(2, 9.0, None)),
        ]

    run(scenario())


def test_reports_of_a_spawned_call_have_pauses_and_end_with_it():
    async def scenario():
        results = FakeResults()
        calls, runner = started(results)
        begin(calls, opening(detached=True), FakeCaller())
        for number in range(5):
            runner.sink(1).on_progress(Progress(number))
        assert [report.progress.current for report in results.reports] == [0]
        await pause(TIMING.spawned_progress_interval_seconds + 0.1)
        assert [report.progress.current for report in results.reports] == [0, 4]
        runner.sink(1).on_progress(Progress(5))
        runner.give(1, b"42")
        await pause(2 * TIMING.spawned_progress_interval_seconds)
        assert [report.progress.current for report in results.reports] == [0, 4]

    run(scenario())


def test_who_asks_for_the_names_of_callables_is_not_the_one_to_tell_of_a_new_instance():
    async def scenario():
        calls = make_calls()
        calls.serve(of_class("error"), FakeRunner(), "it was killed")
        begin(calls, opening(method=CALLABLES), FakeCaller())
        caller = FakeCaller()
        begin(calls, opening(id="call-0002"), caller)
        assert caller.failure.error_type == "InstanceReplacedError"

    run(scenario())


def test_only_a_call_for_new_processes_waits_for_as_long_as_a_launch_may_take():
    async def scenario():
        calls = make_calls()
        compute = ComputeSpec(
            distribution=DistributionSpec("spmd", workers=2, quorum_timeout=100),
            launch_timeout=200,
            allowed_serialization=("json",),
        )
        calls.hold(replace(spec(), compute=compute))
        plain, anew = FakeCaller(), FakeCaller()
        begin(calls, opening(), plain)
        begin(calls, opening(id="call-0002", restart_procs=True), anew)
        await pause(TIMING.worker_wait_seconds + 1)
        assert plain.failure.error_type == "CallRefusedError"
        assert anew.events == [("queued",)]
        await pause(300 - TIMING.worker_wait_seconds)
        assert "has had no worker for 300 s" in anew.failure.message

    run(scenario())


# ----------------------------------------------------------------------------------- draining


def test_draining_refuses_what_has_not_begun_and_waits_for_what_runs():
    async def scenario():
        calls, runner = started()
        running, uploading, late = FakeCaller(), FakeCaller(), FakeCaller()
        begin(calls, opening(id="call-0001"), running)
        calls.open(opening(id="call-0002"), uploading)
        calls.stop_accepting("SIGTERM")
        assert uploading.failure.error_type == "CallRefusedError"
        assert not uploading.failure.started
        with pytest.raises(CallRefusedError, match="being stopped"):
            calls.open(opening(id="call-0003"), late)
        assert calls.running == 1
        runner.give(1, b"1")
        assert (calls.running, running.events) == (0, [("result", b"1", 1)])

    run(scenario())


def test_what_outlasts_the_grace_ends_with_the_reason():
    async def scenario():
        calls, _ = started()
        caller = FakeCaller()
        begin(calls, opening(), caller)
        calls.stop_accepting("Evicted")
        assert caller.events == []
        calls.end_all("Evicted")
        assert caller.failure.error_type == "PodTerminatedError"
        assert caller.failure.state["reason"] == "Evicted"
        assert caller.failure.started

    run(scenario())


def test_what_a_cluster_says_of_the_end_is_the_reason():
    async def scenario():
        calls, _ = started()
        caller = FakeCaller()
        begin(calls, opening(), caller)
        calls.ending = Ending(reason="Evicted", message="make room", time=5.0)
        calls.stop_accepting("SIGTERM")
        calls.end_all("SIGTERM")
        error = exceptions.rebuild(caller.failure)
        assert isinstance(error, PodTerminatedError)
        assert (error.reason, error.evicted) == ("Evicted", True)
        assert error.events == [{"timestamp": 5.0, "reason": "Evicted", "message": "make room"}]

    run(scenario())


def test_failures_of_the_agent_show_no_frames_of_its_own():
    calls = make_calls()
    try:
        raise KubetorchError("no")
    except KubetorchError:
        error = sys.exc_info()[1]
    assert isinstance(error, KubetorchError)
    failure = json.loads(calls.describe(error, started=False).to_json())
    assert failure["traceback"] == ""
    error.remote_traceback = "the user's"
    assert json.loads(calls.describe(error, started=False).to_json())["traceback"] == "the user's"


# ----------------------------------------------------------------------------------- outcomes


def returned(size: int) -> Returned:
    return Returned("json", (size,), bytes(size))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_outcome_is_found_until_its_time_is_over(tmp_path):
    clock = Clock()
    outcomes = Outcomes(tmp_path, clock, keep_seconds=10)
    outcomes.put("a", returned(1))
    outcomes.put("b", Raised(Failure("ValueError", "no")))
    assert outcomes.get("a") == returned(1)
    assert isinstance(outcomes.get("b"), Raised)
    clock.now = 9.9
    assert outcomes.get("a") is not None
    clock.now = 10
    assert outcomes.get("a") is None


def test_the_oldest_go_when_there_are_too_many_bytes(tmp_path):
    outcomes = Outcomes(tmp_path, Clock(), limit_bytes=10_000)
    for key in range(5):
        outcomes.put(key, returned(2000))
    assert [key for key in range(5) if outcomes.get(key)] == [2, 3, 4]


def test_of_files_that_workers_have_written_the_oldest_go_and_are_closed(tmp_path):
    async def scenario():
        outcomes = Outcomes(tmp_path, Clock(), limit_bytes=3 * 1100, overhead=1000)
        descriptors = []
        for key in range(4):
            with (tmp_path / str(key)).open("w+b") as file:
                file.write(b"x" * 100)
                descriptors.append(os.dup(file.fileno()))
            outcomes.keep_file(key, descriptors[-1])
        assert outcomes.get(0) is None
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptors[0])
        outcome = outcomes.get(1)
        assert (outcome.codec, outcome.sizes, bytes(outcome.payload)) == (
            "pickle",
            (100,),
            b"x" * 100,
        )

    asyncio.run(scenario())


def test_one_that_is_larger_than_all_may_be_is_not_kept_and_drives_nothing_out(tmp_path):
    outcomes = Outcomes(tmp_path, Clock(), limit_bytes=10_000)
    outcomes.put("small", returned(1))
    outcomes.put("large", returned(20_000))
    assert outcomes.get("large") is None
    assert outcomes.get("small") is not None


def test_a_key_that_is_put_again_has_the_new_outcome(tmp_path):
    outcomes = Outcomes(tmp_path, Clock(), limit_bytes=5000)
    outcomes.put("a", returned(2000))
    outcomes.put("a", returned(3000))
    outcomes.put("b", returned(100))
    assert outcomes.get("b") is not None
    outcomes.put("a", returned(20_000))
    assert outcomes.get("a") is None
