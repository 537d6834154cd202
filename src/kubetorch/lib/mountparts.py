"""What the views of `kubetorch.lib.mounts` are put together from."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping
from pathlib import Path

from kubetorch.lib import mountcalls
from kubetorch.lib.mountcalls import BIND, RECURSIVE


def overlay(folder: Path, layer: Path, place: Path) -> None:
    """Show a folder at a place, with what is written there in a layer.

    Raises:
        OSError: It is refused; `EINVAL` where one of their file systems is not fit for it.
    """
    upper, work = layer / "upper", layer / "work"
    upper.mkdir(mode=0o700)
    make_alike(upper, folder)
    work.mkdir(mode=0o700)
    layers = f"lowerdir={_escaped(folder)},upperdir={_escaped(upper)},workdir={_escaped(work)}"
    # What an overlay notes about files has to be an attribute of users where they are the root.
    whole = Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]
    options = layers if whole else f"{layers},userxattr"
    mountcalls.mount("overlay", str(place), 0, kind="overlay", data=options)


def fill(folder: Path, files: Mapping[str, bytes]) -> None:
    """Have a folder hold files in memory."""
    mountcalls.mount("tmpfs", str(folder), 0, kind="tmpfs", data="mode=700")
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_bytes(content)
    mountcalls.make_read_only(folder)


def mirror_entry(entry: os.DirEntry[str], place: Path) -> None:
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
        mountcalls.mount(entry.path, str(place), BIND | RECURSIVE)
    except PermissionError:
        return  # what this user cannot reach is an empty place
    except (FileNotFoundError, NotADirectoryError):
        # Gone by now, or replaced by something of another kind. What comes later is not seen.
        if is_dir:
            place.rmdir()
        else:
            place.unlink()


def make_alike(place: Path, folder: Path) -> None:
    """Give a new folder owner and mode of another one."""
    found = folder.stat()
    with contextlib.suppress(OSError):  # only root can give something away
        os.chown(place, found.st_uid, found.st_gid)
    place.chmod(found.st_mode)


def make_read_only(place: Path) -> None:
    """Let nobody write to a mount, if there is one that this user can reach."""
    try:
        mountcalls.make_read_only(place)
    except OSError as error:
        # Nothing is mounted there, or something hides it.
        if error.errno not in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR, errno.EACCES):
            raise


def unreachable() -> contextlib.AbstractContextManager[None]:
    """Leave out what is not there or not for this user."""
    return contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError)


def _escaped(path: Path) -> str:
    return "".join(f"\\{letter}" if letter in ":,\\" else letter for letter in str(path))
