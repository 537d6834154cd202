"""Every route of controller and agent, with wrong credentials and with wrong everything else.

Without credentials that hold, nothing but health answers. With them, nothing that a client sends is
an internal error. Nothing hangs: whatever is sent, an answer comes, or the connection ends.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from agent_harness import SECRET as AGENT_SECRET
from agent_harness import USER_TOKEN, AgentProcess, FakeController
from kubetorch.controller.backends.base import PodStatus
from kubetorch.controller.tuning import LIMITS
from kubetorch.pod.http.app import TABLE
from kubetorch.wire import messages, routes, tokens, versions
from shared import WHOLE
from tests.cluster_controller import SECRET
from tests.local.fake_reviews import FakeReviews, ReviewedController
from tests.local.service_harness import FAKE, Service, deploy, pack, spec
from tools.routes import of_controller

pytestmark = pytest.mark.security

PATIENCE = 60.0
# Read here: a test has no such variable.
CONTROLLER = [(route.method, route.path) for route in of_controller()]
# Stopping the service ends the test; pods and their apps have tests of their own.
CONTROLLER_SAFE = [route for route in CONTROLLER if route[1] not in (routes.STOP, routes.HEALTH)]
AGENT = [(route.method, route.path) for route in TABLE if route.method in ("GET", "POST")]
AGENT_ALL = sorted(
    {(method, route.path) for route in TABLE for method in ("GET", "POST", "PUT")}
    - {("GET", "/{callable}"), ("GET", "/{callable}/{method}")}
)
SOCKETS = [routes.SESSIONS, routes.STREAM, routes.SHELL, "/a/f/v1/stream", "/a/f/v1/shell", "/x"]
KNOWN_PARAMETERS = {"namespace": "a", "name": "f", "call_id": "0" * 32, "claim": "data"}

few = settings(
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
RouteName = tuple[str, str]


def each_route(names: list[RouteName]) -> pytest.MarkDecorator:
    """A test for each route, or one for all of them unless all is wanted."""
    groups = [[name] for name in names] if WHOLE else [names]
    ids = [" ".join(group[0]) if WHOLE else "all" for group in groups]
    return pytest.mark.parametrize("asked_routes", groups, ids=ids)


def fuzz(
    asked_routes: list[RouteName], check: Callable[..., None], *more: SearchStrategy[Any]
) -> None:
    """Ask each route with nothing, and some of them with everything else, and `more`."""
    for route in asked_routes:
        check(route, [], "", {}, b"", *(None for _ in more))
    strategies = (st.sampled_from(asked_routes), parts, queries, heads, bodies, *more)
    settings(few, max_examples=8 if WHOLE else 80)(given(*strategies)(check))()


class Target:
    """A server that is asked over raw sockets."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self.address = (host, int(port))
        self.token = ""
        #: Bytes of its log.
        self.log_size: Callable[[], int] = lambda: 0

    def ask(self, method: str, target: str, headers: dict[str, str], body: bytes = b"") -> int:
        """Status of the answer; 0 when the connection ended without one."""
        return self.answer(method, target, headers, body, is_whole=False)[0]

    def answer(
        self,
        method: str,
        target: str,
        headers: dict[str, str],
        body: bytes = b"",
        *,
        is_whole: bool = True,
    ) -> tuple[int, bytes]:
        """Status and, if it is to be read whole, body of the answer."""
        lines = [f"{method} {target} HTTP/1.1", "Host: 127.0.0.1", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if "Content-Length" not in headers and "Transfer-Encoding" not in headers:
            lines.append(f"Content-Length: {len(body)}")
        with socket.create_connection(self.address, timeout=PATIENCE) as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
                if "Transfer-Encoding" in headers:  # what comes may be the begin of a body
                    sock.shutdown(socket.SHUT_WR)
            answer = b""
            # A timeout here is what this test is for: something hangs.
            with contextlib.suppress(ConnectionError):
                while (is_whole or b"\r\n" not in answer) and (piece := sock.recv(4096)):
                    answer += piece
        status = int(answer.split(b" ")[1]) if answer else 0
        return status, answer.partition(b"\r\n\r\n")[2]

    def upgrade(self, target: str, headers: dict[str, str]) -> int:
        upgrade_headers = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
            routes.CLIENT: "fuzz",
            routes.PROTOCOL: str(versions.PROTOCOL),
            **headers,
        }
        return self.ask("GET", target, {**upgrade_headers, "Content-Length": "0"})


def jwt(**claims: object) -> str:
    body = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    return f"eyJhbGciOiJub25lIn0.{body}.c2ln"


def signed(secret: bytes, audience: str, subject: str, *, seconds: float, signer: str = "") -> str:
    key = tokens.workload_key(secret, signer or audience)
    return tokens.sign(key, tokens.Claims(audience, time.time() + seconds, subject))


