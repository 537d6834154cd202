"""Where clients of the agent's machine pass values in memory files, beside their streams.

A client shows the token of its stream and the stream's identity. From then on both ends send files
on the socket, and name their numbers in frames of the stream. A client sends its files, and before
them what it shows, ahead of the frames: so a frame finds the connection in the listener's queue at
the latest, and no end waits for the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path

from kubetorch.errors import KubetorchError
from kubetorch.lib import memory_files, private_sockets
from kubetorch.lib.memory_files import FileSocket
from kubetorch.pod.http.auth import Guard
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.wire import tokens
from kubetorch.wire.frames import StreamProof, decode_proof

_log = logging.getLogger(__name__)


class MemorySocket:
    """The listening socket of one agent; without one its clients send all values on streams."""

    def __init__(
        self, path: Path | None, guard: Guard, attach: Callable[[StreamProof, FileSocket], bool]
    ) -> None:
        #: The path for clients; empty where files cannot be passed.
        self.path = ""
        self._path = path
        self._guard = guard
        self._attach = attach
        self._server: socket.socket | None = None
        # Connections whose first message has not come yet.
        self._silent: deque[socket.socket] = deque()

    def open(self) -> None:
        if self._path is None or not (memory_files.IS_AVAILABLE and private_sockets.IS_AVAILABLE):
            return
        try:
            self._server = private_sockets.listen(self._path, LIMITS.listen_backlog_connections)
        except OSError as error:
            _log.info("large values go on streams alone: no socket error=%s", error)
            return
        self.path = str(self._path)
        asyncio.get_running_loop().add_reader(self._server.fileno(), self.accept)

    def accept(self) -> None:
        """Accept the connections that wait, and attach those whose first message is there."""
        loop = asyncio.get_running_loop()
        try:
            while self._server is not None:
                connection, _ = self._server.accept()
                connection.setblocking(False)
                self._silent.append(connection)
                loop.add_reader(connection.fileno(), self._admit, connection)
        except (BlockingIOError, ConnectionAbortedError):
            pass
        except OSError as error:
            self._pause(error)
        for connection in tuple(self._silent):
            self._admit(connection)
        while len(self._silent) > LIMITS.silent_file_connections:
            self._dismiss(self._silent[0])

    def _pause(self, error: OSError) -> None:
        """Accept nothing for a moment: connections that wait keep the socket readable."""
        assert self._server is not None
        _log.warning("a connection for memory files waits error=%s", error)
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._server.fileno())
        loop.call_later(TIMING.accept_pause_seconds, self._resume)

    def _resume(self) -> None:
        if self._server is not None:
            asyncio.get_running_loop().add_reader(self._server.fileno(), self.accept)

    def _admit(self, connection: socket.socket) -> None:
        """Attach a connection to the stream that its first message proves to be the client's."""
        try:
            private_sockets.check_user(connection)
            proof = decode_proof(connection.recv(LIMITS.stream_proof_bytes))
            self._guard.check_token(proof.token, tokens.CALL)
        except BlockingIOError:
            return
        except (OSError, KubetorchError) as error:
            _log.warning("a connection for memory files was refused error=%s", error)
            self._dismiss(connection)
            return
        self._silent.remove(connection)
        asyncio.get_running_loop().remove_reader(connection.fileno())
        files = FileSocket(connection)
        if not self._attach(proof, files):
            files.close()

    def _dismiss(self, connection: socket.socket) -> None:
        self._silent.remove(connection)
        asyncio.get_running_loop().remove_reader(connection.fileno())
        connection.close()

    def close(self) -> None:
        if self._server is not None:
            asyncio.get_running_loop().remove_reader(self._server.fileno())
            self._server.close()
            self._server = None
            while self._silent:
                self._dismiss(self._silent[0])
            with contextlib.suppress(OSError):
                Path(self.path).unlink()
