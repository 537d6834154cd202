"""Which pods are the world of a distributed service: events in, effects out, no I/O.

    Wanted ──► gathering ──(a quorum is connected)──► Formed: a numbered epoch of one generation
                  ▲  └────(time is over)───────────► NotFormed
                  │
                  └── Regroup, or nobody is left of it, or a member is lost before it ever served

Nothing else changes the members of a world. One that is lost stays in it, and is announced once
with a reason, which may be put right later. While a generation is rolled out the world of the one
before is kept: it is announced again if the new one is given up.

A pod is lost for certain when its backend says so or its agent is another process than before. One
that is merely silent, or whose session ended, is *suspected*: other members are asked to reach it,
and it is lost if none of them does. Nothing is concluded from a time in which this process did not
run, or had just started, nor without a member that could be asked. One whose agent stops still runs
its calls, and is a member of no later world.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from kubetorch.controller.backends.base import DELETED, PodStatus
from kubetorch.errors import KubetorchError, QuorumError, SpecError
from kubetorch.wire.messages import Ending, LostMember, Member, World

#: Seconds between two `Tick`s.
TICK = 0.25
#: A longer time between two of them, in seconds, is one in which this process did not run.
STALL = TICK + 1.0
#: Seconds without a word after which a member is suspected.
SILENCE = 1.25
#: Seconds after the start, and after a stall, in which nobody is suspected.
STARTING, RESUMING = 3.0, 1.0
#: Seconds that members have to say whether they reach a suspect, and how many are asked.
PROBE_TIME, PROBERS = 1.2, 3
#: Seconds that the backend has to say why an agent is gone whose session has ended.
KNOWING = 0.5
#: Seconds after the begin of a session in which a backend may still report the agent before.
LAGGING = 3.0
#: Members that are looked at to find these, and suspects that are added at a time.
_LOOKED_AT, _SUSPECTED = 64, 500
#: Seconds that are given to the other pods once a quorum is there.
SETTLING = 2.0
#: Bytes that kept worlds may have.
_KEPT_LIMIT = 64 * 1024 * 1024
#: Phases of pods that run calls for a while, and are no part of what is to come.
_ENDING = ("Terminating", "Failed")
#: The agent of a pod ended; the same, and another one has taken its place; nobody reaches it.
AGENT_DIED, AGENT_RESTARTED, UNREACHABLE = "AgentDied", "AgentRestarted", "unreachable"
#: Reasons that give way to what is known later, those that say least first.
_PROVISIONAL = (UNREACHABLE, AGENT_RESTARTED, AGENT_DIED, DELETED.reason)


class Plan(msgspec.Struct, frozen=True):
    """The demands of a generation on its world: so many pods, of which a quorum suffices.

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


class Wanted(msgspec.Struct, frozen=True):
    """A world of this plan is wanted, of these pods; without a plan, none."""

    plan: Plan | None
    pods: frozenset[str]


class PodsChanged(msgspec.Struct, frozen=True):
    pods: Sequence[PodStatus]


class Connected(msgspec.Struct, frozen=True):
    """A session of a pod began; its agent answers here, and is this process."""

    pod: str
    url: str
    incarnation: str


class Disconnected(msgspec.Struct, frozen=True):
    pod: str


class Stopping(msgspec.Struct, frozen=True):
    """The agent of a pod takes no more calls, and ends with those that run."""

    pod: str


class Regroup(msgspec.Struct, frozen=True):
    """A pod asks for a world that is newer than this epoch."""

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
    """Time went on."""


Event = Wanted | PodsChanged | Connected | Disconnected | Stopping | Regroup | Probed | Tick

# ------------------------------------------------------------------------------------- effects


class Formed(msgspec.Struct, frozen=True):
    """A new world was formed: store the world, then announce it."""

    world: World


class Announce(msgspec.Struct, frozen=True):
    """The lost members of the world have changed, or the world itself."""


