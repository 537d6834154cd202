"""The workers of a distributed service in one pod, which serve calls in place of a single worker.

    Calls ── RankGroup ── Run ─┬─ LocalPart ── Worker      one rank
                               ├─ LocalPart ── Worker
                               └─ PeerPart ══ RankGroup    of another pod, and of those below it

A call runs on all ranks of a world, whichever pod it reaches. The values of the ranks are put
together in rank order without being decoded (`kubetorch.wire.rank_values`). The first rank that
fails ends the call: the others are cancelled, and failures of the next moment are attached. See
docs/design/ranks.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from msgspec import structs

from kubetorch.errors import (
    AgentDiedError,
    CallCancelledError,
    CallRefusedError,
    KubetorchError,
    OutOfMemoryError,
    PodTerminatedError,
    ProtocolError,
    SpecError,
    WorkerDiedError,
    WorkerMembershipChanged,
    WorkerRecycledError,
)
from kubetorch.lib import deadlines, memory
from kubetorch.lib.memory import Memory
from kubetorch.lib.memory_files import MemoryFile
from kubetorch.pod.logs import Line
from kubetorch.pod.membership import Membership
from kubetorch.pod.payloads import OwnedPayload, Payload, shared
from kubetorch.pod.peers import PeerCall, Peers, fan_out
from kubetorch.pod.rank_environment import rank_of
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.pod.user_process.tuning import LIMITS as WORKER_LIMITS
from kubetorch.pod.worker_process.worker import CallSink, Worker
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.distribution import SINGLE_CONTROLLER
from kubetorch.wire import codecs, exceptions, rank_values
from kubetorch.wire.calls import new_call_id
from kubetorch.wire.debugger import Debugging
from kubetorch.wire.frames import KUBETORCH, OVER, STOPPED, Open, Part, Progress
from kubetorch.wire.messages import Member, World
from kubetorch.wire.rank_values import Entry

#: The reason that cancelled ranks get.
RECALLED = "the call failed on another rank"

# Kinds of failures, those nearest to the cause first.
_LOSS, _DEATH, _RANK_FAILURE, _CONSEQUENCE, _RECALL = range(5)
_LOSSES = (WorkerMembershipChanged.code, AgentDiedError.code, PodTerminatedError.code)
# Errors of a rank whose partner in a collective is gone.
_BROKEN = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|closed by (the )?peer|"
    r"\b(nccl|gloo)\b|coordination service|socket closed|peer process",
    re.IGNORECASE,
)

_log = logging.getLogger(__name__)


class RankGroup:
    """The workers of one pod in one world; a pod that is not in the world has none."""

    def __init__(
        self,
        world: World,
        node: int | None,
        workers: Sequence[Worker],
        *,
        generation: int,
        membership: Membership,
        peers: Peers,
        compute: ComputeSpec,
    ) -> None:
        distribution = compute.distribution
        assert distribution is not None
        self.world = world
        self.node = node
        self.workers = tuple(workers)
        self.generation = generation
        self.pod_name = peers.pod_name
        self.peers = peers
        options = json.loads(distribution.options)
        self.is_single = distribution.distribution_type in SINGLE_CONTROLLER
        self.is_monitored = distribution.is_monitored
        self._framework = distribution.distribution_type
        self._fanout = int(options.get("tree_fanout", 50))
        self._compute = compute
        self._membership = membership
        self._numbers = itertools.count(1)
        self._runs: dict[int, Run] = {}
        self._is_over = False
        #: True once it had a call: then its end is rather due to the call than to its start.
        self.had_calls = False
        self._started = membership.starts(world)
        self._idle = asyncio.Event()
        self._idle.set()
        self._watch: asyncio.TimerHandle | None = None
        self._known_pods = {member.pod for member in (*world.members, *membership.members)}
        self._unsubscribe = membership.subscribe(self._on_members)
        self._on_members()

    # --------------------------------------------------------------------------------- as a worker

    @property
    def pid(self) -> int:
        """The process of the first worker; 0 without workers."""
        return self.workers[0].pid if self.workers else 0

    @property
    def is_alive(self) -> bool:
        """True until the group is ended or one of its processes has ended."""
        return not self._is_over and all(worker.is_alive for worker in self.workers)

    @property
    def accepts_calls(self) -> bool:
        """True if all workers will live on."""
        return not self._is_over and all(worker.accepts_calls for worker in self.workers)

    @property
    def running(self) -> int:
        return len(self._runs)

    def accepts(self, request: Open, opened: float) -> bool:
        """True if a call of this time may run now; else it waits for processes of a newer world.

        This method also requests the new processes that a call wants (`restart_procs`), unless
        those of this world were started while the call waited: simultaneous calls must not end each
        other. Processes that this pod restarts after an end do not count: those of other pods are
        older.
        """
        newest = self._membership.world_of(self.generation)
        if not self.accepts_calls or (newest is not None and newest.epoch > self.world.epoch):
            return False
        if request.part is not None:
            return request.part.epoch <= self.world.epoch
        if not request.restart_procs or (opened < self._started and not self.world.lost):
            return True
        epoch = self._membership.regroup(
            request.id, self._compute.quorum_timeout, is_quorum_awaited=request.workers != "ready"
        )
        return epoch < self.world.epoch

    @property
    def waits_for(self) -> str | None:
        """The state of a newer world that is not formed yet, in words; `None` once it is formed."""
        newest = self._membership.world_of(self.generation)
        if newest is not None and newest.epoch > self.world.epoch:
            return None
        lost_pods = {(loss.member.pod, loss.member.url) for loss in self.world.lost}
        members = self._membership.members
        present_members = [
            member for member in members if member.url and (member.pod, member.url) not in lost_pods
        ]
        lost = "; ".join(f"pod {loss.member.pod}: {loss.reason}" for loss in self.world.lost)
        quorum = self._compute.quorum(len(members))
        return f"{len(present_members)} of {quorum} pods are there" + (f" ({lost})" if lost else "")

    def call(self, sink: CallSink, request: Open, payload: Payload, chain: str = "") -> int:
        """Run a call on all ranks, or on those that it selects."""
        if request.restart_procs:
            self._membership.forget_request(request.id)
        number = next(self._numbers)
        self.had_calls = True
        try:
            nodes = self._select(request)
            if chain != request.chain:
                request = structs.replace(request, chain=chain)
            run = Run(self, number, sink, request, nodes)
            self._runs[number] = run
            self._idle.clear()
            try:
                run.begin(payload)
            except BaseException:
                run.give_up()
                raise
        finally:
            payload.release()
        return number

    @property
    def first(self) -> int | None:
        """The first node that is not lost."""
        nodes = range(len(self.world.members))
        lost = self.lost_nodes(nodes)
        return next((node for node in nodes if node not in lost), None)

    @property
    def keeper(self) -> int | None:
        """The node whose agent hands out the slots of all ranks, where calls are bounded.

        So all ranks run the same calls in the same order, and a call has all its slots or none.
        """
        return None if self._compute.concurrency is None else self.first

    def request_for_node(self, request: Open, node: int | None) -> Open:
        """The request of a call for any node, once it has a slot in this node."""
        if node is None or not is_for_any(request):
            return request
        if request.part is None:
            return structs.replace(request, workers=(node,))
        return structs.replace(request, part=Part(request.part.epoch, (node,)))

    def hands_out_slots(self, request: Open) -> bool:
        """True if a call has to wait in this pod for the slots that it needs."""
        if request.part is not None:
            return request.part.needs_slots
        return self.node is not None and self.node == self.keeper

    def nodes_of(self, request: Open) -> tuple[int, ...] | None:
        """The nodes that a call runs on, `None` for any node; raises the errors of `call`."""
        nodes = self._select(request)
        return None if is_for_any(request) else nodes

    def cancel(self, number: int, reason: str, *, timed_out: bool) -> None:
        run = self._runs.get(number)
        if run is not None:
            run.cancel(reason, timed_out=timed_out)

    def grant(self, number: int, count: int) -> None:
        run = self._runs.get(number)
        if run is not None:
            run.grant(count)

    async def drain(self, grace: float) -> None:
        """Accept no more calls, let the running ones end, then end the processes."""
        await asyncio.gather(*(worker.drain(grace) for worker in self.workers))
        await deadlines.wait_at_most(grace, self._idle.wait())
        await self.kill()

    async def kill(self) -> None:
        self._is_over = True
        self._unsubscribe()
        error = CallRefusedError(
            f"the processes of the ranks in pod {self.pod_name} were ended: by a deploy, by a call "
            "with restart_procs=True, or with the pod",
            hint="call again",
        )
        for run in list(self._runs.values()):
            run.abandon(error)
        await asyncio.gather(*(worker.kill() for worker in self.workers))

    def abort(self, worker: Worker) -> None:
        """End the other workers after one that ended by itself."""
        self._is_over = True
        self._unsubscribe()
        reason = WorkerRecycledError(f"rank {worker.rank} in pod {self.pod_name} has ended")
        for other_worker in self.workers:
            if other_worker is not worker:
                other_worker.abort(reason)

    def forget(self, run: Run) -> None:
        """Forget a call of which no part runs any more."""
        self._runs.pop(run.number, None)
        if not self._runs:
            self._idle.set()

    def watch(self) -> None:
        """Check regularly for hanging ranks, as long as there are calls."""
        if self._watch is None:
            self._watch = asyncio.get_running_loop().call_later(
                TIMING.rank_hang_check_interval_seconds, self._check_hanging
            )

    def _check_hanging(self) -> None:
        self._watch = None
        for run in list(self._runs.values()):
            run.name_hanging()
            self.watch()

    # ---------------------------------------------------------------------------------- members

    def _on_members(self) -> None:
        current_world = self._membership.world
        if current_world is not None and current_world.epoch == self.world.epoch:
            self.world = current_world
        for loss in self.world.lost:
            self.peers.drop(loss.member, loss.reason)
        for run in list(self._runs.values()):
            run.on_members()
        for member in self._membership.members:
            if member.url and member.pod not in self._known_pods:
                self._known_pods.add(member.pod)
                self._announce(member)

    def _announce(self, member: Member) -> None:
        text = (
            f"pod {member.pod} has joined; restart_procs=True, or a deploy, takes it into the world"
        )
        _log.info("%s", text)
        for run in self._runs.values():
            if run.is_root and self.is_monitored:
                run.log_line(text, "INFO")

    def needed_nodes(self, nodes: Collection[int]) -> Collection[int]:
        """The nodes that a call on these nodes needs: a single controller uses all."""
        return range(len(self.world.members)) if self.is_single else nodes

    def lost_nodes(self, nodes: Collection[int]) -> list[int]:
        """The lost ones of these nodes."""
        lost_pods = {loss.member.pod for loss in self.world.lost}
        return [node for node in nodes if self.world.members[node].pod in lost_pods]

    def membership_error(self, reasons: Mapping[str, str] | None = None) -> WorkerMembershipChanged:
        """The error of calls on this world, whose members are lost."""
        members = self.world.members
        short = dict(reasons or {}) | {loss.member.pod: loss.reason for loss in self.world.lost}
        messages = {loss.member.pod: loss.message for loss in self.world.lost if loss.message}
        why = {
            pod: f"{reason}: {messages[pod]}" if pod in messages else reason
            for pod, reason in short.items()
        }
        removed = [member.host for member in members if member.pod in why]
        hint = (
            "restart_procs=True runs a call on a world of the pods that are there; so does a deploy"
        )
        if len(removed) == len(members):
            hint = "call again: the pods that take their place serve, or will"
        error = WorkerMembershipChanged(
            added_ips=(),
            removed_ips=removed,
            previous_ips=(member.host for member in members),
            current_ips=[member.host for member in members if member.pod not in why],
            message=(
                f"Critical: {len(removed)} worker(s) removed during execution: {sorted(removed)} ("
                + "; ".join(f"{pod}: {text}" for pod, text in why.items())
                + ")"
            ),
            reasons=short,
            hint=hint,
        )
        error.pod_name = next(iter(why), None)
        return error

    # -------------------------------------------------------------------------------- selection

    def _select(self, request: Open) -> tuple[int, ...]:
        part = request.part
        if part is not None:
            nodes = self._check_part(part)
            return self._least_busy() if part.is_any else nodes
        if self.is_single:
            if request.workers is not None:
                raise SpecError(
                    f"a call on {self._framework} runs on one pod, whose program uses the others",
                    hint="call it without workers=",
                )
            nodes = (0,)
        elif is_for_any(request):
            return self._least_busy()
        else:
            lost = self.lost_nodes(range(len(self.world.members)))
            nodes = select(request.workers, self.world.members, lost)
        if (
            self.is_monitored
            and not is_tolerant(request)
            and self.lost_nodes(self.needed_nodes(nodes))
        ):
            raise self.membership_error()
        return nodes

    def _least_busy(self) -> tuple[int, ...]:
        """The first of the nodes with the fewest calls; empty if all nodes are lost.

        The agent of the first node gets all calls for any node, so it knows their numbers.
        """
        calls = Counter(node for run in self._runs.values() for node in run.nodes)
        everyone = range(len(self.world.members))
        lost = self.lost_nodes(everyone)
        ready = [node for node in everyone if node not in lost]
        return (min(ready, key=calls.__getitem__),) if ready else ()

    def _check_part(self, part: Part) -> tuple[int, ...]:
        if part.epoch < self.world.epoch:
            raise WorkerMembershipChanged(
                message=f"the world of the call is gone: pod {self.pod_name} has a newer one "
                f"(epoch {self.world.epoch}, not {part.epoch})",
                hint="call again",
            )
        count = len(self.world.members)
        if not part.nodes or not all(0 <= node < count for node in part.nodes):
            raise ProtocolError(f"a call for nodes {part.nodes} of a world of {count}")
        return part.nodes

    def children(self, nodes: Sequence[int]) -> list[tuple[int, ...]]:
        """The parts that other pods get of a call on these nodes."""
        return fan_out([node for node in nodes if node != self.node], self._fanout)


class Run:
    """One call on the ranks of some nodes."""

    def __init__(
        self, group: RankGroup, number: int, sink: CallSink, request: Open, nodes: Sequence[int]
    ) -> None:
        self.group = group
        self.number = number
        self.request = request
        #: True if the call came from a client, not from another agent.
        self.is_root = request.part is None
        self.sink = sink
        #: The nodes that the call runs on.
        self.nodes = tuple(nodes)
        self._parts: list[RankPart] = []
        self._entries: list[Entry] = []
        self._payloads: list[Payload] = []
        self._failures: list[dict[str, Any]] = []
        self._answer: bytes | None = None
        self._began = 0.0
        self._has_rounds = self._has_passed_rounds = False
        # When a part ended last while others run (loop time); 0 if none has.
        self._progressed = 0.0
        self._is_cancelled = False
        self._is_ended = False
        self._timers: dict[str, asyncio.TimerHandle] = {}
        #: The number of parts that have not ended.
        self.unfinished_parts = 0

    def begin(self, payload: Payload) -> None:
        """Start the call on its nodes. The payload stays the caller's."""
        group = self.group
        world = group.world
        keeper = group.first if is_for_any(self.request) else group.keeper
        keeper = keeper if self.is_root else None
        if keeper is not None and keeper != group.node:
            if is_for_any(self.request):
                self.nodes = (keeper,)  # which chooses one
            whole = PeerPart(self, self.nodes, keeper=keeper)
            self._add(whole)
            whole.begin(payload)
            return
        if group.node in self.nodes:
            first = rank_of(world, group.node, 0)
            workers = group.workers[:1] if group.is_single else group.workers
            for worker_payload, worker, rank in zip(
                _share(payload, len(workers)), workers, itertools.count(first), strict=False
            ):
                local = LocalPart(self, rank, worker)
                request = self._debugged(self.request, is_last=worker is workers[-1])
                local.number = worker.call(local, request, worker_payload, request.chain)
                self._add(local)
        # Last: a call that a worker refuses must not run on other pods.
        for nodes in group.children(self.nodes):
            part = PeerPart(self, nodes)
            self._add(part)
            part.begin(payload)
        if not self._parts:
            raise group.membership_error()

    def _debugged(self, request: Open, *, is_last: bool) -> Open:
        """The request for a local process: the last one of the first node stops for `debug=`."""
        debug = request.debug
        if debug is None or not debug.stops:
            return request
        first = self.nodes[0] if debug.node is None else debug.node
        stops = is_last and first == self.group.node
        return structs.replace(request, debug=debug._replace(stops=stops))

    def _add(self, part: RankPart) -> None:
        self._parts.append(part)
        self.unfinished_parts += 1

    # ----------------------------------------------------------------------------- from its caller

    def cancel(self, reason: str, *, timed_out: bool = False) -> None:
        self._is_cancelled = True
        for part in self._open():
            part.cancel(reason, timed_out=timed_out)
        error = CallCancelledError(reason)
        if "cancel" not in self._timers:
            self._later("cancel", TIMING.rank_cancel_seconds, lambda: self.abandon(error))

    def grant(self, count: int) -> None:
        for part in self._open():
            part.grant(count)

    def give_up(self) -> None:
        """Refuse the call, which has not begun everywhere."""
        self._is_ended = True
        for part in self._open():
            part.cancel("the call was refused", timed_out=False)
        self._close()

    def abandon(self, error: KubetorchError) -> None:
        """End the call without waiting for the parts that have not ended."""
        if self._is_ended:
            return
        for part in self._open():
            part.close()
            part.cancel(error.message, timed_out=False)
        if not self._failures:
            self._failures.append(self.describe(error, None, self.group.pod_name))
        self._end_if_done()

    # ------------------------------------------------------------------------------- membership

    def on_members(self) -> None:
        """Fail the call if a pod that it needs is lost."""
        group = self.group
        if not group.is_monitored or is_tolerant(self.request) or self._answer is not None:
            return
        if group.lost_nodes(group.needed_nodes(self.nodes)):
            self.fail([self.describe(group.membership_error(), None, None)])

    def log_line(self, text: str, level: str) -> None:
        self.sink.on_log(Line(text, KUBETORCH, level, time.time(), None))

    # --------------------------------------------------------------------------- from its parts

    @property
    def is_quiet(self) -> bool:
        """True if no more events of the parts are passed on."""
        return self._is_ended or self._answer is not None

    def on_round(self) -> None:
        """Pass on one yielded value of each rank, once all active parts have yielded one."""
        self._has_rounds = True
        while True:
            waiting = [part for part in self._parts if part.rounds or not part.is_over]
            if not waiting or not all(part.rounds for part in waiting):
                return
            rounds = [part.rounds.pop(0) for part in waiting]
            entries = [entry for rank_entries, _ in rounds for entry in rank_entries]
            if not self._has_passed_rounds:
                # The caller makes an iterator for each rank of the first round.
                self._has_passed_rounds = True
                ranks_of_round = {entry.rank for entry in entries}
                ended = (entry for entry in self._entries if entry.rank not in ranks_of_round)
                entries += [entry._replace(is_streamed=True) for entry in ended]
            if not self.is_quiet and not self._failures:
                sizes, payload = _joined(entries)
                self.sink.on_yield(rank_values.CODEC, sizes, payload)
            for _, round_payload in rounds:
                round_payload.release()

    def on_plain(self, codec: str, sizes: Sequence[int], payload: Payload) -> None:
        """Pass on a value that the single controller yielded."""
        if self.is_quiet:
            payload.release()
        else:
            self.sink.on_yield(codec, sizes, payload)

    def on_only_result(
        self, codec: str, sizes: Sequence[int], payload: Payload, *, streamed: bool
    ) -> None:
        if self._failures:  # a pod was lost before the result came
            payload.release()
            self._end_if_done()
            return
        self._is_ended = True
        self._close()
        self.sink.on_result(codec, sizes, payload, streamed=streamed)

    def on_values(self, entries: Sequence[Entry], payload: Payload) -> None:
        """Add the returned values of a part."""
        self._entries.extend(entries)
        self._payloads.append(payload)
        if self._has_rounds:
            self.on_round()
        self._end_if_done()
        if not self._is_ended:
            self._progressed = asyncio.get_running_loop().time()
            self.group.watch()

    def fail(self, failures: Sequence[dict[str, Any]]) -> None:
        if self._is_ended:
            return
        is_first = not self._failures
        self._failures.extend(failures)
        if is_first and not self._is_cancelled:
            self._began = asyncio.get_running_loop().time()
            self.cancel(RECALLED)
            self._later("settle", TIMING.rank_settle_seconds, self._answer_failures)
        self._end_if_done()

    def describe(self, error: Exception, rank: int | None, pod: str | None) -> dict[str, Any]:
        """An error of an agent as a failure in JSON."""
        pod = pod or getattr(error, "pod_name", None)
        failure = exceptions.describe_refusal(error, pod_name=pod, started=True)
        return failure.to_dict() | {"rank": rank}

    # ----------------------------------------------------------------------------------- its end

    def _open(self) -> list[RankPart]:
        return [part for part in self._parts if not part.is_over]

    def _end_if_done(self) -> None:
        """End the call, if no part of it runs any more."""
        if self._is_ended or self.unfinished_parts:
            return
        if not self._failures and any(part.rounds for part in self._parts):
            return
        self._is_ended = True
        self._close()
        if self._failures:
            self.sink.on_error(self._answer or combine(self._failures))
            return
        sizes, payload = _joined(self._entries)
        is_streamed = any(entry.is_streamed for entry in self._entries)
        self._release()
        self.sink.on_result(rank_values.CODEC, sizes, payload, streamed=is_streamed)

    def _answer_failures(self) -> None:
        """Answer with the failures so far, unless they may be the consequence of a lost pod."""
        if self._is_ended or self._answer is not None:
            return
        remaining_seconds = (
            self._began + TIMING.rank_loss_settle_seconds - asyncio.get_running_loop().time()
        )
        best, _ = min(map(_cause_order, self._failures))
        is_broken = best == _CONSEQUENCE or any(not part.is_connected for part in self._open())
        if is_broken and best > _DEATH and remaining_seconds > 0 and self.group.is_monitored:
            self._later(
                "settle", min(remaining_seconds, TIMING.rank_settle_seconds), self._answer_failures
            )
            return
        self._answer = combine(self._failures)
        self.sink.on_failing(self._answer)

    def name_hanging(self) -> None:
        """Log once which ranks still run, if the others and all debuggers ended a while ago."""
        now = asyncio.get_running_loop().time()
        if self._progressed and any(part.debuggers for part in self._open()):
            self._progressed = now
        if not self._progressed or now < self._progressed + TIMING.rank_hang_report_seconds:
            return
        self._progressed = 0.0
        names = [part.name for part in self._open()]
        where = ", ".join(names[:5]) + (f" and {len(names) - 5} others" if names[5:] else "")
        verb = "runs" if len(names) == 1 and names[0].startswith("rank ") else "run"
        if where and self.is_root and not self.is_quiet:
            self.log_line(
                f"{where} still {verb}, {TIMING.rank_hang_report_seconds:.0f} s after the others "
                "ended; kt stacks shows where they are",
                "WARNING",
            )

    def _later(self, name: str, seconds: float, do: Callable[[], object]) -> None:
        if name in self._timers:
            self._timers[name].cancel()
        self._timers[name] = asyncio.get_running_loop().call_later(seconds, do)

    def _close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        for part in self._parts:
            while part.rounds:
                part.rounds.pop()[1].release()
        if self._failures or not self._entries:
            self._release()
        self.group.forget(self)

    def _release(self) -> None:
        self._entries.clear()
        for payload in self._payloads:
            payload.release()
        self._payloads.clear()


