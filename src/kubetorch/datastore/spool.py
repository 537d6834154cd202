"""Copies of files that may change before they are sent: what was read is what is sent."""

from __future__ import annotations

import tempfile
import threading
import weakref
from collections.abc import Iterator

_PIECE_BYTES = 1024 * 1024
#: Bytes of all copies that stay in memory; more lie in a file without a name.
MEMORY_BYTES = 16 * 1024 * 1024


class Spool:
    """Contents by digest."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(MEMORY_BYTES)  # noqa: SIM115  # as long as it
        weakref.finalize(self, self._file.close)
        self._lock = threading.Lock()
        self._places: dict[str, tuple[int, int]] = {}
        self._end = 0
        self._written = 0
        self._is_full = False

    def begin(self) -> None:
        """Begin a copy; one that was not kept is forgotten."""
        self._written = 0
        self._file.seek(self._end)

    def write(self, piece: bytes) -> None:
        try:
            self._file.write(piece)
        except OSError:  # no space is left: then the file itself is sent, if it is the same
            self._is_full = True
        self._written += len(piece)

    def keep(self, digest: str) -> None:
        """The copy is whole."""
        if not self._is_full and digest not in self._places:
            self._places[digest] = (self._end, self._written)
            self._end += self._written

    def pieces(self, digest: str) -> Iterator[bytes] | None:
        """A content that was kept."""
        place = self._places.get(digest)
        return None if place is None else self._pieces(*place)

    def _pieces(self, begin: int, size: int) -> Iterator[bytes]:
        end = begin + size
        while begin < end:
            with self._lock:
                self._file.seek(begin)
                piece = self._file.read(min(end - begin, _PIECE_BYTES))
            begin += len(piece)
            yield piece
