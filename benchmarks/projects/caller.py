"""What runs in a pod and measures what it reaches from there."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from http.client import HTTPConnection

#: Fewest calls of a measurement.
FEWEST = 30


def calls(service: str, seconds: float) -> list[float]:
    """How long calls of another service take, of those in `seconds`."""
    import kubetorch as kt  # noqa: PLC0415  # the floors do without it

    remote: kt.Fn[..., int] = kt.Fn.from_name(service)
    return _measure(lambda: remote(1), seconds)


def tcp(host: str, port: int, body: str, seconds: float) -> list[float]:
    """How long bare bytes take to another pod and back, on a connection that stays."""
    payload = body.encode()
    with socket.create_connection((host, port), timeout=10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def echo() -> None:
            connection.sendall(payload)
            remaining_bytes = len(payload)
            while remaining_bytes:
                received = len(connection.recv(remaining_bytes))
                assert received, "the connection has ended"
                remaining_bytes -= received

        return _measure(echo, seconds)


def http(host: str, port: int, body: str, seconds: float) -> list[float]:
    """How long an HTTP request takes to another pod and back, on a connection that stays."""
    payload = body.encode()
    connection = HTTPConnection(host, port, timeout=10)

    def echo() -> None:
        connection.request("POST", "/", payload, {"Content-Type": "application/json"})
        assert connection.getresponse().read() == payload

    return _measure(echo, seconds)


def _measure(call: Callable[[], object], seconds: float) -> list[float]:
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < FEWEST:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times
