"""Keeps a pod of Knative alive for calls that Knative does not see.

    calls ── is there one without a request? ── KnativeKeepAlive ══ queue-proxy ══ this agent

Knative counts requests at its queue-proxy, in the pod. Two kinds of calls have no such request: a
spawned call whose client has left, and a call whose client reconnected past Knative after Knative
had cut the connection. As long as there is such a call, the agent keeps one request to itself open
through the queue-proxy, so that Knative counts the pod as busy.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping

import msgspec

from kubetorch.lib import websocket, websocket_protocol
from kubetorch.lib.websocket import Connection, Endpoint
from kubetorch.pod.tuning import TIMING
from kubetorch.wire import frames, routes, versions
from kubetorch.wire import tuning as wire_tuning

#: Where the queue-proxy of a pod takes requests, whatever the port of the container.
URL = "http://127.0.0.1:8012"
#: The variable by which a container of Knative knows its Revision.
REVISION = "K_REVISION"

_MESSAGE_LIMIT = frames.HEADER_BYTES + wire_tuning.LIMITS.meta_bytes
_log = logging.getLogger(__name__)


class KnativeKeepAlive(msgspec.Struct, eq=False, dict=True):
    has_unseen_call: Callable[[], bool]
    token: Callable[[], str | None]
    environ: Mapping[str, str]
    url: str = URL
    interval: float = TIMING.knative_check_interval_seconds

    def __post_init__(self) -> None:
        self._connection: Connection | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_on_knative(self) -> bool:
        return bool(self.environ.get(REVISION))

    @property
    def is_open(self) -> bool:
        return self._connection is not None and self._connection.is_open

    def start(self) -> None:
        """Check for such calls from now on, in a pod of Knative."""
        if self.is_on_knative:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        self._close_request()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.interval)
            if not self.has_unseen_call():
                self._close_request()
            elif not self.is_open:
                await self._open_request()

    def _close_request(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close(websocket_protocol.NORMAL, "no call needs it any more")

    async def _open_request(self) -> None:
        token = self.token()
        if token is None:
            return
        headers = {
            routes.AUTHORIZATION: f"Bearer {token}",
            routes.PROTOCOL: str(versions.PROTOCOL),
            routes.CLIENT: f"keepalive-{os.urandom(8).hex()}",
        }
        try:
            self._connection = await websocket.connect(
                self.url + routes.STREAM,
                Endpoint(),
                headers=headers,
                max_message=_MESSAGE_LIMIT,
                timeout=TIMING.knative_queue_seconds,
            )
        except (
            OSError,
            TimeoutError,
            asyncio.TimeoutError,
            websocket_protocol.UpgradeRefusedError,
            websocket_protocol.WebSocketError,
        ) as error:
            _log.warning("pod not kept busy url=%s error=%s", self.url, error)
