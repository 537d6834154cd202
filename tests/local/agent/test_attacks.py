"""Attacks of strangers on controller, agent and relay: what they take, and what others notice.

Each prints the worst time of `/health` meanwhile, the memory before and after, and what was closed.
With `KT_TEST_WHOLE=1` all of it runs, and for longer.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agent_harness import USER_TOKEN, AgentProcess, FakeController
from kubetorch.controller.backends.base import PodStatus
from kubetorch.controller.tuning import LIMITS, Timing
from kubetorch.lib import processes, websocket_protocol
from kubetorch.lib.websocket_protocol import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    TEXT,
    ClientHandshake,
    UpgradeRefusedError,
)
from kubetorch.wire import messages, routes, versions
from kubetorch.wire.messages import Hello
from shared import WHOLE
from tests.cluster_controller import InCluster
from tests.local.doors import PATIENCE, Door, opened
from tests.local.fake_reviews import FakeReviews, ReviewedController
from tests.local.service_harness import FAKE, Service

pytestmark = pytest.mark.security

MIB = 1024 * 1024
#: Seconds of one attack, and connections that make it.
SECONDS, CONNECTIONS = (5.0, 24) if WHOLE else (1.0, 8)
#: Answers of `/health` during a flood, and seconds in which they come: the machine of a test has
#: other work, too.
ANSWERS, PATIENT = 3, 60.0
#: Bytes by which a server may have grown when an attack is over: 3 MiB of a relayed body are under
#: way at one time.
GROWTH = CONNECTIONS * 6 * MIB

POST = b"POST /x HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
#: What comes first, and what comes then without an end.
FLOODS = {
    "trailers": (POST + b"1\r\nx\r\n0\r\n", b"X-A: b\r\n" * 2000),
    "trailer": (POST + b"1\r\nx\r\n0\r\nX: ", b"x" * 16384),
    "head": (b"GET /health HTTP/1.1\r\n", b"X-A: b\r\n" * 2000),
    "header": (b"GET /health HTTP/1.1\r\nX: ", b"x" * 16384),
    "blank lines": (b"", b"\r\n" * 8192),
    "chunks": (POST, b"1\r\nx\r\n" * 3000),
    "extensions": (POST, b"1;" + b"x" * 6000 + b"\r\nx\r\n"),
    "body": (b"POST /x HTTP/1.1\r\nContent-Length: 1000000000000\r\n\r\n", b"x" * 65536),
    "requests": (b"", HEALTH * 4000),
    "bare requests": (b"", b"GET / HTTP/1.1\r\n\r\n" * 8000),
}


#: Two tokens of one pod, which say whom they are for; their signature is the API server's business.
PODS = [f"eyJ.eyJhdWQiOiBbImt1YmV0b3JjaCJdfQ.{n}" for n in range(2)]


class Meanwhile:
    """Asks for `/health` again and again on connections of its own."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._is_over = threading.Event()
        self.worst = 0.0
        #: When those began that were answered.
        self.answered_begins: list[float] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Meanwhile:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(0.02):
            begun = time.monotonic()
            assert health(self._address).startswith(b"HTTP/1.1 200 ")
            self.worst = max(self.worst, time.monotonic() - begun)
            self.answered_begins.append(begun)


def health(address: tuple[str, int]) -> bytes:
    with socket.create_connection(address, timeout=PATIENCE) as sock:
        sock.sendall(HEALTH)
        return sock.recv(65536)


def flood(address: tuple[str, int], first: bytes, piece: bytes, is_over: Callable[[], bool]) -> int:
    """Send on as many connections as the server closes; how many those were."""
    closed = 0
    while not is_over():
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=1.0) as sock:
            sock.sendall(first)
            try:
                while not is_over():
                    sock.sendall(piece)
            except TimeoutError:
                continue  # it is not read
            except ConnectionError:
                closed += 1
    return closed


@pytest.fixture(scope="module")
def app(
    shared_service_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Door]]:
    with opened(tmp_path_factory.mktemp("raw") / "shop") as doors:
        yield {**doors, "controller": Door(doors["relay"].url, "", doors["relay"].pid)}


DOORS = ["controller", "agent", "relay"]


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest, app: dict[str, Door]) -> Door:
    return app[request.param]


# --------------------------------------------------------------------------- 8: memory and time


