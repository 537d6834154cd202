"""A description of the deployed callable for people and programs that call it by HTTP.

It is made from the source, which is parsed and never run: the agent does not import user code. What
stands only at run time (parameters that a decorator adds) is not in it.
"""

from __future__ import annotations

import ast
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kubetorch.pod.http import sources
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
    """One parameter of a function."""

    name: str
    schema: dict[str, Any]
    is_required: bool
    default: str | None = None
    by_position: bool = False


@dataclass(frozen=True)
class Operation:
    """A function or method that can be called."""

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
    """What can be called, as far as the source says; without the source, only that it can.

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
    project = sources.Sources([code / root for root in (ref.root, *ref.roots)])
    found = project.find(code / ref.source_file, ref.module, ref.qualname)
    if isinstance(found, sources.Class):
        return [_operation(node, name) for name, node in project.methods(found).items()]
    return fallback if found is None else [_operation(found, None)]


def document(ref: CallableRef, service: str, found: Sequence[Operation]) -> dict[str, Any]:
    """The OpenAPI document."""
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


def _operation(node: sources.Function, method: str | None) -> Operation:
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
    """Whether a function has a `yield` of its own."""
    return any(
        isinstance(child, (ast.Yield, ast.YieldFrom))
        or (not isinstance(child, _SCOPES) and _yields(child))
        for child in ast.iter_child_nodes(node)
    )


def _is_static(node: sources.Function) -> bool:
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
