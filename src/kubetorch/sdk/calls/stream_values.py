"""Values that travel beside the calls of a stream: large values in memory files, and references.

Memory files serve a client and a pod of one user on one machine. The agent names its socket in
WELCOME; a client that cannot reach it, or is another user, sends all values on the stream. So it
does with those that are too many or too large for the agent's share.

The value of a reference goes once, ahead of the first call that names it. A pod that has it no
more, since it was started again or needed the room, refuses a call that names it; the call is then
made once more, with the value ahead of it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from kubetorch.lib import memory_files, private_sockets
from kubetorch.lib.memory_files import FileSocket, MemoryFile, Share
from kubetorch.sdk.calls.stream_writer import (
    LOST,
    Event,
    Frame,
    OutgoingFile,
    PendingCall,
    message,
)
from kubetorch.wire import codecs, exceptions, frames
from kubetorch.wire.frames import Kind
from kubetorch.wire.references import Content, Named
from kubetorch.wire.tuning import LIMITS


class StreamFiles:
    """The memory files that come and go beside one stream."""

    def __init__(self) -> None:
        self._socket: FileSocket | None = None
        #: Bytes of arguments that may be under way in files; 0 after a file that did not go.
        self._limit = 0
        self._share = Share(0)

    def open(self, welcome: frames.Welcome, token: str, client: str) -> None:
        """Connect to the socket of an agent, if this process can; without waiting."""
        self.close()
        if not (
            welcome.memory_socket and memory_files.IS_AVAILABLE and private_sockets.IS_AVAILABLE
        ):
            return
        proof = frames.StreamProof(token, client, welcome.incarnation)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            connection = private_sockets.connect(Path(welcome.memory_socket))
            stack.callback(connection.close)
            connection.send(frames.encode_proof(proof))
            stack.pop_all()
            self._limit, self._share = welcome.memory_share, Share(welcome.memory_share)
            self._socket = FileSocket(connection)

    def can_send(self, size: int, calls: Mapping[int, PendingCall]) -> bool:
        """True if arguments of this size may go in a file, beside those of the open calls."""
        if self._socket is None:
            return False
        sizes = [call.file_bytes for call in list(calls.values()) if call.file_bytes]
        return len(sizes) < LIMITS.memory_file_calls and sum(sizes) + size <= self._limit

    def write(
        self, segments: Sequence[codecs.Segment], size: int, on_unsent: Callable[[], object]
    ) -> OutgoingFile | None:
        """A file with arguments; `None` without room for it, or without a connection."""
        if self._socket is None:
            return None
        try:
            return self._outgoing(MemoryFile.write(codecs.join(segments), size), on_unsent)
        except OSError:
            return None

    def share(self, file: MemoryFile, on_unsent: Callable[[], object]) -> OutgoingFile | None:
        """As `write`, of a file that stays this process's as well."""
        try:
            return self._outgoing(file.share(), on_unsent)
        except OSError:
            return None

    def _outgoing(self, file: MemoryFile, on_unsent: Callable[[], object]) -> OutgoingFile | None:
        files = self._socket
        if files is None:  # it was closed meanwhile
            return None

        def give_up() -> None:
            if self._socket is files:
                self._limit = 0  # the next arguments, those of this call again, go on the stream
            on_unsent()

        return OutgoingFile(files, files.next_number(), file, give_up)

    def take(self, number: int, size: int) -> memoryview:
        """The value in a file of the agent; `OSError` without a descriptor or memory for it."""
        files = self._socket
        if files is None:
            raise OSError("the connection for memory files was closed")
        return self._share.map(files.take(number, size))

    def close(self) -> None:
        files, self._socket = self._socket, None
        if files is not None:
            files.close()


class StreamReferences:
    """The references whose values the pod of one stream got.

    It sends values by `send`, whose events `on_event` gets, and frames by `submit`.
    """

    def __init__(
        self,
        send: Callable[[Content, Callable[[Event], None]], None],
        submit: Callable[[Frame], None],
    ) -> None:
        self._send = send
        self._submit = submit
        self._sent: set[str] = set()
        # Why the pod did not take a value, by identity.
        self._refusals: dict[str, Exception] = {}

    def send_missing(self, named: Iterable[Named]) -> None:
        """Send the values that the pod did not get yet."""
        for identity, content in named:
            if identity in self._sent or content is None:
                continue
            self._sent.add(identity)
            self._refusals.pop(identity, None)
            # By destructors, in any thread at any moment: nothing here takes a lock.
            release = partial(_release, weakref.ref(self), identity)
            weakref.finalize(content, release).atexit = False
            self._send(content, partial(self._on_event, identity))

    def forget(self, named: Iterable[Named]) -> None:
        """Send the values once more with the next call: the pod lacks some."""
        for identity, _ in named:
            self._sent.discard(identity)

    def forget_all(self) -> None:
        self._sent.clear()

    def refusal(self, named: Iterable[Named]) -> Exception | None:
        """Why the pod did not take one of these values."""
        refusals = (self._refusals.get(identity) for identity, _ in named)
        return next(filter(None, refusals), None)

    def _on_event(self, identity: str, event: Event) -> None:
        if event.kind == Kind.ERROR:
            failure = exceptions.parse_json(bytes(event.payload or b""))
            self._refusals[identity] = exceptions.rebuild(failure, modules={})
        if event.kind in (Kind.ERROR, LOST):
            self._sent.discard(identity)

    def _on_released(self, identity: str) -> None:
        self._refusals.pop(identity, None)
        if identity in self._sent:
            self._sent.discard(identity)
            meta = frames.Release((identity,))
            self._submit(Frame(message(frames.encode(Kind.RELEASE, 0, meta))))


def _release(stream: weakref.ref[StreamReferences], identity: str) -> None:
    references = stream()
    if references is not None:
        references._on_released(identity)
