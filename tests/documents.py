"""The documents of the repository, and the fenced blocks in them, which run.

The blocks of a page run one after the other in a folder of their own, so a block may call what an
earlier one deployed. `python` is a program, `shell` is what bash runs, and a block of `text` below
them is what they print. A comment in front of a block says what is different about it:

    <!-- needs: cluster -->    it does not run where this is missing: `cluster`, `gpu`, `checkout`
                               (of the repository), `credentials`, or a package, by the name that
                               is imported
    <!-- file: main.py -->     it is a file that later blocks of the page use

A `{literalinclude}` shows a program of `examples/`, which `project/test_examples.py` runs; a
block of `text` below it is what that prints.

A file that readers need not see stands in the comment itself, below its first line.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import shared

ROOT = Path(__file__).parents[1]
PAGES = sorted({ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").rglob("*.md")})
#: The pages, and those that only people read.
DOCUMENTS = sorted({*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"})

#: What no test of this tier has; all other needs are packages.
ELSEWHERE = frozenset({"cluster", "gpu", "checkout", "credentials"})
_BLOCK = re.compile(
    r"(?P<comments>(?:^ *<!-- (?:needs|file): [^\n]* -->\n)*)"
    r"^(?P<indent> *)```(?P<language>[^\s`]*)(?: (?P<included>[^\n`]*))?\n"
    r"(?P<code>.*?)^(?P=indent)```$"
    r"(?:\n\n(?P=indent)```text\n(?P<expected>.*?)^(?P=indent)```$)?",
    re.MULTILINE | re.DOTALL,
)
_COMMENT = re.compile(r"<!-- (needs|file): (.*) -->")
_HIDDEN = re.compile(r"^<!-- file: (?P<file>\S+)\n(?P<code>.*?)^-->$", re.MULTILINE | re.DOTALL)
#: What runs a block of a language, and the file that it is then: a page has one of each, so that
#: blocks which define a function of the same name are versions of one service.
COMMANDS = {"python": ([sys.executable], "program.py"), "shell": (["bash", "-eu"], "commands.sh")}


@dataclass(frozen=True)
class Block:
    """A fenced block, or a file that only the other blocks see.

    Attributes:
        page: The document.
        line: Number of its first line of code.
        language: What stands behind the fence.
        code: Its lines, without the indentation of the fence.
        needs: What a machine must have to run it.
        file: Name of the file that it is; `None` if it runs.
        expected: What it prints, if the page says so.
        included: Name of the program of `examples/` that is shown in its place.
    """

    page: Path
    line: int
    language: str
    code: str
    needs: tuple[str, ...] = ()
    file: str | None = None
    expected: str | None = None
    included: str | None = None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def lacks(self) -> list[str]:
        """What this machine does not have of its needs."""
        return [
            need for need in self.needs if need in ELSEWHERE or not importlib.util.find_spec(need)
        ]

    def run(self, folder: Path, **environ: str) -> None:
        """Run it, or write it; it has to succeed and to print what the page says."""
        if self.file is not None:
            (folder / self.file).write_text(self.code, encoding="utf-8")
        if not runs_here(self):
            return
        command, name = COMMANDS[self.language]
        (folder / name).write_text(self.code, encoding="utf-8")
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        # All blocks forward the same port of the machine.
        takes_turns = "port-forward" in self.code
        with shared.turn("port-forward") if takes_turns else contextlib.nullcontext():
            done = subprocess.run(
                [*command, name],
                cwd=folder,
                env={**os.environ, "PATH": path, **environ},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=100,
            )
        assert done.returncode == 0, f"{self}\n{done.stdout}{done.stderr}"
        if self.expected is not None:
            assert _without_pod_names(done.stdout) == _without_pod_names(self.expected), self


def runs_here(block: Block) -> bool:
    """Whether it is a program or commands, and this machine has what it needs."""
    return block.file is None and block.language in COMMANDS and not block.lacks


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in their order."""
    text = page.read_text(encoding="utf-8")
    matches = sorted([*_BLOCK.finditer(text), *_HIDDEN.finditer(text)], key=re.Match.start)
    return [_block(page, text, match.groupdict(), match.start("code")) for match in matches]


def _block(page: Path, text: str, found: dict[str, str | None], start: int) -> Block:
    said = dict(_COMMENT.findall(found.get("comments") or ""))
    return Block(
        page,
        text.count("\n", 0, start) + 1,
        found.get("language") or "",
        textwrap.dedent(found["code"] or ""),
        tuple(said["needs"].split(", ")) if "needs" in said else (),
        found.get("file") or said.get("file"),
        found.get("expected"),
        Path(included).name if (included := found.get("included")) else None,
    )


def printed(program: str) -> str:
    """What a program of `examples/` prints, as the page that shows it says."""
    shown = [block for page in PAGES for block in blocks(page) if block.included == program]
    assert len(shown) == 1, f"{program} is on {len(shown)} pages"
    assert shown[0].expected is not None, f"{shown[0]} does not say what {program} prints"
    return shown[0].expected


def _without_pod_names(output: str) -> str:
    """Without what differs: names of pods, and what a cluster says on the way."""
    output = re.sub(r"^\([\w-]+ events\).*\n", "", output, flags=re.MULTILINE)
    return re.sub(r"^\((\w+)-[^)]*\)", r"(\1)", output, flags=re.MULTILINE)