class RankPart(ABC):
    """The part of a call that one worker, or one other pod, runs.

    This is the `CallSink` of the part; a subclass has `on_error` and `on_lost`.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.is_over = False
        #: Values of generators that wait for those of the other ranks.
        self.rounds: list[tuple[list[Entry], Payload]] = []
        #: The sessions of debuggers that have its ranks.
        self.debuggers: set[str] = set()

    @property
    def is_connected(self) -> bool:
        return True

    @property
    @abstractmethod
    def name(self) -> str:
        """The part's name for users, such as its ranks and pods."""

    @abstractmethod
    def cancel(self, reason: str, *, timed_out: bool) -> None:
        """Ask the part to end."""

    @abstractmethod
    def grant(self, count: int) -> None:
        """Let the part yield so many more values."""

    @abstractmethod
    def entries(
        self, codec: str, sizes: Sequence[int], payload: Payload, *, streamed: bool
    ) -> list[Entry]:
        """The values in a payload."""

    def on_log(self, line: Line) -> None:
        if line.debug is not None and line.debug.kind == STOPPED:
            self.debuggers.add(line.debug.session)
        elif line.debug is not None and line.debug.kind == OVER:
            self.debuggers.discard(line.debug.session)
        if not self.run.is_quiet:
            self.run.sink.on_log(line)

    def on_progress(self, report: Progress) -> None:
        if not self.run.is_quiet:
            self.run.sink.on_progress(report)

    def on_yield(self, codec: str, sizes: Sequence[int], payload: Payload) -> None:
        if self.run.group.is_single:
            self.run.on_plain(codec, sizes, payload)
        elif self.run.is_quiet:
            payload.release()
        else:
            self.rounds.append((self.entries(codec, sizes, payload, streamed=False), payload))
            self.run.on_round()

    def on_result(
        self, codec: str, sizes: Sequence[int], payload: Payload, *, streamed: bool
    ) -> None:
        if self.is_over:
            payload.release()
            return
        self.close()
        if self.run.group.is_single:
            self.run.on_only_result(codec, sizes, payload, streamed=streamed)
        else:
            entries = self.entries(codec, sizes, payload, streamed=streamed)
            self.run.on_values(entries, payload)

    def on_queued(self) -> None:
        """Pass on that the call waits for its slots."""
        self.run.sink.on_queued()

    def on_begun(self) -> None:
        """Pass on that the call runs."""
        self.run.sink.on_begun()

    def on_kept(self, descriptor: int) -> None:
        """Nothing is kept of a call on ranks."""
        os.close(descriptor)

    def on_failing(self, failure: bytes) -> None:  # noqa: B027  # neither a worker nor a peer says it
        """Ignored: neither a worker nor a peer calls this for a part."""

    def on_returned(self) -> None:  # noqa: B027  # no part stands in line
        """Ignored: no part stands in line."""

    def end(self, failures: Sequence[dict[str, Any]]) -> None:
        if not self.is_over:
            self.close()
            self.run.fail(failures)

    def close(self) -> None:
        """End the part: no more events are expected."""
        self.is_over = True
        self.run.unfinished_parts -= 1


