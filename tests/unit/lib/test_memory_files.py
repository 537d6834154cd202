"""Sealed files in memory; both ends are in this process here."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import socket
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kubetorch.errors import ProtocolError
from kubetorch.lib import memory_files
from kubetorch.lib.memory_files import FileSocket, MemoryFile, Share
from kubetorch.lib.tuning import LIMITS

pytestmark = pytest.mark.skipif(not memory_files.IS_AVAILABLE, reason="Linux alone seals files")

MB = 1024 * 1024


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:kubetorch")


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    gc.collect()
    before = descriptors(), mappings()
    yield
    gc.collect()
    assert (descriptors(), mappings()) == before


@pytest.fixture
def ends() -> Iterator[tuple[FileSocket, socket.socket]]:
    """A socket that takes files, and the plain socket of a peer that may send anything."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ExitStack() as stack:
        receiver = FileSocket(ours)
        stack.callback(theirs.close)
        stack.callback(receiver.close)
        yield receiver, theirs


def announce(sock: socket.socket, number: int, size: int, *sent: int) -> None:
    data = memory_files._ANNOUNCEMENT.pack(number, size)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", sent))] if sent else []
    sock.sendmsg([data], rights)


def unsealed(size: int, seals: int = 0) -> int:
    descriptor = os.memfd_create("kubetorch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def pipe() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


def test_a_view_has_what_was_written_piece_by_piece_and_may_be_written_to() -> None:
    pieces = [b"a" * 10, bytes(9 * MB), memoryview(b"bc"), b"", b"d" * 5]
    size = sum(map(len, pieces))
    file = MemoryFile.write(pieces, size)
    view = Share(2 * size).map(file.share())
    assert view == b"".join(pieces)
    view[0] = 0
    assert file.view[0] == ord("a")
    file.release()
    file.release()


def test_many_small_pieces_are_written_in_their_order() -> None:
    pieces = [bytes([number % 251]) * (number % 7) for number in range(3000)]
    file = MemoryFile.write(pieces, sum(map(len, pieces)))
    assert file.view == b"".join(pieces)


def test_the_writer_cannot_change_or_shorten_a_file() -> None:
    file = MemoryFile.write([bytes(MB)], MB)
    with pytest.raises(PermissionError):
        os.pwrite(file.descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(file.descriptor, 0)


def test_the_memory_is_given_back_with_the_last_view() -> None:
    before = mappings()
    view = Share(2 * MB).map(MemoryFile.write([bytes(MB)], MB))
    part = view[10:20]
    del view
    assert mappings() == before + 1
    del part
    assert mappings() == before


def test_beyond_the_share_of_a_process_views_are_copies() -> None:
    share = Share(2 * MB)
    before = mappings()
    first = share.map(MemoryFile.write([b"1" * MB], MB))
    second = share.map(MemoryFile.write([b"2" * 2 * MB], 2 * MB))
    assert mappings() == before + 1
    assert share.used == MB
    assert (first[0], second[-1], len(second)) == (ord("1"), ord("2"), 2 * MB)
    del first
    third = share.map(MemoryFile.write([b"3" * MB], MB))
    assert mappings() == before + 1
    assert third[5] == ord("3")


def test_beyond_the_number_of_files_views_are_copies() -> None:
    share = Share(10 * MB, files=1)
    before = mappings()
    views = [share.map(MemoryFile.write([b"x" * MB], MB)) for _ in range(3)]
    assert mappings() == before + 1
    assert all(view[-1] == ord("x") for view in views)


def test_files_are_taken_by_their_numbers_in_any_order(
    ends: tuple[FileSocket, socket.socket],
) -> None:
    receiver, theirs = ends
    sender = FileSocket(theirs)
    numbers = [sender.next_number(), sender.next_number()]
    for number, size in zip(numbers, (3, 4), strict=True):
        assert sender.send(number, MemoryFile.write([bytes([size]) * size], size))
    second = receiver.take(numbers[1], 4)
    first = receiver.take(numbers[0], 3)
    assert (first.view, second.view) == (b"\x03" * 3, b"\x04" * 4)
    sender.close()
    with pytest.raises(ProtocolError, match="announces no file"):
        receiver.take(9, 1)


def test_a_file_cannot_be_sent_to_a_peer_that_is_gone_or_never_reads(
    ends: tuple[FileSocket, socket.socket],
) -> None:
    receiver, theirs = ends
    sender = FileSocket(theirs)
    file = MemoryFile.write([b"x"], 1)
    count = 0
    while sender.send(count, file):
        count += 1
    assert count > 10
    receiver.close()
    assert not sender.send(count, file)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: unsealed(MB), "not sealed"),
        (lambda: unsealed(MB, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW), "not sealed"),
        (lambda: unsealed(MB, memory_files.SEALS & ~fcntl.F_SEAL_WRITE), "not sealed"),
        (lambda: unsealed(MB, memory_files.SEALS & ~fcntl.F_SEAL_SEAL), "not sealed"),
        (lambda: unsealed(10, memory_files.SEALS), "of 10 bytes"),
        (lambda: os.open(__file__, os.O_RDONLY), "no file in memory"),
        (lambda: os.open("/dev/null", os.O_RDWR), "no file in memory"),
        (lambda: socket.socket().detach(), "no file in memory"),
        (pipe, "no file in memory"),
    ],
)
def test_what_is_no_sealed_file_of_the_announced_size_is_refused(
    ends: tuple[FileSocket, socket.socket], make: Callable[[], int], problem: str
) -> None:
    receiver, theirs = ends
    descriptor = make()
    announce(theirs, 1, MB, descriptor)
    os.close(descriptor)
    with pytest.raises(ProtocolError, match=problem):
        receiver.take(1, MB)


