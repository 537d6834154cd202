"""Secrets as Kubernetes Secrets.

The outcome of an upload is decided from the live Secret. The write fails if the Secret has changed
since (`resourceVersion`), and the upload is decided again. The controller may have more rights than
its users: so it reads, changes and deletes values only of secrets that Kubetorch made, and of other
secrets it shows only the names of the keys.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from typing import Any

from kubetorch.controller.backends.base import decide_put
from kubetorch.controller.backends.kubernetes import namespaces
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.errors import (
    KubernetesConflictError,
    KubernetesNotFoundError,
    KubernetesRequestError,
    SecretNotFound,
    SpecError,
)
from kubetorch.k8s import resources
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import Object, Ref, Resource
from kubetorch.lib import backoff
from kubetorch.manifests import labels
from kubetorch.manifests import secrets as manifests
from kubetorch.specs.secret import MountType, SecretRef
from kubetorch.wire import tokens
from kubetorch.wire.secrets import Outcome, PutSecret, SecretDraft, SecretView, StoredSecret

SECRETS = Resource("", "v1", "secrets", "Secret")
#: The label of every secret that Kubetorch makes.
_MOUNT_LABEL = labels.MOUNT_TYPE


class SecretObjects:
    """The secrets of a cluster; a `SecretStore`."""

    def __init__(self, client: Client, watched: tuple[str, ...] = ()) -> None:
        self._client = client
        self._watched = watched

    async def put(self, namespace: str, object_name: str, put: PutSecret) -> StoredSecret:
        pauses = backoff.jittered(
            first=TIMING.secret_first_delay_seconds, limit=TIMING.secret_longest_delay_seconds
        )
        for _, pause in zip(range(LIMITS.secret_attempts), pauses, strict=False):
            secret = await self._find(namespace, object_name)
            try:
                return await self._put(namespace, object_name, put, secret)
            except KubernetesRequestError as error:
                refusal = namespaces.explain(namespace, error)
                if refusal is not error:
                    raise refusal from error
                if not isinstance(error, (KubernetesConflictError, KubernetesNotFoundError)):
                    raise
            await asyncio.sleep(pause)
        raise KubernetesConflictError(
            f"the secret {put.draft.name!r} in namespace {namespace!r} was changed by others "
            f"{LIMITS.secret_attempts} times while it was to be stored",
            hint="find out who else changes it, and repeat",
        )

    async def get(self, namespace: str, object_name: str) -> SecretView | None:
        secret = await self._find(namespace, object_name)
        return None if secret is None else _view(secret)

    async def values(self, namespace: str, object_name: str) -> dict[str, bytes]:
        secret = await self._find(namespace, object_name)
        if secret is None:
            raise SecretNotFound(object_name, namespace)
        _check_ours(secret, f"kubectl get secret {object_name} -n {namespace} -o yaml")
        return _values(secret)

    async def list(self, namespace: str | None) -> list[SecretView]:  # SecretStore's
        secrets = await namespaces.list_labelled(
            self._client, SECRETS, namespace, self._watched, _MOUNT_LABEL
        )
        return [_view(secret) for secret in secrets]

    async def delete(self, namespace: str, object_name: str) -> bool:  # SecretStore's
        secret = await self._find(namespace, object_name)
        if secret is None:
            return False
        _check_ours(secret, f"kubectl delete secret {object_name} -n {namespace}")
        # Only the checked secret is deleted, not a new one of the same name.
        preconditions = {"uid": secret["metadata"]["uid"]}
        try:
            await self._client.delete(_ref(namespace, object_name), preconditions=preconditions)
        except (KubernetesNotFoundError, KubernetesConflictError):
            return False
        return True

    async def _find(self, namespace: str, object_name: str) -> Object | None:
        return await namespaces.get(self._client, _ref(namespace, object_name), self._watched)

    async def _put(
        self, namespace: str, object_name: str, put: PutSecret, old: Object | None
    ) -> StoredSecret:
        """Store values in a secret that was read as `old`."""
        if old is not None and put.collision != "keep":
            _check_ours(old, "give yours another name")
        outcome, values = decide_put(namespace, put, None if old is None else _values(old))
        if old is None:
            shell = _shell(namespace, object_name, put.draft, tuple(values))
            return _stored(outcome, await self._client.create({**shell, "data": _data(values)}))
        if outcome == "unchanged":
            return _stored(outcome, old)
        changed = _change(old, values, None if outcome == "merged" else put.draft)
        return _stored(outcome, await self._client.patch(_ref(namespace, object_name), changed))


def _ref(namespace: str, object_name: str) -> Ref:
    return Ref(SECRETS, object_name, namespace)


def _shell(namespace: str, object_name: str, draft: SecretDraft, keys: tuple[str, ...]) -> Object:
    ref = SecretRef(
        name=draft.name,
        object_name=object_name,
        mount_type=draft.mount_type,
        keys=keys,
        path=draft.path,
        renamed=draft.renamed,
    )
    return manifests.secret_manifest(
        ref,
        namespace=namespace,
        username=draft.username,
        provider=draft.provider,
        override=draft.override,
    )


def _change(old: Object, values: dict[str, bytes], draft: SecretDraft | None) -> Object:
    """The merge patch that gives a secret these values, and the description of a draft, if any."""
    metadata: Object = {"resourceVersion": old["metadata"]["resourceVersion"]}
    if draft is not None:
        new = _shell(old["metadata"]["namespace"], old["metadata"]["name"], draft, tuple(values))
        for part in ("labels", "annotations"):
            before = old["metadata"].get(part) or {}
            removed_tags = {name: None for name in before if name.startswith(labels.PREFIX)}
            metadata[part] = {**removed_tags, **new["metadata"][part]}
    elif labels.SECRET_FILENAMES in (old["metadata"].get("annotations") or {}):
        metadata["annotations"] = {labels.SECRET_FILENAMES: json.dumps(list(values))}
    removed_keys = {key: None for key in _values(old) if key not in values}
    return {"metadata": metadata, "data": {**removed_keys, **_data(values)}}


def _data(values: dict[str, bytes]) -> dict[str, str]:
    return {key: base64.b64encode(value).decode() for key, value in values.items()}


def _values(secret: Object) -> dict[str, bytes]:
    data: dict[str, str] = secret.get("data") or {}
    return {key: base64.b64decode(value) for key, value in data.items()}


def _check_ours(secret: Object, hint: str) -> None:
    if _MOUNT_LABEL not in (secret["metadata"].get("labels") or {}):
        name, namespace = secret["metadata"]["name"], secret["metadata"]["namespace"]
        raise SpecError(
            f"the secret {name!r} in namespace {namespace!r} was not made by Kubetorch, which "
            "neither shows nor changes its values",
            hint=hint,
        )


def _stored(outcome: Outcome, secret: Object) -> StoredSecret:
    return StoredSecret(outcome=outcome, secret=_view(secret))


def _view(secret: Object) -> SecretView:
    metadata = secret["metadata"]
    secret_labels: dict[str, str] = metadata.get("labels") or {}
    secret_annotations: dict[str, str] = metadata.get("annotations") or {}
    mount_type: MountType = "volume" if secret_labels.get(labels.MOUNT_TYPE) == "volume" else "env"
    created = resources.seconds(metadata.get("creationTimestamp"))
    changes = [
        resources.seconds(entry.get("time")) for entry in metadata.get("managedFields") or ()
    ]
    return SecretView(
        namespace=metadata["namespace"],
        object_name=metadata["name"],
        name=secret_labels.get(labels.SECRET_NAME) or metadata["name"],
        mount_type=mount_type,
        keys=tuple(secret.get("data") or ()),
        version=_version(secret),
        path=secret_annotations.get(labels.SECRET_PATH),
        renamed=_renamed(secret_annotations.get(labels.SECRET_VARIABLES)),
        provider=secret_labels.get(labels.PROVIDER),
        username=secret_labels.get(labels.USERNAME),
        override=secret_annotations.get(labels.OVERRIDE) == "True",
        labels=secret_labels,
        type=secret.get("type") or "Opaque",
        identity=tokens.fingerprint(metadata["uid"]),
        created=created,
        updated=max([created, *changes]),
    )


def _version(secret: Object) -> str:
    """A fingerprint of the values, which also shows changes by other writers.

    Users who may not read the values see it. They do not know the `uid` of the secret, so they
    cannot guess values and compare fingerprints.
    """
    digest = hmac.new(secret["metadata"]["uid"].encode(), digestmod=hashlib.sha256)
    for key, value in sorted((secret.get("data") or {}).items()):
        digest.update(f"{len(key)}:{key}{len(value)}:{value}".encode())
    return digest.hexdigest()[:16]


def _renamed(text: str | None) -> tuple[tuple[str, str], ...]:
    try:
        pairs: Any = json.loads(text or "{}")
    except ValueError:
        return ()
    is_plain = isinstance(pairs, dict) and all(
        isinstance(variable, str) for variable in pairs.values()
    )
    return tuple(pairs.items()) if is_plain else ()
