"""Messages about secrets. Values travel in two of them only, which do not show them.

Times are seconds since the epoch. A version changes with the values.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kubetorch.specs.secret import MountType

#: What becomes of values for a secret that exists: it stays as it is; they must be the same; they
#: take the place of its own; they are added to its own, which must be there.
Collision = Literal["keep", "same", "replace", "merge"]
#: What became of them.
Outcome = Literal["created", "unchanged", "replaced", "merged"]


class SecretDraft(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A secret as its owner describes it.

    Attributes:
        name: Name that the user knows it by.
        path: Folder of the files in pods.
        renamed: Pairs of key and variable, where the variable is not called like the key.
        override: Whether its owner wants deploys to replace its values.
    """

    name: str
    mount_type: MountType
    path: str | None = None
    renamed: tuple[tuple[str, str], ...] = ()
    provider: str | None = None
    username: str | None = None
    override: bool = False


class _Silent(msgspec.Struct, frozen=True, kw_only=True):
    """A message with values in it, none of which is shown."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return []


class PutSecret(_Silent, frozen=True, kw_only=True):
    """Body of an upload; values are base64 in JSON."""

    draft: SecretDraft
    values: dict[str, bytes]
    collision: Collision = "same"


class SecretValues(_Silent, frozen=True, kw_only=True):
    values: dict[str, bytes]


class SecretFile(_Silent, frozen=True, kw_only=True):
    """Content of a file that a secret is kept in, where there is no Kubernetes."""

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
        identity: What no other secret has or will have, on Kubernetes: a digest of its `uid`.
        used_by: Names of the services that see it; only where secrets are listed.
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
