"""The record of a call: what `kt replay` needs to run it again, as one packed blob.

     0      4             8                   a multiple of 64
    +------+-------------+-------------------+-----------+
    | KTR1 | meta length | meta (JSON), pad  | arguments |
    +------+-------------+-------------------+-----------+

The arguments are those of the call, still encoded. Of arguments that were not kept, the record says
why.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

from kubetorch.errors import ProtocolError
from kubetorch.wire import codecs, exceptions

Buffer = bytes | bytearray | memoryview

_HEAD = struct.Struct("!4sI")
_MAGIC = b"KTR1"


@dataclass(frozen=True)
class Record:
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


def pack(record: Record) -> tuple[bytes, Buffer]:
    """The two parts of the blob: its head, and the arguments without a copy."""
    meta = {
        "callable": record.callable,
        "method": record.method,
        "codec": record.codec,
        "sizes": list(record.sizes),
        "failure": record.failure.decode(),
        "omission": record.omission,
    }
    text = json.dumps(meta, separators=(",", ":")).encode()
    text += b" " * (-(_HEAD.size + len(text)) % codecs.ALIGNMENT)
    return _HEAD.pack(_MAGIC, len(text)) + text, record.arguments


def unpack(data: Buffer) -> Record:
    """The record that `pack` packed; the arguments are a view of `data`."""
    view = memoryview(data)
    meta, arguments = _unpack(view)
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


def _unpack(view: memoryview) -> tuple[dict[str, Any], memoryview]:
    if len(view) < _HEAD.size:
        raise ProtocolError(f"a record of a call of {len(view)} bytes")
    magic, length = _HEAD.unpack_from(view)
    end = _HEAD.size + length
    if magic != _MAGIC or end > len(view):
        raise ProtocolError("these bytes are not the record of a call")
    try:
        meta = json.loads(bytes(view[_HEAD.size : end]))
    except (ValueError, RecursionError) as error:
        raise ProtocolError("the head of the record of a call is not JSON") from error
    if not isinstance(meta, dict):
        raise ProtocolError("the head of the record of a call is no JSON object")
    return meta, view[end:]
