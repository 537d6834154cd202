"""Patterns of `.gitignore`, matched as git matches them (https://git-scm.com/docs/gitignore).

A pattern is matched against one entry and never against what lies above it: whoever walks a
project does not look into a folder that is ignored, which is what git does too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kubetorch.lib.records import record

_CLASSES = {
    "alnum": "a-zA-Z0-9",
    "alpha": "a-zA-Z",
    "blank": " \\t",
    "digit": "0-9",
    "lower": "a-z",
    "space": "\\s",
    "upper": "A-Z",
    "xdigit": "0-9a-fA-F",
}


@record
class Pattern:
    """One line.

    Attributes:
        text: The pattern as it is written, without `!`.
        is_excluding: False for one that begins with `!`.
        for_folders: Whether it matches folders only.
        by_name: Whether it is matched against the name alone, at any depth.
        regex: What it matches.
    """

    text: str
    is_excluding: bool
    for_folders: bool
    by_name: bool
    regex: re.Pattern[str]


class Patterns:
    """The patterns of one file; the last one that matches decides."""

    def __init__(self, lines: Iterable[str]) -> None:
        found = (parse(line) for line in lines)
        self._patterns = [pattern for pattern in found if pattern is not None]
        self._patterns.reverse()

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def decide(self, path: str, *, is_folder: bool) -> Pattern | None:
        """The pattern that decides on an entry.

        Args:
            path: Relative to the folder of the patterns' file.
            is_folder: Whether it is a folder, and no link to one.
        """
        name = path.rpartition("/")[2]
        for pattern in self._patterns:
            if pattern.for_folders and not is_folder:
                continue
            if pattern.regex.fullmatch(name if pattern.by_name else path):
                return pattern
        return None


def parse(line: str) -> Pattern | None:
    """The pattern in a line; `None` when there is none, or one that matches nothing."""
    text = _without_trailing_spaces(line.rstrip("\r\n"))
    if text.startswith("#"):
        return None
    is_excluding = not text.startswith("!")
    text = text if is_excluding else text[1:]
    for_folders = text.endswith("/")
    glob = text[:-1] if for_folders else text
    by_name = "/" not in glob
    regex = _translate(glob.removeprefix("/"))
    if not glob.strip("/") or regex is None:
        return None
    return Pattern(text, is_excluding, for_folders, by_name, re.compile(regex, re.DOTALL))


def _without_trailing_spaces(line: str) -> str:
    stripped = line.rstrip(" ")
    backslashes = len(stripped) - len(stripped.rstrip("\\"))
    # An odd backslash makes the first of the spaces a part of the pattern.
    return stripped + " " if backslashes % 2 and len(stripped) < len(line) else stripped


def _translate(glob: str) -> str | None:
    """The regular expression for a glob; `None` when it can match nothing."""
    out = []
    at = 0
    while at < len(glob):
        char = glob[at]
        if char == "*":
            end = at
            while end < len(glob) and glob[end] == "*":
                end += 1
            opens = at == 0 or glob[at - 1] == "/"
            if end - at > 1 and opens and glob[end : end + 1] == "/":
                out.append("(?:.*/)?")
                end += 1
            elif end - at > 1 and opens and end == len(glob):
                out.append(".+" if at else ".*")
            else:
                out.append("[^/]*")
            at = end
        elif char == "?":
            out.append("[^/]")
            at += 1
        elif char == "[":
            found = _bracket(glob, at)
            if found is None:
                return None
            expression, at = found
            out.append(expression)
        else:
            if char == "\\":
                at += 1
                if at == len(glob):
                    return None
            out.append(re.escape(glob[at]))
            at += 1
    return "".join(out)


def _bracket(glob: str, begin: int) -> tuple[str, int] | None:
    """The expression for `[…]`, and where it ends; `None` when it does not end."""
    at = begin + 1
    negation = ""
    if glob[at : at + 1] in ("!", "^"):
        negation = "^"
        at += 1
    items: list[str] = []
    first = at
    while True:
        if at >= len(glob):
            return None
        if glob[at] == "]" and at > first:
            break
        if glob.startswith("[:", at):
            name, colon, _ = glob[at + 2 :].partition(":]")
            if colon and name in _CLASSES:
                items.append(_CLASSES[name])
                at += len(name) + 4
                continue
        low, at = _character(glob, at)
        if glob[at : at + 1] == "-" and glob[at + 1 : at + 2] not in ("", "]"):
            high, at = _character(glob, at + 1)
            if low <= high:
                items.append(f"{re.escape(low)}-{re.escape(high)}")
        else:
            items.append(re.escape(low))
    if not items:  # only ranges that are the wrong way round
        return ("[^/]" if negation else "(?!)"), at + 1
    return f"(?!/)[{negation}{''.join(items)}]", at + 1


def _character(glob: str, at: int) -> tuple[str, int]:
    if glob[at] == "\\" and at + 1 < len(glob):
        at += 1
    return glob[at], at + 1
