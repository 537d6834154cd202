"""The deploys of one workload that are not over, and when each of them is."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kubetorch.controller import rollout
from kubetorch.controller.progress import Progress
from kubetorch.controller.rollout import Failure
from kubetorch.errors import ControllerUnavailableError, KubetorchError, StartupError
from kubetorch.lib.clock import Clock, Timer
from kubetorch.wire import failures
from kubetorch.wire.messages import DeployEvent, Failed, Ready

_log = logging.getLogger(__name__)


class Waiting:
    """What waits for a generation.

    Args:
        clock: For time-outs.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: dict[Progress, Timer] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, progress: Progress, timeout: float, on_timeout: Callable[[], None]) -> None:
        """One more."""
        self._waiting[progress] = self._clock.call_later(timeout, on_timeout)

    def find(self, generation: int) -> Progress | None:
        """One that waits for a generation."""
        found = [progress for progress in self._waiting if progress.generation == generation]
        return found[0] if found else None

    def tell(self, event: DeployEvent, generation: int | None = None) -> None:
        """Something happened, on the way to a generation if it is given."""
        for progress in self._waiting:
            if generation in (None, progress.generation):
                progress.add(event)

    def end(self, progress: Progress, event: Ready | Failed) -> None:
        """It is over."""
        timer = self._waiting.pop(progress, None)
        if timer is not None:
            timer.cancel()
            progress.add(event)

    def fail_all(self, error: KubetorchError) -> None:
        """None of them will be ready."""
        for progress in list(self._waiting):
            self.end(progress, Failed(failure=describe(error)))

    def interrupt(self, service: str, reason: str, *, goes_on: bool) -> None:
        """Nobody looks after them any more.

        Args:
            service: Whose they are.
            reason: Why.
            goes_on: Whether another controller will, where the same deploy may be sent again.
        """
        error = ControllerUnavailableError if goes_on else StartupError
        self.fail_all(error(f"the deploy of {service} was interrupted: {reason}"))

    def settle(
        self, wanted: int, *, ready: Callable[[], Ready] | None, failure: Failure | None
    ) -> None:
        """End what nobody has to wait for any more.

        Args:
            wanted: The generation that is wanted now.
            ready: The last event if every pod serves it, else `None`.
            failure: Why it is not reached, if that is certain.
        """
        for progress in list(self._waiting):
            generation = progress.generation
            if generation < wanted:
                message = rollout.superseded_message(generation, wanted)
                self.end(progress, Failed(failure=describe(StartupError(message))))
            elif generation == wanted and ready is not None:
                self.end(progress, ready())
            elif generation == wanted and failure is not None:
                self.end(progress, Failed(failure=failure))


def describe(error: KubetorchError) -> Failure:
    """An error of our own as a failure; where in our code it was raised is of no use to users."""
    return failures.describe(error).to_dict() | {"traceback": error.remote_traceback or ""}


def not_applied(service: str, error: Exception) -> KubetorchError:
    """The error of a deploy whose manifest was not applied; a fault of ours is logged."""
    if isinstance(error, KubetorchError):
        return error
    _log.error("manifest not applied workload=%s", service, exc_info=error)
    return StartupError(
        f"the manifest of {service} could not be applied: {type(error).__name__}: {error}",
        hint="this is a fault of Kubetorch; the log of the service has its traceback",
    )
