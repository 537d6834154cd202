"""Files as chunks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kubetorch.datastore.blobs import digest_of
from kubetorch.datastore.chunks import cut
from kubetorch.datastore.tuning import LIMITS

MIB = 1024**2


def pieces(path: Path, size: int | None = None) -> list[tuple[int, int, bytes | None]]:
    with path.open("rb") as file:
        size = path.stat().st_size if size is None else size
        return [
            (offset, length, None if data is None else bytes(data))
            for offset, length, data, _ in cut(file.fileno(), size)
        ]


def digests(path: Path) -> list[str]:
    return [digest_of(data) for _, _, data in pieces(path) if data is not None]


def test_chunks_follow_each_other_and_have_all_bytes(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for size in (1, MIB, MIB + 1, 16 * MIB, 37 * MIB + 5):
        file.write_bytes(os.urandom(size))
        cuts = pieces(file)
        assert b"".join(data or b"" for _, _, data in cuts) == file.read_bytes()
        ends = [offset + length for offset, length, _ in cuts]
        assert [offset for offset, _, _ in cuts] == [0, *ends[:-1]]
        assert all(length <= LIMITS.largest_chunk_bytes for _, length, _ in cuts)


def test_an_empty_file_has_no_chunks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert pieces(tmp_path / "file") == []


def test_an_insertion_leaves_the_chunks_behind_it(tmp_path: Path) -> None:
    content = os.urandom(40 * MIB)
    before, after = tmp_path / "before", tmp_path / "after"
    before.write_bytes(content)
    after.write_bytes(content[: 5 * MIB] + b"inserted" + content[5 * MIB :])
    new = set(digests(after)) - set(digests(before))
    assert len(new) <= 2, "the chunk of the insertion, and at most the next one"


def test_borders_do_not_depend_on_the_blocks_in_which_a_file_is_read(tmp_path: Path) -> None:
    content = os.urandom(40 * MIB)
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    whole.write_bytes(content)
    border = pieces(whole)[2][0]
    rest.write_bytes(content[border:])
    assert digests(rest) == digests(whole)[2:]


def test_a_hole_is_a_chunk_without_bytes(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with file.open("wb") as opened:
        opened.truncate(8 * MIB)
        opened.seek(4 * MIB)
        opened.write(b"x" * 4096)
    assert pieces(file) == [
        (0, 4 * MIB, None),
        (4 * MIB, 4096, b"x" * 4096),
        (4 * MIB + 4096, 4 * MIB - 4096, None),
    ]


def test_a_file_that_became_shorter_ends_early(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    with pytest.raises(EOFError):
        pieces(tmp_path / "file", 200)
