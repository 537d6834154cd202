"""Callables that were defined interactively: their source becomes a file that a pod can import.

    cell ── linecache ── source of the definition ── <working directory>/<name>_fn.py

IPython and Jupyter keep the text of every cell in `linecache`, under a file name of their own.
Imports that the definition needs are written in front of it; other names of the notebook are not
there in a pod, and a warning says which of them it uses.
"""

from __future__ import annotations

import ast
import builtins
import linecache
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from kubetorch.errors import NotebookError
from kubetorch.lib import files

_HEADER = "# Written by Kubetorch from an interactive session; changes are overwritten.\n"
_HINT = "put it into a .py file and import it from there"

_log = logging.getLogger(__name__)

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def write_module(callable_object: Callable[..., Any], path: Path) -> None:
    """Write a module with the definition of an interactively defined callable."""
    name = callable_object.__name__
    _check_is_ours(path)
    definition, lines = _find(callable_object)
    imports, missing = _resolve(definition, vars(sys.modules["__main__"]))
    source = "".join(lines[_first_line(definition) - 1 : definition.end_lineno])
    text = _HEADER + "".join(imports) + ("\n\n" if imports else "\n") + source.rstrip() + "\n"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        files.write_atomically(path, text.encode(), mode=0o644)
    _log.info("%s was written to %s; imports that it needs go inside its body", name, path)
    if missing:
        _log.warning(
            "%s uses %s of this session, which its pods do not have; define it inside the body "
            "or import it",
            name,
            ", ".join(missing),
        )


def _check_is_ours(path: Path) -> None:
    if path.exists() and not path.read_text(encoding="utf-8").startswith(_HEADER):
        raise NotebookError(
            f"{path} exists and was not written by Kubetorch",
            hint="give the function or class another name, or move the file away",
        )


# -------------------------------------------------------------------------- finding the source


def _find(callable_object: Callable[..., Any]) -> tuple[Definition, list[str]]:
    """The definition of a callable, and the lines of the cell that it stands in."""
    name = callable_object.__name__
    for filename, line in _places(callable_object):
        lines = linecache.getlines(filename)
        for definition in _definitions(lines, name):
            if line is None or _first_line(definition) <= line <= (definition.end_lineno or 0):
                return definition, lines
    raise NotebookError(f"the source of {name} cannot be found in this session", hint=_HINT)


def _places(callable_object: Callable[..., Any]) -> Iterator[tuple[str, int | None]]:
    """File names that `linecache` may know the source by, the best first, with a line in it."""
    for function in _functions(callable_object):
        yield function.__code__.co_filename, function.__code__.co_firstlineno
    if isinstance(callable_object, type):  # one without methods: the latest cell that has it
        for filename in reversed(list(linecache.cache)):
            if filename.startswith("<") or "ipykernel" in filename:
                yield filename, None


def _functions(callable_object: Callable[..., Any]) -> Iterator[FunctionType]:
    members = vars(callable_object).values() if isinstance(callable_object, type) else ()
    for item in (callable_object, *members):
        found = getattr(item, "__func__", item)  # class methods and static methods
        while hasattr(found, "__wrapped__"):
            found = found.__wrapped__
        if isinstance(found, FunctionType):
            yield found


def _definitions(lines: list[str], name: str) -> list[Definition]:
    """Definitions of that name at the top level of a cell, the last first."""
    try:
        statements = ast.parse("".join(lines)).body
    except SyntaxError:
        return []
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [item for item in reversed(statements) if isinstance(item, kinds) and item.name == name]


def _first_line(definition: Definition) -> int:
    return min(item.lineno for item in (definition, *definition.decorator_list))


# ---------------------------------------------------------------------------- names that it uses


def _resolve(definition: Definition, session: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Import lines for the names that a definition uses, and the names that cannot be imported."""
    used = {node.id for node in ast.walk(definition) if isinstance(node, ast.Name)}
    bound = {
        node.id
        for node in ast.walk(definition)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    } | {node.arg for node in ast.walk(definition) if isinstance(node, ast.arg)}
    imports, missing = [], []
    for name in sorted(used - {definition.name}):
        if name not in session or hasattr(builtins, name):
            continue
        line = _import_line(name, session[name])
        if line is not None:
            imports.append(line)
        elif name not in bound:
            missing.append(name)
    return imports, missing


def _import_line(name: str, value: object) -> str | None:
    if isinstance(value, ModuleType):
        dotted = value.__name__
        return f"import {dotted}\n" if dotted == name else f"import {dotted} as {name}\n"
    module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(qualname, str) or module == "__main__":
        return None
    if getattr(sys.modules.get(module), qualname, None) is not value:
        return None
    renamed = "" if qualname == name else f" as {name}"
    return f"from {module} import {qualname}{renamed}\n"