def test_no_flood_of_strangers_holds_up_health_or_keeps_memory(
    door: Door, request: pytest.FixtureRequest
) -> None:
    number = DOORS.index(request.node.callspec.params["door"])
    lines = []
    # Each comes to one of the doors, or to all if all is wanted.
    for kind in list(FLOODS) if WHOLE else list(FLOODS)[number :: len(DOORS)]:
        first, piece = FLOODS[kind]
        sent = first.replace(b" /x ", b" %s/x " % door.prefix.encode())
        before = door.rest()
        with Meanwhile(door.address) as meanwhile, ThreadPoolExecutor(CONNECTIONS) as threads:
            begun = time.monotonic()

            def answered(
                late: float = begun + SECONDS / 2, begins: list[float] = meanwhile.answered_begins
            ) -> int:
                """How many began in the middle of it or later."""
                return sum(begin > late for begin in begins)

            def is_over(begun: float = begun, answered: Callable[[], int] = answered) -> bool:
                passed = time.monotonic() - begun
                return passed > (SECONDS if answered() >= ANSWERS else PATIENT)

            flood_arguments = (door.address, sent, piece, is_over)
            closed = sum(
                threads.map(
                    lambda _, arguments=flood_arguments: flood(*arguments), range(CONNECTIONS)
                )
            )
            count = answered()
        until = time.monotonic() + PATIENT
        while (grown := door.rest() - before) > GROWTH and time.monotonic() < until:
            time.sleep(0.1)
        lines.append(
            f"{kind}: worst /health {meanwhile.worst * 1000:.0f} ms, {before // MIB} MiB before, "
            f"{grown / MIB:+.1f} after, {closed} connections closed"
        )
        print(f"  {door.prefix or 'controller'} {lines[-1]}")
        assert count >= ANSWERS, lines
        assert grown < GROWTH, lines


# ------------------------------------------------------------------------- 8: who is let in at all


class Limited:
    """A server that may have few connections."""

    LIMIT = 160

    def __init__(self, address: tuple[str, int], path: str, token: str) -> None:
        self.address, self._path, self._token = address, path, token

    def is_open_for_its_owner(self) -> bool:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(self.address, timeout=PATIENCE) as sock,
        ):
            head = f"GET {self._path} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            sock.sendall(f"{head}Authorization: Bearer {self._token}\r\n\r\n".encode())
            return sock.recv(65536).startswith(b"HTTP/1.1 200 ")
        return False


@pytest.fixture(params=["controller", "agent"])
def limited(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Limited]:
    if request.param == "controller":
        shell = ("/bin/sh", "-c", f'ulimit -n {Limited.LIMIT}; exec "$@"', "sh")
        home = tmp_path / "local"
        home.mkdir(mode=0o700)
        service = Service(home, (*shell, *FAKE)).start()
        host, port = service.url.removeprefix("http://").split(":")
        yield Limited((host, int(port)), routes.workloads("default"), service.token)
        service.terminate()
        return
    controller = FakeController(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (Limited.LIMIT, hard))
    try:
        agent = AgentProcess(tmp_path, controller)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    yield Limited(("127.0.0.1", agent.port), routes.METRICS, USER_TOKEN)
    agent.stop()
    controller.close()


@pytest.mark.parametrize(
    "sent_bytes",
    [b"", HEALTH, b"GET /v1/nothing HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", POST, HEALTH * 9],
    ids=["nothing", "health", "refused", "unfinished", "pipelined"],
)
def test_strangers_do_not_lock_the_owner_out(limited: Limited, sent_bytes: bytes) -> None:
    with contextlib.ExitStack() as connections:
        taken = []
        for _ in range(2 * Limited.LIMIT):
            with contextlib.suppress(OSError):
                sock = connections.enter_context(
                    socket.create_connection(limited.address, timeout=PATIENCE)
                )
                sock.sendall(sent_bytes)
                taken.append(sock)
        assert limited.is_open_for_its_owner()
        closed, until = 0, time.monotonic() + PATIENT
        while closed < Limited.LIMIT and time.monotonic() < until:
            closed = sum(is_closed(sock) for sock in taken)
    print(f"  {len(taken)} connections, {closed} of them closed, and the owner is served")
    assert closed >= Limited.LIMIT


def is_closed(sock: socket.socket) -> bool:
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError, OSError):
        while sock.recv(65536):
            pass
        return True
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


# --------------------------------------------------------------------- requests that are none


