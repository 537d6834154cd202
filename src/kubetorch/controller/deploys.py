"""Deploys that are under way: their events, their time limits, and how they end.

Events are kept until the deploy is over, so a client that joins late gets all of them; a client
that goes away changes nothing. They are bounded: a user's import may print without end.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable

from kubetorch.controller.backends.base import PodStatus
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

#: Lines of loading code that one deploy carries, and their characters; logs have the others.
LOG_LIMIT = 10_000
LOG_CHARACTERS = 2 * 1024 * 1024
#: The same for messages about progress.
STAGE_LIMIT = 10_000
#: Seconds of a deploy in which agents that are there connect: the controller may have just begun.
CONNECTING = 3.0
#: Seconds of a container in which its agent may start.
STARTING = 15.0

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
        """Add an event; dropped after the last one."""
        if self.is_over or self._is_too_much(event):
            return
        self._events.append(event)
        self._changes.notify()

    async def follow(self, *, logs: bool = True) -> AsyncIterator[DeployEvent]:
        """All events from the first to the last, as they come."""
        at = 0
        while True:
            while at < len(self._events):
                event = self._events[at]
                at += 1
                if logs or not isinstance(event, DeployLog):
                    yield event
            if self.is_over:
                return
            await self._changes.wait()

    def _is_too_much(self, event: DeployEvent) -> bool:
        if isinstance(event, Stage):
            self._stages += 1
            return self._stages > STAGE_LIMIT
        if not isinstance(event, DeployLog):
            return False
        if self._logs >= LOG_LIMIT:
            return True
        self._logs += 1
        self._characters += len(event.text)
        if self._logs < LOG_LIMIT and self._characters <= LOG_CHARACTERS:
            return False
        self._logs = LOG_LIMIT
        text = "… there are more lines; kt logs has them"
        self._events.append(DeployLog(text=text, pod=event.pod, source=frames.KUBETORCH))
        return True


class PendingDeploys:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: dict[DeployProgress, Timer] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, progress: DeployProgress, timeout: float, on_timeout: Callable[[], None]) -> None:
        self._waiting[progress] = self._clock.call_later(timeout, on_timeout)

    def find(self, generation: int) -> DeployProgress | None:
        return next((one for one in self._waiting if one.generation == generation), None)

    def report(self, event: DeployEvent, generation: int | None = None) -> None:
        """Add an event to all deploys, or to those of a generation."""
        for progress in self._waiting:
            if generation in (None, progress.generation):
                progress.add(event)

    def end(self, progress: DeployProgress, event: Ready | Failed) -> None:
        timer = self._waiting.pop(progress, None)
        if timer is not None:
            timer.cancel()
            progress.add(event)

    def fail_all(self, error: KubetorchError) -> None:
        for progress in list(self._waiting):
            self.end(progress, failed(error))

    def interrupt(self, service: str, reason: str, *, goes_on: bool) -> None:
        """Fail all deploys: the workload ends, or goes on under another controller."""
        error = ControllerUnavailableError if goes_on else StartupError
        self.fail_all(error(f"the deploy of {service} was interrupted: {reason}"))

    def settle(
        self, wanted: int, *, ready: Callable[[], Ready] | None, failure: Failure | None
    ) -> None:
        """End the deploys of earlier generations, and of one that is served or given up."""
        for progress in list(self._waiting):
            generation = progress.generation
            if generation < wanted:
                error = StartupError(
                    f"generation {generation} was superseded by generation {wanted}, which "
                    "somebody deployed"
                )
                self.end(progress, failed(error))
            elif generation == wanted and ready is not None:
                self.end(progress, ready())
            elif generation == wanted and failure is not None:
                self.end(progress, Failed(failure=failure.to_dict()))


def failed(error: KubetorchError) -> Failed:
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

    def look() -> None:
        if progress.is_over:
            return
        now = clock.time()
        due = {
            pod.name: max(begun + CONNECTING, pod.started + STARTING)
            for pod in pods_without_agent()
            if pod.phase == "Running" and not pod.is_retiring
        }
        silent = [name for name, at in due.items() if at <= now]
        if silent:
            give_up(progress, _no_agent(silent))
        else:
            clock.call_later(min([now + CONNECTING, *due.values()]) - now, look)

    clock.call_later(CONNECTING, look)


def _no_agent(names: list[str]) -> KubetorchError:
    which = f"the pod {names[0]} runs" if len(names) == 1 else f"the pods {', '.join(names)} run"
    error = PodContainerError(
        f"{which} no agent of Kubetorch, and a selector starts none",
        hint="start one in each of them: kt server start; or give kt.Compute no selector",
    )
    error.pod_name = names[0]
    return error
