"""The cache of chunks: what it remembers of files, also where clocks differ."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kubetorch.datastore.chunk_cache import ChunkCache

SECOND = 10**9
CONTENT = (("d" * 64, 3),)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "file"
    file.write_text("abc")
    return file


def remembered(tmp_path: Path, file: Path, read_ns: int) -> bool:
    """Whether a file is taken as it was, which was read at a time of this machine's clock."""
    cache = ChunkCache(tmp_path / "cache", "root")
    cache.add(str(file), file.stat(), CONTENT, read_ns)
    cache.save()
    return ChunkCache(tmp_path / "cache", "root").content(str(file), file.stat()) == CONTENT


@pytest.mark.parametrize("seconds", [-3600, -10, 0, 1.9])
def test_a_file_of_a_server_whose_clock_is_ahead_is_read_each_time(
    file: Path, tmp_path: Path, seconds: float
) -> None:
    read_ns = file.stat().st_ctime_ns + int(seconds * SECOND)
    assert not remembered(tmp_path, file, read_ns)


@pytest.mark.parametrize("seconds", [2.1, 10, 3600])
def test_a_file_of_a_server_whose_clock_is_behind_is_read_again_when_its_time_differs(
    file: Path, tmp_path: Path, seconds: float
) -> None:
    before = file.stat()
    assert remembered(tmp_path, file, before.st_ctime_ns + int(seconds * SECOND))
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # the clock's next tick
        file.write_text("xyz")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    cache = ChunkCache(tmp_path / "cache", "root")
    assert cache.content(str(file), before) == CONTENT
    assert cache.content(str(file), file.stat()) is None
