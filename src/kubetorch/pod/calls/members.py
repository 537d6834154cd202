"""The pods of the workload, as the controller last said."""

from __future__ import annotations

from kubetorch.lib.changes import Changes
from kubetorch.wire.messages import Member, Members


class Membership:
    """Knows the siblings of this pod."""

    def __init__(self) -> None:
        self._members: dict[int, Member] = {}
        #: Says that they are others now.
        self.changes = Changes()

    def update(self, message: Members) -> None:
        """The controller says who they are."""
        self._members = {member.ordinal: member for member in message.members}
        self.changes.notify()

    def find(self, ordinal: int) -> Member | None:
        """The pod with this number."""
        return self._members.get(ordinal)
