"""A server in a pod that sends back the bytes that come: nothing could answer sooner."""

from __future__ import annotations

import socket
import threading

PORT = 7000


def serve(connection: socket.socket) -> None:
    """Send back what one connection says."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        while data := connection.recv(65536):
            connection.sendall(data)


def main() -> None:
    """Serve each connection in a thread."""
    with socket.create_server(("", PORT)) as listener:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main()
