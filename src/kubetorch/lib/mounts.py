"""A view of the file system that is a process's own, and that of all that it starts.

`separate` gives the calling process a mount namespace. What a `View` then changes is seen by all
processes in that namespace, also by those that run already, and by nobody else:

    add       a folder, or files that lie in memory only, at an absolute path
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
import errno
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import NamedTuple

from kubetorch.lib import mountcalls, mountparts
from kubetorch.lib.mountcalls import BIND, MOVE, PRIVATE, RECURSIVE, SLAVE, UNBINDABLE

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
    """A folder at a path.

    Attributes:
        source: The folder.
        target: Absolute path at which it is seen.
        read_only: Whether it cannot be written there.
    """

    source: str
    target: str
    read_only: bool = False


def separate() -> str | None:
    """Give this process, which must have one thread, a mount namespace of its own.

    What is mounted on the machine later is seen in it too.

    Returns:
        Why the machine does not allow it; `None` if all is well.
    """
    if sys.platform != "linux":
        return "only Linux has mount namespaces"
    try:
        if os.geteuid() != 0 or not mountcalls.unshare():
            if not mountcalls.is_allowed():
                return "this user may have no mount namespace"
            mountcalls.unshare_user()
        mountcalls.mount(None, "/", RECURSIVE | SLAVE)
    except OSError as error:
        return error.strerror
    return None


class View:
    """What the processes of a namespace see; see `separate`.

    Args:
        folder: A folder for what is theirs alone, outside of all that is mounted.
    """

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
        """Show a folder at a path.

        Raises:
            OSError: It cannot be mounted there.
        """
        place = self._place(mount.target)
        mountcalls.mount(mount.source, str(place), BIND | RECURSIVE)
        if mount.read_only:
            mountcalls.make_read_only(place)
            self._frozen.add(place)
        else:
            self._own.append(place)

    def add_files(self, target: str, files: Mapping[str, bytes]) -> None:
        """Show files at a path, which lie in memory only and nobody can change.

        They hide what else lies in that folder, unless it has folders too: then it is more than a
        place for such files, such as a project with the interpreter that this runs in.

        Args:
            target: Absolute path of their folder.
            files: Their content by name.

        Raises:
            OSError: They cannot be mounted there.
        """
        place = self._place(target)
        if not any(entry.is_dir() for entry in place.iterdir()):
            mountparts.fill(place, files)
            return
        held = self._new_folder("files")
        mountparts.fill(held, files)
        for name in files:
            spot = place / name
            if not spot.exists():
                self._make_room(spot)
                spot.parent.mkdir(parents=True, exist_ok=True)
                spot.touch()
            mountcalls.mount(str(held / name), str(spot), BIND)
            mountcalls.make_read_only(spot)

    def shield(self, keep: Iterable[str] = (), frozen: Iterable[str] = ()) -> None:
        """Keep all that is written from now on in this view, except in what machines share.

        What processes have open already stays as it was for them. Files that the machine changes
        later may be seen as they were. After a failure some is kept and some is not; to ask again
        goes on with the rest. Of several threads that ask one does it and the others wait.

        Args:
            keep: Further folders that are shared with the machine.
            frozen: Folders that are always seen as the machine has them, and cannot be written.

        Raises:
            OSError: The machine has no overlay file system, or something else went wrong.
        """
        with self._shielding:
            if self._is_shielded:
                return
            self._frozen |= {path for path in _real(frozen) if path.exists()}
            mounted = mountcalls.mounted()
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
        """Let something be made at a path that the machine does not see; the first part of it."""
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
        mountparts.make_alike(mirror, folder)
        mountcalls.mount(str(mirror), str(mirror), BIND)
        with contextlib.ExitStack() as undoing:
            undoing.callback(mountcalls.unmount, mirror)
            # So that no folder that is bound into it, and has it somewhere below, has it again.
            mountcalls.mount(None, str(mirror), UNBINDABLE)
            with os.scandir(folder) as entries:
                for entry in sorted(entries, key=lambda one: one.name):
                    mountparts.mirror_entry(entry, mirror / entry.name)
            mountcalls.mount(None, str(mirror), PRIVATE)
            if str(folder) == "/":
                mountcalls.change_root(mirror)
            else:
                mountcalls.mount(str(mirror), str(folder), MOVE)
            undoing.pop_all()
        self._mirrors.add(folder)

    # -------------------------------------------------------------------------------------- shield

    def _cover(self, folder: Path, shared: AbstractSet[Path], mounted: AbstractSet[Path]) -> None:
        """Let writes to a folder go elsewhere, but not those to what is shared in it."""
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
                        mountcalls.make_read_only(entry)  # the machine has removed it
                    elif error.errno == errno.EINVAL:
                        self._freeze(entry, shared, mounted)  # not every one can be a layer
                    else:
                        raise
            elif entry.is_file():
                mountparts.make_read_only(entry)

    def _freeze(self, folder: Path, shared: AbstractSet[Path], mounted: AbstractSet[Path]) -> None:
        """Let nothing be written in a folder, nor on the disks in it, but in what is shared."""
        mountcalls.mount(str(folder), str(folder), BIND | RECURSIVE)
        kept = set(_outermost(_inside(folder, shared - self._frozen)))
        for place in kept:
            with mountparts.unreachable():
                mountcalls.mount(str(place), str(place), BIND | RECURSIVE)
        mountcalls.make_read_only(folder)
        for place in _inside(folder, mounted) - kept:
            if kept.isdisjoint(place.parents):
                mountparts.make_read_only(place)

    def _overlay(self, folder: Path, inside: Iterable[Path]) -> None:
        overlay = self._new_folder("overlay")
        try:
            mountparts.overlay(folder, self._new_folder("layer"), overlay)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # A layer cannot lie on every file system; on this one it always can.
            layer = self._new_folder("layer")
            mountcalls.mount("tmpfs", str(layer), 0, kind="tmpfs", data="mode=700")
            try:
                mountparts.overlay(folder, layer, overlay)
            finally:
                mountcalls.unmount(layer)  # the overlay keeps it
        with contextlib.ExitStack() as undoing:
            undoing.callback(mountcalls.unmount, overlay)
            mountcalls.mount(None, str(overlay), UNBINDABLE)  # see `_mirror`
            for place in inside:
                with mountparts.unreachable():
                    inner = overlay / place.relative_to(folder)
                    mountcalls.mount(str(place), str(inner), BIND | RECURSIVE)
            mountcalls.mount(None, str(overlay), PRIVATE)
            mountcalls.mount(str(overlay), str(folder), MOVE)
            undoing.pop_all()
        self._covered.add(folder)
        self._own.append(folder)


def _real(paths: Iterable[str]) -> set[Path]:
    return {Path(os.path.realpath(path)) for path in paths}


def _inside(folder: Path, places: Iterable[Path]) -> set[Path]:
    return {place for place in places if folder in place.parents}


def _outermost(places: Iterable[Path]) -> Iterator[Path]:
    """Those that lie in no other one."""
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
