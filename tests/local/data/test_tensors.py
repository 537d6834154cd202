"""Tensors in the data store: versions, deltas, destinations and damage, near and far."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from kubetorch.datastore import manifests
from kubetorch.datastore.blobs import BlobStore, digest_of
from kubetorch.errors import DataStoreError
from kubetorch.sdk.controller import Controller
from kubetorch.sdk.data import client, tensors
from kubetorch.sdk.data.progress import Progress
from kubetorch.sdk.transport.session import Session
from tests.local.service_harness import FAKE, Service

MIB = 1024**2


@pytest.fixture(scope="module")
def service(shared_service_home: Path) -> Iterator[Service]:
    service = Service(shared_service_home, FAKE).start()
    yield service
    service.terminate()


class Weights:
    """A client of the store; `moved` are the bytes of its last transfer."""

    def __init__(self, session: Session, namespace: str) -> None:
        self.session = session
        self.namespace = namespace
        self.moved = 0

    def put(self, key: str, value: object) -> None:
        progress = Progress("storing", key)
        tensors.put(self.session, self.namespace, key, value, progress)
        self.moved = progress.moved

    def get(self, key: str, dest: object = None, *only: str) -> Any:
        progress = Progress("getting", key)
        view = client.find_key(self.session, self.namespace, key)
        value = tensors.get(self.session, self.namespace, key, view, dest, progress, only=only)
        self.moved = progress.moved
        return value


@pytest.fixture
def client_in(
    service: Service,
    shared_service_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., Weights]]:
    """Makes clients of one namespace; each far client has a cache of its own."""
    monkeypatch.setenv("KT_LOCAL_DIR", str(shared_service_home))

    def client(*, is_local: bool, cache: str = "cache") -> Weights:
        monkeypatch.setenv("KT_CACHE_DIR", str(tmp_path / cache))
        http = opened.enter_context(service.client())
        session = Session(lambda: Controller(http), is_local=is_local)
        return Weights(session, f"n{digest_of(bytes(tmp_path))[:20]}")

    with contextlib.ExitStack() as opened:
        yield client


@pytest.fixture(params=[True, False], ids=["on one machine", "from afar"])
def weights(client_in: Callable[..., Weights], request: pytest.FixtureRequest) -> Weights:
    return client_in(is_local=request.param)


def random_weights(seed: int = 0) -> dict[str, Any]:
    generator = numpy.random.default_rng(seed)
    return {
        "layers": [{"w": generator.standard_normal((1024, 1025), "f4")} for _ in range(3)],
        "bias": numpy.ones(7, "f2"),
        "step": seed,
    }


def test_tensors_come_back_and_fill_a_destination(weights: Weights) -> None:
    value = random_weights()
    weights.put("run/w", value)
    back = weights.get("run/w")
    assert back["step"] == 0
    assert numpy.array_equal(back["layers"][2]["w"], value["layers"][2]["w"])
    dest = random_weights(1)
    weights.get("run/w", dest)
    assert numpy.array_equal(dest["layers"][0]["w"], value["layers"][0]["w"])
    assert dest["step"] == 0


def test_some_tensors_move_alone(client_in: Callable[..., Weights]) -> None:
    weights = client_in(is_local=False)
    value = random_weights()
    weights.put("w", value)
    getter = client_in(is_local=False, cache="other")
    part = getter.get("w", None, "layers.1.*")
    assert list(part) == ["layers"]
    assert numpy.array_equal(part["layers"][0]["w"], value["layers"][1]["w"])
    assert getter.moved < 1.5 * value["layers"][1]["w"].nbytes


@pytest.mark.parametrize(("is_scattered", "share"), [(True, 0.05), (False, 0.03)])
def test_a_version_travels_as_its_difference_to_the_one_before(
    client_in: Callable[..., Weights], is_scattered: bool, share: float
) -> None:
    generator = numpy.random.default_rng(5 + is_scattered)  # namespaces share blobs here
    value = {"w": generator.integers(0, 2**16, 4 * MIB, "u2")}
    size = value["w"].nbytes
    putter = client_in(is_local=False)
    putter.put("w", value)
    assert putter.moved > 0.9 * size
    getter = client_in(is_local=False, cache="getter")
    getter.get("w")
    changed = value["w"].copy()
    count = changed.size // 100
    where = generator.choice(changed.size, count) if is_scattered else slice(0, count)
    changed[where] = generator.integers(0, 2**16, count)
    putter = client_in(is_local=False)
    putter.put("w", {"w": changed})
    assert putter.moved <= share * size
    getter = client_in(is_local=False, cache="getter")
    assert numpy.array_equal(getter.get("w")["w"], changed)
    assert getter.moved <= share * size
    stranger = client_in(is_local=False, cache="stranger")
    assert numpy.array_equal(stranger.get("w")["w"], changed)


def test_a_cache_that_is_damaged_costs_a_transfer_and_no_more(
    client_in: Callable[..., Weights], tmp_path: Path
) -> None:
    weights = client_in(is_local=False)
    value = random_weights()
    weights.put("w", value)
    cache = BlobStore(tmp_path / "cache" / "tensors")
    for blob in list(cache.iterate()):
        if blob.size > MIB:
            with cache.path(blob.digest).open("r+b") as file:
                file.write(b"damage")
    value["layers"][0]["w"][5] += 1
    weights.put("w", value)
    back = client_in(is_local=False).get("w")
    assert numpy.array_equal(back["layers"][0]["w"], value["layers"][0]["w"])
    assert numpy.array_equal(back["layers"][1]["w"], value["layers"][1]["w"])


def test_a_damaged_blob_of_the_store_is_told_and_healed_by_the_next_put(
    weights: Weights, client_in: Callable[..., Weights], shared_service_home: Path
) -> None:
    value = {"w": numpy.random.default_rng(int(weights.session.is_local)).random(MIB)}
    weights.put("w", value)
    store = BlobStore(shared_service_home / "blobs")
    view = client.find_key(weights.session, weights.namespace, "w")
    assert view is not None
    damaged = manifests.read(store, view.manifest).entries[0].chunks[1].digest
    with store.path(damaged).open("r+b") as file:
        file.seek(100)
        file.write(b"damage")
    getter = client_in(is_local=weights.session.is_local, cache="another")
    dest = {"w": numpy.zeros(MIB)}
    with pytest.raises(DataStoreError):
        getter.get("w", dest)
    assert not dest["w"].any()
    weights.put("w", value)
    getter.get("w", dest)
    assert numpy.array_equal(dest["w"], value["w"])


def test_a_destination_that_does_not_fit_is_as_before(weights: Weights) -> None:
    weights.put("w", random_weights())
    dest = random_weights(2)
    dest["layers"][1]["w"] = numpy.zeros((3, 3), "f4")
    expected = dest["layers"][0]["w"].copy()
    with pytest.raises(DataStoreError, match=r"layers\.1\.w is \[1024, 1025\] in the store"):
        weights.get("w", dest)
    assert numpy.array_equal(dest["layers"][0]["w"], expected)
    with pytest.raises(DataStoreError, match="there is no key 'absent'"):
        weights.get("absent", dest)


def test_getters_see_one_version_whole_while_versions_are_put(weights: Weights) -> None:
    def version(number: int) -> dict[str, Any]:
        return {f"t{index}": numpy.full(2 * MIB, number, "i4") for index in range(3)}

    weights.put("w", version(0))
    versions: list[set[int]] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            value = weights.get("w")
            versions.append({int(number) for array in value.values() for number in array[::997]})

    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(1, 6):
        weights.put("w", version(number))
    is_over.set()
    watcher.join()
    assert versions
    assert all(len(numbers) == 1 for numbers in versions)
    assert max(versions[-1]) >= max(versions[0])


def test_a_hostile_file_of_tensors_is_refused(weights: Weights, service: Service) -> None:
    from tests.local.key_store import KeyStore

    header = b'{"a":{"dtype":"U8","shape":[99],"data_offsets":[0,99]}}'
    with service.client() as http:
        store = KeyStore(http, Path(str(weights.session)), weights.namespace)
        store.put("evil", len(header).to_bytes(8, "little") + header + b"xy")
    with pytest.raises(DataStoreError, match="no file of safetensors"):
        weights.get("evil", {"a": numpy.zeros(99, "u1")})
