"""How arguments and results become bytes: `json` (default, strict), `pickle`, `none`.

Standard library only: the worker, which runs in the user's interpreter, uses this module too.

An encoded value is a list of *segments*. `json` has one, and so has `none`, except that a result
which is text, bytes or a web response has two: the content, and its content type. `pickle`
(protocol 5) has the pickle stream and then one segment per out-of-band buffer, so an array is
neither copied into the stream nor out of it. In a payload each segment begins at a multiple of
`ALIGNMENT`, since numeric libraries want aligned memory.

A workload says which codecs it allows; `check_allowed` is to be called before anything is decoded,
because unpickling runs code.
"""

from __future__ import annotations

import json
import json.encoder
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from kubetorch.errors import SerializationError

Codec = Literal["json", "pickle", "none"]
CODECS: tuple[Codec, ...] = ("json", "pickle", "none")
DEFAULT_ALLOWED: tuple[Codec, ...] = ("json",)

ALIGNMENT = 64

Segment = bytes | bytearray | memoryview


def check_allowed(codec: str, allowed: Iterable[str]) -> None:
    """Refuse a codec that the workload does not allow.

    `none` is JSON for everything that is decoded, so it is allowed wherever `json` is.

    Raises:
        SerializationError: It is not allowed, or there is no such codec.
    """
    formats = list(allowed)
    if codec in formats or (codec == "none" and "json" in formats):
        return
    if codec not in CODECS:
        raise SerializationError(
            f"Serialization format {codec!r} is unknown; there are {', '.join(CODECS)}"
        )
    raise SerializationError(
        f"Serialization format {codec!r} not allowed. Allowed formats: {formats}",
        hint=f"kt.Compute(allowed_serialization={[*formats, codec]!r}) allows it",
    )


def encode(codec: str, value: object) -> list[Segment]:
    """The segments of `value`.

    Raises:
        SerializationError: The codec cannot carry it; the message says where in the value.
    """
    if codec == "pickle":
        from kubetorch.wire import pickling  # noqa: PLC0415  # agents and most programs do without

        return pickling.encode(value)
    try:
        return [_encode_json(value).encode()]
    except (TypeError, ValueError, RecursionError) as error:
        raise SerializationError(
            f"JSON cannot carry {_find_unencodable(value) or str(error)}",
            hint='serialization="pickle" carries any Python value, where the workload allows it',
        ) from error


def decode(
    codec: str,
    segments: Sequence[Segment],
    *,
    modules: Mapping[str, str] | None = None,
) -> Any:  # noqa: ANN401  # the user's own value
    """The value that `encode` was given; raw content as `kubetorch.wire.raw.decode` gives it.

    Args:
        codec: What it was encoded with.
        segments: As `encode` returned them; buffers are used in place.
        modules: Modules to look up under another name: a script is `__main__` in the process that
            runs it and has its file's name in a pod.

    Raises:
        SerializationError: The segments are not what the codec demands.
    """
    if codec == "pickle":
        from kubetorch.wire import pickling  # noqa: PLC0415  # as above

        return pickling.decode(segments, modules or {})
    if len(segments) == 2 and codec == "none":
        from kubetorch.wire import raw  # noqa: PLC0415  # as above

        return raw.decode(bytes(segments[0]), bytes(segments[1]).decode("latin-1"))
    if not segments or not len(segments[0]):
        return None
    try:
        return _json_decoder.decode(str(segments[0], "utf-8"))
    except (ValueError, RecursionError) as error:
        raise SerializationError(f"the body is not JSON: {error}") from error


_json_encoder = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_json_decoder = json.JSONDecoder()


def _make_encode_json() -> Callable[[object], str]:
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return _json_encoder.encode
    # What `JSONEncoder.encode` makes anew for each value, which costs more than encoding a call.
    # Without markers a value that contains itself ends in a RecursionError.
    quote = json.encoder.encode_basestring_ascii
    chunks = make(None, _json_encoder.default, quote, None, ":", ",", False, False, False)
    return lambda value: "".join(chunks(value, 0))


_encode_json = _make_encode_json()


def _find_unencodable(value: object, path: str = "$", depth: int = 0) -> str | None:
    """Where in `value` is what JSON cannot carry, in words."""
    if value is None or isinstance(value, (str, bool, int)):
        return None
    if isinstance(value, float):
        finite = value - value == 0
        return None if finite else f"the number {value} at {path}"
    if depth > 100:
        return f"a value nested this deep, at {path[:80]}…"
    if isinstance(value, dict):
        for key, item in value.items():
            if not (key is None or isinstance(key, (str, int, float, bool))):
                return f"a key of type {_type_name(key)} at {path}"
            found = _find_unencodable(item, f"{path}.{key}", depth + 1)
            if found:
                return found
        return None
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            found = _find_unencodable(item, f"{path}[{index}]", depth + 1)
            if found:
                return found
        return None
    return f"a value of type {_type_name(value)} at {path}"


def _type_name(value: object) -> str:
    cls = type(value)
    return (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )


# -------------------------------------------------------------------------- segments ↔ payload


def layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where segments of these sizes lie in a payload, and how long it is, in bytes."""
    offsets = []
    position = 0
    for size in sizes:
        position = -(-position // ALIGNMENT) * ALIGNMENT
        offsets.append(position)
        position += size
    return offsets, position


def join(segments: Sequence[Segment]) -> Iterable[Segment]:
    """The pieces of a payload in order, padding included; nothing is copied."""
    position = 0
    for segment in segments:
        padding = -position % ALIGNMENT
        if padding:
            yield bytes(padding)
        yield segment
        position += padding + len(segment)


def split(payload: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """The segments of a payload, as views of it.

    Raises:
        SerializationError: The sizes do not fit the payload.
    """
    offsets, total = layout(sizes)
    if total != len(payload) or any(size < 0 for size in sizes):
        raise SerializationError(f"a payload of {len(payload)} bytes; its segments need {total}")
    return [payload[at : at + size] for at, size in zip(offsets, sizes, strict=True)]
