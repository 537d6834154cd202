"""Volumes as folders of the user: `volumes/<namespace>/<claim>` in the home.

Beside a folder lies what its volume was declared as, `.<claim>.json`: that makes it a volume. So a
creation ends with that file, and a deletion begins with it; the folder is renamed before it is
emptied, and what a service that was killed left of it goes at the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from kubetorch.controller.backends import disk
from kubetorch.errors import ControllerError, VolumeNotFoundError
from kubetorch.lib import files
from kubetorch.lib.decoding import json_decoder
from kubetorch.specs.volume import VolumeSpec
from kubetorch.wire.volumes import CreatedVolume, VolumeView

#: Storage class of all volumes here.
STORAGE_CLASS = "local"
_SUFFIX = ".json"
_DELETED = ".deleted-"


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the file beside a folder."""

    spec: VolumeSpec
    created: float


class VolumeFolders:
    """The volumes of an installation; a `VolumeStore`.

    Args:
        folder: Where they lie.
        clock: Seconds since the epoch.
    """

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._clock = clock

    # -------------------------------------------------------------------------------- VolumeStore

    async def create(self, namespace: str, spec: VolumeSpec) -> CreatedVolume:  # noqa: D102
        claim = spec.claim_name
        found = self.view(namespace, claim)
        if found is not None:
            return CreatedVolume(is_new=False, volume=found)
        folder, note = self._folder / namespace / claim, self._note(namespace, claim)
        stored = _Stored(spec=spec, created=self._clock())
        try:
            for place in (self._folder, folder.parent, folder):
                place.mkdir(mode=0o700, exist_ok=True)
            files.write_atomically(note, msgspec.json.encode(stored))
        except OSError as error:
            disk.fail(folder, error)
        return CreatedVolume(is_new=True, volume=self._view(namespace, claim, stored))

    async def get(self, namespace: str, claim: str) -> VolumeView | None:  # noqa: D102
        return self.view(namespace, claim)

    async def list(self, namespace: str | None) -> list[VolumeView]:  # noqa: D102  # VolumeStore's
        found = (self.view(*key) for key in self._keys(namespace))
        return [view for view in found if view is not None]

    async def delete(self, namespace: str, claim: str, *, wait: float) -> bool:  # noqa: D102
        folder = self._folder / namespace / claim
        left = folder.with_name(_DELETED + os.urandom(8).hex())
        try:
            self._note(namespace, claim).unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                folder.rename(left)
        except OSError as error:
            disk.fail(folder, error)
        # Nobody sees it any more, however long it takes until its files are gone.
        await asyncio.to_thread(shutil.rmtree, left, ignore_errors=True)
        return True

    async def storage_class(self, access_mode: str) -> str:  # noqa: D102  # VolumeStore's
        return STORAGE_CLASS

    # ---------------------------------------------------------------------------- for the backend

    def view(self, namespace: str, claim: str) -> VolumeView | None:
        """A volume, if there is one of that name."""
        note = self._note(namespace, claim)
        try:
            stored = json_decoder(_Stored).decode(note.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            disk.fail(note, error)
        except msgspec.MsgspecError as error:
            raise ControllerError(
                f"the file of a volume, {note}, is broken: {error}",
                hint="delete the file; the volume can then be created again and keeps its content",
            ) from error
        return self._view(namespace, claim, stored)

    def folder(self, namespace: str, claim: str) -> Path:
        """The folder of a volume.

        Raises:
            VolumeNotFoundError: There is no such volume.
        """
        if self.view(namespace, claim) is None:
            raise missing(namespace, claim)
        return self._folder / namespace / claim

    def sweep(self) -> None:
        """Remove what is left of volumes that were deleted."""
        for folder in self._folder.glob(f"*/{_DELETED}*"):
            shutil.rmtree(folder, ignore_errors=True)

    # ------------------------------------------------------------------------------------- pieces

    def _note(self, namespace: str, claim: str) -> Path:
        return self._folder / namespace / f".{claim}{_SUFFIX}"

    def _keys(self, namespace: str | None) -> Iterator[tuple[str, str]]:
        for note in sorted(self._folder.glob(f"{namespace or '*'}/.[!.]*{_SUFFIX}")):
            yield note.parent.name, note.name.removeprefix(".").removesuffix(_SUFFIX)

    def _view(self, namespace: str, claim: str, stored: _Stored) -> VolumeView:
        return VolumeView(
            namespace=namespace,
            claim=claim,
            spec=stored.spec,
            storage_class=stored.spec.storage_class or STORAGE_CLASS,
            folder=str(self._folder / namespace / claim),
            created=stored.created,
        )


def missing(namespace: str, claim: str) -> VolumeNotFoundError:
    """The error for a volume that does not exist."""
    return VolumeNotFoundError(
        f"Volume {claim!r} does not exist in namespace {namespace!r}",
        hint=f"kt volumes -n {namespace} lists those that are there; kt volumes create makes one",
    )
