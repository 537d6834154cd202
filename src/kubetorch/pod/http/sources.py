"""Definitions in the source of a project, which is parsed and never run.

A class is found with what it inherits from classes of the same project; what an installed package
defines stays out of reach.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
#: How often a name may lead to another one before that is taken for a circle.
_STEPS = 30
#: Decorators that make a value of a function, not a method.
_OF_VALUES = frozenset({"property", "cached_property", "getter", "setter", "deleter"})


@dataclass(frozen=True)
class Module:
    """A module of the project."""

    name: tuple[str, ...]
    is_package: bool
    body: Sequence[ast.stmt]


@dataclass(frozen=True)
class Class:
    """A class, and the module whose names it knows its bases by."""

    node: ast.ClassDef
    module: Module


Found = Module | Class | Function


class Sources:
    """The source of a project."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = roots
        self._modules: dict[tuple[str, ...], Module | None] = {}

    def find(self, file: Path, module: str, qualname: str) -> Class | Function | None:
        """The definition with this qualified name in a file."""
        read = _read(file, tuple(module.split(".")))
        if read is None:
            return None
        self._modules[read.name] = read
        first, *rest = qualname.split(".")
        found: Found | None = self._name(read, first, _STEPS)
        for name in rest:
            found = self._attribute(found, name, _STEPS)
        return None if isinstance(found, Module) else found

    def methods(self, found: Class) -> dict[str, Function]:
        """What of a class can be called by name: its own first, then what it inherits."""
        members: dict[str, Function | None] = {}
        for one in self._order(found, _STEPS):
            own = _members(one.node)
            members |= {name: node for name, node in own.items() if name not in members}
        return {
            name: node
            for name, node in members.items()
            if node is not None and (name == "__call__" or not name.startswith("_"))
        }

    def _order(self, found: Class, steps: int) -> list[Class]:
        """A class and its bases as attributes are looked up; a common base comes last."""
        above: list[Class] = []
        for expression in found.node.bases:
            base = self._expression(found.module, expression, steps)
            if isinstance(base, Class) and steps and base.node is not found.node:
                above += self._order(base, steps - 1)
        last = {id(one.node): position for position, one in enumerate(above)}
        kept = [one for position, one in enumerate(above) if last[id(one.node)] == position]
        return [found, *kept]

    def _expression(self, module: Module, expression: ast.expr, steps: int) -> Found | None:
        match expression:
            case ast.Name(id=name):
                return self._name(module, name, steps)
            case ast.Attribute(value=value, attr=name):
                return self._attribute(self._expression(module, value, steps), name, steps)
            case ast.Subscript(value=value):
                return self._expression(module, value, steps)
        return None

    def _attribute(self, found: Found | None, name: str, steps: int) -> Found | None:
        if isinstance(found, Module):
            return self._name(found, name, steps) or self._module((*found.name, name))
        if isinstance(found, Class):
            return _defined(found.node.body, name, found.module)
        return None

    def _name(self, module: Module, name: str, steps: int) -> Found | None:
        """What a name of a module means: the last definition or import of it."""
        if steps == 0:
            return None
        for statement in reversed(list(_statements(module.body))):
            found: Found | None = _defined([statement], name, module)
            if found is None and isinstance(statement, ast.ImportFrom):
                found = self._from(module, statement, name, steps - 1)
            elif found is None and isinstance(statement, ast.Import):
                found = self._imported(statement, name)
            if found is not None:
                return found
        return None

    def _from(
        self, module: Module, statement: ast.ImportFrom, name: str, steps: int
    ) -> Found | None:
        start: tuple[str, ...] = ()
        if statement.level:
            up = statement.level - (1 if module.is_package else 0)
            start = module.name[: len(module.name) - up]
        parts = (*start, *(statement.module.split(".") if statement.module else ()))
        for alias in statement.names:
            if alias.name != "*" and (alias.asname or alias.name) != name:
                continue
            source = self._module(parts)
            wanted = name if alias.name == "*" else alias.name
            found = None if source is None else self._name(source, wanted, steps)
            return found or self._module((*parts, wanted))
        return None

    def _imported(self, statement: ast.Import, name: str) -> Module | None:
        for alias in statement.names:
            parts = tuple(alias.name.split("."))
            if (alias.asname or parts[0]) == name:
                return self._module(parts if alias.asname else parts[:1])
        return None

    def _module(self, name: tuple[str, ...]) -> Module | None:
        if not name:
            return None
        if name not in self._modules:
            self._modules[name] = None
            for root in self._roots:
                place = root.joinpath(*name)
                found = _read(place.with_suffix(".py"), name) or _read(place / "__init__.py", name)
                if found is not None or place.is_dir():
                    self._modules[name] = found or Module(name, is_package=True, body=())
                    break
        return self._modules[name]


def _read(file: Path, name: tuple[str, ...]) -> Module | None:
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    return Module(name, file.name == "__init__.py", body)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module or class, also those under a condition."""
    for statement in body:
        yield statement
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, part, ()))
            for handler in getattr(statement, "handlers", ()):
                yield from _statements(handler.body)


def _defined(body: Sequence[ast.stmt], name: str, module: Module) -> Class | Function | None:
    """The definition of a name; the last one, as at run time."""
    for node in reversed(list(_statements(body))):
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)) and node.name == name:
            return Class(node, module) if isinstance(node, ast.ClassDef) else node
    return None


def _members(node: ast.ClassDef) -> dict[str, Function | None]:
    """What a class defines itself; `None` where it is no method."""
    found: dict[str, Function | None] = {}
    for statement in _statements(node.body):
        if isinstance(statement, _FUNCTIONS):
            found[statement.name] = None if _is_value(statement) else statement
        elif isinstance(statement, ast.ClassDef):
            found[statement.name] = None
        elif isinstance(statement, ast.Assign):
            found |= {one.id: None for one in statement.targets if isinstance(one, ast.Name)}
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found[statement.target.id] = None
    return found


def _is_value(node: Function) -> bool:
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", None)
        if name in _OF_VALUES:
            return True
    return False
