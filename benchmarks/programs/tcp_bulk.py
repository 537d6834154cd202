"""A payload there and back over a bare TCP connection.

tcp_bulk PORT
"""

from __future__ import annotations

import os
import socket

from benchmarks.programs import driving, tcp_echo
from benchmarks.programs.answering import answer, arguments


def main() -> None:
    """Connect, then answer."""
    [port] = arguments()
    with socket.create_connection(("127.0.0.1", int(port))) as connection:

        def bulk(size: int, times: int) -> dict[str, float]:
            payload = os.urandom(size)

            def call() -> None:
                tcp_echo.send(connection, payload)
                assert tcp_echo.receive(connection)

            return {"seconds": driving.median(call, times)}

        answer({"bulk": bulk})


if __name__ == "__main__":
    main()
