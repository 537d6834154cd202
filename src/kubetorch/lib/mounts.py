"""A view of the file system that is a process's own, and that of all that it starts.

`separate` gives the calling process a mount namespace. What a `View` then changes is seen by all
processes in that namespace, also by those that run already, and by nobody else:

    add       a folder, or files that lie in memory only, at an absolute path
    cover     a folder of the machine, with what is written to it from now on
    shield    whatever is written from now on, at any path, stays in this view

A path that does not exist is made in a mirror of the nearest folder that does: a folder of the
view's own with all that is in that folder bound into it. So nothing is ever made on the machine.

    /            ──► mirror with bin, etc, home, … of the machine, and data
    /data        ──► the folder to be seen there

Linux only. Where the user is not root, or is root without the right, it takes a user namespace too,
in which they are themselves.
Run as a program, it tells whether this machine allows that: exit status 0, or the reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import NamedTuple

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


def mount_filesystem(
    source: str | None, target: str, flags: int, *, kind: str | None = None, data: str | None = None
) -> None:
    given = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    what = f"mounting {source} at {target}" if source else f"changing the mount at {target}"
    result = _libc().mount(given[0], given[1], given[2], ctypes.c_ulong(flags), given[3])
    _check(result, what)


def _set_read_only(place: Path) -> None:
    mount_filesystem(None, str(place), _MS_REMOUNT | BIND | _MS_RDONLY | _flags(place))


def mounted_places() -> dict[Path, str]:
    """The places where file systems are mounted in this namespace, with their kinds."""
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


def _unmount(place: Path) -> None:
    """Take away what is mounted at a place, with all that is mounted in it."""
    _check(_libc().umount2(os.fsencode(place), _MNT_DETACH), f"unmounting {place}")


def _change_root(folder: Path) -> None:
    """Make a folder `/`; a working directory that is gone becomes `/` too."""
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


def _unshare_user() -> None:
    """Give this process a mount and a user namespace of its own, in which it is who it was."""
    uid, gid = os.geteuid(), os.getegid()
    _check(_libc().unshare(_CLONE_NEWUSER | _CLONE_NEWNS), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def _may_mount() -> bool:
    """True if this user may mount in a user namespace; some machines create one to no avail."""
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            _unshare_user()
            mount_filesystem(None, "/", RECURSIVE | SLAVE)
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


def _mount_overlay(folder: Path, layer: Path, place: Path) -> None:
    """Show a folder at a place, with what is written there in a layer."""
    upper, work = layer / "upper", layer / "work"
    upper.mkdir(mode=0o700)
    _make_alike(upper, folder)
    work.mkdir(mode=0o700)
    layers = f"lowerdir={_escaped(folder)},upperdir={_escaped(upper)},workdir={_escaped(work)}"
    # What an overlay notes about files has to be an attribute of users where they are the root.
    whole = Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]
    options = layers if whole else f"{layers},userxattr"
    mount_filesystem("overlay", str(place), 0, kind="overlay", data=options)


def _fill(folder: Path, files: Mapping[str, bytes]) -> None:
    """Fill a folder with files in memory: links through `..data`, as a kubelet lays them out."""
    mount_filesystem("tmpfs", str(folder), 0, kind="tmpfs", data="mode=700")
    data = folder / "..files"
    data.mkdir(mode=0o700)
    (folder / "..data").symlink_to(data.name)
    for top in {name.partition("/")[0] for name in files}:
        (folder / top).symlink_to(f"..data/{top}")
    for name, content in files.items():
        path = data / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_bytes(content)
    _set_read_only(folder)


def _mirror_entry(entry: os.DirEntry[str], place: Path) -> None:
    """Show one entry of a folder at a place, if it is still there."""
    if entry.is_symlink():
        try:
            target = Path(entry.path).readlink()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EINVAL):
                raise
            return  # gone by now, or no link any more
        place.symlink_to(target)
        return
    is_dir = entry.is_dir()
    if is_dir:
        place.mkdir()
    else:
        place.touch()
    try:
        mount_filesystem(entry.path, str(place), BIND | RECURSIVE)
    except PermissionError:
        return  # what this user cannot reach is an empty place
    except (FileNotFoundError, NotADirectoryError):
        # Gone by now, or replaced by something of another kind. What comes later is not seen.
        if is_dir:
            place.rmdir()
        else:
            place.unlink()


def _make_alike(place: Path, folder: Path) -> None:
    """Give a new folder owner and mode of another one."""
    found = folder.stat()
    with contextlib.suppress(OSError):  # only root can give something away
        os.chown(place, found.st_uid, found.st_gid)
    place.chmod(found.st_mode)


def _set_read_only_if_mounted(place: Path) -> None:
    """Make a mount read-only, if there is one that this user can reach."""
    try:
        _set_read_only(place)
    except OSError as error:
        # Nothing is mounted there, or something hides it.
        if error.errno not in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR, errno.EACCES):
            raise


def _skip_unreachable() -> contextlib.AbstractContextManager[None]:
    """Leave out what is not there or not for this user."""
    return contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError)


def _escaped(path: Path) -> str:
    return "".join(f"\\{letter}" if letter in ":,\\" else letter for letter in str(path))


#: Folders of a machine that belong to no disk, or to all its processes together.
SHARED = ("/dev", "/proc", "/run", "/sys", "/var/run")
#: Folders that are covered even where they are in memory.
TEMPORARY = ("/tmp", "/var/tmp")
# Kinds of file systems that are no disk.
_VIRTUAL = frozenset(
    (
        *("autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts"),
        *("devtmpfs", "efivarfs", "fusectl", "hugetlbfs", "mqueue", "nsfs", "proc", "pstore"),
        *("ramfs", "rpc_pipefs", "securityfs", "sysfs", "tmpfs", "tracefs"),
    )
)


class Mount(NamedTuple):
    """A folder at a path."""

    source: str
    target: str
    read_only: bool = False


def separate() -> str | None:
    """Give this process, which must have one thread, a mount namespace of its own.

    What is mounted on the machine later is seen in it too.
    """
    if sys.platform != "linux":
        return "only Linux has mount namespaces"
    try:
        if os.geteuid() != 0 or _libc().unshare(_CLONE_NEWNS) != 0:
            if not _may_mount():
                return "this user may have no mount namespace"
            _unshare_user()
        mount_filesystem(None, "/", RECURSIVE | SLAVE)
    except OSError as error:
        return error.strerror
    return None


class View:
    """The files that the processes of a namespace see; see `separate`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        # Folders in which something can be made that the machine does not see.
        self._mirrors: set[Path] = set()
        self._own: list[Path] = []
        # Folders with an overlay; what is mounted in them may still lie open.
        self._covered: set[Path] = set()
        self._frozen: set[Path] = set()
        # Mounts that are no disks, and may have some in them.
        self._memory: set[Path] = set()
        # Who gives up waiting for a shield leaves a thread that goes on.
        self._shielding = threading.Lock()
        self._is_shielded = False

    def add(self, mount: Mount) -> None:
        place = self._place(mount.target)
        mount_filesystem(mount.source, str(place), BIND | RECURSIVE)
        if mount.read_only:
            _set_read_only(place)
            self._frozen.add(place)
        else:
            self._own.append(place)

    def cover(self, target: str, keep: Iterable[str] = ()) -> None:
        """Keep what is written to a folder of the machine in this view, but not to what is kept."""
        self._cover(Path(os.path.realpath(target)), _real(keep), set(mounted_places()))

    def add_files(self, target: str, files: Mapping[str, bytes]) -> None:
        """Show files at a path, which lie in memory only and nobody can change.

        They hide what else lies in that folder, unless it has folders too: then it is more than a
        place for such files, such as a project with the interpreter that this runs in.
        """
        place = self._place(target)
        if not any(entry.is_dir() for entry in place.iterdir()):
            _fill(place, files)
            return
        held = self._new_folder("files")
        _fill(held, files)
        for name in files:
            spot = place / name
            if not spot.exists():
                self._make_room(spot)
                spot.parent.mkdir(parents=True, exist_ok=True)
                spot.touch()
            mount_filesystem(str(held / name), str(spot), BIND)
            _set_read_only(spot)

    def shield(self, keep: Iterable[str] = (), frozen: Iterable[str] = ()) -> None:
        """Keep all that is written from now on in this view, except in what machines share.

        What processes have open already stays as it was for them. Files that the machine changes
        later may be seen as they were. After a failure some is kept and some is not; to ask again
        goes on with the rest. Of several threads that ask one does it and the others wait.
        """
        with self._shielding:
            if self._is_shielded:
                return
            self._frozen |= {path for path in _real(frozen) if path.exists()}
            mounted = mounted_places()
            virtual = {place for place, kind in mounted.items() if kind in _VIRTUAL}
            self._memory = virtual - _real(TEMPORARY)
            shared = _real((*SHARED, *keep)) | set(self._own) - self._covered | self._frozen
            if not self._is_own(Path("/")):
                self._mirror(Path("/"))
            self._cover_all(Path("/").iterdir(), shared, set(mounted))
            self._is_shielded = True

    # ------------------------------------------------------------------------------------- places

    def _place(self, target: str) -> Path:
        """The folder at a path, which is made if it is not there."""
        place = Path(os.path.realpath(target))
        if not place.exists():
            self._own.append(self._make_room(place))
            place.mkdir(parents=True)
        if not place.is_dir():
            raise NotADirectoryError(f"{target} is there and is no folder")
        return place

    def _make_room(self, place: Path) -> Path:
        """Make room at a path that the machine does not see; returns its first part."""
        above = next(parent for parent in place.parents if parent.is_dir())
        if not self._is_own(above):
            self._mirror(above)
        return above / place.relative_to(above).parts[0]

    def _is_own(self, folder: Path) -> bool:
        return folder in self._mirrors or any(folder.is_relative_to(one) for one in self._own)

    def _new_folder(self, kind: str) -> Path:
        self._count += 1
        folder = self._folder / f"{kind}-{self._count}"
        folder.mkdir(mode=0o700, parents=True)
        return folder

    # ------------------------------------------------------------------------------------ mirrors

    def _mirror(self, folder: Path) -> None:
        """Put a folder of this view alone, with the same content, in the place of a folder."""
        mirror = self._new_folder("mirror")
        _make_alike(mirror, folder)
        mount_filesystem(str(mirror), str(mirror), BIND)
        with contextlib.ExitStack() as undoing:
            undoing.callback(_unmount, mirror)
            # So that no folder that is bound into it, and has it somewhere below, has it again.
            mount_filesystem(None, str(mirror), UNBINDABLE)
            with os.scandir(folder) as entries:
                for entry in sorted(entries, key=lambda one: one.name):
                    _mirror_entry(entry, mirror / entry.name)
            mount_filesystem(None, str(mirror), PRIVATE)
            if str(folder) == "/":
                _change_root(mirror)
            else:
                mount_filesystem(str(mirror), str(folder), MOVE)
            undoing.pop_all()
        self._mirrors.add(folder)

    # -------------------------------------------------------------------------------------- shield

    def _cover(self, folder: Path, shared: AbstractSet[Path], mounted: AbstractSet[Path]) -> None:
        """Redirect writes to a folder, except those to what is shared in it."""
        inside = _inside(folder, shared | mounted)
        if folder not in self._covered and folder not in self._mirrors:
            try:
                self._overlay(folder, _outermost(inside))
            except OSError as error:
                if error.errno != errno.EINVAL or mounted.isdisjoint(inside):
                    raise
                # In a user namespace a folder in which others have mounted something cannot be
                # a layer.
                self._mirror(folder)
        if folder in self._mirrors:
            inside = set(folder.iterdir())
        self._cover_all(_outermost(inside), shared, mounted)

    def _cover_all(
        self, places: Iterable[Path], shared: AbstractSet[Path], mounted: AbstractSet[Path]
    ) -> None:
        """The same for places at which something is mounted, such as all in a mirror."""
        for entry in sorted(places):
            if entry in self._frozen:
                self._freeze(entry, shared, mounted)
            elif entry in self._memory and entry not in shared:
                self._cover_all(_outermost(_inside(entry, shared | mounted)), shared, mounted)
            elif entry.is_symlink() or entry in shared or not os.access(entry, os.R_OK):
                continue
            elif entry.is_dir():
                try:
                    self._cover(entry, shared, mounted)
                except OSError as error:
                    if error.errno == errno.ENOENT:
                        _set_read_only(entry)  # the machine has removed it
                    elif error.errno == errno.EINVAL:
                        self._freeze(entry, shared, mounted)  # not every one can be a layer
                    else:
                        raise
            elif entry.is_file():
                _set_read_only_if_mounted(entry)

    def _freeze(self, folder: Path, shared: AbstractSet[Path], mounted: AbstractSet[Path]) -> None:
        """Make a folder and the disks in it read-only, except what is shared."""
        mount_filesystem(str(folder), str(folder), BIND | RECURSIVE)
        kept = set(_outermost(_inside(folder, shared - self._frozen)))
        for place in kept:
            with _skip_unreachable():
                mount_filesystem(str(place), str(place), BIND | RECURSIVE)
        _set_read_only(folder)
        for place in _inside(folder, mounted) - kept:
            if kept.isdisjoint(place.parents):
                _set_read_only_if_mounted(place)

    def _overlay(self, folder: Path, inside: Iterable[Path]) -> None:
        overlay = self._new_folder("overlay")
        try:
            _mount_overlay(folder, self._new_folder("layer"), overlay)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # A layer cannot lie on every file system; on this one it always can.
            layer = self._new_folder("layer")
            mount_filesystem("tmpfs", str(layer), 0, kind="tmpfs", data="mode=700")
            try:
                _mount_overlay(folder, layer, overlay)
            finally:
                _unmount(layer)  # the overlay keeps it
        with contextlib.ExitStack() as undoing:
            undoing.callback(_unmount, overlay)
            mount_filesystem(None, str(overlay), UNBINDABLE)  # see `_mirror`
            for place in inside:
                with _skip_unreachable():
                    inner = overlay / place.relative_to(folder)
                    mount_filesystem(str(place), str(inner), BIND | RECURSIVE)
            mount_filesystem(None, str(overlay), PRIVATE)
            mount_filesystem(str(overlay), str(folder), MOVE)
            undoing.pop_all()
        self._covered.add(folder)
        self._own.append(folder)


def _real(paths: Iterable[str]) -> set[Path]:
    return {Path(os.path.realpath(path)) for path in paths}


def _inside(folder: Path, places: Iterable[Path]) -> set[Path]:
    return {place for place in places if folder in place.parents}


def _outermost(places: Iterable[Path]) -> Iterator[Path]:
    """The places that lie in no other place."""
    found: set[Path] = set()
    for place in sorted(places):
        if found.isdisjoint(place.parents):
            found.add(place)
            yield place


# ---------------------------------------------------------------------------------- as a program


def main(arguments: Sequence[str]) -> int:
    """Try it in the folder that is the only argument; the exit status."""
    refusal = separate()
    if refusal is None:
        try:
            View(Path(arguments[0])).add(Mount(arguments[0], "/kubetorch-probe"))
        except OSError as error:
            refusal = error.strerror or str(error)
    sys.stdout.write(f"{refusal}\n" if refusal else "")
    return 0 if refusal is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
