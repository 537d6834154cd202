"""The protocol version, one integer, and the order of versions of the package.

The protocol version is raised when a message changes in a way that the other end would misread. New
optional fields do not raise it. Both ends speak the same version.
"""

from __future__ import annotations

import re

from kubetorch.errors import VersionMismatchError

PROTOCOL = 1

#: The command that updates a client.
FIX_CLIENT = "pip install -U kubetorch"
#: The step that updates the pods of a service: their agent comes from the controller.
FIX_PODS = "deploy the service again"
#: The command that updates a controller, by the name of its backend.
FIX_CONTROLLER = {
    "kubernetes": "kt upgrade",
    "local": "kt local stop; the next use starts a new one",
}


def check(theirs: int | None, *, peer: str, fix_peer: str, fix_self: str) -> None:
    """Refuse a `peer` of another protocol version."""
    if theirs == PROTOCOL:
        return
    their_protocol = "no protocol version" if theirs is None else f"protocol {theirs}"
    is_older = theirs is None or theirs < PROTOCOL
    older_side, fix = (peer, fix_peer) if is_older else ("this side", fix_self)
    raise VersionMismatchError(
        f"{peer} speaks {their_protocol}; this side speaks {PROTOCOL}",
        hint=f"make {older_side} newer: {fix}",
    )


_PACKAGE_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(?:[-.]?([a-z]+)[-.]?(\d*))?(?:\+.*)?")
#: The suffixes of a version, from the oldest on.
_STAGES = {"dev": 0, "a": 1, "alpha": 1, "b": 2, "beta": 2, "rc": 3, None: 4, "post": 5}


def is_newer(version: str, other_version: str) -> bool:
    """True if a version of the package is newer than another; false if one cannot be parsed."""
    first, second = _order(version), _order(other_version)
    return first is not None and second is not None and first > second


def _order(version: str) -> tuple[int, ...] | None:
    match = _PACKAGE_VERSION.fullmatch(version)
    if match is None or match[4] not in _STAGES:
        return None
    return (int(match[1]), int(match[2]), int(match[3] or 0), _STAGES[match[4]], int(match[5] or 0))
