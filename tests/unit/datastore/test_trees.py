from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kubetorch.datastore import trees
from kubetorch.datastore.blobs import BlobStore, digest_of
from kubetorch.datastore.slots import CodeSlots
from kubetorch.datastore.trees import Entry, build, decode
from kubetorch.datastore.tuning import LIMITS
from kubetorch.errors import DataStoreError, ProjectTooLargeError

EMPTY = digest_of(b"")


def file(path: str, **changes: object) -> Entry:
    return msgspec.structs.replace(Entry(path, "file", 0, EMPTY), **changes)


def link(path: str, target: str) -> Entry:
    return Entry(path, "symlink", target=target)


def encoded(*entries: Entry) -> bytes:
    return msgspec.msgpack.encode(entries)


def test_a_tree_survives_encoding() -> None:
    tree = build([link("b/l", "../a.py"), file("a.py"), file("b/x", mode="executable", size=3)])
    assert [entry.path for entry in tree.entries] == ["a.py", "b/l", "b/x"]
    assert decode(tree.encoded) == tree
    assert tree.digest == digest_of(tree.encoded)


def test_the_digest_depends_on_content_and_not_on_order() -> None:
    entries = [file("a"), file("b"), link("c", "a")]
    digest = build(entries).digest
    assert build(reversed(entries)).digest == digest
    for changed in (
        [file("a", mode="executable"), *entries[1:]],
        [file("a", digest=digest_of(b"1"), size=1), *entries[1:]],
        [*entries[:2], link("c", "b")],
        entries[1:],
    ):
        assert build(changed).digest != digest


def test_an_empty_tree_is_a_tree() -> None:
    tree = build([])
    assert decode(tree.encoded).entries == ()
    assert tree.digests() == []


def test_digests_are_named_once() -> None:
    digest = digest_of(b"1")
    tree = build(
        [file("a", digest=digest, size=1), file("b", digest=digest, size=1), link("c", "a")]
    )
    assert tree.digests() == [digest]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/etc/passwd", "absolute"),
        ("../up", "'..'"),
        ("a/../../up", "'..'"),
        ("a/./b", "'.'"),
        ("", "empty component"),
        ("a//b", "empty component"),
        ("a/", "empty component"),
        ("/", "absolute"),
        (".", "'.'"),
        ("..", "'..'"),
        ("a\0b", "NUL"),
        ("a" * 256, "too long"),
        ("ä" * 128, "too long"),
        ("a/" * 2500 + "a", "too long"),
    ],
)
def test_a_path_that_must_not_be_written_is_refused_and_named(path: str, why: str) -> None:
    with pytest.raises(DataStoreError, match="entry") as caught:
        decode(encoded(file(path)))
    assert repr(path)[:60] in str(caught.value)
    assert why in str(caught.value)


def test_a_path_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(DataStoreError, match="UTF-8"):
        trees.check([file("\udcff")])
    raw = encoded(file("zz")).replace(b"\xa2zz", b"\xa2\xff\xfe")
    with pytest.raises(DataStoreError, match="not a tree"):
        decode(raw)


@pytest.mark.parametrize("name", ["ä", "…", "a b", "a\nb", "-rf", "~", "*", "...", "..a", "CON"])
def test_unusual_names_are_names(name: str) -> None:
    assert decode(encoded(file(f"d/{name}"))).entries[0].path == f"d/{name}"


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("l", "/etc/passwd"),
        ("l", ".."),
        ("l", "../x"),
        ("d/l", "../../x"),
        ("d/l", "../.."),
        ("d/l", "a/../../../x"),
        ("d/l", "a/../b"),  # a may be a link itself: a step up behind it leads anywhere
        ("d/l", "a/.."),
        ("l", ""),
        ("l", "a//b"),
        ("l", "a/"),
        ("l", "a\0b"),
        ("l", "./a"),
        ("l", "a/."),
        ("l", "\\\0"),
    ],
)
def test_a_link_that_leaves_the_tree_or_may_do_so_is_refused(path: str, target: str) -> None:
    with pytest.raises(DataStoreError, match=f"{path!r} is a link to"):
        decode(encoded(link(path, target)))


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("l", "a"),
        ("l", "."),
        ("d/l", ".."),
        ("d/l", "../x"),
        ("d/l", "..a"),
        ("a/b/l", "../../c/d"),
    ],
)
def test_a_link_within_the_tree_is_taken(path: str, target: str) -> None:
    assert decode(encoded(link(path, target))).entries[0].target == target


@pytest.mark.parametrize(
    "entries",
    [
        (file("a"), file("a/b")),
        (file("a"), file("a.b"), file("a/b/c")),
        (link("a", "x"), file("a/b")),
        (Entry("a", "folder"), file("a/b")),
    ],
)
def test_a_file_that_is_also_a_folder_is_refused(entries: tuple[Entry, ...]) -> None:
    with pytest.raises(DataStoreError, match="'a' is a file, a link or empty, and a folder"):
        decode(encoded(*entries))


def test_entries_twice_or_out_of_order_are_refused() -> None:
    with pytest.raises(DataStoreError, match="'a' is there twice"):
        decode(encoded(file("a"), file("a")))
    with pytest.raises(DataStoreError, match="'a' is out of order"):
        decode(encoded(file("b"), file("a")))


