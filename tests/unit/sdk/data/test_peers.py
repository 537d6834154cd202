"""Blobs from pods that fail in all ways: another source goes on, and no blob is fetched twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import cast

import pytest

from kubetorch.datastore import transfer
from kubetorch.datastore.blobs import digest_of, poisoned
from kubetorch.datastore.manifests import Chunk, Entry, Manifest
from kubetorch.errors import ControllerUnavailableError, DataStoreError
from kubetorch.sdk.data.client import DataClient
from kubetorch.sdk.data.peers import Part, Peers
from kubetorch.sdk.data.progress import Progress
from kubetorch.sdk.tuning import TIMING
from kubetorch.wire.data import (
    FindKeys,
    Holder,
    JoinGet,
    KeySource,
    KeyView,
    PathKey,
    PathKeys,
)

BLOBS = {digest_of(blob): blob for blob in (bytes([number]) * 1000 for number in range(6))}
MANIFEST = Manifest(
    "folder",
    tuple(Entry(str(n), chunks=(Chunk(d, 1000),)) for n, d in enumerate(BLOBS)),
)
#: What a pod sends of some blobs.
Answer = Callable[[list[str]], Iterable[bytes]]


class Memory:
    """A destination in memory, which verifies what comes as a checkout does."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}

    def writer(self, digest: str, length: int) -> MemoryWriter:
        return MemoryWriter(self, digest)


class MemoryWriter:
    def __init__(self, memory: Memory, digest: str) -> None:
        self._memory, self._digest, self._data = memory, digest, b""

    def write(self, piece: bytes) -> None:
        self._data += bytes(piece)

    def finish(self) -> None:
        if digest_of(self._data) != self._digest:
            raise poisoned(self._digest, "what came has another digest")
        self._memory.blobs[self._digest] = self._data

    def drop(self) -> None:
        self._data = b""


class Tree:
    """A controller that names one pod after another, and these pods.

    Args:
        names: What it says: a pod, "" for the store, or an error; by default each pod once.
    """

    def __init__(self, *names: str | Exception, **answers: Answer) -> None:
        self._answers = answers
        self._next = iter(names or answers)
        self.leases = 0
        self.failed: list[str] = []
        self.asked: dict[str, list[str]] = {}
        self.now = 0.0
        self.has_left = False

    def join(self, join: JoinGet) -> KeySource | None:
        self.has_left = join.is_done
        if join.failed is not None:
            self.failed.append(join.failed.pod)
        answer = next(self._next, "") if not join.is_done else ""
        if isinstance(answer, Exception):
            raise answer
        return source(answer) if answer else None

    def find(self, find: FindKeys) -> PathKeys:
        self.leases += 1
        return PathKeys(keys=())

    def fetch_from(
        self, source: KeySource, manifest: str, digests: Iterable[str]
    ) -> Iterator[bytes]:
        names = list(digests)
        self.asked.setdefault(source.pod, []).extend(names)
        yield from self._answers[source.pod](names)

    def slow(self, digests: list[str]) -> Iterator[bytes]:
        for byte in b"".join(right(digests)):
            self.now += 1
            yield bytes([byte])

    def waiting(self, digests: list[str]) -> Iterator[bytes]:
        self.now += TIMING.peer_silence_seconds / 3
        return iter(())

    def pause(self, seconds: float) -> None:
        self.now += seconds


def source(pod: str) -> KeySource:
    return KeySource(workload="s", pod=pod, url="http://agent", token="")


def right(digests: list[str]) -> Iterator[bytes]:
    return transfer.compressed(digests, lambda digest: (1000, [BLOBS[digest]]))


def dead(digests: list[str]) -> Iterator[bytes]:
    raise ControllerUnavailableError("the pod is gone")


def cut_off(digests: list[str]) -> Iterator[bytes]:
    """Two blobs, then the connection breaks."""
    yield from right(digests[:2])
    raise ControllerUnavailableError("the connection broke")


def garbage(digests: list[str]) -> Iterator[bytes]:
    yield b"garbage" * 1000


def wrong_bytes(digests: list[str]) -> Iterator[bytes]:
    return transfer.compressed(digests, lambda digest: (1000, [b"w" * 1000]))


def unasked(digests: list[str]) -> Iterator[bytes]:
    name = digest_of(b"another")
    return transfer.compressed([name], lambda digest: (7, [b"another"]))


def peers_of(tree: Tree, **key: Holder) -> Peers:
    view = KeyView(key="k", kind="folder", manifest="m" * 64, publisher=key.get("publisher"))
    return Peers(
        [Part(PathKey(key=view), MANIFEST, MANIFEST.entries)],
        Progress("getting", "k"),
        is_joined=True,
        clock=lambda: tree.now,
        pause=tree.pause,
    )


def fetched(tree: Tree, **key: Holder) -> tuple[Memory, list[str]]:
    peers, memory = peers_of(tree, **key), Memory()
    try:
        return memory, peers.fetch(cast(DataClient, tree), BLOBS, memory)
    finally:
        peers.end(cast(DataClient, tree))
        assert tree.has_left


@pytest.mark.parametrize("fault", [dead, garbage, wrong_bytes, unasked], ids=lambda f: f.__name__)
def test_a_pod_that_sends_nothing_right_is_replaced(fault: Answer) -> None:
    tree = Tree(first=fault, second=right)
    memory, from_store = fetched(tree)
    assert (memory.blobs, from_store) == (BLOBS, [])
    assert tree.failed == ["first"]


