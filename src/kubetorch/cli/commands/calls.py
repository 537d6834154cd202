"""`kt calls`: spawned calls, from any terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from kubetorch.cli import views
from kubetorch.cli.args import AsJson, Namespace
from kubetorch.cli.completing import service_names
from kubetorch.cli.output import Output
from kubetorch.cli.services import Services

app = typer.Typer(rich_markup_mode=None, add_completion=False)

CallId = Annotated[str, typer.Argument(metavar="ID", help="Id of the call.")]


@app.callback(invoke_without_command=True)
def calls(context: typer.Context) -> None:
    """List, inspect, cancel and await spawned calls.

    `fn.spawn(...)` starts a call that goes on when its program ends. Its result is kept for a day.
    """
    if context.invoked_subcommand is None:
        Output().text(context.get_help())


@app.command("list")
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
    """List spawned calls, the latest first."""
    output = Output(as_json=as_json)
    services = Services(namespace, output)
    found = services.calls(service)
    found.sort(key=lambda call: call.started, reverse=True)
    if as_json:
        output.value([views.call_json(call) for call in found])
    elif found:
        output.table(views.CALL_COLUMNS, [views.call_row(call) for call in found])
    else:
        output.report(f"No spawned calls found in {services.namespace} namespace")


@app.command()
def show(call_id: CallId, as_json: AsJson = False) -> None:
    """Show one spawned call."""
    output = Output(as_json=as_json)
    call = Services(None, output).call(call_id)
    if as_json:
        output.value(views.call_json(call))
        return
    for key, value in zip(views.CALL_COLUMNS, views.call_row(call), strict=True):
        output.report(f"{key.capitalize() + ':':<10}{value}")


@app.command()
def cancel(call_id: CallId, as_json: AsJson = False) -> None:
    """Cancel a spawned call."""
    output = Output(as_json=as_json)
    services = Services(None, output)
    call = services.cancel(services.call(call_id))
    if as_json:
        output.value(views.call_json(call))
    else:
        output.report(f"✓ Cancelled {call.callable} ({call.id})", "green")


@app.command()
def result(
    call_id: CallId,
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="Give up after so many seconds.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Wait for a spawned call and print its result; fail as it failed."""
    output = Output(as_json=as_json)
    value = Services(None, output).result(call_id, timeout=timeout)
    if as_json:
        output.value(value)
    else:
        output.text(f"Result: {value}")
