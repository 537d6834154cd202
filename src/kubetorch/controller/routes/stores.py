"""Routes about secrets and volumes: for users alone; only one route has the values of a secret."""

from __future__ import annotations

from msgspec.structs import replace

from kubetorch.controller.backends.base import SecretStore, VolumeStore
from kubetorch.controller.routes.table import Exchange, Permission, Route, Scope
from kubetorch.controller.tuning import TIMING
from kubetorch.controller.workloads import Workloads
from kubetorch.errors import SecretNotFound, VolumeInUseError, VolumeNotFoundError
from kubetorch.specs import names, secret, volume
from kubetorch.specs.volume import VolumeSpec
from kubetorch.wire import routes
from kubetorch.wire.secrets import PutSecret, SecretValues


def _needs(stores: str, *verbs: str, scope: Scope = "path") -> tuple[Permission, ...]:
    return tuple(Permission(verb, stores, scope) for verb in verbs)


class SecretRoutes:
    def __init__(self, secrets: SecretStore, workloads: Workloads) -> None:
        self._secrets = secrets
        self._workloads = workloads

    def routes(self) -> list[Route]:
        secret_path = f"{routes.SECRETS}/{{namespace}}/{{name}}"
        put, get = _needs("secrets", "create", "update"), _needs("secrets", "get")
        return [
            Route("GET", routes.SECRETS, self.list, _needs("secrets", "list", scope="all")),
            Route("GET", f"{routes.SECRETS}/{{namespace}}", self.list, _needs("secrets", "list")),
            # Without its values a secret shows no more than the list.
            Route("GET", secret_path, self.get, _needs("secrets", "list")),
            Route("POST", secret_path, self.put, put, is_audited=True),
            Route("DELETE", secret_path, self.delete, _needs("secrets", "delete"), is_audited=True),
            Route("GET", f"{secret_path}/values", self.values, get, is_audited=True),
        ]

    async def list(self, exchange: Exchange, namespace: str | None = None) -> None:
        """The secrets of a namespace, or of all."""
        if namespace is not None:
            names.check_namespace(namespace)
        secrets = await self._secrets.list(namespace)
        users = self._workloads.users_of_secrets(namespace)
        complete = [
            replace(view, used_by=users.get((view.namespace, view.object_name), ()))
            for view in secrets
        ]
        await exchange.respond_message(complete)

    async def get(self, exchange: Exchange, namespace: str, name: str) -> None:
        """A secret without its values; `null` if there is none of that name."""
        _check_secret(namespace, name)
        secret_view = await self._secrets.get(namespace, name)
        await exchange.respond_message(secret_view)

    async def put(self, exchange: Exchange, namespace: str, name: str) -> None:
        """Store values."""
        _check_secret(namespace, name)
        put = await exchange.message(PutSecret)
        secret.check_name(put.draft.name)
        for key in put.values:
            secret.check_key(key)
        await exchange.respond_message(await self._secrets.put(namespace, name, put))

    async def delete(self, exchange: Exchange, namespace: str, name: str) -> None:
        """Delete a secret; pods that see it go on seeing it."""
        _check_secret(namespace, name)
        if not await self._secrets.delete(namespace, name):
            raise SecretNotFound(name, namespace)
        await exchange.respond_message({"deleted": name})

    async def values(self, exchange: Exchange, namespace: str, name: str) -> None:
        """The values of a secret."""
        _check_secret(namespace, name)
        values = await self._secrets.values(namespace, name)
        await exchange.respond_message(SecretValues(values=values))


def _check_secret(namespace: str, name: str) -> None:
    names.check_namespace(namespace)
    secret.check_object_name(name)


class VolumeRoutes:
    def __init__(self, volumes: VolumeStore, workloads: Workloads) -> None:
        self._volumes = volumes
        self._workloads = workloads

    def routes(self) -> list[Route]:
        volumes_path = f"{routes.VOLUMES}/{{namespace}}"
        volume_path = f"{volumes_path}/{{claim}}"
        return [
            Route("GET", routes.VOLUMES, self.list, _needs("volumes", "list", scope="all")),
            Route("GET", volumes_path, self.list, _needs("volumes", "list")),
            Route("POST", volumes_path, self.create, _needs("volumes", "create"), is_audited=True),
            Route("GET", volume_path, self.get, _needs("volumes", "get")),
            Route("DELETE", volume_path, self.delete, _needs("volumes", "delete"), is_audited=True),
            Route(
                "GET",
                routes.STORAGE_CLASS,
                self.storage_class,
                _needs("volumes", "create", scope="query"),
            ),
        ]

    async def list(self, exchange: Exchange, namespace: str | None = None) -> None:
        """The volumes of a namespace, or of all."""
        if namespace is not None:
            names.check_namespace(namespace)
        volumes = await self._volumes.list(namespace)
        users = self._workloads.users_of_volumes(namespace)
        complete = [
            replace(view, used_by=users.get((view.namespace, view.claim), ())) for view in volumes
        ]
        await exchange.respond_message(complete)

    async def create(self, exchange: Exchange, namespace: str) -> None:
        """Make a volume; one that exists stays as it is."""
        names.check_namespace(namespace)
        spec = await exchange.message(VolumeSpec)
        volume.check(spec)
        await exchange.respond_message(await self._volumes.create(namespace, spec))

    async def get(self, exchange: Exchange, namespace: str, claim: str) -> None:
        """A volume; `null` if there is none of that name."""
        _check_volume(namespace, claim)
        volume_view = await self._volumes.get(namespace, claim)
        await exchange.respond_message(volume_view)

    async def delete(self, exchange: Exchange, namespace: str, claim: str) -> None:
        """Delete a volume and what is in it; `?wait=` is how long to wait until it is gone.

        One that is mounted is deleted with `?force=true` only.
        """
        _check_volume(namespace, claim)
        wait = exchange.number(
            "wait",
            TIMING.volume_deletion_seconds,
            least=0.0,
            most=TIMING.volume_deletion_longest_seconds,
        )
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
                hint=f"kt teardown {users[0]} -n {namespace}; {volume.FORCE}",
            )
        is_gone = await self._volumes.delete(namespace, claim, wait=wait, is_forced=is_forced)
        await exchange.respond_message({"gone": is_gone})

    async def storage_class(self, exchange: Exchange) -> None:
        """The class and access mode of a new volume; `?access_mode=` and its like are given."""
        spec = VolumeSpec(
            "volume",
            "/volume",
            storage_class=exchange.parameter("storage_class"),
            access_mode=volume.access_mode(exchange.parameter("access_mode")),
            volume_name=exchange.parameter("volume_name"),
        )
        if spec.volume_name is not None:
            volume.check_claim(spec.volume_name, parameter="volume_name")
        await exchange.respond_message(await self._volumes.storage_class(spec))


def _check_volume(namespace: str, claim: str) -> None:
    names.check_namespace(namespace)
    volume.check_claim(claim, parameter="the volume's name")
