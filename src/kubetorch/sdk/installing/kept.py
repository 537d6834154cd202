"""What users keep in a cluster: volumes and secrets, which an uninstall leaves by default."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import Object, Resource
from kubetorch.manifests import labels
from kubetorch.sdk.installing.releases import Item
from kubetorch.sdk.installing.scope import Scope

_CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
_SECRETS = Resource("", "v1", "secrets", "Secret")


@dataclass(frozen=True)
class Kept:
    """The users' own.

    Attributes:
        volumes: Those that `kt.Volume` made.
        secrets: Those that `kt.Secret` made.
    """

    volumes: tuple[Item, ...] = ()
    secrets: tuple[Item, ...] = ()


async def find(client: Client, scope: Scope) -> Kept:
    """The volumes and secrets that Kubetorch made for users.

    Args:
        client: Asks the server.
        scope: Where.
    """
    volumes, secrets = await asyncio.gather(
        scope.list(client, _CLAIMS, labels.VOLUME), scope.list(client, _SECRETS, labels.SECRET_NAME)
    )
    return Kept(_items(volumes), _items(secrets))


def _items(found: list[Object]) -> tuple[Item, ...]:
    return tuple(sorted(map(Item.of, found)))
