"""Which routes an agent has, and what a token must open for each of them."""

from __future__ import annotations

from typing import NamedTuple

from kubetorch.wire import routes, tokens


class Route(NamedTuple):
    """One route."""

    method: str
    path: str
    opens: tuple[str, ...]
    about: str
    is_open: bool = False


_CALL = (tokens.CALL,)
_EXEC = (tokens.EXEC,)

TABLE = (
    Route("GET", "/", (), "whether it answers", is_open=True),
    Route("GET", routes.HEALTH, (), "whether it answers", is_open=True),
    Route("GET", routes.SERVING, (), "whether it serves, for probes", is_open=True),
    Route("GET", routes.READY, (), "which generation it serves"),
    Route("GET", routes.METRICS, (), "figures for Prometheus"),
    Route("GET", routes.OPENAPI, (), "what can be called"),
    Route("GET", routes.DOCS, (), "the same as a page"),
    Route("GET", routes.APP_STATUS, (), "whether its app runs"),
    Route("GET", routes.LOGS, (tokens.LOGS, tokens.CALL), "its log"),
    Route("GET", routes.STACKS, (tokens.LOGS, tokens.CALL), "what its workers do"),
    Route("POST", "/{callable}", _CALL, "a call"),
    Route("POST", "/{callable}/{method}", _CALL, "a call of a method"),
    Route("POST", routes.RUN, _EXEC, "a command in the pod"),
    Route("WebSocket", routes.STREAM, _CALL, "calls"),
    Route("WebSocket", routes.SHELL, _EXEC, "a shell in the pod"),
    Route("any", f"{routes.APP}/{{path}}", _CALL, "its app; with `public=True` without a token"),
)

_ROUTES = {(route.method, route.path): route for route in TABLE}


def required_verbs(method: str, path: str) -> tuple[str, ...] | None:
    """What a token must open for a request, one of these; `None` if the request needs no token.

    What a path is open for is reading it: a callable may have the same name.
    """
    if path == routes.RUN:  # whatever the method, as nobody else has any business there
        return _EXEC
    route = _ROUTES.get(("GET" if method == "HEAD" else method, path))
    if route is None:
        return _CALL if method == "POST" else ()
    return None if route.is_open else route.opens
