"""Folders at absolute paths that only one process, and what it starts, sees there.

`enter` gives the calling process a mount namespace of its own and binds folders to paths in it. A
path that does not exist is made in a mirror of the nearest folder that does: a `tmpfs` with all
that is in that folder bound into it. So nothing is ever made on the machine.

    /            ──► tmpfs with bin, etc, home, … of the machine, and data
    /data        ──► the folder to be seen there

Linux only. Where the user is not root it takes a user namespace too, in which they are themselves.
Run as a program, it tells whether this machine allows that: exit status 0, or the reason.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_MS_RDONLY = 1
_MS_REMOUNT = 32
_MS_BIND = 4096
_MS_MOVE = 8192
_MS_REC = 16384
_MS_PRIVATE = 1 << 18
_MNT_DETACH = 2
# Flags of a mount that a user namespace must not take away; statvfs has the same numbers.
_KEPT = os.ST_NOSUID | getattr(os, "ST_NODEV", 4) | getattr(os, "ST_NOEXEC", 8)
_TIMES = ((1024, 1024), (2048, 2048), (4096, 1 << 21))


class Mount(NamedTuple):
    """A folder at a path.

    Attributes:
        source: The folder.
        target: Absolute path at which it is seen.
        read_only: Whether it cannot be written there.
    """

    source: str
    target: str
    read_only: bool = False


def enter(mounts: Iterable[Mount], *, staging: Path) -> None:
    """Give this process, which must have one thread, a view of its own of the file system.

    Args:
        mounts: What it is to see.
        staging: A folder to build mirrors in; empty folders are left in it.

    Raises:
        OSError: The machine does not allow it, or a folder cannot be mounted where it should be.
    """
    working_dir = os.getcwd()
    _unshare()
    _mount(None, "/", _MS_REC | _MS_PRIVATE)
    view = _View(staging)
    # A folder within another one comes after it.
    for mount in sorted(mounts, key=lambda one: len(Path(one.target).parts)):
        view.add(mount)
    os.chdir(working_dir)


class _View:
    """What a process sees, as it is being changed."""

    def __init__(self, staging: Path) -> None:
        self._staging = staging
        self._mirrors: set[int] = set()
        self._writable: list[Path] = []

    def add(self, mount: Mount) -> None:
        place = Path(os.path.realpath(mount.target))
        if not place.exists():
            self._make(place)
        if not place.is_dir():
            raise NotADirectoryError(f"{mount.target} is there and is no folder")
        _mount(mount.source, str(place), _MS_BIND | _MS_REC)
        if mount.read_only:
            _mount(None, str(place), _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _flags(place))
        else:
            self._writable.append(place)

    def _make(self, folder: Path) -> None:
        above = next(parent for parent in folder.parents if parent.is_dir())
        is_ours = above.stat().st_dev in self._mirrors
        if not is_ours and not any(above.is_relative_to(place) for place in self._writable):
            self._mirror(above)
        folder.mkdir(parents=True)

    def _mirror(self, folder: Path) -> None:
        """Put a folder of this view alone, with the same content, in the place of a folder."""
        mirror = self._staging / f"{os.getpid()}-{len(self._mirrors)}"
        mirror.mkdir(mode=0o700)
        facts = folder.stat()
        _mount("tmpfs", str(mirror), 0, kind="tmpfs", data=f"mode={stat.S_IMODE(facts.st_mode):o}")
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda one: one.name):
                _mirror_entry(entry, mirror / entry.name)
        self._mirrors.add(mirror.stat().st_dev)
        if str(folder) == "/":
            _change_root(mirror)
        else:
            _mount(str(mirror), str(folder), _MS_MOVE)


def _mirror_entry(entry: os.DirEntry[str], place: Path) -> None:
    if entry.is_symlink():
        place.symlink_to(os.readlink(entry.path))
        return
    if entry.is_dir():
        place.mkdir()
    else:
        place.touch()
    try:
        _mount(entry.path, str(place), _MS_BIND | _MS_REC)
    except PermissionError:
        return  # what this user cannot reach is an empty place


def _change_root(folder: Path) -> None:
    os.chdir(folder)
    _check(_libc().pivot_root(b".", b"."), "pivot_root")
    _check(_libc().umount2(b".", _MNT_DETACH), "umount")
    os.chdir("/")


def _unshare() -> None:
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0 and _libc().unshare(_CLONE_NEWNS) == 0:
        return
    _check(_libc().unshare(_CLONE_NEWUSER | _CLONE_NEWNS), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def _flags(place: Path) -> int:
    """Flags that a mount has and has to keep, for `mount`."""
    found = os.statvfs(place).f_flag
    return found & _KEPT | sum(flag for bit, flag in _TIMES if found & bit)


def _mount(
    source: str | None, target: str, flags: int, *, kind: str | None = None, data: str | None = None
) -> None:
    given = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    options = None if data is None else data.encode()
    what = f"mounting {source} at {target}" if source else f"changing the mount at {target}"
    _check(_libc().mount(given[0], given[1], given[2], ctypes.c_ulong(flags), options), what)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def main(arguments: Sequence[str]) -> int:
    """Try it in the folder that is the only argument; the exit status."""
    if sys.platform != "linux":
        sys.stdout.write("folders of a pod's own need namespaces, which only Linux has\n")
        return 1
    try:
        enter([Mount(arguments[0], "/kubetorch-mounts-probe")], staging=Path(arguments[0]))
    except OSError as error:
        sys.stdout.write(f"{error.strerror or error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
