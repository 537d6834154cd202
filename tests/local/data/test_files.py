"""Files and folders: what is put comes back byte for byte, and lands at its place."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from math import nan
from pathlib import Path

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kubetorch as kt
from kubetorch.datastore.tuning import TIMING
from kubetorch.sdk import backend
from tests.local.calling import until


@pytest.fixture(autouse=True, scope="module")
def store(shared_service_home: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_BACKEND", "local")
        yield
        backend.close_all()


@pytest.fixture(autouse=True)
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ------------------------------------------------------------------------------------ round trips

NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1)
_SAFE = NAMES.filter(
    lambda name: (
        name not in (".", "..", ".git", ".venv", ".gitignore", ".ktignore", "__pycache__")
        and len(name.encode()) < 200
        and not name.endswith(".pyc")
    )
)
MODES = st.sampled_from([0o644, 0o600, 0o755, 0o444, 0o640])
FOLDER_MODES = st.sampled_from([0o755, 0o700, 0o555])
CONTENTS = st.one_of(st.binary(max_size=300), st.integers(1, 300_000).map(lambda n: b"ab" * n))
FILES = st.tuples(CONTENTS, MODES)
TREES = st.recursive(
    st.dictionaries(_SAFE, FILES, max_size=4),
    lambda trees: st.dictionaries(
        _SAFE, st.one_of(FILES, st.tuples(trees, FOLDER_MODES), st.just("a link")), max_size=4
    ),
    max_leaves=8,
)


def write(folder: Path, tree: dict) -> None:
    for name, node in tree.items():
        path = folder / name
        if node == "a link":
            path.symlink_to("nowhere" if len(name) % 2 else "sub/file")
            continue
        content, mode = node
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.mkdir()
            write(path, content)
        path.chmod(mode)


def read(folder: Path) -> dict[str, tuple[int, object]]:
    """All below a folder: modes, and contents of files or targets of links."""
    entries: dict[str, tuple[int, object]] = {}
    for path in sorted(folder.rglob("*")):
        file_stat = path.lstat()
        content: object = None
        if stat.S_ISLNK(file_stat.st_mode):
            content = path.readlink()
        elif stat.S_ISREG(file_stat.st_mode):
            content = path.read_bytes()
        entries[str(path.relative_to(folder))] = (stat.S_IMODE(file_stat.st_mode), content)
    return entries


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(first=TREES, second=TREES)
def test_any_folder_survives_put_change_put_and_get(first: dict, second: dict) -> None:
    with tempfile.TemporaryDirectory() as name:
        source, fresh, updated = (Path(name) / part for part in ("source", "fresh", "updated"))
        source.mkdir()
        write(source, first)
        kt.put("any/tree", source, contents=True)
        if first:
            kt.get("any/tree", updated, contents=True)
            assert read(updated) == read(source)
        shutil.rmtree(source)
        source.mkdir()
        write(source, second)
        kt.put("any/tree", source, contents=True)
        if second:
            kt.get("any/tree", fresh, contents=True)
            assert read(fresh) == read(source)


def test_a_change_of_a_folder_reaches_what_an_earlier_get_wrote() -> None:
    source = Path("ckpt")
    source.mkdir()
    (source / "same").write_bytes(os.urandom(300_000))
    (source / "changed").write_bytes(b"old")
    kt.put("models/base", source, contents=True)
    kt.get("models/base", "local", contents=True)
    before = Path("local/same").stat()
    (source / "changed").write_bytes(b"new")
    (source / "added").write_bytes(b"added")
    (source / "same").chmod(0o600)
    kt.put("models/base", source, contents=True)
    kt.get("models/base", "local", contents=True)
    assert read(Path("local")) == read(source)
    assert Path("local/same").stat().st_ino == before.st_ino, "it was not fetched again"


def test_a_file_that_changed_at_the_destination_is_fetched_again() -> None:
    Path("data.txt").write_text("right")
    kt.put("data", "data.txt")
    kt.get("data", "out/")
    Path("out/data").write_text("wrong")
    kt.get("data", "out/")
    assert Path("out/data").read_text() == "right"


def test_force_fetches_a_file_that_is_there() -> None:
    Path("data.txt").write_text("right")
    kt.put("data", "data.txt", force=True)
    kt.get("data", "out/")
    before = Path("out/data").stat().st_ino
    kt.get("data", "out/")
    assert Path("out/data").stat().st_ino == before
    kt.get("data", "out/", force=True)
    assert Path("out/data").stat().st_ino != before


def test_a_reader_keeps_the_old_file_that_it_has_open() -> None:
    Path("data.txt").write_text("old")
    kt.put("data", "data.txt")
    kt.get("data", "out/")
    with Path("out/data").open() as reader:
        Path("data.txt").write_text("new")
        kt.put("data", "data.txt")
        kt.get("data", "out/")
        assert reader.read() == "old"
    assert Path("out/data").read_text() == "new"


def test_a_large_file_of_which_a_part_changed_sends_that_part(capfd) -> None:
    content = os.urandom(24 * 1024**2)
    Path("large").write_bytes(content)
    kt.put("large", "large")
    capfd.readouterr()
    Path("large").write_bytes(content[:5_000_000] + b"inserted" + content[5_000_000:])
    kt.put("large", "large", verbose=True)
    moved = float(capfd.readouterr().err.partition("of which ")[2].partition(" MB")[0])
    assert moved < 17, "at most two chunks of 8 MiB"
    kt.get("large", "out/")
    assert Path("out/large").read_bytes() == Path("large").read_bytes()


def test_holes_of_a_sparse_file_stay_holes() -> None:
    with Path("sparse").open("wb") as file:
        file.truncate(64 * 1024**2)
        file.seek(40 * 1024**2)
        file.write(b"in the middle")
    kt.put("sparse", "sparse")
    kt.get("sparse", "out/")
    assert Path("out/sparse").read_bytes() == Path("sparse").read_bytes()
    assert Path("out/sparse").stat().st_blocks * 512 < 1024**2


def test_bits_that_have_a_file_run_as_another_user_are_not_kept() -> None:
    Path("bits").mkdir()
    Path("bits/tool").write_text("#!/bin/sh")
    Path("bits/tool").chmod(0o6755)
    Path("bits").chmod(0o3755)
    kt.put("bits", "bits")
    kt.get("bits", "out", contents=True)
    assert stat.S_IMODE(Path("out/bits/tool").stat().st_mode) == 0o755
    assert stat.S_IMODE(Path("out/bits").stat().st_mode) == 0o755


def test_a_link_out_of_the_folder_is_stored_as_what_it_leads_to() -> None:
    for folder in ("blobs", "snapshot", "elsewhere"):
        Path(folder).mkdir()
    Path("blobs/1").write_text("weights")
    Path("elsewhere/inner").write_text("inner")
    Path("snapshot/model.bin").symlink_to("../blobs/1")
    Path("snapshot/folder").symlink_to("../elsewhere")
    Path("snapshot/loop").symlink_to("../snapshot")
    Path("snapshot/absolute").symlink_to(Path("snapshot/model.bin").absolute().parent / "folder")
    kt.put("hub", "snapshot", contents=True)
    kt.get("hub", "out", contents=True)
    assert Path("out/model.bin").read_text() == "weights"
    assert not Path("out/model.bin").is_symlink()
    assert Path("out/folder/inner").read_text() == "inner"
    assert Path("out/absolute/inner").read_text() == "inner"


def test_awaitable_forms_do_the_same() -> None:
    async def scenario() -> list[dict]:
        Path("data.txt").write_text("right")
        await kt.put_async("awaited/data", "data.txt")
        await kt.get_async("awaited/data", "out/")
        names = await kt.ls_async("awaited")
        await kt.rm_async("awaited/data")
        return names

    assert asyncio.run(scenario()) == [{"name": "data", "is_directory": False, "locale": "store"}]
    assert Path("out/data").read_text() == "right"
    assert kt.ls("awaited") == []


# -------------------------------------------------------------------------------------- placement


@pytest.fixture
def ckpt() -> Path:
    folder = Path("ckpt")
    (folder / "sub").mkdir(parents=True)
    (folder / "w.bin").write_text("weights")
    (folder / "sub" / "c.json").write_text("{}")
    return folder


def files(folder: str) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in Path(folder).rglob("*")
        if not path.is_dir() or path.is_symlink()
    }


def test_a_folder_lands_below_the_name_of_the_key_and_its_own(ckpt: Path) -> None:
    kt.put("place/a", "ckpt/")
    kt.get("place/a", "out")
    assert files("out") == {"a/ckpt/w.bin", "a/ckpt/sub/c.json"}
    kt.get("place/a", "flat", contents=True)
    assert files("flat") == {"ckpt/w.bin", "ckpt/sub/c.json"}


def test_contents_of_a_folder_land_below_the_name_of_the_key(ckpt: Path) -> None:
    kt.put("place/b", ckpt, contents=True)
    kt.get("/place/b/", "out")
    assert files("out") == {"b/w.bin", "b/sub/c.json"}


def test_a_single_file_has_the_name_of_its_key(ckpt: Path) -> None:
    kt.put("place/model.bin", ckpt / "w.bin")
    kt.get("place/model.bin")
    assert Path("model.bin").read_text() == "weights"
    kt.get("place/model.bin", dest="new.bin")
    assert Path("new.bin").read_text() == "weights"
    kt.get("place/model.bin", dest="folder")
    assert files("folder") == {"model.bin"}
    kt.get("place/model.bin", dest="with.suffix/")
    assert files("with.suffix") == {"model.bin"}
    Path("present").write_text("old")
    kt.get("place/model.bin", dest="present")
    assert Path("present").read_text() == "weights"


def test_a_single_file_with_contents_lands_in_a_folder_of_the_key(ckpt: Path) -> None:
    kt.put("place/c", ckpt / "w.bin", contents=True)
    kt.get("place/c", "out")
    assert files("out") == {"c/w.bin"}


def test_a_path_in_the_folder_of_a_key_can_be_read_alone(ckpt: Path) -> None:
    kt.put("place/d", ckpt)
    kt.get("place/d/ckpt/sub", "out")
    assert files("out") == {"sub/c.json"}
    kt.get("place/d/ckpt/w.bin", "one.bin")
    assert Path("one.bin").read_text() == "weights"


def test_a_path_above_keys_collects_all_of_them(ckpt: Path) -> None:
    kt.put("svc/train/0", ckpt / "w.bin")
    kt.put("svc/train/1", ckpt, contents=True)
    kt.get("/svc/train/", "out")
    assert files("out") == {"train/0", "train/1/w.bin", "train/1/sub/c.json"}
    kt.get("svc/train", "flat", contents=True)
    assert files("flat") == {"0", "1/w.bin", "1/sub/c.json"}


def test_a_key_below_another_hides_what_that_one_has_there(ckpt: Path) -> None:
    kt.put("hide", ckpt, contents=True)
    Path("newer").write_text("newer")
    kt.put("hide/w.bin", "newer")
    kt.get("hide", "out", contents=True)
    assert Path("out/w.bin").read_text() == "newer"
    assert files("out") == {"w.bin", "sub/c.json"}


def test_a_folder_without_files_is_made_at_the_destination() -> None:
    Path("nothing").mkdir()
    kt.put("q", "nothing", contents=True)
    kt.get("q", "out", contents=True)
    kt.get("q", "below")
    assert Path("out").is_dir()
    assert Path("below/q").is_dir()


@pytest.mark.skipif(sys.platform != "linux", reason="leases tell who has a file open")
def test_what_a_program_writes_to_a_mapped_file_is_stored_by_the_next_put() -> None:
    # In memory a write to a mapped page never moves the times of the file.
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        file = Path(name, "w.bin")
        mapped = numpy.memmap(file, "u1", "w+", shape=(3_000_000,))
        mapped[:] = 2
        mapped.flush()
        until(lambda: time.time() - file.stat().st_ctime > TIMING.racy_file_seconds + 0.1)
        kt.put("mapped", file)
        mapped[:] = 3
        mapped.flush()
        del mapped
        kt.put("mapped", file)
        kt.get("mapped", "out/")
        assert Path("out/mapped").read_bytes() == file.read_bytes()


def test_lists_of_keys_and_of_sources(ckpt: Path) -> None:
    Path("extra.txt").write_text("extra")
    kt.put(["many/x", "many/y"], [ckpt, "extra.txt"])
    kt.get(["many/x", "many/y"], "out")
    expected = {"ckpt/w.bin", "ckpt/sub/c.json", "extra.txt"}
    assert files("out") == {f"{key}/{name}" for key in "xy" for name in expected}


def test_of_several_keys_none_is_written_if_one_is_missing(ckpt: Path) -> None:
    kt.put("there", ckpt)
    with pytest.raises(kt.DataStoreError, match="there is no key 'missing' in namespace default"):
        kt.get(["there", "missing"], "out")
    assert not Path("out").exists()


@pytest.mark.parametrize("key", [["mixed/w", "mixed/file"], ["mixed/w"], "mixed"])
def test_tensors_among_several_keys_need_a_destination(ckpt: Path, key: str | list[str]) -> None:
    kt.put("mixed/file", ckpt / "w.bin")
    kt.put("mixed/w", {"w": numpy.ones(3)})
    before = files(".")
    with pytest.raises(ValueError, match="'mixed/w' holds tensors; a get of several keys writes"):
        kt.get(key)
    assert files(".") == before
    kt.get("mixed", "out")
    assert files("out") == {"mixed/file", "mixed/w"}


def test_an_error_of_ls_has_its_hint_on_a_line_of_its_own(capfd) -> None:
    assert kt.ls("k" * 2000, verbose=True) == []
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("kubetorch: kt.ls('kkk")
    assert lines[1].startswith("kubetorch: hint: ")


def test_what_is_at_the_destination_besides_stays(ckpt: Path) -> None:
    Path("out/b").mkdir(parents=True)
    Path("out/b/mine").write_text("mine")
    kt.put("place/b", ckpt, contents=True)
    kt.get("place/b", "out")
    assert files("out") == {"b/mine", "b/w.bin", "b/sub/c.json"}


def test_filters_choose_what_travels(ckpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (ckpt / ".gitignore").write_text("*.log\nout/\n")
    for name in ("a.log", "keep.log", "b.tmp", "x.pyc"):
        (ckpt / name).touch()
    kt.put("f", ckpt, contents=True, filter_options="--include=keep.log --exclude '*.tmp'")
    kt.get("f", "one", contents=True)
    assert files("one") == {".gitignore", "keep.log", "w.bin", "sub/c.json"}
    kt.get("f", "two", contents=True, filter_options="--exclude=sub")
    assert files("two") == {".gitignore", "keep.log", "w.bin"}
    monkeypatch.setenv("KT_RSYNC_FILTERS", "--exclude=*.bin")
    kt.put("g", ckpt, contents=True)
    kt.get("g", "three", contents=True)
    everything = {".gitignore", "a.log", "b.tmp", "keep.log", "x.pyc", "sub/c.json"}
    assert files("three") == everything


@pytest.mark.parametrize(
    "key", ["../up", "/absolute/key", "a/../../b", "über/日本/🗝", "Case", "case"]
)
def test_keys_stay_in_their_namespace(key: str, ckpt: Path) -> None:
    Path("source").write_text(key)
    kt.put(key, "source")
    kt.get(key, "result.txt")
    assert Path("result.txt").read_text() == key
    assert files(".") == {"source", "result.txt", "ckpt/w.bin", "ckpt/sub/c.json"}


# ----------------------------------------------------------------------------------------- errors


def test_what_cannot_be_put_is_a_value_error(ckpt: Path) -> None:
    with pytest.raises(ValueError, match="needs src"):
        kt.put("k")
    with pytest.raises(ValueError, match="Could not locate path to sync up: nowhere"):
        kt.put("k", "nowhere")
    with pytest.raises(ValueError, match="src is an empty path"):
        kt.put("k", "")
    with pytest.raises(ValueError, match="a path, a list of paths, or tensors"):
        kt.put("k", {"step": 3})
    with pytest.raises(ValueError, match='locale is \'moon\'; it can be "store" or "local"'):
        kt.put("k", ckpt, locale="moon")
    with pytest.raises(ValueError, match="lifespan is 'week'"):
        kt.put("k", ckpt, lifespan="week")
    with pytest.raises(ValueError, match="two of the sources have 'ckpt'"):
        kt.put("k", [ckpt, ckpt])
    with pytest.raises(RuntimeError, match="this program runs in none"):
        kt.put("k", ckpt, locale="local")
    for key in ("", "/", "x" * 4096, "n" * 300):
        with pytest.raises(kt.DataStoreError, match="the key"):
            kt.put(key, ckpt)
    assert kt.ls("k") == []


def test_an_absent_key_is_an_error_of_get_alone() -> None:
    with pytest.raises(kt.DataStoreError, match="there is no key 'absent' in namespace default"):
        kt.get("absent")
    assert kt.ls("absent") == []
    kt.rm("absent")


def test_a_folder_is_deleted_only_recursively(ckpt: Path) -> None:
    kt.put("gone", ckpt)
    with pytest.raises(RuntimeError, match="is a folder"):
        kt.rm("gone")
    kt.rm("gone", recursive=True)
    assert kt.ls("gone") == []
    kt.put(["prefix-1", "prefix-2", "other"], ckpt / "w.bin")
    kt.rm("prefix-", prefix=True)
    assert {row["name"] for row in kt.ls()} & {"prefix-1", "prefix-2", "other"} == {"other"}


def test_a_file_and_a_folder_do_not_replace_each_other_at_the_destination(ckpt: Path) -> None:
    kt.put("clash", ckpt, contents=True)
    Path("out/w.bin").mkdir(parents=True)
    with pytest.raises(kt.DataStoreError, match=r"out/w\.bin is a folder; the key has a file"):
        kt.get("clash", "out", contents=True)
    assert files("out") == set()
    Path("other").mkdir()
    Path("other/sub").write_text("mine")
    with pytest.raises(kt.DataStoreError, match="other/sub is a file; the key has a folder"):
        kt.get("clash", "other", contents=True)
    assert Path("other/sub").read_text() == "mine"


def test_a_link_in_place_of_a_folder_does_not_lead_a_get_elsewhere(ckpt: Path) -> None:
    Path("elsewhere").mkdir()
    Path("out").mkdir()
    Path("out/sub").symlink_to("../elsewhere")
    kt.put("clash", ckpt, contents=True)
    kt.get("clash", "out", contents=True)
    assert files("elsewhere") == set()
    assert files("out") == {"w.bin", "sub/c.json"}


def test_a_broadcast_needs_a_condition_and_of_files_nobody_waits_for_it(ckpt: Path) -> None:
    with pytest.raises(ValueError, match="at least one of timeout, world_size and ips"):
        kt.BroadcastWindow(fanout=2)
    for wrong in ({"timeout": "5"}, {"timeout": nan}, {"world_size": 1.5}, {"ips": "10.0.0.1"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*; it must be"):
            kt.BroadcastWindow(**wrong)
    with pytest.raises(ValueError, match=r"fanout is 99; it must be .* at most 50"):
        kt.BroadcastWindow(timeout=1, fanout=99)
    with pytest.raises(ValueError, match="broadcast is"):
        kt.put("b", ckpt, broadcast={"timeout": 1})
    window = kt.BroadcastWindow(world_size=2, timeout=500.0, fanout=1)
    assert window.to_dict() == {"timeout": 500.0, "world_size": 2, "fanout": 1, "pack": False}
    kt.put("b", ckpt, broadcast=window)
    kt.get("b", "out", broadcast=window)
    assert files("out") == {"b/ckpt/w.bin", "b/ckpt/sub/c.json"}


def test_of_a_folder_only_files_of_some_names_are_fetched(ckpt: Path) -> None:
    Path("ckpt/large.bin").write_bytes(os.urandom(3_000_000))
    kt.put("o", ckpt, contents=True)
    kt.get("o", "out", contents=True, only="sub/*")
    assert files("out") == {"sub/c.json"}
    kt.get("o", "other", contents=True, only=["w.*", "sub"])
    assert files("other") == {"w.bin", "sub/c.json"}
    with pytest.raises(
        kt.DataStoreError, match=r"nothing in 'o' has a name such as 'layers\.0\.\*'"
    ):
        kt.get("o", "third", only=["layers.0.*"])
    assert not Path("third").exists()


def test_verbose_lists_sizes_versions_and_holders(ckpt: Path) -> None:
    kt.put("seen/w", ckpt / "w.bin")
    kt.put("seen/w", ckpt / "sub/c.json")
    (row,) = kt.ls("seen", verbose=True)
    assert (row["name"], row["size"], row["version"], row["holders"]) == ("w", 2, 2, ["store"])
