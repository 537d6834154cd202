"""Writes callables that were defined interactively, with all that they use, to an importable file.

    cell [1]  import math           ─┐
    cell [2]  RATE = 0.1             ├─>  <working directory>/<name>_fn.py
    cell [3]  def scaled(x): ...     │    imports, then values and definitions,
    cell [4]  def area(radius): ...  ┘    each in front of what needs it

Imports, functions and classes of other cells are written as their source, values as they are now.
The present value of a name decides what is written for it, so a name that was bound twice is its
last binding. The file has only the names that the callable uses; a value that cannot be written is
an error with its name.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import contextlib
import copy
import functools
import linecache
import logging
import re
import symtable
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, GenericAlias, MappingProxyType, UnionType
from typing import Any

from kubetorch.errors import NotebookError, SerializationError
from kubetorch.lib import files, modules
from kubetorch.sdk import parameters
from kubetorch.sdk.compute import Compute
from kubetorch.sdk.deploys.source import unwrapped
from kubetorch.sdk.image import Image
from kubetorch.sdk.secret import Secret
from kubetorch.sdk.tuning import LIMITS
from kubetorch.sdk.volume import Volume
from kubetorch.wire import codecs, introspection, values

_HEADER = "# Written by Kubetorch from an interactive session; changes are overwritten.\n"
_POSTPONED = __future__.annotations.compiler_flag
_ANNOTATIONS = "from __future__ import annotations"
_COMPREHENSIONS = ("genexpr", "listcomp", "setcomp", "dictcomp")
#: Types of objects that their statement makes anew in each process, without data of the session.
_DECLARED = (
    re.Pattern,
    logging.Logger,
    functools.partial,
    GenericAlias,
    UnionType,
    type(threading.Lock()),
    type(threading.RLock()),
    Compute,
    Image,
    Secret,
    Volume,
)

_log = logging.getLogger(__name__)


def write_module(callable_object: Callable[..., Any], path: Path) -> None:
    """Write a module with an interactively defined callable, and with what it uses."""
    if path.exists() and not path.read_text(encoding="utf-8").startswith(_HEADER):
        raise NotebookError(
            f"{path} exists and was not written by Kubetorch",
            hint="give the function or class another name, or move the file away",
        )
    writer = _Writer(callable_object)
    text = writer.render()
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        files.write_atomically(path, text.encode(), mode=0o644)
    _log.info("%s was written to %s, with what it uses of this session", writer.target, path)


@dataclass(frozen=True)
class _Item:
    """Text that binds a name in the module.

    Attributes:
        now: Names that the text needs when it runs.
        later: Names that a call of the defined function needs.
    """

    text: str
    position: tuple[int, int] = (-1, 0)
    now: frozenset[str] = frozenset()
    later: frozenset[str] = frozenset()


class _Writer:
    def __init__(self, callable_object: Callable[..., Any]) -> None:
        #: The name of the callable; of a method, that of its class.
        self.target = callable_object.__qualname__.partition(".")[0]
        self._names = _session()
        self._bindings = _read_bindings()
        self._imports: dict[str, None] = {}
        self._items: dict[str, _Item] = {}
        whole = callable_object
        if self.target != callable_object.__qualname__:
            whole = unwrapped(self._names.get(self.target, callable_object))
        binding = self._definition(self.target, whole)
        if binding is None:
            raise NotebookError(
                f"the source of {self.target} cannot be found in this session",
                hint="put it into a .py file and import it from there",
            )
        self._add_source(self.target, binding, whole, ())

    def render(self) -> str:
        # `import a.b` binds `a`, too, so an import that binds `a` to another module comes later.
        imports = sorted(self._imports, key=lambda line: ("import " not in line[:7], line))
        imports.sort(key=lambda line: line != _ANNOTATIONS)
        parts = [_HEADER + "\n".join(imports)]
        for name in _ordered(self._items, last=self.target):
            text = self._items[name].text
            is_long = "\n" in text or text.startswith(("def ", "class ", "async "))
            parts.append(f"\n\n{text}\n" if is_long else text)
        return re.sub(r"\n{4,}", "\n\n\n", "\n".join(parts)).rstrip() + "\n"

    # ------------------------------------------------------------------- what the callable uses

    def _add(self, name: str, users: tuple[str, ...]) -> None:
        """Add a name that the last of the users needs."""
        if name in self._items:
            return
        if name not in self._names:
            if _is_of_ipython(name):
                reason = "of the notebook alone, as magics and shell commands are"
                raise self._refusal(name, users, reason, "print, return or use subprocess instead")
            if not _is_builtin(name):
                parameters.warn(f"{users[-1]} uses {name}, which this session does not have")
            return
        value = self._names[name]
        if self._add_import(name, value):
            return
        binding = self._definition(name, value) or self._statement(name, value)
        if binding is not None:
            changed = _changed_later(value, binding.node)
            if changed is not None:
                raise self._refusal(name, users, f"changed below its definition: {changed}")
            self._add_source(name, binding, value, users)
        elif _is_handle(value):
            self._imports["import kubetorch"] = None
            self._items[name] = _Item(value._python_of_handle(name))
        else:
            self._add_value(name, value, users)

    def _add_source(
        self, name: str, binding: Binding, value: object, users: tuple[str, ...]
    ) -> None:
        source = binding.source
        if binding.has_magics:
            parameters.warn(f"{name} runs without the magics and shell commands in it")
        if any(code.co_flags & _POSTPONED for code in _codes(unwrapped(value))):
            self._imports[_ANNOTATIONS] = None
            source = f"{_ANNOTATIONS}\n{source}"
        uses = _uses(source)
        if name in uses.now:
            raise self._refusal(
                name, users, f"made from an earlier {name}", "give the two different names"
            )
        self._items[name] = _Item(
            source.removeprefix(f"{_ANNOTATIONS}\n"),
            binding.position,
            frozenset(uses.now | uses.of_class),
            frozenset(uses.later | uses.annotations),
        )
        for used in sorted(uses.now | uses.later):
            self._add(used, (*users, name))
        for used in sorted((uses.of_class | uses.annotations) & self._names.keys()):
            before = dict(self._items)
            try:
                self._add(used, (*users, name))
            except NotebookError:  # an annotation may name a value that is never evaluated
                self._items = before

    def _add_import(self, name: str, value: object) -> bool:
        """Add the import of a value; false if no import gives the value."""
        dotted = modules.names_of(value).get("__name__")
        if isinstance(dotted, str):
            renamed = "" if dotted == name else f" as {name}"
            lines = [f"import {dotted}{renamed}", *self._submodules(name, dotted)]
            self._imports.update(dict.fromkeys(lines))
            return True
        line = _import_line(name, value) or self._cell_import(name, value)
        if line is not None:
            self._imports[line] = None
        return line is not None

    def _submodules(self, name: str, dotted: str) -> Iterator[str]:
        """Imports of modules in a package that cells imported beside the package."""
        for binding in self._bindings:
            if isinstance(binding.node, ast.Import) and name in binding.names:
                for alias in binding.node.names:
                    if alias.name.startswith(f"{dotted}.") and alias.asname is None:
                        yield f"import {alias.name}"

    def _cell_import(self, name: str, value: object) -> str | None:
        """The import of a cell that bound a name to what it has."""
        for binding in self._bindings:
            node = binding.node
            if isinstance(node, ast.ImportFrom) and node.module and binding.names & {name, "*"}:
                for alias in node.names:
                    source_name = name if alias.name == "*" else alias.name
                    imported_value = introspection.attribute(
                        sys.modules.get(node.module), source_name
                    )
                    if imported_value is value and (alias.asname or source_name) == name:
                        return _from(node.module, source_name, name)
        return None

    # --------------------------------------------------------------------- where it was defined

    def _bindings_of(self, name: str) -> list[Binding]:
        return [binding for binding in self._bindings if name in binding.names]

    def _definition(self, name: str, value: Any) -> Binding | None:  # noqa: ANN401  # the user's own
        """The `def`, `class` or `name = lambda` of a cell that made the value of a name."""
        if _is_handle(value) and not value.is_decorated:
            return None  # as after f = kt.fn(f).to(...), which calls the service in a pod, too
        value = unwrapped(value)
        if _text_of(value, "__module__") != "__main__":
            return None
        codes = list(_codes(value))
        bindings = self._bindings_of(name)
        for binding in bindings:
            if any(map(binding.compiled, codes)):
                node = binding.node
                is_plain = isinstance(value, (FunctionType, type))
                if isinstance(node, Definition) and (is_plain or node.decorator_list):
                    return binding
                if isinstance(getattr(node, "value", None), ast.Lambda):
                    return binding
        # A class without methods, or the result of a decorator without `__wrapped__`.
        for latest in bindings[:1]:
            node = latest.node
            if isinstance(node, Definition) and (node.decorator_list or isinstance(value, type)):
                return latest
        return None

    def _statement(self, name: str, value: object) -> Binding | None:
        """The assignment that makes an equal value in a pod; `None` for data of the session."""
        is_declared = isinstance(value, _DECLARED) or type(value).__module__ == "typing"
        # namedtuple("Point", "x y"), and others that make classes.
        is_declared |= isinstance(value, type) and _text_of(value, "__module__") == "__main__"
        bindings = self._bindings_of(name)
        is_assigned = bindings and isinstance(bindings[0].node, (ast.Assign, ast.AnnAssign))
        return bindings[0] if is_declared and is_assigned else None

    # ----------------------------------------------------------------------------------- values

    def _add_value(self, name: str, value: object, users: tuple[str, ...]) -> None:
        referred: set[str] = set()
        text = ""
        if codecs.buffer_bytes((value,)) <= LIMITS.notebook_value_bytes:
            with contextlib.suppress(_NoLiteral, RecursionError):
                text = self._literal(value, referred, bound_name=name)
        if not text or (len(text) > LIMITS.literal_characters and not referred):
            text, referred = self._encoded(name, value, users)
        position = self._bindings_of(name)[0].position if self._bindings_of(name) else (-1, 0)
        self._items[name] = _Item(f"{name} = {text}", position, frozenset(referred))
        for used in sorted(referred):
            self._add(used, (*users, name))

    def _encoded(self, name: str, value: object, users: tuple[str, ...]) -> tuple[str, set[str]]:
        """Python for a value that has no literal, and the classes of cells that it needs."""
        maker, inside, _ = _text_of(value, "__qualname__").partition(".<locals>")
        if inside:
            raise self._refusal(name, users, f"a function that {maker}() made")
        try:
            segments = values.encode(value, name, values.EXACT)
        except SerializationError as error:
            way_out = "" if error.hint in (None, values.PICKLE) else str(error.hint)
            raise self._refusal(
                name, users, f"what cannot travel: {error.message}", way_out
            ) from None
        size = sum(map(len, segments))
        if size > LIMITS.notebook_value_bytes:
            way_out = f"pass it to {self.target} as an argument, or put it into a volume"
            most = LIMITS.notebook_value_bytes >> 20
            large = f"{size >> 20} MiB large; at most {most} MiB travel with code"
            raise self._refusal(name, users, large, way_out)
        self._imports["from kubetorch.wire import codecs as _codecs"] = None
        classes = re.findall(rb'"__main__","(\w+)', bytes(segments[0]))  # type: ignore[arg-type]
        text = f"_codecs.from_text({codecs.to_text(segments)!r}, __name__)"
        return text, {name.decode() for name in classes}

    def _literal(self, value: Any, referred: set[str], bound_name: str = "") -> str:  # noqa: ANN401  # the user's own
        """Python for a value, which may have functions and classes that another name stands for."""
        kind = type(value)
        if kind in (bool, str, bytes, type(None), type(...), range, slice):
            return repr(value)
        if kind is int:
            return repr(value) if value.bit_length() < 10_000 else hex(value)
        if kind in (float, complex):
            return repr(value) if value - value == 0 else f"{kind.__name__}({str(value)!r})"
        if kind is dict:
            items = ((self._literal(part, referred) for part in pair) for pair in value.items())
            return "{" + ", ".join(": ".join(item) for item in items) + "}"
        if kind in (list, tuple, set, frozenset):
            parts = ", ".join(self._literal(item, referred) for item in value)
            if kind is list:
                return f"[{parts}]"
            if kind is tuple:
                return f"({parts}{',' * (len(value) == 1)})"
            return f"{kind.__name__}([{parts}])"
        name = _text_of(value, "__name__")
        if callable(value) and name not in ("", bound_name) and self._names.get(name) is value:
            referred.add(name)
            return name
        raise _NoLiteral

    def _refusal(
        self, name: str, users: tuple[str, ...], reason: str, way_out: str = ""
    ) -> NotebookError:
        bindings = self._bindings_of(name)
        where = f" of {bindings[0].cell.label}" if bindings else ""
        through = "".join(f"{user}, which uses " for user in users[1:])
        default_hint = f"pass it to {self.target} as an argument, make it inside {self.target}, "
        return NotebookError(
            f"{self.target} uses {through}{name}{where}, which is {reason}",
            hint=way_out or default_hint + "or define it in a .py file and import it from there",
        )


class CellNames(_Writer):
    """What a cell that runs in a pod reads of the session: code as source, data as values."""

    def __init__(self, text: str) -> None:
        self.target = "the cell"
        self._names = _session()
        self._bindings = _read_bindings()
        self._imports = {}
        self._items = {}
        #: The data, by name.
        self.values: dict[str, Any] = {}
        uses, body = _uses(text), ast.parse(text).body
        binding_nodes = (node for node in _flattened(body) if not isinstance(node, ast.AugAssign))
        bound = {name for node in binding_nodes for name in _bound(node)}
        for name in sorted((uses.now | uses.later | uses.of_class) & self._names.keys()):
            try:
                self._add(name, (self.target,))
            except NotebookError:  # a name that the cell binds it may not read
                if name not in bound:
                    raise

    def _add_value(self, name: str, value: object, users: tuple[str, ...]) -> None:
        try:
            values.encode(value, name)
        except SerializationError:  # an object of a class of a cell, which the source makes
            super()._add_value(name, value, users)
        else:
            self.values[name] = value


class _NoLiteral(Exception):
    """A value has a part that Python has no literal for."""


def _text_of(value: object, name: str) -> str:
    """The text that an attribute is; empty if it is none."""
    text = introspection.attribute(value, name)
    return text if type(text) is str else ""


def _is_handle(value: object) -> bool:
    """True for a `kt.Fn`, a `kt.Cls` or a `kt.App`."""
    return hasattr(type(value), "_python_of_handle")


def _codes(value: object) -> Iterator[CodeType]:
    """The code of a function, or of the methods of a class, below decorators."""
    members = vars(value).values() if isinstance(value, type) else ()
    for member in (value, *members):
        function: Any = member
        for name in ("__func__", "fget", "func"):  # class methods, properties, cached ones
            inner = introspection.attribute(function, name)
            function = function if inner is None else inner
        function = introspection.unwrapped(function)
        if isinstance(function, FunctionType):
            yield function.__code__


def _changed_later(value: object, node: ast.stmt) -> str | None:
    """The change of a class or function of a cell that its definition does not have, in words."""
    registry = introspection.attribute(value, "registry")  # of functools.singledispatch
    if type(registry) is MappingProxyType and len(registry) > 1:
        return "functions were registered"
    if not isinstance(value, type) or not isinstance(node, ast.ClassDef):
        return None
    defined = _names_in(node.body)
    for name, member in vars(value).items():
        is_own = isinstance(member, FunctionType) and member.__module__ == "__main__"
        if is_own and name not in defined and not name.startswith("__"):
            return f"{name} was added"
    return None


def _import_line(name: str, value: object) -> str | None:
    module, qualname = _text_of(value, "__module__"), _text_of(value, "__qualname__")
    if not module or not qualname or module == "__main__":
        return None
    current_value = introspection.attribute(sys.modules.get(module), qualname)
    # A module that was loaded again has another function of that name.
    is_reloaded = (
        type(current_value) is type(value) and _text_of(current_value, "__qualname__") == qualname
    )
    if current_value is not value and (
        not is_reloaded or introspection.unwrapped(value) is not value
    ):
        return None
    return _from(module, qualname, name)


def _from(module: str, source_name: str, name: str) -> str:
    return f"from {module} import {source_name}" + ("" if source_name == name else f" as {name}")


# ------------------------------------------------------------------------ names, and their order


@dataclass
class _Uses:
    """Names that a statement uses: `now`, as it runs, or `later`, when the function is called.

    Names that a class binds itself may be names of the session before that; annotations may never
    be evaluated.
    """

    now: set[str] = field(default_factory=set)
    later: set[str] = field(default_factory=set)
    of_class: set[str] = field(default_factory=set)
    annotations: set[str] = field(default_factory=set)


class _ReadsTargets(ast.NodeTransformer):
    """Reads names before `x += 1` and `del x`, which a symbol table has as bound only."""

    def visit_AugAssign(self, node: ast.AugAssign) -> list[ast.stmt]:
        return self._after_reads(node, node.target)

    def visit_Delete(self, node: ast.Delete) -> list[ast.stmt]:
        return self._after_reads(node, *node.targets)

    @staticmethod
    def _after_reads(node: ast.stmt, *targets: ast.expr) -> list[ast.stmt]:
        parts = (part for target in targets for part in ast.walk(target))
        names = [part.id for part in parts if isinstance(part, ast.Name)]
        return [*(ast.Expr(ast.Name(name, ast.Load())) for name in names), node]


def _uses(source: str) -> _Uses:
    uses = _Uses()
    tree = _ReadsTargets().visit(ast.parse(source))
    table = symtable.symtable(ast.unparse(tree), "<cell>", "exec")
    _note_uses(table, uses, uses.now)
    return uses


def _note_uses(table: symtable.SymbolTable, uses: _Uses, names: set[str]) -> None:
    kind = table.get_type()
    for symbol in table.get_symbols():
        if symbol.is_referenced():
            if kind == "module" or symbol.is_global():
                names.add(symbol.get_name())
            elif kind == "class" and symbol.is_local():
                uses.of_class.add(symbol.get_name())
    for child in table.get_children():
        inner = names
        if child.get_type() == "annotation":
            inner = uses.annotations
        elif child.get_type() == "function" and child.get_name() not in _COMPREHENSIONS:
            inner = uses.later
        _note_uses(child, uses, inner)


def _ordered(items: dict[str, _Item], *, last: str) -> list[str]:
    """The names of the items, each behind those that it needs when it runs."""
    order: list[str] = []
    begun: set[str] = set()

    def put(name: str) -> None:
        if name in begun or name not in items:
            return
        begun.add(name)
        for needed in by_time(items[name].now):
            put(needed)
        # The statement may call any of these functions while it runs.
        for called in by_time(_reach(items, items[name].now, lambda item: item.now | item.later)):
            if not (_reach(items, [called], lambda item: item.now) & (begun - set(order))):
                put(called)
        order.append(name)

    def by_time(names: Iterable[str]) -> list[str]:
        return sorted(set(names) & items.keys(), key=lambda name: (items[name].position, name))

    for name in by_time(set(items) - {last}):
        put(name)
    put(last)
    return order


def _reach(
    items: dict[str, _Item], names: Iterable[str], edges: Callable[[_Item], Iterable[str]]
) -> set[str]:
    """The names, and all that they lead to."""
    reached: set[str] = set()
    waiting = [name for name in names if name in items]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += [neighbour for neighbour in edges(items[name]) if neighbour in items]
    return reached


# ------------------------------------------------------------------------------ cells of IPython

# IPython and Jupyter keep the text of every cell in `linecache`, under the file name that the code
# of the cell has. A text that ran twice has one such name, so the order is that of the history.

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Cell:
    """One cell, as Python ran it: magics are calls of `get_ipython()` there."""

    label: str
    number: int
    text: str
    #: The file name of the cell's code; `None` if a magic such as `%%time` compiled it.
    filename: str | None


@dataclass(frozen=True)
class Binding:
    """A statement at the top level of a cell, and the names that it binds."""

    cell: Cell
    node: ast.stmt
    names: frozenset[str]

    @property
    def position(self) -> tuple[int, int]:
        """The order in which statements ran."""
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
        """True if the statement has lines that only IPython can run."""
        return any(map(_is_magic, ast.walk(self.node)))

    def compiled(self, code: CodeType) -> bool:
        """True if this code was compiled from the statement, or from a part of it."""
        is_here = self.cell.filename in (code.co_filename, None)
        return is_here and self._first_line <= code.co_firstlineno <= (self.node.end_lineno or 0)

    @property
    def _first_line(self) -> int:
        decorators: list[ast.expr] = getattr(self.node, "decorator_list", [])
        return min([self.node.lineno, *(item.lineno for item in decorators)])


def _read_bindings() -> list[Binding]:
    """The statements of all cells that bind names, the latest first."""
    bindings = [binding for cell in _read_cells() for binding in _bindings(cell)]
    return bindings[::-1]


def _names_in(body: list[ast.stmt]) -> set[str]:
    """The names that statements bind, those of blocks among them."""
    return {name for node in _flattened(body) for name in _bound(node)}


def _session() -> dict[str, Any]:
    """The names of the session and their values, without those that IPython puts there."""
    hidden = getattr(modules.ipython_shell(), "user_ns_hidden", {})
    main = vars(sys.modules["__main__"])
    return {name: value for name, value in main.items() if hidden.get(name, main) is not value}


def _is_of_ipython(name: str) -> bool:
    """True for builtins of IPython alone, such as `display`."""
    return modules.ipython_shell() is not None and name in ("get_ipython", "display", "__IPYTHON__")


def _is_builtin(name: str) -> bool:
    """True for names that modules of any Python have."""
    return hasattr(builtins, name) or name in ("__name__", "__file__", "__doc__")


def _read_cells() -> list[Cell]:
    filenames = {
        "".join(linecache.getlines(filename)).rstrip("\n"): filename
        for filename in list(linecache.cache)
        if filename.startswith("<") or "ipykernel" in filename
    }
    history = getattr(modules.ipython_shell(), "history_manager", None)
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
                for part in ("body", "orelse", "finalbody"):
                    yield from _flattened(getattr(block, part, []))


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


def _is_magic(node: ast.AST) -> bool:
    """True for the call that IPython made of a line such as `%time f()` or `!ls`."""
    outer_function = getattr(getattr(node, "value", None), "func", None)
    inner_function = getattr(getattr(outer_function, "value", None), "func", None)
    return isinstance(node, ast.Expr) and getattr(inner_function, "id", None) == "get_ipython"


def _body_of_magic(node: ast.stmt) -> str | None:
    """The cell below a magic such as `%%time`, if it is Python."""
    if not _is_magic(node):
        return None
    call: ast.Call = node.value  # type: ignore[attr-defined]  # as a magic is
    if getattr(call.func, "attr", "") != "run_cell_magic" or len(call.args) != 3:
        return None
    if getattr(call.args[0], "value", None) == "kt":  # what it defines stays in a pod
        return None
    body, shell = getattr(call.args[2], "value", None), modules.ipython_shell()
    return str(shell.transform_cell(body)) if isinstance(body, str) and shell else None


class _LeavesOutMagics(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.stmt:  # called by that name
        return ast.copy_location(ast.Pass(), node) if _is_magic(node) else node
