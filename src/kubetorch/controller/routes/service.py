"""Routes about the controller itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import msgspec

from kubetorch._version import __version__
from kubetorch.controller import figures
from kubetorch.controller.exchange import Exchange
from kubetorch.controller.routes.table import Permission, Route
from kubetorch.controller.workloads import Workloads
from kubetorch.wire import routes, versions
from kubetorch.wire.messages import StatusView

_STATUS = (Permission("get", "status", "query"),)
_METRICS = (Permission("get", "status", "all"),)


class _Stop(msgspec.Struct, frozen=True):
    """Body of a stop.

    Attributes:
        pods: Whether the pods stop too; the next start brings them back.
    """

    pods: bool = True


class ServiceRoutes:
    """Handlers.

    Args:
        workloads: What is deployed.
        backend: Name of the backend.
        started: Seconds since the epoch.
        stop: Stops the service once the answer is sent; told whether the pods stop too.
    """

    def __init__(
        self,
        workloads: Workloads,
        *,
        backend: str,
        started: float,
        stop: Callable[[bool], None] | None,
    ) -> None:
        self._workloads = workloads
        self._backend = backend
        self._started = started
        self._stop = stop
        #: What `GET /openapi.json` describes.
        self.described: Iterable[Route] = ()

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("GET", routes.HEALTH, self.health, audience="anybody"),
            Route("GET", routes.STATUS, self.status, _STATUS),
            Route("GET", routes.METRICS, self.metrics, _METRICS),
            Route("GET", routes.OPENAPI, self.openapi),
            Route("POST", routes.STOP, self.stop, is_audited=True, is_local=True),
        ]

    async def health(self, exchange: Exchange) -> None:
        """Whether it answers."""
        await exchange.respond_message(
            {"status": "healthy", "version": __version__, "protocol": versions.PROTOCOL}
        )

    async def status(self, exchange: Exchange) -> None:
        """What it is."""
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
        text = figures.text(self._workloads.list(), started=self._started)
        await exchange.respond(text.encode(), content_type=figures.CONTENT_TYPE)

    async def openapi(self, exchange: Exchange) -> None:
        """These routes, as an OpenAPI document."""
        from kubetorch.controller.routes import openapi  # noqa: PLC0415  # rarely needed

        await exchange.respond_message(openapi.document(self.described))

    async def stop(self, exchange: Exchange) -> None:
        """Stop it."""
        stop = await exchange.message(_Stop)
        await exchange.respond_message({"pods": stop.pods})
        if self._stop is not None:
            self._stop(stop.pods)
