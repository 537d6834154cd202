"""Which files of a project do not travel.

For each name the first of these decides that says anything about it:

1. `.ktignore` files, from the name's own folder up to the project: syntax of `.gitignore`;
2. `.gitignore` files, in the same order, and on to the top of the git repository that the project
   is a part of;
3. `BUILT_IN`, and every folder that is a virtual environment (it has a `pyvenv.cfg`).

So `!name` in a `.ktignore` makes travel what the others leave out. A folder that does not travel is
not looked into. Filters of the `KT_RSYNC_FILTERS` variable replace all of this.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kubetorch.errors import SpecError

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

KT_IGNORE = ".ktignore"
GIT_IGNORE = ".gitignore"
IGNORE_FILES = (KT_IGNORE, GIT_IGNORE)

#: Names that never travel unless a `.ktignore` says so: byte code, version control, environments,
#: and caches that tools write beside the code, which would make every test run a new generation.
BUILT_IN = frozenset(
    {
        "__pycache__",
        ".venv",
        ".git",
        ".hg",
        ".svn",
        ".DS_Store",
        ".ipynb_checkpoints",
        ".mypy_cache",
        ".nox",
        ".pytest_cache",
        ".ruff_cache",
        ".tox",
        "node_modules",
    }
)
_BUILT_IN_SUFFIX = ".pyc"
_ENVIRONMENT_MARK = "pyvenv.cfg"


class IgnoreRules:
    """The rules of one project; files with rules are read when a name has to be decided.

    Args:
        root: The project's folder.
        filters: Instead of all rules, see `parse_filters`.
    """

    def __init__(self, root: str, filters: tuple[str, ...] | None = None) -> None:
        self._root = root
        self._filters = filters
        self._filter_spec: GitIgnoreSpec | None = None
        self._specs: dict[tuple[str, str], GitIgnoreSpec | None] = {}
        self._above = None if filters is not None else _above(root)

    def signature(self) -> list[str]:
        """Changes when the rules change that do not come from files in the project."""
        if self._filters is not None:
            return ["filters", *self._filters]
        signature = []
        for folder in self._above or ():
            path = f"{folder}/{GIT_IGNORE}"
            try:
                facts = os.stat(path)  # noqa: PTH116  # names are text here
            except OSError:
                continue
            signature.append(f"{path} {facts.st_size} {facts.st_mtime_ns} {facts.st_ino}")
        return signature

    def is_ignored(self, folder: str, name: str, *, is_folder: bool) -> bool:
        """Whether the entry `name` of a folder stays at home.

        Args:
            folder: Relative to the project; `""` is the project.
            name: The entry's name.
            is_folder: Whether it is a folder, and no link to one.
        """
        path = f"{folder}/{name}" if folder else name
        marked = f"{path}/" if is_folder else path
        if self._filters is not None:
            return bool(self._matches(self._filter_rules(self._filters), marked))
        for file in IGNORE_FILES:
            found = self._decide(file, folder, marked)
            if found is not None:
                return found
        if name in BUILT_IN or name.endswith(_BUILT_IN_SUFFIX):
            return True
        return is_folder and os.path.exists(  # noqa: PTH110  # names are text here
            f"{self._root}/{path}/{_ENVIRONMENT_MARK}"
        )

    def _decide(self, file: str, folder: str, marked: str) -> bool | None:
        while True:
            spec = self._spec(file, folder)
            if spec is not None:
                inner = marked[len(folder) + 1 :] if folder else marked
                found = self._matches(spec, inner)
                if found is not None:
                    return found
            if not folder:
                break
            folder = folder.rpartition("/")[0]
        return self._decide_above(marked) if file == GIT_IGNORE else None

    def _decide_above(self, marked: str) -> bool | None:
        for folder in self._above or ():
            spec = self._spec(GIT_IGNORE, folder, is_above=True)
            if spec is None:
                continue
            inner = self._root[len(folder) :].strip("/")
            # Rules that leave out the whole project are not meant for whoever deploys it.
            if not self._matches(spec, f"{inner}/"):
                found = self._matches(spec, f"{inner}/{marked}")
                if found is not None:
                    return found
        return None

    def _spec(self, file: str, folder: str, *, is_above: bool = False) -> GitIgnoreSpec | None:
        key = (file, f"\0{folder}" if is_above else folder)
        if key not in self._specs:
            base = folder if is_above else f"{self._root}/{folder}"
            self._specs[key] = _read(f"{base}/{file}")
        return self._specs[key]

    def _filter_rules(self, filters: tuple[str, ...]) -> GitIgnoreSpec:
        if self._filter_spec is None:
            self._filter_spec = _compile(filters)
        return self._filter_spec

    @staticmethod
    def _matches(spec: GitIgnoreSpec, path: str) -> bool | None:
        return spec.check_file(path).include


def parse_filters(text: str) -> tuple[str, ...]:
    """What `KT_RSYNC_FILTERS` means, as lines of a `.gitignore`.

    Takes `--exclude=PATTERN` and `--include=PATTERN` of rsync, where the first pattern that matches
    a name decides.

    Raises:
        SpecError: There is something else in it.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SpecError(f"KT_RSYNC_FILTERS is {text!r}: {error}") from error
    lines = []
    while words:
        option, equals, pattern = words.pop(0).partition("=")
        if option not in ("--exclude", "--include"):
            raise SpecError(
                f"KT_RSYNC_FILTERS has {option!r}; it may have --exclude=PATTERN and "
                "--include=PATTERN"
            )
        if not equals:
            pattern = words.pop(0) if words else ""
        if not pattern:
            raise SpecError(f"KT_RSYNC_FILTERS has {option} without a pattern")
        lines.append(("!" if option == "--include" else "") + _translated(pattern))
    # rsync: the first that matches; .gitignore: the last.
    return tuple(reversed(lines))


def _translated(pattern: str) -> str:
    """A pattern of rsync as one of `.gitignore`."""
    pattern = pattern.removesuffix("***")
    # A slash in the middle anchors a pattern of .gitignore, not one of rsync.
    if "/" in pattern.rstrip("/") and not pattern.startswith(("/", "**/")):
        pattern = f"**/{pattern}"
    return f"\\{pattern}" if pattern.startswith(("#", "!")) else pattern


def _read(path: str) -> GitIgnoreSpec | None:
    """The rules in a file, if there are any."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123
            lines = [line.rstrip("\n") for line in file]
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}") from error
    if not any(line.strip() and not line.startswith("#") for line in lines):
        return None
    return _compile(lines, path)


def _compile(lines: Iterable[str], path: str = "KT_RSYNC_FILTERS") -> GitIgnoreSpec:
    from pathspec import GitIgnoreSpec  # noqa: PLC0415  # 24 ms, for new names only

    try:
        return GitIgnoreSpec.from_lines(lines)
    except ValueError as error:
        raise SpecError(f"{path} has a pattern that cannot be used: {error}") from error


def _above(root: str) -> list[str]:
    """The folders above the project in its git repository, the nearest first."""
    folders: list[str] = []
    folder = root
    while not os.path.exists(f"{folder}/.git"):  # noqa: PTH110  # names are text here
        parent = os.path.dirname(folder)  # noqa: PTH120  # names are text here
        if parent == folder:
            return []
        folders.append(parent)
        folder = parent
    return folders