def test_a_get_goes_on_where_a_pod_was_cut_off() -> None:
    tree = Tree(first=cut_off, second=right)
    memory, from_store = fetched(tree)
    assert (memory.blobs, from_store) == (BLOBS, [])
    assert tree.asked["second"] == list(BLOBS)[2:]


def test_a_pod_that_sends_a_byte_a_second_is_replaced() -> None:
    tree = Tree()
    tree = Tree(first=lambda digests: tree.slow(digests), second=right)
    memory, from_store = fetched(tree)
    assert (memory.blobs, from_store) == (BLOBS, [])
    assert tree.failed == ["first"]
    assert tree.now < 3 * TIMING.peer_pace_seconds


def test_a_pod_that_never_has_more_is_replaced_after_a_while() -> None:
    tree = Tree()
    tree = Tree(first=lambda digests: tree.waiting(digests), second=right)
    memory, _ = fetched(tree)
    assert memory.blobs == BLOBS
    assert len(tree.asked["first"]) > len(BLOBS)


def test_a_pod_whose_own_sources_were_silent_twice_goes_on() -> None:
    tree = Tree()

    def late(digests: list[str]) -> Iterator[bytes]:
        is_waiting = tree.now < 2 * TIMING.peer_silence_seconds
        return tree.waiting(digests) if is_waiting else right(digests)

    tree = Tree(first=late)
    memory, _ = fetched(tree)
    assert (memory.blobs, tree.failed) == (BLOBS, [])


def test_a_pod_whose_first_byte_comes_late_is_not_slow() -> None:
    tree = Tree()

    def late(digests: list[str]) -> Iterator[bytes]:
        tree.now += 2 * TIMING.peer_pace_seconds
        return right(digests)

    tree = Tree(first=late)
    memory, _ = fetched(tree)
    assert (memory.blobs, tree.failed) == (BLOBS, [])


def test_a_get_that_the_store_serves_asks_again_whether_a_pod_has_room() -> None:
    tree = Tree("", "first", first=right)
    peers, client = peers_of(tree), cast(DataClient, tree)
    names = list(BLOBS)
    assert peers.fetch(client, names[:2], Memory()) == names[:2]
    assert peers.fetch(client, names[2:4], Memory()) == names[2:4]
    tree.now += TIMING.store_question_seconds
    assert peers.fetch(client, names[4:], Memory()) == []


def test_the_key_is_leased_again_after_the_controller_was_restarted() -> None:
    tree = Tree(DataStoreError("the version is not leased"), "first", first=right)
    memory, from_store = fetched(tree)
    assert (memory.blobs, from_store, tree.leases) == (BLOBS, [], 1)


def test_a_pod_that_failed_is_not_asked_again_though_it_is_named_again() -> None:
    tree = Tree("first", "first", "second", first=dead, second=right)
    memory, from_store = fetched(tree)
    assert (memory.blobs, from_store) == (BLOBS, [])
    assert tree.failed == ["first", "first"]
    tree = Tree(*["first"] * 9, first=dead)
    assert fetched(tree)[1] == list(BLOBS)


PACK, LARGE, *_ = BLOBS


def packed(*numbers: int) -> Part:
    """The part of a version with files of one pack, and one besides, that has some of them."""
    files = [Entry(str(n), chunks=(Chunk("c" * 64, 10, 0, 10 * n),)) for n in range(3)]
    entries = (*files, Entry("large", chunks=(Chunk(LARGE, 1000),)))
    view = KeyView(key="k", kind="folder", manifest="m" * 64, publisher=Holder("s", "publisher"))
    manifest = Manifest("folder", entries, packs=(PACK,))
    key = PathKey(key=view, sources=(source("publisher"),))
    return Part(key, manifest, tuple(entries[number] for number in numbers))


@pytest.mark.parametrize("numbers", [(0, 1), (1, 2), (0, 2)])
def test_a_pod_that_lacks_a_file_of_a_pack_gives_the_rest_alone(numbers: tuple[int, ...]) -> None:
    assert packed(*numbers, 3).blobs == {LARGE}
    assert packed(*numbers, 3).name == packed(3).name
    assert packed(0, 1, 2).blobs == {PACK}
    assert packed(0, 1, 2).name not in ("", packed(3).name)
    assert (packed(0, 1, 2, 3).blobs, packed(0, 1, 2, 3).name) == ({PACK, LARGE}, "")


def test_what_getters_of_a_part_lack_comes_from_a_pod_that_has_all() -> None:
    tree = Tree("getter", getter=right, publisher=right)
    peers = Peers([packed(0, 3)], Progress("getting", "k"), is_joined=True)
    assert peers.fetch(cast(DataClient, tree), [PACK, LARGE], Memory()) == []
    assert tree.asked == {"getter": [LARGE], "publisher": [PACK]}


def test_the_store_sends_what_no_pod_sends() -> None:
    tree = Tree(first=dead, second=cut_off)
    memory, from_store = fetched(tree)
    assert list(memory.blobs) == list(BLOBS)[:2]
    assert from_store == list(BLOBS)[2:]


def test_of_a_key_that_the_store_has_not_the_last_failure_is_the_error() -> None:
    with pytest.raises(DataStoreError, match="published by the pod p: the pod is gone"):
        fetched(Tree(first=dead), publisher=Holder("s", "p"))
