"""Stand-ins that speak the protocols between the agent's parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kubetorch.pod.calls.call import Call
from kubetorch.pod.calls.calls import Calls
from kubetorch.pod.workers.host import CallSink, OwnedPayload, Payload
from kubetorch.pod.workers.lines import Line
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import failures
from kubetorch.wire.calls import Outcome, Returned
from kubetorch.wire.frames import Body, Open


def spec(name: str = "f", *, allowed: tuple[str, ...] = ("json",)) -> WorkloadSpec:
    return WorkloadSpec(
        "ns", "demo", CallableRef("fn", name, "m", name), ComputeSpec(allowed_serialization=allowed)
    )


def opening(name: str = "f", *, codec: str = "json", size: int = 2, **more: Any) -> Open:
    more.setdefault("id", "call-0001")
    return Open(callable=name, body=Body(codec, (size,), size), **more)


def line(text: str, level: str | None = None) -> Line:
    return Line(text, "logger" if level else "stdout", level, 1.0, 1)


class FakeRunner:
    """A worker that does what the test says."""

    def __init__(self, *, pid: int = 10, generation: int = 1) -> None:
        self.pid = pid
        self.generation = generation
        self.is_alive = True
        self.refuses: Exception | None = None
        self.calls: dict[int, tuple[CallSink, dict[str, Any]]] = {}
        self.payloads: dict[int, bytes] = {}
        self.cancelled: list[tuple[int, str, bool]] = []
        self.granted: list[tuple[int, int]] = []

    def call(self, sink: CallSink, *, payload: Payload, **more: Any) -> int:
        data = bytes(payload.view)
        payload.release()
        if self.refuses is not None:
            raise self.refuses
        number = len(self.calls) + 1
        self.calls[number] = (sink, more)
        self.payloads[number] = data
        return number

    def cancel(self, number: int, reason: str, *, timed_out: bool) -> None:
        self.cancelled.append((number, reason, timed_out))

    def grant(self, number: int, count: int) -> None:
        self.granted.append((number, count))

    def sink(self, number: int) -> CallSink:
        return self.calls[number][0]

    def give(self, number: int, value: bytes, *, streamed: bool = False) -> None:
        payload = OwnedPayload(value)
        self.sink(number).on_result("json", (len(value),), payload, streamed=streamed)

    def give_one(self, number: int, value: bytes) -> None:
        self.sink(number).on_yield("json", (len(value),), OwnedPayload(value))


class FakeCaller:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def on_log(self, line: Line) -> None:
        self.events.append(("log", line.text))

    def on_progress(self, current: float, total: float | None, message: str | None) -> None:
        self.events.append(("progress", current))

    def on_yield(self, codec: str, sizes: Sequence[int], payload: Payload) -> None:
        self.events.append(("yield", bytes(payload.view)))

    def on_result(self, result: Returned, payload: Payload | None) -> None:
        self.events.append(("result", bytes(result.payload), result.generation))

    def on_failure(self, failure: bytes) -> None:
        self.events.append(("failure", failures.parse_json(failure)))

    @property
    def failure(self) -> failures.Failure:
        (kind, found), *rest = self.events[-1:]
        assert kind == "failure"
        assert not rest
        assert isinstance(found, failures.Failure)
        return found


class FakeRecords:
    """Keeps what is recorded."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: dict[str, Outcome] = {}

    def on_begin(self, call: Call) -> None:
        self.begun.append(call.request.id)

    def on_end(self, call: Call, outcome: Outcome) -> None:
        self.ended[call.request.id] = outcome


def make_calls(records: FakeRecords | None = None) -> Calls:
    return Calls(
        pod_name="demo-0",
        records=records or FakeRecords(),
        on_change=lambda: None,
        clock=lambda: 0.0,
    )


def begin(calls: Calls, request: Open, caller: FakeCaller, arguments: bytes = b"{}") -> Call:
    call = calls.open(request, caller)
    call.begin(OwnedPayload(arguments))
    return call
