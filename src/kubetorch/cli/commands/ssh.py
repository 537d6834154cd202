"""`kt ssh`: a shell in a pod, or a command there."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from kubetorch.cli import pods
from kubetorch.cli.args import Namespace, ServiceName
from kubetorch.cli.output import Output
from kubetorch.cli.services import Services
from kubetorch.sdk import forwarding, shells

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(context_settings={"ignore_unknown_options": True})
def run(
    name: ServiceName,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND...]", help="A command instead of a shell."),
    ] = None,
    pod: Annotated[
        str | None, typer.Option("-p", "--pod", help="This pod: its name, or its index.")
    ] = None,
    namespace: Namespace = None,
) -> None:
    """Open a shell in a pod, or run a command there.

    The pod is the oldest one, unless another is named. With a command after -- that is run instead,
    without a terminal; its exit code is that of kt.
    """
    services = Services(namespace, Output())
    service = services.find(name)
    chosen = forwarding.choose(service) if pod is None else pods.choose(service, pod)
    command = None
    if words:
        command = words[0] if len(words) == 1 else shlex.join(words)
    raise typer.Exit(shells.run(services.session, service, chosen, command))