class LocalPart(RankPart):
    """A call on one rank."""

    def __init__(self, run: Run, rank: int, worker: Worker) -> None:
        super().__init__(run)
        self.rank = rank
        self.number = 0
        self._worker = worker

    @property
    def name(self) -> str:
        return f"rank {self.rank} in pod {self.run.group.pod_name}"

    def cancel(self, reason: str, *, timed_out: bool) -> None:
        self._worker.cancel(self.number, reason, timed_out=timed_out)

    def grant(self, count: int) -> None:
        self._worker.grant(self.number, count)

    def entries(
        self, codec: str, sizes: Sequence[int], payload: Payload, *, streamed: bool
    ) -> list[Entry]:
        return [Entry(self.rank, codec, codecs.split(payload.view, sizes), streamed)]

    def on_error(self, failure: bytes) -> None:
        described = exceptions.parse_json(failure).to_dict()
        self.end([described | {"rank": self.rank, "pod_name": self.run.group.pod_name}])

    def on_lost(self, error: KubetorchError) -> None:
        self.end([self.run.describe(error, self.rank, self.run.group.pod_name)])


class PeerPart(RankPart):
    """A call on the ranks of other pods, the first of which passes the call on."""

    def __init__(self, run: Run, nodes: tuple[int, ...], *, keeper: int | None = None) -> None:
        super().__init__(run)
        self.nodes = nodes
        self._needs_slots = keeper is not None and run.group.keeper is not None
        self._is_any = keeper is not None and is_for_any(run.request)
        self._member = run.group.world.members[nodes[0] if keeper is None else keeper]
        self._call: PeerCall | None = None

    @property
    def is_connected(self) -> bool:
        return self._call is None or self._call.is_connected

    @property
    def name(self) -> str:
        world = self.run.group.world
        first = rank_of(world, self.nodes[0], 0)
        if len(self.nodes) > 1:
            return f"ranks in {len(self.nodes)} pods from {self._member.pod} on"
        if world.processes == 1:
            return f"rank {first} in pod {self._member.pod}"
        return f"ranks {first} to {first + world.processes - 1} in pod {self._member.pod}"

    def begin(self, payload: Payload) -> None:
        run = self.run
        request = structs.replace(
            run.request,
            id=new_call_id(),
            part=Part(run.group.world.epoch, self.nodes, self._needs_slots, self._is_any),
            workers=None,
            restart_procs=False,
            detached=False,
            idempotency_key=None,
            timeout=None,
            instance=None,
            queue_news=self._needs_slots,
            debug=self._debug_of_part,
        )
        self._call = run.group.peers.call(self._member, request, payload.view, self)

    @property
    def _debug_of_part(self) -> Debugging | None:
        """The debugger of the call, which names the node that stops."""
        debug = self.run.request.debug
        if debug is None or debug.node is not None or self._needs_slots:
            return debug
        return debug._replace(node=self.run.nodes[0])

    def cancel(self, reason: str, *, timed_out: bool) -> None:
        if self._call is not None:
            self._call.cancel(reason)

    def grant(self, count: int) -> None:
        if self._call is not None:
            self._call.grant(count)

    def entries(
        self, codec: str, sizes: Sequence[int], payload: Payload, *, streamed: bool
    ) -> list[Entry]:
        if codec != rank_values.CODEC:
            raise ProtocolError(f"pod {self._member.pod} answered a part of a call with {codec}")
        return rank_values.unpack(codecs.split(payload.view, sizes))

    def on_error(self, failure: bytes) -> None:
        first = exceptions.parse_json(failure).to_dict()
        other_failures = first.pop("other_errors", [])
        if first.get("rank") is None and not first.get("pod_name"):
            first["pod_name"] = self._member.pod
        self.end([first | {"started": True}, *other_failures])

    def on_lost(self, error: KubetorchError) -> None:
        group, request = self.run.group, self.run.request
        alive = [node for node in self.nodes if node not in group.lost_nodes(self.nodes)]
        if is_tolerant(request) and alive in ([], [self.nodes[0]]):
            # A lost pod has no value, which is no error for such a call.
            if not self.is_over:
                self.close()
                self.run.on_values([], OwnedPayload(b""))
        elif group.is_monitored and group.lost_nodes(self.nodes[:1]):
            self.end([self.run.describe(group.membership_error(), None, None)])
        elif isinstance(error, AgentDiedError) and group.is_monitored:
            # The controller reports the reason of the pod's end soon.
            asyncio.get_running_loop().call_later(
                TIMING.rank_loss_reason_seconds, self._give_up, error
            )
        else:
            self.end([self.run.describe(error, None, self._member.pod)])

    def _give_up(self, error: AgentDiedError) -> None:
        changed = self.run.group.membership_error({self._member.pod: error.reason})
        self.end([self.run.describe(changed, None, None)])


