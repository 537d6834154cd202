"""Running deploys: their events, their time limits, and how they end.

Events are kept until the deploy is over, so a client that joins late gets all of them; a client
that disconnects changes nothing. They are bounded: a user's import may print without end.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable

from kubetorch.controller.backends.base import PodStatus
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.errors import (
    ControllerUnavailableError,
    KubetorchError,
    PodContainerError,
    StartupError,
)
from kubetorch.lib.changes import Changes
from kubetorch.lib.clock import Clock, Timer
from kubetorch.wire import exceptions, frames
from kubetorch.wire.exceptions import Failure
from kubetorch.wire.messages import DeployEvent, DeployLog, Failed, Ready, Stage

_log = logging.getLogger(__name__)


class DeployProgress:
    def __init__(self, generation: int, *first: DeployEvent) -> None:
        self.generation = generation
        self._events = list(first)
        self._logs = 0
        self._characters = 0
        self._stages = 0
        self._changes = Changes()

    @property
    def is_over(self) -> bool:
        return bool(self._events) and isinstance(self._events[-1], (Ready, Failed))

    def add(self, event: DeployEvent) -> None:
        """Add an event; after the last event it is dropped."""
        if self.is_over or self._is_too_much(event):
            return
        self._events.append(event)
        self._changes.notify()

    async def follow(self, *, logs: bool = True) -> AsyncIterator[DeployEvent]:
        """All events from the first to the last, as they come."""
        index = 0
        while True:
            while index < len(self._events):
                event = self._events[index]
                index += 1
                if logs or not isinstance(event, DeployLog):
                    yield event
            if self.is_over:
                return
            await self._changes.wait()

    def _is_too_much(self, event: DeployEvent) -> bool:
        if isinstance(event, Stage):
            self._stages += 1
            return self._stages > LIMITS.deploy_stages
        if not isinstance(event, DeployLog):
            return False
        if self._logs >= LIMITS.deploy_log_lines:
            return True
        self._logs += 1
        self._characters += len(event.text)
        if (
            self._logs < LIMITS.deploy_log_lines
            and self._characters <= LIMITS.deploy_log_characters
        ):
            return False
        self._logs = LIMITS.deploy_log_lines
        text = "… there are more lines; kt logs has them"
        self._events.append(DeployLog(text=text, pod=event.pod, source=frames.KUBETORCH))
        return True


class PendingDeploys:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._timers: dict[DeployProgress, Timer] = {}

    def __bool__(self) -> bool:
        return bool(self._timers)

    def add(self, progress: DeployProgress, timeout: float, on_timeout: Callable[[], None]) -> None:
        self._timers[progress] = self._clock.call_later(timeout, on_timeout)

    def find(self, generation: int) -> DeployProgress | None:
        return next(
            (progress for progress in self._timers if progress.generation == generation), None
        )

    def report(self, event: DeployEvent, generation: int | None = None) -> None:
        """Add an event to all deploys, or to those of a generation."""
        for progress in self._timers:
            if generation in (None, progress.generation):
                progress.add(event)

    def end(self, progress: DeployProgress, event: Ready | Failed) -> None:
        timer = self._timers.pop(progress, None)
        if timer is not None:
            timer.cancel()
            progress.add(event)

    def fail_all(self, error: KubetorchError) -> None:
        for progress in list(self._timers):
            self.end(progress, failed_event(error))

    def interrupt(self, service: str, reason: str, *, goes_on: bool) -> None:
        """Fail all deploys: the workload ends, or it `goes_on` under another controller."""
        error = ControllerUnavailableError if goes_on else StartupError
        self.fail_all(error(f"the deploy of {service} was interrupted: {reason}"))

    def settle(
        self, wanted_generation: int, *, ready: Callable[[], Ready] | None, failure: Failure | None
    ) -> None:
        """End the deploys of earlier generations, and of the wanted one when it is decided."""
        for progress in list(self._timers):
            generation = progress.generation
            if generation < wanted_generation:
                error = StartupError(
                    f"generation {generation} was superseded by generation {wanted_generation}, "
                    "which somebody deployed"
                )
                self.end(progress, failed_event(error))
            elif generation == wanted_generation and ready is not None:
                self.end(progress, ready())
            elif generation == wanted_generation and failure is not None:
                self.end(progress, Failed(failure=failure.to_dict()))


def failed_event(error: KubetorchError) -> Failed:
    return Failed(failure=exceptions.describe_refusal(error).to_dict())


def not_applied(service: str, error: Exception) -> KubetorchError:
    """The error of a deploy whose manifest was not applied; a fault of ours is logged."""
    if isinstance(error, KubetorchError):
        return error
    _log.error("manifest not applied workload=%s", service, exc_info=error)
    return StartupError(
        f"the manifest of {service} could not be applied: {type(error).__name__}: {error}",
        hint="this is a fault of Kubetorch; the log of the service has its traceback",
    )


def expect_agents(
    clock: Clock,
    progress: DeployProgress,
    pods_without_agent: Callable[[], Iterable[PodStatus]],
    give_up: Callable[[DeployProgress, KubetorchError], object],
) -> None:
    """Give up the deploy of a selector when a pod certainly has no agent.

    A deploy that only selects pods (`kt.Compute(selector=...)`) cannot start anything in them: it
    waits for the agents that `kt server start` runs there, though not until `launch_timeout`.
    """
    begun = clock.time()

    def check_pods() -> None:
        if progress.is_over:
            return
        now = clock.time()
        earliest = begun + TIMING.agent_connect_seconds
        due_times = {
            pod.name: max(earliest, pod.started + TIMING.agent_start_seconds)
            for pod in pods_without_agent()
            if pod.phase == "Running" and not pod.is_retiring
        }
        silent_pods = [name for name, due_time in due_times.items() if due_time <= now]
        if silent_pods:
            give_up(progress, _no_agent(silent_pods))
        else:
            clock.call_later(
                min([now + TIMING.agent_connect_seconds, *due_times.values()]) - now, check_pods
            )

    clock.call_later(TIMING.agent_connect_seconds, check_pods)


def _no_agent(names: list[str]) -> KubetorchError:
    which = f"the pod {names[0]} runs" if len(names) == 1 else f"the pods {', '.join(names)} run"
    error = PodContainerError(
        f"{which} no agent of Kubetorch, and a selector starts none",
        hint="start one in each of them: kt server start; or give kt.Compute no selector",
    )
    error.pod_name = names[0]
    return error
