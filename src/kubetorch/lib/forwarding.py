"""A listener whose requests go to a server elsewhere: both HTTP and WebSockets, as they come.

Nothing is added to a request: who may ask is for the other server to say. So the listener lends
nobody the rights of the process that it belongs to.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

from kubetorch.lib import proxying, serving, tunnels
from kubetorch.lib.cycles import Message
from kubetorch.lib.proxying import Header, Target

#: Seconds that open requests have once the listener is closed.
GOODBYE = 0.5

#: The server that a path leads to; asked anew (`True`) when the one before could not be reached.
Finder = Callable[[bytes, bool], Awaitable[Target]]


class NoTargetError(Exception):
    """There is no server to forward to; the message says why."""


class Forwarder:
    """Forwards what comes.

    Args:
        find: Knows where it goes.
        headers: What requests get to tell the way.
    """

    def __init__(self, find: Finder, headers: list[Header]) -> None:
        self._find = find
        self._headers = headers
        tunnelled = serving.Tunnels(lambda _path: True, self._open)
        self.server = serving.Server(self._answer, tunnels=tunnelled)

    async def _answer(self, scope: Message, receive: proxying.Receive, send: proxying.Send) -> None:
        has_begun = False

        async def send_on(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        headers = [*scope["headers"], *self._headers]
        try:
            try:
                target = await self._find(scope["raw_path"], False)
                await proxying.relay(scope, headers, receive, send_on, target)
            except ConnectionRefusedError:  # nothing of the request was sent
                target = await self._find(scope["raw_path"], True)
                await proxying.relay(scope, headers, receive, send_on, target)
        except (OSError, TimeoutError, asyncio.TimeoutError, NoTargetError) as error:
            if not has_begun:
                await _refuse(send, error)

    async def _open(
        self, upgrade: tunnels.Upgrade
    ) -> tuple[Target, list[Header], Callable[[], None]]:
        try:
            target = await self._find(upgrade.path, True)
        except NoTargetError as error:
            raise tunnels.Refused(503, _body(error)) from error
        return target, [*upgrade.headers, *self._headers], lambda: None


async def _refuse(send: proxying.Send, error: Exception) -> None:
    status = 503 if isinstance(error, NoTargetError) else 502
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": _body(error)})


def _body(error: Exception) -> bytes:
    message = str(error) or type(error).__name__
    return json.dumps({"error_type": type(error).__name__, "message": message}).encode()
