"""The data store: what is kept and for how long, and the room that a put needs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kubetorch.controller.blobs import BlobStores, GarbageCollector
from kubetorch.controller.data import Content, DataStore
from kubetorch.controller.holders import Holders
from kubetorch.controller.tuning import TIMING
from kubetorch.datastore import manifests
from kubetorch.datastore.blobs import Room, digest_of
from kubetorch.datastore.manifests import Chunk, Entry, Manifest
from kubetorch.datastore.publications import extents_in
from kubetorch.errors import DataStoreError, StorageFullError
from kubetorch.wire.data import FindKeys, Holder, HoldManifest, KeyView, PutKey, RemovePath
from manual_clock import ManualClock


class Store:
    """A data store in a folder, opened anew by `reopen` as by a controller that starts."""

    def __init__(self, root: Path, *, room: Room | None = None, is_shared: bool = False) -> None:
        self.root = root
        self.clock = ManualClock()
        self.services: set[tuple[str, str]] = set()
        self.blobs = BlobStores(root / "blobs", room=room, is_shared=is_shared)
        self.reopen()

    def reopen(self) -> None:
        self.holders = Holders(lambda namespace, name: None, lambda namespace, name: "")

        def has_service(namespace: str, name: str) -> bool:
            return (namespace, name) in self.services

        self.data = DataStore(
            self.root / "keys",
            self.blobs,
            self.clock,
            has_service=has_service,
            holders=self.holders,
        )

    def put(self, key: str, *files: bytes, namespace: str = "ns", **options: Any) -> KeyView:
        digest = self.upload(*files, namespace=namespace)
        put = PutKey(key=key, manifest=digest, **options)
        answer = asyncio.run(self.data.put(namespace, put, "me"))
        assert answer.key is not None, answer
        return answer.key

    def upload(self, *files: bytes, namespace: str = "ns") -> str:
        """Store the blobs of a folder with these files; returns the digest of its manifest."""
        entries = (
            Entry(str(number), chunks=(Chunk(digest_of(file), len(file)),))
            for number, file in enumerate(files)
        )
        digest, encoded = manifests.encode(Manifest("folder", tuple(entries)))
        blobs = self.blobs.of(namespace).blobs
        for blob in (*files, encoded):
            blobs.put(digest_of(blob), blob)
            self._set_age(digest_of(blob), namespace)
        return digest

    def _set_age(self, digest: str, namespace: str) -> None:
        path = self.blobs.of(namespace).blobs.path(digest)
        os.utime(path, (self.clock.time(), self.clock.time()))

    def age(self) -> None:
        """Let all blobs become old, at a time without a lease."""
        self.clock.advance(2 * TIMING.young_blob_seconds)
        for store in self.blobs.all():
            for blob in store.blobs.iterate():
                os.utime(store.blobs.path(blob.digest), (0, 0))

    def collect(self) -> int:
        garbage = GarbageCollector(
            self.blobs,
            specs=list,
            results=lambda store: set(),
            manifests=self.data.manifests,
            refresh=self.data.refresh,
            expire=lambda: None,
            clock=self.clock,
        )
        return asyncio.run(garbage.collect())

    def find(self, path: str, **options: Any) -> list[str]:
        answer = asyncio.run(self.data.find("ns", FindKeys(path=path, **options)))
        return [part.key.key for part in answer.keys]

    def rm(self, path: str) -> list[str]:
        remove = RemovePath(path=path, recursive=True)
        return list(asyncio.run(self.data.remove("ns", remove, "me")).keys)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def test_the_blobs_of_keys_stay_and_those_of_deleted_keys_go(store: Store) -> None:
    store.put("a", b"1", b"2")
    store.put("b", b"2", b"3")
    store.age()
    assert store.collect() == 0
    store.rm("b")
    store.age()
    assert store.collect() == 2  # the manifest, and 3
    assert store.find("a") == ["a"]
    store.put("a", b"1", b"2")


@pytest.mark.parametrize("removed", [0, 1, 2])
def test_a_pack_has_no_bytes_of_a_file_that_was_deleted(store: Store, removed: int) -> None:
    files = [b"one", b"three", b"seven"]
    pack = b"".join(files)
    entries = tuple(
        Entry(str(n), chunks=(Chunk(digest_of(file), len(file), 0, pack.index(file)),))
        for n, file in enumerate(files)
    )
    digest, encoded = manifests.encode(Manifest("folder", entries, (digest_of(pack),)))
    blobs = store.blobs.of("ns").blobs
    for blob in (pack, encoded):
        blobs.put(digest_of(blob), blob)
    asyncio.run(store.data.put("ns", PutKey(key="a", manifest=digest), "me"))
    assert store.rm(f"a/{removed}") == ["a"]
    (part,) = asyncio.run(store.data.find("ns", FindKeys(path="a"))).keys
    manifest = manifests.read(blobs, part.key.manifest)
    (name,) = extents_in(lambda entry: entry.path, manifest)
    del files[removed]
    assert blobs.read(name) == b"".join(files)
    for entry, file in zip(manifest.entries, files, strict=True):
        (chunk,) = entry.chunks
        assert blobs.read(name)[chunk.offset : chunk.offset + chunk.size] == file


def test_a_reader_has_its_version_whole_while_its_lease_lasts(store: Store) -> None:
    store.put("a", b"1")
    store.find("a", lease_seconds=10 * TIMING.young_blob_seconds)
    store.put("a", b"2")
    store.age()
    assert store.collect() == 0
    for _ in range(5):
        store.age()
    assert store.collect() == 2


def test_a_version_that_ends_stays_for_some_minutes_though_the_controller_starts_anew(
    store: Store,
) -> None:
    store.put("a", b"1")
    store.age()
    store.put("a", b"2")
    store.reopen()
    now = store.clock.time()
    blobs = store.blobs.of("ns").blobs
    assert {blob.mtime > now - TIMING.young_blob_seconds for blob in blobs.iterate()} == {True}
    assert store.collect() == 0


def test_a_put_whose_blobs_were_collected_names_them_and_changes_nothing(store: Store) -> None:
    store.put("a", b"old")
    digest = store.upload(b"1", b"2")
    blobs = store.blobs.of("ns").blobs
    blobs.delete(digest_of(b"2"))
    answer = asyncio.run(store.data.put("ns", PutKey(key="a", manifest=digest), "me"))
    assert answer.missing == (digest_of(b"2"),)
    blobs.delete(digest)
    answer = asyncio.run(store.data.put("ns", PutKey(key="a", manifest=digest), "me"))
    assert answer.missing[0] == digest
    assert store.data.manifests(store.blobs.of("ns")) != {digest}


def test_a_manifest_that_lies_about_the_size_of_a_chunk_is_refused(store: Store) -> None:
    blobs = store.blobs.of("ns").blobs
    blobs.put(digest_of(b"12"), b"12")
    entries = (Entry("x", chunks=(Chunk(digest_of(b"12"), 3),)),)
    digest, encoded = manifests.encode(Manifest("folder", entries))
    blobs.put(digest, encoded)
    with pytest.raises(DataStoreError, match="of 'x' has 2 bytes; its manifest says 3"):
        asyncio.run(store.data.put("ns", PutKey(key="a", manifest=digest), "me"))


def test_keys_end_with_the_service_that_they_belong_to(store: Store) -> None:
    store.services.add(("ns", "trainer"))
    assert store.put("trainer/weights", b"1").lifespan == "resource"
    store.put("trainer", b"1")
    store.put("trainer/stays", b"1", lifespan="cluster")
    store.put("scratch", b"1", lifespan="resource", service="trainer")
    store.put("nobody/x", b"1")
    store.put("trainer/weights", b"1", namespace="other")
    store.reopen()
    assert asyncio.run(store.data.end_service("ns", "trainer")) == 3
    assert store.find("") == ["nobody/x", "trainer/stays"]
    assert asyncio.run(store.data.end_service("ns", "trainer")) == 0


@pytest.mark.parametrize("is_shared", [False, True])
def test_namespaces_have_keys_of_their_own(tmp_path: Path, is_shared: bool) -> None:
    store = Store(tmp_path, is_shared=is_shared)
    store.put("a", b"1", namespace="ns")
    store.put("b", b"1", namespace="other")
    store.reopen()
    assert store.find("") == ["a"]
    store.age()
    assert store.collect() == 0


def test_a_put_hears_before_its_first_byte_that_there_is_no_room(tmp_path: Path) -> None:
    store = Store(tmp_path, room=Room(limit_bytes=100_000))
    hurried = []
    store.blobs.on_full = lambda: hurried.append(True)
    sizes = {digest_of(b"1"): 60_000, digest_of(b"2"): 50_000}
    with pytest.raises(StorageFullError, match="has no room left for namespace ns"):
        asyncio.run(store.data.missing("ns", sizes))
    assert hurried == [True]
    store.upload(b"2")
    assert asyncio.run(store.data.missing("ns", sizes)) == [digest_of(b"1")]


def test_a_put_that_the_disk_has_no_room_for_is_refused(store: Store) -> None:
    with pytest.raises(StorageFullError, match="no space left"):
        asyncio.run(store.data.missing("ns", {digest_of(b"1"): 1 << 60}))


def test_blobs_that_no_key_has_are_not_read_through_the_data_store(store: Store) -> None:
    view = store.put("a", b"1")
    secret = digest_of(b"arguments of a deploy")
    store.blobs.of("ns").blobs.put(secret, b"arguments of a deploy")
    check: Callable[..., Any] = store.data.check_readable
    asyncio.run(check("ns", [view.manifest, digest_of(b"1")]))
    with pytest.raises(DataStoreError, match="1 blobs belong to no key"):
        asyncio.run(check("ns", [digest_of(b"1"), secret]))


def test_blobs_of_keys_are_read_though_no_lease_names_them(store: Store) -> None:
    views = [store.put(key, key.encode()) for key in "ab"]
    store.find("a")
    blobs = [digest_of(b"a"), digest_of(b"b"), *(view.manifest for view in views)]
    assert asyncio.run(store.data.unreadable("ns", blobs)) == set()
    unknown = digest_of(b"x")
    assert asyncio.run(store.data.unreadable("ns", [*blobs, unknown])) == {unknown}
    assert asyncio.run(store.data.unreadable("ns", [])) == set()


def test_a_newer_key_hides_what_a_folder_above_it_has_at_its_path(store: Store) -> None:
    store.put("a", b"0", b"1")
    for key in ["a-b/1", "a/1", "a/x", "a0/1"]:
        store.put(key, b"x")
    answer = asyncio.run(store.data.find("ns", FindKeys(path="")))
    shadowed = {part.key.key: part.shadowed for part in answer.keys}
    assert shadowed == {"a": ("1",), "a-b/1": (), "a/1": (), "a/x": (), "a0/1": ()}


def test_a_damaged_manifest_is_an_error_that_names_its_key(store: Store) -> None:
    view = store.put("a", b"1")
    store.put("a/0", b"2")
    store.reopen()
    path = store.blobs.of("ns").blobs.path(view.manifest)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(DataStoreError, match=r"the key .a. cannot be read: .* poisoned"):
        store.find("a")
    assert store.put("a", b"3").version == 2
    assert store.find("a") == ["a"]


def test_a_content_says_what_is_at_each_path_and_at_folders_without_an_entry() -> None:
    paths = {"a-b": "file", "a/b-c/d": "file", "a/b/c/d": "symlink", "a0": "file", "b": "folder"}
    targets = {"symlink": "x"}
    entries = tuple(
        Entry(path, kind, target=targets.get(kind, "")) for path, kind in sorted(paths.items())
    )
    content = Content(manifests.decode(manifests.encode(Manifest("folder", entries))[1]))
    assert {path: content.kind(path) for path in paths} == paths
    folders = ["a", "a/b", "a/b-c", "a/b/c"]
    assert [content.kind(folder) for folder in folders] == ["folder"] * len(folders)
    assert [content.kind(path) for path in ["", "a/", "a-", "a/b/c/d/e", "b/c", "c"]] == [None] * 6
    assert content.file_above("a/b/c/d/e") == "a/b/c/d"
    assert content.file_above("a/b/c/x") is None


def test_a_single_file_is_at_the_empty_path() -> None:
    assert Content(Manifest("file", (Entry(""),))).kind("") == "file"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"service": "a/b"}, "'a/b' is no name of a service"),
        ({"service": "s" * 64}, "is no name of a service"),
        ({"publisher": Holder("S", "p0")}, "'S' is no name of a service"),
        ({"publisher": Holder("s", "p\n0")}, r"'p\\n0' is no name of a pod"),
        ({"publisher": Holder("s", "p" * 254)}, "is no name of a pod"),
    ],
)
def test_names_that_no_service_or_pod_can_have_are_refused(
    store: Store, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(DataStoreError, match=why):
        store.put("a", b"1", **options)
    assert store.find("") == []


def test_only_versions_of_keys_have_holders(store: Store) -> None:
    view, holder = store.put("a", b"1"), Holder("s", "p0")
    with pytest.raises(DataStoreError, match="no key has the manifest"):
        store.data.hold("ns", HoldManifest(digest_of(b"x"), holder))
    with pytest.raises(DataStoreError, match="the service 's' has no pod 'p0'"):
        store.data.hold("ns", HoldManifest(view.manifest, holder))
    store.data.hold("ns", HoldManifest(digest_of(b"x"), holder, is_whole=False))


def test_what_a_key_holds_is_on_disk_before_the_key_and_only_what_is_new_is_synced(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[int, int]] = []
    sync = os.fsync

    def record(descriptor: int) -> None:
        sync(descriptor)
        keys = len([path for path in store.root.glob("keys/ns/*") if len(path.name) == 64])
        synced.append((os.fstat(descriptor).st_ino, keys))

    def names() -> set[int]:
        blobs = store.blobs.of("ns").blobs
        return {
            path.stat().st_ino
            for digest in (digest_of(b"1"), digest_of(b"2"), manifest)
            for path in (blobs.path(digest), blobs.path(digest).parent)
        }

    monkeypatch.setattr(os, "fsync", record)
    manifest = store.put("a", b"1", b"2").manifest
    assert names() <= {inode for inode, keys in synced if not keys}
    assert len(synced) == len(names()) + 1  # the key itself

    synced.clear()
    store.put("a", b"1", b"2")
    assert len(synced) == 1
