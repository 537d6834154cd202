"""A process that may have no more threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def no_new_threads() -> Iterator[None]:
    """As where there are too many already.

    A start that fails for good leaves a thread state of CPython 3.11 behind, which has the identity
    of the thread that tried; interruptions of that one would never arrive from then on.
    """

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield
