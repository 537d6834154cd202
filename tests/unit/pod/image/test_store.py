import os
import time

import pytest

from kubetorch.pod.image.venvs import SharedVenvs


def new_environment(store, text="x"):
    folder = store.new()
    folder.mkdir()
    (folder / "file").write_text(text)
    return folder


@pytest.fixture
def store(tmp_path):
    store = SharedVenvs(tmp_path / "environments")
    yield store
    store.close()


def age(store, digest, seconds):
    when = time.time() - seconds
    os.utime(store.folder / f"{digest}.lock", (when, when))


def test_an_environment_is_there_once_it_is_published(store):
    assert store.use("a") is None
    folder = store.publish(new_environment(store), "a")
    assert folder == store.use("a")
    assert (folder / "file").read_text() == "x"


def test_of_two_that_make_the_same_one_is_kept(store):
    first = store.publish(new_environment(store, "first"), "a")
    assert store.publish(new_environment(store, "second"), "a") == first
    assert (first / "file").read_text() == "first"
    assert [path.name for path in store.folder.iterdir() if path.name.startswith(".")] == []


def test_what_nobody_uses_goes_when_it_is_old(store):
    for digest in ("old", "new", "used"):
        store.publish(new_environment(store), digest)
    store.close()
    second_store = SharedVenvs(store.folder)
    second_store.use("used")
    for digest, seconds in (("old", 100), ("used", 100), ("new", 0)):
        age(store, digest, seconds)

    assert store.collect(longest_unused=50) == 1
    assert {path.name for path in store.folder.iterdir() if path.is_dir()} == {"new", "used"}
    assert store.use("old") is None
    second_store.close()


def test_what_was_unused_for_longest_goes_when_all_are_too_large(store):
    for digest in ("a", "b", "c"):
        store.publish(new_environment(store, "x" * 100), digest)
    store.close()
    for digest, seconds in (("a", 10), ("b", 30), ("c", 20)):
        age(store, digest, seconds)

    assert store.collect(total=250) == 1
    assert {path.name for path in store.folder.iterdir() if path.is_dir()} == {"a", "c"}


def test_what_is_being_made_is_left_alone(store):
    folder = new_environment(store)
    assert store.collect(longest_unused=0, total=0) == 0
    assert folder.exists()