NO_CLAIMS = [
    b"[]",
    b"null",
    b'"aud"',
    b"[" * 20_000,
    b'{"aud": "a/f", "sub": "pod:f-0", "exp": ' + b"9" * 400 + b"}",
    b'{"aud": "\\ud800/f", "sub": "pod:f-0", "exp": 9e9}',
    b'{"aud": "a/f", "sub": "pod:f-0", "exp": [], "verbs": 5}',
    b'{"aud": {"a/f": []}, "sub": null, "exp": "Infinity", "iat": "-Infinity"}',
    b'{"aud": "a/*", "sub": "namespace-pods", "exp": 9e9, "iat": -1e999}',
]


def wrong_tokens() -> list[str]:
    """Tokens that open nothing anywhere."""
    call = signed(b"another installation's", "a/f", "user", seconds=60)
    return [
        "",
        "root",
        "null",
        "undefined",
        jwt(aud=["kubetorch"], exp=time.time() + 60, sub="system:admin"),
        jwt(aud=["kubetorch"], exp=time.time() - 60),
        jwt(aud=["vault"]),
        jwt(aud=[["kubetorch"]], exp="1e999"),
        call,
        call[:-3] + "AAA",
        signed(b"another installation's", "a/*", "namespace-pods", seconds=60),
        *(
            text
            for secret in (SECRET, AGENT_SECRET)
            for text in (
                signed(secret, "a/f", "pod:f-0", seconds=-1),
                signed(secret, "a/f", "pod:gone", seconds=60, signer="b/g"),
                signed(secret, "a/*", "namespace-pods", seconds=-1),
                signed(secret, "other/demo", "user", seconds=60),
                signed(secret, "", "", seconds=60),
                signed(secret, "a", "pod:", seconds=60),
            )
        ),
        "kt1..",
        "kt1.e30.c2ln",
        *(f"kt1.{base64.urlsafe_b64encode(body).rstrip(b'=').decode()}.c2ln" for body in NO_CLAIMS),
        "x" * 40_000,
    ]


# Header values are sent as latin-1, without what ends a line.
_TEXT = st.text(st.characters(min_codepoint=1, max_codepoint=255, exclude_characters="\r\n\x00"))
credentials = st.one_of(
    st.just(None),
    st.sampled_from(wrong_tokens()).map(lambda token: f"Bearer {token}"),
    _TEXT.map(lambda text: f"Bearer {text}"),
    _TEXT,
    st.sampled_from(["Basic cm9vdDpyb290", "bearer", "Bearer", "Bearer  ", "Negotiate x"]),
)
_part = st.one_of(
    st.sampled_from(["a", "f", "b", "*", "..", "%2e%2e", "a%2Fb", "%00", "null", "-", "A" * 300]),
    st.text(min_size=1, max_size=30).map(lambda text: quote(text, safe="")),
)
_json = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner),
    max_leaves=12,
)
_fields = ["ttl", "verbs", "blobs", "id", "spec", "protocol", "version", "draft", "values", "name"]
_fields += ["size", "mount_path", "namespace", "args", "kwargs", "pods", "step", "timeout"]
bodies = st.one_of(
    st.just(b""),
    st.binary(max_size=200),
    _json.map(lambda value: json.dumps(value).encode()),
    st.dictionaries(st.sampled_from(_fields), _json).map(lambda value: json.dumps(value).encode()),
    st.just(b"[" * 3000),
    st.just(b'{"ttl": 1e999, "blobs": ["\\ud800"]}'),
    st.just(b"\x28\xb5\x2f\xfd" + b"\x00" * 50),
)
heads = st.sampled_from(
    [
        {},
        {"Content-Type": "application/json"},
        {"Content-Encoding": "gzip"},
        {"X-Serialization": "pickle"},
        {"X-Request-ID": "a b\tc"},
        {"Content-Length": "1000000000"},
        {"Transfer-Encoding": "chunked"},
        {"Expect": "100-continue"},
    ]
)
queries = st.one_of(
    st.just(""),
    st.sampled_from(
        [
            "?namespace=a",
            "?namespace=%00",
            "?namespace=..%2F..%2Fb",
            "?tail=-1&follow=maybe",
            "?tail=nan",
            "?grace=1e999&wait=-1",
            "?access_mode=x",
            "?kubetorch_token=x",
        ]
    ),
)


def filled_path(path: str, parts: list[str]) -> str:
    """A path whose parameters are the ones that are known, or others."""
    parameters = iter(parts)
    return re.sub(
        r"\{(\w+)\}",
        lambda match: next(parameters, "") or KNOWN_PARAMETERS.get(match[1], "x"),
        path,
    )


parts = st.lists(st.one_of(st.just(""), _part), max_size=3)


def refused(head: dict[str, str]) -> tuple[int, ...]:
    """Statuses of what is refused; a body that breaks its own framing ends the connection."""
    return (0, 400, 401) if "Transfer-Encoding" in head else (400, 401)


def sent(authorization: str | None, head: dict[str, str]) -> dict[str, str]:
    return head if authorization is None else {**head, "Authorization": authorization}


# ------------------------------------------------------------------------------------ the servers


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A controller as it is in a cluster, with a user who may do everything."""
    reviews = FakeReviews()
    reviews.users = {"root": ("root", "", "")}
    reviews.audiences = {"root": ["somebody else"]}
    reviews.users["admin's"] = ("admin", "", "")
    kinds = ("", "/call", "/exec", "/logs", "/secrets", "/volumes", "/status")
    for kind in kinds:
        reviews.allow("admin", "get list create update delete", f"kubetorchworkloads{kind}", "*")
    with ReviewedController(tmp_path_factory.mktemp("controller"), reviews) as controller:
        controller.backend.named["a", "f"] = [PodStatus("f-0", 0, "Running", "")]
        assert controller.deploy("admin's", "a", "f")[0] == 200
        target = Target(controller.url)
        target.token = "admin's"
        yield target


@pytest.fixture(scope="module")
def local(shared_service_home: Path) -> Iterator[Target]:
    """The service of one user."""
    service = Service(shared_service_home, FAKE).start()
    service.deploy("f")
    target = Target(service.url)
    target.token = service.token
    target.log_size = lambda: len(service.log())
    yield target
    service.delete("f")
    service.terminate()


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """An agent that serves a function."""
    folder = tmp_path_factory.mktemp("agent")
    fake = FakeController(folder)
    process = AgentProcess(folder, fake)
    fake.deploy(1, "def f(x=None):\n    return x\n", "f")
    target = Target(f"http://127.0.0.1:{process.port}")
    target.token = USER_TOKEN
    target.log_size = lambda: process.log_file.stat().st_size
    yield target
    process.stop()
    fake.close()


# Of the file, so that they start before the leak check of the first test that asks them.


@pytest.fixture(scope="module", params=["cluster", "local"])
def controller(request: pytest.FixtureRequest) -> Target:
    """Each kind of controller."""
    target: Target = request.getfixturevalue(request.param)
    return target


@pytest.fixture(scope="module", params=["cluster", "local", "agent"])
def server(request: pytest.FixtureRequest) -> Target:
    """Everything that listens."""
    target: Target = request.getfixturevalue(request.param)
    return target


# ------------------------------------------------------------------------------ without credentials


@each_route(CONTROLLER)
def test_the_controller_answers_nobody_but_about_its_health(
    controller: Target, asked_routes: list[RouteName]
) -> None:

    def check(
        route: RouteName,
        given_parts: list[str],
        query: str,
        head: dict[str, str],
        body: bytes,
        authorization: str | None,
    ) -> None:
        method, path = route
        where = filled_path(path, given_parts) + query
        status = controller.ask(method, where, sent(authorization, head), body)
        if path == routes.HEALTH:
            assert status in (200, *refused(head)), (status, where)
        else:
            assert status in refused(head), (status, where, authorization)

    fuzz(asked_routes, check, credentials)


@each_route(AGENT)
def test_the_agent_answers_nobody_but_about_its_health(
    agent: Target, asked_routes: list[RouteName]
) -> None:
    open_routes = {(route.method, route.path) for route in TABLE if route.is_open}

    def check(
        route: RouteName,
        given_parts: list[str],
        query: str,
        head: dict[str, str],
        body: bytes,
        authorization: str | None,
    ) -> None:
        method, path = route
        where = filled_path(path, given_parts) + query
        status = agent.ask(method, where, sent(authorization, head), body)
        if route in open_routes:
            assert status in (200, 503, *refused(head)), (status, where)
        else:
            assert status in refused(head), (status, where, authorization)

    fuzz(asked_routes, check, credentials)


def test_every_wrong_token_is_refused_in_one_sentence(
    server: Target, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    is_agent = request.node.callspec.params["server"] == "agent"
    where = AGENT_ALL if is_agent else CONTROLLER
    is_open = {(route.method, route.path) for route in TABLE if route.is_open}
    pairs = [(route, token) for route in where for token in wrong_tokens()]
    # All routes and all tokens, though not all pairs, unless all of it is wanted.
    pairs = pairs if WHOLE else pairs[::7]
    metrics = {"Authorization": f"Bearer {server.token}"}
    measured = server.answer("GET", routes.METRICS, metrics)[1], server.log_size()
    for (method, path), token in pairs:
        target = filled_path(path, [])
        bearer = {"Authorization": f"Bearer {token}"}
        status, body = server.answer(method, target, bearer)
        if path == routes.HEALTH or (is_agent and (method, path) in is_open):
            assert status in ((200, 503) if method == "GET" else (401,)), (status, method, path)
            continue
        assert status == 401, (status, method, path, token, body)
        failure = json.loads(body)
        assert re.fullmatch(r"[^\n]{5,300}", failure["message"]), failure
        assert ". " not in failure["message"], failure
        assert (failure["error_type"], failure["traceback"]) == ("UnauthorizedError", "")
        assert failure["cause"] is None and b".py" not in body and b"Traceback" not in body
    lines = len(caplog.records)
    grown = server.log_size() - measured[1]
    count = len(server.answer("GET", routes.METRICS, metrics)[1].splitlines())
    print(f"  {len(pairs)} requests: log {grown:+d} bytes, {lines} lines, {count} figures")
    assert (
        count == len(measured[0].splitlines())
        and grown < 1000
        and lines <= 2 * LIMITS.unidentified_lines + 10
    )


@pytest.mark.parametrize("path", SOCKETS)
def test_no_websocket_opens_for_strangers(server: Target, path: str) -> None:

    @few
    @given(credentials)
    def check(authorization: str | None) -> None:
        status = server.upgrade(path, sent(authorization, {}))
        assert status in (400, 401), (status, authorization)

    check()


@few
@given(credentials, st.sampled_from(["GET", "POST", "PUT", "OPTIONS", "TRACE"]), parts, queries)
def test_what_is_passed_on_to_pods_is_for_nobody_either(
    controller: Target,
    authorization: str | None,
    method: str,
    given_parts: list[str],
    query: str,
) -> None:
    where = filled_path("/{namespace}/{name}/{rest}", given_parts) + query
    status = controller.ask(method, where, sent(authorization, {}))
    assert status in (400, 401), (status, where, authorization)


@few
@given(st.binary(max_size=300))
def test_what_is_no_request_ends(server: Target, data: bytes) -> None:
    with (
        contextlib.suppress(ConnectionError),
        socket.create_connection(server.address, timeout=PATIENCE) as sock,
    ):
        sock.sendall(data + b"\r\n\r\n")
        sock.shutdown(socket.SHUT_WR)
        while piece := sock.recv(4096):
            assert not piece.startswith(b"HTTP/1.1 5"), piece
    assert server.ask("GET", routes.HEALTH, {}) == 200


# ------------------------------------------------------------------------------- with credentials


@each_route(CONTROLLER_SAFE)
def test_nothing_that_a_user_sends_is_an_internal_error(
    controller: Target, asked_routes: list[RouteName]
) -> None:
    token = controller.token
    complete = {"Content-Length": "1000000000"}

    def check(
        route: RouteName, given_parts: list[str], query: str, head: dict[str, str], body: bytes
    ) -> None:
        method, path = route
        if head == complete or "follow" in query:
            return  # the body never comes, or the answer never ends: as it should be
        where = filled_path(path, [part if part != "f" else "" for part in given_parts]) + query
        if method == "DELETE" and where.startswith(f"{routes.WORKLOADS}/a/f"):
            return
        status = controller.ask(method, where, {**head, "Authorization": f"Bearer {token}"}, body)
        assert status < 500, (status, where, body)
        assert status or "Transfer-Encoding" in head, (where, body)

    fuzz(asked_routes, check)


@each_route([route for route in AGENT if route[1] != routes.RUN])
def test_nothing_that_a_caller_sends_is_an_internal_error_of_the_agent(
    agent: Target, asked_routes: list[RouteName]
) -> None:
    def check(
        route: RouteName, given_parts: list[str], query: str, head: dict[str, str], body: bytes
    ) -> None:
        method, path = route
        if "Content-Length" in head or "follow" in query:
            return
        where = filled_path(path, given_parts) + query
        given_token = {"Authorization": f"Bearer {USER_TOKEN}"}
        status = agent.ask(method, where, {**head, **given_token}, body)
        # 503: the answer of health where nothing serves.
        assert status < 500 or (status == 503 and method == "GET"), (status, where, body)
        assert status or "Transfer-Encoding" in head, (where, body)

    fuzz(asked_routes, check)


@few
@given(_json, st.sampled_from(["compute", "callable", "runtime", "tree", "init_args", "name"]))
@example("", "init_args")
@example("", "tree")
@example("../" * 20, "tree")
def test_a_spec_that_is_none_is_refused(local: Target, value: object, field: str) -> None:
    head = json.loads(messages.encode(deploy(spec("fuzz"))))
    head["spec"][field] = value
    body = json.dumps(head).encode() + b"\n" + pack([b"x"])
    token = {"Authorization": f"Bearer {local.token}"}
    status = local.ask("POST", routes.workload("default", "fuzz", "deploy"), token, body)
    path = f"{routes.workload('default', 'fuzz')}?grace=0"
    assert local.ask("DELETE", path, token) in (200, 404)
    assert 0 < status < 500, (status, head)
