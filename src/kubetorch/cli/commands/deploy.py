"""`kt deploy`: deploy functions or classes from a file or module."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
from typing import Annotated, Any

import typer

from kubetorch.cli import targets, views
from kubetorch.cli.args import AsJson, Namespace, json_object
from kubetorch.cli.output import Output
from kubetorch.cli.services import Services
from kubetorch.errors import SpecError
from kubetorch.sdk.cls import Cls, cls
from kubetorch.sdk.compute import Compute
from kubetorch.sdk.fn import Fn, fn

app = typer.Typer(rich_markup_mode=None, add_completion=False)

Handle = Fn[..., Any] | Cls[Any]


@app.command()
def run(
    wanted: Annotated[
        list[str],
        typer.Argument(metavar="TARGET", help="file.py:name or package.module:name."),
    ],
    compute: Annotated[
        str | None,
        typer.Option("-c", "--compute", help="Arguments of kt.Compute, a JSON object. Needed."),
    ] = None,
    init_args: Annotated[
        str | None,
        typer.Option("--init-args", help="Arguments of a class's constructor, a JSON object."),
    ] = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Deploy functions or classes from a file or module."""
    output = Output(as_json=as_json)
    settings = json_object(compute, "--compute")
    if namespace is not None:
        settings["namespace"] = namespace
    constructor = json_object(init_args, "--init-args") if init_args is not None else None
    # What the user's files print, here and in the pods, is no result of this command.
    with contextlib.redirect_stdout(sys.stderr):
        handles = [_handle(targets.locate(text), compute, constructor) for text in wanted]
        pools = [_compute(settings) for _ in handles]
        for handle in handles:
            output.report(f"• {handle.name}")
        deployed = asyncio.run(_deploy(handles, pools, constructor, output))
    if as_json:
        services = Services(namespace, output)
        found = [services.find(handle.service_name) for handle in deployed]
        output.value([views.service_json(service) for service in found])
    if len(deployed) < len(handles):
        raise typer.Exit(1)


def _handle(target: targets.Target, compute: str | None, constructor: object) -> Handle:
    found = targets.load(target)
    if compute is None:
        raise SpecError(
            f"{target.name} in {target.text} is not decorated with @kt.compute, "
            "so what it runs on must be given with --compute",
            hint=f"kt deploy {target.text}:{target.name} --compute '{{\"cpus\": 1}}'",
        )
    if inspect.isclass(found):
        return cls(found)
    if constructor is not None:
        raise SpecError(f"--init-args is for classes; {target.name} is a function")
    return fn(found)


def _compute(settings: dict[str, Any]) -> Compute:
    try:
        return Compute(**settings)
    except TypeError as error:
        raise SpecError(f"--compute: {error}") from error


async def _deploy(
    handles: list[Handle], pools: list[Compute], constructor: dict[str, Any] | None, output: Output
) -> list[Handle]:
    """Deploy all at the same time and say how each ended; those that succeeded."""
    deploys = []
    for handle, pool in zip(handles, pools, strict=True):
        output.report(f"Deploying {handle.name}...")
        deploys.append(handle.to_async(pool, init_args=constructor))
    ends = await asyncio.gather(*deploys, return_exceptions=True)
    deployed = []
    for handle, end in zip(handles, ends, strict=True):
        if isinstance(end, BaseException):
            output.exception(end)
        else:
            output.report(f"Successfully deployed {handle.name}.", "green")
            deployed.append(handle)
    return deployed
