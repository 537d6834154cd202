"""The world of a distributed service and its members: events in, effects out, no I/O.

    PlanChanged ──► gathering ──(a quorum is connected)──► Formed: an epoch of one generation
                     ▲  └────(time is over)───────────► NotFormed
                     │
                     └── Regroup, or all members are lost, or one is lost before the world served

Nothing else changes the members of a world. A lost member stays in it, and its loss is announced
once with a reason, which may be put right later. While a generation is rolled out, the world of the
generation before is kept: it is announced again if the new generation is given up.

A pod is lost for certain when its backend reports it or its agent is another process than before. A
pod that is merely silent, or whose session ended, is *suspected*: other members are ordered to
reach it, and it is lost if none of them does. Nothing is concluded from a time in which this
process did not run, or had just started, nor without a member that could be asked. A pod whose
agent stops still runs its calls, and is a member of no later world.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from kubetorch.controller.backends.base import DELETED, PodStatus
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.errors import KubetorchError, QuorumError, SpecError
from kubetorch.wire.messages import Ending, LostMember, Member, World

#: Phases of pods that may still run calls, and are members of no later world.
_ENDING = ("Terminating", "Failed")
#: Reasons of a loss: the agent of a pod ended; another agent took its place; no prober reaches it.
AGENT_DIED, AGENT_RESTARTED, UNREACHABLE = "AgentDied", "AgentRestarted", "unreachable"
#: Reasons that a later one replaces, from the one that explains least to the best.
_PROVISIONAL = (UNREACHABLE, AGENT_RESTARTED, AGENT_DIED, DELETED.reason)


class Plan(msgspec.Struct, frozen=True):
    """The demands of a generation on its world: its number of pods, of which a quorum suffices.

    `good` is the generation that all pods served last.
    """

    generation: int
    workers: int
    quorum: int
    timeout: float
    processes: int = 1
    good: int = 0

    @property
    def is_launch(self) -> bool:
        """True if the generation has not served yet."""
        return self.good != self.generation


# -------------------------------------------------------------------------------------- events


class PlanChanged(msgspec.Struct, frozen=True):
    """The service needs a world of this plan, of these pods; without a plan, it needs none."""

    plan: Plan | None
    pods: frozenset[str]


class PodsChanged(msgspec.Struct, frozen=True):
    pods: Sequence[PodStatus]


class Connected(msgspec.Struct, frozen=True):
    """A session of a pod began: the URL of its agent, and the incarnation, one for each process."""

    pod: str
    url: str
    incarnation: str


class Disconnected(msgspec.Struct, frozen=True):
    pod: str


class Stopping(msgspec.Struct, frozen=True):
    """The agent of a pod takes no more calls, and ends after its running calls."""

    pod: str


class Regroup(msgspec.Struct, frozen=True):
    """A pod requests a world that is newer than this epoch."""

    pod: str
    id: str
    epoch: int
    is_quorum_awaited: bool = True


class Probed(msgspec.Struct, frozen=True):
    """A pod has tried to reach a suspect."""

    pod: str
    id: str
    is_reached: bool


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


Event = PlanChanged | PodsChanged | Connected | Disconnected | Stopping | Regroup | Probed | Tick

# ------------------------------------------------------------------------------------- effects


class Formed(msgspec.Struct, frozen=True):
    """A new world was formed: store the world, then announce it."""

    world: World


class Announce(msgspec.Struct, frozen=True):
    """The lost members of the world have changed, or the world itself."""


class NotFormed(msgspec.Struct, frozen=True):
    """The generation cannot be launched: no world could be formed for it."""

    generation: int
    error: KubetorchError


class Refuse(msgspec.Struct, frozen=True):
    """No new world can be formed for this request of a pod."""

    pod: str
    id: str
    error: KubetorchError


class SendWorld(msgspec.Struct, frozen=True):
    """Send a pod the world, which is newer than the world of its request."""

    pod: str


class OrderProbe(msgspec.Struct, frozen=True):
    """Order a pod to try whether it reaches an agent."""

    pod: str
    id: str
    url: str


Effect = Formed | Announce | NotFormed | Refuse | SendWorld | OrderProbe


class _Agent(msgspec.Struct):
    url: str
    #: Differs for each process of an agent.
    incarnation: str
    last_message_time: float
    connected_since: float
    is_stopping: bool = False


class _Request(msgspec.Struct, frozen=True):
    pod: str
    is_quorum_awaited: bool
    deadline: float


class _Suspect(msgspec.Struct):
    """A member that other members try to reach."""

    id: str
    #: When the probers' time is over.
    deadline: float
    #: By prober: whether it reached the suspect; `None` until it has answered.
    answers: dict[str, bool | None]
    #: The time before which it is not lost; `None` for a silent member with a session.
    lost_from: float | None = None


class _WorldState:
    """A world, with its members by pod."""

    def __init__(self, world: World, restarts: Mapping[str, int] | None = None) -> None:
        self.world = world
        #: By pod: the restarts of its agent when the world was formed.
        self.restarts = restarts or {}
        #: By pod: its position in `world.members`.
        self.index = {member.pod: position for position, member in enumerate(world.members)}
        self.lost = {lost_member.member.pod: lost_member for lost_member in world.lost}

    @property
    def is_empty(self) -> bool:
        return len(self.lost) == len(self.index)

    def member(self, pod: str) -> Member | None:
        """The member of a pod; `None` when the pod is no member, or lost."""
        position = self.index.get(pod)
        return None if position is None or pod in self.lost else self.world.members[position]

    def lose(self, losses: Mapping[str, Ending]) -> bool:
        """Record the losses of pods with their reasons; returns whether anything changed."""
        changed = {
            pod: LostMember(self.world.members[self.index[pod]], ending.reason, ending.message)
            for pod, ending in losses.items()
            if pod in self.index
        }
        changed = {pod: loss for pod, loss in changed.items() if self.lost.get(pod) != loss}
        if changed:
            self.lost |= changed
            self.world = replace(self.world, lost=tuple(self.lost.values()))
        return bool(changed)


class Rendezvous:
    """The state of one workload's world.

    Args:
        name: The workload.
        ports: Chooses the ports of a world of these members; raises why it has none.
        now: The time.
        stored_worlds: The `worlds` of an earlier controller.
    """

    def __init__(
        self,
        name: str,
        *,
        ports: Callable[[Plan, Sequence[Member]], tuple[int, ...]],
        now: float,
        stored_worlds: Sequence[World] = (),
    ) -> None:
        #: Why pods are missing, if the reason is known.
        self.trouble = ""
        self._name = name
        self._ports = ports
        self._plan: Plan | None = None
        self._pods: Mapping[str, PodStatus] = {}
        self._eligible: frozenset[str] = frozenset()
        self._agents: dict[str, _Agent] = {}
        # The eligible pods that are connected, not stopping, and not cut off from the others.
        self._available: set[str] = set()
        #: Connected pods that no prober reached, until they send a message.
        self.cut_off: set[str] = set()
        # By pod: when a prober reached it last, while it is not connected.
        self._reached_times: dict[str, float] = {}
        # The worlds by generation: of the wanted one, and of the one that served before.
        self._states = {world.generation: _WorldState(world) for world in stored_worlds}
        self._epoch = max((world.epoch for world in stored_worlds), default=0)
        self._requests: dict[str, _Request] = {}
        self._suspects: dict[str, _Suspect] = {}
        self._probe_number = 0
        # When the launch is given up without a quorum; `None` if the generation has served.
        self._deadline: float | None = None
        # When the world is formed of a quorum, without the other pods; `None` without a quorum.
        self._settle_time: float | None = None
        # Since when this process has run without a break, and from when on it suspects members.
        self._last_tick = self._running_since = now
        self._trusted_from = now + TIMING.world_start_grace_seconds

    # -------------------------------------------------------------------------------- questions

    @property
    def has_plan(self) -> bool:
        return self._plan is not None

    @property
    def world(self) -> World | None:
        """The world that pods are notified of."""
        state = self._state
        return None if state is None else state.world

    @property
    def worlds(self) -> list[World]:
        """The worlds that are stored, so that a later controller goes on with them."""
        return [state.world for state in self._states.values()]

    @property
    def _state(self) -> _WorldState | None:
        if self._plan is None:
            return None
        return self._states.get(self._plan.generation) or self._states.get(self._plan.good)

    @property
    def has_losses(self) -> bool:
        """True if calls fail because members are lost."""
        return self._state is not None and bool(self._state.lost)

    @property
    def needed(self) -> frozenset[str] | None:
        """The pods that have to serve, where a quorum suffices; `None` where all pods have to."""
        plan = self._plan
        if plan is None or plan.quorum >= plan.workers:
            return None
        state = self._states.get(plan.generation)
        return frozenset() if state is None else frozenset(state.index.keys() - state.lost.keys())

    def can_do_without(self, failed: int) -> bool:
        """True if a quorum is left without this number of pods."""
        plan = self._plan
        return plan is not None and plan.workers - failed >= plan.quorum

    def no_quorum(self, generation: int) -> QuorumError | None:
        """Why a generation has no world yet; `None` if it has one."""
        plan = self._plan
        if plan is None or plan.generation != generation or generation in self._states:
            return None
        return self._no_quorum(plan)

    def _missing_in_words(self) -> str:
        """The pods that are missing or not connected, and why."""
        waits = [
            f"pod {name}: {pod.reason or 'its agent has not connected'}"
            for name, pod in self._pods.items()
            if name in self._eligible and name not in self._available
        ]
        lacking = 0 if self._plan is None else self._plan.workers - len(self._eligible)
        if lacking > 0:
            why = f": {self.trouble}" if self.trouble else ""
            number = "is" if lacking == 1 else "are"
            waits.append(f"{lacking} of the pods {number} not there yet{why}")
        return "; ".join(waits)

    # ----------------------------------------------------------------------------------- events

    def message_received(self, pod: str, now: float) -> None:
        """A pod has sent a message; called for each one."""
        agent = self._agents.get(pod)
        if agent is not None:
            agent.last_message_time = now
            self._suspects.pop(pod, None)
            if pod in self.cut_off:
                self.cut_off.discard(pod)
                self._update_available(pod)

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects: list[Effect] = []
        match event:
            case PlanChanged(plan, pods):
                effects += self._set_plan(plan, pods, now)
            case PodsChanged(pods):
                effects += self._update_pods({pod.name: pod for pod in pods}, now)
            case Connected(pod, url, incarnation):
                effects += self._connect(pod, _Agent(url, incarnation, now, now))
            case Disconnected(pod):
                self._agents.pop(pod, None)
                self._available.discard(pod)
                effects += self._update_pods(self._pods, now)
                effects += self._suspect([pod], now, lost_from=now + TIMING.backend_report_seconds)
            case Stopping(pod):
                self._stop(pod)
            case Regroup():
                effects += self._add_regroup(event, now)
            case Probed():
                effects += self._add_probe_answer(event, now)
            case Tick():
                effects += self._tick(now)
        effects += self._form(now)
        return effects

    def _set_plan(self, plan: Plan | None, pods: frozenset[str], now: float) -> Iterable[Effect]:
        earlier_plan, earlier_state = self._plan, self._state
        self._plan, self._eligible = plan, pods
        self._available = {pod for pod in pods if self._is_available(pod)}
        if plan is None:
            self._suspects.clear()
            requests, self._requests = self._requests, {}
            error = self._not_distributed()
            refused = [Refuse(request.pod, id, error) for id, request in requests.items()]
            return [*refused, *([Announce()] if earlier_state is not None else [])]
        if earlier_plan is None or earlier_plan.generation != plan.generation:
            self._settle_time = None
            self._deadline = now + plan.timeout
            kept_generations = (plan.generation, plan.good)
            self._states = {n: self._states[n] for n in self._states if n in kept_generations}
        elif earlier_plan.good != plan.good:
            self._states = {n: state for n, state in self._states.items() if n == plan.generation}
        if not plan.is_launch:
            self._deadline = None
        return [Announce()] if self._state is not earlier_state else []

    def _update_pods(self, pods: Mapping[str, PodStatus], now: float) -> Iterable[Effect]:
        earlier_pods, self._pods = self._pods, pods
        self._available = {pod for pod in self._eligible if pod in pods and self._is_available(pod)}
        self.cut_off &= pods.keys()
        member_pods = {pod for state in self._states.values() for pod in state.index}
        losses = {}
        for name in member_pods:
            ending = _ending_of(
                earlier_pods.get(name), pods.get(name), is_new=self._is_new(name, now)
            )
            if ending is not None:
                losses[name] = ending
        return [*self._lose(losses), *self._explain(pods)]

    def _is_new(self, pod: str, now: float) -> bool:
        """True if the agent connected so lately that its backend may not know of the pod."""
        agent = self._agents.get(pod)
        return agent is not None and now - agent.connected_since < TIMING.backend_lag_seconds

    def _explain(self, pods: Mapping[str, PodStatus]) -> Iterable[Effect]:
        """Correct the reasons of losses, when the backend reports how an earlier agent ended."""
        is_changed = False
        for state in self._states.values():
            better = {}
            for name, lost_member in state.lost.items():
                now, before = pods.get(name), state.restarts.get(name)
                ending = None if now is None else now.last_ending
                is_next = now is not None and before is not None and now.restarts == before + 1
                if (
                    ending
                    and is_next
                    and _reason_weight(ending.reason) > _reason_weight(lost_member.reason)
                ):
                    better[name] = ending
            if state.lose(better):
                is_changed = is_changed or state is self._state
        return [Announce()] if is_changed else []

    def _connect(self, pod: str, agent: _Agent) -> Iterable[Effect]:
        self._agents[pod] = agent
        self._reached_times.pop(pod, None)
        self._suspects.pop(pod, None)
        self.cut_off.discard(pod)
        self._update_available(pod)
        for state in self._states.values():
            member = state.member(pod)
            if member is not None and member.incarnation != agent.incarnation:
                ending = Ending(reason=AGENT_RESTARTED, message="its agent was started again")
                return self._lose({pod: ending})
        return ()

    def _stop(self, pod: str) -> None:
        agent = self._agents.get(pod)
        if agent is not None:
            agent.is_stopping = True
            self._update_available(pod)

    def _lose(self, losses: Mapping[str, Ending]) -> Iterable[Effect]:
        """Record losses of this moment, unless a better reason is recorded already."""
        is_changed = False
        for state in self._states.values():
            better = {}
            for pod, ending in losses.items():
                lost_member = state.lost.get(pod)
                if lost_member is None or self._is_better(ending, lost_member):
                    better[pod] = ending
            if state.lose(better):
                is_changed = is_changed or state is self._state
        for pod in losses:
            self._suspects.pop(pod, None)
        return [Announce()] if is_changed else []

    def _is_better(self, ending: Ending, lost_member: LostMember) -> bool:
        """True if this ending explains a loss better than its recorded reason."""
        agent = self._agents.get(lost_member.member.pod)
        if agent is not None and agent.incarnation != lost_member.member.incarnation:
            return False  # it is the ending of the agent that came after
        return _reason_weight(ending.reason) > _reason_weight(lost_member.reason)

    # -------------------------------------------------------------------------------- requests

    def _add_regroup(self, regroup: Regroup, now: float) -> Iterable[Effect]:
        if self._plan is None:
            return [Refuse(regroup.pod, regroup.id, self._not_distributed())]
        world = self.world
        if world is not None and world.epoch > regroup.epoch and not world.lost:
            # Another request was answered meanwhile, or this one: calls that ask at the same time
            # do not end each other.
            return [SendWorld(regroup.pod)]
        earlier_request = self._requests.get(regroup.id)
        deadline = now + self._plan.timeout if earlier_request is None else earlier_request.deadline
        self._requests[regroup.id] = _Request(regroup.pod, regroup.is_quorum_awaited, deadline)
        return ()

    def _not_distributed(self) -> KubetorchError:
        return SpecError(
            f"{self._name} is not distributed, so it has no ranks to start again",
            hint="kt.Compute(...).distribute(...) makes it so",
        )

    # --------------------------------------------------------------------------------- forming

    def _is_available(self, pod: str) -> bool:
        agent = self._agents.get(pod)
        if agent is None or agent.is_stopping or pod in self.cut_off:
            return False
        status = self._pods.get(pod)
        return status is not None and status.phase not in _ENDING

    def _url(self, pod: str) -> str:
        """The URL of an agent: the backend's, and until it has one the agent's own."""
        return self._pods[pod].url or self._agents[pod].url

    def _update_available(self, pod: str) -> None:
        if pod in self._eligible and self._is_available(pod):
            self._available.add(pod)
        else:
            self._available.discard(pod)

    def _is_needed(self, plan: Plan) -> bool:
        state = self._states.get(plan.generation)
        if state is None or self._requests or state.is_empty:
            return True
        return plan.is_launch and bool(state.lost)

    def _form(self, now: float) -> Iterable[Effect]:
        plan = self._plan
        if plan is None or not self._is_needed(plan):
            self._settle_time = None
            return ()
        if not self._is_enough(plan, now):
            return ()
        chosen_pods = sorted((self._pods[pod].ordinal, pod) for pod in self._available)[
            : plan.workers
        ]
        members = tuple(
            Member(
                pod, ordinal, self._url(pod), self._agents[pod].incarnation, self._pods[pod].address
            )
            for ordinal, pod in chosen_pods
        )
        requests, self._requests = self._requests, {}
        self._settle_time = self._deadline = None
        try:
            ports = self._ports(plan, members)
        except KubetorchError as error:
            refused = [Refuse(request.pod, id, error) for id, request in requests.items()]
            return [*refused, *([NotFormed(plan.generation, error)] if plan.is_launch else [])]
        self._epoch += 1
        world = World(
            epoch=self._epoch,
            generation=plan.generation,
            members=members,
            processes=plan.processes,
            ports=ports,
        )
        restarts = {pod: self._pods[pod].restarts for _, pod in chosen_pods}
        self._states[plan.generation] = _WorldState(world, restarts)
        self._suspects.clear()
        return [Formed(world)]

    def _is_enough(self, plan: Plan, now: float) -> bool:
        """True if a world can be formed of the connected pods."""
        count = len(self._available)
        if count >= plan.workers:
            return True
        if count and any(not request.is_quorum_awaited for request in self._requests.values()):
            return True
        if count < plan.quorum:
            self._settle_time = None
            return False
        if self._settle_time is None:
            self._settle_time = now + TIMING.quorum_settle_seconds
        return now >= self._settle_time

    def _expire(self, now: float) -> Iterable[Effect]:
        """Give up requests and launches that have waited for a quorum for too long."""
        plan = self._plan
        if plan is None:
            return
        for id, request in list(self._requests.items()):
            if now >= request.deadline:
                del self._requests[id]
                yield Refuse(request.pod, id, self._no_quorum(plan))
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            if plan.generation not in self._states:
                yield NotFormed(plan.generation, self._no_quorum(plan))

    def _no_quorum(self, plan: Plan) -> QuorumError:
        return QuorumError(
            f"{self._name} has {len(self._available)} of the {plan.quorum} pods that it needs "
            f"after {plan.timeout:.0f} s: {self._missing_in_words()}",
            hint="distribute(quorum_workers=..., quorum_timeout=...) says how many are needed, and "
            "how long they are waited for",
        )

    # -------------------------------------------------------------------------------- suspicion

    def _tick(self, now: float) -> Iterable[Effect]:
        if not 0.0 <= now - self._last_tick <= TIMING.world_stall_seconds:
            # This process was stopped, and received no message meanwhile: silence proves nothing.
            self._running_since, self._trusted_from = now, now + TIMING.world_resume_grace_seconds
            self._suspects.clear()
        self._last_tick = now
        effects = list(self._expire(now))
        effects += self._conclude(now)
        state = self._state
        if state is not None and now >= self._trusted_from:
            silent = [
                member.pod
                for member in state.world.members
                if member.pod not in state.lost
                and member.pod not in self._suspects
                and self._silence(member.pod, now) > TIMING.member_silence_seconds
            ]
            effects += self._suspect(silent[: LIMITS.suspects_per_tick], now)
        return effects

    def _silence(self, pod: str, now: float) -> float:
        """Seconds since the last message of a pod, or since a prober reached it."""
        agent = self._agents.get(pod)
        last_message_time = (
            self._reached_times.get(pod, 0.0) if agent is None else agent.last_message_time
        )
        return now - max(self._running_since, last_message_time)

    def _suspect(
        self, pods: Sequence[str], now: float, lost_from: float | None = None
    ) -> Iterable[Effect]:
        """Order other pods to try to reach these pods."""
        state = self._state
        if state is None or now < self._trusted_from:
            return
        for pod in pods:
            member = state.member(pod)
            if member is None or pod in self._suspects:
                continue
            self._probe_number += 1
            probers = self._probers(state, pod, now)
            if probers:
                deadline, answers = now + TIMING.suspect_probe_seconds, dict.fromkeys(probers)
                suspect = _Suspect(f"{self._probe_number}", deadline, answers, lost_from)
                self._suspects[pod] = suspect
                for prober in probers:
                    yield OrderProbe(prober, f"{suspect.id} {pod}", member.url)

    def _probers(self, state: _WorldState, pod: str, now: float) -> list[str]:
        """Members that try to reach a pod: spread over the world, and different ones each time."""
        members = state.world.members
        count, start = len(members), state.index[pod] + self._probe_number
        step = count // LIMITS.probing_candidate_pods + 1
        probers: list[str] = []
        for offset in range(min(count, LIMITS.probing_candidate_pods)):
            candidate = members[(start + offset * step) % count].pod
            if (
                candidate != pod
                and candidate not in probers
                and self._may_ask(state, candidate, now)
            ):
                probers.append(candidate)
            if len(probers) == LIMITS.probing_pods:
                break
        return probers

    def _may_ask(self, state: _WorldState, pod: str, now: float) -> bool:
        agent = self._agents.get(pod)
        is_there = agent is not None and pod not in state.lost
        return is_there and self._silence(pod, now) <= TIMING.member_silence_seconds

    def _add_probe_answer(self, answer: Probed, now: float) -> Iterable[Effect]:
        id, _, pod = answer.id.partition(" ")
        suspect = self._suspects.get(pod)
        if suspect is None or suspect.id != id or answer.pod not in suspect.answers:
            return ()
        if answer.is_reached:
            del self._suspects[pod]
            agent = self._agents.get(pod)
            if agent is not None:
                agent.last_message_time = now
            else:
                self._reached_times[pod] = now
            return ()
        suspect.answers[answer.pod] = False
        return self._conclude(now)

    def _conclude(self, now: float) -> Iterable[Effect]:
        """Lose the suspects that no prober reached; suspects without answers are probed again."""
        lost = {}
        for pod, suspect in list(self._suspects.items()):
            answers = suspect.answers.values()
            is_over = now >= suspect.deadline
            if None not in answers or (is_over and False in answers):
                if suspect.lost_from is not None and now < suspect.lost_from:
                    continue
                message = "neither the controller nor other pods reach it"
                reason = UNREACHABLE if suspect.lost_from is None else AGENT_DIED
                lost[pod] = Ending(reason=reason, message=message)
                self.cut_off.add(pod)
                self._available.discard(pod)
            elif is_over:
                del self._suspects[pod]
        return self._lose(lost)


def _ending_of(
    earlier_status: PodStatus | None, status: PodStatus | None, *, is_new: bool
) -> Ending | None:
    """How a pod ended that was a member; `None` if it still is one."""
    if status is None or (earlier_status is not None and earlier_status.uid != status.uid):
        return (earlier_status.ending if earlier_status is not None else None) or DELETED
    if status.phase == "Terminating":
        return status.ending or Ending(reason=DELETED.reason, message="it is being ended")
    if (status.is_down and not is_new) or status.phase == "Failed":
        return status.ending or Ending(reason=AGENT_DIED, message=status.reason)
    return None


def _reason_weight(reason: str) -> int:
    """The weight of a reason: a higher one explains more."""
    return _PROVISIONAL.index(reason) if reason in _PROVISIONAL else len(_PROVISIONAL)


def pack(worlds: Sequence[World]) -> str:
    """Worlds as a text to be stored: compressed, since each of thousands of pods is in it."""
    return base64.b85encode(zlib.compress(msgspec.json.encode(worlds), 1)).decode()


def unpack(text: str) -> tuple[World, ...]:
    """The worlds in a text of `pack`; none if the text is damaged."""
    try:
        data = zlib.decompressobj().decompress(base64.b85decode(text), LIMITS.stored_world_bytes)
        return msgspec.json.decode(data, type=tuple[World, ...])
    except (ValueError, zlib.error):
        return ()
