"""Environments that all pods of a machine share: made once, never changed, collected when unused.

    <folder>/<digest>/        an environment
    <folder>/<digest>.lock    locked by the agents that use it; its time says when that was last
    <folder>/.<random>/       one that is being made
    <folder>/uv/              uv's downloads

An environment gets its name by a rename once it is whole, so one that was cut short is never used.
Two pods that make the same one at the same time both make it, and one of the two is kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import time
from collections import OrderedDict
from pathlib import Path

from kubetorch.pod.image import venvs

#: Environments that nobody used for so many seconds are removed.
LONGEST_UNUSED = 14 * 86400.0
#: Bytes that all environments may have together before those that nobody uses are removed.
TOTAL_BYTES = 20 * 1024**3
#: Environments that an agent holds: those of the generations that it may still serve.
_HELD = 8
#: Seconds after which what is being made was left behind.
_ABANDONED = 86400.0

_log = logging.getLogger(__name__)


class Store:
    """The shared environments, as one agent sees them.

    Args:
        folder: Where they lie.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._locks: OrderedDict[str, int] = OrderedDict()

    @property
    def downloads(self) -> Path:
        """Where uv keeps what it downloaded."""
        return self.folder / "uv"

    def use(self, digest: str) -> Path | None:
        """The environment of this digest, kept from now on; `None` if there is none."""
        place = self.folder / digest
        if digest in self._locks:
            self._locks.move_to_end(digest)
            return place
        if not place.is_dir():
            return None
        descriptor = self._lock(digest)
        if not place.is_dir():  # it was collected in between
            os.close(descriptor)
            return None
        self._locks[digest] = descriptor
        while len(self._locks) > _HELD:
            os.close(self._locks.popitem(last=False)[1])
        return place

    def new(self) -> Path:
        """A place to make an environment in."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self.folder / f".{os.urandom(8).hex()}"

    def publish(self, made: Path, digest: str) -> Path:
        """Give an environment its name, unless somebody was faster."""
        (made / "size").write_text(str(venvs.measure(made)))
        try:
            made.rename(self.folder / digest)
        except OSError:
            if not (self.folder / digest).is_dir():
                raise
            shutil.rmtree(made, ignore_errors=True)
        found = self.use(digest)
        assert found is not None, "it was collected while it was made"
        return found

    def close(self) -> None:
        """Use none any more."""
        while self._locks:
            os.close(self._locks.popitem()[1])

    def collect(self, *, longest_unused: float = LONGEST_UNUSED, total: int = TOTAL_BYTES) -> int:
        """Remove what nobody uses and is old, or too much; how many environments that were.

        Args:
            longest_unused: Seconds after which an unused one is removed.
            total: Bytes above which the one that was unused for longest is removed.
        """
        now = time.time()
        found = []
        for place in self.folder.iterdir():
            with contextlib.suppress(OSError, ValueError):
                if place.name.startswith("."):
                    if now - place.stat().st_mtime > _ABANDONED:
                        shutil.rmtree(place, ignore_errors=True)
                elif (place / "size").is_file():
                    used = (self.folder / f"{place.name}.lock").stat().st_mtime
                    found.append((used, int((place / "size").read_text()), place.name))
        bytes_left = sum(size for _, size, _ in found)
        removed = 0
        for used, size, digest in sorted(found):
            is_wanted = now - used <= longest_unused and bytes_left <= total
            if not is_wanted and self._remove(digest):
                bytes_left -= size
                removed += 1
        return removed

    def _lock(self, digest: str) -> int:
        """Say that an environment is used, for as long as the descriptor is open."""
        path = self.folder / f"{digest}.lock"
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(descriptor).st_ino == path.stat().st_ino:
                    os.utime(descriptor)
                    return descriptor
            os.close(descriptor)

    def _remove(self, digest: str) -> bool:
        path = self.folder / f"{digest}.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            removed = self.new()
            (self.folder / digest).rename(removed)
            path.unlink()
        except OSError:  # somebody uses it
            return False
        finally:
            os.close(descriptor)
        shutil.rmtree(removed, ignore_errors=True)
        _log.info("environment collected digest=%s", digest)
        return True
