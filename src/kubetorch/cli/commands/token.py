"""`kt token`: a token that may call one service."""

from __future__ import annotations

from typing import Annotated

import typer

from kubetorch.cli.args import AsJson, Namespace, ServiceName, duration
from kubetorch.cli.output import Output
from kubetorch.cli.services import Services

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def run(
    name: ServiceName,
    ttl: Annotated[
        str, typer.Option("--ttl", help="How long it is good for: 900, 30m, 1h30m.")
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
