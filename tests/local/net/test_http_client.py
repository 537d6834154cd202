from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme

from kubetorch.errors import ControllerUnavailableError
from kubetorch.lib import http_client
from kubetorch.lib import tuning as lib_tuning
from kubetorch.lib.http_client import HttpClient

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Connection:
    """The server's end of one connection."""

    def __init__(self, connected: socket.socket, number: int) -> None:
        self.socket = connected
        self.number = number
        self._pending = b""

    def request(self) -> tuple[bytes, bytes] | None:
        """Head and body of the next request; `None` when the client has closed."""
        while b"\r\n\r\n" not in self._pending:
            if not self._receive():
                return None
        head, _, self._pending = self._pending.partition(b"\r\n\r\n")
        body = b""
        if b"chunked" in head:
            while True:
                size = int(self._line(), 16)
                body += self._take(size)
                self._line()
                if not size:
                    return head, body
        for line in head.split(b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                body = self._take(int(line.partition(b":")[2]))
        return head, body

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def reset(self) -> None:
        """Close so that the client sees a reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.socket.close()

    def close(self) -> None:
        self.socket.close()

    def _line(self) -> bytes:
        while b"\r\n" not in self._pending:
            self._need()
        line, _, self._pending = self._pending.partition(b"\r\n")
        return line

    def _take(self, count: int) -> bytes:
        while len(self._pending) < count:
            self._need()
        taken, self._pending = self._pending[:count], self._pending[count:]
        return taken

    def _need(self) -> None:
        if not self._receive():
            raise ConnectionResetError("the client broke off")

    def _receive(self) -> bool:
        data = self.socket.recv(65536)
        self._pending += data
        return bool(data)


class Server:
    """Runs one function for each connection; it must end when its connection is closed."""

    def __init__(self, serve: Callable[[Connection], None]) -> None:
        self._serve = serve
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._connections: list[Connection] = []
        self._threads: list[threading.Thread] = []
        self.failures: list[BaseException] = []
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    @property
    def connections(self) -> int:
        """How many there have been."""
        return len(self._connections)

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listening.accept()
            except OSError:
                return
            connection = Connection(connected, len(self._connections))
            self._connections.append(connection)
            thread = threading.Thread(target=self._run, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _run(self, connection: Connection) -> None:
        try:
            self._serve(connection)
        except OSError:
            pass
        except BaseException as error:
            self.failures.append(error)
        finally:
            connection.close()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)
        for thread in (self._accepting, *self._threads):
            thread.join(10)
        assert self.failures == []


@contextlib.contextmanager
def serving(serve: Callable[[Connection], None]) -> Iterator[Server]:
    server = Server(serve)
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def talking_to(
    serve: Callable[[Connection], None], token: str | None = None, timeout: float | None = 10.0
) -> Iterator[tuple[HttpClient, Server]]:
    with serving(serve) as server, HttpClient(server.url, token, timeout=timeout) as client:
        yield client, server


def always(answer: bytes) -> Callable[[Connection], None]:
    """Serve the same answer for ever."""

    def serve(connection: Connection) -> None:
        while connection.request() is not None:
            connection.send(answer)

    return serve


def echo(connection: Connection) -> None:
    """Answer with the request's head and body."""
    while (request := connection.request()) is not None:
        body = b"\n".join(request)
        connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))


# ------------------------------------------------------------------------------------ requests


def test_a_request_carries_path_token_headers_and_body() -> None:
    with talking_to(echo, "secret") as (client, _):
        answer = client.request("POST", "/v1/x?a=b", body=b"data", headers={"X-Kind": "y"})
        lines = answer.read().splitlines()
    assert lines[0] == b"POST /v1/x?a=b HTTP/1.1"
    assert {b"Authorization: Bearer secret", b"X-Kind: y", b"Content-Length: 4"} <= set(lines)
    assert lines[-1] == b"data"


def test_headers_of_an_answer_are_in_lower_case() -> None:
    answer = b"HTTP/1.1 404 Not Found\r\nX-Request-ID: 7\r\nContent-Length: 0\r\n\r\n"
    with talking_to(always(answer)) as (client, _), client.request("GET", "/") as got:
        assert got.status == 404
        assert got.headers["x-request-id"] == "7"
        assert got.read() == b""


