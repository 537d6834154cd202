"""What becomes of spawned calls: on disk, and in the controller."""

import asyncio
import shutil

import msgspec
import pytest

from kubetorch.errors import CallRefusedError, ControllerUnavailableError
from kubetorch.lib import deadlines
from kubetorch.pod.results import Results
from kubetorch.pod.tuning import LIMITS
from kubetorch.wire.calls import Raised, Returned, unpack_outcome
from kubetorch.wire.messages import UNENDED, CallReport
from tests.unit.pod.fakes import FakeCaller, FakeRunner, begin, make_calls, opening, spec


class Controller:
    """Where outcomes and reports go."""

    def __init__(self) -> None:
        self.blobs: list[bytes] = []
        self.reports: list[CallReport] = []
        self.failures = 0
        self.arrived = asyncio.Event()

    async def upload(self, outcomes) -> list[str]:
        if self.failures:
            self.failures -= 1
            raise ControllerUnavailableError("not now")
        self.blobs += [b"".join(pieces()) for pieces in outcomes]
        return [f"digest-{number + 1}" for number in range(len(self.blobs))][-len(outcomes) :]

    def report(self, report: CallReport) -> None:
        self.reports.append(report)
        self.arrived.set()

    async def ended(self) -> CallReport:
        while not self.reports or self.reports[-1].ended is None:
            self.arrived.clear()
            await self.arrived.wait()
        return self.reports[-1]


def make(folder, controller, **more) -> Results:
    return Results(
        folder, pod_name="demo-0", upload=controller.upload, report=controller.report, **more
    )


def recovered(folder) -> list[CallReport]:
    """What the next agent says of the calls in a folder, which it leaves as it is."""
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    controller = Controller()
    make(copy, controller).recover()
    shutil.rmtree(copy)
    return controller.reports


def outcome_files(folder) -> int:
    return len(list(folder.glob("outcomes-*")))


def spawn(results: Results):
    calls, runner = make_calls(results), FakeRunner()
    calls.serve(spec(), runner)
    call = begin(calls, opening(id="call-0001", detached=True, method="m"), FakeCaller())
    return runner, call


def test_a_spawned_call_is_reported_when_it_begins_and_when_it_ends(tmp_path):
    async def scenario():
        controller = Controller()
        results = make(tmp_path, controller)
        runner, _ = spawn(results)
        (begun,) = controller.reports
        assert (begun.id, begun.callable, begun.state) == ("call-0001", "f.m", "running")
        runner.give(1, b"42")
        ended = await controller.ended()
        assert (ended.state, ended.result) == ("succeeded", "digest-1")
        assert ended.result_bytes == len(controller.blobs[0])
        assert ended.started == begun.started
        assert unpack_outcome(controller.blobs[0]) == Returned("json", (2,), b"42", False, 1)
        await results.close(1)
        assert [report.id for report in recovered(tmp_path)] == ["call-0001"]
        results.forget("call-0001")
        assert recovered(tmp_path) == []
        assert outcome_files(tmp_path) <= 1

    asyncio.run(scenario())


def test_a_call_that_was_refused_and_comes_again_has_only_its_second_end(tmp_path):
    class Stalling(Controller):
        """Its first answer comes late."""

        async def upload(self, outcomes) -> list[str]:
            digests = await super().upload(outcomes)
            began.set()
            if digests == ["digest-1"]:
                await goes_on.wait()
            return digests

    began, goes_on = asyncio.Event(), asyncio.Event()

    async def scenario():
        controller = Stalling()
        results = make(tmp_path, controller)
        calls, runner = make_calls(results), FakeRunner()
        calls.hold(spec())
        request = opening(id="call-0001", detached=True)
        begin(calls, request, FakeCaller())
        calls.refuse(CallRefusedError("not now"))
        await began.wait()
        calls.serve(spec(), runner)
        begin(calls, request, FakeCaller())
        goes_on.set()
        other_tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait(other_tasks)
        runner.give(1, b"42")
        assert (await controller.ended()).state == "succeeded"
        states = [report.state for report in controller.reports]
        assert [state for state in states if state not in UNENDED] == ["succeeded"]
        assert unpack_outcome(controller.blobs[-1]) == Returned("json", (2,), b"42", False, 1)
        await results.close(1)
        assert [report.id for report in recovered(tmp_path)] == ["call-0001"]

    asyncio.run(scenario())


