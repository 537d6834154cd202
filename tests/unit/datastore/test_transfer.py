from __future__ import annotations

import os
import tracemalloc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from kubetorch.datastore.blobs import BlobStore, digest_of
from kubetorch.datastore.transfer import Receiver, compressed
from kubetorch.errors import DataStoreError, ProtocolError
from kubetorch.wire import blobs as records


@pytest.fixture
def sender_store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "here")


@pytest.fixture
def receiver_store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "there")


def temporary_files(store: BlobStore) -> list[str]:
    folder = store.root / "tmp"
    return [path.name for path in folder.iterdir()] if folder.exists() else []


def put(store: BlobStore, *contents: bytes) -> list[str]:
    digests = [digest_of(content) for content in contents]
    for digest, content in zip(digests, contents, strict=True):
        store.put(digest, content)
    return digests


@pytest.mark.parametrize("size", [1, 7, 4096, 10**9])
def test_blobs_arrive_however_the_stream_is_cut(
    sender_store: BlobStore, receiver_store: BlobStore, size: int
) -> None:
    large = os.urandom(700_000) if size > 1 else b"not so large"
    digests = put(sender_store, b"", b"a", large, b"x = 1\n" * 100)
    stream = b"".join(compressed(digests, sender_store.stream))
    receiver = Receiver(receiver_store)
    for begin in range(0, len(stream), size):
        receiver.feed(stream[begin : begin + size])
    assert receiver.finish() == digests
    receiver.close()
    assert [receiver_store.read(digest) for digest in digests] == [
        sender_store.read(d) for d in digests
    ]
    assert temporary_files(receiver_store) == []


def test_a_stream_without_blobs_is_a_stream(
    sender_store: BlobStore, receiver_store: BlobStore
) -> None:
    receiver = Receiver(receiver_store)
    for piece in compressed([], sender_store.stream):
        receiver.feed(piece)
    assert receiver.finish() == []


def test_sources_compress(sender_store: BlobStore) -> None:
    digests = put(sender_store, b"def f(x):\n    return x\n" * 5000)
    assert sum(map(len, compressed(digests, sender_store.stream))) < 2000


def test_a_blob_that_arrived_is_kept_when_the_stream_breaks(
    sender_store: BlobStore, receiver_store: BlobStore
) -> None:
    first, second = put(sender_store, os.urandom(200_000), os.urandom(200_000))
    stream = b"".join(compressed([first, second], sender_store.stream))
    receiver = Receiver(receiver_store)
    receiver.feed(stream[:-50_000])
    with pytest.raises(ProtocolError, match="truncated"):
        receiver.finish()
    receiver.close()
    assert receiver_store.missing([first, second]) == [second]
    assert temporary_files(receiver_store) == []


def test_a_poisoned_blob_in_a_stream_is_refused(receiver_store: BlobStore) -> None:
    def liar(digest: str) -> tuple[int, list[bytes]]:
        return 3, [b"bad"]

    receiver = Receiver(receiver_store)
    with pytest.raises(DataStoreError, match="poisoned"):
        for piece in compressed([digest_of(b"good")], liar):
            receiver.feed(piece)
    receiver.close()
    assert list(receiver_store.iterate()) == []
    assert temporary_files(receiver_store) == []


def test_a_source_that_gives_another_length_than_it_said_is_found_out(
    sender_store: BlobStore,
) -> None:
    with pytest.raises(DataStoreError, match="3 bytes, not 4"):
        list(compressed([digest_of(b"abc")], lambda digest: (4, [b"abc"])))


@pytest.mark.parametrize("garbage", [b"", b"\0" * 100, b"PK\x03\x04 no zstd at all"])
def test_garbage_is_a_protocol_error(receiver_store: BlobStore, garbage: bytes) -> None:
    receiver = Receiver(receiver_store)
    if garbage:
        with pytest.raises(ProtocolError, match="decompressed"):
            receiver.feed(garbage)
    receiver.close()


