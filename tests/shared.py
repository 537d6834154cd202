"""What the workers of one run of pytest share: a folder, and in it turns and things made once."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: The folder, once pytest is configured.
FOLDER = Path()
#: Attacks and loops run whole, for many minutes. Tests themselves do not see this variable.
WHOLE = os.environ.get("KT_TEST_WHOLE") == "1"


@contextlib.contextmanager
def turn(name: str) -> Iterator[None]:
    """One worker at a time."""
    with (FOLDER / f"{name}.turn").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def made_once(name: str, make: Callable[[], Any], remove: Callable[[Any], None]) -> Iterator[Any]:
    """What the first worker made that needs it; the last one removes it.

    Args:
        name: Of what is made.
        make: Makes it; what it returns goes through JSON.
        remove: Is given that.
    """
    note = FOLDER / f"{name}.made"
    with (FOLDER / f"{name}.used").open("w") as used:
        with turn(name):
            if not note.exists():
                note.write_text(json.dumps(make()))
            fcntl.flock(used, fcntl.LOCK_SH)
        yield json.loads(note.read_text())
        with turn(name):
            try:
                fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            remove(json.loads(note.read_text()))
            note.unlink()
