"""A cell of `%%kt`, as a pod runs it: in a module of its own, with the names that it reads."""

from __future__ import annotations

import ast
import asyncio
import inspect
import linecache
import symtable
import sys
from types import CodeType, FunctionType, ModuleType
from typing import Any

from kubetorch.errors import SerializationError
from kubetorch.wire import values as wire_values

_MODULE = "kt_cell"
#: File names of the code.
_DEFINITIONS, _CELL = "<definitions>", "<cell>"


def run_cell(text: str, definitions: str, values: dict[str, Any]) -> dict[str, Any]:
    """Run a cell, and return what it has bound.

    Args:
        text: The cell.
        definitions: Source of imports, functions and classes that the cell uses.
        values: The other names that it reads.

    Returns:
        `values`: the names that the cell has bound; `obstacles`: why others cannot travel, by name;
        `result`: the value of the last line, if that is an expression; `shown`: its text, if the
        value cannot travel.
    """
    module = sys.modules[_MODULE] = ModuleType(_MODULE)
    namespace = vars(module)
    namespace.update(values)
    try:
        _execute(definitions, _DEFINITIONS, namespace)
        before = dict(namespace)
        result = _execute(text, _CELL, namespace)
    except BaseException as error:  # noqa: BLE001  # the user's own
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename not in (_DEFINITIONS, _CELL):
            trace = trace.tb_next
        raise error.with_traceback(trace)  # noqa: B904  # of the user's frames alone
    returned, obstacles = {}, {}
    # `rows += [1]` leaves the object that `rows` is.
    assigned = {
        symbol.get_name()
        for symbol in symtable.symtable(text, _CELL, "exec").get_symbols()
        if symbol.is_assigned()
    }
    for name, value in namespace.items():
        is_bound = name in assigned or name not in before or before[name] is not value
        if not is_bound or name.startswith("_") or isinstance(value, ModuleType):
            continue
        reason = _obstacle(name, value)
        if reason is None:
            returned[name] = value
        else:
            obstacles[name] = reason
    shown = None
    if result is not None and _obstacle("result", result) is not None:
        result, shown = None, repr(result)
    return {"values": returned, "obstacles": obstacles, "result": result, "shown": shown}


def _execute(text: str, filename: str, namespace: dict[str, Any]) -> Any:  # noqa: ANN401  # the user's own value
    """Run a text; the value of its last line, if that is an expression."""
    lines = text.splitlines(keepends=True)
    linecache.cache[filename] = (len(text), None, lines, filename)  # for tracebacks
    body = ast.parse(text, filename)
    last = None
    if body.body and isinstance(line := body.body[-1], ast.Expr):
        last = ast.Expression(line.value)
        body.body.pop()
    _run(compile(body, filename, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), namespace)
    if last is None:
        return None
    return _run(compile(last, filename, "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), namespace)


def _run(code: CodeType, namespace: dict[str, Any]) -> Any:  # noqa: ANN401  # the user's own value
    value = eval(code, namespace)
    return asyncio.run(value) if code.co_flags & inspect.CO_COROUTINE else value


def _obstacle(name: str, value: object) -> str | None:
    """The reason why a value cannot travel."""
    if isinstance(value, (FunctionType, type)):
        return "functions and classes stay where they are defined"
    try:
        wire_values.encode(value, name)
    except SerializationError as error:
        return error.message
    return None
