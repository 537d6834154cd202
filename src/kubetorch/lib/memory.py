"""Memory in files without a name, which two processes map and pass back and forth.

A fresh page costs ten times what writing to it costs, so files are used again. A file is free once
no object in either process uses it. That is decided by reference counting: a loan ends when the
last object that was made from its view is deleted.

    allocate ── Memory ── Lending ──(number, descriptor)── Mappings ── view
                   ▲                                           │ the view is gone
                   └─────────── Lending.take_back ◄──(number)──┘
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path

from kubetorch.lib.tuning import LIMITS

Buffer = bytes | bytearray | memoryview

_SIZE_SEALS = (
    fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    if hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")
    else 0
)


class _File:
    def __init__(
        self,
        number: int,
        descriptor: int,
        capacity: int,
        *,
        is_own: bool,
        flags: int = mmap.MAP_SHARED,
    ) -> None:
        self.number = number
        self.capacity = capacity
        self.map = _map(descriptor, capacity, flags)
        self.descriptor: int | None = descriptor if is_own else None
        #: The loans of the file that have not ended.
        self.use_count = 0
        #: Time at which the last loan ended.
        self.idle_since = 0.0

    def lend(self, size: int, on_return: Callable[[], object]) -> memoryview:
        """Lend the first `size` bytes. Some thread calls `on_return` once no part is in use."""
        # Python's own memory views take no finalizer; this array does.
        keeper = (ctypes.c_char * size).from_buffer(self.map)
        weakref.finalize(keeper, on_return).atexit = False
        return memoryview(keeper).cast("B")

    def close(self) -> None:
        """Close the file; its memory stays while an object uses it."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
        with contextlib.suppress(BufferError):
            self.map.close()


class Memory:
    """A loan of a file of this process. `view` is its memory, writable."""

    def __init__(self, pool: _Pool, file: _File, view: memoryview, *, is_fresh: bool) -> None:
        self._pool = pool
        self._is_fresh = is_fresh
        self.file = file
        self.view = view
        #: True if several processes map it, each with private changes.
        self.is_shared = False

    def write(self, offset: int, data: Buffer) -> None:
        """Copy `data` to `offset`, letting other threads run now and then."""
        data = memoryview(data).cast("B")
        done = 0
        while done < len(data):
            piece = data[done : done + LIMITS.memory_copy_bytes]
            if self._is_fresh:  # pages that do not exist yet are made faster by writing to a file
                assert self.file.descriptor is not None
                done += os.pwrite(self.file.descriptor, piece, offset + done)
            else:
                self.view[offset + done : offset + done + len(piece)] = piece
                done += len(piece)

    def share(self) -> Memory:
        """A further loan of the same bytes, for one of several processes that use them."""
        file, returned = self.file, self._pool.returned
        file.use_count += 1
        shared = Memory(
            self._pool,
            file,
            file.lend(len(self.view), lambda: returned.append(file)),
            is_fresh=False,
        )
        shared.is_shared = True
        return shared

    def release(self) -> None:
        """Release the memory. May be called twice."""
        self.view = _EMPTY_VIEW

    def give_up(self) -> None:
        """Use the file no more: another process goes on using it."""
        self._pool.drop(self.file)

    def take_back(self) -> None:
        """Note that the other process does not use the file any more."""
        self._pool.returned.append(self.file)


_EMPTY_VIEW = memoryview(b"")


