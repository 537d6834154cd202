"""Warnings that point at the user's line, however deep in this package they come from."""

from __future__ import annotations

import sys
import warnings

_PACKAGE = __name__.partition(".")[0]


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn about what the user's own statement says."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_ours(str(frame.f_globals.get("__name__"))):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module == _PACKAGE or module.startswith(f"{_PACKAGE}.")
