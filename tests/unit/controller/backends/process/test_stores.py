"""Secrets and volumes of one machine, as files."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from kubetorch.controller.backends.process import stores
from kubetorch.controller.backends.process.stores import VolumeFolders
from kubetorch.errors import ControllerError, StorageFullError, VolumeNotFoundError
from kubetorch.specs.volume import VolumeSpec

SPEC = VolumeSpec("data", "/data")


def volumes(folder: Path) -> VolumeFolders:
    return VolumeFolders(folder, lambda: 1.0)


def test_a_volume_is_a_folder_that_is_there_once(tmp_path: Path) -> None:
    volume_folders = volumes(tmp_path)
    first = asyncio.run(volume_folders.create("ns", SPEC))
    assert first.is_new
    (volume_folders.folder("ns", SPEC.claim_name) / "file").write_text("content")
    assert not asyncio.run(volume_folders.create("ns", SPEC)).is_new
    assert (volume_folders.folder("ns", SPEC.claim_name) / "file").read_text() == "content"
    assert [volume.claim for volume in asyncio.run(volume_folders.list(None))] == [SPEC.claim_name]
    assert asyncio.run(volume_folders.list("other")) == []


def test_of_a_volume_that_is_deleted_nothing_is_left(tmp_path: Path) -> None:
    volume_folders = volumes(tmp_path)
    asyncio.run(volume_folders.create("ns", SPEC))
    (volume_folders.folder("ns", SPEC.claim_name) / "file").write_text("content")
    assert asyncio.run(volume_folders.delete("ns", SPEC.claim_name, wait=0.0))
    assert [path.name for path in tmp_path.rglob("*")] == ["ns"]
    with pytest.raises(VolumeNotFoundError):
        volume_folders.folder("ns", SPEC.claim_name)


def test_what_a_killed_controller_was_deleting_is_removed_by_the_next_one(tmp_path: Path) -> None:
    volume_folders = volumes(tmp_path)
    asyncio.run(volume_folders.create("ns", SPEC))
    (tmp_path / "ns" / f"{stores._DELETED_PREFIX}1").mkdir()
    volume_folders.sweep()
    assert volume_folders.folder("ns", SPEC.claim_name).is_dir()
    assert not list(tmp_path.glob(f"*/{stores._DELETED_PREFIX}*"))


def test_a_volume_whose_file_is_broken_is_named_with_the_way_out(tmp_path: Path) -> None:
    volume_folders = volumes(tmp_path)
    asyncio.run(volume_folders.create("ns", SPEC))
    folder = volume_folders.folder("ns", SPEC.claim_name)
    (note,) = tmp_path.glob("ns/.*.json")
    note.write_text("{")
    with pytest.raises(ControllerError, match=r"the file of a volume, .*, is broken") as caught:
        volume_folders.view("ns", SPEC.claim_name)
    assert str(note) in caught.value.message
    note.unlink()
    assert asyncio.run(volume_folders.create("ns", SPEC)).is_new
    assert volume_folders.folder("ns", SPEC.claim_name) == folder


def test_what_the_file_system_does_not_do_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageFullError, match="no space left for /x"):
        stores.fail(Path("/x"), OSError(errno.EDQUOT, "quota"))
    with pytest.raises(ControllerError, match="/x cannot be used: read-only") as caught:
        stores.fail(Path("/x"), OSError(errno.EROFS, "read-only"))
    assert not isinstance(caught.value, StorageFullError)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ControllerError, match="cannot be used"):
        asyncio.run(volumes(tmp_path / "file").create("ns", SPEC))
