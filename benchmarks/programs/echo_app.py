"""The floor of a call: an ASGI app that answers with the body that it was sent."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]


async def app(scope: Message, receive: Any, send: Any) -> None:  # noqa: ANN401  # as ASGI has it
    """Echo one request."""
    if scope["type"] != "http":
        return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