class NotFormed(msgspec.Struct, frozen=True):
    """The generation cannot be launched: there is no world for it."""

    generation: int
    error: KubetorchError


class Refuse(msgspec.Struct, frozen=True):
    """No new world can be formed for this request of a pod."""

    pod: str
    id: str
    error: KubetorchError


class Repeat(msgspec.Struct, frozen=True):
    """Send a pod the world, which is newer than the world of its request."""

    pod: str


class Ask(msgspec.Struct, frozen=True):
    """Order a pod to try if it reaches an agent."""

    pod: str
    id: str
    url: str


Effect = Formed | Announce | NotFormed | Refuse | Repeat | Ask


class _Agent(msgspec.Struct):
    url: str
    incarnation: str
    heard: float
    since: float
    is_stopping: bool = False


class _Request(msgspec.Struct, frozen=True):
    pod: str
    is_quorum_awaited: bool
    deadline: float


class _Suspect(msgspec.Struct):
    """A member that others try to reach."""

    id: str
    until: float
    answers: dict[str, bool | None]
    # From when on it is lost: one whose session ended, unlike a silent one, is certain to be gone.
    certain: float | None = None


class _State:
    """A world, with what is looked up in it."""

    def __init__(self, world: World, restarts: Mapping[str, int] | None = None) -> None:
        self.world = world
        #: How often the agents of members had been started again when it was formed.
        self.restarts = restarts or {}
        self.index = {member.pod: at for at, member in enumerate(world.members)}
        self.lost = {one.member.pod: one for one in world.lost}

    @property
    def is_empty(self) -> bool:
        return len(self.lost) == len(self.index)

    def member(self, pod: str) -> Member | None:
        """The member that a pod is; `None` when it is none, or lost."""
        at = self.index.get(pod)
        return None if at is None or pod in self.lost else self.world.members[at]

    def lose(self, losses: Mapping[str, Ending]) -> bool:
        """Take over that pods are lost, and why; whether anything is different."""
        changed = {
            pod: LostMember(self.world.members[self.index[pod]], ending.reason, ending.message)
            for pod, ending in losses.items()
            if pod in self.index
        }
        changed = {pod: one for pod, one in changed.items() if self.lost.get(pod) != one}
        if changed:
            self.lost |= changed
            self.world = replace(self.world, lost=tuple(self.lost.values()))
        return bool(changed)


