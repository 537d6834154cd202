"""Manifests as YAML for people: each field with a comment of where it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from kubetorch.manifests.kinds import Manifest, Path
from kubetorch.manifests.origins import entry_name, leaves

_WIDTH = 2
#: What tells a reader what a dictionary is; the other keys keep their order.
_FIRST = ("apiVersion", "kind", "metadata", "name", "namespace", "image", "command", "args")
#: Column at which comments begin, where lines are not longer.
_COLUMN = 56


def dump(manifest: Manifest, origins: Mapping[Path, str]) -> str:
    """A manifest as YAML; what comes from one place is commented once, at its top."""
    return "".join(f"{line}\n" for line in _mapping(manifest, (), origins, 0, inherited=None))


def _mapping(
    node: Manifest, path: Path, origins: Mapping[Path, str], depth: int, *, inherited: str | None
) -> Iterator[str]:
    first = [key for key in _FIRST if key in node]
    for key in (*first, *(key for key in node if key not in _FIRST)):
        value = node[key]
        yield from _item(f"{_scalar(key)}:", value, (*path, key), origins, depth, inherited)


def _item(
    head: str,
    value: Any,  # noqa: ANN401  # any node of a manifest
    path: Path,
    origins: Mapping[Path, str],
    depth: int,
    inherited: str | None,
) -> Iterator[str]:
    common = _common(value, path, origins)
    comment = common if common != inherited else None
    indent = " " * (_WIDTH * depth)
    if isinstance(value, dict) and value:
        yield _line(f"{indent}{head}", comment)
        yield from _mapping(value, path, origins, depth + 1, inherited=common)
    elif isinstance(value, list) and value:
        yield _line(f"{indent}{head}", comment)
        for number, entry in enumerate(value):
            where = (*path, entry_name(entry, number))
            yield from _entry(entry, where, origins, depth, common)
    else:
        yield _line(f"{indent}{head} {_scalar(value)}", comment)


def _entry(
    value: Any,  # noqa: ANN401  # any node of a manifest
    path: Path,
    origins: Mapping[Path, str],
    depth: int,
    inherited: str | None,
) -> Iterator[str]:
    """An entry of a list: `- ` stands in the place of the first line's indentation."""
    indent = " " * (_WIDTH * depth)
    common = _common(value, path, origins)
    comment = common if common != inherited else None
    if not isinstance(value, dict) or not value:
        yield _line(f"{indent}- {_scalar(value)}", comment)
        return
    lines = _mapping(value, path, origins, depth + 1, inherited=common)
    first = next(lines)[len(indent) + _WIDTH :]
    yield _line(f"{indent}- {first}", comment)
    yield from lines


def _common(value: object, path: Path, origins: Mapping[Path, str]) -> str | None:
    """Where all that is in a node comes from, if that is one place."""
    found = {origins[leaf] for leaf in leaves(value, path)}
    return found.pop() if len(found) == 1 else None


def _line(text: str, comment: str | None) -> str:
    return text if comment is None else f"{text:<{_COLUMN}}  # {comment}"


def _scalar(value: object) -> str:
    if value in ({}, []):
        return str(value)
    text = yaml.safe_dump(value, default_style=None, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
