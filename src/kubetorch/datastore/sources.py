"""What a put finds on disk: the entries of a file or folder, not yet read.

All links are kept that lead to a place inside of the folder. A link that leads out of it, as those
of a Hugging Face cache do, is followed, so that its target is stored in its place.
"""

# Names are text: a Path for each of thousands of files costs more than everything else here.
# ruff: noqa: PTH116, PTH120, PTH115

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kubetorch.datastore.ignore_rules import IgnoreRules, Patterns, parse_filters
from kubetorch.datastore.manifests import EntryKind
from kubetorch.datastore.trees import is_text, target_fault
from kubetorch.errors import SpecError


class Source(NamedTuple):
    """An entry that a put will store; `disk_path` is where it is read."""

    path: str
    kind: EntryKind
    disk_path: str
    file_stat: os.stat_result
    target: str = ""


class FilterOptions:
    """Patterns of `filter_options`: those of files to include, and those to exclude."""

    def __init__(self, options: str | None) -> None:
        lines = () if not options else parse_filters(options, "filter_options")
        self._included = Patterns(line[1:] for line in lines if line.startswith("!"))
        self._excluded = Patterns(line for line in lines if not line.startswith("!"))

    @property
    def has_patterns(self) -> bool:
        return bool(self._included or self._excluded)

    def includes(self, path: str, *, is_folder: bool) -> bool:
        return self._included.decide(path, is_folder=is_folder) is not None

    def excludes(self, path: str, *, is_folder: bool) -> bool:
        return self._excluded.decide(path, is_folder=is_folder) is not None

    def leaves_out(self, path: str, *, is_folder: bool) -> bool:
        """True if a path, or a folder above it, is excluded and not included."""
        if not self._excluded:
            return False
        while path:
            if self.excludes(path, is_folder=is_folder):
                return not self.includes(path, is_folder=is_folder)
            path, is_folder = path.rpartition("/")[0], True
        return False


class Filter:
    """Decides which names of a folder travel.

    The first of these decides: the `--include` patterns of a put, the rules of `.ktignore` and
    `.gitignore` and those that are built in, or `KT_RSYNC_FILTERS` in place of these, and the
    `--exclude` patterns of the put.
    """

    def __init__(self, root: str, options: str | None, environment_filters: str | None) -> None:
        self._options = FilterOptions(options)
        filters = None if environment_filters is None else parse_filters(environment_filters)
        self._rules = IgnoreRules(root, filters)

    def travels(self, folder: str, name: str, *, is_folder: bool) -> bool:
        path = f"{folder}/{name}" if folder else name
        if self._options.includes(path, is_folder=is_folder):
            return True
        if self._rules.is_ignored(folder, name, is_folder=is_folder):
            return False
        return not self._options.excludes(path, is_folder=is_folder)


@dataclass
class Walk:
    """The entries below a folder, and remarks on what does not travel."""

    root: str
    filter: Filter
    sources: list[Source] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    def run(self, prefix: str = "") -> None:
        """Add all entries; their paths begin with `prefix`, which is empty or ends in `/`."""
        stack: list[tuple[str, str, tuple[str, ...]]] = [
            ("", self.root, (os.path.realpath(self.root),))
        ]
        while stack:
            folder, disk_path, parents = stack.pop()
            for source in self._list(folder, disk_path):
                if source.kind == "folder":
                    real = os.path.realpath(source.disk_path)
                    if real in parents:
                        self.warnings.append(f"{source.path} is left out: this link has no end")
                        continue
                    stack.append((source.path, source.disk_path, (*parents, real)))
                self.sources.append(
                    source._replace(path=prefix + source.path) if prefix else source
                )
        self.sources.sort(key=lambda source: source.path)

    def _list(self, folder: str, disk_path: str) -> Iterator[Source]:
        try:
            with os.scandir(disk_path) as scanned:
                entries = list(scanned)
        except FileNotFoundError:
            if not folder:
                raise
            return  # it vanished, as if it had a moment before
        for entry in entries:
            name = entry.name
            if not name.isascii() and not is_text(name):
                self.warnings.append(f"{folder or '.'}/{name!a} is left out: its name is not UTF-8")
                continue
            is_folder = entry.is_dir(follow_symlinks=False)
            path = f"{folder}/{name}" if folder else name
            if not self.filter.travels(folder, name, is_folder=is_folder):
                self.ignored.append(path)
                continue
            source = self._source(path, entry.path)
            if source is not None:
                yield source

    def _source(self, path: str, disk_path: str) -> Source | None:
        is_link = False
        try:
            file_stat = os.lstat(disk_path)
            is_link = stat.S_ISLNK(file_stat.st_mode)
            if is_link:
                target = self._target_inside(path, disk_path)
                if target is not None:
                    return Source(path, "symlink", disk_path, file_stat, target)
                disk_path = os.path.realpath(disk_path)
                file_stat = os.stat(disk_path)
        except FileNotFoundError:
            if is_link:
                self.warnings.append(f"{path} is left out: it is a link to nowhere")
            return None
        except OSError as error:
            raise unreadable(disk_path, error) from error
        if stat.S_ISREG(file_stat.st_mode):
            return Source(path, "file", disk_path, file_stat)
        if stat.S_ISDIR(file_stat.st_mode):
            return Source(path, "folder", disk_path, file_stat)
        self.warnings.append(f"{path} is left out: it is no file, folder or link")
        return None

    def _target_inside(self, path: str, disk_path: str) -> str | None:
        """The target of a link, relative to its folder; `None` if it leads out of the root."""
        target = os.readlink(disk_path)
        if target_fault(path, target) is None:
            return target
        root = os.path.realpath(self.root)
        real = os.path.realpath(disk_path)
        if real == root or real.startswith(f"{root}/"):
            return os.path.relpath(os.path.relpath(real, root), os.path.dirname(path) or ".")
        return None


def unreadable(path: str, error: OSError) -> SpecError:
    return SpecError(f"{path} cannot be read: {error.strerror}", hint="make it readable")