def malformed(path: bytes) -> Iterator[bytes]:
    """Requests that can be read in no way, or in two; with `H` for a host, and `P` for the path."""
    smuggled = b"GET /smuggled HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    lines = [
        b"",
        b" ",
        b"\0",
        b"\xff" * 16,
        b"GET",
        b"GET ",
        b"GET  HTTP/1.1",
        b"GET P",
        b"GET P HTTP",
        b"GET P HTTP/",
        b"GET P HTTP/1",
        b"GET P HTTP/1.",
        b"GET P HTTP/0.9",
        b"GET P HTTP/2.0",
        b"GET P HTTP/1.11",
        b"GET P HTTP/9.9",
        b"GET P http/1.1",
        b"GET P HTTP/1.1 x",
        b"GET P x HTTP/1.1",
        b"get P HTTP/1.1",
        b"G\xc3\x89T P HTTP/1.1",
        b"GET\tP\tHTTP/1.1",
        b"NONE P HTTP/1.1",
        b"GET P\0 HTTP/1.1",
        b"GET P\r HTTP/1.1",
        b"GET \xffP HTTP/1.1",
        b"GET \\ HTTP/1.1",
        b"GET http://[::1 HTTP/1.1",
        b"GET http:// HTTP/1.1",
        b"GET //P HTTP/1.1",
        b"GET * HTTP/1.1",
        b"CONNECT P HTTP/1.1",
        b"PRI * HTTP/2.0",
        b"GET " + b"/x" * 40_000 + b" HTTP/1.1",
    ]
    headers = [
        b": empty",
        b"no colon",
        b"A\0: b",
        b"A: \0",
        b"A : b",
        b"A\t: b",
        b" A: b",
        b"A\r: b",
        b"A: b\rC: d",
        b"(A): b",
        b"A: b\r\n folded",
        b"\xff: b",
        b"A" * 120_000 + b": b",
        b"A: " + b"b" * 120_000,
        b"Host: elsewhere",
        b"Host: 127.0.0.1\r\nhost: elsewhere",
        b"Connection: content-length",
        b"Connection: host, transfer-encoding",
        b"Upgrade: websocket\r\nConnection: Upgrade",
        b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 8",
        b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__",
    ]
    framings = [
        b"Content-Length: -1",
        b"Content-Length: +1",
        b"Content-Length: 0x10",
        b"Content-Length: 1 1",
        b"Content-Length: 1, 1",
        b"Content-Length: ",
        b"Content-Length: 99999999999999999999999",
        b"Content-Length: 1\r\nContent-Length: 1",
        b"Content-Length: 1\r\nContent-Length: 2",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        b"Transfer-Encoding: identity",
        b"Transfer-Encoding: gzip",
        b"Transfer-Encoding: chunked, gzip",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding:\x0bchunked",
        b"Transfer-Encoding: chunked\0",
        b"Transfer-Encoding : chunked",
        b"Transfer_Encoding: chunked\r\nContent-Length : 3",
    ]
    chunks = [
        b"x\r\n",
        b"-1\r\n\r\n",
        b"0x1\r\na\r\n",
        b" 1\r\na\r\n",
        b"1 \r\na\r\n",
        b"1\na\n0\n\n",
        b"1\r\nab\r\n",
        b"fffffffffffffffff\r\n",
        b"1;\0\r\na\r\n",
        b"0\r\nA: b\r\nC\r\n\r\n",
    ]
    for line in lines:
        yield line.replace(b"P", path) + b"\r\nHost: 127.0.0.1\r\n\r\n"
    for header in headers:
        yield b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\n%s\r\n\r\n" % (path, header)
    for framing in framings:
        yield b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\n%s\r\n\r\n" % (path, framing) + smuggled
    chunked = b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n" % path
    for chunk in chunks:
        yield chunked + chunk + smuggled


def say(address: tuple[str, int], data: bytes) -> bytes:
    """All that is answered to these bytes, and to the end of them."""
    answer = b""
    with contextlib.suppress(OSError), socket.create_connection(address, PATIENCE) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(data)
        for patience in (1.0, PATIENCE):
            sock.settimeout(patience)
            with contextlib.suppress(TimeoutError):
                while piece := sock.recv(65536):
                    answer += piece
                break
            sock.shutdown(socket.SHUT_WR)
    return answer


