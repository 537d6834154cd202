"""Arguments and options that several commands share, and how their texts become values."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

import typer

from kubetorch.cli.completing import service_names
from kubetorch.errors import SpecError

ServiceName = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Name of the service.", autocompletion=service_names),
]
Namespace = Annotated[
    str | None,
    typer.Option("-n", "--namespace", help="Namespace; the configured one by default."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, remarks on stderr.")]

_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def json_array(text: str | None, option: str) -> list[Any]:
    """The array that an option was given; empty when it was not."""
    value = _parse(text, option, "array") if text is not None else []
    if not isinstance(value, list):
        raise _wrong_type(option, "array", text)
    return value


def json_object(text: str | None, option: str) -> dict[str, Any]:
    """The object that an option was given; empty when it was not."""
    value = _parse(text, option, "object") if text is not None else {}
    if not isinstance(value, dict):
        raise _wrong_type(option, "object", text)
    return value


def _parse(text: str, option: str, kind: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise SpecError(
            f"{option} must be a JSON {kind}; {text!r} is not JSON: {error}",
            hint=_EXAMPLES[kind].format(option=option),
        ) from error


def _wrong_type(option: str, kind: str, text: str | None) -> SpecError:
    hint = _EXAMPLES[kind].format(option=option)
    return SpecError(f"{option} must be a JSON {kind}, not {text}", hint=hint)


_EXAMPLES = {
    "array": "for example {option} '[1, \"two\"]'",
    "object": "for example {option} '{{\"key\": 1}}'",
}


def duration(text: str, option: str) -> float:
    """Seconds: a number of them, or a sum such as `1h30m`.

    Raises:
        SpecError: It is neither, or zero.
    """
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
