"""`kt uninstall`: nothing of Kubetorch is left in the cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from kubetorch.cli import uninstalling
from kubetorch.cli.args import AsJson
from kubetorch.cli.installing import InstallNamespace

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def run(  # noqa: PLR0913  # the documented options
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
    volumes: Annotated[
        bool, typer.Option("--volumes", help="Delete the users' volumes, with their data.")
    ] = False,
    secrets: Annotated[bool, typer.Option("--secrets", help="Delete the users' secrets.")] = False,
    contents_only: Annotated[
        bool,
        typer.Option(
            "--contents-only",
            help="Leave what the chart has made. helm runs this before it uninstalls.",
        ),
    ] = False,
    watched: Annotated[
        list[str] | None,
        typer.Option("--watched", help="With --contents-only: a namespace of watchNamespaces."),
    ] = None,
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
            contents_only=contents_only,
            watched=tuple(watched or ()),
            yes=yes,
            as_json=as_json,
        )
    )
