"""The encoded values of references (`kubetorch.sdk.refs`) that this process has.

A call carries the identities of references; the bytes go ahead of the first call on a stream that
names them. Elsewhere, as in a result or a file of pickle, the bytes go with the reference.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextvars import ContextVar
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

from kubetorch.errors import SerializationError
from kubetorch.wire.codecs import VALUES as VALUES
from kubetorch.wire.codecs import layout
from kubetorch.wire.tuning import LIMITS

#: Identities cannot be guessed: who names one may use it.
_IDENTITY = re.compile(r"[A-Za-z0-9_-]{20,64}")


class SharedBytes(Protocol):
    """Bytes that do not change, such as those of a memory file."""

    size: int

    @property
    def view(self) -> memoryview:
        """The bytes, which are only read."""

    def private_view(self) -> memoryview:
        """The bytes once more, which the caller may change."""


class PlainBytes:
    """Few bytes, or those of a system without memory files."""

    def __init__(self, content: bytes | bytearray | memoryview) -> None:
        self._content = bytes(content)
        self.size = len(self._content)

    @property
    def view(self) -> memoryview:
        return memoryview(self._content)

    def private_view(self) -> memoryview:
        return memoryview(bytearray(self._content))


class Content:
    """The encoded value of a reference, in the codec `values`."""

    def __init__(self, identity: str, sizes: Sequence[int], memory: SharedBytes) -> None:
        self.identity = identity
        #: Bytes of each segment.
        self.sizes = tuple(sizes)
        self.memory = memory


class Named(NamedTuple):
    """A reference that a call names, and its content if this process has it."""

    identity: str
    content: Content | None


#: The contents of this process, as long as it uses them.
contents: WeakValueDictionary[str, Content] = WeakValueDictionary()
#: While the arguments of a call are encoded: the references among them, by their identities.
named: ContextVar[dict[str, Named] | None] = ContextVar("named", default=None)


def check(identity: str, sizes: Sequence[int], size: int) -> None:
    """Refuse what no process sends as the identity and the segments of a reference."""
    if not _IDENTITY.fullmatch(identity):
        raise SerializationError(f"{identity[:80]!r} is not the identity of a reference")
    is_sound = 0 < len(sizes) <= LIMITS.payload_segments and min(sizes) >= 0
    if not is_sound or layout(sizes)[1] != size:
        raise SerializationError(f"a reference of {size} bytes in other segments")
