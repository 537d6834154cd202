"""Messages about secrets. Only two messages have values, and their `repr` does not show them.

Times are seconds since the epoch. A version changes with the values.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kubetorch.specs.secret import MountType

#: The effect of new values on an existing secret: its values stay; they must be the same; the new
#: values replace them; the new values are added to them, and the secret must exist.
Collision = Literal["keep", "same", "replace", "merge"]
#: The effect that the values had.
Outcome = Literal["created", "unchanged", "replaced", "merged"]


class SecretDraft(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A secret as its owner describes it.

    Attributes:
        name: Its name for the user.
        path: Folder of the files in pods.
        renamed: Pairs of a key and its variable, for variables with another name than the key.
        override: Whether deploys replace its values.
    """

    name: str
    mount_type: MountType
    path: str | None = None
    renamed: tuple[tuple[str, str], ...] = ()
    provider: str | None = None
    username: str | None = None
    override: bool = False


class Silent(msgspec.Struct, frozen=True, kw_only=True):
    """A message with values, whose `repr` shows none of them."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return []


class PutSecret(Silent, frozen=True, kw_only=True):
    """Body of an upload; values are base64 in JSON."""

    draft: SecretDraft
    values: dict[str, bytes]
    collision: Collision = "same"


class SecretValues(Silent, frozen=True, kw_only=True):
    values: dict[str, bytes]


class SecretFile(Silent, frozen=True, kw_only=True):
    """The content of a file with a secret, on the local backend."""

    draft: SecretDraft
    values: dict[str, bytes]
    version: str
    created: float
    updated: float


class SecretView(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A secret without its values.

    Attributes:
        keys: Names of its values.
        path, renamed, override: As in `SecretDraft`.
        labels, type: Those of the Kubernetes object.
        identity: On Kubernetes a digest of its `uid`, which no other secret has or will have.
        used_by: Names of the services that see it; only in lists of secrets.
    """

    namespace: str
    object_name: str
    name: str
    mount_type: MountType
    keys: tuple[str, ...]
    version: str
    path: str | None = None
    renamed: tuple[tuple[str, str], ...] = ()
    provider: str | None = None
    username: str | None = None
    override: bool = False
    labels: dict[str, str] = {}
    type: str = "Opaque"
    identity: str = ""
    created: float = 0.0
    updated: float = 0.0
    used_by: tuple[str, ...] = ()


class StoredSecret(msgspec.Struct, frozen=True, kw_only=True):
    outcome: Outcome
    secret: SecretView
