"""Decoders of JSON that threads may ask for at the same time.

What msgspec finds out about a type it keeps on the class before it is complete, so that types may
refer to themselves. A thread that decodes a type for the first time while another one does uses the
unfinished part, and the process crashes. So decoders are made one at a time; those that are made
are safe to share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")

_making = threading.Lock()
_made: dict[object, msgspec.json.Decoder[Any]] = {}


def json_decoder(
    kind: type[_T], hook: Callable[[type[Any], Any], Any] | None = None
) -> msgspec.json.Decoder[_T]:
    """The decoder of a type, always the same one."""
    found = _made.get(kind)
    if found is None:
        with _making:
            found = _made.get(kind)
            if found is None:
                found = _made[kind] = msgspec.json.Decoder(kind, dec_hook=hook)
    return found
