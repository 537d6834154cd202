"""How a user's name is cleaned so that it can stand in the names of services."""

from __future__ import annotations

import re

from kubetorch.errors import SpecError

USERNAME_LIMIT = 16
RESERVED = ("kt", "kubetorch", "knative")

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def username(given: str) -> str:
    """A user name as it can stand in service names, at most 16 characters.

    Raises:
        SpecError: It is reserved, or nothing valid is left.
    """
    cleaned = re.sub(r"[_/.]", "-", given.lower())
    cleaned = re.sub(r"^[^a-z]+", "", cleaned)[:USERNAME_LIMIT].strip("-")
    if cleaned in RESERVED:
        raise SpecError(f"the username {given!r} is reserved; reserved are {', '.join(RESERVED)}")
    if not _LABEL.fullmatch(cleaned):
        raise SpecError(f"the username {given!r} must be a valid k8s name: letters, digits and '-'")
    return cleaned
