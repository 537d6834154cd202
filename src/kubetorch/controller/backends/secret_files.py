"""Secrets as files of the user: `secrets/<namespace>/<object>.json` in the home, 0600 in 0700.

A file is written beside and renamed, and no method awaits between reading and writing: so an upload
that races with another one sees all of it or nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from kubetorch.controller.backends import disk
from kubetorch.errors import (
    ControllerError,
    SecretConflictError,
    SecretNotFound,
)
from kubetorch.lib import files
from kubetorch.lib.decoding import json_decoder
from kubetorch.lib.hidden import Hidden
from kubetorch.manifests import secrets as manifests
from kubetorch.specs import secret as specs
from kubetorch.specs.secret import SecretRef
from kubetorch.wire.secrets import (
    Outcome,
    PutSecret,
    SecretDraft,
    SecretFile,
    SecretView,
    StoredSecret,
)

_SUFFIX = ".json"


class SecretFiles:
    """The secrets of an installation; a `SecretStore`.

    Args:
        folder: Where they lie.
        clock: Seconds since the epoch.
    """

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._clock = clock

    # -------------------------------------------------------------------------------- SecretStore

    async def put(self, namespace: str, object_name: str, put: PutSecret) -> StoredSecret:  # noqa: D102
        old = self._read(namespace, object_name)
        if old is None:
            if put.collision == "merge":
                raise SecretNotFound(put.draft.name, namespace)
            return self._store(namespace, object_name, put.draft, put.values, "created")
        values = {**old.values, **put.values} if put.collision == "merge" else put.values
        if put.collision == "keep" or values == old.values:
            return StoredSecret(outcome="unchanged", secret=_view(namespace, object_name, old))
        if put.collision == "same":
            raise SecretConflictError(put.draft.name, namespace)
        if put.collision == "merge":
            return self._store(namespace, object_name, old.draft, values, "merged", old)
        return self._store(namespace, object_name, put.draft, values, "replaced", old)

    async def get(self, namespace: str, object_name: str) -> SecretView | None:  # noqa: D102
        return self.view(namespace, object_name)

    async def values(self, namespace: str, object_name: str) -> dict[str, bytes]:  # noqa: D102
        found = self._read(namespace, object_name)
        if found is None:
            raise SecretNotFound(object_name, namespace)
        return found.values

    async def list(self, namespace: str | None) -> list[SecretView]:  # noqa: D102  # SecretStore's
        found = (self.view(*key) for key in self._keys(namespace))
        return [view for view in found if view is not None]

    async def delete(self, namespace: str, object_name: str) -> bool:  # noqa: D102  # SecretStore's
        path = self._path(namespace, object_name)
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            disk.fail(path, error)
        return True

    # ---------------------------------------------------------------------------- for the backend

    def view(self, namespace: str, object_name: str) -> SecretView | None:
        """A secret without its values, if there is one of that name."""
        found = self._read(namespace, object_name)
        return None if found is None else _view(namespace, object_name, found)

    def read(self, namespace: str, object_name: str) -> Hidden | None:
        """The values of a secret, for pods."""
        found = self._read(namespace, object_name)
        return None if found is None else Hidden(found.values)

    def file(self, namespace: str, object_name: str) -> Path:
        """The file of a secret, a `SecretFile`."""
        return self._path(namespace, object_name)

    # ------------------------------------------------------------------------------------- pieces

    def _path(self, namespace: str, object_name: str) -> Path:
        return self._folder / namespace / f"{object_name}{_SUFFIX}"

    def _keys(self, namespace: str | None) -> Iterator[tuple[str, str]]:
        for path in sorted(self._folder.glob(f"{namespace or '*'}/[!.]*{_SUFFIX}")):
            yield path.parent.name, path.name.removesuffix(_SUFFIX)

    def _read(self, namespace: str, object_name: str) -> SecretFile | None:
        path = self._path(namespace, object_name)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            disk.fail(path, error)
        try:
            return json_decoder(SecretFile).decode(data)
        except msgspec.MsgspecError:
            # Without its cause, whose text may have something of the file in it.
            raise ControllerError(
                f"the file of a secret, {path}, is broken", hint="delete it, and deploy again"
            ) from None

    def _store(
        self,
        namespace: str,
        object_name: str,
        draft: SecretDraft,
        values: dict[str, bytes],
        outcome: Outcome,
        old: SecretFile | None = None,
    ) -> StoredSecret:
        specs.check_size(Hidden(values).size_bytes)
        now = self._clock()
        created = now if old is None else old.created
        new = SecretFile(
            draft=draft, values=values, version=os.urandom(8).hex(), created=created, updated=now
        )
        path = self._path(namespace, object_name)
        try:
            for folder in (self._folder, path.parent):
                folder.mkdir(mode=0o700, exist_ok=True)
            files.write_atomically(path, msgspec.json.encode(new))
        except OSError as error:
            disk.fail(path, error)
        return StoredSecret(outcome=outcome, secret=_view(namespace, object_name, new))


def _view(namespace: str, object_name: str, stored: SecretFile) -> SecretView:
    draft, keys = stored.draft, tuple(stored.values)
    ref = SecretRef(draft.name, object_name, draft.mount_type, keys, draft.path)
    shell = manifests.shell(
        ref, namespace=namespace, username=draft.username, provider=draft.provider
    )
    return SecretView(
        namespace=namespace,
        object_name=object_name,
        name=draft.name,
        mount_type=draft.mount_type,
        keys=keys,
        version=stored.version,
        path=draft.path,
        renamed=draft.renamed,
        provider=draft.provider,
        username=draft.username,
        override=draft.override,
        labels=shell["metadata"]["labels"],
        created=stored.created,
        updated=stored.updated,
    )
