"""`kt run` and `kt apply`: commands that run in pods as apps."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from kubetorch.cli import views
from kubetorch.cli.args import AsJson, AsRaw, Replace
from kubetorch.cli.output import Output
from kubetorch.cli.services import Services, report_backends
from kubetorch.config.environment import RunRequest
from kubetorch.errors import KubetorchError, SpecError
from kubetorch.manifests import agent_container, kinds, parameters
from kubetorch.sdk import compute_manifest
from kubetorch.sdk.app import App, AppFoundError, python_file
from kubetorch.sdk.compute import Compute
from kubetorch.sdk.image import Image

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_EXAMPLE = "for example kt run python train.py --epochs 5"


class _Run(TyperCommand):
    """Warns of options behind the command that `kt run` takes for its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401  # typer's own
        written = list(itertools.takewhile(lambda word: word != "--", args))
        rest = super().parse_args(ctx, args)
        words = ctx.params["words"] or [""]
        behind = written[written.index(words[0]) :] if words[0] in written else []
        option_names = {name for parameter in self.params for name in parameter.opts}
        taken_options = [
            word for word in behind if word.partition("=")[0] in option_names and word not in words
        ]
        if taken_options:
            names = " and ".join(taken_options)
            before = " ".join(f"{name} …" for name in taken_options)
            Output().warn(
                f"kt run takes {names} for itself, which belongs before the command: kt run "
                f"{before} {words[0]} …; what follows -- is the command's: "
                f"kt run -- {shlex.join(behind)}"
            )
        return rest


@app.command("run", cls=_Run, context_settings={"ignore_unknown_options": True})
def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND...", help="The command, with all its own options."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the service; that of the file by default.")
    ] = None,
    run_async: Annotated[
        bool,
        typer.Option("--detach", "--async", help="Return when it runs; kt logs shows its lines."),
    ] = False,
    file: Annotated[
        str | None,
        typer.Option("--file", help="File with the kt.app; the command's Python file by default."),
    ] = None,
    replace: Replace = False,
    as_json: AsJson = False,
    as_raw: AsRaw = False,
) -> None:
    """Run a command in pods, as the kt.app of its file says.

    The lines that it writes are shown until it ends, and its exit code is that of this command.
    What follows -- belongs to the command, whatever it looks like.
    """
    output = Output(as_json=as_json, is_raw=as_raw)
    request = _request(words or [], name, file, run_async)
    declared_app = _load(request)
    assert declared_app.compute is not None
    report_backends([declared_app.compute], output)
    output.note(f"Running {request.command!r} as {declared_app.service_name}...")
    with _interruptible():
        try:
            with contextlib.redirect_stdout(sys.stderr):
                # `follow` shows the lines of the app from the first one on.
                declared_app.stream_logs = False
                declared_app.deploy(replace=replace)
            code = 0 if run_async else declared_app.follow(output.text)
        except KeyboardInterrupt:
            _hint(declared_app, output)
            raise typer.Exit(0) from None
    if as_json:
        services = Services(declared_app.namespace, output)
        output.value(views.service_json(services.find(declared_app.service_name)))
    elif run_async:
        _hint(declared_app, output)
    else:
        output.note(
            f"{declared_app.service_name} ended with exit code {code}", "red" if code else "green"
        )
    raise typer.Exit(code)


def _request(words: list[str], name: str | None, file: str | None, run_async: bool) -> RunRequest:
    if not words:
        raise typer.BadParameter(f"the command is missing; {_EXAMPLE}")
    if words[0].endswith(".py"):
        raise typer.BadParameter(
            f"{words[0]} is a file, not a command: kt run python {shlex.join(words)}"
        )
    if words[0].startswith("-"):
        raise typer.BadParameter(
            f"kt run has no option {words[0]}; those of the command follow the command, {_EXAMPLE}"
        )
    command = words[0] if len(words) == 1 else shlex.join(words)
    path = file or python_file(" ".join(words))
    if path is None:
        raise SpecError(
            f"no Python file was detected in {command!r}", hint="--file names the one with kt.app"
        )
    if not Path(path).is_file():
        raise SpecError(f"{path} not found; the working directory is {Path.cwd()}")
    absolute = os.path.abspath(path)  # noqa: PTH100  # links stay as they are
    return RunRequest(command, absolute, name, run_async)


def _load(request: RunRequest) -> App:
    """The app that a file declares: it is run up to there."""
    path = Path(request.file)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    sys.modules[path.stem] = module
    variables = request.to_environment()
    os.environ.update(variables)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except AppFoundError as declaration:
        return declaration.app
    finally:
        # The variables must not reach pods and other processes that this process starts.
        for variable in variables:
            os.environ.pop(variable, None)
    for value in vars(module).values():
        if isinstance(value, App):
            return value
    raise SpecError(
        f"no kt.app was found in {request.file}",
        hint="kt.app(cpus=1) at the top of the file declares its pods",
    )


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends the waiting as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _hint(running_app: App, output: Output) -> None:
    namespace = f" -n {running_app.namespace}"
    output.report(f"kt logs {running_app.service_name}{namespace} -f    shows what it writes")
    output.report(f"kt teardown {running_app.service_name}{namespace}    stops it")


@app.command("apply")
def apply(  # the documented options
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
            "-t", "--pod-template-path", help="Path of the pod template in an unknown kind."
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option("-p", "--port", help="Port that the command listens on.")
    ] = None,
    health_check: Annotated[
        str | None,
        typer.Option("--health-check", help="Path that answers with 200 when it serves."),
    ] = None,
    replace: Replace = False,
    as_json: AsJson = False,
) -> None:
    """Run the command of a manifest's container.

    It runs `command` and `args` of the manifest, else those of the Dockerfile, in as
    many pods as the manifest asks for, and is a service of the manifest's own name.
    """
    output = Output(as_json=as_json)
    document = compute_manifest.load(manifest)
    name = parameters.name_of(document)
    if name is None:
        raise SpecError(f"{manifest} has no name", hint="metadata.name is the name of the service")
    image = None if dockerfile is None else Image.from_dockerfile(dockerfile)
    compute = Compute.from_manifest(manifest, pod_template_path=pod_template_path, image=image)
    path = None if pod_template_path is None else kinds.path(pod_template_path)
    command = agent_container.command_of(document, path)
    if command is None and image is not None:
        command = agent_container.command_line(image.dockerfile_command)
        if command is not None:
            output.note(f"Using command from Dockerfile: {command}")
    report_backends([compute], output)
    output.note(f"Applying {manifest} as '{name}'.")
    manifest_app = App(
        None,
        command or agent_container.IDLE,
        (str(Path(manifest).absolute().parent), "manifest", name),
        name=name,
        port=port,
        health_check=health_check,
        _from_manifest=True,
    )
    try:
        # The output of the command is no result of `kt apply`.
        with contextlib.redirect_stdout(sys.stderr):
            manifest_app.to(compute, sync_dir=False, replace=replace)
    except KubetorchError as error:
        output.error(f"Failed to apply: {error.message}", hint=error.hint)
        raise typer.Exit(1) from error
    service = Services(manifest_app.namespace, output).find(manifest_app.service_name)
    if as_json:
        output.value(views.service_json(service))
    else:
        _hint(manifest_app, output)
