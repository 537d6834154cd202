"""A port of this machine that leads to a service through an ingress, which knows its own host."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

from kubetorch.sdk.transport.ingress import IngressTransport
from kubetorch.sdk.transport.local_port import LocalPort
from tests.local.net.test_http_client import Connection, Server, serving

POD = "web-0"
APP = "/team/web/http"


class Ingress:
    """Answers requests for its host alone, by what `answer` makes of the request."""

    def __init__(self, answer: Callable[[dict[str, str]], bytes]) -> None:
        self._answer = answer
        self.host = ""
        self.requests: list[tuple[str, dict[str, str]]] = []

    def serve(self, connection: Connection) -> None:
        while (request := connection.request()) is not None:
            line, *lines = request[0].decode().split("\r\n")
            pairs = [
                (name.lower(), value)
                for name, _, value in (header_line.partition(": ") for header_line in lines)
            ]
            headers = dict(pairs)
            assert len(headers) == len(pairs), f"a header is there twice: {pairs}"
            self.requests.append((line.split()[1], headers))
            is_known = headers["host"] == self.host
            connection.send(self._answer(headers) if is_known else answer(404, b"default backend"))


def answer(status: int, body: bytes = b"", *headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 %d ." % status, *headers, b"Content-Length: %d" % len(body)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


@contextmanager
def forwarded(ingress: Ingress) -> Iterator[LocalPort]:
    with serving(ingress.serve) as server, closing(IngressTransport(url_of(server))) as transport:
        ingress.host = f"localhost:{urlsplit(server.url).port}"
        url = f"{url_of(server)}/team/web#{POD}"
        with closing(
            LocalPort(lambda: url, transport, inside="/http", service=("team", "web"))
        ) as local_port:
            yield local_port


def url_of(server: Server) -> str:
    """By a name that no forwarded port has."""
    return f"http://localhost:{urlsplit(server.url).port}"


def get(forwarding: LocalPort, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", forwarding.port, timeout=10)
    with closing(connection):
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        response.body = response.read()
        return response


def test_requests_through_an_ingress_name_its_host_and_tell_the_own_one() -> None:
    ingress = Ingress(lambda headers: answer(200, b"here"))
    with forwarded(ingress) as forwarding:
        response = get(forwarding, "/page?x=1")
        assert (response.status, response.body) == (200, b"here")
        ((target, headers),) = ingress.requests
        assert target == f"{APP}/page?x=1"
        assert headers["x-kubetorch-pod"] == POD
        assert headers["x-forwarded-host"] == f"127.0.0.1:{forwarding.port}"


def test_what_a_client_says_of_the_way_does_not_come_twice() -> None:
    ingress = Ingress(lambda headers: answer(200))
    names = {"X-Kubetorch-Pod": "another", "X-Forwarded-Host": "example.org"}
    with forwarded(ingress) as forwarding:
        assert get(forwarding, "/", **names).status == 200
        ((_, headers),) = ingress.requests
        assert headers["x-kubetorch-pod"] == POD
        assert headers["x-forwarded-host"] == "example.org"


def test_a_redirect_to_the_ingress_itself_stays_on_the_forwarded_port() -> None:
    def redirect(headers: dict[str, str]) -> bytes:
        return answer(
            302, b"", b"Location: http://%s%s/login?x=1" % (headers["host"].encode(), APP.encode())
        )

    with forwarded(Ingress(redirect)) as forwarding:
        assert get(forwarding, "/").headers["Location"] == "/login?x=1"


def test_an_upgrade_through_an_ingress_names_its_host() -> None:
    switch = b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
    ingress = Ingress(lambda headers: switch)
    with (
        forwarded(ingress) as forwarding,
        socket.create_connection(("127.0.0.1", forwarding.port), 10) as client,
    ):
        client.sendall(
            b"GET /live HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nUpgrade: websocket\r\n"
            b"Connection: Upgrade\r\nSec-WebSocket-Key: %s==\r\nSec-WebSocket-Version: 13\r\n\r\n"
            % (forwarding.port, b"a" * 22)
        )
        assert client.recv(65536).startswith(b"HTTP/1.1 101 ")
        ((target, headers),) = ingress.requests
        assert target == f"{APP}/live"
        assert headers["x-kubetorch-pod"] == POD
