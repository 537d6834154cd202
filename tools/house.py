"""The measures of the source tree: its size, its imports, the files that calls run.

python tools/house.py                   # the table for this checkout
python tools/house.py --static          # without the rows that need a real deploy and real calls
python tools/house.py --list ../other   # for another checkout, with the files that each row counts
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import shutil
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = "kubetorch"
_TRACE = Path(__file__).with_name("house_trace")
#: Files that Python itself asks for, which are no choice of layout.
_ENTRIES = ("__init__", "__main__")
_NOT_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
#: Folders whose code runs in the user's interpreter; not part of "SDK, controller and agent".
_USER_PROCESS = ("pod/worker/", "pod/user_process/")
_DEPLOYING = ("sdk/", "controller/", "pod/")
# Windows of house_trace/program.py.
_FIRST_DEPLOY, _EDIT, _CALLS = 1, 2, range(3, 8)


@dataclass(frozen=True)
class Import:
    """One statement that imports a module of the package."""

    target: str
    line: int
    is_late: bool


@dataclass(frozen=True)
class Module:
    """A file of the package."""

    name: str
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def is_entry(self) -> bool:
        return self.path.stem in _ENTRIES

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def code_lines(self) -> int:
        """Lines that hold more than a docstring, a comment or nothing."""
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in _NOT_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
        return len(lines.difference(*(_docstring_lines(node) for node in ast.walk(self.tree))))

    @property
    def is_one_function(self) -> bool:
        """Whether a single function is all that the file defines."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        defined = [node for node in self.tree.body if isinstance(node, kinds)]
        return len(defined) == 1 and not isinstance(defined[0], ast.ClassDef)

    def imports(self, known_modules: Mapping[str, object]) -> Iterator[Import]:
        """All imports of known modules, at the top and inside functions."""
        for node, is_late in _walk(self.tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for target in {_known_part(name, known_modules) for name in names} - {"", self.name}:
                yield Import(target, node.lineno, is_late)


def _docstring_lines(node: ast.AST) -> range:
    scopes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    match node.body[0] if isinstance(node, scopes) and node.body else None:
        case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)):
            return range(first, last + 1)
    return range(0)


def _walk(node: ast.AST, is_late: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """All nodes below `node`, and whether each is inside a function."""
    for child in ast.iter_child_nodes(node):
        yield child, is_late
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        yield from _walk(child, is_late or is_function)


def _known_part(name: str, known_modules: Mapping[str, object]) -> str:
    """The longest beginning of a dotted name that is a module."""
    while name and name not in known_modules:
        name = name.rpartition(".")[0]
    return name


class House:
    """The modules of a checkout."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: dict[str, Module] = {}
        for path in sorted((root / "src" / PACKAGE).rglob("*.py")):
            parts = path.relative_to(root / "src").with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self.modules[name] = Module(name, path, path.read_text())

    @cached_property
    def imports(self) -> dict[str, list[Import]]:
        """The imports of each module."""
        return {name: list(module.imports(self.modules)) for name, module in self.modules.items()}

    @cached_property
    def importers(self) -> dict[str, set[str]]:
        """The modules that import each module."""
        importers: dict[str, set[str]] = {name: set() for name in self.modules}
        for name, imports in self.imports.items():
            for imported in imports:
                importers[imported.target].add(name)
        return importers

    def files_of_one_function(self) -> list[str]:
        """Modules that define one function and nothing else."""
        return [
            name
            for name, module in self.modules.items()
            if module.is_one_function and not module.is_entry
        ]

    def files_of_one_sibling(self) -> list[str]:
        """Modules that one other module imports, which lies in the same folder."""
        files = []
        for name, importers in self.importers.items():
            module = self.modules[name]
            if len(importers) == 1 and not module.is_entry:
                (importer,) = importers
                if self.modules[importer].path.parent == module.path.parent:
                    files.append(f"{name} (by {importer})")
        return files

    def late_imports(self) -> list[str]:
        """Imports of the package's own modules inside functions."""
        return sorted(
            {
                f"{name}:{imported.line}"
                for name, imports in self.imports.items()
                for imported in imports
                if imported.is_late
            }
        )

    def circles(self) -> list[list[str]]:
        """Groups of modules that import each other, late and type-checking imports counted."""
        graph = {name: {i.target for i in imports} for name, imports in self.imports.items()}
        return sorted(circles(graph))


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The strongly connected parts of a graph that have more than one node (Tarjan)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    parts: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for neighbour in graph[node]:
            if neighbour not in order:
                visit(neighbour)
            if neighbour in stack:
                lowest[node] = min(lowest[node], lowest[neighbour])
        if lowest[node] == order[node]:
            start = stack.index(node)
            part = stack[start:]
            del stack[start:]
            if len(part) > 1:
                parts.append(sorted(part))

    for node in graph:
        if node not in order:
            visit(node)
    return parts


# ---------------------------------------------------------------------------------------- traces


def trace(root: Path) -> dict[int, set[str]]:
    """The files whose functions run in each window of house_trace/program.py."""
    with tempfile.TemporaryDirectory(prefix="kt-house-", dir="/tmp") as name:
        folder = Path(name)
        hook, project, home = (folder / part for part in ("hook", "project", "home"))
        hook.mkdir()
        project.mkdir()
        home.mkdir()
        sources = root / "src" / PACKAGE
        shutil.copy(_TRACE / "sitecustomize.py", hook)
        (hook / "window").write_bytes(b"\0")
        (hook / "log").touch()
        (hook / "sources").write_text(f"{sources}{os.sep}")
        program = Path(shutil.copy(_TRACE / "program.py", project))
        (project / "pyproject.toml").touch()
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("KT_")},
            "HOME": str(home),
            "KT_LOCAL_DIR": str(home / "local"),
            "KT_BACKEND": "local",
            "PYTHONPATH": os.pathsep.join((str(hook), str(root / "src"))),
        }
        try:
            command = (sys.executable, str(program), str(hook / "window"))
            subprocess.run(command, cwd=project, env=environ, check=True, timeout=120)
        finally:
            stop = (sys.executable, "-m", PACKAGE, "local", "stop")
            subprocess.run(stop, env=environ, check=True, timeout=60, stdout=subprocess.DEVNULL)
        windows: dict[int, set[str]] = {}
        for line in (hook / "log").read_text().splitlines():
            number, path = line.split(" ", 1)
            windows.setdefault(int(number), set()).add(str(Path(path).relative_to(sources)))
        return windows


