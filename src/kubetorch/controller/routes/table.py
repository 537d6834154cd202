"""Which handler answers a method and path, and who may ask it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Literal
from urllib.parse import quote

import msgspec

from kubetorch.controller.access import Need
from kubetorch.controller.exchange import Exchange
from kubetorch.lib.asgi import refusal

#: Answers one request; the parameters are those of the path.
Handler = Callable[..., Awaitable[None]]
#: Who may ask: anybody, users, or users and the pods of workloads.
Audience = Literal["anybody", "user", "pods"]
#: Where the namespace of what is asked for comes from: the path, the query `namespace` (all of them
#: without it), no place at all (all of them), or what the handler finds, which then checks it.
Scope = Literal["path", "query", "all", "found"]
# Parameters of paths that name an object.
_NAMES = ("name", "claim")


class Permission(msgspec.Struct, frozen=True):
    """What a user needs for a route, in the words of RBAC on `kubetorchworkloads`.

    Attributes:
        verb: The verb.
        subresource: The part of the workload, such as `logs`.
        scope: Where the namespace comes from.
        when: In which case it is needed, for those that a handler checks.
    """

    verb: str
    subresource: str = ""
    scope: Scope = "path"
    when: str = ""

    def need(self, exchange: Exchange, parameters: Mapping[str, str]) -> Need:
        """What one request needs."""
        namespace = ""
        if self.scope == "path":
            namespace = parameters["namespace"]
        elif self.scope == "query":
            namespace = exchange.query("namespace")
        name = next((parameters[key] for key in _NAMES if key in parameters), "")
        return self.of(namespace, name)

    def of(self, namespace: str, name: str) -> Need:
        """What it is for one object; in all namespaces if none is given."""
        return Need(self.verb, namespace, name, self.subresource)


class Route(msgspec.Struct, frozen=True):
    """One route.

    Attributes:
        method: `GET`, `POST` or `DELETE`.
        path: Path with parameters in braces, such as `/v1/calls/{call_id}`.
        handler: Answers it.
        needs: What a user needs, all of it. None means that every user may.
        audience: Who may ask.
        is_audited: Whether it changes something, or shows a secret.
        is_local: Whether only the service of one user has it.
    """

    method: str
    path: str
    handler: Handler
    needs: tuple[Permission, ...] = ()
    audience: Audience = "user"
    is_audited: bool = False
    is_local: bool = False


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
        found = self.look(exchange)
        if found is not None:
            return found
        methods = [route.method for route, _ in self._at(exchange.path)]
        shown = quote(exchange.path[:200])
        if methods:
            raise refusal(405, f"{shown} answers {' and '.join(methods)}, not {exchange.method}")
        raise refusal(404, f"there is nothing at {shown}")

    def look(self, exchange: Exchange) -> tuple[Route, dict[str, str]] | None:
        """The same, or nothing."""
        at_path = self._at(exchange.path)
        return next((found for found in at_path if found[0].method == exchange.method), None)

    def _at(self, path: str) -> Iterator[tuple[Route, dict[str, str]]]:
        """The routes of all methods for a path."""
        given = path.split("/")
        for parts, route in self._by_length.get(len(given), ()):
            parameters = _match(parts, given)
            if parameters is not None:
                yield route, parameters


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