class Rendezvous:
    """The state of one workload's world.

    Args:
        name: The workload.
        ports: Chooses the ports of a world of these members; raises what is in the way of it.
        now: The time.
        kept: What `worlds` had when an earlier controller kept it.
    """

    def __init__(
        self,
        name: str,
        *,
        ports: Callable[[Plan, Sequence[Member]], tuple[int, ...]],
        now: float,
        kept: Sequence[World] = (),
    ) -> None:
        #: Why pods are missing, if that is known.
        self.trouble = ""
        self._name = name
        self._ports = ports
        self._plan: Plan | None = None
        self._pods: Mapping[str, PodStatus] = {}
        self._eligible: frozenset[str] = frozenset()
        self._agents: dict[str, _Agent] = {}
        # Those of the eligible that are connected, and not cut off from the others.
        self._here: set[str] = set()
        #: Pods that are connected, and that nobody reached, until they say something.
        self.cut_off: set[str] = set()
        # When others reached which.
        self._reached: dict[str, float] = {}
        # By generation: the wanted one, and the one that served before.
        self._states = {world.generation: _State(world) for world in kept}
        self._epoch = max((world.epoch for world in kept), default=0)
        self._requests: dict[str, _Request] = {}
        self._suspects: dict[str, _Suspect] = {}
        self._round = 0
        self._deadline: float | None = None
        self._settled: float | None = None
        # From when on this process has run without a break, and from when on it concludes anything.
        self._ticked = self._running = now
        self._trusted = now + STARTING

    # -------------------------------------------------------------------------------- questions

    @property
    def is_wanted(self) -> bool:
        return self._plan is not None

    @property
    def world(self) -> World | None:
        """The world that pods are notified of."""
        state = self._state
        return None if state is None else state.world

    @property
    def worlds(self) -> list[World]:
        """All that is to be kept, so that a later controller goes on with it."""
        return [state.world for state in self._states.values()]

    @property
    def _state(self) -> _State | None:
        if self._plan is None:
            return None
        return self._states.get(self._plan.generation) or self._states.get(self._plan.good)

    @property
    def has_losses(self) -> bool:
        """True if calls fail because members are lost."""
        return self._state is not None and bool(self._state.lost)

    @property
    def needed(self) -> frozenset[str] | None:
        """The pods that have to serve, where a quorum suffices; `None` where all have to."""
        plan = self._plan
        if plan is None or plan.quorum >= plan.workers:
            return None
        state = self._states.get(plan.generation)
        return frozenset() if state is None else frozenset(state.index.keys() - state.lost.keys())

    def can_do_without(self, failed: int) -> bool:
        """True if so many of the pods need not start."""
        plan = self._plan
        return plan is not None and plan.workers - failed >= plan.quorum

    def no_quorum(self, generation: int) -> QuorumError | None:
        """Why a generation has no world yet."""
        plan = self._plan
        if plan is None or plan.generation != generation or generation in self._states:
            return None
        return self._no_quorum(plan)

    def _missing(self) -> str:
        """The pods that are not there, in words."""
        waits = [
            f"pod {name}: {pod.reason or 'its agent has not connected'}"
            for name, pod in self._pods.items()
            if name in self._eligible and name not in self._here
        ]
        lacking = 0 if self._plan is None else self._plan.workers - len(self._eligible)
        if lacking > 0:
            why = f": {self.trouble}" if self.trouble else ""
            number = "is" if lacking == 1 else "are"
            waits.append(f"{lacking} of the pods {number} not there yet{why}")
        return "; ".join(waits)

    # ----------------------------------------------------------------------------------- events

    def heard(self, pod: str, now: float) -> None:
        """A pod has said something; called for each message."""
        agent = self._agents.get(pod)
        if agent is not None:
            agent.heard = now
            self._suspects.pop(pod, None)
            if pod in self.cut_off:
                self.cut_off.discard(pod)
                self._count(pod)

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects: list[Effect] = []
        match event:
            case Wanted(plan, pods):
                effects += self._want(plan, pods, now)
            case PodsChanged(pods):
                effects += self._take_pods({pod.name: pod for pod in pods}, now)
            case Connected(pod, url, incarnation):
                effects += self._connect(pod, _Agent(url, incarnation, now, now))
            case Disconnected(pod):
                self._agents.pop(pod, None)
                self._here.discard(pod)
                effects += self._take_pods(self._pods, now)
                effects += self._suspect([pod], now, certain=now + KNOWING)
            case Stopping(pod):
                self._stop(pod)
            case Regroup():
                effects += self._take_request(event, now)
            case Probed():
                effects += self._take_answer(event, now)
            case Tick():
                effects += self._tick(now)
        effects += self._form(now)
        return effects

    def _want(self, plan: Plan | None, pods: frozenset[str], now: float) -> Iterable[Effect]:
        before, told = self._plan, self._state
        self._plan, self._eligible = plan, pods
        self._here = {pod for pod in pods if self._is_here(pod)}
        if plan is None:
            self._suspects.clear()
            requests, self._requests = self._requests, {}
            error = self._not_distributed()
            refused = [Refuse(one.pod, id, error) for id, one in requests.items()]
            return [*refused, *([Announce()] if told is not None else [])]
        if before is None or before.generation != plan.generation:
            self._settled = None
            self._deadline = now + plan.timeout
            kept = (plan.generation, plan.good)
            self._states = {number: one for number, one in self._states.items() if number in kept}
        elif before.good != plan.good:
            self._states = {n: one for n, one in self._states.items() if n == plan.generation}
        if not plan.is_launch:
            self._deadline = None
        return [Announce()] if self._state is not told else []

    def _take_pods(self, pods: Mapping[str, PodStatus], now: float) -> Iterable[Effect]:
        before, self._pods = self._pods, pods
        self._here = {pod for pod in self._eligible if pod in pods and self._is_here(pod)}
        self.cut_off &= pods.keys()
        known = {pod for state in self._states.values() for pod in state.index}
        losses = {}
        for name in known:
            ending = _loss(before.get(name), pods.get(name), is_new=self._is_new(name, now))
            if ending is not None:
                losses[name] = ending
        return [*self._lose(losses), *self._explain(pods)]

    def _is_new(self, pod: str, now: float) -> bool:
        """True if the agent connected so lately that its backend may not know of the pod."""
        agent = self._agents.get(pod)
        return agent is not None and now - agent.since < LAGGING

    def _explain(self, pods: Mapping[str, PodStatus]) -> Iterable[Effect]:
        """Put right why members were lost whose agents were started again meanwhile."""
        is_changed = False
        for state in self._states.values():
            better = {}
            for name, known in state.lost.items():
                now, before = pods.get(name), state.restarts.get(name)
                ending = None if now is None else now.last_ending
                is_next = now is not None and before is not None and now.restarts == before + 1
                if ending and is_next and _weight(ending.reason) > _weight(known.reason):
                    better[name] = ending
            if state.lose(better):
                is_changed = is_changed or state is self._state
        return [Announce()] if is_changed else []

    def _connect(self, pod: str, agent: _Agent) -> Iterable[Effect]:
        self._agents[pod] = agent
        self._reached.pop(pod, None)
        self._suspects.pop(pod, None)
        self.cut_off.discard(pod)
        self._count(pod)
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
            self._count(pod)

    def _lose(self, losses: Mapping[str, Ending]) -> Iterable[Effect]:
        """Take over losses of this moment, unless a better reason is known already."""
        is_changed = False
        for state in self._states.values():
            better = {}
            for pod, ending in losses.items():
                known = state.lost.get(pod)
                if known is None or self._is_better(ending, known):
                    better[pod] = ending
            if state.lose(better):
                is_changed = is_changed or state is self._state
        for pod in losses:
            self._suspects.pop(pod, None)
        return [Announce()] if is_changed else []

    def _is_better(self, ending: Ending, known: LostMember) -> bool:
        """True if this ending explains a loss better than the first one."""
        agent = self._agents.get(known.member.pod)
        if agent is not None and agent.incarnation != known.member.incarnation:
            return False  # it is about the agent that came after
        return _weight(ending.reason) > _weight(known.reason)

    # -------------------------------------------------------------------------------- requests

    def _take_request(self, asked: Regroup, now: float) -> Iterable[Effect]:
        if self._plan is None:
            return [Refuse(asked.pod, asked.id, self._not_distributed())]
        world = self.world
        if world is not None and world.epoch > asked.epoch and not world.lost:
            # Another request was answered meanwhile, or this one: calls that ask at the same time
            # do not end each other.
            return [Repeat(asked.pod)]
        known = self._requests.get(asked.id)
        deadline = now + self._plan.timeout if known is None else known.deadline
        self._requests[asked.id] = _Request(asked.pod, asked.is_quorum_awaited, deadline)
        return ()

    def _not_distributed(self) -> KubetorchError:
        return SpecError(
            f"{self._name} is not distributed, so it has no ranks to start again",
            hint="kt.Compute(...).distribute(...) makes it so",
        )

    # --------------------------------------------------------------------------------- forming

    def _is_here(self, pod: str) -> bool:
        agent = self._agents.get(pod)
        if agent is None or agent.is_stopping or pod in self.cut_off:
            return False
        status = self._pods.get(pod)
        return status is not None and status.phase not in _ENDING

    def _url(self, pod: str) -> str:
        """The URL of an agent; the agent's own report counts until its backend knows the URL."""
        return self._pods[pod].url or self._agents[pod].url

    def _count(self, pod: str) -> None:
        if pod in self._eligible and self._is_here(pod):
            self._here.add(pod)
        else:
            self._here.discard(pod)

    def _is_needed(self, plan: Plan) -> bool:
        state = self._states.get(plan.generation)
        if state is None or self._requests or state.is_empty:
            return True
        return plan.is_launch and bool(state.lost)

    def _form(self, now: float) -> Iterable[Effect]:
        plan = self._plan
        if plan is None or not self._is_needed(plan):
            self._settled = None
            return ()
        if not self._is_enough(plan, now):
            return ()
        here = sorted((self._pods[pod].ordinal, pod) for pod in self._here)[: plan.workers]
        members = tuple(
            Member(pod, ordinal, self._url(pod), self._agents[pod].incarnation)
            for ordinal, pod in here
        )
        requests, self._requests = self._requests, {}
        self._settled = self._deadline = None
        try:
            ports = self._ports(plan, members)
        except KubetorchError as error:
            refused = [Refuse(one.pod, id, error) for id, one in requests.items()]
            return [*refused, *([NotFormed(plan.generation, error)] if plan.is_launch else [])]
        self._epoch += 1
        world = World(
            epoch=self._epoch,
            generation=plan.generation,
            members=members,
            processes=plan.processes,
            ports=ports,
        )
        restarts = {pod: self._pods[pod].restarts for _, pod in here}
        self._states[plan.generation] = _State(world, restarts)
        self._suspects.clear()
        return [Formed(world)]

    def _is_enough(self, plan: Plan, now: float) -> bool:
        """True if a world can be formed of the connected pods."""
        count = len(self._here)
        if count >= plan.workers:
            return True
        if count and any(not one.is_quorum_awaited for one in self._requests.values()):
            return True
        if count < plan.quorum:
            self._settled = None
            return False
        if self._settled is None:
            self._settled = now + SETTLING
        return now >= self._settled

    def _expire(self, now: float) -> Iterable[Effect]:
        """Give up what has waited for a quorum for too long."""
        plan = self._plan
        if plan is None:
            return
        for id, one in list(self._requests.items()):
            if now >= one.deadline:
                del self._requests[id]
                yield Refuse(one.pod, id, self._no_quorum(plan))
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            if plan.generation not in self._states:
                yield NotFormed(plan.generation, self._no_quorum(plan))

    def _no_quorum(self, plan: Plan) -> QuorumError:
        return QuorumError(
            f"{self._name} has {len(self._here)} of the {plan.quorum} pods that it needs after "
            f"{plan.timeout:.0f} s: {self._missing()}",
            hint="distribute(quorum_workers=..., quorum_timeout=...) says how many are needed, and "
            "how long they are waited for",
        )

    # -------------------------------------------------------------------------------- suspicion

    def _tick(self, now: float) -> Iterable[Effect]:
        if not 0.0 <= now - self._ticked <= STALL:
            # What happened meanwhile is not known: nobody received what pods sent.
            self._running, self._trusted = now, now + RESUMING
            self._suspects.clear()
        self._ticked = now
        effects = list(self._expire(now))
        effects += self._conclude(now)
        state = self._state
        if state is not None and now >= self._trusted:
            silent = [
                member.pod
                for member in state.world.members
                if member.pod not in state.lost
                and member.pod not in self._suspects
                and self._silence(member.pod, now) > SILENCE
            ]
            effects += self._suspect(silent[:_SUSPECTED], now)
        return effects

    def _silence(self, pod: str, now: float) -> float:
        """Seconds for which a pod has said nothing; not connected, it says nothing at all."""
        agent = self._agents.get(pod)
        heard = self._reached.get(pod, 0.0) if agent is None else agent.heard
        return now - max(self._running, heard)

    def _suspect(
        self, pods: Sequence[str], now: float, certain: float | None = None
    ) -> Iterable[Effect]:
        """Order other pods to try to reach these pods."""
        state = self._state
        if state is None or now < self._trusted:
            return
        for pod in pods:
            member = state.member(pod)
            if member is None or pod in self._suspects:
                continue
            self._round += 1
            others = self._probers(state, pod, now)
            if others:
                until, answers = now + PROBE_TIME, dict.fromkeys(others)
                suspect = _Suspect(f"{self._round}", until, answers, certain)
                self._suspects[pod] = suspect
                for other in others:
                    yield Ask(other, f"{suspect.id} {pod}", member.url)

    def _probers(self, state: _State, pod: str, now: float) -> list[str]:
        """Members that can say whether a pod is there: spread over the world, others each time."""
        members = state.world.members
        count, start = len(members), state.index[pod] + self._round
        step = count // _LOOKED_AT + 1
        found: list[str] = []
        for at in range(min(count, _LOOKED_AT)):
            one = members[(start + at * step) % count].pod
            if one != pod and one not in found and self._may_ask(state, one, now):
                found.append(one)
            if len(found) == PROBERS:
                break
        return found

    def _may_ask(self, state: _State, pod: str, now: float) -> bool:
        agent = self._agents.get(pod)
        is_there = agent is not None and pod not in state.lost
        return is_there and self._silence(pod, now) <= SILENCE

    def _take_answer(self, answer: Probed, now: float) -> Iterable[Effect]:
        id, _, pod = answer.id.partition(" ")
        suspect = self._suspects.get(pod)
        if suspect is None or suspect.id != id or answer.pod not in suspect.answers:
            return ()
        if answer.is_reached:
            del self._suspects[pod]
            agent = self._agents.get(pod)
            if agent is not None:
                agent.heard = now
            else:
                self._reached[pod] = now
            return ()
        suspect.answers[answer.pod] = False
        return self._conclude(now)

    def _conclude(self, now: float) -> Iterable[Effect]:
        """Lose the suspects that nobody reached; what nobody answered about is asked again."""
        lost = {}
        for pod, suspect in list(self._suspects.items()):
            answers = suspect.answers.values()
            is_over = now >= suspect.until
            if None not in answers or (is_over and False in answers):
                if suspect.certain is not None and now < suspect.certain:
                    continue
                message = "neither the controller nor other pods reach it"
                reason = UNREACHABLE if suspect.certain is None else AGENT_DIED
                lost[pod] = Ending(reason=reason, message=message)
                self.cut_off.add(pod)
                self._here.discard(pod)
            elif is_over:
                del self._suspects[pod]
        return self._lose(lost)


