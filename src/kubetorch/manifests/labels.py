"""Labels and annotations that Kubetorch puts on its objects; their names stand only here."""

from __future__ import annotations

import re

from kubetorch._version import __version__
from kubetorch.specs.callable import CallableRef

PREFIX = "kubetorch.com/"

SERVICE = f"{PREFIX}service"
MODULE = f"{PREFIX}module"
VERSION = f"{PREFIX}version"
TEMPLATE = f"{PREFIX}template"
USERNAME = f"{PREFIX}username"
APP = "app"

ALLOWED_SERIALIZATION = f"{PREFIX}allowed-serialization"
INACTIVITY_TTL = f"{PREFIX}inactivity-ttl"

#: Keys that users cannot set.
RESERVED = (
    SERVICE,
    MODULE,
    VERSION,
    TEMPLATE,
    USERNAME,
    f"{PREFIX}user-identifier",
    f"{PREFIX}pod-type",
    f"{PREFIX}secret-name",
)

_VALUE_LIMIT = 63


def value(text: str) -> str:
    """`text` as the value of a label: what is not allowed becomes `-`, at most 63 characters."""
    cleaned = re.sub(r"[^A-Za-z0-9_.-]", "-", text)[-_VALUE_LIMIT:]
    return re.sub(r"^[^A-Za-z0-9]+|[^A-Za-z0-9]+$", "", cleaned)


def standard(
    *, name: str | None, callable: CallableRef | None, username: str | None
) -> dict[str, str]:
    """The labels of every object of a workload; those of what is not known yet are left out."""
    found = {VERSION: __version__}
    if username:
        found[USERNAME] = username
    if callable is not None:
        found[MODULE] = value(callable.module)
    if name:
        found |= {SERVICE: name, APP: name}
    return found
