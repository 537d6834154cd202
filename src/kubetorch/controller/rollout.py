"""Which pods run which generation of one workload: events in, effects out, no I/O.

    Deployed ──► undecided ──(every pod serves it)──────────────────────────► Reached
                    └───────(a pod fails it, cannot start, or time is over)─► NotReached

A generation leaves `undecided` once, so each of the two effects comes at most once for it (but see
below), unless a later generation comes before. What a pod should serve is the *target*: the wanted
generation, or the last good one after the wanted one was given up. `Reload` is sent to every
connected pod that serves another generation and was not sent it yet on its connection; so it does
not matter in which order events arrive, nor how often.

A workload without pods may *rest*: its scaler makes some when they are needed. Then a generation
is reached at once, but stays *unproven*: the next pod shows whether it can be served, and if it
cannot, the generation is given up after all, though not for an older one: its deploy was reported
as a success. Such a failure is one of the pods that are there: the next ones begin without it.

An event of one pod costs the same however many pods there are: a workload may have thousands, and
each of them sends messages in every rollout.

A pod that was made from an older template is *retiring*: it serves the last good generation until
the wanted one is reached without it; then the backend ends it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kubetorch.wire.exceptions import Failure

# -------------------------------------------------------------------------------------- events


class Deployed(msgspec.Struct, frozen=True):
    """A generation is wanted; with a failure, its backend has refused it."""

    generation: int
    failure: Failure | None = None


class PodsChanged(msgspec.Struct, frozen=True):
    """The backend has these pods now: those of the wanted template, and retiring ones.

    `expected` is the least number of pods of the wanted template: 0 where a scaler makes pods when
    they are needed, `None` while the number is not known yet. Where not all pods have to serve,
    `needed` has those that have to.
    """

    pods: frozenset[str]
    retiring: frozenset[str] = frozenset()
    expected: int | None = 1
    needed: frozenset[str] | None = None


class Connected(msgspec.Struct, frozen=True):
    """A session of a pod began, or a silent pod sent a message; it serves this generation."""

    pod: str
    serving: int


class Observed(msgspec.Struct, frozen=True):
    """A pod serves `serving` after it was asked for `generation`, which it may have failed."""

    pod: str
    generation: int
    serving: int
    failure: Failure | None = None


class Lost(msgspec.Struct, frozen=True):
    """The session of a pod ended, or it is silent."""

    pod: str


class GaveUp(msgspec.Struct, frozen=True):
    """A generation will not be reached: a pod cannot start, or the time is over."""

    generation: int
    failure: Failure


Event = Deployed | PodsChanged | Connected | Observed | Lost | GaveUp

# ------------------------------------------------------------------------------------- effects


class Reload(msgspec.Struct, frozen=True):
    """Order a pod to serve a generation."""

    pod: str
    generation: int


class Reached(msgspec.Struct, frozen=True):
    """Every pod serves the generation, for the first time."""

    generation: int


class NotReached(msgspec.Struct, frozen=True):
    """The generation was given up."""

    generation: int
    failure: Failure


class Recovered(msgspec.Struct, frozen=True):
    """Every pod serves a generation that had been given up."""

    generation: int


class Retried(msgspec.Struct, frozen=True):
    """The pods for which the generation was given up are gone, and others try to load it."""

    generation: int


Effect = Reload | Reached | NotReached | Recovered | Retried


class _Session(msgspec.Struct):
    #: The generation that the pod serves.
    serving: int
    #: The generation of the last `Reload` in this session; 0 without one.
    reload_generation: int = 0


class Rollout(msgspec.Struct):
    wanted_generation: int = 0
    #: The last generation that all pods served; 0 before the first.
    good: int = 0
    #: Why the wanted generation was given up; `None` if it was not.
    failure: Failure | None = None
    #: The pods of the wanted template, and those of earlier templates.
    pods: frozenset[str] = frozenset()
    retiring: frozenset[str] = frozenset()
    #: See `PodsChanged`.
    expected: int | None = None
    needed: frozenset[str] | None = None
    #: The pods that were there when the wanted generation was given up; `None`: they are not known.
    _failed_pods: frozenset[str] | None = None
    #: Whether the wanted generation was reached without a pod, and no pod has served it since.
    _is_unproven: bool = False
    _sessions: dict[str, _Session] = msgspec.field(default_factory=dict)
    #: The pods of the wanted template that serve the wanted generation; callers do not change it.
    ready: set[str] = msgspec.field(default_factory=set)

    def handle(self, event: Event) -> list[Effect]:
        effects: list[Effect] = []
        earlier_inputs = self._target_inputs
        match event:
            case Deployed(generation, failure):
                if generation > self.wanted_generation:
                    self.wanted_generation, self.failure = generation, None
                if failure is not None:
                    effects += self._give_up(generation, failure)
            case PodsChanged(pods, retiring, expected, needed):
                rested = self.rests
                self.pods, self.retiring, self.expected = pods, retiring, expected
                self.needed = needed
                effects += self._forget_failure(rested=rested)
            case Connected(pod, serving):
                self._sessions[pod] = _Session(serving)
            case Observed(pod, generation, serving, failure):
                self._sessions.setdefault(pod, _Session(serving)).serving = serving
                if failure is not None:
                    effects += self._give_up(generation, failure)
            case Lost(pod):
                self._sessions.pop(pod, None)
            case GaveUp(generation, failure):
                effects += self._give_up(generation, failure)
        event_pod = event.pod if isinstance(event, Connected | Observed | Lost) else None
        self._update_ready(event_pod)
        effects += self._decide()
        if event_pod is not None and self._target_inputs == earlier_inputs:
            effects += self._reloads([event_pod])
        else:
            effects += self._reloads(self._sessions)
        return effects

    # -------------------------------------------------------------------------------- questions

    @property
    def is_undecided(self) -> bool:
        """True if the wanted generation is neither reached nor given up."""
        return self.failure is None and self.good != self.wanted_generation

    def serving(self, pod: str) -> int | None:
        """The generation that a pod serves; `None` when it is not connected."""
        session = self._sessions.get(pod)
        return None if session is None else session.serving

    def is_ready(self, pod: str) -> bool:
        """True if a pod serves the wanted generation."""
        return self.wanted_generation > 0 and self.serving(pod) == self.wanted_generation

    def target(self, pod: str) -> int:
        """The generation that a pod should serve; 0 for a pod that is left alone."""
        if pod in self.retiring:
            return 0 if self.good == self.wanted_generation else self.good
        if self.failure is None:
            return self.wanted_generation
        if self.retiring:
            return 0
        return self.good or self.wanted_generation

    @property
    def rests(self) -> bool:
        """True if the workload is without pods, as it should be."""
        return self.expected == 0 and not self.pods

    @property
    def total(self) -> int:
        """The number of pods, with those that are missing."""
        return max(len(self.pods), self.expected or 0)

    @property
    def is_complete(self) -> bool:
        return self.expected is not None and len(self.pods) >= self.expected

    @property
    def is_served(self) -> bool:
        """True if all expected pods serve the wanted generation, or all `needed` ones."""
        if self.needed is not None:
            return bool(self.needed) and self.needed <= self.ready
        is_all = bool(self.pods) and len(self.ready) == len(self.pods)
        return self.rests or (is_all and self.is_complete)

    def lagging(self) -> list[str]:
        """The pods that the wanted generation still waits for."""
        return sorted(self.pods - self.ready)

    # -------------------------------------------------------------------------------- decisions

    def _give_up(self, generation: int, failure: Failure) -> Iterable[Effect]:
        is_open = self.is_undecided or (self._is_unproven and self.failure is None)
        if generation != self.wanted_generation or not is_open:
            return ()
        self.failure, self._failed_pods = failure, self.pods
        return (NotReached(generation, failure),)

    def _forget_failure(self, *, rested: bool) -> Iterable[Effect]:
        """Forget why earlier pods could not serve a generation that is not given up for another."""
        if self.failure is None or self.good != self.wanted_generation:
            return ()
        are_new = self._failed_pods is not None and self.pods.isdisjoint(self._failed_pods)
        if not ((rested and not self.rests) or (self.pods and are_new)):
            return ()
        self.failure = None
        return (Retried(self.wanted_generation),)

    def _decide(self) -> Iterable[Effect]:
        if self.rests:
            self._is_unproven = True
            if not self.is_undecided:
                return ()
        elif self.ready:
            self._is_unproven = False
        if not self.is_served:
            return ()
        if self.failure is None and self.good == self.wanted_generation:
            return ()
        was_given_up = self.failure is not None
        self.good, self.failure = self.wanted_generation, None
        return (
            Recovered(self.wanted_generation) if was_given_up else Reached(self.wanted_generation),
        )

    def _reloads(self, pods: Iterable[str]) -> Iterable[Effect]:
        for pod in pods:
            session = self._sessions.get(pod)
            if session is not None and (pod in self.pods or pod in self.retiring):
                target = self.target(pod)
                if target and session.serving != target and session.reload_generation != target:
                    session.reload_generation = target
                    yield Reload(pod, target)

    @property
    def _target_inputs(self) -> tuple[int, int, bool]:
        """The facts that decide, with the pods themselves, the target of each pod."""
        return self.wanted_generation, self.good, self.failure is None

    def _update_ready(self, pod: str | None) -> None:
        """Look again whether one pod is ready, or all of them."""
        if pod is None:
            self.ready = {pod for pod in self.pods if self.is_ready(pod)}
        elif pod in self.pods and self.is_ready(pod):
            self.ready.add(pod)
        else:
            self.ready.discard(pod)
