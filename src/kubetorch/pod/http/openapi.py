"""A description of the deployed callable for people and programs that call it by HTTP.

The description is made from the source, which is parsed and never run: the agent does not import
user code. Parameters that exist only at run time, as those that a decorator adds, are missing.
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
    declared_operations = [
        _of_item(operation) if spec.callable.batch_size_of(operation.method) else operation
        for operation in _read_operations(spec.callable, code)
    ]
    if together is None:
        return declared_operations
    size = {"minItems": len(together), "maxItems": len(together)}
    return [
        replace(operation, result={"type": "array", "items": operation.result, **size})
        for operation in declared_operations
    ]


def _of_item(operation: Operation) -> Operation:
    """The operation of a batched function as its callers see it: an item in, a result out."""
    parameters = tuple(
        replace(parameter, schema=parameter.schema.get("items", {}))
        for parameter in operation.parameters[:1]
    )
    return replace(
        operation,
        signature=f"@kt.batched {operation.signature}",
        parameters=parameters,
        is_open=not parameters,
        result=operation.result.get("items", {}),
    )


def _read_operations(ref: CallableRef, code: Path | None) -> list[Operation]:
    fallback = [Operation(None, f"{ref.name}(...)", "", (), True, {})]
    if code is None or ref.source_file is None:
        return fallback
    project = Sources([code / root for root in (ref.root, *ref.roots)])
    definition = project.find(code / ref.source_file, ref.module, ref.qualname)
    if isinstance(definition, Class):
        return [_operation(node, name) for name, node in project.methods(definition).items()]
    return fallback if definition is None else [_operation(definition, None)]


def document(
    ref: CallableRef, service: str, declared_operations: Sequence[Operation]
) -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {"title": service, "version": "1"},
        "paths": {
            routes.callable_path(ref.name, operation.method): {"post": _post(ref, operation)}
            for operation in declared_operations
        },
        "security": [{"token": []}],
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": _ERROR},
        },
    }


def page(
    ref: CallableRef, service: str, declared_operations: Sequence[Operation], base: str
) -> str:
    """A page for people; the page loads no scripts, styles or images."""
    parts = [_HEAD.format(title=html.escape(service))]
    for operation in declared_operations:
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
        tuple(
            _parameter(argument, default, argument in by_position) for argument, default in pairs
        ),
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


def _described_schema(parameter: Parameter) -> dict[str, Any]:
    description = (
        {} if parameter.default is None else {"description": f"default: {parameter.default}"}
    )
    return {**parameter.schema, **description}


def _post(ref: CallableRef, operation: Operation) -> dict[str, Any]:
    by_name = [p for p in operation.parameters if not p.by_position]
    by_position = [p for p in operation.parameters if p.by_position]
    properties = {p.name: _described_schema(p) for p in by_name}
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
            "prefixItems": [{"title": p.name, **_described_schema(p)} for p in by_position],
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
#: How many names may lead to each other before they are taken for a circle.
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
    """A class, and the module in which the names of its bases are looked up."""

    node: ast.ClassDef
    module: Module


Definition = Module | Class | Function


class Sources:
    """The source of a project, in which names are followed from module to module."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = roots
        self._modules: dict[tuple[str, ...], Module | None] = {}

    def find(self, file: Path, module: str, qualname: str) -> Class | Function | None:
        """The definition with this qualified name in a file."""
        parsed_module = _read(file, tuple(module.split(".")))
        if parsed_module is None:
            return None
        self._modules[parsed_module.name] = parsed_module
        first, *rest = qualname.split(".")
        definition: Definition | None = self._resolve_name(parsed_module, first, _STEPS)
        for name in rest:
            definition = self._resolve_attribute(definition, name, _STEPS)
        return None if isinstance(definition, Module) else definition

    def methods(self, definition: Class) -> dict[str, Function]:
        """The methods of a class that can be called: its own first, then the inherited ones."""
        members: dict[str, Function | None] = {}
        for ancestor in self._resolution_order(definition, _STEPS):
            class_members = _members(ancestor.node)
            members |= {name: node for name, node in class_members.items() if name not in members}
        return {
            name: node
            for name, node in members.items()
            if node is not None and (name == "__call__" or not name.startswith("_"))
        }

    def _resolution_order(self, definition: Class, steps: int) -> list[Class]:
        """A class and its bases as attributes are looked up; a common base comes last."""
        bases: list[Class] = []
        for expression in definition.node.bases:
            base = self._resolve_expression(definition.module, expression, steps)
            if isinstance(base, Class) and steps and base.node is not definition.node:
                bases += self._resolution_order(base, steps - 1)
        last_positions = {id(ancestor.node): position for position, ancestor in enumerate(bases)}
        distinct_bases = [
            ancestor
            for position, ancestor in enumerate(bases)
            if last_positions[id(ancestor.node)] == position
        ]
        return [definition, *distinct_bases]

    def _resolve_expression(
        self, module: Module, expression: ast.expr, steps: int
    ) -> Definition | None:
        match expression:
            case ast.Name(id=name):
                return self._resolve_name(module, name, steps)
            case ast.Attribute(value=value, attr=name):
                return self._resolve_attribute(
                    self._resolve_expression(module, value, steps), name, steps
                )
            case ast.Subscript(value=value):
                return self._resolve_expression(module, value, steps)
        return None

    def _resolve_attribute(
        self, owner: Definition | None, name: str, steps: int
    ) -> Definition | None:
        if isinstance(owner, Module):
            return self._resolve_name(owner, name, steps) or self._find_module((*owner.name, name))
        if isinstance(owner, Class):
            return _definition_in(owner.node.body, name, owner.module)
        return None

    def _resolve_name(self, module: Module, name: str, steps: int) -> Definition | None:
        """The meaning of a name in a module: the last definition or import of the name."""
        if steps == 0:
            return None
        for statement in reversed(list(_statements(module.body))):
            definition: Definition | None = _definition_in([statement], name, module)
            if definition is None and isinstance(statement, ast.ImportFrom):
                definition = self._resolve_from_import(module, statement, name, steps - 1)
            elif definition is None and isinstance(statement, ast.Import):
                definition = self._resolve_import(statement, name)
            if definition is not None:
                return definition
        return None

    def _resolve_from_import(
        self, module: Module, statement: ast.ImportFrom, name: str, steps: int
    ) -> Definition | None:
        start: tuple[str, ...] = ()
        if statement.level:
            up = statement.level - (1 if module.is_package else 0)
            start = module.name[: len(module.name) - up]
        parts = (*start, *(statement.module.split(".") if statement.module else ()))
        for alias in statement.names:
            if alias.name != "*" and (alias.asname or alias.name) != name:
                continue
            source = self._find_module(parts)
            source_name = name if alias.name == "*" else alias.name
            definition = None if source is None else self._resolve_name(source, source_name, steps)
            return definition or self._find_module((*parts, source_name))
        return None

    def _resolve_import(self, statement: ast.Import, name: str) -> Module | None:
        for alias in statement.names:
            parts = tuple(alias.name.split("."))
            if (alias.asname or parts[0]) == name:
                return self._find_module(parts if alias.asname else parts[:1])
        return None

    def _find_module(self, name: tuple[str, ...]) -> Module | None:
        if not name:
            return None
        if name not in self._modules:
            self._modules[name] = None
            for root in self._roots:
                path = root.joinpath(*name)
                module = _read(path.with_suffix(".py"), name) or _read(path / "__init__.py", name)
                if module is not None or path.is_dir():
                    self._modules[name] = module or Module(name, is_package=True, body=())
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


def _definition_in(body: Sequence[ast.stmt], name: str, module: Module) -> Class | Function | None:
    """The definition of a name; the last one, as at run time."""
    for node in reversed(list(_statements(body))):
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)) and node.name == name:
            return Class(node, module) if isinstance(node, ast.ClassDef) else node
    return None


def _members(node: ast.ClassDef) -> dict[str, Function | None]:
    """The members that a class defines itself; `None` for members that are no methods."""
    members: dict[str, Function | None] = {}
    for statement in _statements(node.body):
        if isinstance(statement, _FUNCTIONS):
            members[statement.name] = None if _is_value(statement) else statement
        elif isinstance(statement, ast.ClassDef):
            members[statement.name] = None
        elif isinstance(statement, ast.Assign):
            members |= {
                target.id: None for target in statement.targets if isinstance(target, ast.Name)
            }
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            members[statement.target.id] = None
    return members


def _is_value(node: Function) -> bool:
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", None)
        if name in _OF_VALUES:
            return True
    return False
