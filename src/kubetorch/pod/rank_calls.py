"""The processes of a distributed service in one pod, which stand where a single worker stands.

    Calls ── RankGroup ── Run ─┬─ LocalPart ── Worker      one rank
                               ├─ LocalPart ── Worker
                               └─ PeerPart ══ RankGroup    of another pod, and of those below it

A call runs on all ranks of a world, whichever pod it reaches. What they return is put together in
rank order without being decoded (`kubetorch.wire.rank_values`). The first rank that fails ends the
call: the others are cancelled, and failures of the next moment are attached. See
docs/design/ranks.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
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
from kubetorch.pod.logs import Line
from kubetorch.pod.membership import Membership
from kubetorch.pod.peers import PeerCall, Peers, fan_out
from kubetorch.pod.rank_environment import rank_of
from kubetorch.pod.user_process.protocol import INLINE
from kubetorch.pod.worker_process.worker import CallSink, OwnedPayload, Payload, Worker, shared
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.distribution import SINGLE_CONTROLLER
from kubetorch.wire import codecs, exceptions, rank_values
from kubetorch.wire.calls import new_call_id
from kubetorch.wire.frames import KUBETORCH, Open, Part, Progress
from kubetorch.wire.messages import Member, World
from kubetorch.wire.rank_values import Entry

#: Seconds that the other ranks get to say how they ended once one has failed, and how long they
#: get where that may be the consequence of a loss that is not known yet.
SETTLING, DOUBT = 0.2, 1.0
#: Seconds after which a part that was cancelled is not waited for any more.
CANCELLING = 6.0
#: Seconds for the controller to say why a pod is gone whose stream has ended.
NEWS = 2.0
#: Seconds after the end of the others after which ranks that still run are named.
HANGING = 10.0
#: Seconds between two looks for them.
LOOKING = 1.0
#: Failures of other ranks that are attached to the first one, and their bytes.
ATTACHED, ATTACHED_BYTES = 16, 512 * 1024
#: Said to the ranks whose calls are cancelled.
RECALLED = "the call failed on another rank"

# How near a failure is to the cause.
_LOSS, _DEATH, _OWN, _CONSEQUENCE, _RECALL = range(5)
_LOSSES = (WorkerMembershipChanged.code, AgentDiedError.code, PodTerminatedError.code)
# What a rank says whose partner in a collective is gone.
_BROKEN = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|closed by (the )?peer|"
    r"\b(nccl|gloo)\b|coordination service|socket closed|peer process",
    re.IGNORECASE,
)
_LARGE = 1024 * 1024

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
        #: True once it has taken a call: what ends it then is that call rather than its start.
        self.had_calls = False
        self._started = membership.starts(world)
        self._idle = asyncio.Event()
        self._idle.set()
        self._watch: asyncio.TimerHandle | None = None
        self._known = {member.pod for member in (*world.members, *membership.members)}
        self._unsubscribe = membership.subscribe(self._on_members)
        self._on_members()

    # --------------------------------------------------------------------------------- as a worker

    @property
    def pid(self) -> int:
        """Stands for its processes where one is asked for."""
        return self.workers[0].pid if self.workers else 0

    @property
    def is_alive(self) -> bool:
        """True until the group is ended or one of its processes has ended."""
        return not self._is_over and all(worker.is_alive for worker in self.workers)

    @property
    def takes_calls(self) -> bool:
        """True if all its processes will live on."""
        return not self._is_over and all(worker.takes_calls for worker in self.workers)

    @property
    def running(self) -> int:
        return len(self._runs)

    def takes(self, request: Open, opened: float) -> bool:
        """True if a call of this time may run now; else it waits for processes of a newer world.

        It has an effect beside its answer: new processes that the call itself wants are requested
        here, unless those of this world were started while the call waited, since simultaneous
        calls are not to end each other. Processes that this pod starts again, since one has ended,
        do not count: those of other pods are older.
        """
        newest = self._membership.world_of(self.generation)
        if not self.takes_calls or (newest is not None and newest.epoch > self.world.epoch):
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
        gone = {(one.member.pod, one.member.url) for one in self.world.lost}
        members = self._membership.members
        here = [one for one in members if one.url and (one.pod, one.url) not in gone]
        lost = "; ".join(f"pod {one.member.pod}: {one.reason}" for one in self.world.lost)
        quorum = self._compute.quorum(len(members))
        return f"{len(here)} of {quorum} pods are there" + (f" ({lost})" if lost else "")

    def call(self, sink: CallSink, request: Open, payload: Payload, chain: str = "") -> int:
        """Have all ranks run a call, or those that it selects."""
        if request.restart_procs:
            self._membership.regrouped(request.id)
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
        lost = self.lost(nodes)
        return next((node for node in nodes if node not in lost), None)

    @property
    def keeper(self) -> int | None:
        """The node whose agent hands out the slots of all ranks, where calls are bounded.

        So all ranks run the same calls in the same order, and a call has all its slots or none.
        """
        return None if self._compute.concurrency is None else self.first

    def place(self, request: Open, node: int | None) -> Open:
        """A call for any node, once it has a slot in this one."""
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
        """The nodes that a call runs on, `None` for any one; raises what `call` would."""
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
        """Take no more calls, let those that run end, then end the processes."""
        await asyncio.gather(*(worker.drain(grace) for worker in self.workers))
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            async with deadlines.timeout(grace):
                await self._idle.wait()
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
        """One of its workers has ended by itself: the others go with it."""
        self._is_over = True
        self._unsubscribe()
        reason = WorkerRecycledError(f"rank {worker.rank} in pod {self.pod_name} has ended")
        for other in self.workers:
            if other is not worker:
                other.abort(reason)

    def forget(self, run: Run) -> None:
        """Nothing of a call runs any more."""
        self._runs.pop(run.number, None)
        if not self._runs:
            self._idle.set()

    def watch(self) -> None:
        """Look now and then for calls that hang, as long as there are any calls."""
        if self._watch is None:
            self._watch = asyncio.get_running_loop().call_later(LOOKING, self._look)

    def _look(self) -> None:
        self._watch = None
        for run in list(self._runs.values()):
            run.name_hanging()
            self.watch()

    # ---------------------------------------------------------------------------------- members

    def _on_members(self) -> None:
        told = self._membership.world
        if told is not None and told.epoch == self.world.epoch:
            self.world = told
        for one in self.world.lost:
            self.peers.drop(one.member, one.reason)
        for run in list(self._runs.values()):
            run.on_members()
        for member in self._membership.members:
            if member.url and member.pod not in self._known:
                self._known.add(member.pod)
                self._announce(member)

    def _announce(self, member: Member) -> None:
        text = (
            f"pod {member.pod} has joined; restart_procs=True, or a deploy, takes it into the world"
        )
        _log.info("%s", text)
        for run in self._runs.values():
            if run.is_root and self.is_monitored:
                run.say(text, "INFO")

    def needed(self, nodes: Collection[int]) -> Collection[int]:
        """The nodes that a call on these cannot do without: a single controller uses all."""
        return range(len(self.world.members)) if self.is_single else nodes

    def lost(self, nodes: Collection[int]) -> list[int]:
        """Those of the nodes that are lost."""
        gone = {one.member.pod for one in self.world.lost}
        return [node for node in nodes if self.world.members[node].pod in gone]

    def membership_error(self, reasons: Mapping[str, str] | None = None) -> WorkerMembershipChanged:
        """The error of calls on this world since members of it are lost."""
        members = self.world.members
        short = dict(reasons or {}) | {one.member.pod: one.reason for one in self.world.lost}
        messages = {one.member.pod: one.message for one in self.world.lost if one.message}
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
            lost = self.lost(range(len(self.world.members)))
            nodes = select(request.workers, self.world.members, lost)
        if self.is_monitored and not is_tolerant(request) and self.lost(self.needed(nodes)):
            raise self.membership_error()
        return nodes

    def _least_busy(self) -> tuple[int, ...]:
        """The node with the fewest calls, of those that are equal the first; none if all are lost.

        The agent of the first node gets all calls for any node, so it knows.
        """
        calls = Counter(node for run in self._runs.values() for node in run.nodes)
        everyone = range(len(self.world.members))
        lost = self.lost(everyone)
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
        #: Whether the call came from a client, not from another agent.
        self.is_root = request.part is None
        self.sink = sink
        #: The nodes that it runs on.
        self.nodes = tuple(nodes)
        self._parts: list[RankPart] = []
        self._entries: list[Entry] = []
        self._payloads: list[Payload] = []
        self._failures: list[dict[str, Any]] = []
        self._answer: bytes | None = None
        self._began = 0.0
        self._has_rounds = self._has_passed_rounds = False
        # When a part ended last, while others run.
        self._progressed = 0.0
        self._is_cancelled = False
        self._is_ended = False
        self._timers: dict[str, asyncio.TimerHandle] = {}
        #: Parts that are not over.
        self.left = 0

    def begin(self, payload: Payload) -> None:
        """Start it everywhere. The payload stays the caller's."""
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
            for own, worker, rank in zip(
                _share(payload, len(workers)), workers, itertools.count(first), strict=False
            ):
                local = LocalPart(self, rank, worker)
                local.number = worker.call(local, self.request, own, self.request.chain)
                self._add(local)
        # Last: what a worker refuses is not to run anywhere.
        for nodes in group.children(self.nodes):
            part = PeerPart(self, nodes)
            self._add(part)
            part.begin(payload)
        if not self._parts:
            raise group.membership_error()

    def _add(self, part: RankPart) -> None:
        self._parts.append(part)
        self.left += 1

    # ----------------------------------------------------------------------------- from its caller

    def cancel(self, reason: str, *, timed_out: bool = False) -> None:
        self._is_cancelled = True
        for part in self._open():
            part.cancel(reason, timed_out=timed_out)
        error = CallCancelledError(reason)
        if "cancel" not in self._timers:
            self._later("cancel", CANCELLING, lambda: self.abandon(error))

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
        """Do not wait any longer for the parts that have not ended."""
        if self._is_ended:
            return
        for part in self._open():
            part.close()
            part.cancel(error.message, timed_out=False)
        if not self._failures:
            self._failures.append(self.describe(error, None, self.group.pod_name))
        self._settle()

    # ------------------------------------------------------------------------------- membership

    def on_members(self) -> None:
        """The pods of the world are others: a call on a pod that is lost has failed."""
        group = self.group
        if not group.is_monitored or is_tolerant(self.request) or self._answer is not None:
            return
        if group.lost(group.needed(self.nodes)):
            self.fail([self.describe(group.membership_error(), None, None)])

    def say(self, text: str, level: str) -> None:
        self.sink.on_log(Line(text, KUBETORCH, level, time.time(), None))

    # --------------------------------------------------------------------------- from its parts

    @property
    def is_quiet(self) -> bool:
        """True if nothing more is reported but the end."""
        return self._is_ended or self._answer is not None

    def on_round(self) -> None:
        """A part has yielded: pass on one value of each rank, once all that are active have one."""
        self._has_rounds = True
        while True:
            waiting = [part for part in self._parts if part.rounds or not part.is_over]
            if not waiting or not all(part.rounds for part in waiting):
                return
            rounds = [part.rounds.pop(0) for part in waiting]
            entries = [entry for found, _ in rounds for entry in found]
            if not self._has_passed_rounds:
                # The caller makes an iterator for each rank of the first round.
                self._has_passed_rounds = True
                there = {entry.rank for entry in entries}
                ended = (entry for entry in self._entries if entry.rank not in there)
                entries += [entry._replace(is_streamed=True) for entry in ended]
            if not self.is_quiet and not self._failures:
                sizes, payload = _together(entries)
                self.sink.on_yield(rank_values.CODEC, sizes, payload)
            for _, one in rounds:
                one.release()

    def on_plain(self, codec: str, sizes: Sequence[int], payload: Payload) -> None:
        """The single controller yielded."""
        if self.is_quiet:
            payload.release()
        else:
            self.sink.on_yield(codec, sizes, payload)

    def on_only_result(
        self, codec: str, sizes: Sequence[int], payload: Payload, *, streamed: bool
    ) -> None:
        """The single controller returned."""
        if self._failures:  # it was too late for the loss of a pod
            payload.release()
            self._settle()
            return
        self._is_ended = True
        self._close()
        self.sink.on_result(codec, sizes, payload, streamed=streamed)

    def on_values(self, entries: Sequence[Entry], payload: Payload) -> None:
        """A part returned."""
        self._entries.extend(entries)
        self._payloads.append(payload)
        if self._has_rounds:
            self.on_round()
        self._settle()
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
            self._later("settle", SETTLING, self._conclude)
        self._settle()

    def describe(self, error: Exception, rank: int | None, pod: str | None) -> dict[str, Any]:
        """A failure that an agent makes, as JSON."""
        pod = pod or getattr(error, "pod_name", None)
        failure = exceptions.describe_refusal(error, pod_name=pod, started=True)
        return failure.to_dict() | {"rank": rank}

    # ----------------------------------------------------------------------------------- its end

    def _open(self) -> list[RankPart]:
        return [part for part in self._parts if not part.is_over]

    def _settle(self) -> None:
        """End it, if nothing of it runs any more."""
        if self._is_ended or self.left:
            return
        if not self._failures and any(part.rounds for part in self._parts):
            return
        self._is_ended = True
        self._close()
        if self._failures:
            self.sink.on_error(self._answer or combine(self._failures))
            return
        sizes, payload = _together(self._entries)
        is_streamed = any(entry.is_streamed for entry in self._entries)
        self._release()
        self.sink.on_result(rank_values.CODEC, sizes, payload, streamed=is_streamed)

    def _conclude(self) -> None:
        """Answer with the failures that have come, unless they may be those of a loss."""
        if self._is_ended or self._answer is not None:
            return
        left = self._began + DOUBT - asyncio.get_running_loop().time()
        best, _ = min(map(_order, self._failures))
        is_broken = best == _CONSEQUENCE or any(not part.is_connected for part in self._open())
        if is_broken and best > _DEATH and left > 0 and self.group.is_monitored:
            self._later("settle", min(left, SETTLING), self._conclude)
            return
        self._answer = combine(self._failures)
        self.sink.on_failing(self._answer)

    def name_hanging(self) -> None:
        """Say which ranks still run, if the others have ended a while ago; once."""
        now = asyncio.get_running_loop().time()
        if not self._progressed or now < self._progressed + HANGING:
            return
        self._progressed = 0.0
        names = [part.name for part in self._open()]
        where = ", ".join(names[:5]) + (f" and {len(names) - 5} others" if names[5:] else "")
        if where and self.is_root and not self.is_quiet:
            self.say(
                f"{where} still run, {HANGING:.0f} s after the others ended; "
                "kt stacks shows where they are",
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

    It is the `CallSink` of that part; a subclass has `on_error` and `on_lost`.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.is_over = False
        #: Values of generators that wait for those of the other ranks.
        self.rounds: list[tuple[list[Entry], Payload]] = []

    @property
    def is_connected(self) -> bool:
        return True

    @property
    @abstractmethod
    def name(self) -> str:
        """As users know it."""

    @abstractmethod
    def cancel(self, reason: str, *, timed_out: bool) -> None:
        """Have it end."""

    @abstractmethod
    def grant(self, count: int) -> None:
        """Let it yield more."""

    @abstractmethod
    def entries(
        self, codec: str, sizes: Sequence[int], payload: Payload, *, streamed: bool
    ) -> list[Entry]:
        """The values in a payload."""

    def on_log(self, line: Line) -> None:
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
            found = self.entries(codec, sizes, payload, streamed=streamed)
            self.run.on_values(found, payload)

    def on_queued(self) -> None:
        """The agent that hands out the slots says that the call waits."""
        self.run.sink.on_queued()

    def on_begun(self) -> None:
        """And now it runs."""
        self.run.sink.on_begun()

    def on_failing(self, failure: bytes) -> None:  # noqa: B027  # neither a worker nor a peer says it
        """Nothing runs after that."""

    def on_returned(self) -> None:  # noqa: B027  # no part stands in line
        """It is to run elsewhere."""

    def end(self, failures: Sequence[dict[str, Any]]) -> None:
        if not self.is_over:
            self.close()
            self.run.fail(failures)

    def close(self) -> None:
        """Nothing more is expected of it."""
        self.is_over = True
        self.run.left -= 1


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
    """A call on the ranks of other pods, of which the first passes it on."""

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
        )
        self._call = run.group.peers.call(self._member, request, payload.view, self)

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
        others = first.pop("other_errors", [])
        if first.get("rank") is None and not first.get("pod_name"):
            first["pod_name"] = self._member.pod
        self.end([first | {"started": True}, *others])

    def on_lost(self, error: KubetorchError) -> None:
        group, request = self.run.group, self.run.request
        alive = [node for node in self.nodes if node not in group.lost(self.nodes)]
        if is_tolerant(request) and alive in ([], [self.nodes[0]]):
            # Whoever is not there any more has no value, and that is no error.
            if not self.is_over:
                self.close()
                self.run.on_values([], OwnedPayload(b""))
        elif group.is_monitored and group.lost(self.nodes[:1]):
            self.end([self.run.describe(group.membership_error(), None, None)])
        elif isinstance(error, AgentDiedError) and group.is_monitored:
            # Its reason comes from the controller.
            asyncio.get_running_loop().call_later(NEWS, self._give_up, error)
        else:
            self.end([self.run.describe(error, None, self._member.pod)])

    def _give_up(self, error: AgentDiedError) -> None:
        changed = self.run.group.membership_error({self._member.pod: error.reason})
        self.end([self.run.describe(changed, None, None)])


