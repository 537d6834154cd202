"""Decoders of JSON that several threads may request at the same time.

msgspec caches its analysis of a type on the class before the analysis is complete, so that types
may refer to themselves. A thread that decodes a type for the first time while another thread does
so too uses the unfinished analysis, and the process crashes. So decoders are made one at a time; a
finished decoder is safe to share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")

_lock = threading.Lock()
_decoders: dict[object, msgspec.json.Decoder[Any]] = {}


def json_decoder(
    kind: type[_T], hook: Callable[[type[Any], Any], Any] | None = None
) -> msgspec.json.Decoder[_T]:
    """The decoder of a type; later calls return the same decoder."""
    decoder = _decoders.get(kind)
    if decoder is None:
        with _lock:
            decoder = _decoders.get(kind)
            if decoder is None:
                decoder = _decoders[kind] = msgspec.json.Decoder(kind, dec_hook=hook)
    return decoder
