"""The cells of an interactive session, in the order in which they ran, and what each binds.

IPython and Jupyter keep the text of every cell in `linecache`, under the file name that the code of
the cell has. A text that ran twice has one such name, so the order is that of IPython's history.
"""

from __future__ import annotations

import ast
import builtins
import copy
import linecache
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Cell:
    """One cell, as Python ran it: magics are calls of `get_ipython()` there.

    Attributes:
        label: What the user knows it by.
        number: When it ran.
        text: Its source.
        filename: That of its code; `None` if a magic such as `%%time` compiled it.
    """

    label: str
    number: int
    text: str
    filename: str | None


@dataclass(frozen=True)
class Binding:
    """A statement at the top level of a cell, and the names that it binds."""

    cell: Cell
    node: ast.stmt
    names: frozenset[str]

    @property
    def position(self) -> tuple[int, int]:
        """When it ran."""
        return self.cell.number, self.node.lineno

    @property
    def source(self) -> str:
        """The statement as the user wrote it, but for magics, which are left out."""
        if self.node.col_offset or self.has_magics:
            return ast.unparse(_LeavesOutMagics().visit(copy.deepcopy(self.node)))
        *head, last = self.cell.text.split("\n")[self._first_line - 1 : self.node.end_lineno]
        return "\n".join([*head, last.encode()[: self.node.end_col_offset].decode()])

    @property
    def has_magics(self) -> bool:
        """Whether there are lines in it that only IPython can run."""
        return any(map(_is_magic, ast.walk(self.node)))

    def compiled(self, code: CodeType) -> bool:
        """Whether this code is that of the statement, or of a part."""
        is_here = self.cell.filename in (code.co_filename, None)
        return is_here and self._first_line <= code.co_firstlineno <= (self.node.end_lineno or 0)

    @property
    def _first_line(self) -> int:
        decorators: list[ast.expr] = getattr(self.node, "decorator_list", [])
        return min([self.node.lineno, *(item.lineno for item in decorators)])


def read_bindings() -> list[Binding]:
    """The statements of all cells that bind names, the latest first."""
    found = [binding for cell in _read_cells() for binding in _bindings(cell)]
    return found[::-1]


def names_in(body: list[ast.stmt]) -> set[str]:
    """The names that statements bind, those of blocks among them."""
    return {name for node in _flattened(body) for name in _bound(node)}


def session() -> dict[str, Any]:
    """The names of the session and their values, without those that IPython puts there."""
    hidden = getattr(_shell(), "user_ns_hidden", {})
    main = vars(sys.modules["__main__"])
    return {name: value for name, value in main.items() if hidden.get(name, main) is not value}


def is_of_ipython(name: str) -> bool:
    """Whether this is a builtin of IPython alone, such as `display`."""
    return _shell() is not None and name in ("get_ipython", "display", "__IPYTHON__")


def is_builtin(name: str) -> bool:
    """Whether modules of any Python have this name."""
    return hasattr(builtins, name) or name in ("__name__", "__file__", "__doc__")


def _shell() -> Any:  # noqa: ANN401  # IPython is not among our dependencies
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def _read_cells() -> list[Cell]:
    filenames = {
        "".join(linecache.getlines(filename)).rstrip("\n"): filename
        for filename in list(linecache.cache)
        if filename.startswith("<") or "ipykernel" in filename
    }
    history = getattr(_shell(), "history_manager", None)
    ran = [] if history is None else [text.rstrip("\n") for text in history.input_hist_parsed]
    texts = [(filename, text) for text, filename in filenames.items() if text not in ran]
    texts += [(f"cell [{number}]", text) for number, text in enumerate(ran) if text]
    return [
        Cell(label, number, text, filenames.get(text)) for number, (label, text) in enumerate(texts)
    ]


def _bindings(cell: Cell) -> Iterator[Binding]:
    try:
        statements = ast.parse(cell.text).body
    except (SyntaxError, ValueError):
        return
    for node in _flattened(statements):
        magic = _body_of_magic(node)
        if magic is not None:
            yield from _bindings(Cell(cell.label, cell.number, magic, None))
        yield Binding(cell, node, frozenset(_bound(node)))


def _flattened(parts: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements, and those in blocks that are no functions or classes."""
    for node in parts:
        yield node
        if not isinstance(node, Definition):
            for block in (node, *getattr(node, "handlers", ()), *getattr(node, "cases", ())):
                for field in ("body", "orelse", "finalbody"):
                    yield from _flattened(getattr(block, field, []))


def _bound(node: ast.AST) -> Iterator[str]:
    """The names that a statement binds itself, without those in it."""
    if isinstance(node, Definition):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    else:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        for part in ast.iter_child_nodes(node):
            if not isinstance(part, (ast.stmt, ast.excepthandler, ast.match_case)):
                yield from _bound(part)


# ------------------------------------------------------------------------------------- magics


def _is_magic(node: ast.AST) -> bool:
    """Whether this is what IPython made of a line such as `%time f()` or `!ls`."""
    found = getattr(getattr(node, "value", None), "func", None)
    maker = getattr(getattr(found, "value", None), "func", None)
    return isinstance(node, ast.Expr) and getattr(maker, "id", None) == "get_ipython"


def _body_of_magic(node: ast.stmt) -> str | None:
    """The cell below a magic such as `%%time`, if it is Python."""
    if not _is_magic(node):
        return None
    call: ast.Call = node.value  # type: ignore[attr-defined]
    if getattr(call.func, "attr", "") != "run_cell_magic" or len(call.args) != 3:
        return None
    body = getattr(call.args[2], "value", None)
    return str(_shell().transform_cell(body)) if isinstance(body, str) and _shell() else None


class _LeavesOutMagics(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.stmt:  # called by that name
        return ast.copy_location(ast.Pass(), node) if _is_magic(node) else node
