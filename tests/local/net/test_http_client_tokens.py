"""Requests with tokens that change, and on connections that somebody else makes."""

from __future__ import annotations

import socket

import pytest

from kubetorch.errors import (
    ConfigError,
    ControllerUnavailableError,
    KubernetesUnavailableError,
)
from kubetorch.lib.http_client import HttpClient
from tests.local.net.test_http_client import OK, Connection, serving

REFUSED = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n"


class Changing:
    """Tokens one after the other."""

    def __init__(self, *tokens: str) -> None:
        self._tokens = list(tokens)
        self.paths: list[str] = []

    def token(self, path: str) -> str:
        self.paths.append(path)
        return self._tokens[0]

    def reject(self, token: str) -> bool:
        if token == self._tokens[0] and len(self._tokens) > 1:
            self._tokens.pop(0)
            return True
        return False


def only(token: str, bodies: list[bytes]):
    """Serve those alone who bring this token."""

    def serve(connection: Connection) -> None:
        while (request := connection.request()) is not None:
            head, body = request
            bodies.append(body)
            connection.send(OK if f"Bearer {token}\r\n".encode() in head + b"\r\n" else REFUSED)

    return serve


def test_a_token_that_is_not_taken_any_more_is_replaced_once() -> None:
    bodies: list[bytes] = []
    tokens = Changing("old", "new", "newest")
    with serving(only("new", bodies)) as server, HttpClient(server.url, tokens) as client:
        assert client.request("POST", "/v1/x", body=b"data").read() == b"ok"
        assert client.request("GET", "/v1/y").read() == b"ok"
    assert bodies == [b"data", b"data", b""]
    assert tokens.paths == ["/v1/x", "/v1/x", "/v1/y"]


def test_who_is_never_let_in_gets_the_refusal() -> None:
    bodies: list[bytes] = []
    tokens = Changing("old", "new", "newest")
    with serving(only("other", bodies)) as server, HttpClient(server.url, tokens) as client:
        assert client.request("GET", "/").status == 401
    assert len(bodies) == 2


def test_a_body_that_is_made_while_it_is_sent_is_not_sent_again() -> None:
    bodies: list[bytes] = []
    tokens = Changing("old", "new")
    with serving(only("new", bodies)) as server, HttpClient(server.url, tokens) as client:
        assert client.request("POST", "/", body=iter([b"one", b"two"])).status == 401
    assert bodies == [b"onetwo"]


def test_connections_that_a_dialler_makes_are_kept_too() -> None:
    bodies: list[bytes] = []
    dialled: list[float | None] = []
    with serving(only("t", bodies)) as server:

        def dial(timeout: float | None) -> socket.socket:
            dialled.append(timeout)
            host, port = server.url.removeprefix("http://").split(":")
            return socket.create_connection((host, int(port)), timeout)

        with HttpClient("http://nowhere.tunnel", "t", timeout=7.0, dialler=dial) as client:
            for _ in range(3):
                assert client.request("GET", "/").read() == b"ok"
    assert dialled == [7.0]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionRefusedError("gone"), ControllerUnavailableError),
        (KubernetesUnavailableError("away"), ControllerUnavailableError),
        (ConfigError("no such cluster"), ConfigError),
    ],
)
def test_what_a_dialler_says_is_the_error(error: Exception, expected: type[Exception]) -> None:
    def dial(timeout: float | None) -> socket.socket:
        raise error

    client = HttpClient("http://nowhere.tunnel", "t", dialler=dial)
    with pytest.raises(expected) as caught:
        client.request("GET", "/")
    assert error in (caught.value, caught.value.__cause__)