# ------------------------------------------------------------------------------------- selection


def is_tolerant(request: Open) -> bool:
    """True if a call runs on the nodes that are there."""
    return request.workers == "ready"


def is_for_any(request: Open) -> bool:
    """True if a call runs on whichever node is least busy."""
    return request.workers == "any" if request.part is None else request.part.is_any


def select(
    workers: str | Sequence[int | str] | None,
    members: Sequence[Member],
    lost: Collection[int],
) -> tuple[int, ...]:
    """The nodes that `workers=` means, unless it is any."""
    everyone = range(len(members))
    if workers is None:
        return tuple(everyone)
    if workers == "ready":
        return tuple(one for one in everyone if one not in lost)
    if isinstance(workers, str):
        found = tuple(
            one for one in everyone if workers in members[one].host or workers in members[one].pod
        )
        if not workers or not found:
            raise _not_found(workers, members)
        return found
    if not workers:
        raise SpecError(
            "Invalid worker specification: []. It names no worker", hint="leave workers= out"
        )
    return tuple(sorted({node for one in workers for node in _named(one, members)}))


def _named(one: int | str, members: Sequence[Member]) -> list[int]:
    if isinstance(one, str) and not one.isdecimal():
        found = [
            node
            for node, member in enumerate(members)
            if one in (member.host, member.pod, urlsplit(member.url).netloc)
        ]
        if not found and not any(mark in one for mark in ".:"):
            raise SpecError(
                f"Invalid worker specification: {one!r}",
                hint="a rank of a node, the address of a pod, or its name: " + _listed(members),
            )
        if not found:
            raise _not_found(one, members)
        return found
    if isinstance(one, bool) or not isinstance(one, (int, str)):
        raise SpecError(f"Invalid worker specification: {one!r}")
    index = int(one)
    if not 0 <= index < len(members):
        raise SpecError(
            f"Worker index {index} out of range. Valid range: 0-{len(members) - 1}",
            hint="workers=[...] counts pods, not ranks",
        )
    return [index]


