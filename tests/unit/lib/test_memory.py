"""Memory that two processes share; both ends are in this process here."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from kubetorch.lib import memory
from kubetorch.lib import tuning as lib_tuning
from kubetorch.lib.memory import Lending, Mappings, Memory

MB = 1024 * 1024


@pytest.fixture(autouse=True)
def _trim() -> None:
    gc.collect()  # what an earlier test left in cycles
    memory.trim()


def filled(size: int, value: int) -> Memory:
    stored = memory.allocate(size)
    stored.write(0, bytes([value]) * size)
    return stored


def send(lending: Lending, mappings: Mappings, stored: Memory) -> tuple[int, memoryview]:
    size = len(stored.view)
    number, descriptor = lending.lend(stored)
    stored.release()
    duplicate = None if descriptor is None else os.dup(descriptor)
    return number, mappings.open(number, size, duplicate, is_private=stored.is_shared)


def give_back(lending: Lending, mappings: Mappings) -> list[int]:
    returned = mappings.returned()
    for number, is_spent in returned:
        lending.take_back(number, is_spent=is_spent)
    return [number for number, _ in returned]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_the_other_end_sees_what_was_written_and_may_write() -> None:
    lending, mappings = Lending(), Mappings()
    _, view = send(lending, mappings, filled(3 * MB, 7))
    assert len(view) == 3 * MB
    assert view[0] == view[-1] == 7
    view[0] = 8
    assert not view.readonly


def test_a_file_is_used_again_once_nobody_looks_at_it() -> None:
    lending, mappings = Lending(), Mappings()
    number, view = send(lending, mappings, filled(2 * MB, 1))
    assert give_back(lending, mappings) == []
    second = memory.allocate(2 * MB)
    assert second.file.number != number
    part = view[10:20]
    del view
    gc.collect()
    assert give_back(lending, mappings) == []
    assert part[0] == 1
    del part
    assert give_back(lending, mappings) == [number]
    third = filled(2 * MB - 5, 2)
    assert third.file.number == number
    # Its descriptor is known by now.
    assert lending.lend(third) == (number, None)


def test_memory_that_was_never_sent_is_used_again() -> None:
    first = memory.allocate(2 * MB)
    number = first.file.number
    held_view = first.view[:4]
    first.release()
    first.release()
    second = memory.allocate(2 * MB)
    assert second.file.number != number
    del held_view
    assert memory.allocate(2 * MB).file.number == number


def test_a_much_larger_file_is_not_used_for_a_small_value() -> None:
    large = memory.allocate(64 * MB)
    number = large.file.number
    large.release()
    assert memory.allocate(2 * MB).file.number != number


def test_a_file_that_a_fork_may_see_is_not_used_again() -> None:
    lending, mappings = Lending(), Mappings()
    number, view = send(lending, mappings, filled(2 * MB, 1))
    mappings.on_fork()
    del view
    assert give_back(lending, mappings) == [number]
    assert memory.allocate(2 * MB).file.number != number
    assert lending.forgotten() == [number]
    assert lending.forgotten() == []


def test_everything_is_free_when_the_other_process_is_gone() -> None:
    lending, mappings = Lending(), Mappings()
    number, _view = send(lending, mappings, filled(2 * MB, 1))
    lending.close()
    assert memory.allocate(2 * MB).file.number == number


def test_files_that_are_kept_for_ever_are_given_up() -> None:
    lending, mappings = Lending(), Mappings()
    views = [
        send(lending, mappings, filled(MB, i))[1]
        for i in range(lib_tuning.LIMITS.lent_memory_files + 3)
    ]
    assert len(lending.forgotten()) == 3
    assert [view[0] for view in views] == list(range(lib_tuning.LIMITS.lent_memory_files + 3))


def test_no_more_unused_memory_is_kept_than_the_limit() -> None:
    before = descriptors()
    first = memory.allocate(1)
    of_one = descriptors() - before
    for memory_file in [
        memory.allocate(lib_tuning.LIMITS.idle_memory_file_bytes // 2) for _ in range(4)
    ]:
        memory_file.release()
    second = memory.allocate(1)
    assert descriptors() == before + 4 * of_one
    for memory_file in (first, second):
        memory_file.release()


def test_trimming_closes_what_is_unused() -> None:
    before = descriptors()
    stored = [memory.allocate(MB) for _ in range(5)]
    assert descriptors() >= before + 5
    for memory_file in stored:
        memory_file.release()
    memory.trim()
    assert descriptors() == before


def test_a_descriptor_that_got_lost_is_an_error_and_nothing_else() -> None:
    mappings = Mappings()
    with pytest.raises(OSError, match="Too many open files"):
        mappings.open(5, MB, None)


def test_more_than_a_file_has_cannot_be_mapped() -> None:
    lending, mappings = Lending(), Mappings()
    number, view = send(lending, mappings, filled(MB, 1))
    with pytest.raises(ValueError, match="small"):
        mappings.open(number, 50 * MB, None)
    del view


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, MB, 5_000_001, 100 * MB])
def test_written_pieces_lie_where_they_were_put(size: int) -> None:
    for _ in range(2):  # fresh, and used again
        stored = memory.allocate(size)
        stored.write(0, b"\0" * size)
        stored.write(size - 1, b"z")
        stored.write(0, b"a")
        assert stored.view[size - 1 : size] == (b"a" if size == 1 else b"z")
        assert stored.view[:1] == b"a"
        stored.release()


def test_of_shared_memory_each_process_sees_only_its_own_changes() -> None:
    stored = filled(MB, 1)
    file = stored.file
    ends = [(Lending(), Mappings()) for _ in range(2)]
    loans = [stored.share() for _ in ends]
    views = [
        send(lending, mappings, loan)[1]
        for (lending, mappings), loan in zip(ends, loans, strict=True)
    ]
    stored.release()
    views[0][:3] = b"abc"
    assert bytes(views[1][:3]) == b"\1\1\1"
    other_files = []
    while views:  # until all are gone the file is not used again
        other_files.append(memory.allocate(MB))
        assert other_files[-1].file is not file
        views.pop()
        gc.collect()
        for lending, mappings in ends:
            give_back(lending, mappings)
    reused = memory.allocate(MB)
    assert reused.file is file
    reused.write(0, b"x" * MB)
    loan = reused.share()
    _, received = send(*ends[0], loan)
    assert bytes(received[:3]) == b"xxx"
