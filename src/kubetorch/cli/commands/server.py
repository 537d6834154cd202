"""`kt server start`: the agent, in a pod that somebody else made."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.callback(no_args_is_help=True)
def run() -> None:
    """Run Kubetorch's agent in a pod of your own."""


@app.command()
def start(
    port: Annotated[int, typer.Option("-p", "--port", help="Port to listen on.")] = 32300,
    host: Annotated[str, typer.Option("-h", "--host", help="Address to listen on.")] = "0.0.0.0",
    workload: Annotated[
        str | None,
        typer.Option("-n", "--workload", help="Name of the service that this pod is one of."),
    ] = None,
    controller_url: Annotated[
        str | None, typer.Option("-u", "--controller-url", help="Where the controller answers.")
    ] = None,
) -> None:
    """Serve a workload from this pod, as its main program.

    The pod is one that you made, with the labels that a Compute selects.
    """
    from kubetorch.pod import joining  # noqa: PLC0415  # only here is an agent

    options = joining.Options(workload, controller_url, host, port)
    raise typer.Exit(joining.start(options))
