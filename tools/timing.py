"""`python -m tools.timing`: the page of all times and limits, docs/design/timing.md.

Names, reasons and mechanisms come from the text of the modules `tuning.py`, values from the tables
in them. A contract test compares the page with what this prints.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src/kubetorch"
#: Its dictionary `RELATIONS` has sentences, and the expression that each stands for.
_RELATIONS_TEST = Path(__file__).parents[1] / "tests/contract/test_timing.py"
#: The name of a module of times and limits.
MODULE = "tuning.py"
#: The instance of each class, whose values the page has.
INSTANCES = {"Timing": "TIMING", "Limits": "LIMITS"}
_TITLES = {
    "sdk": "The client",
    "pod": "The agent",
    "pod.user_process": "The worker",
    "controller": "The controller",
    "local": "The local service",
    "install": "The installer",
    "manifests": "Manifests",
    "wire": "Both ends of a connection",
    "k8s": "The client of the Kubernetes API",
    "datastore": "Files and blobs",
    "lib": "Libraries",
}
_WIDTH = 110
_SECTION = re.compile(r"\s*# -{5,} (.+)")
_INTRODUCTION = """\
# Times and limits

<!-- Made by `python -m tools.timing`. -->

Every time and every limit of bytes has its place in one table per process or library, grouped by
mechanism, with its reason. What follows from another number is derived from it in its table.
Numbers of an algorithm or a format are not here: they stay with the code that knows why.

## What holds between the processes

`tests/contract/test_timing.py` asserts each of these; what holds within a process, its table
asserts."""


@dataclass(frozen=True)
class Entry:
    """A number with its name and reason."""

    name: str
    value: float | tuple[float, ...]
    reason: str
    #: The mechanism that it belongs to; empty if the table has no such parts.
    section: str


def packages() -> list[str]:
    """The packages with tables, such as `pod.user_process`; processes first."""
    paths = (path.parent.relative_to(SOURCES) for path in SOURCES.rglob(MODULE))
    order = list(_TITLES)
    names = sorted(".".join(path.parts) for path in paths)
    return sorted(names, key=lambda name: order.index(name) if name in order else len(order))


def entries(package: str) -> Iterator[Entry]:
    """The numbers of a package."""
    path = SOURCES.joinpath(*package.split("."), MODULE)
    text = path.read_text(encoding="utf-8")
    module = importlib.import_module(f"kubetorch.{package}.tuning")
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name in INSTANCES:
            table = getattr(module, INSTANCES[node.name])
            section = ""
            for field, comments in _fields(node, text.splitlines()):
                for comment in comments:
                    if match := _SECTION.match(comment):
                        section = match[1]
                reason = " ".join(c[2:].strip() for c in comments if c.startswith("#:"))
                yield Entry(field, getattr(table, field), reason, section)


def _fields(cls: ast.ClassDef, lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """The names of a table, properties included, and the comments above each."""
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name, first = node.target.id, node.lineno
        elif isinstance(node, ast.FunctionDef) and node.decorator_list:
            name, first = node.name, node.decorator_list[0].lineno
        else:
            continue
        comments: list[str] = []
        for line in reversed(lines[: first - 1]):
            if line.strip() and not line.strip().startswith("#"):
                break
            comments.insert(0, line.strip())
        yield name, comments


def readable(name: str, value: float | tuple[float, ...]) -> str:
    """A value with its unit, which is the end of its name."""
    if isinstance(value, tuple):
        return ", ".join(readable(name, part) for part in value)
    if name.endswith("_bytes"):
        return _bytes(int(value))
    if name.endswith("_milliseconds"):
        return _seconds(value / 1000)
    if name.endswith("_seconds"):
        return _seconds(value)
    if name.endswith("_share"):
        return f"{100 * value:g} %"
    return f"{value:,}"


def _bytes(count: int) -> str:
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power and count % 1024**power == 0:
            return f"{count // 1024**power:,} {unit}"
    return f"{count:,} B"


def _seconds(seconds: float) -> str:
    if 0 < seconds < 1:
        return f"{1000 * seconds:g} ms"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size and seconds % size == 0:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:,.10g} s"


def page() -> str:
    """The page, in Markdown."""
    parts = [_INTRODUCTION, "\n".join(_relations())]
    for package in packages():
        parts.append(f"## {_TITLES.get(package, package)}")
        parts.append(f"`kubetorch.{package}.tuning`")
        sections: dict[str, list[str]] = {}
        for entry in entries(package):
            sections.setdefault(entry.section, []).append(_item(entry))
        for section, items in sections.items():
            if section:
                parts.append(f"### {section[0].upper()}{section[1:]}")
            parts.append("\n".join(items))
    return "\n\n".join(parts) + "\n"


def _relations() -> Iterator[str]:
    module = ast.parse(_RELATIONS_TEST.read_text(encoding="utf-8"))
    for node in module.body:
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "RELATIONS"
            and isinstance(node.value, ast.Dict)
        ):
            for sentence, expression in zip(node.value.keys, node.value.values, strict=True):
                assert isinstance(sentence, ast.Constant)
                text = re.sub(r"\b(TIMING|LIMITS)\.", "", ast.unparse(expression))
                yield _filled(f"- {sentence.value}: `{text}`")


def _item(entry: Entry) -> str:
    return _filled(f"- **`{entry.name}`** · {readable(entry.name, entry.value)}. {entry.reason}")


def _filled(text: str) -> str:
    return textwrap.fill(
        text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def main() -> None:
    """Print the page."""
    sys.stdout.write(page())


if __name__ == "__main__":
    main()
