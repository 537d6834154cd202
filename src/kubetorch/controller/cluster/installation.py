"""The secret of an installation, which all its controllers share and which survives them."""

from __future__ import annotations

import base64
import os

from kubetorch.controller.cluster.settings import NAME
from kubetorch.errors import ConfigError, KubernetesConflictError, KubernetesNotFoundError
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import Object, Ref, Resource

SECRET = "kubetorch-installation"
_KEY = "secret"
_BYTES = 32
_SECRETS = Resource("", "v1", "secrets", "Secret")


async def secret(client: Client, namespace: str) -> bytes:
    """The secret that tokens of workloads are derived from; made by whoever needs it first.

    Raises:
        KubernetesError: It can be neither read nor made.
        ConfigError: Somebody put something else in its place.
    """
    ref = Ref(_SECRETS, SECRET, namespace)
    try:
        return _read(await client.get(ref))
    except KubernetesNotFoundError:
        made = _manifest(namespace, os.urandom(_BYTES))
    try:
        return _read(await client.create(made))
    except KubernetesConflictError:  # another controller was faster
        return _read(await client.get(ref))


def _manifest(namespace: str, value: bytes) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {
            "name": SECRET,
            "namespace": namespace,
            "labels": {
                "app.kubernetes.io/name": "kubetorch",
                "app.kubernetes.io/managed-by": NAME,
            },
        },
        "data": {_KEY: base64.b64encode(value.hex().encode()).decode()},
    }


def _read(found: Object) -> bytes:
    try:
        value = bytes.fromhex(base64.b64decode((found.get("data") or {})[_KEY]).decode())
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"the Secret {SECRET} has no {_KEY!r} that can be read",
            hint="delete it: the controller makes a new one, and calls need new tokens",
        ) from error
    if len(value) < _BYTES:
        raise ConfigError(f"the Secret {SECRET} has {len(value)} bytes; {_BYTES} are needed")
    return value
