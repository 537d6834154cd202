"""What it means for the user that a file of the home cannot be written or read."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import NoReturn

from kubetorch.errors import ControllerError, StorageFullError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def fail(path: Path, error: OSError) -> NoReturn:
    """Raise the error of our own for one of the file system's.

    Raises:
        StorageFullError: There is no room.
        ControllerError: Anything else.
    """
    if error.errno in _FULL:
        raise StorageFullError(f"no space left for {path}", hint="make room there") from error
    raise ControllerError(f"{path} cannot be used: {error.strerror}") from error
