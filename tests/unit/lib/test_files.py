"""Files that are whole or not there, and locks between processes."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest

from kubetorch.lib.files import FileLock, has_writer, tail, write_atomically


def test_a_file_is_replaced_at_once_and_its_mode_is_the_users_own(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_atomically(file, b"one")
    write_atomically(file, b"two")
    assert file.read_bytes() == b"two"
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_could_not_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path / "folder", b"data")
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


def test_the_last_lines_of_a_file_are_read_from_its_end(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("one\ntwo\nthree\n")
    assert tail(file, 2) == ["two", "three"]
    assert tail(file, 9) == ["one", "two", "three"]
    assert tail(file, 9, limit_bytes=8) == ["o", "three"]
    assert tail(tmp_path / "none", 9) == []


@pytest.mark.skipif(sys.platform != "linux", reason="leases tell it")
def test_a_file_has_a_writer_as_long_as_it_is_open_or_mapped_for_writing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(4096))
    with file.open("rb") as reader:
        assert not has_writer(reader.fileno())
        with file.open("r+b") as writer:
            mapped = mmap.mmap(writer.fileno(), 4096)
            assert has_writer(reader.fileno())
        assert has_writer(reader.fileno())
        mapped.close()
        assert not has_writer(reader.fileno())


def test_a_lock_is_held_by_one_until_it_is_closed(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert first.get_at_once()
    assert not second.get_at_once()
    first.close()
    assert second.get(0.0)
    second.close()


def test_a_lock_comes_to_who_waits_for_it(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path), FileLock(tmp_path)  # a folder's
    assert first.get_at_once()
    assert not second.get(0.0)
    first.close()
    assert second.get(10.0)
    second.close()


def test_who_has_given_up_a_lock_lets_it_go_when_it_comes(tmp_path: Path) -> None:
    first, second, third = (FileLock(tmp_path / "lock") for _ in range(3))
    assert first.get_at_once()
    assert not second.get(0.0)
    second.close()
    first.close()
    assert third.get(10.0)
    third.close()
