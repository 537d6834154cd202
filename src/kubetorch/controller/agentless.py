"""Pods that somebody else made, and in which nobody has started an agent.

A deploy that only selects pods (`kt.Compute(selector=...)`) cannot start anything in them: it waits
for the agents that `kt server start` runs there. One that does not come is not waited for until
`launch_timeout`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kubetorch.controller.backends.base import PodStatus
from kubetorch.controller.progress import Progress
from kubetorch.errors import KubetorchError, PodContainerError
from kubetorch.lib.clock import Clock

#: Seconds of a deploy in which agents that are there connect: the controller may have just begun.
CONNECTING = 3.0
#: Seconds of a container in which its agent may start.
STARTING = 15.0


class Selecting(Protocol):
    """What selects pods."""

    @property
    def pods(self) -> Sequence[PodStatus]:
        """The pods that there are now."""

    def has_session(self, pod: str) -> bool:
        """Whether the agent of a pod is connected."""


def expect(
    clock: Clock,
    progress: Progress,
    selecting: Selecting,
    give_up: Callable[[Progress, KubetorchError], object],
) -> None:
    """Give a deploy up when one of its pods certainly has no agent.

    Args:
        clock: The time.
        progress: The deploy.
        selecting: What it deploys.
        give_up: Ends the deploy.
    """
    begun = clock.time()

    def look() -> None:
        if progress.is_over:
            return
        now = clock.time()
        due = {
            pod.name: max(begun + CONNECTING, pod.started + STARTING)
            for pod in selecting.pods
            if pod.phase == "Running" and not (pod.is_retiring or selecting.has_session(pod.name))
        }
        silent = [name for name, at in due.items() if at <= now]
        if silent:
            give_up(progress, _error(silent))
        else:
            clock.call_later(min([now + CONNECTING, *due.values()]) - now, look)

    clock.call_later(CONNECTING, look)


def _error(names: list[str]) -> KubetorchError:
    which = f"the pod {names[0]} runs" if len(names) == 1 else f"the pods {', '.join(names)} run"
    error = PodContainerError(
        f"{which} no agent of Kubetorch, and a selector starts none",
        hint="start one in each of them: kt server start; or give kt.Compute no selector",
    )
    error.pod_name = names[0]
    return error