def _not_found(text: str, members: Sequence[Member]) -> SpecError:
    return SpecError(f"Worker IP '{text}' not found in the world: {_listed(members)}")


def _listed(members: Sequence[Member]) -> str:
    known = ", ".join(f"{one.pod} ({one.host})" for one in members[:20])
    return known + (f" and {len(members) - 20} more" if len(members) > 20 else "")


# -------------------------------------------------------------------------------------- failures


def _order(failure: Mapping[str, Any]) -> tuple[int, float]:
    """The kind of a failure, those nearest to the cause first; then its rank."""
    rank = failure.get("rank")
    code, message = failure.get("code"), str(failure.get("message"))
    at = -1.0 if rank is None else float(rank)
    if code in _LOSSES:
        return _LOSS, at
    if code in (WorkerDiedError.code, OutOfMemoryError.code):
        return _DEATH, at
    if code in (CallCancelledError.code, WorkerRecycledError.code):
        return _RECALL, at
    # A pod that takes no calls is about to be lost, most likely.
    is_consequence = code == CallRefusedError.code or _BROKEN.search(message)
    return (_CONSEQUENCE if is_consequence else _OWN), at


def combine(failures: Sequence[dict[str, Any]]) -> bytes:
    """The failure of a call, given those of its ranks: the first that is no consequence."""
    first, *others = sorted(failures, key=_order)
    seen = {first.get("code")} if first.get("rank") is None else set()
    attached: list[dict[str, Any]] = []
    room = ATTACHED_BYTES
    for one in others:
        if one.get("rank") is None and one.get("code") in seen:
            continue  # the same loss, as another pod noticed it
        if _order(one)[0] == _RECALL:
            continue  # it did not fail, and was cancelled since the others have
        size = len(json.dumps(one, default=repr))
        if len(attached) < ATTACHED and size <= room:
            room -= size
            attached.append(one)
    state = dict(first.get("state") or {})
    notes = [*(state.get("__notes__") or []), _note(first, others)]
    found = {**first, "other_errors": attached, "state": state | {"__notes__": notes}}
    return exceptions.parse(found).to_json()


