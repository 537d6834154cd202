"""`kt uninstall`: nothing of Kubetorch is left in the cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from kubetorch.cli import uninstalling
from kubetorch.cli.args import AsJson
from kubetorch.cli.installing import InstallNamespace

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def run(  # the documented options
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
    volumes: Annotated[
        bool, typer.Option("--volumes", help="Delete the users' volumes, with their data.")
    ] = False,
    secrets: Annotated[bool, typer.Option("--secrets", help="Delete the users' secrets.")] = False,
    namespace: InstallNamespace = None,
    timeout: Annotated[
        str, typer.Option("--timeout", help="How long it may take: 900, 30m, 1h30m.")
    ] = "5m",
    as_json: AsJson = False,
) -> None:
    """Remove Kubetorch from the cluster, with all that is deployed.

    Volumes and secrets of users stay, and are listed.
    """
    uninstalling.uninstall(
        uninstalling.Wanted(
            namespace=namespace,
            timeout=timeout,
            volumes=volumes,
            secrets=secrets,
            yes=yes,
            as_json=as_json,
        )
    )