# ------------------------------------------------------------------------------------- selection


def is_tolerant(request: Open) -> bool:
    """True if a call runs on the nodes that are not lost."""
    return request.workers == "ready"


def is_for_any(request: Open) -> bool:
    """True if a call runs on whichever node is least busy."""
    return request.workers == "any" if request.part is None else request.part.is_any


def select(
    workers: str | Sequence[int | str] | None, members: Sequence[Member], lost: Collection[int]
) -> tuple[int, ...]:
    """The nodes that `workers=` selects; not for `"any"`."""
    everyone = range(len(members))
    if workers is None:
        return tuple(everyone)
    if workers == "ready":
        return tuple(node for node in everyone if node not in lost)
    if isinstance(workers, str):
        nodes = tuple(
            node
            for node in everyone
            if workers in members[node].host or workers in members[node].pod
        )
        if not workers or not nodes:
            raise _not_found(workers, members)
        return nodes
    if not workers:
        raise SpecError(
            "Invalid worker specification: []. It names no worker", hint="leave workers= out"
        )
    return tuple(sorted({node for worker in workers for node in _nodes_named(worker, members)}))


def _nodes_named(worker: int | str, members: Sequence[Member]) -> list[int]:
    if isinstance(worker, str) and not worker.isdecimal():
        nodes = [
            node
            for node, member in enumerate(members)
            if worker in (member.host, member.pod, urlsplit(member.url).netloc)
        ]
        if not nodes and not any(mark in worker for mark in ".:"):
            raise SpecError(
                f"Invalid worker specification: {worker!r}",
                hint="a rank of a node, the address of a pod, or its name: " + _listed(members),
            )
        if not nodes:
            raise _not_found(worker, members)
        return nodes
    if isinstance(worker, bool) or not isinstance(worker, (int, str)):
        raise SpecError(f"Invalid worker specification: {worker!r}")
    index = int(worker)
    if not 0 <= index < len(members):
        raise SpecError(
            f"Worker index {index} out of range. Valid range: 0-{len(members) - 1}",
            hint="workers=[...] counts pods, not ranks",
        )
    return [index]