def _note(first: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    own = [one for one in others if _order(one)[0] < _RECALL]
    text = f"on {_place(first)}"
    if not own:
        return text
    shown = "; ".join(
        f"{_place(one)}: {one.get('error_type')}: {str(one.get('message'))[:200]}"
        for one in own[:5]
    )
    more = f"; and {len(own) - 5} more" if len(own) > 5 else ""
    return f"{text}; failed with it: {shown}{more} (see .other_errors)"


def _place(failure: Mapping[str, Any]) -> str:
    rank, pod = failure.get("rank"), failure.get("pod_name")
    if rank is None:
        return f"pod {pod}" if pod else "the service"
    return f"rank {rank} in pod {pod}" if pod else f"rank {rank}"


# -------------------------------------------------------------------------------------- payloads


def _share(payload: Payload, count: int) -> list[Payload]:
    """The arguments for so many workers of a pod: large ones lie in memory once."""
    view = payload.view
    if count > 1 and len(view) > INLINE:
        stored = payload if isinstance(payload, Memory) else None
        if stored is None:
            with contextlib.suppress(OSError, MemoryError):
                stored = memory.allocate(len(view))
                stored.write(0, view)
        if stored is not None:
            return [stored.share() for _ in range(count)]
    if count == 1:
        return [shared(payload)]
    return [OwnedPayload(view) for _ in range(count)]


def _together(entries: Sequence[Entry]) -> tuple[tuple[int, ...], Payload]:
    """One payload with the values of several ranks."""
    segments = rank_values.pack(entries)
    sizes = tuple(len(one) for one in segments)
    _, total = codecs.layout(sizes)
    if total >= _LARGE:
        with contextlib.suppress(OSError, MemoryError):
            stored = memory.allocate(total)
            at = 0
            for piece in codecs.join(segments):
                stored.write(at, piece)
                at += len(piece)
            return sizes, stored
    return sizes, OwnedPayload(b"".join(codecs.join(segments)))
