"""Secrets of this process and those that the controller has."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kubetorch.config.settings import config
from kubetorch.errors import SecretNotFound, SpecError
from kubetorch.sdk.controller import Controller
from kubetorch.specs import secret as specs
from kubetorch.specs.secret import SecretRef
from kubetorch.wire.secrets import Collision, PutSecret, SecretDraft, SecretView, StoredSecret

if TYPE_CHECKING:
    from kubetorch.sdk.secrets.secret import Secret


def find(controller: Controller, namespace: str, name: str) -> SecretView:
    """A secret by the name that its owner gave it, or by that of its Kubernetes object.

    Raises:
        SecretNotFound: There is none.
    """
    cleaned = name.replace("_", "-")
    tried = (
        specs.object_name(cleaned, username=config.username),
        specs.object_name(cleaned, username=None),
        cleaned,
    )
    for object_name in dict.fromkeys(tried):
        found = controller.secrets.get(namespace, object_name)
        if found is not None:
            return found
    raise SecretNotFound(name, namespace)


def existing(controller: Controller, namespace: str, name: str) -> SecretRef:
    """What pods see of a secret that exists.

    Raises:
        SecretNotFound: There is none of that name.
    """
    found = find(controller, namespace, name)
    return SecretRef(
        name=name,
        object_name=found.object_name,
        mount_type=found.mount_type,
        keys=found.keys,
        path=found.path,
        renamed=found.renamed,
        version=found.version,
    )


def provide(
    controller: Controller, namespace: str, secret: Secret, username: str | None
) -> SecretRef:
    """Upload a secret if its values are here; what pods see of it.

    Raises:
        SecretConflictError: It exists with other values, and is not to be replaced.
        SecretNotFound: Its values are not here, and it does not exist.
        SpecError: It exists and has no value of a name that was declared.
    """
    values = secret.to_upload()
    if values is None:
        return _declared(existing(controller, namespace, secret.name), secret)
    stored = upload(
        controller,
        namespace,
        secret,
        username=username,
        collision="replace" if secret.override else "same",
    )
    return replace(secret.to_ref(), version=stored.secret.version)


def upload(
    controller: Controller,
    namespace: str,
    secret: Secret,
    *,
    username: str | None,
    collision: Collision,
) -> StoredSecret:
    """Store the values of a secret, which are here.

    Args:
        controller: Who stores them.
        namespace: Namespace of the secret.
        secret: The secret.
        username: Who makes it.
        collision: What becomes of one of that name.

    Raises:
        SecretConflictError: It has other values, and those were to be the same.
        SecretNotFound: It is not there, and the values were to be added to its own.
        SpecError: Its values are not here.
    """
    values, ref = secret.to_upload(), secret.to_ref()
    if values is None:
        raise SpecError(f"the values of the secret {secret.name!r} are not known here")
    draft = SecretDraft(
        name=ref.name,
        mount_type=ref.mount_type,
        path=ref.path,
        renamed=ref.renamed,
        provider=secret.provider,
        username=username,
        override=secret.override,
    )
    put = PutSecret(draft=draft, values=dict(values), collision=collision)
    return controller.secrets.put(namespace, ref.object_name, put)


def _declared(found: SecretRef, secret: Secret) -> SecretRef:
    """A secret that exists, with the keys and the path that were declared."""
    declared = secret.to_ref()
    if declared.all_keys:
        return found
    for key in declared.keys:
        if key not in found.keys:
            raise SpecError(
                f"the secret {secret.name!r} exists and has no {key!r}; it has "
                f"{', '.join(found.keys)}"
            )
    return replace(
        found,
        name=secret.name,
        mount_type=declared.mount_type,
        keys=declared.keys or found.keys,
        path=declared.path or found.path,
        renamed=declared.renamed or found.renamed,
    )
