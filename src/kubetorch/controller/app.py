"""The controller's ASGI application: checks who asks, finds the handler, answers errors.

    request ──► Host and Origin ──► token ──► route ──► its needs ──► handler
                      │                │         │          │            │
                      └────────────────┴─── failure envelope ┴───────────┘

What is for a pod is passed on to its agent (`kubetorch.controller.relay`) before all that.

The sessions of agents are WebSockets, which `accept` takes; they pass the same checks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from kubetorch.controller.access import Access, Asker, Principal, User
from kubetorch.controller.audit import Audit
from kubetorch.controller.exchange import Exchange
from kubetorch.controller.relay import Relay
from kubetorch.controller.routes.table import Route, Table
from kubetorch.controller.sessions import Session
from kubetorch.errors import KubetorchError, UnauthorizedError
from kubetorch.lib.asgi import ClientGoneError, Receive, Scope, Send, refusal
from kubetorch.lib.connections import Endpoint, Refusal
from kubetorch.wire import failures, routes
from kubetorch.wire.failures import Failure

_log = logging.getLogger(__name__)


class App:
    """The application.

    Args:
        table: All routes.
        access: Checks who asks.
        relay: Passes on what is for pods.
        new_session: Makes the session of an agent that was let in.
        on_request: Called when a request of the user begins: the service is in use.
        audit: Writes down what changes something; nobody does without it.
    """

    def __init__(
        self,
        table: Table,
        access: Access,
        relay: Relay,
        *,
        new_session: Callable[[Principal], Session],
        on_request: Callable[[], None],
        audit: Audit | None = None,
    ) -> None:
        self.table = table
        self._access = access
        self._relay = relay
        self._new_session = new_session
        self._on_request = on_request
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        exchange = Exchange(scope, receive, send)
        try:
            if self._relay.takes(exchange.path):
                await self._pass_on(exchange, scope, receive, send)
                return
            route, parameters = await self._admit(exchange)
            await route.handler(exchange, **parameters)
        except ClientGoneError:
            return
        except KubetorchError as error:
            await self._refuse(exchange, error, _own(error))
        except Exception as error:  # noqa: BLE001  # one request must not end the server
            _log.exception("request failed method=%s path=%s", exchange.method, exchange.path)
            await self._refuse(exchange, error, failures.describe(error))

    async def accept(self, path: str, headers: Mapping[str, str]) -> Endpoint:
        """The session of an agent that asks for an upgrade.

        Raises:
            Refusal: It must not have one.
        """
        try:
            self._access.check_origin(headers)
            principal = await self._access.identify(headers)
            if path != routes.SESSIONS:
                raise refusal(404, "there is no WebSocket at this path")
        except KubetorchError as error:
            raise Refusal(failures.http_status(error), _own(error).to_json()) from error
        return self._new_session(principal)

    async def _pass_on(
        self, exchange: Exchange, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Pass a request on to a pod, whose agent decides about it."""
        if not self._relay.is_app(exchange.path):
            # Pages may use apps, on the terms of the agent.
            self._access.check_origin(exchange.headers)
        await self._relay.answer(exchange, scope, receive, send)

    async def _admit(self, exchange: Exchange) -> tuple[Route, dict[str, str]]:
        self._access.check_origin(exchange.headers)
        if (exchange.method, exchange.path) == ("GET", routes.HEALTH):
            return self.table.find(exchange)
        if self._audit is not None:
            self._observe(self._audit, exchange, None)
        principal = await self._access.identify(exchange.headers)
        if self._audit is not None:
            self._observe(self._audit, exchange, principal)
        if isinstance(principal, User):
            self._on_request()
        route, parameters = self.table.find(exchange)
        exchange.asker = asker = Asker(principal, self._access)
        if route.audience != "pods" or asker.pod_namespace is None:
            await self._check(route, exchange, parameters)
        return route, parameters

    def _observe(self, audit: Audit, exchange: Exchange, principal: Principal | None) -> None:
        """Have a line written about a request when it is answered, also when it is refused."""
        found = self.table.look(exchange)
        if found is not None and found[0].is_audited:
            exchange.on_status(lambda status: audit.write(exchange, *found, principal, status))

    async def _check(self, route: Route, exchange: Exchange, parameters: dict[str, str]) -> None:
        """Refuse a user who must not ask this, and pods."""
        if not isinstance(exchange.asker.principal, User):
            raise UnauthorizedError(
                "the token of a pod is not for this", hint="use the user's token"
            )
        for permission in route.needs:
            if permission.scope != "found":
                await exchange.asker.require(permission.need(exchange, parameters))

    async def _refuse(self, exchange: Exchange, error: Exception, failure: Failure) -> None:
        if exchange.has_begun:
            # The status is sent: the missing end of the body says that something went wrong.
            raise error
        await exchange.refuse(failures.http_status(error), failure.to_json())


def _own(error: KubetorchError) -> Failure:
    """An error of ours; where in our own code it was raised is of no use to the caller."""
    return replace(failures.describe(error), traceback=error.remote_traceback or "")
