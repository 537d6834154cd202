"""Routes about the controller itself: health, status, metrics for Prometheus, OpenAPI."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from kubetorch._version import __version__
from kubetorch.controller.routes.table import Exchange, Permission, Route
from kubetorch.controller.workloads import Workloads
from kubetorch.wire import blobs, routes, versions
from kubetorch.wire.messages import TERMINATING, StatusView, WorkloadView

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: All statuses of workloads, so that the figures that are 0 are in the metrics too.
_STATUSES = (
    "Ready",
    "Creating",
    "Scaling",
    "Failed",
    "Running",
    "Succeeded",
    "No pods",
    TERMINATING,
)
_STATUS = (Permission("get", "status", "query"),)
_METRICS = (Permission("get", "status", "all"),)
_PARAMETER = re.compile(r"\{(\w+)\}")
_TOKEN = "token"
#: What the bodies of routes are, where they are no JSON object.
_BODIES = {"/deploy": blobs.CONTENT_TYPE, "/blobs": blobs.CONTENT_TYPE}


def metrics_text(views: Iterable[WorkloadView], *, started: float, sent_bytes: int = 0) -> str:
    all_views = list(views)
    statuses = Counter(dict.fromkeys(_STATUSES, 0))
    statuses.update(view.status for view in all_views)
    pods = [pod for view in all_views for pod in view.pods]
    lines = [
        *_metric("build_info", "Version of the controller.", {f'version="{__version__}"': 1}),
        *_metric("start_time_seconds", "When the controller began to lead.", {"": started}),
        *_metric(
            "workloads",
            "Services by their status.",
            {f'status="{status}"': count for status, count in statuses.items()},
        ),
        *_metric("pods", "Pods of services.", {"": len(pods)}),
        *_metric("pods_ready", "Pods that serve calls.", {"": sum(pod.is_ready for pod in pods)}),
        *_metric(
            "data_sent_bytes",
            "Bytes of keys that this controller has sent to getters; pods send the others.",
            {"": sent_bytes},
        ),
    ]
    return "\n".join(lines) + "\n"


def _metric(name: str, meaning: str, values: dict[str, float]) -> Iterator[str]:
    full = f"kubetorch_controller_{name}"
    yield f"# HELP {full} {meaning}"
    yield f"# TYPE {full} gauge"
    for labels, value in values.items():
        yield f"{full}{{{labels}}} {value}" if labels else f"{full} {value}"


class _Stop(msgspec.Struct, frozen=True):
    pods: bool = True


class ServiceRoutes:
    def __init__(
        self,
        workloads: Workloads,
        *,
        backend: str,
        started: float,
        sent_bytes: Callable[[], Awaitable[int]],
        stop: Callable[[bool], None] | None,
    ) -> None:
        self._workloads = workloads
        self._backend = backend
        self._started = started
        self._sent_bytes = sent_bytes
        self._stop = stop
        #: What `GET /json` describes.
        self.described: Iterable[Route] = ()

    def routes(self) -> list[Route]:
        return [
            Route("GET", routes.HEALTH, self.health, audience="anybody"),
            Route("GET", routes.STATUS, self.status, _STATUS),
            Route("GET", routes.METRICS, self.metrics, _METRICS),
            Route("GET", routes.OPENAPI, self.openapi),
            Route("POST", routes.STOP, self.stop, is_audited=True, is_local=True),
        ]

    async def health(self, exchange: Exchange) -> None:
        """Answer that the controller runs."""
        await exchange.respond_message(
            {"status": "healthy", "version": __version__, "protocol": versions.PROTOCOL}
        )

    async def status(self, exchange: Exchange) -> None:
        """Describe the controller."""
        view = StatusView(
            version=__version__,
            protocol=versions.PROTOCOL,
            pid=os.getpid(),
            started=self._started,
            workloads=len(self._workloads),
            backend=self._backend,
        )
        await exchange.respond_message(view)

    async def metrics(self, exchange: Exchange) -> None:
        """Figures for Prometheus, of all namespaces."""
        body = metrics_text(
            self._workloads.list(), started=self._started, sent_bytes=await self._sent_bytes()
        )
        await exchange.respond(body.encode(), content_type=CONTENT_TYPE)

    async def openapi(self, exchange: Exchange) -> None:
        """These routes, as an OpenAPI document."""
        await exchange.respond_message(openapi_document(self.described))

    async def stop(self, exchange: Exchange) -> None:
        """Stop it."""
        stop = await exchange.message(_Stop)
        await exchange.respond_message({"pods": stop.pods})
        if self._stop is not None:
            self._stop(stop.pods)


def openapi_document(routes: Iterable[Route]) -> dict[str, Any]:
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


def summary_of(route: Route) -> str:
    """The first line of the docstring of a handler."""
    first, _, _ = (route.handler.__doc__ or "").strip().partition("\n")
    return first.rstrip(".")


def needed(needs: Sequence[Permission]) -> list[str]:
    """The rights that a user needs, each as one phrase."""
    return [_phrase(need) for need in needs]


def _phrase(need: Permission) -> str:
    kind = f"kubetorchworkloads/{need.subresource}" if need.subresource else "kubetorchworkloads"
    where = {
        "path": "",
        "query": " in `?namespace=`, all namespaces without it",
        "all": " in all namespaces",
        "handler": f" {need.when}",
    }[need.scope]
    return f"{need.verb} {kind}{where}"


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}_{re.sub('[^a-z0-9]+', '_', route.path).strip('_')}",
        "summary": summary_of(route),
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
