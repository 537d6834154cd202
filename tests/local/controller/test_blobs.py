"""Blobs: what is stored is what was named, whatever comes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from kubetorch.datastore import transfer
from kubetorch.datastore.blobs import BlobStore, digest_of
from kubetorch.sdk.controller import Controller
from kubetorch.wire import blobs as records
from kubetorch.wire import routes
from tests.local.service_harness import FAKE, Service, pack


@pytest.fixture(scope="module")
def service(shared_service_home: Path) -> Iterator[Service]:
    service = Service(shared_service_home, FAKE).start()
    yield service
    service.terminate()


def names(*blobs: bytes) -> bytes:
    return json.dumps({"blobs": [digest_of(blob) for blob in blobs]}).encode()


def missing(service: Service, *blobs: bytes) -> list[str]:
    status, answer = service.request("POST", routes.BLOBS_MISSING, names(*blobs))
    assert status == 200
    return answer["missing"]  # type: ignore[no-any-return]


def left_over(service: Service) -> list[Path]:
    return list((service.home / "blobs" / "tmp").glob("*"))


def test_stored_blobs_are_not_missing_and_come_back(service: Service, tmp_path: Path) -> None:
    blobs = [b"one", b"two" * 1_000_000, b""]
    assert len(missing(service, *blobs)) == 3
    assert service.request("POST", routes.BLOBS, pack(blobs)) == (200, {"stored": 3})
    assert missing(service, *blobs, b"three") == [digest_of(b"three")]
    store = BlobStore(tmp_path)
    receiver = transfer.Receiver(store)
    with (
        service.client() as client,
        client.request("POST", routes.BLOBS_FETCH, body=names(*blobs)) as response,
    ):
        receiver.feed(response.read())
    assert len(receiver.finish()) == 3
    assert [store.read(digest_of(blob)) for blob in blobs] == blobs


def test_blobs_come_back_whether_they_compress_or_not(service: Service) -> None:
    blobs = [b"x = 1\n" * 100, os.urandom(100_000), b"y = 2\n" * 100]
    service.request("POST", routes.BLOBS, pack(blobs))
    with service.client() as client:
        content = Controller(client).get_blobs([digest_of(blob) for blob in blobs], "default")
    assert list(content.values()) == blobs


def test_a_blob_that_is_not_here_cannot_be_fetched(service: Service) -> None:
    status, answer = service.request("POST", routes.BLOBS_FETCH, names(b"nobody has this"))
    assert (status, answer["error_type"]) == (404, "DataStoreError")


@pytest.mark.faults
def test_fault_a_poisoned_blob_is_refused_and_not_stored(service: Service) -> None:
    record = records.pack(digest_of(b"good"), 4) + b"evil"
    status, answer = service.request("POST", routes.BLOBS, zstandard.compress(record))
    assert (status, answer["error_type"]) == (400, "DataStoreError")
    assert "poisoned" in answer["message"]
    assert missing(service, b"good") == [digest_of(b"good")]
    assert left_over(service) == []


@pytest.mark.faults
def test_fault_a_truncated_stream_stores_only_what_is_whole(service: Service) -> None:
    whole = records.pack(digest_of(b"whole"), 5) + b"whole"
    cut = records.pack(digest_of(b"cut short"), 9) + b"cut"
    status, _ = service.request("POST", routes.BLOBS, zstandard.compress(whole + cut))
    assert status == 400
    assert missing(service, b"whole", b"cut short") == [digest_of(b"cut short")]
    assert left_over(service) == []


@pytest.mark.parametrize("body", [b"garbage", b"\x28\xb5\x2f\xfd\x04garbage"])
@pytest.mark.faults
def test_fault_garbage_is_no_stream(service: Service, body: bytes) -> None:
    assert service.request("POST", routes.BLOBS, body)[0] == 400
    assert service.request("GET", routes.STATUS)[0] == 200


@pytest.mark.faults
def test_fault_a_body_bomb_is_refused_before_it_unfolds(service: Service) -> None:
    length = 7 * 1024**3
    head = records.pack("0" * 64, length)
    compressor = zstandard.ZstdCompressor(level=19).compressobj()
    bomb = compressor.compress(head) + compressor.compress(bytes(1 << 26)) + compressor.flush()
    status, answer = service.request("POST", routes.BLOBS, bomb)
    assert (status, answer["error_type"]) == (400, "ProtocolError")
    assert "too much" in answer["message"]
    assert left_over(service) == []


@pytest.mark.faults
def test_fault_a_stream_that_wants_much_memory_is_refused(service: Service) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    body = compressor.compress(records.pack("0" * 64, 1 << 28) + bytes(1 << 28))
    assert service.request("POST", routes.BLOBS, body)[0] == 400
    assert left_over(service) == []


def test_a_client_that_goes_away_leaves_nothing_half_written(service: Service) -> None:
    data = bytes(8 * 1024 * 1024)

    def cut() -> Iterator[bytes]:
        yield zstandard.ZstdCompressor().compressobj().compress(b"")
        yield pack([data])[:-10]
        raise ConnectionError("the client goes away")

    with service.client() as client, pytest.raises(ConnectionError):
        client.request("POST", routes.BLOBS, body=cut())
    deadline = time.monotonic() + 20.0
    while left_over(service):
        assert time.monotonic() < deadline
        time.sleep(0.01)
