"""A description of the deployed callable for people and programs that call it by HTTP.

It is made from the source, which is parsed and never run: the agent does not import user code. What
stands only at run time (parameters that a decorator adds) is not in it.
"""

from __future__ import annotations

import ast
import html
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kubetorch.specs.callable import CallableRef
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import routes

_TYPES: dict[str, dict[str, Any]] = {
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "str": {"type": "string"},
    "bool": {"type": "boolean"},
    "bytes": {"type": "string"},
    "None": {"type": "null"},
    "list": {"type": "array"},
    "tuple": {"type": "array"},
    "set": {"type": "array"},
    "dict": {"type": "object"},
    "List": {"type": "array"},
    "Tuple": {"type": "array"},
    "Sequence": {"type": "array"},
    "Iterable": {"type": "array"},
    "Dict": {"type": "object"},
    "Mapping": {"type": "object"},
}


@dataclass(frozen=True)
class Parameter:
    name: str
    schema: dict[str, Any]
    is_required: bool
    default: str | None = None
    by_position: bool = False


@dataclass(frozen=True)
class Operation:
    method: str | None
    signature: str
    summary: str
    parameters: tuple[Parameter, ...]
    is_open: bool
    result: dict[str, Any]
    is_generator: bool = False


def operations(
    spec: WorkloadSpec, code: Path | None, together: Sequence[int] | None = None
) -> list[Operation]:
    """The functions that can be called, as the source declares them; without source, their names.

    Several pods that are called `together` answer with the list of their results.
    """
    found = _operations(spec.callable, code)
    if together is None:
        return found
    size = {"minItems": len(together), "maxItems": len(together)}
    return [replace(one, result={"type": "array", "items": one.result, **size}) for one in found]


def _operations(ref: CallableRef, code: Path | None) -> list[Operation]:
    fallback = [Operation(None, f"{ref.name}(...)", "", (), True, {})]
    if code is None or ref.source_file is None:
        return fallback
    project = Sources([code / root for root in (ref.root, *ref.roots)])
    found = project.find(code / ref.source_file, ref.module, ref.qualname)
    if isinstance(found, Class):
        return [_operation(node, name) for name, node in project.methods(found).items()]
    return fallback if found is None else [_operation(found, None)]


def document(ref: CallableRef, service: str, found: Sequence[Operation]) -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {"title": service, "version": "1"},
        "paths": {
            routes.callable_path(ref.name, operation.method): {"post": _post(ref, operation)}
            for operation in found
        },
        "security": [{"token": []}],
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": _ERROR},
        },
    }


def page(ref: CallableRef, service: str, found: Sequence[Operation], base: str) -> str:
    """A page for people; it loads nothing from anywhere."""
    parts = [_HEAD.format(title=html.escape(service))]
    for operation in found:
        path = routes.callable_path(ref.name, operation.method)
        types = [(p, p.schema.get("type", "…")) for p in operation.parameters]
        example = {
            "args": [kind for p, kind in types if p.by_position],
            "kwargs": {p.name: kind for p, kind in types if not p.by_position},
        }
        body = json.dumps(example, ensure_ascii=False)
        curl = (
            f"curl -X POST {base}{path} \\\n  -H 'Authorization: Bearer '$TOKEN \\\n"
            f"  -H 'Content-Type: application/json' \\\n  -d '{body}'"
        )
        parts.append(
            f"<section><h2><code>{html.escape(operation.signature)}</code></h2>"
            f"<p>{html.escape(operation.summary)}</p><pre>{html.escape(curl)}</pre></section>"
        )
    return "\n".join([*parts, "</body></html>"])


