"""Text of others on a terminal: what could steer the terminal, or hide what is there, is shown.

A terminal obeys what it is sent: it sets its title, answers as if somebody typed, moves lines that
are there. So of control sequences only colours and those within lines that progress bars use pass.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from typing import TextIO

#: Colours, erasing in a line, and lines up; else control characters, C1 and marks of direction.
_STEERING = re.compile(
    "(\x1b\\[[0-9;:]*m|\x1b\\[[0-9]{0,3}[AK])"
    "|[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)


def visible(text: str) -> str:
    """`text` with all that steers a terminal written as in Python."""
    return _STEERING.sub(lambda found: found[1] or _written(found[0]), text)


def printable(text: str) -> str:
    """`text` without colours and line breaks, too: a name that somebody else gave."""
    return "".join(one if one.isprintable() else _written(one) for one in text)


def _written(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x80 else f"\\u{number:04x}"


def shown(text: str, stream: TextIO) -> str:
    """`text` as it is written to a stream: visible on a terminal, else as it is."""
    return visible(text) if is_terminal(stream) else text


def say(text: str) -> None:
    """Write a line of our own on standard error, if there is one; names in it may be of others."""
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