def test_a_base_url_with_a_path_goes_in_front() -> None:
    with serving(echo) as server, HttpClient(f"{server.url}/ns/shop/") as client:
        answer = client.request("GET", "/health").read()
    assert answer.startswith(b"GET /ns/shop/health HTTP/1.1")


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:80", "ftp://x", "http://", "unix:///tmp/x", "http://x/a b", "http://x/\u00fc"],
)
def test_what_is_no_http_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not an http"):
        HttpClient(url)


def test_a_body_of_pieces_is_sent_as_it_is_made() -> None:
    arrived = threading.Event()

    def serve(connection: Connection) -> None:
        connection._line()  # the request
        while connection._line():
            pass
        assert int(connection._line(), 16) == 3
        assert connection._take(3) == b"one"
        arrived.set()
        connection._line()
        assert connection._line() == b"5"
        assert connection._take(5) == b"three"
        connection._line()
        assert connection._line() == b"0"
        connection.send(OK)

    def body() -> Iterator[bytes]:
        yield b"one"
        assert arrived.wait(10)
        yield b""
        yield b"three"

    with talking_to(serve) as (client, _), client.request("POST", "/", body=body()) as answer:
        assert answer.read() == b"ok"


def test_an_error_of_who_makes_the_body_is_raised_as_it_is() -> None:
    def body() -> Iterator[bytes]:
        yield b"one"
        raise FileNotFoundError("my file")

    with talking_to(always(OK)) as (client, server):
        with pytest.raises(FileNotFoundError, match="my file"):
            client.request("POST", "/", body=body())
        with client.request("GET", "/") as answer:
            assert answer.read() == b"ok"
        assert server.connections == 2


# ------------------------------------------------------------------------------------- answers


def test_lines_arrive_as_soon_as_they_are_complete() -> None:
    taken = threading.Semaphore(0)

    def serve(connection: Connection) -> None:
        connection.request()
        connection.send(CHUNKED)
        for chunk in (b"one\ntw", b"o\n", b"three"):
            connection.send(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            if chunk != b"three":
                assert taken.acquire(timeout=10)
        connection.send(b"0\r\n\r\n")

    with talking_to(serve) as (client, _), client.request("GET", "/") as answer:
        lines = []
        for line in answer.iter_lines():
            lines.append(line)
            taken.release()
    assert lines == [b"one", b"two", b"three"]


@pytest.mark.parametrize(
    "answer",
    [
        OK,
        CHUNKED + b"1\r\no\r\n1\r\nk\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\n\r\nok",
    ],
    ids=["length", "chunked", "until-close", "1.0"],
)
def test_a_body_is_read_to_its_end(answer: bytes) -> None:
    def serve(connection: Connection) -> None:
        connection.request()
        connection.send(answer)

    with talking_to(serve) as (client, _), client.request("GET", "/") as got:
        assert got.read() == b"ok"


def test_a_large_body_arrives_whole() -> None:
    data = os.urandom(5_000_000)
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data)
    with talking_to(always(head + data)) as (client, server):
        for _ in range(2):
            with client.request("GET", "/") as answer:
                assert answer.read() == data
        assert server.connections == 1


@pytest.mark.security
def test_of_a_body_that_may_be_of_any_length_the_beginning_is_read() -> None:
    data = b"x" * 5_000_000
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data)
    with talking_to(always(head + data)) as (client, _), client.request("GET", "/") as answer:
        assert 10_000 < len(answer.read(10_000)) < 1_000_000


@pytest.mark.parametrize(
    "cut",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok",
        CHUNKED + b"5\r\nok",
        CHUNKED + b"2\r\nok\r\n",
        b"HTTP/1.1 200 OK\r\nContent-",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n",
        b"HTTP/1.1",
        b"garbage\r\n\r\n",
        b"",
    ],
    ids=["length", "chunk", "between-chunks", "header", "head", "status", "garbage", "nothing"],
)
@pytest.mark.parametrize("end", [Connection.close, Connection.reset])
def test_an_answer_that_breaks_off_is_a_typed_error(
    cut: bytes, end: Callable[[Connection], None]
) -> None:
    def serve(connection: Connection) -> None:
        connection.request()
        connection.send(cut)
        end(connection)

    with talking_to(serve) as (client, server):
        with pytest.raises(ControllerUnavailableError) as caught:
            client.request("POST", "/v1/x", body=b"1").read()
        assert f"POST {server.url}/v1/x" in str(caught.value)
        assert caught.value.__cause__ is not None
        assert server.connections == 1


