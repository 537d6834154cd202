"""The protocol version, one integer, and who may speak with whom.

It is raised when a message changes in a way that the other end would misread. New optional fields
do not raise it. An end speaks with every version from `OLDEST` to its own.
"""

from __future__ import annotations

from kubetorch.errors import VersionMismatchError

PROTOCOL = 1
OLDEST = 1


def check(theirs: int | None, *, peer: str) -> int:
    """The version to speak with `peer`.

    Raises:
        VersionMismatchError: Theirs is missing, older than `OLDEST`, or newer than ours.
    """
    if theirs is not None and OLDEST <= theirs <= PROTOCOL:
        return theirs
    said = "no protocol version" if theirs is None else f"protocol {theirs}"
    older = theirs is None or theirs < OLDEST
    raise VersionMismatchError(
        f"{peer} speaks {said}; this side speaks {OLDEST} to {PROTOCOL}",
        hint=f"upgrade {peer if older else 'this side'}: pip install -U kubetorch",
    )
