"""Differences in a pod, where user modules are imported that may deploy and call themselves.

The file that was deployed often is the program that deployed it, with `.to()` and calls at module
level. While a worker imports it, such statements do nothing or end the import (see
`docs/design/deploy.md`).
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from importlib import import_module
from typing import Any

from kubetorch.config import environment
from kubetorch.lib import modules
from kubetorch.wire import introspection

#: A worker has imported this module; other programs are spared the import.
_IMPORTING = "kubetorch.pod.user_process.loader"
#: Its `is_worker` is true in a worker alone, unlike the loader, which `kt deploy` uses, too.
_RUNNING = "kubetorch.pod.user_process.current_call"


def is_worker() -> bool:
    """True if this process runs user code of a pod, or was started by such code."""
    return environment.deployed_file() is not None


def runs_calls() -> bool:
    """True if this process is a worker itself, and no child of one."""
    running = sys.modules.get(_RUNNING)
    return running is not None and bool(running.is_worker)


def is_deploying(*, is_call: bool = False) -> bool:
    """True if the asking statement, which deploys or calls, must have no effect.

    Where it ends the import of the deployed file, this does not return.
    """
    importing = sys.modules.get(_IMPORTING)
    if importing is None:
        if environment.deployed_file() is None:
            return False
        # A process that user code started imports the deployed file again.
        importing = import_module(_IMPORTING)
    return bool(importing.is_deploying(is_call=is_call))


def runs_deployed_file() -> bool:
    """True if a process that user code started runs the file that was deployed."""
    if environment.deployed_file() is None:
        return False
    return bool(import_module(_IMPORTING).is_imported_again())


def is_importing() -> bool:
    """True if this process is importing the deployed file, in a worker."""
    importing = sys.modules.get(_IMPORTING)
    return importing is not None and bool(importing.is_under_way())


def is_deployed(definition: object) -> bool:
    """True if this pod serves this very function or class: its name must not become a handle."""
    deployed = environment.deployed_file()
    if deployed is None or environment.deployed_apps():
        return False
    importing = sys.modules.get(_IMPORTING)
    if importing is not None:
        return runs_calls() and bool(importing.is_being_imported(definition))
    # A process that user code started imports the deployed file again.
    name = introspection.attribute(definition, "__module__")
    return type(name) is str and modules.file_of(sys.modules.get(name)) == deployed


class Inert:
    """Stands for a call in a module that the deployed file imports: nothing happens."""

    def options(self, **_changes: Any) -> Inert:  # noqa: ANN401  # as the real one has it
        """The same."""
        return self

    def __call__(self, /, *_args: Any, **_kwargs: Any) -> None:  # noqa: ANN401  # as above
        """No call."""

    def map(self, *_args: Any, **_kwargs: Any) -> Iterator[Any]:  # noqa: ANN401  # as above
        """No calls."""
        return iter(())

    def map_async(self, *_args: Any, **_kwargs: Any) -> AsyncIterator[Any]:  # noqa: ANN401
        """No calls."""
        return _nothing()

    starmap = map
    starmap_async = map_async
    spawn = __call__


async def _nothing() -> AsyncIterator[Any]:
    values: tuple[Any, ...] = ()
    for value in values:
        yield value
