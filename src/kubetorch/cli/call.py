"""`kt call`, `kt calls` and `kt token`: calls of services, and spawned calls from any terminal."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kubetorch.cli import views
from kubetorch.cli.args import AsJson, Namespace, ServiceName, duration, json_value, service_names
from kubetorch.cli.output import Output
from kubetorch.cli.services import Services
from kubetorch.errors import SpecError
from kubetorch.sdk.calls.attempts import RankValues
from kubetorch.sdk.calls.handles import CallHandle
from kubetorch.wire.messages import WorkloadView

app = typer.Typer(rich_markup_mode=None, add_completion=False)


class _ListByDefault(TyperGroup):
    """A group whose options without a command are those of its `list`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401  # typer's own
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)


@app.command("call", context_settings={"allow_extra_args": True})
def call(
    context: typer.Context,
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
    if context.args:
        raise typer.BadParameter(
            f"the arguments of a call are JSON: kt call {target} --args {_array(context.args)}"
        )
    output = Output(as_json=as_json)
    positional, keyword = json_value(args, "--args", list), json_value(kwargs, "--kwargs", dict)
    name, _, method = target.partition(":")
    services = Services(namespace, output, is_changing=True)
    output.note(f"Connecting to {name}...")
    service = services.find(name)
    called = _checked_method(service, method)
    output.note(f"Calling {service.spec.name}{f'.{called}' if called else ''}...")
    # The SDK shows what a call logs on stdout, which is for the result here.
    with contextlib.redirect_stdout(sys.stderr):
        result = services.call_service(service, called, positional, keyword)
        if isinstance(result, list) and any(isinstance(part, Iterator) for part in result):
            _show_parts("pod" if service.world is None else "rank", result, output)
            return
        if isinstance(result, RankValues) and not as_json:
            _show_parts("rank", result, output)
            return
        if not isinstance(result, Iterator):
            output.result(result)
            return
        for value in result:
            if as_json:
                output.record(value)
            else:
                output.result(value)


def _array(words: list[str]) -> str:
    """Words of a command line as the JSON array that the user may mean, quoted for a shell."""
    values: list[object] = []
    for word in words:
        try:
            values.append(json.loads(word))
        except ValueError:
            values.append(word)
    return shlex.quote(json.dumps(values))


def _show_parts(kind: str, results: list[object], output: Output) -> None:
    """The values that each pod of a broadcast, or each rank, generates."""
    for number, result in enumerate(results):
        for value in result if isinstance(result, Iterator) else [result]:
            if output.as_json:
                output.record({kind: number, "value": value})
            else:
                output.text(f"Result of {kind} {number}: {value}")


def _checked_method(service: WorkloadView, method: str) -> str | None:
    """The method to call; none of a function."""
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
        raise SpecError(
            f"{name} is a function; it has no method {method!r}", hint=f"kt call {name} calls it"
        )
    return None


calls_app = typer.Typer(cls=_ListByDefault, rich_markup_mode=None, add_completion=False)

CallId = Annotated[
    str, typer.Argument(metavar="ID", help="Id of the call, or its first 6 digits or more.")
]


app.add_typer(calls_app, name="calls")


@calls_app.callback()
def calls() -> None:
    """List, inspect, cancel and await spawned calls.

    `fn.spawn(...)` starts a call that goes on when its program ends. Its result is kept for a day.
    Without a command the calls are listed.
    """


@calls_app.command("list")
def list_calls(
    service: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Only calls of this service.", autocompletion=service_names
        ),
    ] = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """List spawned calls, and calls that can be replayed, the latest first."""
    output = Output(as_json=as_json)
    services = Services(namespace, output)
    spawned_calls = services.calls(service)
    spawned_calls.sort(key=lambda call: call.started, reverse=True)
    if as_json:
        output.value([views.call_json(call) for call in spawned_calls])
    elif spawned_calls:
        rows = [views.call_cells(call, brief=True) for call in spawned_calls]
        output.table(rows, dispensable=views.DISPENSABLE_CALL_COLUMNS)
        # Not all have a record: those of generators do not.
        failed = [call for call in spawned_calls if call.is_replayable and call.state == "failed"]
        for call in failed[:1]:
            output.note(f"kt replay {call.id} runs {call.callable} again", "dim")
    else:
        output.report(f"No spawned calls found in {services.namespace} namespace")


@calls_app.command()
def show(call_id: CallId, as_json: AsJson = False) -> None:
    """Show one spawned call."""
    output = Output(as_json=as_json)
    services = Services(None, output)
    call = services.call(services.call_id(call_id))
    if as_json:
        output.value(views.call_json(call))
        return
    for key, value in views.call_cells(call).items():
        output.report(f"{key.capitalize() + ':':<10}{value}")


@calls_app.command()
def cancel(call_id: CallId, as_json: AsJson = False) -> None:
    """Cancel a spawned call."""
    output = Output(as_json=as_json)
    services = Services(None, output, is_changing=True)
    call_id = services.call_id(call_id)
    before = services.call(call_id)
    services.session.ask(lambda controller: controller.cancel_call(call_id))
    call = services.call(call_id)
    if as_json:
        output.value(views.call_json(call))
    elif before.ended is not None:
        output.report(f"{call.callable} ({call.id}) had ended already: {before.state}")
    else:
        output.report(f"✓ Cancelled {call.callable} ({call.id})", "green")


@calls_app.command()
def result(
    call_id: CallId,
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="Give up after so many seconds.")
    ] = None,
    serialization: Annotated[
        str | None,
        typer.Option(
            "--serialization",
            help="pickle: fetch a value that could not travel; it is unpickled without --out.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write the pickled value to this file; nothing is unpickled."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Wait for a spawned call and print its result; fail as it failed."""
    if serialization not in (None, "pickle"):
        raise typer.BadParameter(
            f"{serialization!r} is none of: pickle", param_hint="--serialization"
        )
    if out is not None and serialization is None:
        raise typer.BadParameter("a file is for a pickled value: --serialization pickle --out FILE")
    output = Output(as_json=as_json)
    handle = CallHandle.from_id(Services(None, output).call_id(call_id))
    if out is not None:
        data = handle.pickled(timeout)
        _write(out, data)
        if as_json:
            output.value({"out": str(out), "bytes": len(data)})
        else:
            output.report(f"✓ Wrote {len(data)} bytes to {out}; pickle.load reads them", "green")
        return
    value = handle.get(timeout, serialization="pickle" if serialization else None)
    if as_json:
        output.value(value)
    else:
        output.text(f"Result: {value}")


def _write(file: Path, data: bytes | memoryview) -> None:
    try:
        file.write_bytes(data)
    except OSError as error:
        raise SpecError(
            f"--out {file}: {error.strerror or error}", hint="name a file in a folder that there is"
        ) from error


@app.command("token")
def token(
    name: ServiceName,
    ttl: Annotated[
        str, typer.Option("--ttl", help="How long the token is valid: 900, 30m, 1h30m.")
    ] = "1h",
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Print a token that may call one service.

    Whoever has it may call the service until it expires, and nothing else.
    """
    output = Output(as_json=as_json)
    seconds = duration(ttl, "--ttl")
    services = Services(namespace, output)
    view = services.token(services.find(name), ttl=seconds)
    if as_json:
        output.value({"token": view.token, "expires": view.expires})
    else:
        output.text(view.token)
