"""Who may ask the controller."""

from __future__ import annotations

import asyncio

import pytest

from kubetorch.controller.access import LocalAccess, Need, PodIdentity, Principal, User
from kubetorch.errors import ForeignOriginError, UnauthorizedError
from kubetorch.wire import tokens

pytestmark = pytest.mark.security

SECRET = b"s" * 32
NOW = 1000.0
POD = PodIdentity("ns", "f", "f-1")


def access(*known_pods: PodIdentity) -> LocalAccess:
    return LocalAccess(
        user=tokens.fingerprint("the-token"),
        secret=SECRET,
        clock=lambda: NOW,
        session_token_of=lambda pod: token(f"pod:{pod.pod}") if pod in known_pods else "",
    )


def token(subject: str, *, audience: str = "ns/f", expires: float = NOW + 1) -> str:
    key = tokens.workload_key(SECRET, audience)
    return tokens.sign(key, tokens.Claims(audience, expires, subject))


def identify(headers: dict[str, str], *known_pods: PodIdentity) -> Principal:
    return asyncio.run(access(*known_pods).identify(headers))


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


def test_the_users_token_is_the_user() -> None:
    assert identify(bearer("the-token")) == User()


def test_the_token_of_a_pod_is_that_pod() -> None:
    assert identify(bearer(token("pod:f-1")), POD) == POD


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param({}, id="none"),
        pytest.param({"authorization": "Basic dTpw"}, id="another scheme"),
        pytest.param(bearer(""), id="empty"),
        pytest.param(bearer("the-tokem"), id="wrong"),
        pytest.param(bearer("kt1.e30.x"), id="garbage"),
        pytest.param(bearer("ü.ö.ä"), id="not ASCII"),
        pytest.param(bearer(token("user")), id="a token for calls"),
        pytest.param(bearer(token("pod:f-1", expires=NOW)), id="expired"),
        pytest.param(bearer(token("pod:unknown")), id="a pod that is gone"),
        pytest.param(bearer(token("pod:f-1", audience="ns/g")), id="another workload"),
        pytest.param(bearer(token("pod:f-1", expires=NOW + 2)), id="signed by the pod itself"),
    ],
)
def test_everything_else_is_nobody(headers: dict[str, str]) -> None:
    with pytest.raises(UnauthorizedError):
        identify(headers, POD)


def test_a_token_signed_with_another_workloads_key_is_refused() -> None:
    claims = tokens.Claims("ns/f", NOW + 1, "pod:f-1")
    forged = tokens.sign(tokens.workload_key(SECRET, "ns/g"), claims)
    with pytest.raises(UnauthorizedError):
        identify(bearer(forged), POD)


@pytest.mark.parametrize("host", ["127.0.0.1:80", "localhost", "[::1]:8080", "127.1.2.3"])
@pytest.mark.parametrize("origin", [None, "http://localhost:3000", "http://127.0.0.1"])
def test_requests_of_this_machine_pass(host: str, origin: str | None) -> None:
    headers = {"host": host} | ({} if origin is None else {"origin": origin})
    access().check_origin(headers)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "localhost", "origin": "https://evil.example"},
        {"host": "localhost", "origin": "null"},
        {"host": "localhost", "origin": "http://localhost.evil.example"},
    ],
)
def test_requests_of_foreign_pages_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ForeignOriginError):
        access().check_origin(headers)


def test_the_user_may_do_everything_and_a_pod_nothing_but_be_itself() -> None:
    need = Need("get", "ns", "f")
    asyncio.run(access().authorize(User(), need))
    with pytest.raises(UnauthorizedError, match="the token of a pod is not for this"):
        asyncio.run(access().authorize(POD, need))
    access().check_pod(POD, POD)
    access().check_pod(User(), POD)
    with pytest.raises(UnauthorizedError, match="not the one of pod f-2"):
        access().check_pod(POD, PodIdentity("ns", "f", "f-2"))
