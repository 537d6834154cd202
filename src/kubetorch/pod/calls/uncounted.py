"""Calls that Knative does not see, and so would end the pod of.

    calls ── is there one without a request? ── Presence ══ queue-proxy ══ this agent

Knative counts requests at its queue-proxy, in the pod. A spawned call whose client has left, and a
call whose client came back past Knative after that had cut the connection, have none. As long as
there is such a call, the agent keeps one request of its own open, to itself through the
queue-proxy, so that the pod is as busy to Knative as it is.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping

from kubetorch.lib import upgrading, websocket
from kubetorch.lib.connections import Connection
from kubetorch.wire import frames, routes, versions

#: Where the queue-proxy of a pod takes requests, whatever the port of the container.
URL = "http://127.0.0.1:8012"
#: The variable by which a container of Knative knows its Revision.
REVISION = "K_REVISION"
#: Seconds between two looks while calls run: a client comes back within moments.
INTERVAL = 2.0
#: Seconds that the queue-proxy may have the request wait behind others.
PATIENCE = 60.0

_MESSAGE_LIMIT = frames.HEADER_BYTES + frames.META_LIMIT
_log = logging.getLogger(__name__)


class Presence:
    """The agent's own request.

    Args:
        has_uncounted: Whether there is a call that Knative does not see.
        token: Makes a token for calls; `None` while there is no key.
        environ: The agent's environment, which says whether this is a pod of Knative. In others
            nothing ever happens.
        url: The queue-proxy.
        interval: Seconds between two looks.
    """

    def __init__(
        self,
        has_uncounted: Callable[[], bool],
        token: Callable[[], str | None],
        environ: Mapping[str, str],
        *,
        url: str = URL,
        interval: float = INTERVAL,
    ) -> None:
        self._has_uncounted = has_uncounted
        self._token = token
        self._is_scaled = bool(environ.get(REVISION))
        self._url = url
        self._interval = interval
        self._connection: Connection | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_held(self) -> bool:
        """Whether there is a request."""
        return self._connection is not None and self._connection.is_open

    def changed(self, running: int) -> None:
        """So many calls run now."""
        if running and self._is_scaled and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        elif not running:
            self.close()

    def close(self) -> None:
        """Nothing is to be kept."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        self._let_go()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            if not self._has_uncounted():
                self._let_go()
            elif not self.is_held:
                await self._hold()

    def _let_go(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close(websocket.NORMAL, "no call needs it any more")

    async def _hold(self) -> None:
        token = self._token()
        if token is None:
            return
        headers = {
            routes.AUTHORIZATION: f"Bearer {token}",
            routes.PROTOCOL: str(versions.PROTOCOL),
            routes.CLIENT: f"presence-{os.urandom(8).hex()}",
        }
        try:
            self._connection = await upgrading.connect(
                self._url + routes.STREAM,
                _Silent(),
                headers=headers,
                max_message=_MESSAGE_LIMIT,
                timeout=PATIENCE,
            )
        except (OSError, TimeoutError, asyncio.TimeoutError) as error:
            _log.warning("pod not kept busy url=%s error=%s", self._url, error)
        except (upgrading.UpgradeRefusedError, websocket.WebSocketError) as error:
            _log.warning("pod not kept busy url=%s error=%s", self._url, error)


class _Silent:
    """The client's end of a stream without calls."""

    def on_open(self, connection: Connection) -> None:
        pass

    def on_message(self, opcode: int, payload: memoryview) -> None:
        pass

    def on_large(self, head: memoryview, length: int) -> memoryview | None:
        return None

    def on_placed(self, head: bytes, rest: memoryview) -> None:
        pass

    def on_writable(self) -> None:
        pass

    def on_close(self, reason: str) -> None:
        pass
