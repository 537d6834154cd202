"""The agent's end of the socket to a worker: frames both ways, payloads in memory files.

Nothing here blocks: what the socket has no room for waits in a queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from kubetorch.lib import memory
from kubetorch.lib.memory import Lending, Mappings, Memory
from kubetorch.pod.user_process import protocol
from kubetorch.pod.user_process.protocol import Buffer, Frame

#: Seconds between two looks for memory files that can be given back, as long as there are any.
TRIM_DELAY = 1.5

_log = logging.getLogger(__name__)
_NOTHING = memoryview(b"")


class Payload(Protocol):
    """Bytes on their way. Whoever has it last releases it."""

    @property
    def view(self) -> memoryview:
        """The bytes."""

    def release(self) -> None:
        """Release the bytes. May be called twice."""


class OwnedPayload:
    """A payload whose memory lives as long as something was made from its view."""

    __slots__ = ("view",)

    def __init__(self, data: Buffer) -> None:
        self.view = memoryview(data)

    def release(self) -> None:
        self.view = _NOTHING


class WorkerSocket:
    """The socket to one worker."""

    def __init__(
        self, sock: socket.socket, on_frame: Callable[[Frame], None], on_end: Callable[[], None]
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._on_frame = on_frame
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._receiver = protocol.Receiver(sock)
        self._lending = Lending()
        self._mappings = Mappings()
        # Bytes that the socket had no room for, each with the descriptor that goes with it.
        self._waiting: deque[tuple[memoryview, int | None]] = deque()
        self._trim: asyncio.TimerHandle | None = None
        self._loop.add_reader(sock.fileno(), self._read)

    def send(self, head: bytes, descriptor: int | None = None) -> None:
        """Send a frame without a payload, and the descriptor that it announces."""
        self._send([head], descriptor)

    def send_payload(
        self, kind: int, call: int, codec: str, sizes: Sequence[int], payload: Payload, rest: bytes
    ) -> None:
        """Send a frame with a payload, which is released."""
        flags, meta = protocol.pack_sizes(codec, sizes)
        length = len(payload.view)
        if isinstance(payload, Memory) and length > protocol.INLINE:
            number, descriptor = self._lending.lend(payload)
            flags |= protocol.FILE | (0 if descriptor is None else protocol.DESCRIPTOR)
            if payload.is_shared:
                flags |= protocol.SHARED
            head = protocol.pack(
                kind, call, flags=flags, argument=number, meta=meta + rest, length=length
            )
            self._send([head], descriptor)
            self._trim_later()
        else:
            head = protocol.pack(kind, call, flags=flags, meta=meta + rest, length=length)
            self._send([head, payload.view] if length else [head])
        payload.release()

    def _send(self, parts: list[Buffer], descriptor: int | None = None) -> None:
        for number, _ in self._mappings.returned():
            parts.insert(0, protocol.pack(protocol.RELEASE, argument=number))
        for number in self._lending.forgotten():
            parts.insert(0, protocol.pack(protocol.FORGET, argument=number))
        if self._waiting:
            self._wait(b"".join(parts), descriptor)
            return
        try:
            rights = [] if descriptor is None else protocol.rights(descriptor)
            sent = self._socket.sendmsg(parts, rights)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # its end is noticed when it is read
        total = sum(map(len, parts))
        if sent < total:
            self._wait(b"".join(parts)[sent:], None if sent else descriptor)
            self._loop.add_writer(self._socket.fileno(), self._flush)

    def _wait(self, data: bytes, descriptor: int | None) -> None:
        # A duplicate: the file may be closed before its turn comes.
        held = None if descriptor is None else os.dup(descriptor)
        self._waiting.append((memoryview(data), held))

    def _flush(self) -> None:
        while self._waiting:
            data, descriptor = self._waiting[0]
            try:
                rights = [] if descriptor is None else protocol.rights(descriptor)
                sent = self._socket.sendmsg([data], rights)
            except BlockingIOError:
                return
            except OSError:
                break
            if descriptor is not None:
                os.close(descriptor)
            if sent < len(data):
                self._waiting[0] = data[sent:], None
                return
            self._waiting.popleft()
        self._drop_waiting()
        self._loop.remove_writer(self._socket.fileno())

    def _drop_waiting(self) -> None:
        for _, descriptor in self._waiting:
            if descriptor is not None:
                os.close(descriptor)
        self._waiting.clear()

    def payload(self, frame: Frame) -> OwnedPayload:
        """The payload of a frame; to be called in the order of the frames."""
        if not frame.flags & protocol.FILE:
            return OwnedPayload(frame.payload)
        self._trim_later()
        return OwnedPayload(self._mappings.open(frame.argument, frame.length, frame.descriptor))

    def read_rest(self) -> None:
        """Take what the worker sent before it ended."""
        with contextlib.suppress(OSError):
            while self._socket.fileno() >= 0 and self._receiver.receive():
                self._dispatch()

    def _read(self) -> None:
        try:
            is_open = self._receiver.receive()
        except BlockingIOError:
            return
        except OSError:
            is_open = False
        if is_open:
            self._dispatch()
        else:
            self._loop.remove_reader(self._socket.fileno())
            self._on_end()

    def _dispatch(self) -> None:
        while True:
            frame = self._receiver.next()
            if frame is None:
                return
            if frame.kind == protocol.RELEASE:
                is_spent = bool(frame.flags & protocol.SPENT)
                self._lending.take_back(frame.argument, is_spent=is_spent)
            elif frame.kind == protocol.FORGET:
                self._mappings.forget(frame.argument)
            else:
                try:
                    self._on_frame(frame)
                except Exception:  # noqa: BLE001  # one sink must not stop the others
                    _log.exception("a frame of a worker could not be handled kind=%d", frame.kind)

    def _trim_later(self) -> None:
        if self._trim is None:
            self._trim = self._loop.call_later(TRIM_DELAY, self._trim_now)

    def _trim_now(self) -> None:
        self._trim = None
        is_trimmed = memory.trim(memory.IDLE_SECONDS)
        self._send([protocol.pack(protocol.TRIM)])
        if not (is_trimmed and self._lending.is_empty and self._mappings.is_empty):
            self._trim_later()

    def close(self) -> None:
        """Close the socket; all memory is this process's again."""
        if self._socket.fileno() < 0:
            return
        if self._trim is not None:
            self._trim.cancel()
            # What it looked at is free at once, and some of it when the callers have it.
            self._loop.call_soon(memory.trim)
            self._loop.call_later(TRIM_DELAY, memory.trim)
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._drop_waiting()
        self._receiver.close()
        self._lending.close()
        self._mappings.close()
        self._socket.close()
