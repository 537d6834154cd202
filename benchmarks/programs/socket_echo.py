"""Bytes there and back over a bare TCP connection that stays.

socket_echo PORT SIZE
"""

from __future__ import annotations

import socket

from benchmarks.programs import driving
from benchmarks.programs.answering import answer, arguments


def main() -> None:
    """Connect, then answer."""
    port, size = map(int, arguments())
    payload = bytes(size)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def call() -> None:
            connection.sendall(payload)
            remaining_bytes = size
            while remaining_bytes:
                received = len(connection.recv(remaining_bytes))
                assert received, "the connection has ended"
                remaining_bytes -= received

        answer({"latency": lambda seconds: driving.latency(call, seconds)})


if __name__ == "__main__":
    main()
