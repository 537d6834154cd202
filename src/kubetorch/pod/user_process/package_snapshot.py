"""Whether what a zygote imported is still what lies on the disk."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import kubetorch


class Snapshot:
    """The state of the files behind the modules that are imported now.

    For installed packages it is enough to look at the folder that they are installed in: its time
    changes with every package that comes, goes, or changes its version. Modules from elsewhere
    (editable installs, entries of `PYTHONPATH`) are compared one by one.
    """

    def __init__(self) -> None:
        site = _folders("purelib", "platlib") | {
            entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))
        }
        library = _folders("stdlib", "platstdlib") | {str(Path(kubetorch.__file__).parent)}
        self._times = {path: _time(path) for path in site}
        for module in list(sys.modules.values()):
            path = getattr(module, "__file__", None)
            if not isinstance(path, str) or _is_below(path, site) or _is_below(path, library):
                continue
            self._times[path] = _time(path)

    def has_changed(self) -> bool:
        """Whether anything is not as it was."""
        return any(_time(path) != time for path, time in self._times.items())


def _folders(*names: str) -> set[str]:
    return {sysconfig.get_path(name) for name in names}


def _is_below(path: str, folders: set[str]) -> bool:
    return any(path.startswith(folder + os.sep) for folder in folders)


def _time(path: str) -> int:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return 0
