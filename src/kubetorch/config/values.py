"""Parsers of settings: from the user's value, or a variable's text, to the setting's value.

Every function raises `ValueError` with a description of right values; its caller adds the name of
the setting and the source of the value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Literal, cast
from urllib.parse import urlsplit

from kubetorch.errors import SpecError

USERNAME_CHARACTERS = 16
RESERVED_USERNAMES = ("kt", "kubetorch", "knative")

_USERNAME_PATTERN = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def clean_username(name: str) -> str:
    """A user name as it can stand in service names, at most 16 characters."""
    cleaned = re.sub(r"[_/.]", "-", name.lower())
    cleaned = re.sub(r"^[^a-z]+", "", cleaned)[:USERNAME_CHARACTERS].strip("-")
    if cleaned in RESERVED_USERNAMES:
        raise SpecError(
            f"the username {name!r} is reserved; reserved are {', '.join(RESERVED_USERNAMES)}"
        )
    if not _USERNAME_PATTERN.fullmatch(cleaned):
        raise SpecError(f"the username {name!r} must be a valid k8s name: letters, digits and '-'")
    return cleaned


Backend = Literal["auto", "local", "kubernetes"]
BACKENDS: tuple[Backend, ...] = ("auto", "local", "kubernetes")

#: Values that JSON and YAML can carry.
Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]

_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL_CHARACTERS = 63
_CLAIM = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


def username(value: object) -> str:
    try:
        return clean_username(text(value))
    except SpecError as error:
        raise ValueError(error.message) from error


def namespace(value: object) -> str:
    name = text(value)
    if not _NAMESPACE.fullmatch(name):
        raise ValueError(
            "must be at most 63 lower-case letters, digits and '-', and begin and end with a "
            "letter or digit"
        )
    return name


def text(value: object) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be text")
    return value.strip()


def queue(value: object) -> str:
    """The name of a queue, which pods carry as a label."""
    name = text(value)
    if len(name) > _LABEL_CHARACTERS or not _CLAIM.fullmatch(name):
        raise ValueError(
            f"must be at most {_LABEL_CHARACTERS} lower-case letters, digits, '-' and '.', and "
            "begin and end with a letter or digit"
        )
    return name


def url(value: object) -> str:
    """A URL of HTTP, without a slash at its end."""
    address = text(value)
    try:
        parts = urlsplit(address)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right:
        raise ValueError("must be a URL that begins with http:// or https://")
    return address.rstrip("/")


def reference(value: object) -> str:
    """The reference of a container image."""
    image = text(value)
    if any(character.isspace() for character in image):
        raise ValueError("must be the reference of a container image, such as python:3.12-slim")
    return image


def boolean(value: object) -> bool:
    """True or false, also as text."""
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    if not isinstance(value, bool):
        raise ValueError("must be a boolean value: true or false")
    return value


def names(value: object) -> list[str]:
    """A list of names, also as text with commas."""
    if isinstance(value, str):
        value = [item for item in value.split(",") if item.strip()]
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError("must be a list of names, or text with commas between them")
    return [text(item) for item in value]


def claims(value: object) -> list[str]:
    """Names of volumes, also as text with commas."""
    claim_names = names(value)
    for name in claim_names:
        if not _CLAIM.fullmatch(name):
            raise ValueError(
                f"has {name!r}; the name of a volume is at most 253 lower-case letters, digits, "
                "'-' and '.', and begins and ends with a letter or digit"
            )
    return list(dict.fromkeys(claim_names))


def mapping(value: object) -> dict[str, Plain]:
    """A dictionary that JSON can carry, also as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"must be a JSON object: {error}") from error
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError("must be a dictionary with names as keys, or a JSON object")
    try:
        return cast("dict[str, Plain]", json.loads(json.dumps(value, allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"must have values that JSON can carry: {error}") from error


def backend(value: object) -> Backend:
    for name in BACKENDS:
        if value == name:
            return name
    raise ValueError(f"must be one of {', '.join(BACKENDS)}")
