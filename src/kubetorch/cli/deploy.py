"""`kt deploy`: deploy functions or classes from a file or module.

A target is `file.py`, `package.module`, or one `:name` of them. The file is imported as a pod
imports it: what stands after its first `.to()` does not run, so a program that deploys itself does
not do so once more.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from kubetorch.cli import views
from kubetorch.cli.args import AsJson, Namespace, Replace, json_value
from kubetorch.cli.output import Output
from kubetorch.cli.services import Services, report_backends
from kubetorch.errors import CallableNotFoundError, SpecError, did_you_mean
from kubetorch.lib import modules
from kubetorch.pod.user_process import loader
from kubetorch.sdk import images
from kubetorch.sdk.cls import Cls, cls
from kubetorch.sdk.compute import Compute
from kubetorch.sdk.deploys.source import unwrapped
from kubetorch.sdk.fn import Fn, fn
from kubetorch.sdk.image import Image

_EXAMPLE = "for example kt deploy train.py:train --compute '{\"cpus\": 1}'"


@dataclass(frozen=True)
class Target:
    """A callable in a file, or all that are decorated."""

    text: str
    path: Path
    root: Path
    module: str
    name: str


def locate(text: str) -> Target:
    """The target that the user wrote; nothing is imported, but packages that a module lies in."""
    source, _, name = text.partition(":")
    if source.endswith(".py"):
        path = Path(source).resolve()
        root, module = _importable(path)
    else:
        root, module = Path.cwd(), source
        path = _module_file(module)
    if not path.is_file():
        raise SpecError(f"{source} not found; the working directory is {Path.cwd()}")
    return Target(source, path, root, module, name)


def _importable(path: Path) -> tuple[Path, str]:
    """The folder and dotted name to import a file by, so that its relative imports work."""
    parts = [path.stem]
    folder = path.parent
    while (folder / "__init__.py").is_file():
        parts.append(folder.name)
        folder = folder.parent
    return folder, ".".join(reversed(parts))


def _module_file(module: str) -> Path:
    sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    origin = None if spec is None else modules.origin_of(spec)
    if origin is None:
        raise SpecError(
            f"module {module!r} not found; the working directory is {Path.cwd()}", hint=_EXAMPLE
        )
    return Path(origin)


def load(target: Target) -> list[Callable[..., Any]]:
    """Load the handles of a target if they are decorated, else its function or class."""
    if not target.name:
        decorated = _decorated(_imported(target))
        if not decorated:
            raise SpecError(
                f"nothing in {target.text} is decorated with @kt.compute; name what to deploy",
                hint=_suggest(target.text, target.path),
            )
        return decorated
    member: Any = _imported(target)
    for part in target.name.split("."):
        if not hasattr(member, part):
            raise SpecError(
                f"{target.name} not found in {target.text}", hint=_suggest(target.text, target.path)
            )
        member = getattr(member, part)
    if not callable(member):
        raise SpecError(
            f"{target.name} in {target.text} is not a callable function or class; "
            f"it is a value of type {type(member).__name__}"
        )
    return [member if is_decorated(member) else unwrapped(member)]


def is_decorated(member: object) -> bool:
    """True for the handle that `@kt.compute` made of a function or class."""
    # Other objects of a module may raise when their attributes are read.
    handle = member if issubclass(type(member), (Fn, Cls)) else None
    return isinstance(handle, (Fn, Cls)) and handle.is_decorated


def _decorated(module: ModuleType) -> list[Callable[..., Any]]:
    handles = {
        id(value): value
        for value in vars(module).values()
        if is_decorated(value) and value.__wrapped__.__module__ == module.__name__
    }
    return list(handles.values())


def _imported(target: Target) -> ModuleType:
    """The module of a file, imported up to its first deploying statement below the target."""
    loader.prepare_path([str(target.root)])
    _forget_if_cut_short(target)
    source = loader.Source(
        kind="fn",  # a class is wanted itself, not an instance of it
        module=target.module,
        qualname=target.name,
        source_file=target.path.relative_to(target.root).as_posix(),
        sys_path=[str(target.root)],
        is_script=False,
        init_args={},
    )
    try:
        with contextlib.suppress(CallableNotFoundError):  # the caller reports a missing name
            loader.load(source)
    finally:
        # The local service and its pods, which this process may start, are not that file.
        os.environ.pop(loader.FILE_VARIABLE, None)
    return sys.modules[target.module]


def _forget_if_cut_short(target: Target) -> None:
    """Import a file again if an import for another target ended above this one."""
    module = sys.modules.get(target.module)
    is_same = modules.file_of(module) == str(target.path)
    if is_same and target.name and not hasattr(module, target.name.partition(".")[0]):
        del sys.modules[target.module]


def _suggest(source: str, path: Path) -> str:
    """The callables of a file that could be deployed, found without running the file."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError):
        return _EXAMPLE
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = [node.name for node in body if isinstance(node, kinds) and node.name[0] != "_"]
    if not names:
        return f"{source} defines no function or class"
    example = f"kt deploy {source}:{names[0]} --compute '{{\"cpus\": 1}}'"
    return f"{source} has {', '.join(names)}; for example {example}"


