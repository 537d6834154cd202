"""Keys of the data store: what they hold, what hides what, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kubetorch.datastore.blobs import digest_of
from kubetorch.errors import DataStoreError
from kubetorch.wire import routes
from tests.local.key_store import KeyStore
from tests.local.service_harness import FAKE, Service


@pytest.fixture(scope="module")
def service(shared_service_home: Path) -> Iterator[Service]:
    service = Service(shared_service_home, FAKE).start()
    yield service
    service.terminate()


@pytest.fixture
def store(service: Service, tmp_path: Path) -> Iterator[KeyStore]:
    """The store of a namespace of its own."""
    with service.client() as client:
        yield KeyStore(client, tmp_path / "blobs", f"n{digest_of(bytes(tmp_path))[:20]}")


def test_a_key_holds_a_file_or_a_folder(store: KeyStore) -> None:
    assert store.put("models/base", {"w/1": b"one", "w/2": b""}).version == 1
    view = store.put("notes.txt", b"hello")
    assert (view.kind, view.size, view.files, view.holders) == ("file", 5, 1, ("store",))
    assert store.get("models/base") == {"w/1": b"one", "w/2": b""}
    assert store.get("notes.txt") == {"": b"hello"}
    assert store.get("models") == {"base/w/1": b"one", "base/w/2": b""}
    assert store.get("models/base/w") == {"1": b"one", "2": b""}
    assert store.get("models/base/w/1") == {"": b"one"}
    assert store.get("models/ba") == {}


def test_a_put_replaces_what_the_key_held(store: KeyStore) -> None:
    store.put("a", {"x": b"1", "y": b"2"})
    assert store.put("a", {"x": b"3"}).version == 2
    assert store.get("a") == {"x": b"3"}
    store.put("a", b"a file now")
    assert store.get("a") == {"": b"a file now"}


def test_a_later_key_hides_the_path_of_the_folder_above_it(store: KeyStore) -> None:
    store.put("a", {"x/1": b"1", "x/2": b"2", "y": b"y"})
    store.put("a/x", {"3": b"3"})
    store.put("a/z", b"z")
    assert store.get("a") == {"x/3": b"3", "y": b"y", "z": b"z"}
    assert store.get("a/x") == {"3": b"3"}
    assert store.get("a/x/1") == {}
    assert store.ls("a") == ["x/", "y", "z"]


def test_a_put_removes_keys_below_whose_paths_its_folder_has(store: KeyStore) -> None:
    store.put("a/x", {"3": b"3"})
    store.put("a/z", b"z")
    store.put("a", {"x/1": b"1"})
    assert store.get("a") == {"x/1": b"1", "z": b"z"}


def test_a_file_and_a_folder_of_one_path_are_refused(store: KeyStore) -> None:
    store.put("file", b"1")
    with pytest.raises(DataStoreError, match="'file/x' lies below 'file', which is a file"):
        store.put("file/x", b"2")
    store.put("folder/x", b"1")
    with pytest.raises(DataStoreError, match="'folder' would be a file, and 'folder/x' is below"):
        store.put("folder", b"2")
    store.put("deep/a/b", b"1")
    with pytest.raises(DataStoreError, match="'a' would be a file, and 'deep/a/b' is below"):
        store.put("deep", {"a": b"2"})
    store.put("parts", {"p/q": b"1"})
    with pytest.raises(DataStoreError, match="lies below 'parts/p/q', which is a file"):
        store.put("parts/p/q/r", b"2")


def test_deleting(store: KeyStore) -> None:
    store.put("a", {"x/1": b"1", "x/2": b"2", "y": b"y"})
    store.put("a/x", {"3": b"3"})
    with pytest.raises(DataStoreError, match="'a' is a folder"):
        store.rm("a")
    with pytest.raises(DataStoreError, match="'a/x' is a folder"):
        store.rm("a/x")
    assert store.rm("a/y") == ["a"]
    assert store.rm("a/x/3") == ["a/x"]
    assert store.get("a") == {}
    assert store.rm("a/x", recursive=True) == ["a", "a/x"]
    assert store.ls("a") == []
    assert store.rm("nothing") == []
    assert store.rm("a", recursive=True) == ["a"]
    assert store.ls() == []


def test_deleting_by_the_characters_that_keys_begin_with(store: KeyStore) -> None:
    for key in ("ckpt-1", "ckpt-2/x", "ck/x", "other"):
        store.put(key, b"1")
    assert store.rm("ck/", is_prefix=True) == ["ck/x"]
    assert store.rm("ckpt", is_prefix=True) == ["ckpt-1", "ckpt-2/x"]
    assert store.ls() == ["other"]
    with pytest.raises(DataStoreError, match="is empty"):
        store.rm("/", is_prefix=True)


@pytest.mark.parametrize(
    ("key", "canonical"),
    [
        ("../x", "x"),
        ("/abs", "abs"),
        ("a/../../../x", "x"),
        ("//a//b/./c/", "a/b/c"),
        ("Größe/ключ 🗝", "Größe/ключ 🗝"),
    ],
)
def test_keys_are_confined_to_their_namespace(store: KeyStore, key: str, canonical: str) -> None:
    assert store.put(key, b"1").key == canonical
    assert store.get(canonical) == {"": b"1"}


def test_keys_that_differ_in_case_are_different(store: KeyStore) -> None:
    store.put("Model", b"1")
    store.put("model", b"2")
    assert store.get("Model") == {"": b"1"}
    assert store.ls() == ["Model", "model"]


def test_a_teardown_deletes_the_keys_of_its_service_and_says_how_many(
    service: Service, tmp_path: Path
) -> None:
    service.deploy("trainer")
    with service.client() as client:
        store = KeyStore(client, tmp_path)
        assert store.put("trainer/ckpt", {"x": b"1"}).service == "trainer"
        store.put("trainer/best", b"1", lifespan="cluster")
        store.put("scratch", b"1", lifespan="resource", service="trainer")
        store.put("trainers", b"1")
        path = f"{routes.workload('default', 'trainer')}?grace=0"
        status, answer = service.request("DELETE", path)
        assert (status, answer["keys"]) == (200, 2)
        assert store.ls() == ["trainer/", "trainers"]
        assert store.get("trainer") == {"best": b"1"}


@pytest.mark.parametrize("key", ["", "/", "..", "a/..", "x\0y", "k" * 4096, "k" * 300, "é" * 600])
def test_what_is_no_path_is_refused(store: KeyStore, key: str) -> None:
    with pytest.raises(DataStoreError, match="the key"):
        store.put(key, b"1")
    if key.strip("/.a"):
        with pytest.raises(DataStoreError, match="the key"):
            store.ls(key)