def test_a_file_that_is_announced_with_another_size_than_its_frame_is_refused(
    ends: tuple[FileSocket, socket.socket],
) -> None:
    receiver, theirs = ends
    file = MemoryFile.write([b"abc"], 3)
    announce(theirs, 1, 3, file.descriptor)
    with pytest.raises(ProtocolError, match="3 bytes came instead of 4"):
        receiver.take(1, 4)


def test_a_message_with_several_descriptors_or_of_another_length_is_refused(
    ends: tuple[FileSocket, socket.socket],
) -> None:
    receiver, theirs = ends
    file = MemoryFile.write([b"abc"], 3)
    announce(theirs, 1, 3, file.descriptor, file.descriptor)
    with pytest.raises(ProtocolError):
        receiver.take(1, 3)
    theirs.send(b"short")
    with pytest.raises(ProtocolError, match="announces no file"):
        receiver.take(1, 3)


def test_a_file_without_a_descriptor_is_one_that_this_process_may_not_open(
    ends: tuple[FileSocket, socket.socket],
) -> None:
    receiver, theirs = ends
    announce(theirs, 1, 3)
    with pytest.raises(OSError, match="a large value needs one"):
        receiver.take(1, 3)


def test_files_that_no_frame_names_are_bounded(ends: tuple[FileSocket, socket.socket]) -> None:
    receiver, theirs = ends
    file = MemoryFile.write([b"abc"], 3)
    with pytest.raises(ProtocolError, match="no frame names"):
        for number in range(2, 2 + 2 * LIMITS.mapped_memory_files):
            announce(theirs, number, 3, file.descriptor)
            announce(theirs, 1, 3, file.descriptor)
            receiver.take(1, 3).release()


def test_a_private_view_shows_no_change_of_another_one() -> None:
    file = MemoryFile.write([bytes(range(256)) * 64], 256 * 64)
    written, read = file.private_view(), file.private_view()
    written[5000] = 7
    assert (written[5000], read[5000]) == (7, 5000 % 256)
    del written, read
    assert all(file.private_view()[5000] == 5000 % 256 for _ in range(10))


def test_a_mapping_is_used_again_unless_it_was_written_to() -> None:
    file = MemoryFile.write([b"a" * 10_000], 10_000)

    def address(number_of_written_byte: int | None = None) -> int:
        view = file.private_view()
        assert bytes(view) == b"a" * 10_000
        if number_of_written_byte is not None:
            view[number_of_written_byte] = 0
        return ctypes.addressof(ctypes.c_char.from_buffer(view))

    assert len({address() for _ in range(5)}) == 1
    assert len(file._idle) == 1
    address(9_999)
    assert len(file._idle) == 0
    assert address() and len(file._idle) == 1
    file.release()
    assert len(file._idle) == 0
