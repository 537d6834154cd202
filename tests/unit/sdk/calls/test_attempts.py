"""What an event of a call means: a value, an error, one more attempt."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from kubetorch.errors import (
    AgentDiedError,
    CallableNotFoundError,
    CallLostError,
    CallRefusedError,
    CallTimeoutError,
    KubetorchError,
    PodTerminatedError,
    SerializationError,
    ServiceNotFoundError,
    WorkerDiedError,
    WorkerMembershipChanged,
)
from kubetorch.pod.user_process import current_call
from kubetorch.sdk.calls.attempts import Done, Invocation, RetryAfter, Target, Yielded
from kubetorch.sdk.calls.options import CallOptions
from kubetorch.sdk.calls.route import Location, Route
from kubetorch.sdk.calls.stream import Stream
from kubetorch.sdk.calls.stream_writer import EXPIRED, LOST, Event, PendingCall
from kubetorch.wire import codecs, exceptions, frames, rank_values
from kubetorch.wire.frames import Kind
from kubetorch.wire.messages import PodView


def invocation(*, is_distributed: bool = False, **options: Any) -> Invocation:
    route = Route("service", lambda: Location((), ""))
    modules = {"prog": __name__}
    target = Target("default", "service", "work", modules=modules, is_distributed=is_distributed)
    return Invocation(target, route, CallOptions(**options), (1,), {})


def stream() -> Stream:
    return Stream(lambda broken: None)


def event(kind: int, meta: object = None, payload: bytes | None = None, **call: bool) -> Event:
    pending = PendingCall(1, lambda event: None)
    for name, value in call.items():
        setattr(pending, name, value)
    return Event(pending, kind, meta, payload, 0)


def failed(error: Exception, *, started: bool = True) -> Event:
    return event(Kind.ERROR, None, exceptions.describe(error, started=started).to_json())


def value(value: object, kind: Kind = Kind.RESULT, *, streamed: bool = False) -> Event:
    payload = json.dumps(value).encode()
    body = frames.Body("json", (len(payload),), len(payload))
    meta = frames.Yield(body) if kind is Kind.YIELD else frames.Result(body, 1, streamed)
    return event(kind, meta, payload)


def test_a_result_is_its_value() -> None:
    done = invocation().step(stream(), value([1, {"a": None}]))
    assert isinstance(done, Done)
    assert (done.value, done.error, done.is_streamed) == ([1, {"a": None}], None, False)


def test_a_value_of_a_generator_and_its_end() -> None:
    call = invocation()
    step = call.step(stream(), value(1, Kind.YIELD))
    assert isinstance(step, Yielded)
    assert step.value == 1
    done = call.step(stream(), value("end", streamed=True))
    assert isinstance(done, Done)
    assert done.is_streamed


def test_a_value_that_cannot_be_rebuilt_is_an_error_of_the_call() -> None:
    body = frames.Body("pickle", (4,), 4)
    done = invocation().step(stream(), event(Kind.RESULT, frames.Result(body), b"abcd"))
    assert isinstance(done, Done)
    assert isinstance(done.error, SerializationError)


class Custom(Exception):
    """Of this module, which the pod knows as `prog`."""


def test_an_error_is_rebuilt_under_the_name_that_its_module_has_here() -> None:
    failure = exceptions.Failure("Custom", "text", module="prog", qualname="Custom", args=["text"])
    done = invocation().step(stream(), event(Kind.ERROR, None, failure.to_json()))
    assert isinstance(done, Done)
    assert type(done.error) is Custom


@pytest.mark.parametrize(
    ("error", "is_sent_again"),
    [
        (CallRefusedError("draining"), True),
        (PodTerminatedError("pod", "SIGTERM"), True),
        (WorkerDiedError("died before it began"), True),
        (CallableNotFoundError("no such callable"), False),
        (SerializationError("not allowed"), False),
        (CallTimeoutError("too late"), False),
    ],
)
def test_what_never_started_is_sent_again_if_that_can_help(
    error: KubetorchError, is_sent_again: bool
) -> None:
    step = invocation().step(stream(), failed(error, started=False))
    assert isinstance(step, RetryAfter) == is_sent_again


@pytest.mark.parametrize(
    "error", [WorkerDiedError("died"), PodTerminatedError(), AgentDiedError(), CallLostError("?")]
)
def test_what_started_is_made_again_only_as_often_as_was_asked(error: KubetorchError) -> None:
    assert isinstance(invocation().step(stream(), failed(error)), Done)
    call = invocation(retries=2)
    steps = [call.step(stream(), failed(error)) for _ in range(3)]
    assert [type(step) for step in steps] == [RetryAfter, RetryAfter, Done]
    assert isinstance(steps[-1], Done)
    assert type(steps[-1].error) is type(error)


def test_a_call_stays_with_its_ancestor_until_the_pod_takes_no_calls() -> None:
    pods = {"pod-1": PodView(name="pod-1", ordinal=1, phase="Running")}
    location = Location(("http://0", "http://1"), "", (0, 1), pods=pods)
    route = Route("service", lambda: location, location)
    target = Target("default", "service", "work", is_balanced=True, pods=(0, 1))
    running: Any = SimpleNamespace(chain="slot:call:pod-1", request_id="r")
    token = current_call.current.set(running)
    try:
        call, keyed = (
            Invocation(target, route, CallOptions(**options), (), {})
            for options in ({"retries": 1}, {"idempotency_key": "key of pod 0"})
        )
    finally:
        current_call.current.reset(token)
    assert call.route is route.pod(1)
    call.step(stream(), failed(WorkerDiedError("died")))
    assert call.route is route.pod(1)
    call.step(stream(), failed(CallRefusedError("draining"), started=False))
    assert call.route is route
    assert keyed.route is route.pod(0)  # only that pod has the outcome


def test_the_users_own_error_is_never_a_reason_to_run_again() -> None:
    call = invocation(retries=5)
    assert isinstance(call.step(stream(), failed(ValueError("bad"))), Done)


def test_a_generator_that_has_yielded_is_never_run_again() -> None:
    call = invocation(retries=5)
    call.step(stream(), value(1, Kind.YIELD))
    assert isinstance(call.step(stream(), failed(WorkerDiedError("died"))), Done)


def test_a_call_lost_before_it_was_written_is_sent_again_and_any_other_is_not() -> None:
    lost = CallLostError("gone")
    assert isinstance(invocation().step(stream(), event(LOST, lost)), RetryAfter)
    done = invocation().step(stream(), event(LOST, lost, was_written=True))
    assert isinstance(done, Done)
    assert done.error is lost
    not_found_error = ServiceNotFoundError("gone for good")
    assert isinstance(invocation().step(stream(), event(LOST, not_found_error)), Done)


def test_ranks_of_a_pod_that_is_gone_are_gone_with_it() -> None:
    pod_error = PodTerminatedError("train-1", "OOMKilled")
    done = invocation(is_distributed=True).step(stream(), event(LOST, pod_error, was_written=True))
    assert isinstance(done, Done)
    assert isinstance(done.error, WorkerMembershipChanged)
    assert done.error.reasons == {"train-1": "OOMKilled"}
    assert done.error.is_critical
    assert done.error.__cause__ is pod_error
    assert "restart_procs" in str(done.error.hint)


def test_ranks_come_as_a_list_in_rank_order() -> None:
    segments = rank_values.pack(
        [rank_values.Entry(1, "json", [b'"b"']), rank_values.Entry(0, "json", [b'"a"'])]
    )
    payload = b"".join(codecs.join(segments))
    body = frames.Body(rank_values.CODEC, tuple(map(len, segments)), len(payload))
    done = invocation().step(stream(), event(Kind.RESULT, frames.Result(body), payload))
    assert isinstance(done, Done)
    assert done.value == ["a", "b"]


def test_pauses_between_attempts_grow() -> None:
    call = invocation()
    steps = [call.step(stream(), event(LOST, CallLostError("gone"))) for _ in range(10)]
    delays = [step.delay for step in steps if isinstance(step, RetryAfter)]
    assert delays == sorted(delays)
    assert delays[0] < 0.1
    assert delays[-1] == 1.0


def test_a_deadline_ends_the_wait_for_an_attempt_to_begin() -> None:
    call = invocation(timeout=1e-9)
    assert isinstance(call.step(stream(), event(LOST, CallLostError("gone"))), Done)


def test_each_attempt_has_the_whole_timeout() -> None:
    call = invocation(timeout=30, retries=1, backoff=5)
    first = call.expires
    assert call.step(stream(), failed(WorkerDiedError("died"))) == RetryAfter(5)
    assert first is not None
    assert call.expires is not None
    assert call.expires - first >= 5
    assert call.patience > 30


@pytest.mark.parametrize(
    ("retry_on", "is_again"),
    [
        (None, False),
        (Exception, False),
        (TimeoutError, False),
        (KubetorchError, False),
        (CallTimeoutError, True),
    ],
)
def test_a_timeout_is_no_reason_to_run_again_unless_it_is_named(
    retry_on: object, is_again: bool
) -> None:
    call = invocation(timeout=30, retries=1, retry_on=retry_on)
    assert isinstance(call.step(stream(), event(EXPIRED)), RetryAfter) == is_again
    done = call.step(stream(), event(EXPIRED))
    assert isinstance(done, Done)
    assert isinstance(done.error, CallTimeoutError)
    assert vars(done.error)["attempts"] == 1 + is_again


def test_named_errors_replace_lost_workers() -> None:
    call = invocation(retries=5, retry_on=(ValueError,))
    assert isinstance(call.step(stream(), failed(WorkerDiedError("died"))), Done)


def test_what_the_worker_found_named_runs_again_after_pauses_that_double() -> None:
    call = invocation(retries=5, retry_on=("prog.Custom",), backoff=2, max_backoff=10)
    failure = exceptions.Failure("Custom", "text", module="prog", qualname="Custom", repeats=True)
    steps = [call.step(stream(), event(Kind.ERROR, None, failure.to_json())) for _ in range(6)]
    assert steps[:5] == [
        RetryAfter(2),
        RetryAfter(4),
        RetryAfter(8),
        RetryAfter(10),
        RetryAfter(10),
    ]
    assert isinstance(steps[5], Done)
    assert vars(steps[5].error)["attempts"] == 6


def test_progress_goes_to_the_callback() -> None:
    reports: list[object] = []
    call = invocation(on_progress=lambda *report: reports.append(report))
    pending = PendingCall(1, lambda event: None)
    pending.report(frames.Progress(1, 2, "half"))
    assert call.step(stream(), Event(pending, Kind.PROGRESS, None, None, 0)) is None
    assert reports == [(1, 2, "half")]


def test_an_event_that_means_nothing_is_passed_over() -> None:
    assert invocation().step(stream(), event(Kind.ACCEPTED)) is None


def test_arguments_are_encoded_when_the_call_is_made() -> None:
    argument = [1]
    route = Route("service", lambda: Location((), ""))
    call = Invocation(Target("d", "s", "c"), route, CallOptions(), (argument,), {"k": 2})
    argument.append(2)
    assert json.loads(bytes(call.segments[0])) == {"args": [[1]], "kwargs": {"k": 2}}


def test_without_a_pod_a_timeout_counts_once_it_is_over_and_has_the_reason() -> None:
    error = CallRefusedError("no pod could be reached: there is no Secret", hint="make one")
    assert invocation(timeout=60).refused(error) is error
    assert invocation().refused(error) is error
    late = invocation(timeout=0.01).refused(error)
    assert isinstance(late, CallTimeoutError)
    assert "within its timeout of 0.01 s: no pod could be reached: there is no Secret" in str(late)
    assert late.hint == "make one"