def test_an_answer_before_the_body_was_read_arrives() -> None:
    def serve(connection: Connection) -> None:
        connection.socket.recv(1024)
        connection.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
        connection.socket.shutdown(socket.SHUT_WR)
        while connection.socket.recv(1 << 20):  # as uvicorn: drain, so that no reset destroys it
            pass

    def body() -> Iterator[bytes]:
        for _ in range(50):
            yield bytes(100_000)

    with talking_to(serve) as (client, _), client.request("POST", "/", body=body()) as answer:
        assert answer.status == 413
        assert answer.read() == b"big"


# -------------------------------------------------------------------------------- connections


def test_a_connection_is_used_again() -> None:
    with talking_to(always(OK)) as (client, server):
        for _ in range(3):
            with client.request("GET", "/") as answer:
                assert answer.read() == b"ok"
        assert server.connections == 1


def test_a_connection_whose_answer_was_not_read_is_not_used_again() -> None:
    with talking_to(always(OK)) as (client, server):
        client.request("GET", "/").close()
        with client.request("GET", "/") as answer:
            assert answer.read() == b"ok"
        assert server.connections == 2


def test_requests_at_the_same_time_have_connections_of_their_own() -> None:
    with talking_to(always(OK)) as (client, server):
        with client.request("GET", "/") as first, client.request("GET", "/") as second:
            assert (second.read(), first.read()) == (b"ok", b"ok")
        assert server.connections == 2


def test_idle_connections_are_bounded() -> None:
    with talking_to(always(OK)) as (client, _):
        answers = [
            client.request("GET", "/") for _ in range(lib_tuning.LIMITS.client_idle_connections + 3)
        ]
        for answer in answers:
            answer.read()
        assert len(client._idle) == lib_tuning.LIMITS.client_idle_connections


def test_a_connection_that_the_server_closed_while_idle_is_not_used_again() -> None:
    def serve(connection: Connection) -> None:
        connection.request()
        connection.send(OK)
        if connection.number == 0:
            connection.close()
        else:
            connection.request()

    with talking_to(serve) as (client, server):
        client.request("POST", "/", body=b"1").read()
        wait_until_readable(client)
        assert client.request("POST", "/", body=b"1").read() == b"ok"
        assert server.connections == 2


def wait_until_readable(client: HttpClient) -> None:
    """Wait until the end of an idle connection has arrived."""
    ((connection, _),) = client._idle
    deadline = time.monotonic() + 10
    while not http_client._is_readable(connection):
        assert time.monotonic() < deadline


def _dies_on_its_second_request(connection: Connection) -> None:
    connection.request()
    connection.send(OK)
    if connection.request() is not None:
        connection.reset()


def test_a_get_on_a_kept_connection_that_breaks_unanswered_is_sent_again() -> None:
    with talking_to(_dies_on_its_second_request) as (client, server):
        client.request("GET", "/").read()
        assert client.request("GET", "/").read() == b"ok"
        assert server.connections == 2


def test_a_post_on_a_kept_connection_that_breaks_unanswered_is_not_sent_again() -> None:
    # The server has read it: whether it did anything with it cannot be known.
    with talking_to(_dies_on_its_second_request) as (client, server):
        client.request("GET", "/").read()
        with pytest.raises(ControllerUnavailableError, match="before an answer came"):
            client.request("POST", "/", body=b"1")
        assert server.connections == 1


def test_a_get_on_a_new_connection_that_breaks_is_not_sent_again() -> None:
    def serve(connection: Connection) -> None:
        connection.request()
        connection.reset()

    with talking_to(serve) as (client, server):
        with pytest.raises(ControllerUnavailableError, match="before an answer came"):
            client.request("GET", "/")
        assert server.connections == 1


def test_a_closed_client_keeps_no_connection() -> None:
    ended = threading.Event()

    def serve(connection: Connection) -> None:
        always(OK)(connection)
        ended.set()

    with serving(serve) as server:
        client = HttpClient(server.url)
        answer = client.request("GET", "/")
        client.close()
        answer.read()
        assert ended.wait(10)


def test_a_forked_child_does_not_write_to_its_parents_connection() -> None:
    with talking_to(always(OK)) as (client, server):
        client.request("GET", "/").read()
        child = os.fork()
        if child == 0:  # pragma: no cover  # in the child
            status = 1
            with contextlib.suppress(BaseException):
                if client.request("GET", "/").read() == b"ok":
                    status = 0
            os._exit(status)
        _, status = os.waitpid(child, 0)
        assert status == 0
        client.request("GET", "/").read()
        assert server.connections == 2


