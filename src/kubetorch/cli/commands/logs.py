"""`kt logs`: what the pods of a service have logged."""

from __future__ import annotations

from typing import Annotated

import typer

from kubetorch.cli import pods, views
from kubetorch.cli.args import AsJson, Namespace, ServiceName
from kubetorch.cli.output import Output
from kubetorch.cli.services import Services
from kubetorch.wire import routes

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def run(
    name: ServiceName,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on with new lines until interrupted.")
    ] = False,
    tail: Annotated[
        int,
        typer.Option(
            "-t",
            "--tail",
            min=0,
            max=routes.TAIL_MOST,
            help="How many of the last lines to begin with.",
        ),
    ] = 100,
    pod: Annotated[
        str | None, typer.Option("-p", "--pod", help="Only this pod: its name, or its index.")
    ] = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Show what a service has logged."""
    output = Output(as_json=as_json)
    services = Services(namespace, output)
    output.note(f"Looking for service {name}...")
    service = services.find(name)
    chosen = pods.choose(service, pod) if pod is not None else None
    prefixed = chosen is None and len(service.pods) > 1
    for line in services.logs(service, tail=tail, follow=follow, pod=chosen):
        if as_json:
            output.record(views.line_json(line))
        else:
            text = views.line_text(line)
            output.text(f"({line.pod}) {text}" if prefixed else text)
