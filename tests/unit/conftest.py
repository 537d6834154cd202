"""Unit tests see pure code: sockets, processes and sleeps raise."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest


class ImpureError(BaseException):
    """A unit test reached for the machine; no handler of the code under test may swallow that."""


@pytest.fixture(autouse=True)
def _pure() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for method in ("connect", "connect_ex", "bind", "listen"):
            patch.setattr(socket.socket, method, _forbidden(f"socket.{method}"), raising=False)
        patch.setattr(subprocess.Popen, "__init__", _forbidden("subprocess"))
        for name in ("fork", "posix_spawn", "system"):
            patch.setattr(os, name, _forbidden(f"os.{name}"))
        patch.setattr(time, "sleep", _forbidden("time.sleep"))
        patch.setattr(asyncio, "sleep", _let_others_run)
        yield


async def _let_others_run(delay: float, result: object = None) -> object:
    """`asyncio.sleep` for zero seconds; any other raises."""
    if delay:
        _forbidden("asyncio.sleep")()
    return await _asyncio_sleep(0, result)


_asyncio_sleep = asyncio.sleep


def _forbidden(what: str) -> Callable[..., NoReturn]:
    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise ImpureError(f"{what} has no place in a unit test; tests/local is for those")

    return refuse
