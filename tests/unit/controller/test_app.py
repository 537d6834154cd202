"""What a request has to pass before a handler has it, and how it is answered."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest

from kubetorch.controller.access import LocalAccess, PodIdentity, Principal
from kubetorch.controller.app import App
from kubetorch.controller.relay import Relay
from kubetorch.controller.routes.table import Exchange, Permission, Route, Table
from kubetorch.controller.sessions import Session
from kubetorch.errors import ServiceNotFoundError
from kubetorch.lib.asgi import ClientGoneError
from kubetorch.lib.http_server import Refusal
from kubetorch.wire import routes, tokens

SECRET = b"s" * 32
POD = PodIdentity("ns", "f", "f-1")


def token(subject: str) -> str:
    claims = tokens.Claims("ns/f", 2.0, subject)
    return tokens.sign(tokens.workload_key(SECRET, "ns/f"), claims)


USER, OF_POD = "the-token", token("pod:f-1")


class Controller:
    """An application, and what became of requests to it."""

    def __init__(self) -> None:
        self.handled: list[str] = []
        self.admitted = 0
        self.requests_of_users = 0
        self.sessions: list[Principal] = []
        access = LocalAccess(
            user=tokens.fingerprint(USER),
            secret=SECRET,
            clock=lambda: 1.0,
            session_token_of=lambda pod: OF_POD if pod == POD else "",
        )
        need = (Permission("list", scope="all"),)
        table_routes = [
            Route("GET", routes.HEALTH, self._handle),
            Route("GET", "/v1/users", self._handle),
            Route("GET", "/v1/rights", self._handle, need),
            Route("GET", "/v1/pods", self._handle, need, "pods"),
            Route("GET", "/v1/broken", self._break),
            Route("GET", "/v1/cut", self._cut),
            Route("GET", "/v1/gone", self._leave),
        ]
        self.app = App(
            Table(table_routes),
            access,
            Relay(self._no_service, secret=SECRET, clock=lambda: 1.0),
            new_session=self._new_session,
            on_request=self._note_request,
        )

    def ask(self, path: str, credential: str = "", **headers: str) -> tuple[int, dict[str, Any]]:
        """Status and body of an answer; 0 when there is none."""
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = {"host": "localhost", "authorization": f"Bearer {credential}", **headers}
        scope = {
            "method": "GET",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "admit": self._admit,
        }
        asyncio.run(self.app(scope, receive, send))
        if not sent:
            return 0, {}
        body = b"".join(message.get("body", b"") for message in sent)
        return sent[0]["status"], json.loads(body or b"{}")

    def accept(self, path: str, credential: str, **headers: str) -> int:
        """The status of the answer to an upgrade."""
        headers = {"host": "localhost", "authorization": f"Bearer {credential}", **headers}
        try:
            asyncio.run(self.app.accept(path, headers))
        except Refusal as refusal:
            return refusal.status
        return 101

    def _admit(self) -> None:
        self.admitted += 1

    def _note_request(self) -> None:
        self.requests_of_users += 1

    def _new_session(self, principal: Principal) -> Session:
        self.sessions.append(principal)
        return cast("Session", None)

    def _no_service(self, namespace: str, name: str) -> Any:
        raise ServiceNotFoundError(f"{namespace}/{name}")

    async def _handle(self, exchange: Exchange) -> None:
        self.handled.append(exchange.path)
        await exchange.respond_message({})

    async def _break(self, exchange: Exchange) -> None:
        raise ValueError("on purpose")

    async def _cut(self, exchange: Exchange) -> None:
        await exchange.pass_on({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("on purpose")

    async def _leave(self, exchange: Exchange) -> None:
        raise ClientGoneError


def test_health_is_for_everybody_and_all_else_for_who_is_known() -> None:
    controller = Controller()
    assert controller.ask(routes.HEALTH)[0] == 200
    assert controller.ask("/v1/users")[0] == 401
    assert controller.ask("/v1/nothing")[0] == 401
    assert (controller.admitted, controller.requests_of_users) == (0, 0)
    assert controller.ask("/v1/users", USER)[0] == 200
    assert controller.ask("/v1/nothing", USER)[0] == 404
    assert (controller.admitted, controller.requests_of_users) == (2, 2)


def test_a_pod_has_the_routes_for_pods_alone() -> None:
    controller = Controller()
    assert controller.ask("/v1/pods", OF_POD)[0] == 200
    assert controller.ask("/v1/users", OF_POD)[0] == 401
    assert controller.ask("/v1/rights", OF_POD)[0] == 401
    assert controller.handled == ["/v1/pods"]
    assert (controller.admitted, controller.requests_of_users) == (3, 0)


@pytest.mark.parametrize("path", ["/health", "/v1/users", "/ns/f/v1/logs"])
def test_a_page_of_another_site_is_refused_whatever_it_brings(path: str) -> None:
    controller = Controller()
    for headers in ({"origin": "https://evil.example"}, {"host": "evil.example"}):
        status, answer = controller.ask(path, USER, **headers)
        assert (status, answer["error_type"]) == (403, "ForeignOriginError")
    assert controller.handled == []


def test_what_is_for_an_app_is_its_agents_to_refuse() -> None:
    answer = Controller().ask("/ns/f/http/page", USER, origin="https://evil.example")
    assert (answer[0], answer[1]["error_type"]) == (401, "UnauthorizedError")


def test_a_session_has_to_pass_the_same_checks() -> None:
    controller = Controller()
    assert controller.accept(routes.SESSIONS, "wrong") == 401
    assert controller.accept("/v1/other", OF_POD) == 404
    assert controller.accept(routes.SESSIONS, OF_POD, origin="https://evil.example") == 403
    assert controller.sessions == []
    assert controller.accept(routes.SESSIONS, OF_POD) == 101
    assert controller.sessions == [POD]


def test_a_fault_is_answered_unless_the_answer_has_begun_or_nobody_waits() -> None:
    controller = Controller()
    assert controller.ask("/v1/broken", USER)[0] == 500
    assert controller.ask("/v1/cut", USER) == (200, {})
    assert controller.ask("/v1/gone", USER)[0] == 0
