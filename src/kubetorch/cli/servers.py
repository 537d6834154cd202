"""`kt local` and `kt server`: the service of this machine, and the agent of a pod of one's own."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kubetorch.cli import views
from kubetorch.cli.args import AsJson
from kubetorch.cli.output import Output
from kubetorch.errors import ControllerUnavailableError
from kubetorch.lib.http_client import HttpClient
from kubetorch.local import lifetime
from kubetorch.pod import identity, server_start
from kubetorch.sdk.controller import Controller

local_app = typer.Typer(rich_markup_mode=None, add_completion=False)


app = typer.Typer(rich_markup_mode=None, add_completion=False)
app.add_typer(local_app, name="local")


@local_app.callback(invoke_without_command=True)
def local(context: typer.Context) -> None:
    """Start, stop or inspect the local service."""
    if context.invoked_subcommand is None:
        Output().text(context.get_help())


@local_app.command()
def start(as_json: AsJson = False) -> None:
    """Start it, with the pods that it had when it was stopped."""
    output = Output(as_json=as_json)
    endpoint = lifetime.ensure()
    if as_json:
        output.value(_facts())
    else:
        done = "Started" if endpoint.started else "Runs already:"
        output.report(f"{done} the local service at {endpoint.url}", "green")


@local_app.command()
def stop(as_json: AsJson = False) -> None:
    """Stop it and its pods; the next start brings them back."""
    output = Output(as_json=as_json)
    did_run = lifetime.stop()
    if as_json:
        output.value({"stopped": did_run})
    elif did_run:
        output.report("Stopped the local service", "green")
    else:
        output.report("The local service does not run")


@local_app.command()
def status(as_json: AsJson = False) -> None:
    """Say whether it runs, where it listens, and where its files are."""
    output = Output(as_json=as_json)
    facts = _facts()
    if as_json:
        output.value(facts)
        return
    if facts["running"]:
        output.report(f"The local service runs at {facts['url']}", "green")
        output.report(f"process    {facts['pid']}, since {views.moment(facts['started'])}")
        output.report(f"version    {facts['version']}")
        output.report(f"services   {'?' if facts['services'] is None else facts['services']}")
    else:
        output.report("The local service does not run; it starts when it is needed")
    output.report(f"files      {facts['home']}")
    output.report(f"log        {facts['log']}")


def _facts() -> dict[str, Any]:
    """The facts about the service, which is not started."""
    service_status = lifetime.status()
    running = service_status.running
    return {
        "running": running is not None,
        "url": running and running.url,
        "pid": running and running.pid,
        "started": running and running.started,
        "version": running and running.version,
        "services": _count_services(),
        "home": str(service_status.home),
        "log": str(service_status.log),
    }


def _count_services() -> int | None:
    """The number of services; `None` without an answer."""
    endpoint = lifetime.find()
    if endpoint is None:
        return None
    with HttpClient(endpoint.url, endpoint.token, timeout=5.0) as http:
        try:
            return len(Controller(http).list_workloads())
        except ControllerUnavailableError:
            return None


server_app = typer.Typer(rich_markup_mode=None, add_completion=False)


app.add_typer(server_app, name="server")


@server_app.callback(no_args_is_help=True)
def server() -> None:
    """Run Kubetorch's agent in a pod of your own."""


@server_app.command("start")
def start_agent(
    port: Annotated[int, typer.Option("-p", "--port", help="Port to listen on.")] = 32300,
    host: Annotated[str, typer.Option("-h", "--host", help="Address to listen on.")] = "0.0.0.0",
    workload: Annotated[
        str | None, typer.Option("-n", "--workload", help="Name of the service of this pod.")
    ] = None,
    controller_url: Annotated[
        str | None, typer.Option("-u", "--controller-url", help="URL of the controller.")
    ] = None,
) -> None:
    """Serve a workload from this pod, as its main program.

    The pod is one that you made, with the labels that a Compute selects.
    """
    options = identity.Options(workload, controller_url, host, port)
    raise typer.Exit(server_start.start(options))
