"""Names of services and users."""

from __future__ import annotations

import re
from typing import TypeGuard

from kubetorch.config.values import RESERVED_USERNAMES as RESERVED_USERNAMES
from kubetorch.config.values import clean_username as clean_username
from kubetorch.errors import SpecError

#: Characters of a name that a user chooses.
NAME_CHARACTERS = 40
#: Characters of a DNS label, and so of a service.
SERVICE_CHARACTERS = 63

_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def clean(name: object) -> str:
    """`name` as a DNS label: lower case, everything but letters, digits and `-` deleted."""
    if not isinstance(name, str):
        raise SpecError(f"the name is {name!r}; it must be text")
    cleaned = re.sub(r"[^a-z0-9-]", "", name.lower())
    cleaned = cleaned.removeprefix("-").removesuffix("-")
    if not cleaned.strip("-"):
        raise SpecError(f"the name {name!r} must have at least one alphanumeric character")
    return cleaned


def is_shortened(name: str) -> bool:
    """True if the name has characters that a service's name cannot have."""
    return clean(name) != name.lower()


def name(callable_name: str) -> str:
    """The user-facing name of a callable, at most 40 characters."""
    cleaned = clean(callable_name)
    if len(cleaned) > NAME_CHARACTERS:
        raise SpecError(
            f"the name {cleaned!r} has {len(cleaned)} characters; {NAME_CHARACTERS} are allowed",
            hint="give a shorter one: kt.fn(f, name=...)",
        )
    return cleaned


def service_name(name: str, *, username: str | None = None, prefixed: bool = True) -> str:
    """The name of the service: `<username>-<name>` when a user name is set."""
    cleaned = clean(name)
    if username and prefixed and not cleaned.startswith(f"{username}-"):
        cleaned = f"{username}-{cleaned}"
    if len(cleaned) > SERVICE_CHARACTERS:
        raise SpecError(
            f"the service name {cleaned!r} has {len(cleaned)} characters; "
            f"{SERVICE_CHARACTERS} are allowed",
            hint="give a shorter name",
        )
    return cleaned


def is_namespace(namespace: object) -> TypeGuard[str]:
    return isinstance(namespace, str) and _NAMESPACE.fullmatch(namespace) is not None


def check_namespace(namespace: object) -> str:
    if not is_namespace(namespace):
        raise SpecError(
            f"namespace is {namespace!r}; it must be at most 63 lower-case letters, digits and "
            "'-', and begin and end with a letter or digit"
        )
    return namespace
