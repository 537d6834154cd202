"""What `kt deploy` is told to deploy: `file.py`, `package.module`, or one `:name` of them.

The file is imported as a pod imports it: what stands in it after its first `.to()` does not run, so
a program that deploys itself does not do so once more.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from kubetorch.errors import CallableNotFoundError, SpecError
from kubetorch.pod.worker import importing, loader
from kubetorch.sdk.cls import Cls
from kubetorch.sdk.deploys.source import unwrapped
from kubetorch.sdk.fn import Fn

_EXAMPLE = "for example kt deploy train.py:train --compute '{\"cpus\": 1}'"


@dataclass(frozen=True)
class Target:
    """A callable in a file, or all that are decorated.

    Attributes:
        text: What the user wrote in front of the colon.
        path: The file.
        root: Folder that is to be on `sys.path`.
        module: Dotted name to import the file by.
        name: A function, a class, or a nested name such as `Trainer.Options`; empty for all.
    """

    text: str
    path: Path
    root: Path
    module: str
    name: str


def locate(text: str) -> Target:
    """The target that the user wrote; nothing is imported, but packages that a module lies in.

    Raises:
        SpecError: There is no such file or module.
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


def load(target: Target) -> list[Callable[..., Any]]:
    """What a target names: handles, where they are decorated, else the function or class.

    Raises:
        SpecError: There is none, or it cannot be called.
        Exception: Whatever the user's file raises.
    """
    if not target.name:
        decorated = _decorated(_imported(target))
        if not decorated:
            raise SpecError(
                f"nothing in {target.text} is decorated with @kt.compute; name what to deploy",
                hint=_suggest(target.text, target.path),
            )
        return decorated
    found: Any = _imported(target)
    for part in target.name.split("."):
        if not hasattr(found, part):
            raise SpecError(
                f"{target.name} not found in {target.text}",
                hint=_suggest(target.text, target.path),
            )
        found = getattr(found, part)
    if not callable(found):
        raise SpecError(
            f"{target.name} in {target.text} is not a callable function or class; "
            f"it is a value of type {type(found).__name__}"
        )
    return [found if is_decorated(found) else unwrapped(found)]


def is_decorated(found: object) -> bool:
    """Whether this is the handle that `@kt.compute` made of a function or class."""
    return isinstance(found, (Fn, Cls)) and found.is_decorated


def _decorated(module: ModuleType) -> list[Callable[..., Any]]:
    """The decorated functions and classes of a file, in its order."""
    own = {
        id(value): value
        for value in vars(module).values()
        if is_decorated(value) and value.__wrapped__.__module__ == module.__name__
    }
    return list(own.values())


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
        with contextlib.suppress(CallableNotFoundError):  # whoever looks for it says so
            loader.load(source)
    finally:
        # The local service and its pods, which this process may start, are not that file.
        os.environ.pop(importing.FILE_VARIABLE, None)
    return sys.modules[target.module]


def _forget_if_cut_short(target: Target) -> None:
    """Have a file imported again whose import for another target ended above this one."""
    module = sys.modules.get(target.module)
    is_same = getattr(module, "__file__", None) == str(target.path)
    if is_same and target.name and not hasattr(module, target.name.partition(".")[0]):
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