@pytest.mark.parametrize(
    "entry",
    [
        file("a", digest="0" * 63),
        file("a", digest="Z" * 64),
        file("a", digest="../../../../" + "0" * 52),
        file("a", size=-1),
        file("a", target="b"),
        Entry("a", "symlink", 3, "", "b"),
        Entry("a", "symlink", 0, EMPTY, "b"),
        Entry("a", "folder", 3),
        Entry("a", "folder", 0, EMPTY),
        Entry("a", "folder", 0, "", "b"),
    ],
)
def test_an_entry_whose_content_makes_no_sense_is_refused(entry: Entry) -> None:
    with pytest.raises(DataStoreError, match="entry 'a'"):
        decode(encoded(entry))


@pytest.mark.parametrize("mode", ["device", "fifo", "directory", "", 3])
def test_an_entry_that_is_neither_file_nor_link_is_refused(mode: object) -> None:
    with pytest.raises(DataStoreError, match="not a tree"):
        decode(msgspec.msgpack.encode([["a", mode, 0, EMPTY, ""]]))


def test_a_second_encoding_of_the_same_tree_is_refused() -> None:
    short = msgspec.msgpack.encode([["a", "file", 0, EMPTY]])  # the default left out
    assert build([file("a")]).encoded != short
    with pytest.raises(DataStoreError, match="encoded in a way"):
        decode(short)


def test_a_tree_of_too_many_entries_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(tuple):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return LIMITS.tree_entries + 1

    with pytest.raises(ProjectTooLargeError, match="100,001 files"):
        trees.check(Endless())


def test_a_tree_that_claims_too_much_is_refused_before_it_is_decoded() -> None:
    for head in (b"\xdd\x00\x01\x86\xa1", b"\xdd\xff\xff\xff\xff"):
        with pytest.raises(ProjectTooLargeError, match="files; 100,000 are allowed"):
            decode(head)
    with pytest.raises(ProjectTooLargeError, match="files of 536,870,913 bytes"):
        build([Entry("a", "file", 512 * 1024**2 + 1, EMPTY)])


def test_a_tree_of_long_paths_is_refused_by_its_size(tmp_path: Path) -> None:
    store, data = BlobStore(tmp_path), bytes(LIMITS.tree_encoded_bytes + 1)
    store.put(digest_of(data), data)
    with pytest.raises(ProjectTooLargeError, match="a list of files of 16,777,217 bytes"):
        trees.read(store, digest_of(data))


def test_a_file_that_is_a_folder_too_is_found_among_names_that_sort_between() -> None:
    with pytest.raises(DataStoreError, match="'a/b' is a file, a link or empty, and a folder"):
        build([file("a/b"), file("a/b!c"), file("a/b-d"), file("a/b/e")])


# ------------------------------------------------------------------------------------ properties

_NAMES = st.one_of(
    st.sampled_from(["a", "b", "ab", "a.py", ".", "..", "", "...", "/", "a\0", "\udc80", " ", "ä"]),
    st.text(max_size=3),
)
_PATHS = st.one_of(
    st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=4).map("/".join),
    st.lists(_NAMES, max_size=4).map("/".join),
)
_TARGETS = st.one_of(
    st.lists(st.sampled_from(["a", "b", "c", ".."]), min_size=1, max_size=6).map("/".join),
    st.lists(_NAMES, max_size=4).map("/".join),
    st.sampled_from([".", "..", "/", "/etc", "../..", "a/..", "/proc/self/cwd"]),
)
_ENTRIES = st.one_of(
    st.builds(file, _PATHS),
    st.builds(link, _PATHS, _TARGETS),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(_ENTRIES, max_size=6))
def test_what_is_accepted_stays_in_the_folder_that_it_is_written_to(entries: list[Entry]) -> None:
    try:
        tree = build(entries)
    except DataStoreError:
        return
    assert decode(tree.encoded) == tree
    with tempfile.TemporaryDirectory() as folder:
        outside = Path(folder, "outside")
        slot = CodeSlots(outside / "code").update(tree, lambda digest: (0, ()), "project")
        root = os.path.realpath(slot.path)
        for entry in tree.entries:
            path = slot.path / entry.path
            assert os.path.lexists(path)
            assert path.is_symlink() == (entry.mode == "symlink")
            inner = os.path.realpath(path)
            assert inner == root or inner.startswith(f"{root}/")


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_damaged_encoding_is_a_data_store_error_or_another_tree(data: st.DataObject) -> None:
    tree = build([file("a/b.py"), file("a/c.py", mode="executable"), link("l", "a")])
    damaged = bytearray(tree.encoded)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.integers(0, len(damaged)))]
    try:
        decoded_tree = decode(bytes(damaged))
    except (DataStoreError, ProjectTooLargeError):
        return
    assert decoded_tree.encoded == damaged
    assert build(decoded_tree.entries).digest == digest_of(bytes(damaged))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_a_data_store_error(garbage: bytes) -> None:
    try:
        decode(garbage)
    except (DataStoreError, ProjectTooLargeError):
        return
    assert garbage == build([]).encoded
