"""Values in sealed files in memory: one process writes such a file once, any number map it.

    write ── MemoryFile ── send ──(number, descriptor)── take ── MemoryFile ── Share.map ── view

A file that is sealed is whole for ever: no process can change, shorten or lengthen it, also not the
one that wrote it. So a receiver maps it without a copy, privately: what it writes goes to pages
that are its alone. The system frees the memory with the last mapping and descriptor, whichever
process ends first.

Fresh pages cost several times what copying into used ones costs. Where the same two processes pass
one value after the other, `kubetorch.lib.memory` uses files again; those cannot be sealed against
writing, nor passed on to a third process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import socket
import struct
import sys
import weakref
from array import array
from collections import deque
from collections.abc import Iterable

from kubetorch.errors import ProtocolError
from kubetorch.lib.tuning import LIMITS

Buffer = bytes | bytearray | memoryview

#: True where files in memory can be sealed: on Linux.
IS_AVAILABLE = hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")
#: Without these a file can change, or end early, while it is read: the latter is a SIGBUS.
SEALS = (
    fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    if IS_AVAILABLE
    else 0
)

#: As `/proc/PID/maps` shows them.
NAME = "kubetorch-value"

_EMPTY_VIEW = memoryview(b"")
#: Buffers that one system call takes.
_BATCH = 512


class MemoryFile:
    """A sealed file of `size` bytes, and a descriptor of it."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor: int | None = descriptor
        self._view: memoryview | None = None
        # Private mappings that no view uses. Destructors add to it, in any thread at any moment.
        self._idle: deque[mmap.mmap] = deque(maxlen=LIMITS.idle_private_mappings)
        self.size = size

    @classmethod
    def write(cls, pieces: Iterable[Buffer], size: int) -> MemoryFile:
        """Write a file of pieces that have so many bytes; `OSError` without room for it."""
        descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            _write(descriptor, pieces)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, size)

    @classmethod
    def receive(cls, descriptor: int, size: int) -> MemoryFile:
        """The file of a descriptor that another process has sent; it is closed if it is refused."""
        try:
            _check(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, size)

    def share(self) -> MemoryFile:
        """The same file, for one more reader."""
        return MemoryFile(os.dup(self.descriptor), self.size)

    @property
    def descriptor(self) -> int:
        if self._descriptor is None:
            raise ValueError("the file was released")
        return self._descriptor

    @property
    def view(self) -> memoryview:
        """The bytes, which may be written to; empty once the file is released."""
        if self._view is None:
            self._view = memoryview(_map(self.descriptor, self.size))
        return self._view

    def private_view(self) -> memoryview:
        """The bytes in a mapping of its own: what is written to it, no other view shows.

        Mappings that nobody has written to are used again: their pages are there already.
        """
        try:
            mapping = self._idle.pop()
        except IndexError:
            mapping = _map(self.descriptor, self.size)
        # Python's own memory views take no finalizer; this array does.
        keeper = (ctypes.c_char * self.size).from_buffer(mapping)
        returned = (self._idle, mapping, ctypes.addressof(keeper), self.size)
        weakref.finalize(keeper, _return, *returned).atexit = False
        return memoryview(keeper).cast("B")

    def release(self) -> None:
        """Release the file; a view of it stays as long as it is used. May be called twice."""
        self._view = _EMPTY_VIEW
        self._idle.clear()
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        self.release()


class Share:
    """The memory of other processes that views in this process keep alive, up to a limit.

    Beyond it a view is a copy: so no view that is kept can have another process killed for the
    memory that it takes. The number of files is bounded for all shares of the process together.
    """

    def __init__(self, size: int, files: int = LIMITS.mapped_memory_files) -> None:
        self._limit = size
        self._files = files
        # The sizes of mapped files. Destructors remove them, in any thread at any moment.
        self._mapped: dict[int, int] = {}

    @property
    def used(self) -> int:
        """Bytes of the mapped files."""
        return sum(tuple(self._mapped.values()))

    def map(self, file: MemoryFile) -> memoryview:
        """A view of the bytes of a file, which is released; `OSError` without memory for it."""
        try:
            if self.used + file.size > self._limit or len(_mapped) >= self._files:
                return _copy(file)
            mapping = _map(file.descriptor, file.size)
        finally:
            file.release()
        number = next(_numbers)
        self._mapped[number] = _mapped[number] = len(mapping)
        weakref.finalize(mapping, self._forget, number).atexit = False
        return memoryview(mapping)

    def _forget(self, number: int) -> None:
        self._mapped.pop(number, None)
        _mapped.pop(number, None)


_numbers = itertools.count()
#: The sizes of the files that all shares of this process have mapped.
_mapped: dict[int, int] = {}


def lost() -> OSError:
    """The error about a file whose descriptor did not arrive."""
    return OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)}; a large value needs one")


def anonymous(size: int) -> mmap.mmap:
    """Memory of this process alone, in large pages where the system has them."""
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _write(descriptor: int, pieces: Iterable[Buffer]) -> None:
    """Write pieces one behind the other, large ones with a pause for other threads."""
    batch: list[memoryview] = []
    size = 0
    for piece in pieces:
        view = memoryview(piece).cast("B")
        for begin in range(0, len(view), LIMITS.memory_copy_bytes):
            batch.append(view[begin : begin + LIMITS.memory_copy_bytes])
            size += len(batch[-1])
            if size >= LIMITS.memory_copy_bytes or len(batch) == _BATCH:
                _write_batch(descriptor, batch)
                batch, size = [], 0
    _write_batch(descriptor, batch)


