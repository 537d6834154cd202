"""References of container images as values of the chart. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kubetorch.errors import ConfigError

# https://github.com/distribution/reference: a registry may have a port, a path has no capitals.
_REFERENCE = re.compile(
    r"(?P<repository>(?:[A-Za-z0-9.-]+(?::\d+)?/)?[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?"
    r"(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)


def parse(reference: str) -> dict[str, str]:
    """`repository`, `tag` and `digest` of a reference; without either of them the tag is `latest`.

    Raises:
        ConfigError: It is none.
    """
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise ConfigError(
            f"{reference!r} is no reference of a container image",
            hint="for example ghcr.io/kubetorch/kubetorch:0.6.0, or NAME@sha256:DIGEST",
        )
    found = {key: value or "" for key, value in match.groupdict().items()}
    if not found["tag"] and not found["digest"]:
        found["tag"] = "latest"
    return found


def written(image: Mapping[str, Any], version: str) -> str:
    """The reference that the chart makes of its values of an image.

    Args:
        image: `repository`, `tag` and `digest`.
        version: The tag where none is given.
    """
    if digest := image.get("digest"):
        return f"{image['repository']}@{digest}"
    return f"{image['repository']}:{image.get('tag') or version}"