def test_a_bomb_is_refused_by_what_its_records_claim(receiver_store: BlobStore) -> None:
    claim = records.pack("0" * 64, 10**9)
    bomb = zstandard.ZstdCompressor().compress(claim + bytes(50_000_000))
    assert len(bomb) < 10_000
    receiver = Receiver(receiver_store, limit_bytes=10**8)
    with pytest.raises(ProtocolError, match="100000000 bytes are allowed"):
        receiver.feed(bomb)
    receiver.close()
    assert temporary_files(receiver_store) == []


def test_a_bomb_within_the_limits_never_lies_in_memory(receiver_store: BlobStore) -> None:
    content = 50_000_000
    bomb = zstandard.ZstdCompressor().compress(records.pack("0" * 64, content) + bytes(content))
    receiver = Receiver(receiver_store)
    tracemalloc.start()
    with pytest.raises(DataStoreError, match="poisoned"):
        receiver.feed(bomb)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    receiver.close()
    assert peak < 4_000_000


def test_a_stream_of_too_many_blobs_is_refused(
    sender_store: BlobStore, receiver_store: BlobStore
) -> None:
    def empty(digest: str) -> tuple[int, Iterator[bytes]]:
        return 0, iter(())

    receiver = Receiver(receiver_store, limit_blobs=10)
    with pytest.raises(ProtocolError, match="10 blobs"):
        for piece in compressed([digest_of(b"")] * 11, empty):
            receiver.feed(piece)


def test_a_stream_that_wants_too_much_memory_is_refused(receiver_store: BlobStore) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    greedy = compressor.compress(os.urandom(1_000_000)) + compressor.flush()
    receiver = Receiver(receiver_store)
    with pytest.raises(ProtocolError, match="decompressed"):
        receiver.feed(greedy)
    receiver.close()


def test_a_stream_may_bring_as_much_as_its_limit_says_and_no_more(
    sender_store: BlobStore, receiver_store: BlobStore
) -> None:
    digests = put(sender_store, b"a" * 100, b"b" * 50)
    stream = b"".join(compressed(digests, sender_store.stream))
    receiver = Receiver(receiver_store, limit_bytes=150, limit_blobs=2)
    receiver.feed(stream)
    assert receiver.finish() == digests
    for most in ({"limit_bytes": 149, "limit_blobs": 2}, {"limit_bytes": 150, "limit_blobs": 1}):
        receiver = Receiver(receiver_store, **most)
        with pytest.raises(ProtocolError, match="too much"):
            receiver.feed(stream)
        receiver.close()


def test_a_stream_comes_in_pieces_of_bounded_size(sender_store: BlobStore) -> None:
    digests = put(sender_store, *(os.urandom(700_000) for _ in range(4)))
    pieces = list(compressed(digests, sender_store.stream))
    assert len(pieces) > 4
    assert max(map(len, pieces)) < 2 << 20


def test_nothing_stays_of_a_receiver_that_is_done(
    sender_store: BlobStore, receiver_store: BlobStore
) -> None:
    receiver = Receiver(receiver_store)
    for piece in compressed(put(sender_store, b"once"), sender_store.stream):
        receiver.feed(piece)
    receiver.finish()
    receiver.close()
    receiver_reference = weakref.ref(receiver)
    del receiver
    assert receiver_reference() is None


def test_what_does_not_shrink_is_sent_as_it_is_between_what_does() -> None:
    contents = [os.urandom(300_000), b"text" * 100_000, b"", os.urandom(70_000), b"small"]
    blobs = {digest_of(data): data for data in contents}
    stream = b"".join(compressed(blobs, lambda digest: (len(blobs[digest]), [blobs[digest]])))
    incompressible = sum(len(data) for data in contents if len(data) in (300_000, 70_000))
    assert incompressible < len(stream) < incompressible + 5000
    assert contents[0][:100_000] in stream
    whole = zstandard.ZstdDecompressor().decompressobj(read_across_frames=True).decompress(stream)
    assert all(data in whole for data in contents)
