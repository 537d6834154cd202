"""Which files of a project do not travel.

For each name, the first of these sources with a pattern that matches the name decides:

1. `.ktignore` files, from the name's own folder up to the project: syntax of `.gitignore`;
2. `BUILT_IN`, and every folder that is a virtual environment (it has a `pyvenv.cfg`); only a
   pattern of a `.ktignore` that has the very name in it goes before these, as `!node_modules/`;
3. `.gitignore` files, from the name's own folder up to the top of the git repository.

So `!name` in a `.ktignore` makes a file travel that the other sources leave out. `!follow PATH` in
a `.ktignore` names links out of the project whose targets travel. A scan does not enter a folder
that does not travel. Filters of the `KT_RSYNC_FILTERS` variable replace all of this.

Patterns are matched as git matches them (https://git-scm.com/docs/gitignore). A pattern is matched
against one entry and never against the folders above it: a scan, like git, does not enter a folder
that is ignored.
"""

# Names are text: a Path for each of thousands of files costs more than everything else here.
# ruff: noqa: PTH110, PTH116, PTH120, PTH123

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import replace

from kubetorch.errors import SpecError
from kubetorch.lib.frozen_values import FrozenValue

_CLASSES = {
    "alnum": "a-zA-Z0-9",
    "alpha": "a-zA-Z",
    "blank": " \\t",
    "digit": "0-9",
    "lower": "a-z",
    "space": "\\s",
    "upper": "A-Z",
    "xdigit": "0-9a-fA-F",
}


_FOLLOW = "!follow "


class Pattern(FrozenValue):
    """A line of an ignore file."""

    text: str
    #: False for a pattern that begins with `!`.
    is_excluding: bool
    #: True for a pattern that ends in `/`: it matches folders only.
    for_folders: bool
    #: True for a pattern without `/`: it matches the name of an entry, in any folder.
    by_name: bool
    regex: re.Pattern[str]
    #: The ignore file and the line of the pattern.
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"line {self.line} of {self.file}, {self.text}"

    def matches(self, path: str) -> bool:
        return bool(self.regex.fullmatch(path.rpartition("/")[2] if self.by_name else path))


class Patterns:
    """The patterns of one file; the last one that matches decides."""

    def __init__(self, lines: Iterable[str], file: str = "") -> None:
        lines = list(lines)
        numbered_patterns = ((parse(text), number) for number, text in enumerate(lines, 1))
        self._patterns = [
            replace(pattern, file=file, line=number)
            for pattern, number in numbered_patterns
            if pattern is not None
        ]
        self._patterns.reverse()
        links = (parse(line[len(_FOLLOW) :]) for line in lines if line.startswith(_FOLLOW))
        self._links = [pattern for pattern in links if pattern is not None]

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def decide(self, path: str, *, is_folder: bool) -> Pattern | None:
        for pattern in self._patterns:
            if pattern.for_folders and not is_folder:
                continue
            if pattern.matches(path):
                return pattern
        return None

    def follow(self, path: str) -> bool:
        """True if a `!follow` line names this link, so that its target travels."""
        return any(pattern.matches(path) for pattern in self._links)


def parse(line: str) -> Pattern | None:
    """The pattern in a line; `None` for a line without one, or whose pattern matches nothing."""
    text = _without_trailing_spaces(line.rstrip("\r\n"))
    if text.startswith("#"):
        return None
    is_excluding = not text.startswith("!")
    text = text if is_excluding else text[1:]
    for_folders = text.endswith("/")
    glob = text[:-1] if for_folders else text
    by_name = "/" not in glob
    regex = _translate(glob.removeprefix("/"))
    if not glob.strip("/") or regex is None:
        return None
    return Pattern(text, is_excluding, for_folders, by_name, re.compile(regex, re.DOTALL))


def _without_trailing_spaces(line: str) -> str:
    stripped = line.rstrip(" ")
    backslashes = len(stripped) - len(stripped.rstrip("\\"))
    # An odd backslash makes the first of the spaces a part of the pattern.
    return stripped + " " if backslashes % 2 and len(stripped) < len(line) else stripped


def _translate(glob: str) -> str | None:
    """The regular expression for a glob; `None` when it can match nothing."""
    expressions = []
    position = 0
    while position < len(glob):
        char = glob[position]
        if char == "*":
            end = position
            while end < len(glob) and glob[end] == "*":
                end += 1
            opens = position == 0 or glob[position - 1] == "/"
            if end - position > 1 and opens and glob[end : end + 1] == "/":
                expressions.append("(?:.*/)?")
                end += 1
            elif end - position > 1 and opens and end == len(glob):
                expressions.append(".+" if position else ".*")
            else:
                expressions.append("[^/]*")
            position = end
        elif char == "?":
            expressions.append("[^/]")
            position += 1
        elif char == "[":
            bracket = _bracket(glob, position)
            if bracket is None:
                return None
            expression, position = bracket
            expressions.append(expression)
        else:
            if char == "\\":
                position += 1
                if position == len(glob):
                    return None
            expressions.append(re.escape(glob[position]))
            position += 1
    return "".join(expressions)