def _not_found(text: str, members: Sequence[Member]) -> SpecError:
    return SpecError(f"Worker IP '{text}' not found in the world: {_listed(members)}")


def _listed(members: Sequence[Member]) -> str:
    names = ", ".join(f"{member.pod} ({member.host})" for member in members[:20])
    return names + (f" and {len(members) - 20} more" if len(members) > 20 else "")


# -------------------------------------------------------------------------------------- failures


def _cause_order(failure: Mapping[str, Any]) -> tuple[int, float]:
    """The kind of a failure, those nearest to the cause first; then its rank."""
    rank = failure.get("rank")
    code, message = failure.get("code"), str(failure.get("message"))
    rank_order = -1.0 if rank is None else float(rank)
    if code in _LOSSES:
        return _LOSS, rank_order
    if code in (WorkerDiedError.code, OutOfMemoryError.code):
        return _DEATH, rank_order
    if code in (CallCancelledError.code, WorkerRecycledError.code):
        return _RECALL, rank_order
    # A pod that refuses calls is about to be lost, most likely.
    is_consequence = code == CallRefusedError.code or _BROKEN.search(message)
    return (_CONSEQUENCE if is_consequence else _RANK_FAILURE), rank_order


def combine(failures: Sequence[dict[str, Any]]) -> bytes:
    """The failure of a call: of the failures of its ranks, the one nearest to the cause."""
    first, *other_failures = sorted(failures, key=_cause_order)
    seen_codes = {first.get("code")} if first.get("rank") is None else set()
    attached: list[dict[str, Any]] = []
    room = LIMITS.attached_failures_bytes
    for failure in other_failures:
        if failure.get("rank") is None and failure.get("code") in seen_codes:
            continue  # the same loss, as another pod noticed it
        if _cause_order(failure)[0] == _RECALL:
            continue  # this rank was cancelled because others failed
        size = len(json.dumps(failure, default=repr))
        if len(attached) < LIMITS.attached_failures and size <= room:
            room -= size
            attached.append(failure)
    state = dict(first.get("state") or {})
    notes = [*(state.get("__notes__") or []), _note_text(first, other_failures)]
    combined = {**first, "other_errors": attached, "state": state | {"__notes__": notes}}
    return exceptions.parse(combined).to_json()


