"""The interpreter that this program runs in, as the pods of the local backend use it too.

Pods of a cluster have their own, so nothing of this machine is part of what is deployed there: the
same code from two machines is one generation.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from kubetorch.config.settings import config
from kubetorch.specs.workload import RuntimeSpec


def describe(project: Path | None, preload: Iterable[str], *, is_local: bool) -> RuntimeSpec:
    """What of this process the pods need.

    Args:
        project: Folder that is synced; what lies in it is not the interpreter's.
        preload: Third-party modules that the project imports.
        is_local: Whether the pods run on this machine.
    """
    if not is_local:
        return RuntimeSpec(preload=tuple(preload))
    own = [os.path.dirname(os.__file__), *site.getsitepackages(), site.getusersitepackages()]  # noqa: PTH120
    return RuntimeSpec(
        python=sys.executable or None,
        version=".".join(map(str, sys.version_info[:3])),
        # The first is the folder of the program.
        path=foreign_entries(sys.path[1:], own if project is None else [*own, str(project)]),
        preload=tuple(preload),
        site=_site(),
        package_managers=config.package_managers,
    )


def _site() -> tuple[str, ...]:
    """The folders that packages of this interpreter are installed in."""
    own = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return tuple(path for path in (*own, *site.getsitepackages()) if os.path.isdir(path))  # noqa: PTH112


def entries_below(entries: Sequence[str], folder: Path) -> tuple[str, ...]:
    """The folders among `entries` that lie below `folder`, relative to it.

    Those of a virtual environment in the folder are the interpreter's.
    """
    above = f"{os.path.realpath(folder)}{os.sep}"
    real = dict.fromkeys(os.path.realpath(entry) for entry in entries if entry)
    below = [path for path in real if path.startswith(above) and os.path.isdir(path)]  # noqa: PTH112
    own = {os.path.realpath(path) for path in site.getsitepackages()}
    return tuple(path[len(above) :] for path in below if path not in own)


def foreign_entries(entries: Sequence[str], own: Iterable[str]) -> tuple[str, ...]:
    """The folders and archives among `entries` that lie in none of the folders `own`."""
    known = [os.path.realpath(folder) for folder in own]
    existing = (os.path.realpath(entry) for entry in entries if entry and os.path.exists(entry))  # noqa: PTH110
    return tuple(
        path
        for path in dict.fromkeys(existing)
        if not any(path == folder or path.startswith(folder + os.sep) for folder in known)
    )
