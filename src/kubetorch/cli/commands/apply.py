"""`kt apply`: run what a manifest's container would run, as an app."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from kubetorch.cli import views
from kubetorch.cli.args import AsJson
from kubetorch.cli.output import Output
from kubetorch.cli.services import Services
from kubetorch.errors import KubetorchError, SpecError
from kubetorch.manifests import commanding, kinds, reading
from kubetorch.sdk.apps.app import App
from kubetorch.sdk.compute import Compute
from kubetorch.sdk.computing import manifests
from kubetorch.sdk.image import Image

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def run(  # the documented options
    manifest: Annotated[
        str, typer.Argument(metavar="MANIFEST", help="YAML file with a Deployment, Pod, Job, ….")
    ],
    dockerfile: Annotated[
        str | None,
        typer.Option("-d", "--dockerfile", help="Dockerfile with the steps of the image."),
    ] = None,
    pod_template_path: Annotated[
        str | None,
        typer.Option(
            "-t", "--pod-template-path", help="Where the pod template of an unknown kind lies."
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option("-p", "--port", help="Port that the command listens on.")
    ] = None,
    health_check: Annotated[
        str | None,
        typer.Option("--health-check", help="Path that answers with 200 once it serves."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run what a manifest's container would run.

    It runs `command` and `args` of the manifest, else those of the Dockerfile, else nothing, in as
    many pods as the manifest asks for, and is a service of the manifest's own name.
    """
    output = Output(as_json=as_json)
    found = manifests.load(manifest)
    name = reading.name(found)
    if name is None:
        raise SpecError(
            f"{manifest} has no name", hint="metadata.name says what the service is called"
        )
    image = None if dockerfile is None else Image.from_dockerfile(dockerfile)
    compute = Compute.from_manifest(manifest, pod_template_path=pod_template_path, image=image)
    path = None if pod_template_path is None else kinds.path(pod_template_path)
    command = commanding.of_manifest(found, path)
    if command is None and image is not None:
        command = commanding.line(image.dockerfile_command)
        if command is not None:
            output.note(f"Using command from Dockerfile: {command}")
    output.note(f"Applying {manifest} as '{name}'.")
    made = App(
        None,
        command or commanding.IDLE,
        (str(Path.cwd()), "manifest", name),
        name=name,
        port=port,
        health_check=health_check,
        _from_manifest=True,
    )
    try:
        # What the command writes is no result of this one.
        with contextlib.redirect_stdout(sys.stderr):
            made.to(compute, sync_dir=False)
    except KubetorchError as error:
        output.error(f"Failed to apply: {error.message}", hint=error.hint)
        raise typer.Exit(1) from error
    service = Services(made.namespace, output).find(made.service_name)
    if as_json:
        output.value(views.service_json(service))
    else:
        output.report(f"kt logs {name} -n {made.namespace} -f    shows what it writes")
        output.report(f"kt teardown {name} -n {made.namespace}    stops it")