def _note_text(first: Mapping[str, Any], other_failures: Sequence[Mapping[str, Any]]) -> str:
    rank_failures = [failure for failure in other_failures if _cause_order(failure)[0] < _RECALL]
    text = f"on {_location(first)}"
    if not rank_failures:
        return text
    shown = "; ".join(
        f"{_location(failure)}: {failure.get('error_type')}: {str(failure.get('message'))[:200]}"
        for failure in rank_failures[:5]
    )
    more = f"; and {len(rank_failures) - 5} more" if len(rank_failures) > 5 else ""
    return f"{text}; failed with it: {shown}{more} (see .other_errors)"


def _location(failure: Mapping[str, Any]) -> str:
    rank, pod = failure.get("rank"), failure.get("pod_name")
    if rank is None:
        return f"pod {pod}" if pod else "the service"
    return f"rank {rank} in pod {pod}" if pod else f"rank {rank}"


# -------------------------------------------------------------------------------------- payloads


def _share(payload: Payload, count: int) -> list[Payload]:
    """The arguments for so many workers of a pod: large ones lie in memory once."""
    view = payload.view
    if count > 1 and len(view) > WORKER_LIMITS.inline_bytes:
        stored = payload if isinstance(payload, (Memory, MemoryFile)) else None
        if stored is None:
            with contextlib.suppress(OSError, MemoryError):
                stored = memory.allocate(len(view))
                stored.write(0, view)
        if stored is not None:
            return [stored.share() for _ in range(count)]
    if count == 1:
        return [shared(payload)]
    return [OwnedPayload(view) for _ in range(count)]


def _joined(entries: Sequence[Entry]) -> tuple[tuple[int, ...], Payload]:
    """One payload with the values of several ranks."""
    segments = rank_values.pack(entries)
    sizes = tuple(len(segment) for segment in segments)
    _, total = codecs.layout(sizes)
    if total >= LIMITS.joined_memory_file_bytes:
        with contextlib.suppress(OSError, MemoryError):
            stored = memory.allocate(total)
            offset = 0
            for piece in codecs.join(segments):
                stored.write(offset, piece)
                offset += len(piece)
            return sizes, stored
    return sizes, OwnedPayload(b"".join(codecs.join(segments)))
