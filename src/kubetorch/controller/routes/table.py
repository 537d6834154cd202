"""Which handler answers a method and path, and who may ask it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Literal
from urllib.parse import quote

import msgspec

from kubetorch.controller.access import PodIdentity, Principal
from kubetorch.controller.exchange import Exchange, with_status
from kubetorch.errors import KubetorchError, ProtocolError, UnauthorizedError

#: Answers one request; the parameters are those of the path.
Handler = Callable[..., Awaitable[None]]
#: Who may ask: anybody, the user, or the user and pods.
Audience = Literal["anybody", "user", "pods"]


class Route(msgspec.Struct, frozen=True):
    """One route.

    Attributes:
        method: `GET`, `POST` or `DELETE`.
        path: Path with parameters in braces, such as `/v1/calls/{call_id}`.
        handler: Answers it.
        audience: Who may ask.
    """

    method: str
    path: str
    handler: Handler
    audience: Audience = "user"


class Table:
    """All routes.

    Args:
        routes: The routes.
    """

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._by_length: dict[int, list[tuple[list[str], Route]]] = {}
        for route in self.routes:
            parts = route.path.split("/")
            self._by_length.setdefault(len(parts), []).append((parts, route))

    def find(self, exchange: Exchange) -> tuple[Route, dict[str, str]]:
        """The route for a request, and the parameters in its path.

        Raises:
            ProtocolError: There is none, or none for this method.
        """
        given = exchange.path.split("/")
        methods = []
        for parts, route in self._by_length.get(len(given), ()):
            parameters = _match(parts, given)
            if parameters is not None and route.method == exchange.method:
                return route, parameters
            if parameters is not None:
                methods.append(route.method)
        shown = quote(exchange.path[:200])
        if methods:
            raise refusal(405, f"{shown} answers {' and '.join(methods)}, not {exchange.method}")
        raise refusal(404, f"there is nothing at {shown}")


def check_audience(route: Route, principal: Principal) -> None:
    """Refuse who must not ask.

    Raises:
        UnauthorizedError: A pod must not.
    """
    if isinstance(principal, PodIdentity) and route.audience == "user":
        raise UnauthorizedError("the token of a pod is not for this", hint="use the user's token")


def refusal(status: int, message: str) -> KubetorchError:
    """The error for a request that no handler is for."""
    return with_status(ProtocolError(message), status)


def _match(parts: list[str], given: list[str]) -> dict[str, str] | None:
    parameters = {}
    for part, value in zip(parts, given, strict=True):
        if part.startswith("{"):
            if not value:
                return None
            parameters[part[1:-1]] = value
        elif part != value:
            return None
    return parameters