class _Pool:
    """The files that this process made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._free: list[_File] = []
        #: One entry for each loan that ended. Appended to by destructors, in any thread at any
        #: moment, so no lock is taken for it.
        self.returned: deque[_File] = deque()

    def allocate(self, size: int) -> Memory:
        """Memory of at least one byte, with arbitrary content."""
        with self._lock:
            self._collect_returned()
            file = self._take_fitting(size)
        is_fresh = file is None
        if file is None:
            capacity = _round(size)
            descriptor = unnamed_file(capacity)
            try:
                fix_size(descriptor)
                file = _File(next(self._numbers), descriptor, capacity, is_own=True)
            except BaseException:
                os.close(descriptor)
                raise
        file.use_count = 1
        returned, lent = self.returned, file
        view = file.lend(size, lambda: returned.append(lent))
        return Memory(self, file, view, is_fresh=is_fresh)

    def drop(self, file: _File) -> None:
        """Never use the file again."""
        with self._lock:
            file.close()

    def trim(self, idle: float = 0.0) -> bool:
        """Close free files that were idle for so many seconds; return whether none is left."""
        with self._lock:
            self._collect_returned()
            until = time.monotonic() - idle
            unused = [file for file in self._free if file.idle_since <= until]
            for file in unused:
                file.close()
                self._free.remove(file)
            return not self._free

    def _collect_returned(self) -> None:
        """Free the files whose last loan ended; close the oldest of too many free files."""
        while self.returned:
            file = self.returned.popleft()
            file.use_count -= 1
            if file.use_count == 0 and file.descriptor is not None:
                file.idle_since = time.monotonic()
                self._free.append(file)
        while sum(file.capacity for file in self._free) > LIMITS.idle_memory_file_bytes:
            self._free.pop(0).close()

    def _take_fitting(self, size: int) -> _File | None:
        most = max(4 * size, LIMITS.fitting_memory_file_bytes)
        fitting = [file for file in self._free if size <= file.capacity <= most]
        if not fitting:
            return None
        file = min(fitting, key=lambda fitting_file: fitting_file.capacity)
        self._free.remove(file)
        return file


_pool = _Pool()


def give_back_soon() -> None:
    """Return freed blocks of 1 MiB and more to the system at once; glibc keeps up to 64 MiB.

    Without this call, glibc raises its limit with each large block that is freed.
    """
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1024 * 1024)


_M_MMAP_THRESHOLD = -3

allocate = _pool.allocate
trim = _pool.trim


class Lending:
    """The memory of this process that another process uses, and the files that it has mapped."""

    def __init__(self) -> None:
        self._known_files: dict[int, _File] = {}
        self._lent: dict[int, Memory] = {}

    def lend(self, memory: Memory) -> tuple[int, int | None]:
        """The number of the file, and its descriptor unless the other process has mapped it."""
        file = memory.file
        file.use_count += 1
        self._lent[file.number] = memory
        if len(self._lent) > LIMITS.lent_memory_files:
            self.take_back(next(iter(self._lent)), is_spent=True)
        if memory.is_shared:  # it is mapped anew each time, since changed pages are lost
            return file.number, file.descriptor
        is_known = file.number in self._known_files
        self._known_files[file.number] = file
        return file.number, None if is_known else file.descriptor

    @property
    def is_empty(self) -> bool:
        """True if the other process uses no file."""
        return not self._lent

    def take_back(self, number: int, *, is_spent: bool) -> None:
        """Note that the other process does not use the file any more, or for ever (`is_spent`)."""
        memory = self._lent.pop(number, None)
        if memory is not None:
            if is_spent:
                memory.give_up()
            memory.take_back()

    def forgotten(self) -> list[int]:
        """Files that the other process should forget."""
        if not self._known_files:
            return []
        numbers = [number for number, file in self._known_files.items() if file.descriptor is None]
        for number in numbers:
            del self._known_files[number]
        return numbers

    def close(self) -> None:
        """The other process is gone."""
        for number in list(self._lent):
            self.take_back(number, is_spent=False)


class Mappings:
    """The memory of another process that this process uses."""

    def __init__(self) -> None:
        self._files: dict[int, _File] = {}
        self._forks = 0
        self._returned: deque[tuple[int, bool]] = deque()

    def open(
        self, number: int, size: int, descriptor: int | None, *, is_private: bool = False
    ) -> memoryview:
        """The memory of a file of the other process.

        Changes of private memory are seen by this process alone.
        """
        forks, returned = self._forks, self._returned

        def on_return() -> None:
            returned.append((number, forks != self._forks))

        if descriptor is not None:
            try:
                if not _has_fixed_size(descriptor):
                    raise ValueError("a memory file that can be shortened")
                capacity = os.fstat(descriptor).st_size
                flags = mmap.MAP_PRIVATE if is_private else mmap.MAP_SHARED
                file = _File(number, descriptor, capacity, is_own=False, flags=flags)
            finally:
                os.close(descriptor)
            if is_private:
                return file.lend(size, on_return)
            self._files[number] = file
        mapped_file = self._files.get(number)
        if mapped_file is None:
            raise OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)}; a large value needs one")
        return mapped_file.lend(size, on_return)

    def forget(self, number: int) -> None:
        """The other process will not use the file again."""
        file = self._files.pop(number, None)
        if file is not None:
            file.close()

    @property
    def is_empty(self) -> bool:
        """True if no file of the other process is here."""
        return not self._files

    def close(self) -> None:
        """The other process is gone."""
        for number in list(self._files):
            self.forget(number)

    def returned(self) -> list[tuple[int, bool]]:
        """Files whose last use in this process ended since the last call.

        The second value says whether another process, forked meanwhile, may still use the file.
        """
        returned_files = []
        while self._returned:
            returned_files.append(self._returned.popleft())
        return returned_files

    def on_fork(self) -> None:
        """Note a fork: the child has the present mappings, too."""
        self._forks += 1


def fix_size(descriptor: int) -> None:
    """Let no process shorten a file, also not a hostile one: a reader would get a SIGBUS."""
    if _SIZE_SEALS:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS)


def _has_fixed_size(descriptor: int) -> bool:
    if not _SIZE_SEALS:
        return True
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SIZE_SEALS == _SIZE_SEALS
    except OSError:  # it is no file in memory
        return False


def _map(descriptor: int, capacity: int, flags: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):  # without a duplicate of the descriptor
        return mmap.mmap(descriptor, capacity, flags, trackfd=False)
    return mmap.mmap(descriptor, capacity, flags)


def _round(size: int) -> int:
    """A capacity that also fits sizes which are a little larger."""
    step = max(mmap.PAGESIZE, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


def unnamed_file(size: int = 0) -> int:
    """The descriptor of a new file in memory, of so many bytes."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("kubetorch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        import tempfile  # noqa: PLC0415  # costs 3 ms where it is not needed

        descriptor, path = tempfile.mkstemp(prefix="kubetorch-")
        Path(path).unlink()
    try:
        os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
