"""Stand-ins that speak the protocols between the agent's parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from kubetorch.pod.calls import Call, Calls
from kubetorch.pod.logs import Line
from kubetorch.pod.payloads import OwnedPayload, Payload
from kubetorch.pod.results import Buffer, Outcomes
from kubetorch.pod.user_process.protocol import Methods
from kubetorch.pod.worker_process.worker import CallSink
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import exceptions
from kubetorch.wire.calls import Outcome, Returned
from kubetorch.wire.frames import Body, Open, Progress
from kubetorch.wire.messages import CallReport


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
        self.accepts_calls = True
        self.refuses: Exception | None = None
        self.calls: dict[int, tuple[CallSink, Open]] = {}
        self.payloads: dict[int, bytes] = {}
        self.chains: dict[int, str] = {}
        self.cancelled: list[tuple[int, str, bool]] = []
        self.granted: list[tuple[int, int]] = []
        self.methods = Methods()
        self.batches: list[list[int]] = []

    def accepts(self, request: Open, opened: float) -> bool:
        return self.accepts_calls

    def call(
        self,
        sink: CallSink,
        request: Open,
        payload: Payload,
        chain: str = "",
        *,
        in_batch: bool = False,
        takes_files: bool = False,
    ) -> int:
        data = bytes(payload.view)
        payload.release()
        if self.refuses is not None:
            raise self.refuses.with_traceback(None)
        number = len(self.calls) + 1
        self.calls[number] = (sink, request)
        self.chains[number] = chain
        self.payloads[number] = data
        return number

    def run_together(self, numbers: Sequence[int]) -> None:
        self.batches.append(list(numbers))

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

    takes_files = False

    def __init__(self, identity: str = "a") -> None:
        self.identity = identity
        self.events: list[tuple[Any, ...]] = []

    def on_queued(self) -> None:
        self.events.append(("queued",))

    def on_begun(self) -> None:
        self.events.append(("begun",))

    def on_log(self, line: Line) -> None:
        self.events.append(("log", line.text))

    def on_replaced(self, notice: str, instance: str) -> None:
        self.events.append(("replaced", notice, instance))

    def on_progress(self, report: Progress) -> None:
        self.events.append(("progress", report.current))

    def on_yield(self, codec: str, sizes: Sequence[int], payload: Payload) -> None:
        self.events.append(("yield", bytes(payload.view)))

    def on_result(self, result: Returned, payload: Payload | None) -> None:
        self.events.append(("result", bytes(result.payload), result.generation))

    def on_failure(self, failure: bytes) -> None:
        self.events.append(("failure", exceptions.parse_json(failure)))

    @property
    def failure(self) -> exceptions.Failure:
        (kind, parsed_failure), *rest = self.events[-1:]
        assert kind == "failure"
        assert not rest
        assert isinstance(parsed_failure, exceptions.Failure)
        return parsed_failure


class FakeResults:
    """Keeps what becomes of spawned calls."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: dict[str, tuple[str, Outcome | None]] = {}
        self.records: dict[str, bytes] = {}
        self.reports: list[CallReport] = []
        self.generations: dict[str, int] = {}
        self.is_full = False

    def begin(self, report: CallReport) -> None:
        if self.is_full:
            raise OSError("no space left")
        self.begun.append(report.id)

    def progress(self, report: CallReport) -> None:
        self.reports.append(report)

    def end(
        self, report: CallReport, outcome: Outcome | None, record: Sequence[Buffer] = ()
    ) -> None:
        self.ended[report.id] = (report.state, outcome)
        self.records[report.id] = b"".join(record)
        self.generations[report.id] = report.generation

    def find(self, call_id: str) -> Outcome | None:
        return self.ended[call_id][1] if call_id in self.ended else None


def make_calls(results: FakeResults | None = None) -> Calls:
    return Calls(
        pod_name="demo-0",
        results=results or FakeResults(),  # type: ignore[arg-type]
        on_line=lambda line, generation: None,
        outcomes=Outcomes(Path(gettempdir(), "kubetorch-outcomes"), lambda: 0.0),
        values=Outcomes(Path(gettempdir(), "kubetorch-values"), lambda: 0.0),
        on_change=lambda: None,
    )


def begin(calls: Calls, request: Open, caller: FakeCaller, arguments: bytes = b"{}") -> Call:
    call = calls.open(request, caller)
    call.begin(OwnedPayload(arguments))
    return call
