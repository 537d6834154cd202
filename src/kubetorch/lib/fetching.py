"""A request to an `http://` URL on a connection of its own, whose answer is read as it comes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from urllib.parse import urlsplit

from kubetorch.lib.dialing import Route
from kubetorch.lib.httppool import Answer, HttpPool, Request


@contextlib.asynccontextmanager
async def fetch(
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes = b"",
    *,
    connect_timeout: float,
    timeout: float | None,
) -> AsyncGenerator[Answer, None]:
    """The answer, from when its head has come.

    Args:
        method: Of the request.
        url: What it asks for.
        headers: Of the request.
        body: Of the request.
        connect_timeout: Seconds that the connection may take.
        timeout: As for `HttpPool.send`.

    Raises:
        dialing.UnreachableError: There is no connection, so nothing was sent.
        BrokenError, SilentError: There is no answer.
    """
    parts = urlsplit(url)
    target = f"{parts.path}?{parts.query}" if parts.query else parts.path
    request = Request(method, target, tuple(headers.items()), body or None)
    pool = HttpPool(connect_timeout=connect_timeout)
    try:
        yield await pool.send(
            Route(parts.hostname or "", parts.port or 80), request, timeout=timeout
        )
    finally:
        await pool.close()
