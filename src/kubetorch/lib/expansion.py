"""What Docker makes of `$NAME`, `${NAME}`, `${NAME:-word}` and `${NAME:+word}`. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

#: One such variable, to be a part of the pattern of a text. A word may have variables in it.
VARIABLE = (
    r"\$(?:(?P<plain>[A-Za-z0-9_]+)|\{(?P<braced>[A-Za-z0-9_]+)"
    r"(?::(?P<form>[-+])(?P<word>(?:[^{}]|\{[^{}]*\})*))?\})"
)


def value(
    match: re.Match[str], variables: Mapping[str, str], expand: Callable[[str], str]
) -> str | None:
    """What takes the place of a variable; `None` if it is not known, and has no word for that.

    Args:
        match: Of a pattern with `VARIABLE` in it.
        variables: Those that are known.
        expand: Expands a word.
    """
    current = variables.get(match["plain"] or match["braced"])
    if match["form"] is None:
        return current
    is_word = bool(current) == (match["form"] == "+")
    return expand(match["word"]) if is_word else current or ""
