"""Which pods are gone for good, and what took them, as far as their backend knew."""

from __future__ import annotations

from collections.abc import Sequence

from kubetorch.controller.backends.base import PodStatus

#: The reason where nothing is known of a pod but that it is not there any more.
DELETED = "Deleted"


def between(before: Sequence[PodStatus], after: Sequence[PodStatus]) -> dict[str, str]:
    """The pods that could run calls before and cannot any more, with the reason of each.

    Args:
        before: The pods of a workload as they were.
        after: The same a moment later.
    """
    now = {pod.name: pod for pod in after}
    gone = {}
    for pod in filter(is_able, before):
        last = now.get(pod.name)
        if last is None or last.uid != pod.uid:  # another one may have its name by now
            gone[pod.name] = _reason(pod)
        elif not is_able(last):
            gone[pod.name] = _reason(last)
    return gone


def is_able(pod: PodStatus) -> bool:
    """Whether calls may run in a pod."""
    return pod.phase != "Failed"


def _reason(pod: PodStatus) -> str:
    return DELETED if pod.ending is None else pod.ending.reason
