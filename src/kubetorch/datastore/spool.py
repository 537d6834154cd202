"""Copies of files that may change between the scan that reads them and the upload."""

from __future__ import annotations

import tempfile
import threading
import weakref
from collections.abc import Iterator

from kubetorch.datastore.tuning import LIMITS

_PIECE_BYTES = 1024 * 1024


class Spool:
    """Copies of file contents, by digest, one behind the other in one temporary file."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(LIMITS.spool_memory_bytes)  # noqa: SIM115  # as long as it
        weakref.finalize(self, self._file.close)
        self._lock = threading.Lock()
        #: Offset and length of each copy in the file, by digest.
        self._extents: dict[str, tuple[int, int]] = {}
        #: Where the next copy begins.
        self._end_offset = 0
        #: Bytes of the copy that is being written.
        self._written_bytes = 0
        #: True once the disk was full: later files are not copied.
        self._is_full = False

    def begin(self) -> None:
        """Begin a copy; it overwrites the copy before it, unless that was kept."""
        self._written_bytes = 0
        self._file.seek(self._end_offset)

    def write(self, piece: bytes) -> None:
        try:
            self._file.write(piece)
        except OSError:  # no disk space: the upload sends the file itself, if it has not changed
            self._is_full = True
        self._written_bytes += len(piece)

    def keep(self, digest: str) -> None:
        """Keep the copy, which is complete."""
        if not self._is_full and digest not in self._extents:
            self._extents[digest] = (self._end_offset, self._written_bytes)
            self._end_offset += self._written_bytes

    def pieces(self, digest: str) -> Iterator[bytes] | None:
        """The pieces of a copy; `None` if there is no copy with this digest."""
        extent = self._extents.get(digest)
        return None if extent is None else self._pieces(*extent)

    def _pieces(self, begin: int, size: int) -> Iterator[bytes]:
        end = begin + size
        while begin < end:
            with self._lock:
                self._file.seek(begin)
                piece = self._file.read(min(end - begin, _PIECE_BYTES))
            begin += len(piece)
            yield piece
