"""Names of keys, and their files: written at once, read at the start, and nothing but them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kubetorch.datastore import keys
from kubetorch.datastore.blobs import digest_of
from kubetorch.datastore.key_folder import KeyFolder
from kubetorch.errors import DataStoreError
from kubetorch.wire.data import KeyView


def view(key: str, version: int = 1) -> KeyView:
    return KeyView(key=key, kind="folder", manifest=digest_of(key.encode()), version=version)


def file_of(root: Path, key: str) -> Path:
    return root / digest_of(key.encode())


def names(folder: KeyFolder) -> list[str]:
    return [listed.key for listed in folder.beginning("")]


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("a/b", "a/b"),
        ("/a//b/", "a/b"),
        ("./a/./b", "a/b"),
        ("../../etc/passwd", "etc/passwd"),
        ("a/../..", ""),
        ("...", "..."),
        ("k" * 255, "k" * 255),
    ],
)
def test_a_key_is_a_path_below_its_namespace(key: str, path: str) -> None:
    assert keys.canonical(key) == path


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("a\0", "has a control character"),
        ("a\nkey put", "has a control character"),
        ("a\x1b[2J", "has a control character"),
        ("a\x85b", "has a control character"),
        ("a\u2028b", "has a control character"),
        ("\ud800", "is no valid Unicode text"),
        ("k" * 256, "a name of 256"),
        ("k/" * 513, "has 1,025 bytes"),
    ],
)
def test_a_key_that_is_no_path_is_refused_by_its_name(key: str, why: str) -> None:
    with pytest.raises(DataStoreError, match=why) as caught:
        keys.canonical(key)
    assert key[:80].encode(errors="replace") in caught.value.message.encode(errors="replace") or (
        ascii(key)[1:-1] in caught.value.message
    )


def test_what_is_on_disk_is_what_a_new_start_knows(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "ns")
    for key in ("b", "a/x", "a", "a-b", "a/y/z"):
        folder.put(view(key))
    folder.put(view("b", version=2))
    folder.remove(["a/x"])
    again = KeyFolder(tmp_path / "ns")
    assert names(folder) == names(again) == ["a", "a-b", "a/y/z", "b"]
    above, exact, below = again.around("a/y")
    assert above == view("a")
    assert exact is None
    assert below == [view("a/y/z")]
    assert again.around("b").exact == view("b", version=2)


def test_a_damaged_file_is_left_out_with_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = KeyFolder(tmp_path)
    for key in ("a", "b", "c", "d", "e"):
        folder.put(view(key))
    flipped = bytearray(file_of(tmp_path, "a").read_bytes())
    flipped[-20] ^= 1
    file_of(tmp_path, "a").write_bytes(flipped)
    file_of(tmp_path, "b").write_bytes(b"")
    file_of(tmp_path, "c").write_bytes(file_of(tmp_path, "d").read_bytes())
    file_of(tmp_path, "d").unlink()
    with caplog.at_level(logging.WARNING):
        assert names(KeyFolder(tmp_path)) == ["e"]
    assert [str(file_of(tmp_path, key)) in caplog.text for key in "abcde"] == [
        True,
        True,
        True,
        False,
        False,
    ]
    folder = KeyFolder(tmp_path)
    folder.put(view("a"))
    assert names(KeyFolder(tmp_path)) == ["a", "e"]


def test_a_put_that_was_killed_before_it_removed_keys_removes_them_at_the_next_start(
    tmp_path: Path,
) -> None:
    folder = KeyFolder(tmp_path)
    folder.put(view("a/x"))
    folder.put(view("a/y"))
    before = {key: file_of(tmp_path, key).read_bytes() for key in ("a/x", "a/y")}
    folder.put(view("a"), ["a/x"])
    file_of(tmp_path, "a/x").write_bytes(before["a/x"])
    (tmp_path / ".half-written.123").write_bytes(b"half")
    assert names(KeyFolder(tmp_path)) == ["a", "a/y"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        digest_of(key.encode()) for key in ("a", "a/y")
    )


def test_a_key_that_is_put_after_its_removal_stays(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path)
    folder.put(view("a/x"))
    folder.put(view("a"), ["a/x"])
    KeyFolder(tmp_path).put(view("a/x", version=7))
    assert names(KeyFolder(tmp_path)) == ["a", "a/x"]