_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font-family: system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem }}
pre {{ background: #f4f4f4; padding: 1rem; overflow-x: auto }}
</style></head><body><h1>{title}</h1>"""

_ERROR = {
    "type": "object",
    "required": ["error_type", "message"],
    "properties": {
        "error_type": {"type": "string"},
        "message": {"type": "string"},
        "traceback": {"type": "string"},
        "pod_name": {"type": ["string", "null"]},
    },
}


def _operation(node: Function, method: str | None) -> Operation:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    pairs = list(zip(positional, [*defaults, *arguments.defaults], strict=True))
    if method is not None and not _is_static(node):
        pairs = pairs[1:]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    by_position = arguments.posonlyargs
    prefix = "async def " if isinstance(node, ast.AsyncFunctionDef) else "def "
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return Operation(
        method,
        f"{prefix}{node.name}({ast.unparse(arguments)}){returns}",
        ast.get_docstring(node) or "",
        tuple(_parameter(one, default, one in by_position) for one, default in pairs),
        arguments.kwarg is not None,
        _schema(node.returns),
        _yields(node),
    )


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def _yields(node: ast.AST) -> bool:
    """True if a function has a `yield` of its own."""
    return any(
        isinstance(child, (ast.Yield, ast.YieldFrom))
        or (not isinstance(child, _SCOPES) and _yields(child))
        for child in ast.iter_child_nodes(node)
    )


def _is_static(node: Function) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)


def _parameter(argument: ast.arg, default: ast.expr | None, by_position: bool) -> Parameter:
    return Parameter(
        argument.arg,
        _schema(argument.annotation),
        default is None,
        None if default is None else ast.unparse(default),
        by_position,
    )


def _schema(annotation: ast.expr | None) -> dict[str, Any]:
    """JSON schema of a simple annotation; empty, which allows anything, for others."""
    match annotation:
        case ast.Constant(value=None):
            return {"type": "null"}
        case ast.Constant(value=str() as text):
            try:
                return _schema(ast.parse(text, mode="eval").body)
            except (SyntaxError, ValueError):
                return {}
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return dict(_TYPES.get(name, {}))
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _any_of([left, right])
        case ast.Subscript(value=ast.Name(id="Optional") | ast.Attribute(attr="Optional"), slice=s):
            return _any_of([s, ast.Constant(None)])
        case ast.Subscript(
            value=ast.Name(id="Union") | ast.Attribute(attr="Union"), slice=ast.Tuple(elts=options)
        ):
            return _any_of(options)
        case ast.Subscript(value=base, slice=inner):
            return _of_items(_schema(base), inner)
    return {}


def _of_items(schema: dict[str, Any], inner: ast.expr) -> dict[str, Any]:
    if schema.get("type") == "array" and not isinstance(inner, ast.Tuple):
        schema["items"] = _schema(inner)
    elif schema.get("type") == "object" and isinstance(inner, ast.Tuple) and len(inner.elts) == 2:
        schema["additionalProperties"] = _schema(inner.elts[1])
    return schema


def _any_of(options: Sequence[ast.expr]) -> dict[str, Any]:
    schemas = [_schema(option) for option in options]
    return {"anyOf": schemas} if all(schemas) else {}


def _described(parameter: Parameter) -> dict[str, Any]:
    said = {} if parameter.default is None else {"description": f"default: {parameter.default}"}
    return {**parameter.schema, **said}


def _post(ref: CallableRef, operation: Operation) -> dict[str, Any]:
    by_name = [p for p in operation.parameters if not p.by_position]
    by_position = [p for p in operation.parameters if p.by_position]
    properties = {p.name: _described(p) for p in by_name}
    required = [p.name for p in operation.parameters if p.is_required]
    kwargs: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "additionalProperties": operation.is_open,
    }
    body: dict[str, Any] = {
        "type": "object",
        "properties": {"args": {"type": "array"}, "kwargs": kwargs},
    }
    if by_position:
        body["properties"]["args"] |= {
            "prefixItems": [{"title": p.name, **_described(p)} for p in by_position],
            "minItems": sum(p.is_required for p in by_position),
        }
    if required:
        body["description"] = f"given by args or kwargs: {', '.join(required)}"
    name = f"{ref.name}.{operation.method}" if operation.method else ref.name
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "operationId": name,
        "summary": operation.signature,
        "description": operation.summary,
        **({"x-generator": True} if operation.is_generator else {}),
        "requestBody": {"content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {
                "description": "what it returned",
                "content": {"application/json": {"schema": operation.result}},
            },
            "default": {"description": "it failed", "content": error},
        },
    }


# ---------------------------------------------------------- definitions in the source of a project

Function = ast.FunctionDef | ast.AsyncFunctionDef

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
#: How often a name may lead to another one before that is taken for a circle.
_STEPS = 30
#: Decorators that make a value of a function, not a method.
_OF_VALUES = frozenset({"property", "cached_property", "getter", "setter", "deleter"})


@dataclass(frozen=True)
class Module:
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
    """The source of a project, with what its classes inherit from each other."""

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
        """The methods of a class that can be called: its own first, then the inherited ones."""
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
        """The meaning of a name in a module: the last definition or import of the name."""
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
    """The members that a class defines itself; `None` for members that are no methods."""
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