# ------------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Row:
    """A measure, its aim, and the names that it counted."""

    title: str
    value: int
    aim: int | None
    counted: tuple[str, ...] = ()


def static_rows(house: House) -> list[Row]:
    """The measures of the text of the modules."""
    modules = house.modules.values()
    functions, siblings = house.files_of_one_function(), house.files_of_one_sibling()
    late = house.late_imports()
    loops = [" ".join(circle) for circle in house.circles()]
    return [
        Row("files in `src/kubetorch`", len(modules), 350),
        Row("lines", sum(module.lines for module in modules), 64_000),
        Row("lines of code", sum(module.code_lines for module in modules), 45_000),
        Row("files of one function", len(functions), 10, tuple(functions)),
        Row("files imported by one sibling only", len(siblings), 40, tuple(siblings)),
        Row("own imports inside functions", len(late), 35, tuple(late)),
        Row("circles of imports", len(loops), 0, tuple(loops)),
    ]


def traced_rows(root: Path) -> list[Row]:
    """The measures of real calls and deploys."""
    windows = trace(root)
    call = sorted(set.intersection(*(windows[number] for number in _CALLS)))
    edit = sorted(windows[_EDIT])
    read = [name for name in edit if name.startswith(_DEPLOYING)]
    read = [name for name in read if not name.startswith(_USER_PROCESS)]
    return [
        Row("files that a call passes through", len(call), 22, tuple(call)),
        Row("files of SDK, controller, agent in a deploy", len(read), 45, tuple(read)),
        Row("… and of all packages and processes", len(edit), None, tuple(edit)),
        Row("… and in the first deploy, starts included", len(windows[_FIRST_DEPLOY]), None),
    ]


def table(rows: Iterable[Row]) -> str:
    """The rows as Markdown."""
    lines = [f"| {'':44} |    now | wanted |", f"|{'-' * 46}|-------:|-------:|"]
    for row in rows:
        aim = "" if row.aim is None else f"{row.aim:,}"
        lines.append(f"| {row.title:44} | {row.value:6,} | {aim:>6} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--static", action="store_true", help="only read the files")
    parser.add_argument("--list", action="store_true", help="list what each row counts")
    options = parser.parse_args()
    root = options.root.resolve()
    rows = static_rows(House(root))
    if not options.static:
        rows += traced_rows(root)
    sys.stdout.write(table(rows) + "\n")
    for row in rows if options.list else ():
        if row.counted:
            sys.stdout.write(f"\n{row.title}:\n")
            sys.stdout.writelines(f"  {item}\n" for item in row.counted)


if __name__ == "__main__":
    main()
