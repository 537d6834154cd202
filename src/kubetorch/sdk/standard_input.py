"""The standard input of this program, for an event loop: a terminal, a pipe or a file."""

from __future__ import annotations

import asyncio
import os

_PIECE = 64 * 1024


async def read() -> bytes:
    """The next bytes, as soon as there are any; none at its end, or if there is no such input."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    try:
        loop.add_reader(0, ready.set)
    except PermissionError:  # a file, which no loop can wait for: it can be read at once
        await asyncio.sleep(0)  # a long one must not keep the loop from all else
    except OSError:
        return b""
    else:
        try:
            await ready.wait()
        finally:
            loop.remove_reader(0)
    try:
        return os.read(0, _PIECE)
    except OSError:  # its terminal is gone
        return b""
