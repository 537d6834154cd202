"""Secrets as Kubernetes Secrets.

What becomes of an upload is decided from what is there, and holds only if that is still there when
it is written (`resourceVersion`); else it is decided again. Kubetorch's rights are those of its
controller, which may be more than its users have: so values are read, changed and deleted only of
secrets that Kubetorch made, and of others only the names of their keys are shown.
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
#: How often an upload that others overtake is decided again.
_ATTEMPTS = 8
#: Every secret that Kubetorch makes has it.
_OURS = labels.MOUNT_TYPE


class SecretObjects:
    """The secrets of a cluster; a `SecretStore`."""

    def __init__(self, client: Client, watched: tuple[str, ...] = ()) -> None:
        self._client = client
        self._watched = watched

    async def put(self, namespace: str, object_name: str, put: PutSecret) -> StoredSecret:
        pauses = backoff.jittered(backoff.exponential(first=0.01, limit=0.5))
        for _, pause in zip(range(_ATTEMPTS), pauses, strict=False):
            found = await self._find(namespace, object_name)
            try:
                return await self._put(namespace, object_name, put, found)
            except KubernetesRequestError as error:
                refused = namespaces.explain(namespace, error)
                if refused is not error:
                    raise refused from error
                if not isinstance(error, (KubernetesConflictError, KubernetesNotFoundError)):
                    raise
            await asyncio.sleep(pause)
        raise KubernetesConflictError(
            f"the secret {put.draft.name!r} in namespace {namespace!r} was changed by others "
            f"{_ATTEMPTS} times while it was to be stored",
            hint="find out who else changes it, and repeat",
        )

    async def get(self, namespace: str, object_name: str) -> SecretView | None:
        found = await self._find(namespace, object_name)
        return None if found is None else _view(found)

    async def values(self, namespace: str, object_name: str) -> dict[str, bytes]:
        found = await self._find(namespace, object_name)
        if found is None:
            raise SecretNotFound(object_name, namespace)
        _check_ours(found, f"kubectl get secret {object_name} -n {namespace} -o yaml")
        return _values(found)

    async def list(self, namespace: str | None) -> list[SecretView]:  # SecretStore's
        found = await namespaces.find(self._client, SECRETS, namespace, self._watched, _OURS)
        return [_view(one) for one in found]

    async def delete(self, namespace: str, object_name: str) -> bool:  # SecretStore's
        found = await self._find(namespace, object_name)
        if found is None:
            return False
        _check_ours(found, f"kubectl delete secret {object_name} -n {namespace}")
        # The one that was looked at, not another that somebody made in its place meanwhile.
        known = {"uid": found["metadata"]["uid"]}
        try:
            await self._client.delete(_ref(namespace, object_name), preconditions=known)
        except (KubernetesNotFoundError, KubernetesConflictError):
            return False
        return True

    async def _find(self, namespace: str, object_name: str) -> Object | None:
        return await namespaces.get(self._client, _ref(namespace, object_name), self._watched)

    async def _put(
        self, namespace: str, object_name: str, put: PutSecret, old: Object | None
    ) -> StoredSecret:
        """Store values on top of what was found."""
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
    """The merge patch that gives a secret these values, and a new description if there is one."""
    metadata: Object = {"resourceVersion": old["metadata"]["resourceVersion"]}
    if draft is not None:
        new = _shell(old["metadata"]["namespace"], old["metadata"]["name"], draft, tuple(values))
        for part in ("labels", "annotations"):
            before = old["metadata"].get(part) or {}
            gone = {name: None for name in before if name.startswith(labels.PREFIX)}
            metadata[part] = {**gone, **new["metadata"][part]}
    elif labels.SECRET_FILENAMES in (old["metadata"].get("annotations") or {}):
        metadata["annotations"] = {labels.SECRET_FILENAMES: json.dumps(list(values))}
    gone = {key: None for key in _values(old) if key not in values}
    return {"metadata": metadata, "data": {**gone, **_data(values)}}


def _data(values: dict[str, bytes]) -> dict[str, str]:
    return {key: base64.b64encode(value).decode() for key, value in values.items()}


def _values(found: Object) -> dict[str, bytes]:
    data: dict[str, str] = found.get("data") or {}
    return {key: base64.b64decode(value) for key, value in data.items()}


def _check_ours(found: Object, hint: str) -> None:
    if _OURS not in (found["metadata"].get("labels") or {}):
        name, namespace = found["metadata"]["name"], found["metadata"]["namespace"]
        raise SpecError(
            f"the secret {name!r} in namespace {namespace!r} was not made by Kubetorch, which "
            "neither shows nor changes its values",
            hint=hint,
        )


def _stored(outcome: Outcome, found: Object) -> StoredSecret:
    return StoredSecret(outcome=outcome, secret=_view(found))


def _view(found: Object) -> SecretView:
    metadata = found["metadata"]
    tagged: dict[str, str] = metadata.get("labels") or {}
    noted: dict[str, str] = metadata.get("annotations") or {}
    mount_type: MountType = "volume" if tagged.get(labels.MOUNT_TYPE) == "volume" else "env"
    created = resources.seconds(metadata.get("creationTimestamp"))
    changes = [resources.seconds(one.get("time")) for one in metadata.get("managedFields") or ()]
    return SecretView(
        namespace=metadata["namespace"],
        object_name=metadata["name"],
        name=tagged.get(labels.SECRET_NAME) or metadata["name"],
        mount_type=mount_type,
        keys=tuple(found.get("data") or ()),
        version=_version(found),
        path=noted.get(labels.SECRET_PATH),
        renamed=_renamed(noted.get(labels.SECRET_VARIABLES)),
        provider=tagged.get(labels.PROVIDER),
        username=tagged.get(labels.USERNAME),
        override=noted.get(labels.OVERRIDE) == "True",
        labels=tagged,
        type=found.get("type") or "Opaque",
        identity=tokens.fingerprint(metadata["uid"]),
        created=created,
        updated=max([created, *changes]),
    )


def _version(found: Object) -> str:
    """A fingerprint of the values, whoever changes them.

    It is seen by those who may not see the values, nor the secret's `uid`, without which they
    cannot try what values it may be of.
    """
    digest = hmac.new(found["metadata"]["uid"].encode(), digestmod=hashlib.sha256)
    for key, value in sorted((found.get("data") or {}).items()):
        digest.update(f"{len(key)}:{key}{len(value)}:{value}".encode())
    return digest.hexdigest()[:16]


def _renamed(noted: str | None) -> tuple[tuple[str, str], ...]:
    try:
        pairs: Any = json.loads(noted or "{}")
    except ValueError:
        return ()
    is_plain = isinstance(pairs, dict) and all(isinstance(one, str) for one in pairs.values())
    return tuple(pairs.items()) if is_plain else ()