@pytest.mark.parametrize(("is_cancelled", "state"), [(False, "failed"), (True, "cancelled")])
def test_a_failure_is_an_outcome_too(tmp_path, is_cancelled, state):
    async def scenario():
        controller = Controller()
        results = make(tmp_path, controller)
        runner, call = spawn(results)
        if is_cancelled:
            call.cancel(call.callers[0], "enough")
        runner.sink(1).on_error(b'{"error_type": "ValueError", "message": "no"}')
        assert (await controller.ended()).state == state
        outcome = unpack_outcome(controller.blobs[0])
        assert isinstance(outcome, Raised)
        assert outcome.failure.message == "no"
        await results.close(1)

    asyncio.run(scenario())


def test_an_upload_is_tried_until_the_controller_takes_it(tmp_path):
    async def scenario():
        controller = Controller()
        controller.failures = 3
        results = make(tmp_path, controller)
        runner, _ = spawn(results)
        runner.give(1, b"42")
        assert (await controller.ended()).result == "digest-1"
        await results.close(1)

    asyncio.run(scenario())


def test_what_was_not_uploaded_is_uploaded_by_the_next_process(tmp_path):
    async def scenario():
        controller = Controller()
        controller.failures = 1_000_000
        results = make(tmp_path, controller)
        runner, _ = spawn(results)
        runner.give(1, b"42")
        await results.close(0.2)
        assert not controller.blobs
        controller.failures = 0
        next_results = make(tmp_path, controller)
        controller.reports.clear()
        next_results.recover()
        # The controller gives up calls that it is not told of.
        assert [report.state for report in controller.reports] == ["running"]
        assert (await controller.ended()).state == "succeeded"
        assert unpack_outcome(controller.blobs[0]) == Returned("json", (2,), b"42", False, 1)
        await next_results.close(1)

    asyncio.run(scenario())


def test_a_call_that_ran_when_its_agent_died_is_reported_as_failed(tmp_path):
    async def scenario():
        controller = Controller()
        spawn(make(tmp_path, controller))
        next_results = make(tmp_path, controller)
        next_results.recover()
        ended = await controller.ended()
        assert (ended.state, ended.callable) == ("failed", "f.m")
        outcome = unpack_outcome(controller.blobs[0])
        assert isinstance(outcome, Raised)
        assert outcome.failure.error_type == "AgentDiedError"
        await next_results.close(1)

    asyncio.run(scenario())


def test_an_end_that_may_not_have_arrived_is_reported_again(tmp_path):
    async def scenario():
        report = CallReport(
            id="call-0001", callable="f", state="succeeded", started=1, ended=2, result="digest"
        )
        (tmp_path / "calls").write_bytes(msgspec.json.encode({"report": report}) + b"\n")
        controller = Controller()
        results = make(tmp_path, controller)
        results.recover()
        assert controller.reports == [report]
        await results.close(1)

    asyncio.run(scenario())


def test_records_that_cannot_be_read_are_ignored(tmp_path):
    async def scenario():
        report = CallReport(id="../../evil", callable="f", state="running", started=1)
        evil = msgspec.json.encode({"report": report})
        lost = CallReport(id="call-0002", callable="f", state="succeeded", started=1, ended=2)
        lost_record = msgspec.json.encode({"report": lost, "outcome": ["../calls", 0, 10]})
        (tmp_path / "calls").write_bytes(evil + b"\n\xff\n" + lost_record + b'\n{"report": {"id')
        controller = Controller()
        results = make(tmp_path, controller)
        results.recover()
        assert controller.reports == [lost]
        await results.close(1)

    asyncio.run(scenario())


