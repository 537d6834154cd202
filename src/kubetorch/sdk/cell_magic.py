"""`%%kt`: a magic of IPython that runs a cell in a pod, and brings its names back."""

from __future__ import annotations

import argparse
import ast
import shlex
import sys
from typing import Any, NoReturn

from kubetorch.errors import SpecError
from kubetorch.sdk import parameters, tracebacks
from kubetorch.sdk.cell import run_cell
from kubetorch.sdk.compute import Compute
from kubetorch.sdk.deploys import notebook, source
from kubetorch.sdk.deploys.source import Placement, ProjectRef, Source
from kubetorch.sdk.fn import Fn
from kubetorch.sdk.image import Image

_EXAMPLE = "%%kt --cpus 4 --memory 8Gi"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SpecError(f"%%kt: {message}", hint=f"for example {_EXAMPLE}")


class _CellSource(Source):
    """The code that runs cells, which pods have, and the project around the notebook."""

    def __init__(self) -> None:
        super().__init__("fn", run_cell, Placement(sync_dir=False))

    def with_placement(self, changes: Placement) -> Source:
        del changes  # `.to()` has none
        return self

    def locate(self) -> ProjectRef:
        cwd = source.working_directory()
        folder = source.find_project(cwd)
        if folder is None:
            return super().locate()
        root = cwd.relative_to(folder).as_posix()
        name, root = folder.name or "project", "" if root == "." else root
        return ProjectRef(run_cell.__module__, folder=folder, name=name, root=root)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="%%kt", allow_abbrev=False, description="Run this cell in a pod.", add_help=False
    )
    parser.add_argument("--help", "-h", action="store_true", help="Show these options.")
    parser.add_argument("--cpus")
    parser.add_argument("--memory", "-m")
    parser.add_argument("--gpus")
    parser.add_argument("--image", "-i", help="Container image, or the name of a kt.Image here.")
    parser.add_argument("--namespace", "-n")
    parser.add_argument("--name", default="kt-cell", help="Name of the service.")
    parser.add_argument("--compute", help="Name of a kt.Compute of this notebook.")
    return parser


def register(shell: Any) -> None:  # noqa: ANN401  # IPython's
    """Add `%%kt` to a shell of IPython."""

    def kt(line: str, cell: str | None = None) -> Any:  # noqa: ANN401  # the user's own value
        return _run(shell, line, cell)

    kt.__doc__ = f"Run this cell in a pod, and bring its names back.\n\n{_parser().format_help()}"
    shell.register_magic_function(kt, "line_cell", "kt")
    shell.input_transformers_cleanup.insert(0, _without_body)
    tracebacks.install()


def _without_body(lines: list[str]) -> list[str]:
    """`%%kt --help` as a line magic: IPython refuses a cell magic without a cell below it."""
    words = lines[0].split() if lines else []
    return ["%kt --help\n"] if words[:1] == ["%%kt"] and {"--help", "-h"} & {*words} else lines


def _run(shell: Any, line: str, cell: str | None) -> Any:  # noqa: ANN401  # IPython's, and the user's own
    options = _parser().parse_args(shlex.split(line))
    if options.help:
        sys.stdout.write(_parser().format_help())
        return None
    if cell is None:
        raise SpecError("%kt needs two %: it runs a cell", hint=f"for example {_EXAMPLE}")
    text = shell.transform_cell(cell)
    _check(ast.parse(text, "<cell>"), cell)  # shown here, before pods are started
    names = notebook.CellNames(text)
    remote = Fn[..., Any](options.name)
    remote._source = _CellSource()
    remote._is_named = True
    remote = remote.to(_compute(shell, options), stream_logs=False)
    end = remote(text, names.render(), names.values, stream_logs=True)
    shell.user_ns.update(end["values"])
    if end["obstacles"]:
        listed = "; ".join(f"{name} ({reason})" for name, reason in end["obstacles"].items())
        parameters.warn(f"what stays in the pod: {listed}")
    if end["shown"] is not None:
        sys.stdout.write(f"{end['shown']}\n")
    return end["result"]


def _check(tree: ast.Module, cell: str) -> None:
    """Refuse lines that only IPython can run."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "get_ipython" and node.id not in cell:
            line = cell.splitlines()[node.lineno - 1]
            raise SpecError(
                f"magics and shell commands do not run in a pod: {line}",
                hint="put them into a cell without %%kt; in a pod, subprocess.run() runs a command",
            )


def _compute(shell: Any, options: argparse.Namespace) -> Compute:  # noqa: ANN401  # IPython's
    chosen = {name: getattr(options, name) for name in ("cpus", "memory", "gpus", "namespace")}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    if options.compute is not None:
        compute = shell.user_ns.get(options.compute)
        if chosen or options.image or not isinstance(compute, Compute):
            raise SpecError(
                f"--compute {options.compute} must be the name of a kt.Compute of this notebook, "
                "without other options of pods",
                hint="compute = kt.Compute(cpus=4); then %%kt --compute compute",
            )
        return compute
    if options.image is not None:
        image = shell.user_ns.get(options.image)
        chosen["image"] = image if isinstance(image, Image) else Image(options.image)
    return Compute(**chosen)