# ------------------------------------------------------------------------------------ time-outs


def test_a_server_that_is_not_there_is_a_typed_error_with_the_next_step() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    client = HttpClient(f"http://127.0.0.1:{port}", hint="start it")
    with pytest.raises(ControllerUnavailableError, match="nobody listens") as caught:
        client.request("GET", "/health")
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)
    assert f"127.0.0.1:{port}/health" in str(caught.value)
    assert caught.value.hint == "start it"


def test_a_name_that_does_not_resolve_is_a_typed_error() -> None:
    with pytest.raises(ControllerUnavailableError, match=r"nowhere\.invalid"):
        HttpClient("http://nowhere.invalid:1").request("GET", "/")


def test_a_silent_server_times_out() -> None:
    with talking_to(lambda connection: connection.request() and connection.request()) as (c, _):
        with pytest.raises(ControllerUnavailableError, match="timed out") as caught:
            c.request("GET", "/", timeout=0.1)
        assert isinstance(caught.value.__cause__, TimeoutError)


def test_a_server_that_stops_in_the_middle_of_a_body_times_out() -> None:
    def serve(connection: Connection) -> None:
        connection.request()
        connection.send(CHUNKED + b"2\r\nok\r\n")
        connection.request()

    with talking_to(serve) as (client, _), client.request("GET", "/", timeout=1.5) as answer:
        pieces = answer.iter_bytes()
        assert next(pieces) == b"ok"
        with pytest.raises(ControllerUnavailableError, match="timed out"):
            next(pieces)


def test_the_timeout_is_for_each_step_and_not_for_the_whole() -> None:
    def serve(connection: Connection) -> None:
        connection.request()
        connection.send(CHUNKED)
        for _ in range(5):
            time.sleep(0.5)
            connection.send(b"1\r\n.\r\n")
        connection.send(b"0\r\n\r\n")

    with talking_to(serve) as (client, _), client.request("GET", "/", timeout=2.0) as answer:
        assert answer.read() == b"....."


def test_the_timeout_of_one_request_is_not_that_of_the_next() -> None:
    with talking_to(always(OK)) as (client, server):
        client.request("GET", "/", timeout=7.0).read()
        (connection, _) = client._idle[0]
        assert connection.sock.gettimeout() == 7.0
        client.request("GET", "/").read()
        assert connection.sock.gettimeout() == 10.0
        assert server.connections == 1