def test_outcomes_that_wait_for_the_controller_are_bounded(tmp_path):
    async def scenario():
        controller = Controller()
        controller.failures = 1_000_000
        results = make(tmp_path, controller, waiting_bytes=5000)
        calls, runner = make_calls(results), FakeRunner()
        calls.serve(spec(), runner)
        for number in range(1, 6):
            begin(calls, opening(id=f"call-000{number}", detached=True), FakeCaller())
            runner.give(number, bytes(2000))
            await asyncio.sleep(0.1)
        await results.close(0)
        waiting = [report.id for report in recovered(tmp_path) if report.state == "running"]
        assert waiting == ["call-0004", "call-0005"]
        ended = {report.id: report for report in controller.reports if report.ended is not None}
        assert sorted(ended) == ["call-0001", "call-0002", "call-0003"]
        assert {(report.state, report.result) for report in ended.values()} == {("succeeded", None)}

    asyncio.run(scenario())


def report_of(number: int, ended: float | None = None) -> CallReport:
    state = "running" if ended is None else "succeeded"
    return CallReport(id=f"call-{number:04}", callable="f", state=state, started=1, ended=ended)


def returned(payload: bytes) -> Returned:
    return Returned("json", (len(payload),), payload)


def test_an_outcome_that_cannot_be_uploaded_keeps_no_other_from_it(tmp_path):
    async def scenario():
        controller = Controller()
        uploaded = controller.upload

        async def upload(outcomes):
            if any(b"poison" in b"".join(pieces()) for pieces in outcomes):
                raise ControllerUnavailableError("this one never")
            return await uploaded(outcomes)

        controller.upload = upload
        results = make(tmp_path, controller)
        for number, payload in enumerate((b"poison", b"a", b"b"), start=1):
            results.begin(report_of(number))
            results.end(report_of(number, 2), returned(payload))
        async with deadlines.timeout(20):
            while len(controller.blobs) < 2:
                controller.arrived.clear()
                await controller.arrived.wait()
        await results.close(0)
        ended = [report.id for report in controller.reports if report.ended is not None]
        assert sorted(ended) == ["call-0002", "call-0003"]
        assert [report.id for report in recovered(tmp_path) if report.state == "running"] == [
            "call-0001"
        ]

    asyncio.run(scenario())


def test_what_the_controller_knows_is_left_out_of_the_list_of_calls_some_day(tmp_path):
    async def scenario():
        results = make(tmp_path, Controller())
        results.begin(report_of(0))
        for number in range(1, LIMITS.outdated_call_lines + 100):
            results.forget(f"call-{number:05}")
        assert len((tmp_path / "calls").read_bytes().splitlines()) < 200
        await results.close(1)
        assert [report.id for report in recovered(tmp_path)][:1] == ["call-0000"]

    asyncio.run(scenario())


def test_outcomes_of_which_the_list_says_nothing_are_removed(tmp_path):
    async def scenario():
        (tmp_path / "outcomes-of-before").write_bytes(b"nobody knows")
        results = make(tmp_path, Controller())
        results.recover()
        assert outcome_files(tmp_path) == 0
        await results.close(1)

    asyncio.run(scenario())


def test_a_record_without_an_outcome_is_uploaded_and_pushes_out_none(tmp_path):
    async def scenario():
        controller = Controller()
        results = make(tmp_path, controller, waiting_bytes=1)
        spawned = report_of(1, ended=1.0)
        plain, unrecorded = report_of(2, ended=1.0), report_of(3, ended=1.0)
        results.end(spawned, Returned("json", (2,), b"42"))
        results.end(plain, None, [b"head", b"arguments"])
        results.end(unrecorded, None)
        assert results.find(plain.id) is None
        while len(controller.reports) < 2:
            controller.arrived.clear()
            await controller.arrived.wait()

        assert [(report.id, report.result, report.record) for report in controller.reports] == [
            ("call-0001", "digest-1", None),
            ("call-0002", None, "digest-2"),
        ]
        assert controller.blobs[1] == b"headarguments"
        assert results.record_bytes == 0

    asyncio.run(scenario())


def test_an_outcome_that_is_cut_has_an_end_without_it(tmp_path):
    async def scenario():
        (tmp_path / "outcomes-1").write_bytes(b"cut")
        line = msgspec.json.encode({"report": report_of(1, 2), "outcome": ["outcomes-1", 0, 10]})
        (tmp_path / "calls").write_bytes(line + b"\n")
        controller = Controller()
        results = make(tmp_path, controller)
        results.recover()
        assert controller.reports == [report_of(1, 2)]
        await results.close(1)

    asyncio.run(scenario())
