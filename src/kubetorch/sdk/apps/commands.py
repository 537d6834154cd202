"""The command of an app: the files that it names, and what they are called in a pod."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from kubetorch.errors import SpecError
from kubetorch.sdk.deploys.project import ProjectRef

_WORD = re.compile(r"\S+")
#: `package.module:application`, as servers of ASGI and WSGI take it.
_APPLICATION = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_][\w.()]*")


def is_command(text: str) -> bool:
    """Whether the first argument of `kt.app` is a command, and not a name."""
    return any(character.isspace() for character in text.strip())


def python_file(command: str) -> str | None:
    """The first word of a command that is a Python file, as it stands there."""
    return next((word for word in command.split() if word.endswith(".py")), None)


def local_files(command: str, folder: Path) -> Iterator[Path]:
    """Files of this machine that a command names.

    Args:
        command: The command.
        folder: Where its relative paths begin.
    """
    for word in command.split():
        application = _APPLICATION.fullmatch(word)
        found = folder / word
        if application is not None:
            found = folder.joinpath(*application[1].split(".")).with_suffix(".py")
        if found.is_file():
            yield Path(os.path.abspath(found))  # noqa: PTH100  # links stay as they are


def run_folder(where: ProjectRef, cwd: Path, workdir: str | None = None) -> str | None:
    """Where an app runs in the project: what is the working directory here, if it lies in there.

    Args:
        where: What travels.
        cwd: The working directory here.
        workdir: That of the image, for an app of which nothing travels.
    """
    if where.folder is None:
        return workdir
    if cwd.is_relative_to(where.folder):
        inner = cwd.relative_to(where.folder).as_posix()
        return "" if inner == "." else inner
    return where.root


def in_pod(command: str, where: ProjectRef, cwd: Path, folder: str | None) -> str:
    """The command with paths of this machine replaced by those of a pod.

    Args:
        command: As it works here.
        where: What travels.
        cwd: Where its relative paths begin here.
        folder: Where it runs in the project; `None` is the folder that the project lies in.

    Raises:
        SpecError: It names a file that does not travel, beside one that does.
    """
    if where.folder is None:
        return command
    project = where.folder
    if where.only is not None:
        _check_files(command, where, cwd)
    base = "." if folder is None else f"{where.name}/{folder}"
    is_same_folder = folder is not None and cwd == project / folder

    def moved(match: re.Match[str]) -> str:
        word = match[0]
        path = Path(os.path.abspath(cwd / word))  # noqa: PTH100  # links stay as they are
        is_kept = is_same_folder and not word.startswith("/")
        if is_kept or not (path.is_relative_to(project) and path.is_file()):
            return word
        there = PurePosixPath(where.name or "", path.relative_to(project).as_posix())
        found = os.path.relpath(there, base)
        return found if "/" in found else f"./{found}"

    return _WORD.sub(moved, command)


def _check_files(command: str, where: ProjectRef, cwd: Path) -> None:
    assert where.folder is not None
    assert where.only is not None
    for path in local_files(command, cwd):
        if path != where.folder / where.only and path.is_relative_to(where.folder):
            raise SpecError(
                f"{path.name} would not be sent: {where.folder} is no project, "
                f"so only {where.only} is",
                hint=f"sync_dir={str(where.folder)!r} sends the folder, "
                "and so does an empty pyproject.toml in it",
            )
