"""One HTTP request to the controller with its answer, the routes, and the rights they need."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Literal, TypeVar
from urllib.parse import quote

import msgspec

from kubetorch.controller.access import Asker, Need
from kubetorch.controller.tuning import LIMITS
from kubetorch.errors import ControllerError, ProtocolError
from kubetorch.lib import asgi
from kubetorch.lib.asgi import JSON, Message, Receive, Request, Responder, Send, refusal
from kubetorch.wire import messages, routes

_T = TypeVar("_T")


class Exchange(Request):
    """A request, and the means to answer it."""

    def __init__(self, scope: asgi.Scope, receive: Receive, send: Send) -> None:
        super().__init__(scope, receive)
        sent_id = self.headers.get(routes.REQUEST_ID.lower(), "")
        # Long enough to be unique in the audit log of a cluster for years.
        self.request_id = asgi.request_id(sent_id, size=16)
        self._responder = Responder(send, {routes.REQUEST_ID.lower(): self.request_id})
        self._send = send
        self._asker: Asker | None = None
        #: Whether what is asked for may have begun; a request for a pod has not before it is there.
        self.has_started = True

    @property
    def asker(self) -> Asker:
        if self._asker is None:
            raise ControllerError(f"{self.method} {self.path} was let in by nobody")
        return self._asker

    @asker.setter
    def asker(self, asker: Asker) -> None:
        self._asker = asker

    def flag(self, name: str) -> bool:
        """A parameter that is `true` or `false`; a missing one is false."""
        value = self.query(name, "false").lower()
        if value not in ("true", "false", "1", "0"):
            raise ProtocolError(f"{name} is {value!r}; it must be true or false")
        return value in ("true", "1")

    def number(self, name: str, default: float, *, least: float, most: float) -> float:
        """A parameter that is a number within bounds."""
        text = self.query(name)
        try:
            value = float(text) if text else default
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            raise ProtocolError(f"{name} is {text!r}; it must be a number from {least} to {most}")
        return value

    async def message(self, kind: type[_T]) -> _T:
        """The body as a message of this type; an empty one is `{}`."""
        return messages.decode(kind, await self.body(LIMITS.request_body_bytes) or b"{}")

    @property
    def has_begun(self) -> bool:
        return self._responder.has_begun

    async def pass_on(self, message: Message) -> None:
        """Send a part of the answer of another server."""
        self._responder.has_begun = True
        if message["type"] == "http.response.start" and self._responder.on_status is not None:
            self._responder.on_status(message["status"])
        await self._send(message)

    def on_status(self, callback: Callable[[int], None]) -> None:
        """Call back with the status of the answer before the answer is sent."""
        self._responder.on_status = callback

    async def respond(
        self, body: bytes, *, status: int = 200, content_type: str = JSON, **headers: str
    ) -> None:
        await self._responder.answer(status, body, content_type, **headers)

    async def respond_message(self, message: object) -> None:
        await self.respond(messages.encode(message))

    async def respond_stream(self, chunks: AsyncIterator[bytes], *, content_type: str) -> None:
        """Answer with chunks as they come; they are closed when the client disconnects."""
        await self._responder.stream(chunks, content_type, self.disconnected())

    async def refuse(self, status: int, failure: bytes) -> None:
        """Answer with the one envelope that all errors have."""
        await self._responder.refuse(status, failure)


#: Answers one request; the parameters are those of the path.
Handler = Callable[..., Awaitable[None]]
#: Who may ask: anybody, users, or users and the pods of workloads.
Audience = Literal["anybody", "user", "pods"]
#: Where the namespace of a right comes from: the path; the query `namespace`, or without it all
#: namespaces; always all namespaces; or the handler, which finds the object and checks the right.
Scope = Literal["path", "query", "all", "handler"]
# Parameters of paths that name an object.
_NAMES = ("name", "claim")


class Permission(msgspec.Struct, frozen=True):
    """A right that a route needs, in the words of RBAC on `kubetorchworkloads`."""

    verb: str
    subresource: str = ""
    scope: Scope = "path"
    when: str = ""

    def need(self, exchange: Exchange, parameters: Mapping[str, str]) -> Need:
        namespace = ""
        if self.scope == "path":
            namespace = parameters["namespace"]
        elif self.scope == "query":
            namespace = exchange.query("namespace")
        name = next((parameters[key] for key in _NAMES if key in parameters), "")
        return self.of(namespace, name)

    def of(self, namespace: str, name: str) -> Need:
        """The right on one object; in all namespaces if none is given."""
        return Need(self.verb, namespace, name, self.subresource)


class Route(msgspec.Struct, frozen=True):
    method: str
    path: str
    handler: Handler
    needs: tuple[Permission, ...] = ()
    audience: Audience = "user"
    is_audited: bool = False
    is_local: bool = False


class Table:
    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._by_length: dict[int, list[tuple[list[str], Route]]] = {}
        for route in self.routes:
            parts = route.path.split("/")
            self._by_length.setdefault(len(parts), []).append((parts, route))

    def find(self, exchange: Exchange) -> tuple[Route, dict[str, str]]:
        """The route for a request, and the parameters in its path."""
        match = self.match(exchange)
        if match is not None:
            return match
        methods = [route.method for route, _ in self._routes_of_path(exchange.path)]
        shown = quote(exchange.path[:200])
        if methods:
            raise refusal(405, f"{shown} answers {' and '.join(methods)}, not {exchange.method}")
        raise refusal(404, f"there is nothing at {shown}")

    def match(self, exchange: Exchange) -> tuple[Route, dict[str, str]] | None:
        """As `find`; `None` without a route."""
        at_path = self._routes_of_path(exchange.path)
        return next((match for match in at_path if match[0].method == exchange.method), None)

    def _routes_of_path(self, path: str) -> Iterator[tuple[Route, dict[str, str]]]:
        """The routes of all methods for a path."""
        path_parts = path.split("/")
        for pattern_parts, route in self._by_length.get(len(path_parts), ()):
            parameters = _path_parameters(pattern_parts, path_parts)
            if parameters is not None:
                yield route, parameters


def _path_parameters(pattern_parts: list[str], path_parts: list[str]) -> dict[str, str] | None:
    parameters = {}
    for pattern_part, value in zip(pattern_parts, path_parts, strict=True):
        if pattern_part.startswith("{"):
            if not value:
                return None
            parameters[pattern_part[1:-1]] = value
        elif pattern_part != value:
            return None
    return parameters
