"""The share of names that say no noun: pronouns and participles, such as `found`, `one` and `said`.

python tools/words.py                     # the share of each package of src, and the worst files
python tools/words.py src/kubetorch/pod   # of these folders and files
python tools/words.py --names FILE...     # each such name, with its line
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

#: Words that mean nothing to who has not read the file that uses them.
RIDDLES = frozenset(
    {
        *("one", "found", "own", "there", "said", "told", "given", "made", "known", "kept", "gone"),
        *("seen", "asked", "wanted", "others", "other", "left", "each", "again", "here", "held"),
        *("heard", "way", "ways", "what", "whose", "place", "at"),
    }
)
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_WORST = 15


@dataclass(frozen=True)
class Share:
    """The uses of names in some files, and those that are riddles by file."""

    uses: int
    riddles: Counter[Path]

    @property
    def percent(self) -> float:
        return 100.0 * self.riddles.total() / max(1, self.uses)


def is_riddle(name: str) -> bool:
    """True for a name of such words alone, whatever its case and underscores are."""
    words = [word.lower() for word in _WORD.findall(name)]
    return bool(words) and all(word in RIDDLES for word in words)


def names(text: str) -> Iterator[tuple[int, str]]:
    """The names that a file defines and uses, with their lines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.end_lineno or node.lineno, node.attr
        elif isinstance(node, (ast.arg, ast.keyword)) and node.arg is not None:
            yield node.lineno, node.arg
        elif isinstance(node, _DEFINITIONS):
            yield node.lineno, node.name


def measure(files: Iterable[Path]) -> Share:
    uses, riddles = 0, Counter[Path]()
    for file in files:
        for _, name in names(file.read_text()):
            uses += 1
            riddles[file] += is_riddle(name)
    return Share(uses, +riddles)


def files_of(paths: Iterable[Path]) -> list[Path]:
    """The Python files of folders, and the files."""
    return sorted(
        file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])
    )


def _line(share: Share, name: str) -> str:
    return f"{share.percent:6.2f} %  {share.riddles.total():5d} of {share.uses:6d}  {name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, help="folders and files; default: packages")
    parser.add_argument("--names", action="store_true", help="each such name, with its line")
    arguments = parser.parse_args()
    source = Path(__file__).parents[1] / "src/kubetorch"
    paths = arguments.paths or sorted(path for path in source.iterdir() if path.name[0] not in "_.")
    if arguments.names:
        lines = [
            f"{file}:{line} {name}"
            for file in files_of(paths)
            for line, name in sorted(names(file.read_text()))
            if is_riddle(name)
        ]
    else:
        shares = [(measure(files_of([path])), path.name) for path in paths]
        total = measure(files_of(paths))
        lines = [_line(share, name) for share, name in shares if share.uses]
        lines.append(_line(total, "altogether"))
        lines += [f"{riddles:6d}  {file}" for file, riddles in total.riddles.most_common(_WORST)]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