def _bracket(glob: str, begin: int) -> tuple[str, int] | None:
    """The expression for `[…]`, and the position behind it; `None` when it does not end."""
    position = begin + 1
    negation = ""
    if glob[position : position + 1] in ("!", "^"):
        negation = "^"
        position += 1
    ranges: list[str] = []
    first_position = position
    while True:
        if position >= len(glob):
            return None
        if glob[position] == "]" and position > first_position:
            break
        if glob.startswith("[:", position):
            name, colon, _ = glob[position + 2 :].partition(":]")
            if colon and name in _CLASSES:
                ranges.append(_CLASSES[name])
                position += len(name) + 4
                continue
        low, position = _character(glob, position)
        if glob[position : position + 1] == "-" and glob[position + 1 : position + 2] not in (
            "",
            "]",
        ):
            high, position = _character(glob, position + 1)
            if low <= high:
                ranges.append(f"{re.escape(low)}-{re.escape(high)}")
        else:
            ranges.append(re.escape(low))
    if not ranges:  # only ranges that are the wrong way round
        return ("[^/]" if negation else "(?!)"), position + 1
    return f"(?!/)[{negation}{''.join(ranges)}]", position + 1


def _character(glob: str, position: int) -> tuple[str, int]:
    if glob[position] == "\\" and position + 1 < len(glob):
        position += 1
    return glob[position], position + 1


KT_IGNORE = ".ktignore"
GIT_IGNORE = ".gitignore"
IGNORE_FILES = (KT_IGNORE, GIT_IGNORE)

#: Byte code, version control, environments, and caches that tools write beside the code, which
#: would make every run of the tests a new generation.
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
    """The rules of one project; an ignore file is read when a name in its folder is decided."""

    def __init__(self, root: str, filters: tuple[str, ...] | None = None) -> None:
        self._root = root
        self._filters = filters
        self._filter_patterns = None if filters is None else Patterns(filters)
        self._files: dict[str, Patterns] = {}
        self._chains: dict[tuple[str, str], list[tuple[int, Patterns]]] = {}
        self._parent_folders = _repository_folders(root) if filters is None else []

    def signature(self) -> list[str]:
        """A list that changes when rules from outside of the project's folder change."""
        if self._filters is not None:
            return ["filters", *self._filters]
        signature = []
        for folder in self._parent_folders:
            path = f"{folder}/{GIT_IGNORE}"
            try:
                file_stat = os.stat(path)
            except OSError:
                continue
            times = f"{file_stat.st_mtime_ns} {file_stat.st_ctime_ns}"
            signature.append(f"{path} {file_stat.st_size} {times} {file_stat.st_ino}")
        return signature

    def is_ignored(self, folder: str, name: str, *, is_folder: bool) -> bool:
        rule = self._deciding_rule(folder, name, is_folder=is_folder)
        return rule is not None and (isinstance(rule, str) or rule.is_excluding)

    def why_ignored(self, folder: str, name: str, *, is_folder: bool) -> str | None:
        """The rule that leaves a name out, in words; `None` if the name travels."""
        rule = self._deciding_rule(folder, name, is_folder=is_folder)
        if isinstance(rule, Pattern):
            if not rule.is_excluding:
                return None
            return f"KT_RSYNC_FILTERS ({rule.text})" if self._filters is not None else str(rule)
        return rule

    def _deciding_rule(self, folder: str, name: str, *, is_folder: bool) -> Pattern | str | None:
        """The pattern that decides on a name, or the description of a built-in rule."""
        path = f"{folder}/{name}" if folder else name
        if self._filter_patterns is not None:
            return self._filter_patterns.decide(path, is_folder=is_folder)
        pattern = self._decide(KT_IGNORE, folder, path, is_folder=is_folder)
        if pattern is not None and (pattern.is_excluding or name in pattern.text):
            return pattern
        if self._is_built_in(path, name, is_folder=is_folder):
            return "a rule that is built in"
        if pattern is None:
            pattern = self._decide(GIT_IGNORE, folder, path, is_folder=is_folder)
            pattern = pattern or self._decide_above(path, is_folder=is_folder)
        return pattern

    def is_followed(self, folder: str, name: str) -> bool:
        """True if a `.ktignore` has a `!follow` line for this link out of the project."""
        path = f"{folder}/{name}" if folder else name
        while True:
            base = f"{folder}/" if folder else ""
            if self._read(f"{self._root}/{base}{KT_IGNORE}").follow(path[len(base) :]):
                return True
            if not folder:
                return False
            folder = folder.rpartition("/")[0]

    def _is_built_in(self, path: str, name: str, *, is_folder: bool) -> bool:
        if name in BUILT_IN or name.endswith(_BUILT_IN_SUFFIX):
            return True
        return is_folder and os.path.exists(f"{self._root}/{path}/{_ENVIRONMENT_MARK}")

    def _decide(self, file: str, folder: str, path: str, *, is_folder: bool) -> Pattern | None:
        for base, patterns in self._patterns_above(file, folder):
            pattern = patterns.decide(path[base:], is_folder=is_folder)
            if pattern is not None:
                return pattern
        return None

    def _patterns_above(self, file: str, folder: str) -> list[tuple[int, Patterns]]:
        """The patterns for names in a folder, the nearest first, and where their paths begin."""
        chain = self._chains.get((file, folder))
        if chain is None:
            base = f"{folder}/" if folder else ""
            patterns = self._read(f"{self._root}/{base}{file}")
            chain = [(len(base), patterns)] if patterns else []
            if folder:
                chain += self._patterns_above(file, folder.rpartition("/")[0])
            self._chains[file, folder] = chain
        return chain

    def _decide_above(self, path: str, *, is_folder: bool) -> Pattern | None:
        for folder in self._parent_folders:
            patterns = self._read(f"{folder}/{GIT_IGNORE}")
            inner = self._root[len(folder) :].strip("/")
            # A user who deploys a project wants it, even if its repository ignores its folder.
            if not patterns or _ignores(patterns, inner):
                continue
            pattern = patterns.decide(f"{inner}/{path}", is_folder=is_folder)
            if pattern is not None:
                return pattern
        return None

    def _read(self, path: str) -> Patterns:
        """The patterns in a file; an absent file has none."""
        if path not in self._files:
            self._files[path] = Patterns(_lines(path), path)
        return self._files[path]


