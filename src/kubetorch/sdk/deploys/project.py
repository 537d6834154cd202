"""Where the code of a callable lies: which folder travels, and what a pod imports from it.

/home/me/shop/                 the project: it has a marker, and travels
/home/me/shop/src/             the root: the entry of `sys.path`
/home/me/shop/src/ml/train.py  the module `ml.train`
"""

from __future__ import annotations

import os
from pathlib import Path

from kubetorch.errors import SpecError
from kubetorch.lib.records import record

#: What makes a folder the top of a project.
MARKERS = (".git", "setup.py", "setup.cfg", "pyproject.toml", "requirements.txt")

_INSTALLED = ("site-packages", "dist-packages")


@record
class ProjectRef:
    """What travels, and how the callable's module is imported there.

    Attributes:
        folder: The folder that travels, absolute; `None` when no code does.
        only: The one file of it that travels, relative to it; `None` is all of the folder.
        name: Name of the folder in a pod; `None` when no code travels.
        root: The entry of `sys.path`, relative to the folder; `""` is the folder itself.
        import_path: The module's dotted name.
        source_file: The module's file, relative to the folder; `None` when no code travels.
        remote_dir: Entry of `sys.path` for code that the container has already.
    """

    import_path: str
    folder: Path | None = None
    only: str | None = None
    name: str | None = None
    root: str = ""
    source_file: str | None = None
    remote_dir: str | None = None


def locate(
    file: str | None,
    module: str | None,
    *,
    sync_dir: str | Path | bool | None = None,
    remote_dir: str | None = None,
    remote_import_path: str | None = None,
) -> ProjectRef:
    """The project of a module.

    Args:
        file: The module's file; `None` when it has none, as a built-in one.
        module: Its dotted name; `None` or `__main__` is a script, which is imported by the name of
            its file.
        sync_dir: The folder that travels; `None` or `True` finds it, `False` is none.
        remote_dir: Folder in the container that has the code already; nothing travels then.
        remote_import_path: Dotted name of the module there.

    Raises:
        SpecError: The arguments contradict each other, or the module is not in `sync_dir`.
    """
    if sync_dir and remote_dir:
        raise SpecError(
            f"sync_dir={str(sync_dir)!r} and remote_dir={remote_dir!r} exclude each other",
            hint="sync_dir sends code, remote_dir says where the container has it already",
        )
    if remote_import_path and not remote_dir:
        raise SpecError(f"remote_import_path={remote_import_path!r} needs a remote_dir")
    if file is None:
        if module in (None, "__main__"):
            raise SpecError("the callable has no source file, so it cannot be sent to a pod")
        assert module is not None
        return ProjectRef(remote_import_path or module, remote_dir=remote_dir)
    # Links stay as they are: one in a project may lead out of it, and is followed when it travels.
    path = Path(os.path.abspath(file))  # noqa: PTH100  # Path.resolve() would follow links
    root, import_path = pointers(path, module)
    if (
        remote_dir
        or sync_dir is False
        or (not isinstance(sync_dir, (str, Path)) and _is_installed(path))
    ):
        return ProjectRef(remote_import_path or import_path, remote_dir=remote_dir or None)
    if isinstance(sync_dir, (str, Path)):
        return _in_folder(path, root, import_path, sync_dir)
    folder = find_project(root)
    if folder is None:
        only = path.relative_to(root).as_posix()
        return ProjectRef(import_path, folder=root, only=only, name=_name(root), source_file=only)
    return _whole(folder, path, root, import_path)


def find_project(start: Path) -> Path | None:
    """The nearest folder, from `start` up, that has a marker; not the home folder, nor `/`."""
    home = Path.home()
    for folder in (start, *start.parents):
        if folder in (home, home.resolve(), folder.parent):
            return None
        if any((folder / marker).exists() for marker in MARKERS):
            return folder
    return None


def pointers(path: Path, module: str | None) -> tuple[Path, str]:
    """The entry of `sys.path` that a module was imported from, and its dotted name from there."""
    if module not in (None, "__main__"):
        assert module is not None
        parts = module.split(".")
        inner = path.parent if path.name == "__init__.py" else path.with_suffix("")
        if tuple(inner.parts[-len(parts) :]) == tuple(parts):
            return inner.parents[len(parts) - 1], module
    return path.parent, path.stem


def _in_folder(path: Path, root: Path, import_path: str, sync_dir: str | Path) -> ProjectRef:
    folder = Path(os.path.abspath(Path(sync_dir).expanduser()))  # noqa: PTH100  # as for the file
    if not folder.is_dir():
        raise SpecError(f"sync_dir={str(sync_dir)!r} is no folder")
    if not path.is_relative_to(folder):  # one of the two may have been given through a link
        real = folder.resolve()
        path, root, folder = (
            (path.resolve(), root.resolve(), real)
            if path.resolve().is_relative_to(real)
            else (path, root, folder)
        )
    if not path.is_relative_to(folder):
        raise SpecError(
            f"sync_dir={str(sync_dir)!r} does not have {path}, the file of the callable",
            hint=f"give a folder above it, such as sync_dir={str(path.parent)!r}",
        )
    if root.is_relative_to(folder):
        return _whole(folder, path, root, import_path)
    inner = path.relative_to(folder).with_suffix("")
    parts = inner.parts[:-1] if inner.name == "__init__" else inner.parts
    if not parts:
        raise SpecError(
            f"sync_dir={str(sync_dir)!r} is the package {import_path} itself, which could not be "
            "imported from there",
            hint=f"sync_dir={str(folder.parent)!r}",
        )
    return _whole(folder, path, folder, ".".join(parts))


def _whole(folder: Path, path: Path, root: Path, import_path: str) -> ProjectRef:
    inner = root.relative_to(folder).as_posix()
    return ProjectRef(
        import_path,
        folder=folder,
        name=_name(folder),
        root="" if inner == "." else inner,
        source_file=path.relative_to(folder).as_posix(),
    )


def _name(folder: Path) -> str:
    return folder.name or "project"


def _is_installed(path: Path) -> bool:
    """Whether a file is a part of Python or of an installed distribution."""
    standard = Path(os.__file__).parent
    return any(part in _INSTALLED for part in path.parts) or path.is_relative_to(standard)
