"""Reading the files of a put."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kubetorch.datastore.blobs import digest_of
from kubetorch.datastore.chunk_cache import ChunkCache
from kubetorch.datastore.manifests import Manifest
from kubetorch.datastore.scan import FileChangedError
from kubetorch.datastore.snapshots import Extent, Piece, Snapshot, read_extents
from kubetorch.datastore.sources import Filter, Source, Walk

MIB = 1024**2


class Blobs:
    """A sink that has all blobs in memory."""

    def __init__(self, on_piece: Callable[[], object] = lambda: None) -> None:
        self.blobs: dict[str, bytes] = {}
        self._on_piece = on_piece

    def add(self, piece: Piece) -> None:
        if piece.data is None:
            self.blobs[piece.digest] = read_extents(piece.extents, piece.digest)
            return
        piece.digest = digest_of(piece.data)
        self.blobs[piece.digest] = bytes(piece.data)
        self._on_piece()

    def flush(self) -> None:
        """All pieces have their digests already."""

    def files(self, manifest: Manifest) -> dict[str, bytes]:
        return {
            entry.path: b"".join(
                self.blobs[manifest.blob_of(chunk)][chunk.offset : chunk.offset + chunk.size]
                if chunk.digest
                else bytes(chunk.size)
                for chunk in entry.chunks
            )
            for entry in manifest.entries
            if entry.kind == "file"
        }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    return folder


def sources(folder: Path) -> list[Source]:
    walk = Walk(str(folder), Filter(str(folder), None, None))
    walk.run()
    return walk.sources


def snapshot(folder: Path, blobs: Blobs) -> Manifest:
    cache = ChunkCache(folder.parent / "cache", str(folder))
    listed = sources(folder)
    contents = [
        cache.content(source.disk_path, source.file_stat) if source.kind == "file" else None
        for source in listed
    ]
    reading = Snapshot(cache, blobs)
    reading.read(listed, contents)
    return reading.finish("folder")


def test_small_files_share_blobs_and_equal_ones_their_bytes(folder: Path) -> None:
    for number in range(2000):
        (folder / f"{number:04}").write_bytes(b"%d" % (number % 1000))
    blobs = Blobs()
    manifest = snapshot(folder, blobs)
    assert blobs.files(manifest) == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(blobs.blobs) < 4
    assert sum(map(len, blobs.blobs.values())) == sum(len(b"%d" % n) for n in range(1000))


def test_a_folder_whose_name_is_no_text_is_read_without_a_cache(folder: Path) -> None:
    latin_folder = folder / os.fsdecode(b"caf\xe9")
    latin_folder.mkdir()
    (latin_folder / "file").write_bytes(b"x")
    blobs = Blobs()
    assert blobs.files(snapshot(latin_folder, blobs)) == {"file": b"x"}


def test_a_cache_is_removed_when_it_was_not_used_for_long(tmp_path: Path) -> None:
    def save(root: str) -> Path:
        cache = ChunkCache(tmp_path, root)
        cache.add_pack("members", root)
        cache.save()
        return max(tmp_path.iterdir(), key=lambda path: path.lstat().st_mtime)

    used, unused = save("used"), save("unused")
    (tmp_path / "gone.chunks").symlink_to("nowhere")  # as another process removes one meanwhile
    for path in (used, unused):
        os.utime(path, (0, 0))
    ChunkCache(tmp_path, "used").save()  # nothing has changed
    new = save("new")
    assert {used, new} <= set(tmp_path.iterdir())
    assert not unused.exists()


def test_a_new_small_file_changes_the_packs_around_it_alone(folder: Path) -> None:
    generator = random.Random(1)  # the number of packs depends on the content
    for number in range(400):
        (folder / f"{number:04}").write_bytes(generator.randbytes(20_000))
    before = Blobs()
    snapshot(folder, before)
    (folder / "0200-new").write_bytes(generator.randbytes(20_000))
    after = Blobs()
    manifest = snapshot(folder, after)
    assert after.files(manifest)["0200-new"] == (folder / "0200-new").read_bytes()
    assert len(after.blobs.keys() - before.blobs.keys()) <= 2
    assert len(before.blobs) > 4


def test_a_file_that_changes_while_it_is_read_is_read_again(folder: Path) -> None:
    (folder / "file").write_bytes(os.urandom(3 * MIB))
    changes = iter(range(1))

    def change() -> None:
        if next(changes, None) is not None:
            (folder / "file").write_bytes(b"new" * MIB)

    blobs = Blobs(change)
    assert blobs.files(snapshot(folder, blobs)) == {"file": b"new" * MIB}


def test_a_file_that_never_rests_is_a_typed_error(folder: Path) -> None:
    (folder / "file").write_bytes(os.urandom(3 * MIB))
    blobs = Blobs(lambda: (folder / "file").write_bytes(os.urandom(3 * MIB)))
    with pytest.raises(FileChangedError, match="file changed while it was read, 3 times in a row"):
        snapshot(folder, blobs)


def test_a_log_that_grows_has_the_size_that_it_had_first(folder: Path) -> None:
    log = folder / "log"
    log.write_bytes(b"line\n" * MIB)
    size = log.stat().st_size

    def append() -> None:
        with log.open("ab") as file:
            file.write(b"more\n")

    blobs = Blobs(append)
    assert blobs.files(snapshot(folder, blobs)) == {"log": b"line\n" * MIB}
    assert log.stat().st_size > size


def test_a_file_that_vanishes_before_it_is_read_is_left_out(folder: Path) -> None:
    (folder / "a").write_text("a")
    (folder / "b").write_text("b")
    listed = sources(folder)
    (folder / "a").unlink()
    blobs = Blobs()
    reading = Snapshot(ChunkCache(folder.parent / "cache", str(folder)), blobs)
    reading.read(listed, [None] * len(listed))
    assert blobs.files(reading.finish("folder")) == {"b": b"b"}


def test_bytes_that_changed_since_they_were_read_are_not_taken(folder: Path) -> None:
    (folder / "file").write_bytes(b"new")
    with pytest.raises(FileChangedError, match="changed while it was put"):
        read_extents([Extent(str(folder / "file"), 0, 3)], digest_of(b"old"))
    with pytest.raises(FileChangedError, match="cannot be read any more"):
        read_extents([Extent(str(folder / "none"), 0, 3)], digest_of(b"old"))


def test_names_that_cannot_travel_are_named(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "nowhere").symlink_to("/nowhere/at/all")
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff")).touch()
    walk = Walk(str(folder), Filter(str(folder), None, None))
    walk.run()
    assert walk.sources == []
    assert len(walk.warnings) == 3
    assert all("is left out" in warning for warning in walk.warnings)