def _ignores(patterns: Patterns, folder: str) -> bool:
    """True if a folder, or one above it, is ignored."""
    while folder:
        pattern = patterns.decide(folder, is_folder=True)
        if pattern is not None and pattern.is_excluding:
            return True
        folder = folder.rpartition("/")[0]
    return False


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file:
            return file.readlines()
    except PermissionError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}") from error
    except OSError:  # it is not there, a folder, or a link that leads nowhere
        return []


def _repository_folders(root: str) -> list[str]:
    """The folders above the project in its git repository, the nearest first."""
    folders: list[str] = []
    folder = root
    while not os.path.exists(f"{folder}/.git"):
        parent = os.path.dirname(folder)
        if parent == folder:
            return []
        folders.append(parent)
        folder = parent
    return folders


# ---------------------------------------------------------------------------- KT_RSYNC_FILTERS


def parse_filters(text: str, name: str = "KT_RSYNC_FILTERS") -> tuple[str, ...]:
    """Translate filters of rsync, such as `KT_RSYNC_FILTERS` has, into lines of a `.gitignore`.

    Takes `--exclude=PATTERN` and `--include=PATTERN` of rsync, where the first pattern that matches
    a name decides.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SpecError(f"{name} is {text!r}: {error}") from error
    lines: list[str] = []
    while words:
        option, equals, pattern = words.pop(0).partition("=")
        if option not in ("--exclude", "--include"):
            raise SpecError(
                f"{name} has {option!r}; it may have --exclude=PATTERN and --include=PATTERN"
            )
        if not equals and words:
            pattern = words.pop(0)
        if not pattern:
            raise SpecError(f"{name} has {option} without a pattern")
        lines.extend(_translated(pattern, "!" if option == "--include" else ""))
    # rsync: the first that matches; .gitignore: the last.
    return tuple(reversed(lines))


def _translated(pattern: str, sign: str) -> list[str]:
    """A pattern of rsync as patterns of `.gitignore`."""
    if pattern.endswith("/***"):  # a folder, and everything in it
        folder = pattern.removesuffix("***")
        return [*_translated(f"{folder}**", sign), *_translated(folder, sign)]
    # A slash in the middle anchors a pattern of .gitignore, not one of rsync.
    if "/" in pattern.rstrip("/") and not pattern.startswith(("/", "**/")):
        pattern = f"**/{pattern}"
    if not sign and pattern.startswith(("#", "!")):
        pattern = f"\\{pattern}"
    return [sign + pattern]
