"""What runs in a pod and measures what it reaches from there."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

#: Fewest calls of a measurement.
FEWEST = 30


def calls(service: str, seconds: float) -> list[float]:
    """How long calls of another service take, of those in `seconds`."""
    import kubetorch as kt  # noqa: PLC0415  # not when only `echoes` is measured

    remote: kt.Fn[..., int] = kt.Fn.from_name(service)
    return _samples(lambda: remote(1), seconds)


def echoes(host: str, port: int, size: int, seconds: float) -> list[float]:
    """How long bare bytes take to another pod and back, on a connection that stays."""
    payload = bytes(size)
    with socket.create_connection((host, port), timeout=10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def echo() -> None:
            connection.sendall(payload)
            left = size
            while left:
                left -= len(connection.recv(left))

        return _samples(echo, seconds)


def _samples(call: Callable[[], object], seconds: float) -> list[float]:
    call()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found) < FEWEST:
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return found
