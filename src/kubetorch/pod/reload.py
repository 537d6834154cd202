"""Which generation a pod serves: a state machine, events in, effects out.

                 ┌────────── Requested ────────────┐
                 ▼                                 │
    idle ──► loading N ── Loaded ──► serving N ────┤
                 │                     │  ▲        │
                 └─ Failed ──► what was│  │Loaded  │
                    served before      │  │        │
                                  Died ▼  │        │
                                 restarting N ─────┘

A generation that fails to load changes nothing: the generation before it serves on. A worker that
dies is replaced by a worker of the same generation. A request for a newer generation supersedes the
generation that is being loaded.
"""

from __future__ import annotations

import msgspec

from kubetorch.pod.tuning import TIMING


class _OfGeneration(msgspec.Struct, frozen=True):
    generation: int


class Requested(_OfGeneration, frozen=True):
    """The controller wants this generation."""


class Loaded(_OfGeneration, frozen=True):
    """A worker of this generation can take calls."""


class Failed(_OfGeneration, frozen=True):
    """No worker of this generation could be made."""


class Died(_OfGeneration, frozen=True):
    """The worker that served ended."""

    lived: float
    had_calls: bool


class Stopped(_OfGeneration, frozen=True):
    """The worker of the served generation was ended, to make room for the next generation's."""


class WorldFormed(_OfGeneration, frozen=True):
    """A new world was formed, for which this generation needs new processes."""


class RestartDue(_OfGeneration, frozen=True):
    """The delay before a restart is over."""


Event = Requested | Loaded | Failed | Died | Stopped | WorldFormed | RestartDue


class Load(_OfGeneration, frozen=True):
    """Make a worker of this generation; ends in `Loaded` or `Failed`."""


class Abandon(_OfGeneration, frozen=True):
    """Stop making a worker of this generation; neither `Loaded` nor `Failed` is to follow."""


class Switch(_OfGeneration, frozen=True):
    """Calls go to the latest worker; the worker before it is drained."""


class Hold(_OfGeneration, frozen=True):
    """Calls wait for a worker of this generation."""


class Refuse(_OfGeneration, frozen=True):
    """Calls are refused with the reason that this generation failed with."""


class Restart(_OfGeneration, frozen=True):
    """`RestartDue` is to come after `delay` seconds."""

    delay: float


class Report(_OfGeneration, frozen=True):
    """Report the outcome of a generation to the controller."""

    serving: int
    is_failure: bool = False


Effect = Load | Abandon | Switch | Hold | Refuse | Restart | Report


class Reconciler:
    """Decides how a pod gets to serve the generation that the controller wants."""

    def __init__(self) -> None:
        #: The generation that serves, or served last; 0 before the first one.
        self.serving = 0
        #: The generation that is being loaded.
        self.loading: int | None = None
        #: True while a worker of the serving generation lives.
        self.has_worker = False
        #: How many workers died.
        self.restarts = 0
        # Restarts since a worker last lived long, or had calls.
        self._attempts = 0

    def handle(self, event: Event) -> list[Effect]:
        """The effects of an event, in order."""
        match event:
            case Requested(generation):
                return self._requested(generation)
            case Loaded(generation):
                return self._loaded(generation)
            case Failed(generation):
                return self._failed(generation)
            case Died():
                return self._died(event)
            case Stopped(generation):
                return self._stopped(generation)
            case WorldFormed(generation):
                return self._world_formed(generation)
            case RestartDue(generation):
                return self._restart_due(generation)

    def _requested(self, generation: int) -> list[Effect]:
        if generation == self.loading:
            return []
        effects: list[Effect] = []
        if self.loading is not None:
            effects.append(Abandon(self.loading))
            self.loading = None
        if generation == self.serving and self.has_worker:
            return [*effects, Report(generation, serving=generation)]
        if not self.has_worker:
            effects.append(Hold(generation))
        self.loading = generation
        self._attempts = 0
        return [*effects, Load(generation)]

    def _loaded(self, generation: int) -> list[Effect]:
        if generation != self.loading:
            return []
        if generation != self.serving:
            self._attempts = 0
        self.serving, self.loading, self.has_worker = generation, None, True
        return [Switch(generation), Report(generation, serving=generation)]

    def _failed(self, generation: int) -> list[Effect]:
        if generation != self.loading:
            return []
        self.loading = None
        serving = self.serving if self.has_worker else 0
        effects: list[Effect] = [Report(generation, serving=serving, is_failure=True)]
        if self.has_worker:
            return effects
        if self.serving not in (0, generation):
            # The worker of the serving generation died meanwhile.
            return [*effects, Hold(self.serving), Restart(self.serving, self._next_delay())]
        effects.append(Refuse(generation))
        if self.serving:
            effects.append(Restart(generation, self._next_delay()))
        return effects

    def _died(self, event: Died) -> list[Effect]:
        if event.generation != self.serving or not self.has_worker:
            return []
        self.has_worker = False
        self.restarts += 1
        if event.lived >= TIMING.young_worker_seconds or event.had_calls:
            self._attempts = 0
        if self.loading is not None:
            # The worker that is being made takes its place; if that fails, this one is restarted.
            return [Hold(self.loading)]
        return [Hold(event.generation), Restart(event.generation, self._next_delay())]

    def _stopped(self, generation: int) -> list[Effect]:
        self.has_worker = False
        return [Hold(self.loading or generation)]

    def _world_formed(self, generation: int) -> list[Effect]:
        if generation == self.loading:
            return [Abandon(generation), Load(generation)]
        if generation != self.serving or self.loading is not None:
            return []
        self.has_worker, self.loading = False, generation
        self._attempts = 0
        return [Hold(generation), Load(generation)]

    def _restart_due(self, generation: int) -> list[Effect]:
        if generation != self.serving or self.has_worker or self.loading is not None:
            return []
        self.loading = generation
        return [Hold(generation), Load(generation)]

    def _next_delay(self) -> float:
        delays = TIMING.restart_delays_seconds
        delay = delays[min(self._attempts, len(delays) - 1)]
        self._attempts += 1
        return delay
