"""`kt call`: call a service, or a method of it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from kubetorch.cli.args import AsJson, Namespace, json_array, json_object
from kubetorch.cli.completing import service_names
from kubetorch.cli.output import Output
from kubetorch.cli.services import Services
from kubetorch.errors import SpecError
from kubetorch.wire.messages import WorkloadView

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def run(
    target: Annotated[
        str,
        typer.Argument(
            metavar="NAME[:METHOD]",
            help="A service, or a method of its class.",
            autocompletion=service_names,
        ),
    ],
    args: Annotated[
        str | None, typer.Option("-a", "--args", help="Positional arguments, a JSON array.")
    ] = None,
    kwargs: Annotated[
        str | None, typer.Option("-k", "--kwargs", help="Keyword arguments, a JSON object.")
    ] = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Call a service, or a method of it.

    What the call logs goes to stderr. The values of a generator are printed as they come.
    """
    output = Output(as_json=as_json)
    positional, keyword = json_array(args, "--args"), json_object(kwargs, "--kwargs")
    name, _, method = target.partition(":")
    services = Services(namespace, output)
    output.note(f"Connecting to {name}...")
    service = services.find(name)
    called = _checked_method(service, method, output)
    output.note(f"Calling {service.spec.name}{f'.{called}' if called else ''}...")
    # The SDK shows what a call logs on stdout, which is for the result here.
    with contextlib.redirect_stdout(sys.stderr):
        result = services.call_service(service, called, positional, keyword)
        if isinstance(result, list) and any(isinstance(one, Iterator) for one in result):
            _show_pods(result, output)
            return
        if not isinstance(result, Iterator):
            _show(result, output)
            return
        for value in result:
            if as_json:
                output.record(value)
            else:
                _show(value, output)


def _show(value: object, output: Output) -> None:
    if output.as_json:
        output.value(value)
    else:
        output.text(f"Result: {value}")


def _show_pods(results: list[object], output: Output) -> None:
    """The values that each pod of a broadcast generates."""
    for pod, result in enumerate(results):
        for value in result if isinstance(result, Iterator) else [result]:
            if output.as_json:
                output.record({"pod": pod, "value": value})
            else:
                output.text(f"Result of pod {pod}: {value}")


def _checked_method(service: WorkloadView, method: str, output: Output) -> str | None:
    """The method to call; none of a function.

    Raises:
        SpecError: The service is an app, or a class and no method was named.
    """
    name = service.spec.name
    if service.spec.callable.kind == "app":
        raise SpecError(
            f"{name} is an app, which is not called", hint=f"kt describe {name} says how to ask it"
        )
    if service.spec.callable.kind == "cls":
        if not method:
            raise SpecError(
                f"{name} is a class; a method of it must be named",
                hint=f"kt call {name}:METHOD; kt describe {name} lists the methods",
            )
        return method
    if method:
        output.warn(f"{name} is a function; the method {method!r} is ignored")
    return None
