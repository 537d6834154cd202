"""A view of the file system that is somebody's own: all of the machine's files, changes apart.

    python .../views.py hold <JSON>                    make a view, say `ready`, keep it until EOF
    python .../views.py join <pid> <folder> <program>  run a program in the view of that process

Each file system of the machine is the lower layer of an overlay whose upper layer lies in a folder
of the view's owner. So whoever is in the view may change everything and changes nothing. What
belongs to the kernel (`/proc`, `/dev`, …) is the machine's own, and so are the folders that the
owner names.

Linux only. Where the user is not root it takes a user namespace too, in which they are themselves,
with the rights that they have.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

#: This file, to run.
PROGRAM = os.path.abspath(__file__)  # noqa: PTH100  # as it was imported
#: What `hold` prints once the view is there; else it prints why there is none.
READY = "ready"

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_MS_RDONLY = 1
_MS_REMOUNT = 32
_MS_BIND = 4096
_MS_REC = 16384
_MS_PRIVATE = 1 << 18
_MNT_DETACH = 2
#: Places that are the kernel's, or that its services meet in.
_SHARED = ("/dev", "/proc", "/run", "/sys")


class View(NamedTuple):
    """What a view consists of.

    Attributes:
        folder: Where its layers lie; it is made. Not on an overlay itself.
        kept: Folders that are the machine's own in it.
    """

    folder: str
    kept: tuple[str, ...]


def hold_command(view: View) -> list[str]:
    """What makes a view, for an interpreter's arguments."""
    return ["-I", "-S", PROGRAM, "hold", json.dumps(view)]


def join_command(holder: int, folder: str) -> tuple[str, ...]:
    """What runs the program that follows in the view that `holder` holds.

    Args:
        holder: The process that was started with `hold_command`.
        folder: The working directory, as the view has it.
    """
    return (sys.executable, "-I", "-S", PROGRAM, "join", str(holder), folder)


# ------------------------------------------------------------------------------------- making it


def enter(view: View) -> None:
    """Make a view and put this process, which must have one thread, into it.

    Raises:
        OSError: The machine does not allow it.
    """
    mounts = _mounts()
    _unshare()
    _mount(None, "/", _MS_REC | _MS_PRIVATE)
    layers = Path(view.folder)
    (layers / "root").mkdir(parents=True, exist_ok=True)
    root = layers / "root"
    _overlay("/", layers, root)
    done: list[str] = []
    for place, kind in mounts:
        if any(_is_below(place, above) for above in (*done, *view.kept)):
            continue
        target = root / place.lstrip("/")
        if kind in _KERNELS or any(_is_below(place, shared) for shared in _SHARED):
            if not _has_place(place, target):
                continue
            _mount(place, str(target), _MS_BIND | _MS_REC)
            done.append(place)
        else:
            _cover(place, layers, target)
    for folder in view.kept:
        _mount(folder, str(root / folder.lstrip("/")), _MS_BIND)
    _change_root(root)


#: File systems that are windows into the kernel.
_KERNELS = frozenset(
    {
        *("autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts"),
        *("devtmpfs", "efivarfs", "fusectl", "hugetlbfs", "mqueue", "nsfs", "proc", "pstore"),
        *("rpc_pipefs", "securityfs", "sysfs", "tracefs"),
    }
)


def _cover(place: str, layers: Path, target: Path) -> None:
    """Another file system of the machine: an overlay too, or else it is there to be read."""
    if not _has_place(place, target):
        return
    if Path(place).is_dir():
        try:
            _overlay(place, layers, target)
        except OSError:
            pass
        else:
            return
    try:
        _mount(place, str(target), _MS_BIND)
        _mount(None, str(target), _MS_REMOUNT | _MS_BIND | _MS_RDONLY)
    except OSError:
        return  # it is not for this user, and is seen as it lies below


def _has_place(place: str, target: Path) -> bool:
    """Whether something can be mounted there; a mount over which another one lies is gone."""
    try:
        return Path(place).is_dir() == target.is_dir() and target.exists()
    except OSError:
        return False


def _overlay(lower: str, layers: Path, target: Path) -> None:
    layer = layers / lower.replace("/", "!")
    for name in ("upper", "work"):
        (layer / name).mkdir(parents=True, exist_ok=True)
    facts = Path(lower).stat()
    (layer / "upper").chmod(facts.st_mode & 0o7777)
    options = f"lowerdir={_escaped(lower)},upperdir={layer}/upper,workdir={layer}/work"
    if os.geteuid() != 0 or _is_in_user_namespace():
        options += ",userxattr"
    _mount("overlay", str(target), 0, kind="overlay", data=options)


def _escaped(path: str) -> str:
    return path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")


def _is_in_user_namespace() -> bool:
    return Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]


def _mounts() -> list[tuple[str, str]]:
    """Places and kinds of the machine's mounts but for the root, those above others first."""
    found: dict[str, str] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        facts, _, more = line.partition(" - ")
        place = facts.split(" ")[4].encode().decode("unicode_escape")
        found[place] = more.split(" ")[0]
    found.pop("/", None)
    return sorted(found.items(), key=lambda item: item[0].count("/"))


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _change_root(folder: Path) -> None:
    os.chdir(folder)
    _check(_libc().pivot_root(b".", b"."), "pivot_root")
    _check(_libc().umount2(b".", _MNT_DETACH), "umount")
    os.chdir("/")


def _unshare() -> None:
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0 and _libc().unshare(_CLONE_NEWNS) == 0:
        return
    _check(_libc().unshare(_CLONE_NEWUSER | _CLONE_NEWNS), "a namespace of mounts")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def _mount(
    source: str | None, target: str, flags: int, *, kind: str | None = None, data: str | None = None
) -> None:
    given = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    options = None if data is None else os.fsencode(data)
    what = f"mounting {source} at {target}" if source else f"changing the mount at {target}"
    _check(_libc().mount(*given, ctypes.c_ulong(flags), options), what)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


# ------------------------------------------------------------------------------------ the program


def _join(holder: int) -> None:
    for name, kind in (("user", _CLONE_NEWUSER), ("mnt", _CLONE_NEWNS)):
        path = f"/proc/{holder}/ns/{name}"
        if name == "user" and Path(path).samefile("/proc/self/ns/user"):
            continue
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        _check(_libc().setns(descriptor, kind), f"joining {path}")


def main(arguments: Sequence[str]) -> NoReturn:
    """Do what the arguments say."""
    kind, *rest = arguments
    if kind == "join":
        try:
            _join(int(rest[0]))
            os.chdir(rest[1])
            os.execvp(rest[2], rest[2:])
        except OSError as error:
            sys.exit(f"the pod's view of the file system cannot be used: {error}")
    folder, kept = json.loads(rest[0])
    try:
        enter(View(folder, tuple(kept)))
    except OSError as error:
        sys.exit(f"{error.strerror or error}")
    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
