"""Text of other programs on a terminal: characters that steer the terminal are escaped.

A terminal obeys control sequences: it sets its title, answers as if the user typed, overwrites
lines. So only colours pass, and the sequences within lines that progress bars use.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from typing import TextIO

#: Group 1: colours, erasing in a line, and lines up. Else control characters, C1 and marks of
#: direction.
_STEERING = re.compile(
    "(\x1b\\[[0-9;:]*m|\x1b\\[[0-9]{0,3}[AK])"
    "|[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)


def visible(text: str) -> str:
    """`text` with all characters that steer a terminal escaped as in Python."""
    return _STEERING.sub(lambda match: match[1] or _escaped(match[0]), text)


def printable(text: str) -> str:
    """As `visible`, with colours and line breaks escaped too: for names of other users."""
    return "".join(
        character if character.isprintable() else _escaped(character) for character in text
    )


def _escaped(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x80 else f"\\u{number:04x}"


def shown(text: str, stream: TextIO) -> str:
    """`text` as it is written to a stream: visible on a terminal, else as it is."""
    return visible(text) if is_terminal(stream) else text


def say(text: str) -> None:
    """Write a line of our own on standard error, if there is one, with its names escaped."""
    with contextlib.suppress(OSError, ValueError):  # a broken pipe, a closed file
        if sys.stderr is not None:
            sys.stderr.write(f"kubetorch: {printable(text)}\n")


@functools.lru_cache(maxsize=1000)
def say_once(text: str) -> None:
    """As `say`, unless this process has written the line before."""
    say(text)


def is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):  # no file, or a closed one
        return False
