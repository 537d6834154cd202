"""A template as pieces of text and actions, and an action as tokens."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal

from kubetorch.errors import InstallError

Kind = Literal["word", "field", "variable", "text", "number", "mark", "end"]

_SPACE = " \t\r\n"
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_STRING = r'"(?:[^"\\\n]|\\.)*"'
_TOKEN = re.compile(
    rf"""
    (?P<space>[ \t\r\n]+)
    | (?P<text>{_STRING} | `[^`]*`)
    | (?P<number>-?\d+(?![\w.]))
    | (?P<variable>\$\w*)
    | (?P<field>\.[A-Za-z_]\w*)
    | (?P<word>[A-Za-z_]\w*)
    | (?P<mark>:= | = | \| | \( | \) | , | \.)
    """,
    re.VERBOSE,
)
#: Escapes that Go and JSON share; other ones are not for charts.
_ESCAPES = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')


@dataclass(frozen=True)
class Token:
    """One token of an action.

    Attributes:
        kind: What it is; `end` is behind the last one.
        text: As it is written; of a string, its value.
        is_glued: Whether nothing stands between it and the token before.
    """

    kind: Kind
    text: str
    is_glued: bool = False


@dataclass(frozen=True)
class Place:
    """Where something stands: a file and a line."""

    file: str
    line: int

    def error(self, message: str) -> InstallError:
        """The error for what stands here."""
        return InstallError(
            f"{self.file}:{self.line}: {message}",
            hint="the chart's templates are written in a subset of helm's language",
        )


@dataclass(frozen=True)
class Text:
    """What is written as it is."""

    text: str


@dataclass(frozen=True)
class Action:
    """What stands between braces."""

    tokens: tuple[Token, ...]
    place: Place


def split(source: str, file: str) -> list[Text | Action]:
    """Text and actions of a template, with the white space trimmed as the actions say.

    Args:
        source: The template.
        file: Its name, for errors.
    """
    pieces: list[Text | Action] = []
    position, trims = 0, False
    while True:
        opening = source.find("{{", position)
        text = source[position:] if opening < 0 else source[position:opening]
        text = text.lstrip(_SPACE) if trims else text
        if opening < 0:
            return [*pieces, Text(text)] if text else pieces
        place = Place(file, source.count("\n", 0, opening) + 1)
        start = opening + 2
        if source.startswith("-", start) and source[start + 1 : start + 2] in tuple(_SPACE):
            text, start = text.rstrip(_SPACE), start + 2
        if text:
            pieces.append(Text(text))
        tokens, position, trims = _action(source, start, place)
        if tokens:
            pieces.append(Action(tokens, place))


def _action(source: str, start: int, place: Place) -> tuple[tuple[Token, ...], int, bool]:
    """The tokens up to the closing braces, where the text goes on, and whether it is trimmed."""
    if comment := _COMMENT.match(source, start):
        found = re.compile(r"(\s+-)?\}\}").match(source, comment.end())
        if found is None:
            raise place.error("a comment must be all that stands between its braces")
        return (), found.end(), found[1] is not None
    tokens: list[Token] = []
    position, glued = start, False
    while True:
        if source.startswith("}}", position):
            return (*tokens, Token("end", "}}")), position + 2, False
        if source.startswith("-}}", position) and not glued:
            return (*tokens, Token("end", "-}}")), position + 3, True
        match = _TOKEN.match(source, position)
        if match is None:
            rest = source[position : position + 20].split("\n")[0]
            raise place.error(f"this is no token: {rest!r}" if rest else "an action has no end")
        position = match.end()
        kind = match.lastgroup
        if kind == "space":
            glued = False
            continue
        assert kind is not None
        text = _value(match[0], place) if kind == "text" else match[0]
        tokens.append(Token(_KINDS[kind], text, glued))
        glued = True


_KINDS: dict[str, Kind] = {
    "word": "word",
    "field": "field",
    "variable": "variable",
    "text": "text",
    "number": "number",
    "mark": "mark",
}


def _value(written: str, place: Place) -> str:
    """What a string between quotes is."""
    if written.startswith("`"):
        return written[1:-1]
    if "\\" in _ESCAPES.sub("", written):
        raise place.error(f"an escape in {written} is not known")
    return str(json.loads(written, strict=False))
