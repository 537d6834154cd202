"""`kt install`: Kubetorch in a cluster."""

from __future__ import annotations

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
    namespace: InstallNamespace = None,
    dry_run: DryRun = False,
    no_wait: NoWait = False,
    timeout: Timeout = "5m",
    as_json: AsJson = False,
) -> None:
    """Install Kubetorch in the cluster of the kubeconfig.

    Where it is installed already, it keeps the values that it was given before, as kt upgrade does.
    """
    wanted = installing.Wanted(
        installing.given(image, pod_image, settings or [], files or []),
        namespace=namespace,
        timeout=None if no_wait else timeout,
        as_json=as_json,
    )
    if dry_run:
        installing.show(wanted)
    else:
        installing.install(wanted)
