"""The controller's routes as an OpenAPI document: pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from kubetorch._version import __version__
from kubetorch.controller.routes.table import Permission, Route
from kubetorch.wire import blobs

_PARAMETER = re.compile(r"\{(\w+)\}")
_TOKEN = "token"
#: What the bodies of routes are, where they are no JSON object.
_BODIES = {
    "/deploy": blobs.CONTENT_TYPE,
    "/blobs": blobs.CONTENT_TYPE,
}


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """The document.

    Args:
        routes: The routes.
    """
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    scheme = {
        "type": "http",
        "scheme": "bearer",
        "description": "In a cluster a token of Kubernetes, else the user's own.",
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Kubetorch controller", "version": __version__},
        "paths": paths,
        "components": {"securitySchemes": {_TOKEN: scheme}},
    }


def about(route: Route) -> str:
    """What a route does, as its handler says."""
    first, _, _ = (route.handler.__doc__ or "").strip().partition("\n")
    return first.rstrip(".")


def needed(needs: Sequence[Permission]) -> list[str]:
    """What a user needs, each as one phrase."""
    return [_phrase(need) for need in needs]


def _phrase(need: Permission) -> str:
    kind = f"kubetorchworkloads/{need.subresource}" if need.subresource else "kubetorchworkloads"
    where = {
        "path": "",
        "query": " in `?namespace=`, all namespaces without it",
        "all": " in all namespaces",
        "found": f" {need.when}",
    }[need.scope]
    return f"{need.verb} {kind}{where}"


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}_{re.sub('[^a-z0-9]+', '_', route.path).strip('_')}",
        "summary": about(route),
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in _PARAMETER.findall(route.path)
        ],
        "responses": {
            "200": {"description": "The answer."},
            "4XX": {"description": "An error, as JSON with `error_type` and `message`."},
            "503": {"description": "Nobody can say now whether it is allowed."},
        },
    }
    if any(need.scope == "query" for need in route.needs):
        operation["parameters"].append(
            {"name": "namespace", "in": "query", "schema": {"type": "string"}}
        )
    if route.audience != "anybody":
        operation["security"] = [{_TOKEN: []}]
        operation["x-kubernetes-rbac"] = needed(route.needs)
    if route.method == "POST":
        ending = next((end for end in _BODIES if route.path.endswith(end)), "")
        kind = _BODIES.get(ending, "application/json")
        schema = {"type": "object"} if kind == "application/json" else {"type": "string"}
        operation["requestBody"] = {"content": {kind: {"schema": schema}}}
    return operation
