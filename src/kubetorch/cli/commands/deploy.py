"""`kt deploy`: deploy functions or classes from a file or module."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer

from kubetorch.cli import images, targets, views
from kubetorch.cli.args import AsJson, Namespace, json_object
from kubetorch.cli.output import Output
from kubetorch.cli.services import Services
from kubetorch.errors import SpecError
from kubetorch.sdk.cls import Cls, cls
from kubetorch.sdk.compute import Compute
from kubetorch.sdk.fn import Fn, fn
from kubetorch.sdk.image import Image

app = typer.Typer(rich_markup_mode=None, add_completion=False)

Handle = Fn[..., Any] | Cls[Any]


@app.command()
def run(  # noqa: PLR0913  # the documented options
    wanted: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET", help="file.py or package.module, or one :name of its functions."
        ),
    ],
    compute: Annotated[
        str | None,
        typer.Option(
            "-c",
            "--compute",
            help="Arguments of kt.Compute, a JSON object. Needed unless @kt.compute says them.",
        ),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(
            "-i",
            "--image",
            help="Image: a preset such as python:3.12, a reference, or a JSON object.",
        ),
    ] = None,
    init_args: Annotated[
        str | None,
        typer.Option("--init-args", help="Arguments of a class's constructor, a JSON object."),
    ] = None,
    distribute: Annotated[
        str | None,
        typer.Option("-d", "--distribute", help="Arguments of .distribute(), a JSON object."),
    ] = None,
    autoscale: Annotated[
        str | None,
        typer.Option("--autoscale", help="Arguments of .autoscale(), a JSON object."),
    ] = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Deploy functions or classes from a file or module."""
    output = Output(as_json=as_json)
    options = _Options(
        compute=None if compute is None else json_object(compute, "--compute"),
        image=None if image is None else images.parse(image),
        init_args=None if init_args is None else json_object(init_args, "--init-args"),
        distribute=None if distribute is None else json_object(distribute, "--distribute"),
        autoscale=None if autoscale is None else json_object(autoscale, "--autoscale"),
        namespace=namespace,
    )
    # What the user's files print, here and in the pods, is no result of this command.
    with contextlib.redirect_stdout(sys.stderr):
        found = [
            (target, one) for target in map(targets.locate, wanted) for one in targets.load(target)
        ]
        handles = [_handle(target, one, options) for target, one in found]
        for handle in handles:
            output.report(f"• {handle.name}")
        deployed = asyncio.run(_deploy(handles, options.init_args, output))
    if as_json:
        services = Services(namespace, output)
        views_ = [services.find(handle.service_name) for handle in deployed]
        output.value([views.service_json(service) for service in views_])
    if len(deployed) < len(handles):
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Options:
    """What the options of the command say; `None` for those that were not given."""

    compute: dict[str, Any] | None
    image: Image | None
    init_args: dict[str, Any] | None
    distribute: dict[str, Any] | None
    autoscale: dict[str, Any] | None
    namespace: str | None


def _handle(target: targets.Target, found: Any, options: _Options) -> Handle:  # noqa: ANN401  # the user's
    """The handle of a function or class, with what it runs on."""
    is_decorated = targets.is_decorated(found)
    if not is_decorated and options.compute is None:
        raise SpecError(
            f"{target.name} in {target.text} is not decorated with @kt.compute, "
            "so what it runs on must be given with --compute",
            hint=f"kt deploy {target.text}:{target.name} --compute '{{\"cpus\": 1}}'",
        )
    handle: Handle
    handle = found if is_decorated else cls(found) if inspect.isclass(found) else fn(found)
    if options.init_args is not None and handle.kind != "cls":
        raise SpecError(f"--init-args is for classes; {handle.callable_name} is a function")
    if options.compute is not None:
        handle.compute = _compute("--compute", partial(Compute, **options.compute))
    declared = handle.compute
    assert declared is not None
    if options.namespace is not None:
        declared.namespace = options.namespace
    if options.image is not None:
        declared.image = options.image
    if options.distribute is not None:
        _compute("--distribute", partial(declared.distribute, **options.distribute))
    if options.autoscale is not None:
        _compute("--autoscale", partial(declared.autoscale, **options.autoscale))
    return handle


def _compute(option: str, make: Callable[[], Compute]) -> Compute:
    try:
        return make()
    except TypeError as error:
        raise SpecError(f"{option}: {error}") from error


async def _deploy(
    handles: list[Handle], constructor: dict[str, Any] | None, output: Output
) -> list[Handle]:
    """Deploy all at the same time and say how each ended; those that succeeded."""
    deploys = []
    for handle in handles:
        output.report(f"Deploying {handle.name}...")
        assert handle.compute is not None
        deploys.append(handle.to_async(handle.compute, init_args=constructor))
    ends = await asyncio.gather(*deploys, return_exceptions=True)
    deployed = []
    for handle, end in zip(handles, ends, strict=True):
        if isinstance(end, BaseException):
            output.exception(end)
        else:
            output.report(f"Successfully deployed {handle.name}.", "green")
            deployed.append(handle)
    return deployed
