"""The system calls about mounts, which the standard library does not have."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_MS_RDONLY = 1
_MS_REMOUNT = 32
#: Flags of `mount`.
BIND = 4096
MOVE = 8192
RECURSIVE = 16384
UNBINDABLE = 1 << 17
PRIVATE = 1 << 18
SLAVE = 1 << 19
_MNT_DETACH = 2
# Flags of a mount that a user namespace must not take away; statvfs has the same numbers.
_KEPT = os.ST_NOSUID | getattr(os, "ST_NODEV", 4) | getattr(os, "ST_NOEXEC", 8)
_TIMES = ((1024, 1024), (2048, 2048), (4096, 1 << 21))


def mount(
    source: str | None, target: str, flags: int, *, kind: str | None = None, data: str | None = None
) -> None:
    """`mount(2)`.

    Args:
        source: What is mounted.
        target: Where.
        flags: See above.
        kind: Kind of a new file system.
        data: Its options.

    Raises:
        OSError: It was refused.
    """
    given = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    what = f"mounting {source} at {target}" if source else f"changing the mount at {target}"
    result = _libc().mount(given[0], given[1], given[2], ctypes.c_ulong(flags), given[3])
    _check(result, what)


def make_read_only(place: Path) -> None:
    """Let nobody change what is mounted there."""
    mount(None, str(place), _MS_REMOUNT | BIND | _MS_RDONLY | _flags(place))


def mounted() -> dict[Path, str]:
    """Where something is mounted in this namespace, and kinds of file systems."""
    found = {}
    # A path may have any bytes, and any line break but the usual one.
    for line in os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).rstrip("\n").split("\n"):
        about, _, kind = line.partition(" - ")
        found[Path(_unescaped(about.split(" ")[4]))] = kind.split(" ")[0]
    return found


def _unescaped(text: str) -> str:
    for code in ("040", "011", "012", "134"):
        text = text.replace(f"\\{code}", chr(int(code, 8)))
    return text


def unmount(place: Path) -> None:
    """Take away what is mounted at a place, with all that is mounted in it."""
    _check(_libc().umount2(os.fsencode(place), _MNT_DETACH), f"unmounting {place}")


def change_root(folder: Path) -> None:
    """Let a folder be `/`; a working directory that is gone becomes `/` too."""
    try:
        working_dir = Path.cwd()
    except FileNotFoundError:
        working_dir = Path("/")
    os.chdir(folder)
    try:
        _check(_libc().pivot_root(b".", b"."), "pivot_root")
        _check(_libc().umount2(b".", _MNT_DETACH), "umount")
    finally:
        with contextlib.suppress(OSError):
            os.chdir(working_dir)


def unshare() -> bool:
    """Give this process a mount namespace of its own; whether it may have one."""
    return bool(_libc().unshare(_CLONE_NEWNS) == 0)


def unshare_user() -> None:
    """The same in a user namespace of its own, in which it is who it was."""
    uid, gid = os.geteuid(), os.getegid()
    _check(_libc().unshare(_CLONE_NEWUSER | _CLONE_NEWNS), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def is_allowed() -> bool:
    """Whether this user may mount in a user namespace; some machines give one for nothing."""
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            unshare_user()
            mount(None, "/", RECURSIVE | SLAVE)
            status = 0
        os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


def _flags(place: Path) -> int:
    """Flags that a mount has and has to keep, for `mount`."""
    found = os.statvfs(place).f_flag
    return found & _KEPT | sum(flag for bit, flag in _TIMES if found & bit)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
