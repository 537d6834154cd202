"""The floor of bulk: a process that receives a payload whole and sends it back.

    tcp_echo DESCRIPTOR

Each payload gets a buffer of its own, as the argument of a function does.
"""

from __future__ import annotations

import socket
import struct
import sys

SIZE = struct.Struct("!Q")


def send(connection: socket.socket, payload: bytes | bytearray) -> None:
    """Send one payload."""
    connection.sendall(SIZE.pack(len(payload)))
    connection.sendall(payload)


def receive(connection: socket.socket) -> bytearray | None:
    """Receive one payload; `None` when the other end has closed."""
    head = connection.recv(SIZE.size, socket.MSG_WAITALL)
    if len(head) < SIZE.size:
        return None
    payload = bytearray(SIZE.unpack(head)[0])
    view = memoryview(payload)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise ConnectionError("the other end has closed within a payload")
        view = view[received:]
    return payload


def main() -> None:
    """Serve one connection until it is closed."""
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        connection, _ = listener.accept()
    with connection:
        while (payload := receive(connection)) is not None:
            send(connection, payload)


if __name__ == "__main__":
    main()