def _write_batch(descriptor: int, batch: list[memoryview]) -> None:
    while batch:
        written = os.writev(descriptor, batch)
        while batch and written >= len(batch[0]):
            written -= len(batch.pop(0))
        if written:
            batch[0] = batch[0][written:]


def _check(descriptor: int, size: int) -> None:
    """Refuse what is no sealed file in memory of the declared size."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise ProtocolError("a descriptor came that is of no file in memory") from None
    if seals & SEALS != SEALS:
        raise ProtocolError("a file in memory came that is not sealed")
    actual = os.fstat(descriptor).st_size
    if actual != size or not size:
        raise ProtocolError(f"a file in memory of {actual} bytes came, announced as {size}")


def _map(descriptor: int, size: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):  # without a duplicate of the descriptor
        return mmap.mmap(descriptor, size, mmap.MAP_PRIVATE, trackfd=False)
    return mmap.mmap(descriptor, size, mmap.MAP_PRIVATE)


def _return(idle: deque[mmap.mmap], mapping: mmap.mmap, address: int, size: int) -> None:
    """Keep a private mapping for the next view, unless it was written to."""
    if _is_unwritten(address, size):
        idle.append(mapping)


#: By the highest byte of an entry of `pagemap`: pages of the file (bit 61), and pages that are
#: neither in memory (63) nor swapped out (62). A page that was written to is none of these.
_UNWRITTEN = bytes(byte for byte in range(256) if byte & 0x20 or not byte & 0xC0)


def _is_unwritten(address: int, size: int) -> bool:
    """True if all pages of a private mapping are those of its file, as far as is known."""
    first, end = address // mmap.PAGESIZE, -(-(address + size) // mmap.PAGESIZE)
    try:
        descriptor = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            entries = os.pread(descriptor, 8 * (end - first), 8 * first)
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return len(entries) == 8 * (end - first) and not entries[7::8].translate(None, _UNWRITTEN)


def _copy(file: MemoryFile) -> memoryview:
    copied = memoryview(anonymous(file.size))
    offset = 0
    while offset < file.size:
        piece = copied[offset : offset + LIMITS.memory_copy_bytes]
        offset += os.preadv(file.descriptor, [piece], offset)
    return copied


# ------------------------------------------------------------------------- between processes

_ANNOUNCEMENT = struct.Struct("<QQ")
_ANCILLARY = socket.CMSG_SPACE(array("i").itemsize)
_FLAGS = getattr(socket, "MSG_DONTWAIT", 0) | getattr(socket, "MSG_NOSIGNAL", 0)


class FileSocket:
    """One end of a Unix socket over which memory files come and go, by numbers.

    Frames elsewhere name the numbers, and are sent behind the files. So nothing waits for a file,
    and the system has those that no frame has named yet.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[int, MemoryFile | None]] = {}

    def next_number(self) -> int:
        """A number for the next file."""
        return next(self._numbers)

    def send(self, number: int, file: MemoryFile) -> bool:
        """Send a file; false if it cannot be sent. Never blocks."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [file.descriptor]))]
        try:
            self._socket.sendmsg([_ANNOUNCEMENT.pack(number, file.size)], rights, _FLAGS)
        except (OSError, ValueError):  # to a peer that does not read, or is gone
            return False
        return True

    def take(self, number: int, size: int) -> MemoryFile:
        """The file with a number, which the peer has sent before; `OSError` if it was lost."""
        while number not in self._waiting:
            if len(self._waiting) >= LIMITS.mapped_memory_files:
                raise ProtocolError("files in memory came that no frame names")
            self._receive()
        announced, file = self._waiting.pop(number)
        if file is None:
            raise lost()
        if announced != size:
            file.release()
            raise ProtocolError(f"a file in memory of {announced} bytes came instead of {size}")
        return file

    def close(self) -> None:
        self._socket.close()
        for _, file in self._waiting.values():
            if file is not None:
                file.release()
        self._waiting.clear()

    def _receive(self) -> None:
        close_on_exec = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        try:
            data, ancillary, _, _ = self._socket.recvmsg(
                _ANNOUNCEMENT.size, _ANCILLARY, _FLAGS | close_on_exec
            )
        except OSError as error:
            raise ProtocolError(f"a file in memory was announced and is missing: {error}") from None
        received = array("i")
        for level, kind, rights in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received.frombytes(rights[: len(rights) - len(rights) % received.itemsize])
        with contextlib.ExitStack() as stack:
            for descriptor in received:
                stack.callback(os.close, descriptor)
            if len(data) < _ANNOUNCEMENT.size or len(received) > 1:
                raise ProtocolError("a message came that announces no file in memory")
            stack.pop_all()
        number, size = _ANNOUNCEMENT.unpack(data)
        # Without a descriptor: this process may not open another.
        file = MemoryFile.receive(received[0], size) if received else None
        self._waiting[number] = size, file
