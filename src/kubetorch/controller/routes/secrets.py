"""Routes about secrets: for the user alone, and values only where they are asked for."""

from __future__ import annotations

from msgspec.structs import replace

from kubetorch.controller.backends.base import SecretStore
from kubetorch.controller.routes.table import Exchange, Permission, Route, Scope
from kubetorch.controller.workloads import Workloads
from kubetorch.errors import SecretNotFound
from kubetorch.specs import names
from kubetorch.specs import secret as specs
from kubetorch.wire import routes
from kubetorch.wire.secrets import PutSecret, SecretValues


def _needs(*verbs: str, scope: Scope = "path") -> tuple[Permission, ...]:
    return tuple(Permission(verb, "secrets", scope) for verb in verbs)


class SecretRoutes:
    def __init__(self, secrets: SecretStore, workloads: Workloads) -> None:
        self._secrets = secrets
        self._workloads = workloads

    def routes(self) -> list[Route]:
        one = f"{routes.SECRETS}/{{namespace}}/{{name}}"
        return [
            Route("GET", routes.SECRETS, self.list, _needs("list", scope="all")),
            Route("GET", f"{routes.SECRETS}/{{namespace}}", self.list, _needs("list")),
            # What has no values is as much as a list shows.
            Route("GET", one, self.get, _needs("list")),
            Route("POST", one, self.put, _needs("create", "update"), is_audited=True),
            Route("DELETE", one, self.delete, _needs("delete"), is_audited=True),
            Route("GET", f"{one}/values", self.values, _needs("get"), is_audited=True),
        ]

    async def list(self, exchange: Exchange, namespace: str | None = None) -> None:
        """The secrets of a namespace, or of all."""
        if namespace is not None:
            names.check_namespace(namespace)
        found = await self._secrets.list(namespace)
        users = self._workloads.users_of_secrets(namespace)
        complete = [
            replace(view, used_by=users.get((view.namespace, view.object_name), ()))
            for view in found
        ]
        await exchange.respond_message(complete)

    async def get(self, exchange: Exchange, namespace: str, name: str) -> None:
        """A secret without its values; `null` if there is none of that name."""
        _check(namespace, name)
        found = await self._secrets.get(namespace, name)
        await exchange.respond_message(found)

    async def put(self, exchange: Exchange, namespace: str, name: str) -> None:
        """Store values."""
        _check(namespace, name)
        put = await exchange.message(PutSecret)
        specs.check_name(put.draft.name)
        for key in put.values:
            specs.check_key(key)
        await exchange.respond_message(await self._secrets.put(namespace, name, put))

    async def delete(self, exchange: Exchange, namespace: str, name: str) -> None:
        """Delete a secret; pods that see it go on seeing it."""
        _check(namespace, name)
        if not await self._secrets.delete(namespace, name):
            raise SecretNotFound(name, namespace)
        await exchange.respond_message({"deleted": name})

    async def values(self, exchange: Exchange, namespace: str, name: str) -> None:
        """The values of a secret."""
        _check(namespace, name)
        values = await self._secrets.values(namespace, name)
        await exchange.respond_message(SecretValues(values=values))


def _check(namespace: str, name: str) -> None:
    names.check_namespace(namespace)
    specs.check_object_name(name)
