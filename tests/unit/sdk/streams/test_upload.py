"""Cutting a payload into chunks."""

from __future__ import annotations

import random

from kubetorch.sdk.streams.upload import Upload
from kubetorch.wire import codecs, frames


def upload(segments: list[bytes]) -> tuple[Upload, bytes]:
    total = codecs.layout(map(len, segments))[1]
    return Upload(7, segments, total), b"".join(codecs.join(segments))


def test_chunks_are_full_and_together_the_payload() -> None:
    numbers = random.Random(1)
    segments = [numbers.randbytes(numbers.randrange(400_000)) for _ in range(20)]
    segments.insert(3, b"")
    item, payload = upload(segments)
    chunks = []
    while not item.is_done:
        assert item.can_send
        chunks.append(b"".join(item.take()))
        item.grant(len(chunks[-1]))
    assert b"".join(chunks) == payload
    assert {len(chunk) for chunk in chunks[:-1]} == {frames.CHUNK}
    assert not item.can_send


def test_nothing_is_sent_beyond_what_was_granted() -> None:
    item, _ = upload([bytes(3 * frames.WINDOW)])
    sent = 0
    while item.can_send:
        sent += sum(map(len, item.take()))
    assert sent == frames.WINDOW
    item.grant(frames.CHUNK - 1)
    assert not item.can_send
    item.grant(1)
    assert item.can_send


def test_the_last_chunk_needs_only_its_own_room() -> None:
    item, _ = upload([bytes(frames.WINDOW + 10)])
    while item.can_send:
        item.take()
    item.grant(9)
    assert not item.can_send
    item.grant(1)
    assert sum(map(len, item.take())) == 10
    assert item.is_done


def test_rewinding_begins_again_with_a_whole_window() -> None:
    item, payload = upload([b"a" * 300_000, b"b" * 300_000])
    first = b"".join(item.take())
    item.rewind()
    assert b"".join(item.take()) == first
    rest = []
    while not item.is_done:
        rest.append(b"".join(item.take()))
    assert first + b"".join(rest) == payload


def test_a_chunk_of_many_small_pieces_is_put_together() -> None:
    item, payload = upload([b"x" * 65] * 5000)
    parts = item.take()
    assert len(parts) == 1
    assert bytes(parts[0]) == payload[: frames.CHUNK]
