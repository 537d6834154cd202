"""A view of the file system for one process and all that it starts.

`separate` gives the calling process a mount namespace. The changes of a `View` are then seen by all
processes in that namespace, also by those that run already, and by no other process:

    add       shows a folder, or files that lie in memory only, at an absolute path
    clear     makes room for a link
    cover     keeps writes to a folder of the machine in this view from now on
    shield    keeps all writes in this view from now on, at any path

A path that does not exist is made in a mirror of the nearest folder that exists: a folder of the
view's own with all entries of that folder bound into it. So no file is ever made on the machine.

    /            ──► mirror with bin, etc, home, … of the machine, and data
    /data        ──► the folder to be seen there

Linux only. For a user who is not root, or root without the right to mount, the process also gets a
user namespace, in which the user stays the same.
Run as a program, this module reports whether this machine allows that: exit status 0, or the
reason.
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
_LOCKED_FLAGS = os.ST_NOSUID | getattr(os, "ST_NODEV", 4) | getattr(os, "ST_NOEXEC", 8)
_TIMES = ((1024, 1024), (2048, 2048), (4096, 1 << 21))


def mount_filesystem(
    source: str | None, target: str, flags: int, *, kind: str | None = None, data: str | None = None
) -> None:
    arguments = [
        None if text is None else os.fsencode(text) for text in (source, target, kind, data)
    ]
    action = f"mounting {source} at {target}" if source else f"changing the mount at {target}"
    result = _libc().mount(
        arguments[0], arguments[1], arguments[2], ctypes.c_ulong(flags), arguments[3]
    )
    _check(result, action)


def _set_read_only(path: Path) -> None:
    mount_filesystem(None, str(path), _MS_REMOUNT | BIND | _MS_RDONLY | _flags(path))


def mounted_paths() -> dict[Path, str]:
    """The paths at which file systems are mounted in this namespace, with their kinds."""
    kinds = {}
    # A path may have any bytes, and any line break but the usual one.
    for line in os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).rstrip("\n").split("\n"):
        about, _, kind = line.partition(" - ")
        kinds[Path(_unescaped(about.split(" ")[4]))] = kind.split(" ")[0]
    return kinds


def _unescaped(text: str) -> str:
    for code in ("040", "011", "012", "134"):
        text = text.replace(f"\\{code}", chr(int(code, 8)))
    return text


def _unmount(path: Path) -> None:
    """Unmount a path, with all mounts below it."""
    _check(_libc().umount2(os.fsencode(path), _MNT_DETACH), f"unmounting {path}")


def _change_root(folder: Path) -> None:
    """Make a folder `/`; a deleted working directory is replaced by `/` too."""
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
    """Give this process a mount and a user namespace of its own, with the same user and group."""
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


def _flags(path: Path) -> int:
    """The flags of a mount that a remount has to repeat."""
    flags = os.statvfs(path).f_flag
    return flags & _LOCKED_FLAGS | sum(flag for bit, flag in _TIMES if flags & bit)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, action: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{action}: {os.strerror(number)}")


def _mount_overlay(folder: Path, layer: Path, path: Path) -> None:
    """Show a folder at a path, and keep writes to it in a layer."""
    upper, work = layer / "upper", layer / "work"
    upper.mkdir(mode=0o700)
    _make_alike(upper, folder)
    work.mkdir(mode=0o700)
    layers = f"lowerdir={_escaped(folder)},upperdir={_escaped(upper)},workdir={_escaped(work)}"
    # In a user namespace, an overlay may note facts about files in user attributes alone.
    whole = Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]
    options = layers if whole else f"{layers},userxattr"
    mount_filesystem("overlay", str(path), 0, kind="overlay", data=options)


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


def _mirror_entry(entry: os.DirEntry[str], path: Path) -> None:
    """Show one entry of a folder at a path, if the entry still exists."""
    if entry.is_symlink():
        try:
            target = Path(entry.path).readlink()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EINVAL):
                raise
            return  # deleted by now, or no link any more
        path.symlink_to(target)
        return
    is_dir = entry.is_dir()
    if is_dir:
        path.mkdir()
    else:
        path.touch()
    try:
        mount_filesystem(entry.path, str(path), BIND | RECURSIVE)
    except PermissionError:
        return  # an entry that this user cannot reach is shown empty
    except (FileNotFoundError, NotADirectoryError):
        # Deleted by now, or replaced by an entry of another kind. Later entries are not shown.
        if is_dir:
            path.rmdir()
        else:
            path.unlink()


def _make_alike(new_folder: Path, folder: Path) -> None:
    """Give a new folder owner and mode of another one."""
    status = folder.stat()
    with contextlib.suppress(OSError):  # only root can change an owner
        os.chown(new_folder, status.st_uid, status.st_gid)
    new_folder.chmod(status.st_mode)


def _set_read_only_if_mounted(path: Path) -> None:
    """Make a mount read-only, if there is one that this user can reach."""
    try:
        _set_read_only(path)
    except OSError as error:
        # No file system is mounted there, or another mount hides it.
        if error.errno not in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR, errno.EACCES):
            raise


def _skip_unreachable() -> contextlib.AbstractContextManager[None]:
    """Leave out paths that do not exist or that this user cannot reach."""
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

    Later mounts of the machine are seen in it too.
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
        #: Folders that are replaced by a mirror: files made in them stay in this view.
        self._mirrors: set[Path] = set()
        #: Folders whose content belongs to this view.
        self._own_folders: list[Path] = []
        #: Folders with an overlay; mounts in them may still be writable.
        self._covered: set[Path] = set()
        #: Folders that are read-only in this view.
        self._frozen: set[Path] = set()
        #: Mounts that are no disks, and may have disks below them.
        self._memory: set[Path] = set()
        #: A caller that gives up waiting for `shield` leaves a thread that goes on.
        self._shielding = threading.Lock()
        self._is_shielded = False

    def add(self, mount: Mount) -> None:
        folder = self._folder_at(mount.target)
        mount_filesystem(mount.source, str(folder), BIND | RECURSIVE)
        if mount.read_only:
            _set_read_only(folder)
            self._frozen.add(folder)
        else:
            self._own_folders.append(folder)

    def cover(self, target: str, keep: Iterable[str] = ()) -> None:
        """Keep writes to a folder of the machine in this view, but for those below `keep`."""
        self._cover(Path(os.path.realpath(target)), _real(keep), set(mounted_paths()))

    def add_files(self, target: str, files: Mapping[str, bytes]) -> None:
        """Show read-only files, which lie in memory only, in a folder.

        They hide the other files of that folder, unless it has folders, too: such a folder is used
        otherwise, as a project with the interpreter that runs this process is.
        """
        folder = self._folder_at(target)
        if not any(entry.is_dir() for entry in folder.iterdir()):
            _fill(folder, files)
            return
        files_folder = self._new_folder("files")
        _fill(files_folder, files)
        for name in files:
            file_path = folder / name
            if not file_path.exists():
                self._make_room(file_path)
                file_path.parent.mkdir(parents=True, exist_ok=True)
                file_path.touch()
            mount_filesystem(str(files_folder / name), str(file_path), BIND)
            _set_read_only(file_path)

    def clear(self, target: str) -> Path:
        """Make room at a path, for a link of the view's own; a folder there is hidden."""
        path = Path(os.path.realpath(target))
        if not path.exists():
            first_part = self._make_room(path)
            if first_part != path:
                self._own_folders.append(first_part)
                path.parent.mkdir(parents=True)
            return path
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is there and is no folder")
        if not self._is_own(path.parent):
            self._mirror(path.parent)
        while path in mounted_paths():
            _unmount(path)
        path.rmdir()
        return path

    def shield(self, keep: Iterable[str] = (), frozen: Iterable[str] = ()) -> None:
        """Keep all writes in this view from now on, except those to shared folders.

        Files that processes have open stay as they were for them. Later changes of the machine's
        files may not be seen. After a failure some folders are covered and some are not; another
        call goes on with the rest. Of several threads that call this, one works and the others
        wait.
        """
        with self._shielding:
            if self._is_shielded:
                return
            self._frozen |= {path for path in _real(frozen) if path.exists()}
            mount_points = mounted_paths()
            virtual = {
                mount_point for mount_point, kind in mount_points.items() if kind in _VIRTUAL
            }
            self._memory = virtual - _real(TEMPORARY)
            shared = _real((*SHARED, *keep)) | set(self._own_folders) - self._covered | self._frozen
            if not self._is_own(Path("/")):
                self._mirror(Path("/"))
            self._cover_all(Path("/").iterdir(), shared, set(mount_points))
            self._is_shielded = True

    # ------------------------------------------------------------------------------------- places

    def _folder_at(self, target: str) -> Path:
        """The folder at a path, which is made if it does not exist."""
        folder = Path(os.path.realpath(target))
        if not folder.exists():
            self._own_folders.append(self._make_room(folder))
            folder.mkdir(parents=True)
        if not folder.is_dir():
            raise NotADirectoryError(f"{target} is there and is no folder")
        return folder

    def _make_room(self, path: Path) -> Path:
        """Make the nearest parent of an absent path the view's own; return the first new part."""
        above = next(parent for parent in path.parents if parent.is_dir())
        if not self._is_own(above):
            self._mirror(above)
        return above / path.relative_to(above).parts[0]

    def _is_own(self, folder: Path) -> bool:
        return folder in self._mirrors or any(
            folder.is_relative_to(own_folder) for own_folder in self._own_folders
        )

    def _new_folder(self, kind: str) -> Path:
        self._count += 1
        folder = self._folder / f"{kind}-{self._count}"
        folder.mkdir(mode=0o700, parents=True)
        return folder

    # ------------------------------------------------------------------------------------ mirrors

    def _mirror(self, folder: Path) -> None:
        """Replace a folder by one of this view's own, with the same entries."""
        mirror = self._new_folder("mirror")
        _make_alike(mirror, folder)
        mount_filesystem(str(mirror), str(mirror), BIND)
        with contextlib.ExitStack() as undoing:
            undoing.callback(_unmount, mirror)
            # Unbindable, so that a bound entry with the mirror below it does not contain it again.
            mount_filesystem(None, str(mirror), UNBINDABLE)
            with os.scandir(folder) as entries:
                for entry in sorted(entries, key=lambda dir_entry: dir_entry.name):
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
        """Redirect writes to a folder, except those to shared paths in it."""
        inside = _inside(folder, shared | mounted)
        if folder not in self._covered and folder not in self._mirrors:
            try:
                self._overlay(folder, _outermost(inside))
            except OSError as error:
                if error.errno != errno.EINVAL or mounted.isdisjoint(inside):
                    raise
                # In a user namespace a folder with mounts of another namespace cannot be a layer.
                self._mirror(folder)
        if folder in self._mirrors:
            inside = set(folder.iterdir())
        self._cover_all(_outermost(inside), shared, mounted)

    def _cover_all(
        self, paths: Iterable[Path], shared: AbstractSet[Path], mounted: AbstractSet[Path]
    ) -> None:
        """Redirect writes to several paths, such as mounts or the entries of a mirror."""
        for entry in sorted(paths):
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
                        self._freeze(entry, shared, mounted)  # not every folder can be a layer
                    else:
                        raise
            elif entry.is_file():
                _set_read_only_if_mounted(entry)

    def _freeze(self, folder: Path, shared: AbstractSet[Path], mounted: AbstractSet[Path]) -> None:
        """Make a folder and the disks in it read-only, except shared paths."""
        mount_filesystem(str(folder), str(folder), BIND | RECURSIVE)
        shared_paths = set(_outermost(_inside(folder, shared - self._frozen)))
        for path in shared_paths:
            with _skip_unreachable():
                mount_filesystem(str(path), str(path), BIND | RECURSIVE)
        _set_read_only(folder)
        for path in _inside(folder, mounted) - shared_paths:
            if shared_paths.isdisjoint(path.parents):
                _set_read_only_if_mounted(path)

    def _overlay(self, folder: Path, inside: Iterable[Path]) -> None:
        overlay = self._new_folder("overlay")
        try:
            _mount_overlay(folder, self._new_folder("layer"), overlay)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # A layer cannot lie on every file system; on tmpfs it always can.
            layer = self._new_folder("layer")
            mount_filesystem("tmpfs", str(layer), 0, kind="tmpfs", data="mode=700")
            try:
                _mount_overlay(folder, layer, overlay)
            finally:
                _unmount(layer)  # the overlay keeps it
        with contextlib.ExitStack() as undoing:
            undoing.callback(_unmount, overlay)
            mount_filesystem(None, str(overlay), UNBINDABLE)  # see `_mirror`
            for path in inside:
                with _skip_unreachable():
                    inner = overlay / path.relative_to(folder)
                    mount_filesystem(str(path), str(inner), BIND | RECURSIVE)
            mount_filesystem(None, str(overlay), PRIVATE)
            mount_filesystem(str(overlay), str(folder), MOVE)
            undoing.pop_all()
        self._covered.add(folder)
        self._own_folders.append(folder)


def _real(paths: Iterable[str]) -> set[Path]:
    return {Path(os.path.realpath(path)) for path in paths}


def _inside(folder: Path, paths: Iterable[Path]) -> set[Path]:
    return {path for path in paths if folder in path.parents}


def _outermost(paths: Iterable[Path]) -> Iterator[Path]:
    """The paths that lie below no other path."""
    outermost: set[Path] = set()
    for path in sorted(paths):
        if outermost.isdisjoint(path.parents):
            outermost.add(path)
            yield path


# ---------------------------------------------------------------------------------- as a program


def main(arguments: Sequence[str]) -> int:
    """Try a view in the folder that is the only argument; return the exit status."""
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
