"""`kt upgrade`: the Kubetorch of a cluster becomes that of this package."""

from __future__ import annotations

from typing import Annotated

import typer

from kubetorch.cli import installing
from kubetorch.cli.args import AsJson
from kubetorch.cli.installing import (
    DryRun,
    InstallNamespace,
    NoWait,
    PodImage,
    RuntimeImage,
    Settings,
    Timeout,
    ValueFiles,
)

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def run(  # noqa: PLR0913  # the documented options
    image: RuntimeImage = None,
    pod_image: PodImage = None,
    settings: Settings = None,
    files: ValueFiles = None,
    reset_values: Annotated[
        bool, typer.Option("--reset-values", help="Forget the values that were given before.")
    ] = False,
    downgrade: Annotated[
        bool, typer.Option("--downgrade", help="Go back to an older version than is installed.")
    ] = False,
    namespace: InstallNamespace = None,
    dry_run: DryRun = False,
    no_wait: NoWait = False,
    timeout: Timeout = "5m",
    as_json: AsJson = False,
) -> None:
    """Upgrade the Kubetorch of the cluster, or change its values.

    Values that were given before are kept; an image of another version has to be given anew. Calls
    go on while the controller is replaced.
    """
    wanted = installing.Wanted(
        installing.given(image, pod_image, settings or [], files or []),
        namespace=namespace,
        timeout=None if no_wait else timeout,
        as_json=as_json,
        must_exist=True,
        resets=reset_values,
        downgrades=downgrade,
    )
    if dry_run:
        installing.show(wanted)
    else:
        installing.install(wanted)