def test_tcp_looks_whether_the_server_of_a_silent_connection_is_there() -> None:
    with talking_to(always(OK)) as (client, _):
        client.request("GET", "/", timeout=None).read()
        (connection, _) = client._idle[0]
        assert connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_ctrl_c_ends_a_wait_and_the_connection() -> None:
    waiting = threading.Event()

    def serve(connection: Connection) -> None:
        if connection.number == 0:
            connection.request()
            waiting.set()
            connection.request()
        else:
            always(OK)(connection)

    with talking_to(serve) as (client, server):
        main = threading.main_thread().ident
        assert main is not None

        def interrupt() -> None:
            assert waiting.wait(10)
            time.sleep(0.2)  # Python does not see a signal that comes just before a thread waits
            signal.pthread_kill(main, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            client.request("GET", "/")
        thread.join()
        assert client.request("GET", "/").read() == b"ok"
        assert server.connections == 2


def test_a_line_that_never_ends_is_refused() -> None:
    piece = bytes(b"x" * (1 << 20))

    def serve(connection: Connection) -> None:
        connection.request()
        connection.send(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        while True:
            connection.send(piece)

    with talking_to(serve) as (client, _):
        answer = client.request("GET", "/")
        with pytest.raises(ControllerUnavailableError, match="bytes"):
            list(answer.iter_lines())


# ----------------------------------------------------------------------------------- what is sent


@pytest.mark.parametrize("path", ["/v1/a b", "/v1/a\r\nX: y", "/v1/\x00", "/v1/é"])
def test_a_target_that_is_not_quoted_is_not_sent(path: str) -> None:
    with talking_to(always(OK)) as (client, _), pytest.raises(ValueError, match="quoted"):
        client.request("GET", path)


@pytest.mark.parametrize("headers", [{"X-A": "b\r\nX-C: d"}, {"X-A\n": "b"}, {"X-A": "b\x00"}])
def test_a_header_that_would_be_two_is_not_sent(headers: dict[str, str]) -> None:
    with talking_to(always(OK)) as (client, server):
        with pytest.raises(ValueError, match="line break"):
            client.request("GET", "/", headers=headers)
        with client.request("GET", "/") as answer:
            assert answer.read() == b"ok", "what was wrong with one request is over with it"
        assert server.failures == []


def test_a_post_without_a_body_says_so() -> None:
    with talking_to(echo) as (client, _), client.request("POST", "/") as answer:
        assert b"content-length: 0" in answer.read().lower()


def test_a_header_of_the_request_replaces_the_clients_own() -> None:
    with talking_to(echo) as (client, _):
        with client.request("GET", "/", headers={"host": "elsewhere"}) as answer:
            head = answer.read().lower()
        assert head.count(b"host:") == 1
        assert b"host: elsewhere" in head


def test_an_interim_answer_is_no_answer() -> None:
    def serve(connection: Connection) -> None:
        while connection.request() is not None:
            connection.send(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n")
            time.sleep(0.02)
            connection.send(OK)

    with talking_to(serve) as (client, server):
        for _ in range(2):
            with client.request("GET", "/") as answer:
                assert (answer.status, answer.read()) == (200, b"ok")
                assert "link" not in answer.headers
        assert server.connections == 1


# -------------------------------------------------------------------------------------------- TLS


@pytest.mark.parametrize(
    ("name", "is_trusted"), [("localhost", True), ("localhost", False), ("127.0.0.1", True)]
)
def test_https_is_spoken_with_who_has_the_right_certificate(
    name: str, is_trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    trusted = tmp_path / "ca.pem"
    (authority if is_trusted else stranger).cert_pem.write_to_path(trusted)
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)

    def serve(connection: Connection) -> None:
        with context.wrap_socket(connection.socket, server_side=True) as encrypted:
            always(OK)(Connection(encrypted, connection.number))

    with serving(serve) as server:
        url = server.url.replace("http:", "https:").replace("127.0.0.1", name)
        with HttpClient(url, timeout=10.0) as client:
            if is_trusted and name == "localhost":
                with client.request("GET", "/") as answer:
                    assert answer.read() == b"ok"
            else:
                with pytest.raises(ControllerUnavailableError, match="certificate"):
                    client.request("GET", "/")


# ------------------------------------------------------------------------------ what else may come


def test_bytes_after_an_answer_do_not_spoil_it() -> None:
    def serve(connection: Connection) -> None:
        while connection.request() is not None:
            connection.send(OK + b"<html>")

    with talking_to(serve) as (client, server):
        for number in (1, 2):
            with client.request("POST", "/", body=b"1") as answer:
                assert answer.read() == b"ok"
            assert server.connections == number, "what follows cannot be told from the next answer"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_an_answer_that_says_in_two_ways_how_long_it_is_is_refused(answer: bytes) -> None:
    with (
        talking_to(always(answer)) as (client, _),
        pytest.raises(ControllerUnavailableError, match="in two ways how long"),
    ):
        client.request("GET", "/")


def test_trailers_are_no_headers() -> None:
    answer = CHUNKED + b"2\r\nok\r\n0\r\nX-T: v\r\nConnection: close\r\n\r\n"
    with talking_to(always(answer)) as (client, server):
        for _ in range(2):
            with client.request("GET", "/") as got:
                assert got.read() == b"ok"
                assert not got.headers.keys() & {"x-t", "connection"}
        assert server.connections == 1


def test_an_answer_without_a_body_lets_another_follow() -> None:
    with talking_to(always(b"HTTP/1.1 204 No Content\r\n\r\n")) as (client, server):
        for _ in range(2):
            with client.request("DELETE", "/") as answer:
                assert (answer.status, answer.read()) == (204, b"")
        assert server.connections == 1


def test_another_protocol_unasked_is_a_typed_error() -> None:
    answer = b"HTTP/1.1 101 S\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"
    with (
        talking_to(always(answer)) as (client, _),
        pytest.raises(ControllerUnavailableError, match="protocol"),
    ):
        client.request("GET", "/")


def test_a_host_of_other_letters_is_sent_in_those_of_dns() -> None:
    with serving(echo) as server:
        where = server.url.rpartition(":")[2]

        def dial(timeout: float | None) -> socket.socket:
            return socket.create_connection(("127.0.0.1", int(where)), timeout)

        with (
            HttpClient(f"http://b\u00fccher.example:{where}", dialler=dial) as client,
            client.request("GET", "/") as answer,
        ):
            assert f"xn--bcher-kva.example:{where}".encode() in answer.read()