def test_what_is_no_request_is_refused_and_answered_once(door: Door) -> None:
    path = door.path(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
    requests = list(malformed(path if door.prefix else routes.workloads("default").encode()))
    assert len(requests) >= 72
    counts: dict[str, int] = {}
    with Meanwhile(door.address) as meanwhile, ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda data: say(door.address, data), requests))
    for request, answer in zip(requests, answers, strict=True):
        status = answer[9:12].decode()
        counts[status] = counts.get(status, 0) + 1
        assert answer.count(b"HTTP/1.1 ") <= 1, (request, answer)
        assert status in ("", "200") or 400 <= int(status) < 500, (request[-200:], answer)
        assert b"Traceback" not in answer and b".py" not in answer, (request, answer)
    print(f"  {len(requests)} requests: {counts}, worst /health {meanwhile.worst * 1000:.0f} ms")


# ------------------------------------------------------------------------------------- sessions


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InCluster]:
    """A controller as it is in a cluster, with accounts that have no right, and the pod of one."""
    reviews = FakeReviews()
    reviews.users = {f"token-{n}": (f"account-{n // 2}", "", "") for n in range(40)}
    reviews.users |= {"admin's": ("admin", "", "")}
    for n in range(2):
        account = "system:serviceaccount:a:kubetorch"
        reviews.users[PODS[n]] = (account, "f-0", "uid")
        reviews.audiences[PODS[n]] = ["kubetorch"]
    reviews.allow("admin", "create update", "kubetorchworkloads", "*")
    with ReviewedController(tmp_path_factory.mktemp("controller"), reviews) as controller:
        controller.backend.named["a", "f"] = [PodStatus("f-0", 0, "Running", "", uid="uid")]
        assert controller.deploy("admin's", "a", "f")[0] == 200
        yield controller


class Socket:
    """A WebSocket, frame by frame."""

    def __init__(
        self, address: tuple[str, int], path: str, token: str, headers: dict[str, str] | None = None
    ) -> None:
        sent = {routes.AUTHORIZATION: f"Bearer {token}", routes.PROTOCOL: str(versions.PROTOCOL)}
        handshake = ClientHandshake("127.0.0.1", path, {**sent, **(headers or {})}.items())
        self.sock = socket.create_connection(address, timeout=PATIENCE)
        self.sock.sendall(handshake.request)
        self.status = 101
        try:
            while not handshake.feed(self.sock.recv(1)):
                pass
        except UpgradeRefusedError as error:
            self.status = error.status
            self.sock.close()

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            self.sock.sendall(data)

    def end(self, timeout: float = PATIENCE) -> bytes | None:
        """What comes until it is closed; `None` if it stays open."""
        self.sock.settimeout(timeout)
        received = b""
        try:
            while piece := self.sock.recv(65536):
                received += piece
        except TimeoutError:
            return None
        except ConnectionError:
            pass
        return received


def frame(opcode: int, payload: bytes, *, is_last: bool = True) -> bytes:
    header = bytearray(websocket_protocol.frame_header(opcode, len(payload), masked=True))
    if not is_last:
        header[0] &= 0x7F
    return bytes(header) + payload


