"""Secrets and volumes of pods in a cluster: whether they are there before pods wait for them.

Kubernetes itself would only keep such pods waiting. And what it puts into variables it puts there
once: so that pods see other values they have to be replaced, by a version in their template.
"""

from __future__ import annotations

import asyncio
import hashlib

from kubetorch.controller.backends.kubernetes.secrets import SecretObjects
from kubetorch.controller.backends.kubernetes.volumes import VolumeClaims
from kubetorch.controller.backends.stores import Stores
from kubetorch.errors import SecretNotFound, SpecError, VolumeNotFoundError
from kubetorch.manifests.attached import Attached
from kubetorch.wire.secrets import SecretView


class Attaching:
    """Looks at what pods are given.

    Args:
        secrets: The secrets of the cluster.
        volumes: Its volumes.
    """

    def __init__(self, secrets: SecretObjects, volumes: VolumeClaims) -> None:
        #: Where the controller keeps them.
        self.stores = Stores(secrets, volumes)
        self._secrets = secrets
        self._volumes = volumes

    async def check(self, namespace: str, attached: Attached) -> str:
        """Refuse what pods could not be given.

        Args:
            namespace: Namespace of the pods.
            attached: What their template names.

        Returns:
            What changes when pods have to be replaced to see other values; empty without secrets.

        Raises:
            SecretNotFound: A secret is not there.
            SpecError: A secret has no value of that name.
            VolumeNotFoundError: A volume is not there.
        """
        claims = list(dict.fromkeys(one.claim for one in attached.claims))
        found = await asyncio.gather(
            *(self._secrets.get(namespace, name) for name in attached.all_secrets)
        )
        views = dict(zip(attached.all_secrets, found, strict=True))
        _check_secrets(namespace, attached, views)
        volumes = await asyncio.gather(*(self._volumes.get(namespace, one) for one in claims))
        for claim, volume in zip(claims, volumes, strict=True):
            if volume is None:
                raise VolumeNotFoundError(
                    f"Volume {claim!r} does not exist in namespace {namespace!r}",
                    hint=f"kt volumes -n {namespace} lists those that are there; kt volumes create "
                    "makes one",
                )
        return _version(views)


def _check_secrets(namespace: str, attached: Attached, views: dict[str, SecretView | None]) -> None:
    for name in attached.secrets:
        if views[name] is None:
            raise SecretNotFound(name, namespace)
    needed = [(one.secret, one.key) for one in attached.variables if one.key and not one.optional]
    needed += [
        (one.secret, key) for one in attached.files if not one.optional for key, _ in one.items
    ]
    for name, key in needed:
        view = views[name]
        if view is not None and key not in view.keys:
            raise SpecError(
                f"the secret {name!r} in namespace {namespace!r} has no {key!r}; it has "
                f"{', '.join(view.keys) or 'nothing'}"
            )


def _version(views: dict[str, SecretView | None]) -> str:
    versions = [f"{name}={view.version if view else ''}" for name, view in sorted(views.items())]
    return hashlib.sha256(" ".join(versions).encode()).hexdigest()[:8] if versions else ""
