"""Calls on a group of ranks; its workers and the other pods do what the test says."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from clock_loop import pause, run
from kubetorch.errors import (
    AgentDiedError,
    CallRefusedError,
    KubetorchError,
    PodTerminatedError,
    ProtocolError,
    SpecError,
    WorkerDiedError,
    WorkerMembershipChanged,
)
from kubetorch.lib import memory
from kubetorch.pod.logs import Line
from kubetorch.pod.membership import Membership
from kubetorch.pod.payloads import OwnedPayload, Payload
from kubetorch.pod.peers import fan_out
from kubetorch.pod.rank_calls import (
    RankGroup,
    select,
)
from kubetorch.pod.tuning import TIMING
from kubetorch.pod.worker_process.worker import CallSink
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.distribution import DistributionSpec
from kubetorch.wire import codecs, exceptions, rank_values
from kubetorch.wire.frames import OVER, STOPPED, DebugEvent, Open, Part, Progress
from kubetorch.wire.messages import LostMember, Member, Members, Regroup, World
from kubetorch.wire.rank_values import Entry
from tests.unit.pod.fakes import FakeCaller, FakeRunner, begin, line, make_calls, opening
from tests.unit.pod.fakes import spec as workload


def member(number: int) -> Member:
    return Member(f"train-{number}", number, f"http://10.0.0.{number}:32300", f"agent-{number}")


def world(count: int, *, processes: int = 1, epoch: int = 1, **more: Any) -> World:
    return World(epoch, 1, tuple(map(member, range(count))), processes, **more)


class Worker(FakeRunner):
    def __init__(self, rank: int) -> None:
        super().__init__(pid=100 + rank)
        self.rank = rank
        self.is_alive = True
        self.aborted: KubetorchError | None = None

    def fail(self, number: int, error: Exception, **more: Any) -> None:
        self.sink(number).on_error(exceptions.describe(error, **more).to_json())

    def abort(self, reason: KubetorchError | None) -> None:
        self.aborted = reason

    async def kill(self) -> None:
        self.is_alive = False

    async def drain(self, grace: float) -> None:
        return None


class PeerCall:
    def __init__(self, to: Member, request: Open, arguments: bytes, sink: CallSink) -> None:
        self.to, self.request, self.arguments, self.sink = to, request, arguments, sink
        self.is_connected = True
        self.cancelled: list[str] = []
        self.granted = 0

    def cancel(self, reason: str) -> None:
        self.cancelled.append(reason)

    def grant(self, count: int) -> None:
        self.granted += count

    def give(self, *entries: Entry, streamed: bool = False) -> None:
        self.sink.on_result(*packed(entries), streamed=streamed)

    def fail(self, error: Exception, **more: Any) -> None:
        self.sink.on_error(replace(exceptions.describe(error), **more).to_json())


class Peers:
    pod_name = "train-0"

    def __init__(self) -> None:
        self.calls: list[PeerCall] = []
        self.dropped: list[str] = []

    def call(self, to: Member, request: Open, arguments: memoryview, sink: CallSink) -> PeerCall:
        self.calls.append(PeerCall(to, request, bytes(arguments), sink))
        return self.calls[-1]

    def drop(self, to: Member, reason: str) -> None:
        self.dropped.append(to.pod)


def packed(entries: Sequence[Entry]) -> tuple[str, list[int], OwnedPayload]:
    segments = rank_values.pack(entries)
    sizes = [len(segment) for segment in segments]
    return rank_values.CODEC, sizes, OwnedPayload(b"".join(codecs.join(segments)))


def values(sizes: Sequence[int], payload: Payload) -> dict[int, Any]:
    unpacked = rank_values.unpack(codecs.split(payload.view, sizes))
    return {
        rank_value.rank: codecs.decode(rank_value.codec, rank_value.segments)
        for rank_value in unpacked
    }


class Sink:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.reports: list[Progress] = []
        self.rounds: list[dict[int, Any]] = []
        self.ended: list[set[int]] = []
        self.result: Any = None
        self.failing: exceptions.Failure | None = None
        self.failure: exceptions.Failure | None = None
        self.ends = 0

    def on_log(self, line: Line) -> None:
        self.lines.append(line)

    def on_progress(self, report: Progress) -> None:
        self.reports.append(report)

    def on_yield(self, codec: str, sizes: Sequence[int], payload: Payload) -> None:
        assert codec == rank_values.CODEC
        self.rounds.append(values(sizes, payload))
        entries = rank_values.unpack(codecs.split(payload.view, sizes))
        self.ended.append({entry.rank for entry in entries if entry.is_streamed})

    def on_result(
        self, codec: str, sizes: Sequence[int], payload: Payload, *, streamed: bool
    ) -> None:
        self.ends += 1
        self.result = values(sizes, payload) if codec == rank_values.CODEC else bytes(payload.view)

    def on_kept(self, descriptor: int) -> None:
        os.close(descriptor)

    def on_failing(self, failure: bytes) -> None:
        self.failing = exceptions.parse_json(failure)

    def on_error(self, failure: bytes) -> None:
        self.ends += 1
        self.failure = exceptions.parse_json(failure)

    @property
    def error(self) -> Any:
        failure = self.failing or self.failure
        assert failure is not None
        return exceptions.rebuild(failure)


class Pod:
    """A group in a pod of a world."""

    def __init__(
        self, count: int, *, node: int | None = 0, processes: int = 1, **settings: Any
    ) -> None:
        self.world = world(count, processes=processes)
        self.sent: list[Regroup] = []
        self.membership = Membership(self.sent.append)
        self.membership.update(Members(epoch=1, members=self.world.members, world=self.world))
        first = (node or 0) * processes
        workers = (
            [] if node is None else [Worker(first + local_rank) for local_rank in range(processes)]
        )
        self.workers = workers
        self.peers = Peers()
        launch_timeout = settings.pop("launch_timeout", 900)
        distribution = DistributionSpec(**settings)
        self.node = node
        self.compute = ComputeSpec(
            replicas=count, launch_timeout=launch_timeout, distribution=distribution
        )
        self.group = self.start()

    def start(self) -> RankGroup:
        """Processes of this pod in the world that there is now."""
        now = self.membership.world
        assert now is not None
        return RankGroup(
            now,
            self.node,
            self.workers,  # type: ignore[arg-type]  # a fake
            generation=1,
            membership=self.membership,
            peers=self.peers,  # type: ignore[arg-type]  # a fake
            compute=self.compute,
        )

    def call(self, payload: Payload | None = None, **more: Any) -> tuple[int, Sink]:
        sink = Sink()
        return self.group.call(sink, opening(**more), payload or OwnedPayload(b"{}")), sink

    def lose(self, *numbers: int, reason: str = "Deleted") -> None:
        lost = tuple(LostMember(member(number), reason) for number in numbers)
        self.tell(world(len(self.world.members), lost=lost))

    def tell(self, now: World, *more: Member) -> None:
        members = (*now.members, *more)
        self.membership.update(Members(epoch=2, members=members, world=now))


def test_values_of_all_ranks_are_put_together_in_rank_order():
    async def scenario():
        pod = Pod(3, node=1, processes=2)
        number, sink = pod.call()
        first, second = pod.peers.calls
        assert [call.to.pod for call in pod.peers.calls] == ["train-0", "train-2"]
        assert first.request.part == Part(1, (0,))
        assert first.arguments == b"{}"
        pod.workers[1].give(1, b"3")
        second.give(Entry(4, "json", [b"4"]), Entry(5, "json", [b"5"]))
        pod.workers[0].give(1, b"2")
        assert sink.ends == 0
        first.give(Entry(1, "json", [b"1"]), Entry(0, "json", [b"0"]))
        assert list(sink.result.items()) == [(rank, rank) for rank in range(6)]
        assert pod.group.running == 0
        pod.group.cancel(number, "late", timed_out=False)

    run(scenario())


def test_a_part_goes_on_to_the_pods_that_it_names():
    async def scenario():
        pod = Pod(200, node=100, options='{"tree_fanout": 3}')
        pod.call(part=Part(1, (100, 101, 102, 103, 104, 105)))
        parts = [call.request.part.nodes for call in pod.peers.calls]
        assert parts == [(101,), (102, 103), (104, 105)]

    run(scenario())


def test_a_pod_outside_of_the_world_passes_calls_on():
    async def scenario():
        pod = Pod(2, node=None)
        _, sink = pod.call()
        for rank, part in enumerate(pod.peers.calls):
            part.give(Entry(rank, "json", [b"%d" % rank]))
        assert sink.result == {0: 0, 1: 1}

    run(scenario())


def test_the_plan_of_a_fan_out_reaches_each_node_once_at_any_size():
    def reach(nodes, depth=1):
        nodes_reached, deepest = [nodes[0]], depth
        parts = fan_out(nodes[1:], 50)
        assert len(parts) <= 50
        for part in parts:
            inner, below = reach(part, depth + 1)
            nodes_reached += inner
            deepest = max(deepest, below)
        return nodes_reached, deepest

    for count in (1, 2, 50, 51, 52, 1000, 5000):
        nodes_reached, depth = reach(tuple(range(count)))
        assert sorted(nodes_reached) == list(range(count))
        assert depth <= 1 + math.ceil(math.log(max(count, 2), 50))


# ------------------------------------------------------------------------------------- failures


def test_the_first_rank_that_fails_cancels_the_others_and_names_itself():
    async def scenario():
        pod = Pod(2, processes=2)
        _, sink = pod.call()
        [peer] = pod.peers.calls
        pod.workers[1].fail(1, ValueError("bad"))
        assert peer.cancelled
        assert pod.workers[0].cancelled
        peer.fail(KeyError("worse"), rank=3, pod_name="train-1")
        assert sink.failing is None
        await pause(TIMING.rank_settle_seconds)
        assert isinstance(sink.error, ValueError)
        assert (sink.failing.rank, sink.failing.pod_name) == (1, "train-0")
        assert [(error.rank, type(error)) for error in sink.error.other_errors] == [(3, KeyError)]
        assert sink.error.__notes__ == [
            "on rank 1 in pod train-0; failed with it: rank 3 in pod train-1: KeyError: worse "
            "(see .other_errors)"
        ]
        assert (sink.ends, pod.group.running) == (0, 1)
        pod.workers[0].sink(1).on_lost(WorkerDiedError("killed"))
        assert (sink.ends, pod.group.running) == (1, 0)

    run(scenario())


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ({0: ValueError("a"), 1: ValueError("b")}, 0),
        ({0: RuntimeError("Connection closed by peer [10.0.0.1]"), 1: ValueError("b")}, 1),
        ({0: ValueError("a"), 1: WorkerDiedError("gone", exit_code=-9)}, 1),
        ({0: CallRefusedError("it is being stopped"), 1: ValueError("b")}, 1),
        ({0: WorkerDiedError("gone"), 1: PodTerminatedError("train-1", "Evicted")}, 1),
    ],
)
@pytest.mark.parametrize("order", [1, -1])
def test_what_is_no_consequence_is_raised_first(failures, first, order):
    async def scenario():
        pod = Pod(1, processes=2)
        _, sink = pod.call()
        for rank in (0, 1)[::order]:
            pod.workers[rank].fail(1, failures[rank])
        assert (sink.failure.rank, sink.failure.message) == (first, str(failures[first]))

    run(scenario())


def test_a_worker_that_ends_is_named_and_takes_the_others_along():
    async def scenario():
        pod = Pod(1, processes=2)
        _, sink = pod.call()
        pod.workers[1].sink(1).on_lost(WorkerDiedError("the worker ended with exit code 0"))
        pod.group.abort(pod.workers[1])
        assert not pod.group.accepts_calls
        pod.workers[0].sink(1).on_lost(pod.workers[0].aborted)
        assert isinstance(sink.error, WorkerDiedError)
        assert sink.failure.rank == 1

    run(scenario())


def test_attached_failures_are_bounded():
    async def scenario():
        pod = Pod(1, processes=60)
        _, sink = pod.call()
        for worker in pod.workers:
            worker.fail(1, ValueError("x" * 100_000))
        assert sink.failure.rank == 0
        assert len(sink.failure.other_errors) in range(1, 17)
        assert len(sink.failure.to_json()) < 2 * 1024 * 1024

    run(scenario())


def test_a_cancelled_call_ends_when_all_ranks_have():
    async def scenario():
        pod = Pod(2)
        number, sink = pod.call()
        pod.group.cancel(number, "enough", timed_out=False)
        assert pod.workers[0].cancelled == [(1, "enough", False)]
        assert pod.peers.calls[0].cancelled == ["enough"]
        await pause(1)
        assert sink.ends == 0
        await pause(10)  # the other pod says nothing any more
        assert (sink.failure.code, pod.group.running) == ("call_cancelled", 0)

    run(scenario())


def test_a_rank_that_hangs_is_named_once():
    async def scenario():
        pod = Pod(1, processes=3)
        _, sink = pod.call()
        pod.workers[0].give(1, b"0")
        pod.workers[2].give(1, b"2")
        await pause(TIMING.rank_hang_report_seconds + 1)
        [line] = sink.lines
        assert "rank 1 in pod train-0" in line.text
        assert line.text.startswith("rank 1 in pod train-0 still runs, 10 s after the others ended")
        assert "kt stacks" in line.text

    run(scenario())


def test_a_rank_that_stands_in_a_debugger_does_not_hang():
    async def scenario():
        pod = Pod(1, processes=3)
        _, sink = pod.call()
        worker = pod.workers[1].sink(1)

        def note(kind):
            worker.on_log(line("")._replace(debug=DebugEvent("s1", kind, "pdb")))
            sink.lines.clear()

        note(STOPPED)
        pod.workers[0].give(1, b"0")
        pod.workers[2].give(1, b"2")
        await pause(3 * TIMING.rank_hang_report_seconds)
        assert sink.lines == []
        note(OVER)
        await pause(TIMING.rank_hang_report_seconds - 2)
        assert sink.lines == []
        await pause(4)
        assert len(sink.lines) == 1

    run(scenario())


# ----------------------------------------------------------------------------------- membership


def test_a_member_that_is_lost_ends_its_calls_and_new_ones_with_the_reason():
    async def scenario():
        pod = Pod(3)
        _, sink = pod.call()
        pod.lose(2, reason="OOMKilled")
        await pause(TIMING.rank_settle_seconds)
        error = sink.error
        assert isinstance(error, WorkerMembershipChanged)
        assert error.reasons == {"train-2": "OOMKilled"}
        assert error.pod_name == "train-2"
        assert error.removed_ips == {"10.0.0.2"}
        assert error.current_ips == {"10.0.0.0", "10.0.0.1"}
        assert error.is_critical
        with pytest.raises(WorkerMembershipChanged, match="train-2: OOMKilled"):
            pod.call()
        assert pod.group.accepts_calls

    run(scenario())


@pytest.mark.parametrize("options", [{"workers": "ready"}, {"workers": "any"}, {"workers": (0, 1)}])
def test_a_loss_is_no_error_for_calls_that_do_without(options):
    async def scenario():
        pod = Pod(3)
        pod.lose(2)
        _, sink = pod.call(**options)
        pod.workers[0].give(1, b"0")
        for part in pod.peers.calls:
            part.give(Entry(part.to.ordinal, "json", [b"1"]))
        assert 2 not in sink.result

    run(scenario())


def test_who_is_lost_while_a_call_takes_whoever_is_there_has_no_value():
    async def scenario():
        pod = Pod(3)
        _, sink = pod.call(workers="ready")
        pod.lose(2)
        pod.peers.calls[1].sink.on_lost(AgentDiedError("train-2", "Deleted"))
        pod.workers[0].give(1, b"0")
        pod.peers.calls[0].give(Entry(1, "json", [b"1"]))
        assert sink.result == {0: 0, 1: 1}

    run(scenario())


def test_without_monitoring_a_loss_is_that_of_its_rank():
    async def scenario():
        pod = Pod(2, monitor_members=False)
        _, sink = pod.call()
        pod.lose(1)
        pod.peers.calls[0].sink.on_lost(AgentDiedError("train-1", "Deleted"))
        await pause(TIMING.rank_settle_seconds)
        assert isinstance(sink.error, AgentDiedError)

    run(scenario())


def test_what_fails_because_of_a_loss_waits_for_the_news_of_it():
    async def scenario():
        pod = Pod(2)
        _, sink = pod.call()
        pod.workers[0].fail(1, RuntimeError("gloo: Connection closed by peer"))
        await pause(TIMING.rank_settle_seconds * 1.5)
        assert sink.failing is None
        pod.lose(1)
        await pause(TIMING.rank_loss_settle_seconds)
        assert isinstance(sink.error, WorkerMembershipChanged)
        assert [type(error) for error in sink.error.other_errors] == [RuntimeError]

    run(scenario())


def test_a_stream_that_ends_is_a_loss_even_without_news():
    async def scenario():
        pod = Pod(2)
        _, sink = pod.call()
        pod.peers.calls[0].sink.on_lost(AgentDiedError("train-1", "AgentRestarted"))
        await pause(TIMING.rank_loss_reason_seconds + TIMING.rank_settle_seconds)
        assert sink.error.reasons == {"train-1": "AgentRestarted"}

    run(scenario())


def test_who_joins_is_announced_once():
    async def scenario():
        pod = Pod(2)
        _, sink = pod.call()
        for _ in range(2):
            pod.tell(pod.world, member(7))
        assert ["train-7 has joined" in line.text for line in sink.lines] == [True]

    run(scenario())


def test_restart_procs_of_those_that_are_ready_awaits_no_quorum():
    async def scenario():
        pod = Pod(2)
        request = opening(restart_procs=True, workers="ready", id="call-9")
        assert not pod.group.accepts(request, time.time())
        assert [message.is_quorum_awaited for message in pod.sent] == [False]

    run(scenario())


@pytest.mark.parametrize(
    ("settings", "seconds"), [({}, 2000), ({"quorum_timeout": 100}, 100), ({"workers": 2}, 2000)]
)
def test_a_newer_world_is_asked_for_as_long_as_the_controller_waits_for_it(settings, seconds):
    async def scenario():
        pod = Pod(2, launch_timeout=2000, **settings)
        assert not pod.group.accepts(opening(restart_procs=True), time.time())
        await pause(3000)
        assert len(pod.sent) == pytest.approx(
            seconds / TIMING.world_request_interval_seconds, abs=2
        )

    run(scenario())


@pytest.mark.parametrize(("workers", "replicas", "needed"), [(None, 3, 2), (3, 3, 2), (1, 3, 1)])
def test_the_pods_that_are_waited_for_are_those_of_the_quorum(workers, replicas, needed):
    async def scenario():
        pod = Pod(replicas, workers=workers, quorum_workers=2)
        pod.lose(1)
        assert pod.group.waits_for.startswith(f"{replicas - 1} of {needed} pods are there")

    run(scenario())


def test_restart_procs_waits_for_a_newer_world_and_asks_until_it_comes():
    async def scenario():
        pod = Pod(2)
        request = opening(restart_procs=True, id="call-9")
        assert not pod.group.accepts(request, time.time())
        assert pod.group.accepts(opening(), time.time())
        await pause(2.5 * TIMING.world_request_interval_seconds)
        assert set(pod.sent) == {Regroup(id="call-9", epoch=1, is_quorum_awaited=True)}
        assert len(pod.sent) == 3
        waiting_since = time.time()
        pod.tell(world(2, epoch=2))
        # Its processes are about to be replaced.
        assert not pod.group.accepts(opening(), time.time())
        newer = pod.start()
        assert newer.accepts(request, time.time())
        await pause(2.5 * TIMING.world_request_interval_seconds)
        assert len(pod.sent) == 3
        another = opening(restart_procs=True, id="call-10")
        assert newer.accepts(another, waiting_since)
        newer.world = structs.replace(newer.world, lost=(LostMember(member(1), "Deleted"),))
        assert not newer.accepts(another, waiting_since)

    run(scenario())


def test_processes_of_one_pod_that_start_again_are_not_those_that_restart_procs_wants():
    async def scenario():
        pod = Pod(2)
        request, opened = opening(restart_procs=True, id="call-9"), time.time()
        assert not pod.start().accepts(request, opened)
        pod.tell(world(2, epoch=2))
        assert pod.start().accepts(request, opened)

    run(scenario())


def test_processes_that_end_after_a_call_are_not_those_that_cannot_start():
    async def scenario():
        pod = Pod(1)
        assert not pod.group.had_calls
        pod.call()
        assert pod.group.had_calls

    run(scenario())


def test_a_part_waits_for_its_epoch_and_one_of_the_past_is_refused():
    async def scenario():
        pod = Pod(2)
        assert not pod.group.accepts(opening(part=Part(2, (0,))), time.time())
        with pytest.raises(WorkerMembershipChanged, match="newer"):
            pod.call(part=Part(0, (0,)))
        with pytest.raises(ProtocolError):
            pod.call(part=Part(1, (5,)))

    run(scenario())


def test_a_part_of_a_call_that_began_before_a_reload_runs_where_it_belongs():
    async def scenario():
        calls, plain = make_calls(), workload("f")
        distributed = replace(plain.compute, distribution=DistributionSpec())
        served = replace(plain, compute=distributed)
        old = Pod(2)
        calls.serve(served, old.group)
        new = Pod(2)
        new.group.world = world(2, epoch=2)
        calls.serve(served, new.group)
        for epoch in (1, 2):
            request = opening(id=f"part-of-{epoch}", part=Part(epoch, (0,)))
            begin(calls, request, FakeCaller())
        assert [len(group.workers[0].calls) for group in (old, new)] == [1, 1]
        assert old.workers[0].calls[1][1].part.epoch == 1

    run(scenario())


# ----------------------------------------------------------------------------------- generators


def test_a_round_has_a_value_of_each_rank_that_still_runs():
    async def scenario():
        pod = Pod(2, processes=2)
        number, sink = pod.call()
        [peer] = pod.peers.calls
        pod.workers[0].give_one(1, b"1")
        pod.workers[0].give_one(1, b"2")
        pod.workers[1].give_one(1, b"3")
        assert sink.rounds == []
        peer.sink.on_yield(*packed([Entry(2, "json", [b"4"]), Entry(3, "json", [b"5"])]))
        assert sink.rounds == [{0: 1, 1: 3, 2: 4, 3: 5}]
        pod.group.grant(number, 8)
        assert (pod.workers[0].granted, peer.granted) == ([(1, 8)], 8)
        pod.workers[1].give(1, b"null", streamed=True)
        peer.give(Entry(2, "json", [b"6"], True), Entry(3, "json", [b"7"], True), streamed=True)
        assert sink.rounds[1:] == [{0: 2}]
        pod.workers[0].give(1, b"8", streamed=True)
        assert sink.result == {0: 8, 1: None, 2: 6, 3: 7}

    run(scenario())


def test_rounds_that_wait_come_before_the_result():
    async def scenario():
        pod = Pod(1, processes=2)
        _, sink = pod.call()
        for value in (b"1", b"2"):
            pod.workers[0].give_one(1, value)
        pod.workers[0].give(1, b"3", streamed=True)
        pod.workers[1].give(1, b"4", streamed=True)
        assert sink.rounds == [{0: 1, 1: 4}, {0: 2}]
        assert sink.result == {0: 3, 1: 4}

    run(scenario())


@pytest.mark.parametrize("is_streamed", [True, False])
def test_the_first_round_names_the_ranks_that_ended_without_a_value(is_streamed):
    async def scenario():
        pod = Pod(2, processes=2)
        _, sink = pod.call()
        [peer] = pod.peers.calls
        peer.give(Entry(2, "json", [b"6"], True), Entry(3, "json", [b"7"], True), streamed=True)
        pod.workers[0].give(1, b"8", streamed=is_streamed)
        pod.workers[1].give_one(1, b"1")
        pod.workers[1].give_one(1, b"2")
        assert sink.rounds == [{0: 8, 1: 1, 2: 6, 3: 7}, {1: 2}]
        assert sink.ended == [{0, 2, 3}, set()]
        pod.workers[1].give(1, b"9", streamed=True)
        assert sink.result == {0: 8, 1: 9, 2: 6, 3: 7}

    run(scenario())


# ------------------------------------------------------------------- lines, arguments, one value


def test_lines_and_progress_say_where_they_come_from():
    async def scenario():
        pod = Pod(2)
        _, sink = pod.call()
        pod.workers[0].sink(1).on_log(line("own")._replace(rank=0))
        pod.peers.calls[0].sink.on_log(line("other")._replace(rank=1, pod="train-1"))
        pod.peers.calls[0].sink.on_progress(Progress(1, 2, None, 1))
        assert [(line.text, line.pod, line.rank) for line in sink.lines] == [
            ("own", None, 0),
            ("other", "train-1", 1),
        ]
        assert sink.reports == [Progress(1, 2, None, 1)]

    run(scenario())


def test_large_arguments_are_written_once_for_all_workers():
    class Keeping(Worker):
        last_payload: Payload | None = None

        def call(self, sink: Any, request: Open, payload: Payload, chain: str = "") -> int:
            self.last_payload = payload
            return super().call(sink, request, OwnedPayload(payload.view), chain)

    async def scenario():
        pod = Pod(1, processes=3)
        pod.workers[:] = [Keeping(rank) for rank in range(3)]
        pod.group.workers = tuple(pod.workers)
        stored = memory.allocate(1024 * 1024)
        pod.call(stored)
        assert {worker.last_payload.file for worker in pod.workers} == {stored.file}
        assert all(worker.last_payload.is_shared for worker in pod.workers)
        pod.call(OwnedPayload(bytes(1024 * 1024)))
        assert len({worker.last_payload.file for worker in pod.workers}) == 1

    run(scenario())


@pytest.mark.parametrize("node", [0, 1])
def test_a_single_controller_runs_on_the_first_pod_and_answers_as_it_is(node):
    async def scenario():
        pod = Pod(2, node=node, distribution_type="ray")
        _, sink = pod.call()
        if node == 0:
            assert pod.peers.calls == []
            pod.workers[0].give(1, b'"one"')
        else:
            [peer] = pod.peers.calls
            assert (peer.to.pod, peer.request.part.nodes) == ("train-0", (0,))
            assert pod.workers[0].calls == {}
            peer.sink.on_result("json", (5,), OwnedPayload(b'"one"'), streamed=False)
        assert sink.result == b'"one"'
        with pytest.raises(SpecError, match="ray"):
            pod.call(workers="any")

    run(scenario())


def test_a_call_on_ray_or_monarch_goes_on_without_a_pod_unless_that_is_monitored():
    async def scenario():
        pods = {name: Pod(2, distribution_type=name) for name in ("monarch", "ray")}
        pods["monitored"] = Pod(2, distribution_type="monarch", monitor_members=True)
        sinks = {name: pod.call()[1] for name, pod in pods.items()}
        for pod in pods.values():
            pod.lose(1)
            pod.workers[0].give(1, b'"one"')
        assert sinks["monitored"].error.reasons == {"train-1": "Deleted"}
        assert [sink.ends for sink in sinks.values()] == [1, 1, 1]
        with pytest.raises(WorkerMembershipChanged):
            pods["monitored"].call()
        for name in ("monarch", "ray"):
            assert sinks[name].result == b'"one"'
            pods[name].call()

    run(scenario())


def test_a_call_that_one_worker_refuses_runs_nowhere():
    async def scenario():
        pod = Pod(2, processes=2)
        pod.workers[1].refuses = CallRefusedError("full")
        with pytest.raises(CallRefusedError, match="full"):
            pod.call()
        assert pod.workers[0].cancelled
        assert (pod.peers.calls, pod.group.running) == ([], 0)

    run(scenario())


# ------------------------------------------------------------------------------------ selection


@pytest.mark.parametrize(
    ("workers", "expected_nodes"),
    [
        (None, (0, 1, 2, 3)),
        ("ready", (0, 2, 3)),
        ((3, 0), (0, 3)),
        (("3", 0, 3), (0, 3)),
        (("10.0.0.2", "train-1"), (1, 2)),
        (("10.0.0.3:32300",), (3,)),
        ("10.0", (0, 1, 2, 3)),
        ("train-3", (3,)),
    ],
)
def test_workers_name_nodes(workers, expected_nodes):
    assert select(workers, world(4).members, [1]) == expected_nodes


def nodes_of(pod: Pod, number: int) -> list[int]:
    """The nodes that the calls which peers got last are for."""
    return [node for call in pod.peers.calls[number:] for node in call.request.part.nodes]


def test_any_is_the_first_node_while_it_is_free_and_then_the_least_busy_one():
    async def scenario():
        pod = Pod(3)
        _, first = pod.call(workers="any")
        assert (len(pod.workers[0].calls), pod.peers.calls) == (1, [])
        pod.call(workers="any")
        pod.call(workers="any")
        assert nodes_of(pod, 0) == [1, 2]
        pod.workers[0].give(1, b"0")
        assert first.result == {0: 0}
        pod.call(workers="any")
        assert len(pod.workers[0].calls) == 2

    run(scenario())


def test_the_first_node_that_is_there_chooses_for_all_others():
    async def scenario():
        second_pod = Pod(3, node=1)
        second_pod.call(workers="any")
        [passed] = second_pod.peers.calls
        assert (passed.to.pod, passed.request.part) == ("train-0", Part(1, (0,), is_any=True))
        first = Pod(3)
        first.call()
        first.call(part=passed.request.part)
        assert (len(first.workers[0].calls), nodes_of(first, 2)) == (2, [])
        first.call(part=passed.request.part)
        assert nodes_of(first, 2) == [1]
        second_pod.lose(0)
        second_pod.call(workers="any")
        assert (len(second_pod.workers[0].calls), len(second_pod.peers.calls)) == (1, 1)

    run(scenario())


def test_a_call_for_any_node_fails_with_the_node_that_it_runs_on():
    async def scenario():
        pod = Pod(3)
        pod.call(workers="any")
        _, sink = pod.call(workers="any")
        pod.lose(1)
        pod.peers.calls[0].sink.on_lost(AgentDiedError("train-1", "Deleted"))
        assert isinstance(sink.error, WorkerMembershipChanged)

    run(scenario())


@pytest.mark.parametrize(
    ("workers", "expected_message"),
    [
        ((10,), "Worker index 10 out of range. Valid range: 0-1"),
        ((-1,), "Worker index -1 out of range. Valid range: 0-1"),
        (("7",), "Worker index 7 out of range"),
        (("10.0.0.9",), "Worker IP '10.0.0.9' not found"),
        ("many", "Worker IP 'many' not found"),
        ("", "Worker IP '' not found"),
        ((), "Invalid worker specification"),
        (("x",), "Invalid worker specification: 'x'"),
        ((True,), "Invalid worker specification: True"),
    ],
)
def test_workers_that_name_nobody_are_refused(workers, expected_message):
    with pytest.raises(ValueError, match=expected_message):
        select(workers, world(2).members, [])


def test_the_note_of_an_error_survives_the_wire():
    async def scenario():
        pod = Pod(1)
        _, sink = pod.call()
        pod.workers[0].fail(1, ValueError("bad"))
        assert json.loads(sink.failure.to_json())["state"]["__notes__"] == [
            "on rank 0 in pod train-0"
        ]

    run(scenario())
