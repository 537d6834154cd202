"""The worker's end of the socket: frames out from any thread, payloads in and out."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Sequence
from typing import NoReturn

from kubetorch.lib import memory, processes
from kubetorch.lib.memory import Lending, Mappings, Memory
from kubetorch.pod.worker import protocol
from kubetorch.pod.worker.protocol import Buffer, Frame
from kubetorch.wire import codecs


class Connection:
    """The socket to the agent."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._receiver = protocol.Receiver(sock)
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._mappings = Mappings()
        self._lending = Lending()
        #: In the environment of all that this process starts; known once it is loaded.
        self.marker = ""
        # A child that user code forks shares the socket: it must neither write to it nor keep it
        # open when this process ends.
        os.register_at_fork(after_in_parent=self._mappings.on_fork, after_in_child=sock.close)

    # ------------------------------------------------------------------------------- receiving

    def receive(self) -> bool:
        """Wait for frames; false when the agent is gone. One thread at a time."""
        # Waiting in `recv` instead, this thread would be woken by the agent's reading as well: the
        # peer of a Unix socket is told that there is room again.
        self._readable.poll()
        try:
            return self._receiver.receive()
        except OSError:
            return False

    def next(self) -> Frame | None:
        """The next frame of what was received, but for those that concern memory files."""
        while True:
            frame = self._receiver.next()
            if frame is None:
                return None
            if frame.kind == protocol.RELEASE:
                with self._lock:
                    is_spent = bool(frame.flags & protocol.SPENT)
                    self._lending.take_back(frame.argument, is_spent=is_spent)
            elif frame.kind == protocol.FORGET:
                self._mappings.forget(frame.argument)
            elif frame.kind == protocol.TRIM:
                memory.trim()
                self._write([])
            else:
                return frame

    def payload(self, frame: Frame) -> Buffer:
        """The payload of a frame; to be called in the order of the frames.

        Raises:
            OSError: It lies in a memory file that this process had no room for.
        """
        if not frame.flags & protocol.FILE:
            return frame.payload
        return self._mappings.open(frame.argument, frame.length, frame.descriptor)

    # --------------------------------------------------------------------------------- sending

    def send(self, kind: int, call: int = 0, payload: bytes = b"", *, argument: int = 0) -> None:
        """Send a frame with an inline payload."""
        head = protocol.pack(kind, call, argument=argument, length=len(payload))
        self._write([head, payload] if payload else [head])

    def send_value(self, kind: int, call: int, codec: str, value: object, flags: int = 0) -> None:
        """Encode a value and send it.

        Raises:
            SerializationError: The codec cannot carry it.
        """
        segments = _encode(codec, value)
        sizes = [len(segment) for segment in segments]
        packed, meta = protocol.pack_sizes(codec, sizes)
        flags |= packed
        if len(segments) == 1:
            length = sizes[0]
        else:
            _, length = codecs.layout(sizes)
        if length > protocol.INLINE:
            stored = self._store(segments, sizes, length)
            if stored is not None:
                self._send_memory(kind, call, flags, meta, stored, length)
                return
        head = protocol.pack(kind, call, flags=flags, meta=meta, length=length)
        self._write([head, *codecs.join(segments)])

    def _store(
        self, segments: Sequence[Buffer], sizes: Sequence[int], length: int
    ) -> Memory | None:
        """Put a payload into a memory file; `None` when there is no room for one."""
        try:
            stored = memory.allocate(length)
        except OSError:
            return None
        offsets, _ = codecs.layout(sizes)
        try:
            for offset, segment in zip(offsets, segments, strict=True):
                stored.write(offset, segment)
        except OSError:
            return None
        return stored

    def _send_memory(
        self, kind: int, call: int, flags: int, meta: bytes, stored: Memory, length: int
    ) -> None:
        with self._lock:
            number, descriptor = self._lending.lend(stored)
            stored.release()
            flags |= protocol.FILE | (0 if descriptor is None else protocol.DESCRIPTOR)
            head = protocol.pack(kind, call, flags=flags, argument=number, meta=meta, length=length)
            self._write_locked([head], descriptor)

    def _write(self, parts: list[Buffer]) -> None:
        if os.getpid() != self._pid:  # a fork of user code; another thread of its parent may
            os._exit(0)  # have held the lock
        with self._lock:
            self._write_locked(parts)

    def _write_locked(self, parts: list[Buffer], descriptor: int | None = None) -> None:
        for number, is_spent in self._mappings.returned():
            flags = protocol.SPENT if is_spent else 0
            parts.insert(0, protocol.pack(protocol.RELEASE, flags=flags, argument=number))
        for number in self._lending.forgotten():
            parts.insert(0, protocol.pack(protocol.FORGET, argument=number))
        if not parts:
            return
        if len(parts) > _MOST_PARTS:
            parts = [b"".join(parts)]
        try:
            if descriptor is None:
                sent = self._socket.sendmsg(parts)
            else:
                sent = self._socket.sendmsg(parts, protocol.rights(descriptor))
            total = sum(len(part) for part in parts)
            if sent < total:
                self._socket.sendall(memoryview(b"".join(parts))[sent:])
        except OSError:
            self.end()

    def end(self) -> NoReturn:
        """End this process and all that it started: the agent is gone."""
        processes.kill_session(os.getpid(), marker=self.marker)
        os._exit(1)


#: Buffers that one system call takes; POSIX promises no more than 1024 at the places we run.
_MOST_PARTS = 512


def _encode(codec: str, value: object) -> list[codecs.Segment]:
    """As `kubetorch.wire.codecs.encode`; in `none`, raw content keeps its type beside it.

    With `none`, bytes, text, and web responses (whatever has a `body` of bytes) travel as two
    segments: the content, and its content type. All else is JSON, one segment.
    """
    if codec != "none":
        return codecs.encode(codec, value)
    if isinstance(value, str):
        return [value.encode(errors="surrogatepass"), b"text/plain; charset=utf-8"]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return [bytes(value), b"application/octet-stream"]
    body = getattr(value, "body", None)
    if isinstance(body, bytes):
        kind = getattr(value, "media_type", None)
        headers = getattr(value, "headers", None)
        with contextlib.suppress(Exception):
            kind = headers["content-type"] if headers else kind
        return [body, str(kind or "application/octet-stream").encode()]
    return codecs.encode(codec, value)