def _loss(before: PodStatus | None, now: PodStatus | None, *, is_new: bool) -> Ending | None:
    """Why a pod cannot be in the world any more that it was in; `None` if it can."""
    if now is None or (before is not None and before.uid != now.uid):
        return (before.ending if before is not None else None) or DELETED
    if now.phase == "Terminating":
        return now.ending or Ending(reason=DELETED.reason, message="it is being ended")
    if (now.is_down and not is_new) or now.phase == "Failed":
        return now.ending or Ending(reason=AGENT_DIED, message=now.reason)
    return None


def _weight(reason: str) -> int:
    """The weight of a reason: a higher one explains more."""
    return _PROVISIONAL.index(reason) if reason in _PROVISIONAL else len(_PROVISIONAL)


def pack(worlds: Sequence[World]) -> str:
    """Worlds as a text to be kept: short, for each pod of thousands has a part in it."""
    return base64.b85encode(zlib.compress(msgspec.json.encode(worlds), 1)).decode()


def unpack(text: str) -> tuple[World, ...]:
    """The result of `pack` undone; nothing if the text is damaged."""
    try:
        data = zlib.decompressobj().decompress(base64.b85decode(text), _KEPT_LIMIT)
        return msgspec.json.decode(data, type=tuple[World, ...])
    except (ValueError, zlib.error):
        return ()
