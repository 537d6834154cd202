"""Turns arguments and results into bytes: `json` (the default), `pickle`, `none`.

The module imports only the standard library: the worker, which runs in the user's interpreter, uses
it, too.

On a stream `json` is the codec `values` (`kubetorch.wire.values`): lossless, and safe. Plain HTTP
and the arguments of constructors have strict JSON, which is `json` on the wire.

An encoded value is a list of *segments*. `json` has one, `values` one or two, and `none` one,
except that a result which is text, bytes or a web response has two: the content, and its content
type. `pickle` (protocol 5) has the pickle stream and then one segment per out-of-band buffer. In
both of `values` and `pickle` an array is neither copied into the stream nor out of it. In a payload
each segment begins at a multiple of `ALIGNMENT`, since numeric libraries want aligned memory.

A workload lists the codecs that it allows; call `check_allowed` before decoding a value, because
unpickling runs code.

A result of a call in `none` that is no JSON becomes text or bytes with the attributes that a web
client would see: `.text`, `.content`, `.content_type`.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import itertools
import json
import math
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from kubetorch.errors import SerializationError
from kubetorch.wire import arrays, introspection, values
from kubetorch.wire.tuning import LIMITS
from kubetorch.wire.values import ALIGNMENT, Buffer, GatheredSegment

Codec = Literal["json", "pickle", "none"]


class Writer(Protocol):
    """A file, as far as pickling needs it."""

    def write(self, data: Buffer, /) -> object:
        """Append bytes."""


#: The codecs that users name.
CODECS: tuple[Codec, ...] = ("json", "pickle", "none")
#: The codec for `json` on a stream.
VALUES = "values"
DEFAULT_ALLOWED: tuple[Codec, ...] = ("json",)

values.PACKERS.update(arrays.PACKERS)
values.UNPACKERS.update(arrays.UNPACKERS)

Segment = Buffer | GatheredSegment
#: The most values that are measured, and types of small values.
_MEASURED_VALUES = 1000
_SMALL_TYPES = frozenset({int, float, bool, type(None)})
_MEASURABLE = (list, tuple, dict, str, bytes, bytearray)


def usual(allowed: Iterable[str] | None) -> str:
    """The codec of calls that name none, for a workload that allows these codecs."""
    formats = ["json"] if allowed is None else list(allowed)
    return next((codec for codec in CODECS if codec in formats), "json")


def check_allowed(codec: str, allowed: Iterable[str]) -> None:
    """Refuse a codec that the workload does not allow.

    Decoding `none` decodes JSON, so `none` is allowed where `json` is; and so is `values`, which is
    the codec for `json` on a stream.
    """
    formats = list(allowed)
    codec = "json" if codec == VALUES else codec
    if codec in formats or (codec == "none" and "json" in formats):
        return
    if codec not in CODECS:
        raise SerializationError(
            f"Serialization format {codec!r} is unknown; the formats are {', '.join(CODECS)}"
        )
    raise SerializationError(
        f"Serialization format {codec!r} not allowed. Allowed formats: {formats}",
        hint=f"kt.Compute(allowed_serialization={[*formats, codec]!r}) allows it",
    )


def encode(codec: str, value: object, root: str = "result") -> list[Segment]:
    """The segments of `value`; errors of the codec `values` call it `root`."""
    if codec == VALUES:
        return values.encode(value, root)
    if codec == "pickle":
        return _encode_pickle(value, root)
    try:
        text = _json_encoder.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        description, unfit_part = _find_unencodable(value) or (str(error), None)
        method = introspection.attempt(_json_method, None, type(unfit_part))
        is_carried = introspection.attempt(values.encode, None, unfit_part, root) is not None
        remark = "; calls from Python take it as it is" if is_carried else ""
        hint = f"return its {method}, which JSON carries{remark}"
        advice = values.HINTS.get(type(unfit_part), _PICKLE_HINT)
        # Without its cause, which tells of the encoder in words that say less.
        raise SerializationError(
            f"JSON cannot carry {description}", hint=hint if method else advice
        ) from None
    clash = _find_clash(value) if '":' in text else None
    if clash is not None:
        first, second = clash
        raise SerializationError(
            f"JSON cannot carry the keys {first!r} and {second!r} of one dictionary: both become "
            f"{_json_key(first)!r} there",
            hint=_PICKLE_HINT,
        )
    return [text.encode()]


def is_plain(codec: str, payload: Buffer) -> bool:
    """True if a payload is JSON without tags."""
    return codec in ("json", "none") or (codec == VALUES and bytes(payload[:1]) != values.HEAD)


def check_answer(codec: str, requested_codec: str) -> None:
    """Refuse a pickle as the answer to a request in another codec: unpickling runs code."""
    if codec == "pickle" and requested_codec != "pickle":
        raise SerializationError(
            "the pod answered with a pickle, which this program has not asked for",
            hint='serialization="pickle", or kt replay --trust at a terminal, asks for it; '
            "unpickling runs code of the pod",
        )


def buffer_bytes(arguments: Iterable[object]) -> int:
    """Bytes of the texts and buffers among arguments: a lower bound of their encoded size.

    Enters lists, tuples and dictionaries, up to a number of values that takes little time.
    """
    sizes: dict[int, int] = {}  # by identity: a value that occurs twice is pickled once
    parts = [value for value in arguments if type(value) not in _SMALL_TYPES]
    for value in parts:
        kind: Any = next((base for base in _MEASURABLE if introspection.is_a(value, base)), None)
        if kind in (list, tuple, dict):
            inner = dict.values(value) if kind is dict else kind.__iter__(value)  # type: ignore[arg-type]
            parts.extend(itertools.islice(inner, max(_MEASURED_VALUES - len(parts), 0)))
        elif kind is not None:
            sizes[id(value)] = kind.__len__(value)
        elif type(value) not in _SMALL_TYPES:
            # `attempt`: most values are no buffers.
            sizes[id(value)] = introspection.attempt(_buffer_bytes, 0, value)
    return sum(sizes.values())


def _buffer_bytes(value: Any) -> int:  # noqa: ANN401  # raises for other values
    return memoryview(value).nbytes


def decode(
    codec: str, segments: Sequence[Buffer], *, modules: Mapping[str, str] | None = None
) -> Any:  # noqa: ANN401  # the user's own value
    """The value that `encode` made segments of; raw content as by `decode_raw`."""
    if codec == "pickle":
        return _decode_pickle(segments, modules or {})
    if len(segments) == 2 and codec == "none":
        return decode_raw(bytes(segments[0]), bytes(segments[1]).decode("latin-1"))
    if not segments or not len(segments[0]):
        return None
    if codec == VALUES:
        return values.decode(segments, modules or {})
    if codec not in CODECS:
        raise SerializationError(
            f"a value in the codec {codec[:80]!r} arrived, which is unknown here",
            hint="the other end is newer: pip install -U kubetorch",
        )
    try:
        return _json_decoder.decode(str(segments[0], "utf-8"))
    except (ValueError, RecursionError) as error:
        raise SerializationError(f"the body is not JSON: {error}") from error


# A value that contains itself ends in a RecursionError.
_json_encoder = json.JSONEncoder(allow_nan=False, check_circular=False, separators=(",", ":"))
_json_decoder = json.JSONDecoder()


_PICKLE_HINT = 'kt.Compute(allowed_serialization=["pickle"]) sends it with pickle'
_SCALAR_TYPES = frozenset({str, int, float, bool, type(None)})
_TEXT_TYPES = frozenset({str})


def _find_clash(value: object) -> tuple[object, object] | None:
    """Two keys of a dictionary in `value`, which JSON can encode, with one name in JSON."""
    containers: list[Any] = [value]
    for container in containers:
        items: Iterable[object] = container
        if isinstance(container, dict):
            items = container.values()
            if not _TEXT_TYPES.issuperset(map(type, container)):
                keys_by_name: dict[str, object] = {}
                for key in container:
                    first = keys_by_name.setdefault(_json_key(key), key)
                    if first is not key:
                        return first, key
        if not _SCALAR_TYPES.issuperset(map(type, items)):
            containers.extend(item for item in items if isinstance(item, (dict, list, tuple)))
    return None


def _json_key(key: object) -> str:
    """The name that JSON gives to a key of a dictionary."""
    return key if isinstance(key, str) else _json_encoder.encode(key)


def _find_unencodable(value: object, path: str = "$", depth: int = 0) -> tuple[str, object] | None:
    """The part of `value` that JSON cannot carry: its description, and the part."""
    if value is None or isinstance(value, (str, bool, int)):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else (f"the number {value} at {path}", value)
    if depth > 100:
        return f"a value nested this deep, at {path[:80]}…", value
    if isinstance(value, dict):
        for key, item in value.items():
            if not (key is None or isinstance(key, (str, int, float, bool))):
                return f"a key of type {values.name_of(type(key))} at {path}", key
            unfit_part = _find_unencodable(item, f"{path}.{key}", depth + 1)
            if unfit_part:
                return unfit_part
        return None
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            unfit_part = _find_unencodable(item, f"{path}[{index}]", depth + 1)
            if unfit_part:
                return unfit_part
        return None
    return f"a value of type {values.name_of(type(value))} at {path}", value


def _json_method(kind: type) -> str | None:
    """The method of an array, or of a table, that returns values for JSON."""
    if introspection.module_of(kind).partition(".")[0] not in (*values.LIBRARIES, "jaxlib"):
        return None
    calls = {"tolist": ".tolist()", "to_dicts": ".to_dicts()", "to_dict": '.to_dict("records")'}
    return next((call for name, call in calls.items() if hasattr(kind, name)), None)


# -------------------------------------------------------------------------- segments ↔ payload


def layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    """The offsets of segments in a payload, and its length, in bytes."""
    offsets = []
    position = 0
    for size in sizes:
        position = -(-position // ALIGNMENT) * ALIGNMENT
        offsets.append(position)
        position += size
    return offsets, position


def join(segments: Sequence[Segment]) -> Iterable[Buffer]:
    """The pieces of a payload in order, padding included, without copies."""
    position = 0
    for segment in segments:
        padding = -position % ALIGNMENT
        if padding:
            yield bytes(padding)
        if isinstance(segment, GatheredSegment):
            yield from segment.parts
        else:
            yield segment
        position += padding + len(segment)


def split(payload: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """The segments of a payload, as views of it."""
    if len(sizes) == 1 and sizes[0] == len(payload):
        return [payload]
    offsets, total = layout(sizes)
    if total != len(payload) or any(size < 0 for size in sizes):
        raise SerializationError(f"a payload of {len(payload)} bytes; its segments need {total}")
    return [payload[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]


def to_text(segments: Sequence[Segment]) -> str:
    """The segments of `values` as text, for a source file."""
    return " ".join(base64.b64encode(b"".join(join([segment]))).decode() for segment in segments)


def from_text(text: str, module: str) -> Any:  # noqa: ANN401  # the user's own value
    """The value of text by `to_text`; classes of its `__main__` are looked up in `module`."""
    return values.decode(buffers_of(text), {"__main__": module})


def encode_arguments(arguments: Mapping[str, object], root: str) -> bytes:
    """Arguments of a constructor as a JSON object; as one text by `to_text` if JSON lacks some."""
    segments = values.encode(dict(arguments), root)
    text = b"".join(join(segments[:1]))
    if is_plain(VALUES, text):
        return text
    return json.dumps({values.TAG: to_text(segments)}).encode()


def decode_arguments(arguments: Mapping[str, Any], module: str) -> dict[str, Any]:
    """The arguments of an object by `encode_arguments`, with classes as `from_text` finds them."""
    text = arguments.get(values.TAG)
    return dict(arguments) if text is None else dict(from_text(text, module))


def buffers_of(text: str) -> list[Buffer]:
    return [bytearray(base64.b64decode(part)) for part in text.split(" ")]


class RawText(str):
    """Text that a pod answered with.

    Attributes:
        content: Its bytes.
        content_type: Their type in the pod's answer, such as `text/html`.
    """

    content: bytes
    content_type: str

    @property
    def text(self) -> str:
        """The text itself."""
        return str(self)


class RawBytes(bytes):
    """Bytes that a pod answered with.

    Attributes:
        content_type: Their type in the pod's answer, such as `image/png`.
    """

    content_type: str

    @property
    def content(self) -> bytes:
        """The bytes themselves."""
        return bytes(self)

    @property
    def text(self) -> str:
        """The bytes as UTF-8; invalid bytes are replaced."""
        return self.decode(errors="replace")


def decode_raw(content: bytes, content_type: str) -> object:
    """The value of content that is JSON; else text or bytes, according to the content type."""
    kind, _, parameters = content_type.partition(";")
    kind = kind.strip().lower()
    if kind == "application/json" or kind.endswith("+json"):
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            pass  # the user can look at the text
    if not kind.startswith(("text/", "application/json")):
        data = RawBytes(content)
        data.content_type = content_type
        return data
    text = RawText(_text(content, parameters.lower().rpartition("charset=")[2].strip(' "')))
    text.content = content
    text.content_type = content_type
    return text


def _text(content: bytes, charset: str) -> str:
    try:
        # The worker encodes text with surrogates this way.
        return content.decode(charset or "utf-8", "surrogatepass")
    except (LookupError, ValueError):
        return content.decode(errors="replace")


def _encode_pickle(value: object, root: str) -> list[Segment]:
    """The pickle stream, then one segment for each buffer, up to the limit of segments."""
    buffers: list[pickle.PickleBuffer] = []

    def is_in_stream(buffer: pickle.PickleBuffer) -> bool:
        if len(buffers) == LIMITS.payload_segments - 1:
            return True
        buffers.append(buffer)
        return False

    with _explaining(value, root):
        stream = pickle.dumps(value, protocol=5, buffer_callback=is_in_stream)
        return [stream, *(buffer.raw() for buffer in buffers)]


def write_pickle(file: Writer, value: object) -> None:
    """Pickle a value into a file as it comes, so that memory for the whole is not needed."""
    with _explaining(value, "result"):
        pickle.Pickler(file, protocol=5).dump(value)


@contextlib.contextmanager
def _explaining(value: object, root: str) -> Iterator[None]:
    """Name the part of a value that cannot be pickled."""
    try:
        yield
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        path, unfit_part = _find_unpicklable(value, root)
        if not root:  # the dictionary of arguments
            path = path.replace('["', "", 1).replace('"]', "", 1)
        kind = f"a value of type {introspection.name_of(type(unfit_part))}"
        raise SerializationError(
            f"{f'{path} is ' if path else ''}{kind}{', which' if path else ''} cannot be pickled: "
            f"{introspection.summary(error)}",
            hint=values.HINTS.get(type(unfit_part)),
        ) from error


def in_band(segments: Sequence[Buffer]) -> bytes:
    """One pickle stream out of a stream and its out-of-band buffers, without unpickling it.

    `pickle.loads` of it calls `pickle.loads` with the buffers, so it gives the same value.
    """
    if len(segments) == 1:
        return bytes(segments[0])
    return pickle.dumps(_Rebuild(segments), protocol=5)


class _Rebuild:
    def __init__(self, segments: Sequence[Buffer]) -> None:
        self._segments = segments

    def __reduce__(self) -> tuple[object, ...]:
        stream, *buffers = self._segments
        # Writable where they were writable: arrays that are rebuilt on them can be changed.
        loads = functools.partial(pickle.loads, buffers=[bytearray(buffer) for buffer in buffers])
        return loads, (bytes(stream),)


#: Levels and parts of a value that the search for an unfit part visits.
_PICKLE_DEPTH, _PICKLE_PARTS = 20, 1000


def _find_unpicklable(value: object, path: str, depth: int = 0) -> tuple[str, object]:
    """The innermost part of `value` that cannot be pickled: its path, and the part."""
    if depth < _PICKLE_DEPTH:
        for step, part in itertools.islice(_parts(value), _PICKLE_PARTS):
            if not introspection.attempt(_is_picklable, False, part):
                return _find_unpicklable(part, path + step, depth + 1)
    return path, value


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """The parts of a container, or the attributes of an object, each with its path."""
    if type(value) is dict:
        for key, item in value.items():
            yield f"[{json.dumps(key) if type(key) is str else introspection.shown(key)}]", item
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):  # type: ignore[arg-type]  # one of the two
            yield f"[{index}]", item
    else:
        attributes = introspection.attribute(value, "__dict__")
        if type(attributes) is dict:
            yield from ((f".{name}", item) for name, item in attributes.items())


def _is_picklable(value: object) -> bool:
    pickle.dumps(value, protocol=5, buffer_callback=lambda _: False)
    return True


def _decode_pickle(segments: Sequence[Buffer], modules: Mapping[str, str]) -> object:
    """The value of segments by `_encode_pickle`; it uses their buffers in place."""
    if not segments:
        raise SerializationError("the body of a pickled value is empty")
    try:
        if modules:
            return _Unpickler(bytes(segments[0]), segments[1:], modules).load()
        return pickle.loads(segments[0], buffers=segments[1:])
    except (SerializationError, *introspection.INTERRUPTS):
        raise
    except BaseException as error:  # unpickling runs code of the user's classes
        raise SerializationError(
            f"the pickled value cannot be rebuilt here: {introspection.summary(error)}",
            hint="both ends need the same classes and compatible versions of their libraries",
        ) from error


class _Unpickler(pickle.Unpickler):
    """Finds classes under the module names of this process."""

    def __init__(self, stream: bytes, buffers: Sequence[Buffer], modules: Mapping[str, str]):
        super().__init__(io.BytesIO(stream), buffers=iter(buffers))
        self._modules = modules

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401  # as the base has it
        return super().find_class(self._modules.get(module, module), name)
