"""The runtime of an agent on a cluster: a folder with all that the agent needs.

    <folder>/bin         the programs that start it
    <folder>/lib         its interpreter's library, with our dependencies
    <folder>/site        this package alone, so that the user's interpreter can import it too
    <folder>/packages    our dependencies for other interpreters, by version and C library

The user's interpreter finds this package by PYTHONPATH, and our dependencies after everything that
it has itself. See `docs/design/runtime.md`.
"""

from __future__ import annotations

import os
import sys

# pathlib costs 3 ms, in every worker.
#: The folder that this package lies in.
SITE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
_FOLDER = os.path.dirname(SITE)  # noqa: PTH120


def is_used() -> bool:
    """True if this package lies in such a runtime."""
    return os.path.join(_FOLDER, "site") == SITE and os.path.exists(  # noqa: PTH110, PTH118
        os.path.join(_FOLDER, "bin", "kt-agent")  # noqa: PTH118
    )


def add_dependencies() -> None:
    """Add our dependencies that this interpreter, which is the user's, lacks."""
    if sys.prefix == _FOLDER:
        return
    for name in (tag(), "pure"):
        folder = os.path.join(_FOLDER, "packages", name)  # noqa: PTH118
        if folder not in sys.path and os.path.isdir(folder):  # noqa: PTH112
            sys.path.append(folder)


def tag() -> str:
    """The platform that compiled packages must fit, such as `cp312-gnu`."""
    return f"cp{sys.version_info[0]}{sys.version_info[1]}-{'gnu' if _has_glibc() else 'musl'}"


def _has_glibc() -> bool:
    try:
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (ValueError, OSError, AttributeError):
        return False
