"""HTTP requests on a connection that stays, as light as the standard library has them."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Mapping

# 120 s: a server that is only just starting answers its first request when it is up.
DEADLINE = 120.0
JSON = {"Content-Type": "application/json"}

#: Gives the body of the answer to a path, a body and headers.
Post = Callable[[str, bytes, Mapping[str, str]], bytes]


def connect(port: int) -> Post:
    """What posts to a server of this machine; it connects with the first request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE)

    def post(path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {content[:1000]!r}")
        return content

    return post
