"""Modules of other libraries: their files, as far as those can be understood.

`sys.modules`, specs, loaders and finders hold whatever a library put there: a `Path` where text is
usual, a class instead of a module, `None`, a `__getattr__` that raises or imports a gigabyte. An
object of an unexpected kind counts as missing here, and no attribute of a module is read.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def path_of(value: object) -> str | None:
    """A value as a path; `None` if it is no path."""
    try:
        return os.fsdecode(value)  # type: ignore[arg-type]  # whatever is no path raises
    except Exception:  # noqa: BLE001  # a class of any library
        return None


def names_of(module: object) -> Mapping[str, Any]:
    """The names of a module, past its `__getattr__`; empty for another object."""
    if not issubclass(type(module), ModuleType):
        return {}
    return vars(ModuleType)["__dict__"].__get__(module)  # type: ignore[no-any-return]


def loaded(name: str) -> Mapping[str, Any]:
    """The names of an imported module; empty if it is not imported."""
    return names_of(sys.modules.get(name))


def ipython_shell() -> Any:  # noqa: ANN401  # IPython is not among our dependencies
    """The shell of IPython that runs this program; `None` where it is another program.

    `IPython.get_ipython` may be imported only when the module is asked for it.
    """
    shells = loaded("IPython.core.interactiveshell").get("InteractiveShell")
    return shells.instance() if shells is not None and shells.initialized() else None


def file_of(module: object) -> str | None:
    """The file of a module."""
    return path_of(names_of(module).get("__file__"))


def find_spec(top: str) -> ModuleSpec | None:
    """The spec of a module that lies in no package; `None` where no finder gives one."""
    try:
        return importlib.util.find_spec(top)
    except Exception:  # noqa: BLE001  # a finder of any library, or a module without a spec
        return None


def origin_of(spec: ModuleSpec) -> str | None:
    """The file that a spec loads; `None` for modules without one."""
    return (
        path_of(_attribute_of(spec, "origin"))
        if _attribute_of(spec, "has_location") is True
        else None
    )


def folders_of(spec: ModuleSpec) -> list[str]:
    """The folders of a package; empty for a module that is no package."""
    search_locations = _attribute_of(spec, "submodule_search_locations")
    try:
        locations = (
            []
            if search_locations is None or isinstance(search_locations, str)
            else list(search_locations)
        )
    except Exception:  # noqa: BLE001  # a class of any library
        return []
    paths = (path_of(location) for location in locations)
    return [path for path in paths if path is not None]


def _attribute_of(spec: ModuleSpec, name: str) -> Any:  # noqa: ANN401  # of any library
    try:
        return getattr(spec, name, None)
    except Exception:  # noqa: BLE001  # a class of any library
        return None