_PRESETS: dict[str, Callable[..., Image]] = {
    "debian": images.debian,
    "ubuntu": images.ubuntu,
    "python": images.python,
    "ray": images.ray,
    "pytorch": images.pytorch,
}
#: Arguments of `kt.Image`, as keys of the JSON object.
_ARGUMENTS = ("name", "image_id", "python_path", "install_cmd")
#: Steps, as keys of the JSON object, with the name of their first argument; they are added in the
#: object's order.
_STEPS = {
    "pip_install": "reqs",
    "run_bash": "command",
    "set_env_vars": "env_vars",
    "copy": "source",
    "sync_package": "package",
}
_IMAGE_EXAMPLE = (
    'for example --image python:3.12, or \'{"image_id": "a/b:1", "pip_install": ["numpy"]}\''
)


def parse_image(text: str) -> Image:
    if text.lstrip().startswith(("{", "[", '"')):
        return _from_json(text)
    name, _, version = text.partition(":")
    preset = _PRESETS.get(name)
    if preset is None:
        # A preset's mistyped name would be a reference, too.
        meant = None if "/" in text or version else did_you_mean(name, _PRESETS)
        if meant:
            raise SpecError(f"--image is {text!r}, which is not a preset", hint=meant)
        return Image(image_id=text)
    try:
        return preset(version) if version else preset()
    except TypeError as error:
        raise SpecError(
            f"--image is {text!r}: {name} {'has no versions' if version else 'needs a version'}",
            hint=f"--image {name}" if version else f"for example --image {name}:3.12",
        ) from error


def _from_json(text: str) -> Image:
    try:
        image_fields = json.loads(text)
    except ValueError as error:
        raise SpecError(
            f"--image is {text!r}, which is not JSON: {error}", hint=_IMAGE_EXAMPLE
        ) from error
    if not isinstance(image_fields, dict):
        raise SpecError(f"--image must be a JSON object, not {text}", hint=_IMAGE_EXAMPLE)
    for key in image_fields:
        if key not in (*_ARGUMENTS, *_STEPS):
            raise SpecError(
                f"--image has {key!r}; the keys are {', '.join((*_ARGUMENTS, *_STEPS))}",
                hint=_IMAGE_EXAMPLE,
            )
    image = Image(**{key: value for key, value in image_fields.items() if key in _ARGUMENTS})
    for key, value in image_fields.items():
        if key in _STEPS:
            for arguments in _calls(key, value):
                try:
                    getattr(image, key)(**arguments)
                except TypeError as error:
                    raise SpecError(f"--image: {key}: {error}") from error
    return image