def test_a_session_takes_little_before_it_says_hello(
    cluster: InCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    timing = Timing(session_hello_seconds=60.0)
    monkeypatch.setattr("kubetorch.controller.sessions.TIMING", timing)
    host, port = cluster.url.removeprefix("http://").split(":")
    address = (host, int(port))
    announced = websocket_protocol.frame_header(TEXT, 4 * MIB - 1, masked=True)
    in_parts = frame(TEXT, b"{}", is_last=False) + frame(CONTINUATION, b"xx", is_last=False) * 7000
    before = processes.resident([os.getpid()])
    opened: list[Socket] = []
    statuses: dict[int, int] = {}
    with contextlib.ExitStack() as open_sockets:
        for n in range(40):
            for _ in range(LIMITS.waiting_sessions):
                websocket = open_sockets.enter_context(
                    Socket(address, routes.SESSIONS, f"token-{n}")
                )
                statuses[websocket.status] = statuses.get(websocket.status, 0) + 1
                if websocket.status == 101:
                    opened.append(websocket)
        # Two tokens of one account are one identity.
        assert statuses == {101: 20 * LIMITS.waiting_sessions, 429: 20 * LIMITS.waiting_sessions}
        for websocket in opened[::2]:
            websocket.send(announced + b"x" * MIB)
        for websocket in opened[1::2]:
            websocket.send(in_parts)
        held_then = processes.resident([os.getpid()])
        ends = [websocket.end() for websocket in opened[::2]]
        pinged = bytes([0x80 | PING, 0])  # after a while
        ends = [end and end.replace(pinged, b"") for end in ends]
        assert all(end is not None and end[:1] in (b"", b"\x88") for end in ends)
    after = processes.resident([os.getpid()])
    print(
        f"  {statuses}: {before // MIB} MiB before, {held_then // MIB} then, {after // MIB} after"
    )
    assert held_then - before < 32 * MIB and after - before < 24 * MIB


def test_a_pod_has_one_session_after_hello(cluster: InCluster) -> None:
    host, port = cluster.url.removeprefix("http://").split(":")
    hello = Hello("a", "f", "f-0", "i", "http://127.0.0.1:1", versions.PROTOCOL, "0")
    with contextlib.ExitStack() as open_sockets:
        opened = []
        for n in range(2 * LIMITS.waiting_sessions):
            websocket = open_sockets.enter_context(
                Socket((host, int(port)), routes.SESSIONS, PODS[n % 2])
            )
            assert websocket.status == 101
            websocket.send(frame(TEXT, messages.encode(hello)))
            assert websocket.sock.recv(1)
            opened.append(websocket)
        assert all(websocket.end() is not None for websocket in opened[:-1])
        assert opened[-1].end(1.0) is None


MASK = bytes(4)
#: What is sent, and whether the server may go on after it.
ATTACKS = {
    "without a mask": (b"\x81\x02{}", False),
    "first reserved bit": (b"\xc1\x80" + MASK, False),
    "second reserved bit": (b"\xa1\x80" + MASK, False),
    "third reserved bit": (b"\x91\x80" + MASK, False),
    "reserved data frame": (b"\x83\x80" + MASK, False),
    "reserved control frame": (b"\x8b\x80" + MASK, False),
    "long ping": (frame(PING, b"x" * 126), False),
    "ping in parts": (frame(PING, b"x", is_last=False), False),
    "close in parts": (frame(CLOSE, b"", is_last=False), False),
    "end without a begin": (frame(CONTINUATION, b"x"), False),
    "begin in the middle": (frame(TEXT, b"x", is_last=False) * 2, False),
    "other kind in the middle": (frame(TEXT, b"x", is_last=False) + frame(BINARY, b"x"), False),
    "longest length": (b"\x81\xff" + b"\xff" * 8 + MASK, False),
    "negative length": (b"\x81\xff\x80" + bytes(7) + MASK, False),
    "too long": (websocket_protocol.frame_header(TEXT, 1 << 30, masked=True), False),
    "too long in parts": (
        frame(TEXT, b"x" * 60_000, is_last=False)
        + frame(CONTINUATION, b"x" * 60_000, is_last=False) * 200,
        False,
    ),
    "no text": (frame(TEXT, b"\xff\xfe"), False),
    "no message": (frame(TEXT, b"[" * 5000), False),
    "close of one byte": (frame(CLOSE, b"x"), False),
    "close of no such code": (frame(CLOSE, b"\0\0"), False),
    "all zeros": (bytes(5000), False),
    "empty parts": (
        frame(TEXT, b"", is_last=False) + frame(CONTINUATION, b"", is_last=False) * 9999,
        True,
    ),
    "pings that nobody reads": (frame(PING, b"x" * 125) * 100_000, True),
}


@pytest.mark.parametrize("kind", ["session", "stream"])
def test_no_websocket_outlives_what_it_must_not_say(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    with contextlib.ExitStack() as stack:
        if kind == "session":
            host, port = request.getfixturevalue("cluster").url.removeprefix("http://").split(":")
            address, path, token, pid = (host, int(port)), routes.SESSIONS, PODS[0], os.getpid()
        else:
            controller = FakeController(tmp_path)
            stack.callback(controller.close)
            agent = AgentProcess(tmp_path, controller)
            stack.callback(agent.stop)
            address, path = ("127.0.0.1", agent.port), routes.STREAM
            token, pid = USER_TOKEN, agent.pid
        before = processes.resident([pid])
        with Meanwhile(address) as meanwhile:
            for number, (name, (data, goes_on)) in enumerate(ATTACKS.items()):
                with Socket(address, path, token, {routes.CLIENT: f"attack-{number}"}) as websocket:
                    assert websocket.status == 101, name
                    websocket.sock.settimeout(1.0)
                    with contextlib.suppress(TimeoutError):
                        websocket.send(data)
                    assert goes_on or websocket.end() is not None, name
        grown = processes.resident([pid]) - before
    print(
        f"  {len(ATTACKS)} attacks on a {kind}: worst /health {meanwhile.worst * 1000:.0f} ms, "
        f"{before // MIB} MiB before, {grown / MIB:+.1f} after"
    )
    assert meanwhile.worst < PATIENT and grown < GROWTH
