"""What those who wait for a deploy are told of its pods, each thing when it is new."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kubetorch.controller.backends.base import News, PodStatus, Trouble
from kubetorch.wire.messages import Stage


class Telling:
    """Tells of pods what is different since the last time.

    Args:
        tell: Takes what is told.
    """

    def __init__(self, tell: Callable[[Stage], None]) -> None:
        self._tell = tell
        # By pod; what is nobody's in particular has an empty name.
        self._reasons: dict[str, str] = {}

    def tell(self, pods: Sequence[PodStatus], trouble: Trouble, news: Sequence[News]) -> None:
        """Tell what happened to pods, and why they do not run or are not there.

        What many wait for is told once. What fails a deploy is not told: the error says it.
        """
        for one in news:
            self._tell(Stage("event", one.message, one.pod or None, warning=one.is_warning))
        known = set(self._reasons.values())
        reasons = {pod.name: pod.reason for pod in pods if pod.failure is None}
        if trouble.failure is None:
            reasons[""] = trouble.reason
        for pod, reason in reasons.items():
            if reason and reason not in known:
                known.add(reason)
                self._tell(Stage(stage="event", message=reason, pod=pod or None))
        self._reasons = reasons
