"""Ports that are listened on, and how many connections a process may have."""

from __future__ import annotations

import resource
import socket

from kubetorch.lib import sockets
from kubetorch.lib import tuning as lib_tuning


def test_who_finds_a_port_taken_listens_on_another_one() -> None:
    with sockets.listen(sockets.LOOPBACK, 0) as first:
        port = first.getsockname()[1]
        assert not sockets.is_free(port)
        with sockets.listen(sockets.LOOPBACK, port) as second:
            assert second.getsockname()[1] not in (0, port)
    assert sockets.is_free(port)


def test_of_two_who_claim_a_port_one_has_it() -> None:
    port = sockets.choose(())
    first = sockets.claim(port)
    assert first is not None
    assert sockets.claim(port) is None
    assert sockets.is_free(port)
    first.close()
    second = sockets.claim(port)
    assert second is not None
    second.close()


def test_a_port_that_is_known_to_be_taken_is_not_chosen() -> None:
    ports = range(sockets.PORTS.start, sockets.PORTS.start + 200)
    port = sockets.choose(ports[:-100], ports=ports)
    assert port in ports[-100:]


def test_a_connection_says_at_once_what_it_has_to_say_and_notices_the_end_of_its_peer() -> None:
    with sockets.listen(sockets.LOOPBACK, 0) as server:
        host, port = server.getsockname()
        with sockets.connect(host, port, 5.0) as connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_process_may_have_more_files_open_as_far_as_that_is_allowed() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = lib_tuning.LIMITS.open_files if before[1] == resource.RLIM_INFINITY else before[1]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (500, before[1]))
        assert sockets.limit() == 500
        sockets.raise_limit()
        assert sockets.limit() == min(lib_tuning.LIMITS.open_files, allowed)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
