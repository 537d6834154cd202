"""What `kt deploy` is told to deploy: `file.py:name` or `package.module:name`.

The file is imported as a pod imports it: what stands in it after its first `.to()` does not run, so
a program that deploys itself does not do so once more.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubetorch.errors import CallableNotFoundError, SpecError
from kubetorch.pod.worker import importing, loader

_EXAMPLE = "for example kt deploy train.py:train --compute '{\"cpus\": 1}'"


@dataclass(frozen=True)
class Target:
    """A callable in a file.

    Attributes:
        text: What the user wrote in front of the colon.
        path: The file.
        root: Folder that is to be on `sys.path`.
        module: Dotted name to import the file by.
        name: A function, a class, or a nested name such as `Trainer.Options`.
    """

    text: str
    path: Path
    root: Path
    module: str
    name: str


def locate(text: str) -> Target:
    """The target that the user wrote; nothing is imported, but packages that a module lies in.

    Raises:
        SpecError: There is no such file or module, or no name was given.
    """
    source, _, name = text.partition(":")
    if source.endswith(".py"):
        path = Path(source).resolve()
        root, module = _importable(path)
    else:
        root, module = Path.cwd(), source
        path = _module_file(module)
    if not path.is_file():
        raise SpecError(f"{source} not found; the working directory is {Path.cwd()}")
    if not name:
        raise SpecError(
            f"nothing in {source} is decorated with @kt.compute; name what to deploy",
            hint=_suggest(source, path),
        )
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
    if spec is None or spec.origin is None:
        raise SpecError(
            f"module {module!r} not found; the working directory is {Path.cwd()}", hint=_EXAMPLE
        )
    return Path(spec.origin)


def load(target: Target) -> Callable[..., Any]:
    """The function or class that a target names.

    Raises:
        SpecError: There is none of that name, or it cannot be called.
        Exception: Whatever the user's file raises.
    """
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
        found = loader.load(source)
    except CallableNotFoundError as error:
        raise SpecError(
            f"{target.name} not found in {target.text}", hint=_suggest(target.text, target.path)
        ) from error
    finally:
        # The local service and its pods, which this process may start, are not that file.
        os.environ.pop(importing.FILE_VARIABLE, None)
    if not callable(found):
        raise SpecError(
            f"{target.name} in {target.text} is not a callable function or class; "
            f"it is a value of type {type(found).__name__}"
        )
    return found  # type: ignore[no-any-return]  # checked to be callable


def _forget_if_cut_short(target: Target) -> None:
    """Have a file imported again whose import for another target ended above this one."""
    module = sys.modules.get(target.module)
    is_same = getattr(module, "__file__", None) == str(target.path)
    if is_same and not hasattr(module, target.name.partition(".")[0]):
        del sys.modules[target.module]


def _suggest(source: str, path: Path) -> str:
    """What could be deployed from a file, read without running it."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError):
        return _EXAMPLE
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = [node.name for node in body if isinstance(node, kinds) and node.name[0] != "_"]
    if not names:
        return f"{source} defines no function or class"
    return f"it has {', '.join(names)}: kt deploy {source}:{names[0]} --compute '{{\"cpus\": 1}}'"
