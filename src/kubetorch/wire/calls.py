"""The outcome of a call, one value or one failure, and the record that `kt replay` runs again.

The outcome of a spawned call and the record of a call are packed and kept as blobs; another process
reads them, perhaps with another version of this package. A packed outcome, and a packed record, is

     0             4             8                   a multiple of 64
    +-------------+-------------+-------------------+---------+
    | KTO1 / KTR1 | meta length | meta (JSON), pad  | payload |
    +-------------+-------------+-------------------+---------+

The payload begins at a multiple of 64 bytes, so the buffers of a pickled array stay aligned. Of an
outcome it is the encoded value as `kubetorch.wire.codecs` lays it out, or a failure as JSON; of a
record it is the arguments of the call, still encoded. Of arguments that were not kept, the record
says why.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Mapping
from typing import Any

import msgspec

from kubetorch.errors import CallRefusedError, ProtocolError
from kubetorch.wire import codecs, exceptions, frames, rank_values
from kubetorch.wire.tuning import LIMITS
from kubetorch.wire.values import ALIGNMENT

Buffer = bytes | bytearray | memoryview

#: The pattern of identities of spawned calls, which are names of files, too.
CALL_ID = re.compile(r"[A-Za-z0-9_-]{8,64}")
_HEAD = struct.Struct("!4sI")
_OUTCOME_MAGIC, _RECORD_MAGIC = b"KTO1", b"KTR1"


def new_call_id() -> str:
    """The identity of a new call, unique in the world: 32 hexadecimal digits."""
    return os.urandom(16).hex()


def check_arguments(size: int) -> None:
    """Refuse arguments of more than `arguments_bytes` bytes."""
    if size > LIMITS.arguments_bytes:
        raise CallRefusedError(
            f"arguments of {size} bytes; {LIMITS.arguments_bytes} are allowed",
            hint="send a name or a path of large data instead of the data itself",
        )


class Returned(msgspec.Struct, frozen=True):
    """The call returned a value, still encoded.

    Attributes:
        sizes: Bytes of each of its segments.
        payload: The segments, as `kubetorch.wire.codecs.layout` places them.
        streamed: The call was a generator: this is its return value, behind its last value.
    """

    codec: str
    sizes: tuple[int, ...]
    payload: Buffer
    streamed: bool = False
    generation: int = 0
    instance: str | None = None


class Raised(msgspec.Struct, frozen=True):
    """The call ended with an exception, or did not run at all (`failure.started` is false)."""

    failure: exceptions.Failure


Outcome = Returned | Raised


def returned(meta: frames.Result, payload: Buffer) -> Returned:
    body = meta.body
    return Returned(body.codec, body.sizes, payload, meta.streamed, meta.generation)


def raised(payload: Buffer) -> Raised:
    """Decode the payload of an ERROR frame; any bytes give an error."""
    return Raised(exceptions.parse_json(bytes(payload)))


def value_of(
    outcome: Outcome, *, modules: Mapping[str, str] | None = None, requested_codec: str = "pickle"
) -> Any:  # noqa: ANN401  # the user's own value
    """The value that a call returned; its request named `requested_codec`.

    Raises the exception of the call, or `SerializationError` for a value that cannot be rebuilt
    here, and no other error for any outcome.
    """
    if isinstance(outcome, Raised):
        raise exceptions.rebuild(outcome.failure, modules=modules)
    segments = codecs.split(memoryview(outcome.payload), outcome.sizes)
    if outcome.codec == rank_values.CODEC:
        entries = rank_values.unpack(segments)
        for entry in entries:
            codecs.check_answer(entry.codec, requested_codec)
        return [codecs.decode(entry.codec, entry.segments, modules=modules) for entry in entries]
    codecs.check_answer(outcome.codec, requested_codec)
    return codecs.decode(outcome.codec, segments, modules=modules)


def pack_outcome(outcome: Outcome) -> bytes:
    """An outcome as one blob."""
    return b"".join(packed(outcome))


def packed(outcome: Outcome) -> tuple[bytes, Buffer]:
    """The two parts of that blob: its head, and the payload without a copy."""
    meta: dict[str, Any]
    if isinstance(outcome, Raised):
        meta = {"outcome": "raised"}
        payload: Buffer = outcome.failure.to_json()
    else:
        meta = {
            "outcome": "returned",
            "codec": outcome.codec,
            "sizes": list(outcome.sizes),
            "streamed": outcome.streamed,
            "generation": outcome.generation,
        }
        payload = outcome.payload
    return _pack_head(_OUTCOME_MAGIC, meta), payload


def unpack_outcome(data: Buffer) -> Outcome:
    """The outcome that `pack_outcome` packed; the payload is a view of `data`."""
    view = memoryview(data)
    meta, payload = _unpack_head(view, _OUTCOME_MAGIC, "a packed outcome")
    if meta.get("outcome") == "raised":
        return raised(payload)
    codec, sizes = meta.get("codec"), meta.get("sizes")
    if (
        meta.get("outcome") != "returned"
        or not isinstance(codec, str)
        or not isinstance(sizes, list)
        or not all(type(size) is int and size >= 0 for size in sizes)
        or codecs.layout(sizes)[1] != len(payload)
    ):
        raise ProtocolError("a packed outcome whose head and payload do not agree")
    generation = meta.get("generation", 0)
    return Returned(
        codec,
        tuple(sizes),
        payload,
        streamed=meta.get("streamed") is True,
        generation=generation if type(generation) is int else 0,
    )


class Record(msgspec.Struct, frozen=True):
    """A call that has ended.

    Attributes:
        callable: Name of the callable in OPEN frames.
        sizes: Bytes of each segment of the arguments.
        failure: How it failed, as JSON; empty if it did not.
        omission: Why the arguments were not kept; empty if they were.
    """

    callable: str
    method: str | None
    codec: str
    sizes: tuple[int, ...]
    arguments: Buffer
    failure: bytes = b""
    omission: str = ""

    @property
    def outcome(self) -> str:
        """How the call ended, in words: who looks at a record imports no module that it names."""
        failure = exceptions.parse_json(self.failure)
        return f"raised {failure.error_type}: {failure.message}" if self.failure else "returned"


def pack_record(record: Record) -> tuple[bytes, Buffer]:
    """The two parts of the blob: its head, and the arguments without a copy."""
    meta = {
        "callable": record.callable,
        "method": record.method,
        "codec": record.codec,
        "sizes": list(record.sizes),
        "failure": record.failure.decode(),
        "omission": record.omission,
    }
    return _pack_head(_RECORD_MAGIC, meta), record.arguments


def unpack_record(data: Buffer) -> Record:
    """The record that `pack_record` packed; the arguments are a view of `data`."""
    view = memoryview(data)
    meta, arguments = _unpack_head(view, _RECORD_MAGIC, "the record of a call")
    texts = [meta.get(name) for name in ("callable", "codec", "failure", "omission")]
    method, sizes, omission = meta.get("method"), meta.get("sizes"), meta.get("omission")
    if (
        not all(isinstance(text, str) for text in texts)
        or not (method is None or isinstance(method, str))
        or not isinstance(sizes, list)
        or not all(type(size) is int and size >= 0 for size in sizes)
        or (not omission and codecs.layout(sizes)[1] != len(arguments))
    ):
        raise ProtocolError("the head of the record of a call does not fit its arguments")
    name, codec, failure, omission = map(str, texts)
    try:
        encoded_failure = failure.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON may have
        raise ProtocolError("the failure in the record of a call is no text") from error
    return Record(name, method, codec, tuple(sizes), arguments, encoded_failure, omission)


def _pack_head(magic: bytes, meta: Mapping[str, Any]) -> bytes:
    text = json.dumps(meta, separators=(",", ":")).encode()
    text += b" " * (-(_HEAD.size + len(text)) % ALIGNMENT)
    return _HEAD.pack(magic, len(text)) + text


def _unpack_head(view: memoryview, magic: bytes, name: str) -> tuple[dict[str, Any], memoryview]:
    """The meta and the payload of a blob, which errors call `name`."""
    if len(view) < _HEAD.size:
        raise ProtocolError(f"{name} of {len(view)} bytes")
    blob_magic, length = _HEAD.unpack_from(view)
    end = _HEAD.size + length
    if blob_magic != magic or end > len(view):
        raise ProtocolError(f"these bytes are not {name}")
    try:
        meta = json.loads(bytes(view[_HEAD.size : end]))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the head of {name} is not JSON") from error
    if not isinstance(meta, dict):
        raise ProtocolError(f"the head of {name} is no JSON object")
    return meta, view[end:]
