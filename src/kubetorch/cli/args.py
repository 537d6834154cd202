"""Arguments and options that several commands share, and how their texts become values."""

from __future__ import annotations

import json
import re
from typing import Annotated, TypeVar

import typer

from kubetorch.config.settings import config
from kubetorch.errors import KubetorchError, SpecError
from kubetorch.local import lifetime
from kubetorch.sdk import backend

ExactMatch = Annotated[
    bool, typer.Option("--exact-match", help="Only the exact name, whoever deployed it.")
]


def service_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of services that begin with the incomplete word; none while no local service runs."""
    try:
        if lifetime.find() is None:
            return []
        backend.be_quiet()
        namespace: str = ctx.params.get("namespace") or config.namespace
        views = backend.session().ask(lambda controller: controller.list_workloads(namespace))
    except KubetorchError:
        return []
    return sorted(view.spec.name for view in views if view.spec.name.startswith(incomplete))


ServiceName = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the service.", autocompletion=service_names)
]
Namespace = Annotated[
    str | None, typer.Option("-n", "--namespace", help="Namespace; the configured one by default.")
]
AllNamespaces = Annotated[bool, typer.Option("-A", "--all-namespaces", help="Show all namespaces.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, remarks on stderr.")]

Replace = Annotated[
    bool,
    typer.Option("--replace", help="Replace a service of that name, also one of somebody else."),
]
AsRaw = Annotated[
    bool, typer.Option("--raw", help="Print lines unchanged, also if they steer the terminal.")
]

Value = TypeVar("Value")

_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def json_value(text: str | None, option: str, kind: type[Value]) -> Value:
    """The array or object that an option was given; empty when it was not."""
    if text is None:
        return kind()
    word, example = ("array", '[1, "two"]') if kind is list else ("object", '{"key": 1}')
    hint = f"for example {option} '{example}'"
    try:
        value = json.loads(text)
    except ValueError as error:
        raise SpecError(
            f"{option} must be a JSON {word}; {text!r} is not JSON: {error}", hint=hint
        ) from error
    if not isinstance(value, kind):
        raise SpecError(f"{option} must be a JSON {word}, not {text}", hint=hint)
    return value


def duration(text: str, option: str) -> float:
    """Seconds: a number of them, or a sum such as `1h30m`."""
    match = _DURATION.fullmatch(text)
    if text.isdigit():
        seconds = int(text)
    elif match is None:
        seconds = 0
    else:
        days, hours, minutes, rest = (int(part or 0) for part in match.groups())
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    if not seconds:
        raise SpecError(
            f"{option} is {text!r}; it must be a duration", hint="for example 900, 30m or 1h30m"
        )
    return float(seconds)
