"""Sockets of another user, which root can make in its own process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

STRANGER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="root alone can be another user")


@contextlib.contextmanager
def another_user() -> Iterator[None]:
    """What is made here is of another user."""
    os.seteuid(STRANGER)
    try:
        yield
    finally:
        os.seteuid(0)
