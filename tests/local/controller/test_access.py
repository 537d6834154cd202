"""Who may ask the controller what: every route, over real sockets."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kubetorch.controller.routes.blobs import BlobRoutes
from kubetorch.controller.routes.calls import CallRoutes
from kubetorch.controller.routes.status import ServiceRoutes
from kubetorch.controller.routes.workloads import WorkloadRoutes
from kubetorch.datastore.blobs import digest_of
from kubetorch.wire import routes, tokens
from tests.local.service_harness import FAKE, Service, pack

pytestmark = pytest.mark.security

# What the handlers need is of no interest here: only their paths are.
ALL = [
    route
    for group in (ServiceRoutes, WorkloadRoutes, BlobRoutes, CallRoutes)
    for route in group.routes(object.__new__(group))
]
GUARDED = [route for route in ALL if route.path != routes.HEALTH]
FOR_PODS = {routes.BLOBS, routes.BLOBS_FETCH}


@pytest.fixture(scope="module")
def service(shared_service_home: Path) -> Iterator[Service]:
    service = Service(shared_service_home, FAKE).start()
    service.deploy("f")
    yield service
    service.delete("f")
    service.terminate()


def path_of(route: object) -> str:
    names = {"namespace": "default", "name": "f", "call_id": "0" * 32}
    return route.path.format(**names)  # type: ignore[attr-defined]


def upgrade(service: Service, token: str, path: str = routes.SESSIONS) -> int:
    """The status that an attempt to open a session is answered with."""
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        lines = [
            f"GET {path} HTTP/1.1",
            f"Host: {host}:{port}",
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            *([f"Authorization: Bearer {token}"] if token else []),
        ]
        sock.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        return int(sock.recv(4096).split(b" ")[1])


def ids(route: object) -> str:
    return f"{route.method} {route.path}"  # type: ignore[attr-defined]


@pytest.mark.parametrize("token", ["", "wrong", "kt1.e30.c2ln"], ids=["none", "wrong", "forged"])
@pytest.mark.parametrize("route", GUARDED, ids=ids)
def test_a_route_without_a_token_answers_401(service: Service, route: object, token: str) -> None:
    status, answer = service.request(route.method, path_of(route), b"{}", token=token)  # type: ignore[attr-defined]
    assert (status, answer["error_type"]) == (401, "UnauthorizedError")


def test_a_session_without_a_token_is_refused(service: Service) -> None:
    assert upgrade(service, "") == 401
    assert upgrade(service, "wrong") == 401


def test_an_unknown_path_without_a_token_says_nothing_about_itself(service: Service) -> None:
    assert service.request("GET", "/anything", token="")[0] == 401


def test_health_needs_no_token(service: Service) -> None:
    status, answer = service.request("GET", routes.HEALTH, token="")
    assert (status, answer["status"]) == (200, "healthy")


def call_token(service: Service) -> str:
    status, answer = service.request("POST", routes.workload("default", "f", "token"), b"{}")
    assert status == 200
    return str(answer["token"])


@pytest.mark.parametrize("route", GUARDED, ids=ids)
def test_a_token_for_calls_opens_nothing_here(service: Service, route: object) -> None:
    status, _ = service.request(
        route.method,  # type: ignore[attr-defined]
        path_of(route),
        b"{}",
        token=call_token(service),
    )
    assert status == 401


def pod_token(service: Service) -> str:
    (pod,) = service.get("f").pods
    file = service.home / "pods" / "default" / pod.name / "credentials.json"
    assert file.stat().st_mode & 0o777 == 0o600
    return str(json.loads(file.read_bytes())["session"])


@pytest.mark.parametrize(
    "route", [route for route in GUARDED if route.path not in FOR_PODS], ids=ids
)
def test_the_token_of_a_pod_is_not_for_users_routes(service: Service, route: object) -> None:
    status, answer = service.request(
        route.method,  # type: ignore[attr-defined]
        path_of(route),
        b"{}",
        token=pod_token(service),
    )
    assert (status, answer["error_type"]) == (401, "UnauthorizedError")


def test_the_token_of_a_pod_is_for_its_blobs_and_session(service: Service) -> None:
    token, blob = pod_token(service), b"a result"
    assert service.request("POST", routes.BLOBS, pack([blob]), token=token)[0] == 200
    body = json.dumps({"blobs": [digest_of(blob)]}).encode()
    with (
        service.client(token) as client,
        client.request("POST", routes.BLOBS_FETCH, body=body) as got,
    ):
        assert got.status == 200
        got.read()
    assert upgrade(service, token) == 101


def test_the_token_of_a_pod_ends_with_it(service: Service) -> None:
    service.deploy("short")
    (pod,) = service.get("short").pods
    file = service.home / "pods" / "default" / pod.name / "credentials.json"
    token = json.loads(file.read_bytes())["session"]
    assert upgrade(service, token) == 101
    service.delete("short")
    assert upgrade(service, token) == 401


@pytest.mark.parametrize("subject", ["pod:{pod}", "pod:f-1", "user"])
def test_what_a_pod_signs_with_its_key_opens_nothing_of_the_controller(
    service: Service, subject: str
) -> None:
    (pod,) = service.get("f").pods
    file = service.home / "pods" / "default" / pod.name / "credentials.json"
    key = bytes.fromhex(json.loads(file.read_bytes())["key"])
    for audience in ("default/f", "default/g", "default/*"):
        claims = tokens.Claims(audience, 1e12, subject.format(pod=pod.name), tokens.VERBS)
        token = tokens.sign(key, claims)
        assert upgrade(service, token) == 401
        assert service.request("POST", routes.BLOBS_FETCH, b'{"blobs": []}', token=token)[0] == 401


def test_a_token_of_another_installation_is_refused(service: Service) -> None:
    key = tokens.workload_key(b"another secret", "default/f")
    (pod,) = service.get("f").pods
    claims = tokens.Claims("default/f", 1e12, f"pod:{pod.name}")
    assert upgrade(service, tokens.sign(key, claims)) == 401


# ----------------------------------------------------------------------------- foreign pages


@pytest.mark.parametrize(
    "headers",
    [{"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Origin": "null"}],
    ids=str,
)
@pytest.mark.parametrize("path", [routes.HEALTH, routes.STATUS])
def test_a_foreign_page_is_refused_with_the_right_token_too(
    service: Service, path: str, headers: dict[str, str]
) -> None:
    status, answer = service.request("GET", path, headers=headers)
    assert (status, answer["error_type"]) == (403, "ForeignOriginError")


# ------------------------------------------------------------------------------- tokens for calls


@pytest.mark.parametrize("ttl", [1, 60, 30 * 86400])
def test_a_token_lasts_as_long_as_it_was_asked_for(service: Service, ttl: int) -> None:
    path = routes.workload("default", "f", "token")
    status, answer = service.request("POST", path, json.dumps({"ttl": ttl}).encode())
    assert status == 200
    (pod,) = service.get("f").pods
    file = service.home / "pods" / "default" / pod.name / "credentials.json"
    key = bytes.fromhex(json.loads(file.read_bytes())["key"])
    before = answer["expires"] - 0.5
    assert tokens.verify(key, answer["token"], audience="default/f", now=before).subject == "user"


@pytest.mark.parametrize("ttl", [0, 0.5, 30 * 86400 + 1, -1, "long"])
def test_a_token_has_bounds(service: Service, ttl: object) -> None:
    path = routes.workload("default", "f", "token")
    assert service.request("POST", path, json.dumps({"ttl": ttl}).encode())[0] == 400


def test_a_token_for_nothing_is_refused(service: Service) -> None:
    assert service.request("POST", routes.workload("default", "nothing", "token"), b"{}")[0] == 404


# ------------------------------------------------------------------------------------ bad requests


def test_an_unknown_path_answers_404_and_a_wrong_method_405(service: Service) -> None:
    assert service.request("GET", "/v1/nothing")[0] == 404
    assert service.request("POST", routes.STATUS, b"{}")[0] == 405


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"blobs": 1}', b'{"blobs": ["x"]}'])
def test_a_body_that_is_not_what_it_should_be_answers_400(service: Service, body: bytes) -> None:
    status, answer = service.request("POST", routes.BLOBS_MISSING, body)
    assert status == 400, answer


def test_a_body_that_is_too_long_answers_413(service: Service) -> None:
    path = routes.workload("default", "f", "token")
    body = b'{"ttl": 60, "padding": "' + b"x" * (5 * 1024 * 1024) + b'"}'
    assert service.request("POST", path, body)[0] == 413


def test_a_deploy_whose_head_never_ends_is_refused(service: Service) -> None:
    path = routes.workload("default", "f", "deploy")
    status, answer = service.request("POST", path, b"x" * (3 * 1024 * 1024))
    assert (status, answer["error_type"]) == (400, "SpecError")
    assert service.request("GET", routes.STATUS)[0] == 200


def test_a_request_whose_head_never_ends_is_refused(service: Service) -> None:
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\n")
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                sock.sendall(b"X-Filler: " + b"x" * 1000 + b"\r\n")
            sock.sendall(b"\r\n")
            while sock.recv(65536):
                pass
            raise ConnectionError("closed")