def _calls(step: str, value: Any) -> list[dict[str, Any]]:  # noqa: ANN401  # any JSON
    """The arguments of each call: one for each copy and package, one for the whole otherwise."""
    if step in ("copy", "sync_package"):
        items = value if isinstance(value, list) else [value]
        return [item if isinstance(item, dict) else {_STEPS[step]: item} for item in items]
    return [{_STEPS[step]: value}]


app = typer.Typer(rich_markup_mode=None, add_completion=False)

Handle = Fn[..., Any] | Cls[Any]


@app.command("deploy")
def deploy(  # noqa: PLR0913  # the documented options
    target_texts: Annotated[
        list[str],
        typer.Argument(metavar="TARGET", help="file.py, package.module, or file.py:function."),
    ],
    compute: Annotated[
        str | None,
        typer.Option(
            "-c",
            "--compute",
            help="Arguments of kt.Compute, a JSON object. Needed without @kt.compute.",
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
        str | None, typer.Option("--autoscale", help="Arguments of .autoscale(), a JSON object.")
    ] = None,
    replace: Replace = False,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Deploy functions or classes from a file or module."""
    output = Output(as_json=as_json)
    options = _Options(
        compute=_object(compute, "--compute"),
        image=None if image is None else parse_image(image),
        init_args=_object(init_args, "--init-args"),
        distribute=_object(distribute, "--distribute"),
        autoscale=_object(autoscale, "--autoscale"),
        namespace=namespace,
    )
    # The output of the user's files, here and in the pods, is no result of this command.
    with contextlib.redirect_stdout(sys.stderr):
        handles = _handles(target_texts, options)
        computes = [handle.compute for handle in handles if handle.compute is not None]
        report_backends(computes, output)
        for handle in handles:
            output.report(f"• {handle.name}")
        deployed = asyncio.run(_deploy(handles, options.init_args, output, replace=replace))
    if as_json:
        services = Services(namespace, output)
        service_views = [services.find(handle.service_name) for handle in deployed]
        output.value([views.service_json(view) for view in service_views])
    if len(deployed) < len(handles):
        raise typer.Exit(1)


def _handles(target_texts: list[str], options: _Options) -> list[Handle]:
    return [
        _handle(target, definition, options)
        for target in map(locate, target_texts)
        for definition in load(target)
    ]


def _object(text: str | None, option: str) -> dict[str, Any] | None:
    return None if text is None else json_value(text, option, dict)


@dataclass(frozen=True)
class _Options:
    compute: dict[str, Any] | None
    image: Image | None
    init_args: dict[str, Any] | None
    distribute: dict[str, Any] | None
    autoscale: dict[str, Any] | None
    namespace: str | None


def _handle(target: Target, definition: Any, options: _Options) -> Handle:  # noqa: ANN401  # the user's
    has_compute = is_decorated(definition)
    if not has_compute and options.compute is None:
        raise SpecError(
            f"{target.name} in {target.text} is not decorated with @kt.compute, "
            "so --compute must declare its pods",
            hint=f"kt deploy {target.text}:{target.name} --compute '{{\"cpus\": 1}}'",
        )
    handle: Handle
    handle = (
        definition
        if has_compute
        else cls(definition)
        if inspect.isclass(definition)
        else fn(definition)
    )
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
    handles: list[Handle], constructor: dict[str, Any] | None, output: Output, *, replace: bool
) -> list[Handle]:
    """Deploy all at the same time and report the end of each; returns the deployed handles."""
    deploys = []
    for handle in handles:
        output.report(f"Deploying {handle.name}...")
        assert handle.compute is not None
        deploys.append(handle.to_async(handle.compute, init_args=constructor, replace=replace))
    ends = await asyncio.gather(*deploys, return_exceptions=True)
    deployed = []
    for handle, end in zip(handles, ends, strict=True):
        if isinstance(end, BaseException):
            output.exception(end)
        else:
            output.report(f"Successfully deployed {handle.name}.", "green")
            deployed.append(handle)
    return deployed
