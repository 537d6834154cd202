"""Routes about volumes, for the user alone."""

from __future__ import annotations

from msgspec.structs import replace

from kubetorch.controller.backends.base import VolumeStore
from kubetorch.controller.routes.table import Exchange, Permission, Route, Scope
from kubetorch.controller.workloads import Workloads
from kubetorch.errors import VolumeInUseError, VolumeNotFoundError
from kubetorch.specs import names
from kubetorch.specs import volume as specs
from kubetorch.specs.volume import VolumeSpec
from kubetorch.wire import routes
from kubetorch.wire.volumes import StorageClass

#: Seconds that a delete may wait until a volume is gone, and those when nothing is said.
WAIT_MOST = 600.0
WAIT = 60.0


def _needs(verb: str, scope: Scope = "path") -> tuple[Permission, ...]:
    return (Permission(verb, "volumes", scope),)


class VolumeRoutes:
    def __init__(self, volumes: VolumeStore, workloads: Workloads) -> None:
        self._volumes = volumes
        self._workloads = workloads

    def routes(self) -> list[Route]:
        some = f"{routes.VOLUMES}/{{namespace}}"
        one = f"{some}/{{claim}}"
        return [
            Route("GET", routes.VOLUMES, self.list, _needs("list", "all")),
            Route("GET", some, self.list, _needs("list")),
            Route("POST", some, self.create, _needs("create"), is_audited=True),
            Route("GET", one, self.get, _needs("get")),
            Route("DELETE", one, self.delete, _needs("delete"), is_audited=True),
            Route("GET", routes.STORAGE_CLASS, self.storage_class, _needs("create", "query")),
        ]

    async def list(self, exchange: Exchange, namespace: str | None = None) -> None:
        """The volumes of a namespace, or of all."""
        if namespace is not None:
            names.check_namespace(namespace)
        found = await self._volumes.list(namespace)
        users = self._workloads.users_of_volumes(namespace)
        complete = [
            replace(view, used_by=users.get((view.namespace, view.claim), ())) for view in found
        ]
        await exchange.respond_message(complete)

    async def create(self, exchange: Exchange, namespace: str) -> None:
        """Make a volume; one that exists stays as it is."""
        names.check_namespace(namespace)
        spec = await exchange.message(VolumeSpec)
        specs.check(spec)
        await exchange.respond_message(await self._volumes.create(namespace, spec))

    async def get(self, exchange: Exchange, namespace: str, claim: str) -> None:
        """A volume; `null` if there is none of that name."""
        _check(namespace, claim)
        found = await self._volumes.get(namespace, claim)
        await exchange.respond_message(found)

    async def delete(self, exchange: Exchange, namespace: str, claim: str) -> None:
        """Delete a volume and what is in it; `?wait=` is how long to wait until it is gone.

        One that is mounted is deleted with `?force=true` only.
        """
        _check(namespace, claim)
        wait = exchange.number("wait", WAIT, least=0.0, most=WAIT_MOST)
        if await self._volumes.get(namespace, claim) is None:
            raise VolumeNotFoundError(
                f"Volume {claim!r} does not exist in namespace {namespace!r}",
                hint=f"kt volumes -n {namespace} lists the volumes",
            )
        users = self._workloads.users_of_volumes(namespace).get((namespace, claim))
        is_forced = exchange.flag("force")
        if users and not is_forced:
            raise VolumeInUseError(
                f"the volume {claim!r} is mounted by {', '.join(users)}",
                services=users,
                hint=f"kt teardown {users[0]} -n {namespace}; {specs.FORCE}",
            )
        gone = await self._volumes.delete(namespace, claim, wait=wait, is_forced=is_forced)
        await exchange.respond_message({"gone": gone})

    async def storage_class(self, exchange: Exchange) -> None:
        """The class of a volume for which nobody names one; `?access_mode=` is its access mode."""
        mode = specs.access_mode(exchange.query("access_mode"))
        found = await self._volumes.storage_class(mode)
        await exchange.respond_message(StorageClass(found))


def _check(namespace: str, claim: str) -> None:
    names.check_namespace(namespace)
    specs.check_claim(claim, parameter="the volume's name")
