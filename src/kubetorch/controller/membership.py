"""The pods of one workload, as they are told of each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kubetorch.controller import views
from kubetorch.controller.backends.base import PodStatus
from kubetorch.controller.views import Heard
from kubetorch.wire import messages
from kubetorch.wire.messages import Member, Members


class Membership:
    """Who they are, and the message that says it, which is the same for all of them."""

    def __init__(self) -> None:
        self._statuses: dict[str, PodStatus] = {}
        self._members: dict[str, Member] = {}
        self._message: tuple[int, bytes] = (-1, b"")

    def update(self, pods: Sequence[PodStatus], heard: Mapping[str, Heard]) -> bool:
        """These are the pods now; whether that is news."""
        self._statuses = {pod.name: pod for pod in pods if not pod.is_retiring}
        before, self._members = self._members, {}
        for name in self._statuses:
            self._members[name] = self._member(name, heard)
        return list(self._members.values()) != list(before.values())

    def heard(self, pod: str, heard: Mapping[str, Heard]) -> bool:
        """A pod said where it is, or is away; whether that is news."""
        if pod not in self._statuses:
            return False
        before, self._members[pod] = self._members[pod], self._member(pod, heard)
        return self._members[pod] != before

    def message(self, epoch: int) -> bytes:
        """The message, encoded."""
        if self._message[0] != epoch:
            members = Members(epoch=epoch, members=tuple(self._members.values()))
            self._message = (epoch, messages.encode(members))
        return self._message[1]

    def _member(self, name: str, heard: Mapping[str, Heard]) -> Member:
        pod = self._statuses[name]
        return Member(name, pod.ordinal, views.url(pod, heard.get(name)))
