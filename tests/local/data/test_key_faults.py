"""The data store when something breaks: nothing half-written, and errors that say what."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kubetorch.datastore.blobs import digest_of
from kubetorch.errors import DataStoreError, KubetorchError
from kubetorch.wire.data import FindKeys
from tests.local.key_store import KeyStore
from tests.local.service_harness import FAKE, Service

pytestmark = pytest.mark.faults


@pytest.fixture
def service(service_home: Path) -> Iterator[Service]:
    service = Service(service_home, FAKE).start()
    yield service
    service.terminate()


@contextmanager
def opened(service: Service, folder: Path) -> Iterator[KeyStore]:
    with service.client() as client:
        yield KeyStore(client, folder)


def test_of_puts_of_one_key_at_once_the_last_wins_whole(service: Service, tmp_path: Path) -> None:
    def put(number: int) -> int:
        text = str(number).encode()
        with opened(service, tmp_path / str(number)) as store:
            return store.put("k", {"a": text, "b": text}).version

    with ThreadPoolExecutor(8) as threads:
        versions = list(threads.map(put, range(40)))
    assert sorted(versions) == list(range(1, 41))
    winner = str(versions.index(40)).encode()
    with opened(service, tmp_path / "reader") as store:
        assert store.get("k") == {"a": winner, "b": winner}


def test_a_controller_killed_in_puts_has_the_old_or_the_new_version_of_each_key(
    service: Service, tmp_path: Path
) -> None:
    acknowledged = dict.fromkeys(range(8), 0)
    progress = threading.Condition()

    def put(number: int) -> None:
        with opened(service, tmp_path / str(number)) as store, suppress(KubetorchError, OSError):
            for version in range(1, 10_000):
                text = str(version).encode()
                store.put(f"k/{number}", {"a": text, "b": text})
                with progress:
                    acknowledged[number] = version
                    progress.notify()

    with ThreadPoolExecutor(8) as threads:
        jobs = [threads.submit(put, number) for number in range(8)]
        with progress:
            assert progress.wait_for(lambda: min(acknowledged.values()) > 2, 60)
        service.kill()
    for job in jobs:
        job.result(60)
    service.start()
    with opened(service, tmp_path / "after") as store:
        for number, version in acknowledged.items():
            (part,) = store.client.find(FindKeys(path=f"k/{number}")).keys
            assert part.key.version in (version, version + 1)
            text = str(part.key.version).encode()
            assert store.get(f"k/{number}") == {"a": text, "b": text}


def test_a_flipped_bit_in_a_stored_blob_is_noticed_and_removed_and_a_put_heals_it(
    service: Service, tmp_path: Path
) -> None:
    files = {"a": b"whole", "b": b"other"}
    blob = service.home / "blobs" / digest_of(b"whole")[:2] / digest_of(b"whole")
    with (
        opened(service, tmp_path / "putter") as putter,
        opened(service, tmp_path / "getter") as getter,
    ):
        putter.put("k", files)
        blob.write_bytes(b"wholE")
        with pytest.raises(KubetorchError):
            getter.get("k")
        assert not blob.exists()
        with pytest.raises(DataStoreError, match=f"1 blobs are not here, such as {blob.name}"):
            getter.get("k")
        putter.put("k", files)
        assert getter.get("k") == files


def test_without_the_database_all_keys_are_there(service: Service, tmp_path: Path) -> None:
    with opened(service, tmp_path / "a") as store:
        store.put("k/1", {"a": b"1"})
        store.put("k/2", b"2")
    service.terminate()
    for file in service.home.glob("state.sqlite*"):
        file.unlink()
    service.start()
    with opened(service, tmp_path / "b") as store:
        assert store.get("k") == {"1/a": b"1", "2": b"2"}


def test_a_hundred_getters_at_once_have_all_of_it(service: Service, tmp_path: Path) -> None:
    files = {f"{number}": bytes([number]) * 100_000 for number in range(20)}
    with opened(service, tmp_path / "putter") as store:
        store.put("k", files)

    def get(number: int) -> bool:
        with opened(service, tmp_path / str(number % 10)) as store:
            return store.get("k") == files

    with ThreadPoolExecutor(100) as threads:
        assert all(threads.map(get, range(100)))
