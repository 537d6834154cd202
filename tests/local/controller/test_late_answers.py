"""Requests whose answers the controller gives late: who asks waits for longer than it does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from kubetorch.errors import ControllerUnavailableError, WorkloadError
from kubetorch.lib.http_client import HttpClient
from kubetorch.sdk.controller import Controller
from kubetorch.sdk.service_logs import ServiceLogs
from kubetorch.sdk.transport.session import Session
from kubetorch.wire import exceptions, messages
from kubetorch.wire.messages import DeployLog
from tests.local.net.test_http_client import CHUNKED, Connection, serving

T = TypeVar("T")
LINE = DeployLog(text="at last", pod="quiet-0", source="stdout", time=2e9)
STUCK = WorkloadError("35 s after the end of stuck it still has pods: stuck-0")


def answer(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d .\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def given_late(ask: Callable[[Controller], T], *, late: bytes, soon: bytes = b"") -> T:
    """What somebody gets to whom the rest of an answer comes when others have given up."""
    has_come, is_late = threading.Event(), threading.Event()

    def serve(connection: Connection) -> None:
        request = connection.request()
        if request is not None and b"/silent" not in request[0]:
            connection.send(soon)
            has_come.set()
            is_late.wait(60)
            connection.send(late)
        connection.request()

    with (
        serving(serve) as server,
        HttpClient(server.url, timeout=1.5) as http,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(ask, Controller(http))
        assert has_come.wait(60)
        with pytest.raises(ControllerUnavailableError, match="timed out"):
            http.request("GET", "/silent")
        is_late.set()
        return waiting.result(60)


def test_a_request_that_waits_for_ever_outlives_the_clients_own_limit() -> None:
    def ask(controller: Controller) -> bytes:
        with controller._http.request("GET", "/", timeout=None) as response:
            return response.read()

    assert given_late(ask, late=answer(200, b"ok")) == b"ok"


def test_lines_that_are_followed_may_come_after_any_time() -> None:
    line = messages.encode(LINE) + b"\n"
    late = b"%x\r\n%s\r\n0\r\n\r\n" % (len(line), line)
    lines = given_late(
        lambda controller: list(controller.stream_logs("team", "quiet", follow=True)),
        soon=CHUNKED,
        late=late,
    )
    assert lines == [LINE]


def test_a_volume_is_waited_for_longer_than_the_controller_does() -> None:
    late = answer(200, b'{"gone": false}')
    assert not given_late(
        lambda controller: controller.volumes.delete("team", "data", wait=0.1), late=late
    )


@pytest.mark.parametrize("grace", [None, 0.0])
def test_a_teardown_hears_from_the_controller_which_pods_are_stuck(grace: float | None) -> None:
    late = answer(500, exceptions.describe(STUCK).to_json())
    with pytest.raises(WorkloadError, match="stuck-0"):
        given_late(
            lambda controller: controller.delete_workload("team", "stuck", grace=grace), late=late
        )


def test_connections_that_are_cut_again_and_again_do_not_end_following() -> None:
    """A proxy in between ends what is silent: each connection brings its head and no line."""
    line = messages.encode(LINE) + b"\n"
    cuts = 12

    def serve(connection: Connection) -> None:
        while (request := connection.request()) is not None:
            if b"follow=false" in request[0]:
                connection.send(answer(200, b""))
            elif server.connections <= cuts:
                connection.send(CHUNKED)
                return
            else:
                connection.send(answer(200, line))

    with serving(serve) as server:
        session = Session(lambda: Controller(HttpClient(server.url)))
        with contextlib.closing(session):
            lines = ServiceLogs(session, "team", "quiet").lines(tail=10, follow=True)
            assert list(lines) == [LINE]
