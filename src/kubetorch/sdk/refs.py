"""`kt.ref`: a value that travels once to each machine, however many calls take it.

    array ── kt.ref ── Ref ──(identity)── call 1, call 2, … of any service
                        │
                     Content, a memory file ── once ── agent of a pod ── its workers map it

Who has a `Ref` has the bytes, too: its creator, a worker that runs a call with it, and whoever got
it in a result. So it needs no server, and its end needs no protocol: the last `Ref` of a process
that goes releases it in the pods that got it from there.

The module needs only the standard library: workers use it, too.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from kubetorch.config import environment
from kubetorch.errors import ReferenceLostError
from kubetorch.lib import memory_files
from kubetorch.lib.memory_files import MemoryFile
from kubetorch.sdk.tuning import LIMITS
from kubetorch.wire import codecs, references
from kubetorch.wire.references import Content, Named, PlainBytes, SharedBytes

Value = TypeVar("Value")
_Buffer = bytes | bytearray | memoryview


class Ref:
    """A reference to a value, for any number of calls of any service; `kt.ref` makes it.

    A function that is called with it gets the value; a reference inside of a list, a dict or an
    object arrives as a reference.

    Attributes:
        id: Its identity.
        size_bytes: Bytes of the encoded value.
        creator: The process that made it.
    """

    #: As handles have one, for the default codec.
    kind: ClassVar[str] = "ref"

    def __init__(
        self,
        identity: str,
        creator: str,
        size_bytes: int,
        content: Content | None,
        modules: Mapping[str, str],
    ) -> None:
        self.id = identity
        self.creator = creator
        self.size_bytes = size_bytes
        self._content = content
        self._modules = modules

    def get(self) -> Any:  # noqa: ANN401  # the user's own value
        """The value, anew with each call: a change of it is seen by nobody else.

        Raises:
            ReferenceLostError: This process does not have its bytes.
        """
        content = self._present_content()
        segments = codecs.split(content.memory.private_view(), content.sizes)
        return codecs.decode(references.VALUES, segments, modules=self._modules)

    def __repr__(self) -> str:
        # Not the whole identity, which is the right to read the value: this is for logs.
        return f"<kt.Ref {self.id[:8]}…: {self.size_bytes} bytes of {self.creator}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ref) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __copy__(self) -> Ref:
        return self

    def __deepcopy__(self, memo: object) -> Ref:
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:  # noqa: ANN401  # as the base has it
        *state, content = self._to_wire()
        if content is None:
            return _rebuild, (*state, None)
        return _rebuild, (*state, pickle.PickleBuffer(content) if protocol >= 5 else bytes(content))

    def _find_content(self) -> Content | None:
        if self._content is None:
            self._content = references.contents.get(self.id)
        return self._content

    def _present_content(self) -> Content:
        content = self._find_content()
        if content is None:
            raise ReferenceLostError.of(
                self.id,
                f"the value of the reference {self.id[:8]}… ({self.size_bytes} bytes, made by "
                f"{self.creator}) is not in this process",
                "pass the reference itself in the call, by a process that has it; if its creator "
                "has ended, make it anew with kt.ref(value)",
            )
        return content

    def _to_wire(self) -> tuple[str, str, int, list[int], memoryview | None]:
        """What travels; among the arguments of a call without the bytes, which go ahead."""
        named = references.named.get()
        if named is not None:
            named[self.id] = Named(self.id, self._find_content())
            return self.id, self.creator, self.size_bytes, [self.size_bytes], None
        content = self._present_content()
        return self.id, self.creator, self.size_bytes, [*content.sizes], content.memory.view

    @classmethod
    def _from_wire(
        cls,
        state: tuple[str, str, int, Sequence[int]],
        content: _Buffer | None,
        modules: Mapping[str, str],
    ) -> Ref:
        """The reference that `_to_wire` described."""
        identity, creator, size, sizes = state
        references.check(identity, sizes, size)
        present = references.contents.get(identity)
        if present is None and content is not None:
            # Its segments lie as their sizes say, else they cannot be decoded safely.
            references.check(identity, sizes, len(content))
            present = _keep(Content(identity, sizes, _stored([content], size)))
        return cls(identity, creator, size, present, modules)


def ref(value: object) -> Ref:
    """Make a reference to a value, which is encoded now; later changes of it are not seen.

    Its bytes stay in the memory of this process as long as a `Ref` to it is used, and in a pod as
    long as a process that sent it there uses one, or a call runs with it.

    Args:
        value: What a call may have as an argument, in the default codec.

    Returns:
        The reference; a reference itself if `value` is one.

    Raises:
        SerializationError: The value cannot travel.

    Example:
        weights = kt.ref(array)
        results = [score(weights, batch) for batch in batches]
    """
    if isinstance(value, Ref):
        return value
    token = references.named.set(None)  # it is no argument, though a call may be being made
    try:
        segments = codecs.encode(references.VALUES, value, "value")
    finally:
        references.named.reset(token)
    sizes = tuple(map(len, segments))
    memory = _stored(codecs.join(segments), codecs.layout(sizes)[1])
    content = _keep(Content(secrets.token_urlsafe(16), sizes, memory))
    return Ref(content.identity, _creator(), memory.size, content, {})


def resolve(argument: Value) -> Any | Value:  # noqa: ANN401  # the user's own value
    """The value of an argument that is a reference; else the argument."""
    return argument.get() if isinstance(argument, Ref) else argument


def _rebuild(
    identity: str, creator: str, size: int, sizes: Sequence[int], content: _Buffer | None
) -> Ref:
    return Ref._from_wire((identity, creator, size, sizes), content, {})


def _keep(content: Content) -> Content:
    references.contents[content.identity] = content
    return content


def _stored(pieces: Any, size: int) -> SharedBytes:  # noqa: ANN401  # buffers, read once
    """Bytes in a memory file, if they are many and there is room for one."""
    if memory_files.IS_AVAILABLE and size > LIMITS.reference_memory_file_bytes:
        pieces = list(pieces)
        try:
            return MemoryFile.write(pieces, size)
        except OSError:  # no descriptor, or no room
            return PlainBytes(b"".join(pieces))
    return PlainBytes(b"".join(pieces))


def _creator() -> str:
    if environment.is_in_pod():
        return f"pod {environment.pod_name()}, process {os.getpid()}"
    return f"{socket.gethostname()}, process {os.getpid()}"
