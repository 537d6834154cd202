"""How a service is called, as lines that can be pasted: read from the pod's OpenAPI page. Pure."""

from __future__ import annotations

import json
import keyword
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kubetorch.specs.app import AppSpec
from kubetorch.specs.callable import CallableRef
from kubetorch.wire import routes

#: Stands for a method where the service's own cannot be found out.
PLACEHOLDER = "METHOD_OR_CLS_NAME"

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Operation:
    """Something that can be called.

    Attributes:
        method: Method of a class; `None` for a function.
        signature: As it stands in the source.
        example: Keyword arguments that fit it, without those that have defaults.
        args: Positional arguments, of parameters that have no name for callers.
        is_generator: Whether it yields values.
    """

    method: str | None
    signature: str
    example: Mapping[str, Any]
    args: tuple[Any, ...] = ()
    is_generator: bool = False


def operations(page: object, callable_: CallableRef) -> list[Operation]:
    """What the OpenAPI page of a pod says can be called; a page that is none says nothing."""
    found = []
    base = routes.callable_path(callable_.name)
    for path, item in _mapping(_mapping(page).get("paths")).items():
        post = _mapping(_mapping(item).get("post"))
        method = path[len(base) + 1 :] or None
        if not (path == base or path.startswith(f"{base}/")):
            continue
        if post and (method is not None) == (callable_.kind == "cls"):
            given = _arguments(post)
            found.append(
                Operation(
                    method,
                    str(post.get("summary", "")),
                    _example(given),
                    _positional(given),
                    post.get("x-generator") is True,
                )
            )
    return found


def unknown(callable_: CallableRef) -> Operation:
    """Stands for what can be called when the page is out of reach."""
    method = PLACEHOLDER if callable_.kind == "cls" else None
    return Operation(method, f"{method or callable_.name}(...)", {})


def _arguments(post: Schema) -> Schema:
    """The schemas of `args` and `kwargs`."""
    found = _mapping(post.get("requestBody"))
    for step in ("content", "application/json", "schema", "properties"):
        found = _mapping(found.get(step))
    return found


def _positional(arguments: Schema) -> tuple[Any, ...]:
    """A fitting value for each parameter that is given by its place, and has no default."""
    args = _mapping(arguments.get("args"))
    items, count = args.get("prefixItems"), args.get("minItems")
    if not isinstance(items, list) or not isinstance(count, int):
        return ()
    return tuple(_value(_mapping(one)) for one in items[:count])


def _example(arguments: Schema) -> dict[str, Any]:
    """A fitting value for each parameter that has a name, and no default."""
    parameters = _mapping(_mapping(arguments.get("kwargs")).get("properties"))
    return {
        name: _value(_mapping(schema))
        for name, schema in parameters.items()
        if not str(_mapping(schema).get("description", "")).startswith("default:")
    }


def _mapping(value: object) -> Schema:
    return value if isinstance(value, Mapping) else {}


_EXAMPLES: Mapping[str, Any] = {
    "integer": 1,
    "number": 1.0,
    "string": "text",
    "boolean": True,
    "array": [],
    "object": {},
    "null": None,
}


def _value(schema: Schema) -> Any:  # noqa: ANN401  # any JSON value
    """A value that a schema allows; 1 where it says nothing."""
    choices = schema.get("anyOf")
    if isinstance(choices, list) and choices:
        return _value(_mapping(choices[0]))
    return _EXAMPLES.get(str(schema.get("type")), 1)


# ---------------------------------------------------------------------------------------- lines


class Place(NamedTuple):
    """Where a service is called from here.

    Attributes:
        service, namespace: Its name.
        url: Base URL.
        before: Commands that have to run meanwhile.
    """

    service: str
    namespace: str
    url: str
    before: tuple[str, ...] = ()

    @property
    def curl(self) -> str:
        """The command; what runs meanwhile takes a moment until it listens."""
        return "curl --retry 9 --retry-connrefused" if self.before else "curl"

    @property
    def authorization(self) -> str:
        """The header, in the words of a shell."""
        return f'"Authorization: Bearer $(kt token {self.service} -n {self.namespace})"'


def curl(place: Place, callable_: CallableRef, call: Operation) -> str:
    """The shell command that makes a call; it asks `kt` for a token."""
    path = routes.callable_path(callable_.name, call.method)
    body = json.dumps({"args": call.args, "kwargs": call.example}).replace("'", "'\\''")
    return "\n".join(
        (
            *place.before,
            f"{place.curl} -X POST {place.url}{path} \\",
            f"  -H {place.authorization} \\",
            '  -H "Content-Type: application/json" \\',
            f"  -d '{body}'",
        )
    )


def python(
    service: str,
    namespace: str | None,
    callable_: CallableRef,
    call: Operation,
    *,
    is_hidden: bool = False,
    is_broadcast: bool = False,
) -> str:
    """The Python program that makes a call.

    Args:
        service: Its name.
        namespace: Its namespace, unless that is the configured one.
        callable_: What it serves.
        call: What of it is called.
        is_hidden: Whether a handle has something else under the name of the method.
        is_broadcast: Whether each call goes to several pods.
    """
    kind = callable_.kind
    found = (
        f'kt.{kind}(name="{service}")'
        if namespace is None
        else f'kt.{kind.capitalize()}.from_name("{service}", namespace="{namespace}")'
    )
    variable = _identifier(service)
    called = variable
    if call.method not in (None, "__call__"):
        called += f'["{call.method}"]' if is_hidden else f".{call.method}"
    named = (f"{name}={value!r}" for name, value in call.example.items())
    made = f"{called}({', '.join((*map(repr, call.args), *named))})"
    shown = f"print({made})"
    if call.is_generator and is_broadcast:
        shown = f"for values in {made}:\n    print(*values)"
    elif call.is_generator:
        shown = f"for value in {made}:\n    print(value)"
    return f"import kubetorch as kt\n\n{variable} = {found}\n{shown}"


def _identifier(service: str) -> str:
    name = service.replace("-", "_")
    return name if name.isidentifier() and not keyword.iskeyword(name) else f"service_{name}"


# ----------------------------------------------------------------------------------------- apps


def app_curl(place: Place, app: AppSpec) -> str:
    """The shell command that asks an app; without a port, the one that shows what it writes."""
    if app.port is None:
        return f"kt logs {place.service} -n {place.namespace} -f"
    address = f"{place.curl} {place.url}{routes.APP}{app.health_check or '/'}"
    if not app.public:
        address = f"{address} \\\n  -H {place.authorization}"
    return "\n".join((*place.before, address))


def app_python(place: Place, app: AppSpec) -> str:
    """The Python program that does the same."""
    service, namespace = place.service, place.namespace
    if app.port is None:
        shown = f'["kt", "logs", "{service}", "-n", "{namespace}"]'
        return f"import subprocess\n\nsubprocess.run({shown}, check=True)"
    target = f'"{place.url}{routes.APP}{app.health_check or "/"}"'
    begin = "import urllib.request\n\n"
    if app.public:
        return f"{begin}print(urllib.request.urlopen({target}).read())"
    return (
        f"import subprocess\n{begin}"
        f'command = ["kt", "token", "{service}", "-n", "{namespace}"]\n'
        "token = subprocess.check_output(command, text=True).strip()\n"
        f'headers = {{"Authorization": f"Bearer {{token}}"}}\n'
        f"request = urllib.request.Request({target}, headers=headers)\n"
        "print(urllib.request.urlopen(request).read())"
    )
