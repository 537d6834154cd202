"""A cluster on loopback: an API server that forwards ports, in front of a real local service.

Its pods are the processes of that service, and the service itself is the controller's pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.local.fake_apiserver import Authority, Exchange, FakeApiServer, ServerChannels, failure

INSTALLED = "kubetorch"
CONTROLLER = "kubetorch-controller-abc"
_PODS = f"/api/v1/namespaces/{INSTALLED}/pods"
_ACCESS_KINDS = {
    "kind": "APIResourceList",
    "resources": [
        {
            "name": "selfsubjectaccessreviews",
            "kind": "SelfSubjectAccessReview",
            "namespaced": False,
            "verbs": ["create"],
        }
    ],
}


class FakeCluster:
    """Serves until it is left.

    Args:
        url: Where the service that plays the controller answers.
        token: Its user's token.

    Attributes:
        is_installed: Whether there is a controller.
        refused: Refusals by what is asked: `list pods`, `forward pods`, `token kubetorch-admin`.
        tokens: Tokens that were asked for, by account.
        forwarded: Pods that ports were forwarded of.
    """

    def __init__(self, url: str, token: str) -> None:
        self.is_installed = True
        self.refused: dict[str, int] = {"token kubetorch-user": 404}
        self.tokens: list[str] = []
        self.forwarded: list[str] = []
        self._port = urlsplit(url).port
        self._token = token
        self._authority = Authority()
        self._loop = asyncio.new_event_loop()
        self._server = FakeApiServer(self._answer, self._authority.server_context())
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FakeCluster:
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._run(asyncio.sleep(0.05))  # transports that were aborted close in a later pass
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def start(self) -> None:
        """Answer, on the same port as before."""
        self._run(self._server.start())

    def stop(self) -> None:
        """Be away: connections break, and no more are taken."""
        self._run(self._server.stop())

    def _run(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    @property
    def requests(self) -> list[str]:
        """What was asked: method and path."""
        return [f"{request.method} {request.path}" for request in self._server.requests]

    def kubeconfig(self, folder: Path, *, token: str | None = None) -> Path:
        """A kubeconfig of a user with a certificate, or with a token."""
        authority, user = folder / "ca.crt", {"token": token} if token else {}
        authority.write_bytes(self._authority.pem)
        if not token:
            certificate, key = self._authority.client("somebody")
            (folder / "client.crt").write_bytes(certificate)
            (folder / "client.key").write_bytes(key)
            user = {"client-certificate": "client.crt", "client-key": "client.key"}
        cluster = {"server": self._server.url, "certificate-authority": "ca.crt"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
            "clusters": [{"name": "here", "cluster": cluster}],
            "users": [{"name": "me", "user": user}],
        }
        file = folder / "kubeconfig"
        file.write_text(json.dumps(config))
        return file

    # ------------------------------------------------------------------------------------ inside

    async def _answer(self, exchange: Exchange) -> None:
        path = exchange.request.path
        if path == _PODS:
            self._list(exchange)
        elif path.endswith("/portforward"):
            await self._forward(exchange, path.split("/")[-2])
        elif path.endswith("/token"):
            self._give_token(exchange, path.split("/")[-2])
        elif path == "/apis/authorization.k8s.io/v1":
            exchange.answer(200, _ACCESS_KINDS)
        elif path.endswith("/selfsubjectaccessreviews"):
            is_allowed = "forward pods" not in self.refused
            exchange.answer(201, {**exchange.request.json, "status": {"allowed": is_allowed}})
        else:
            exchange.refuse(404, "NotFound")

    def _refuses(self, exchange: Exchange, action: str) -> bool:
        status = self.refused.get(action)
        if status is not None:
            exchange.answer(status, failure(status, "Refused", action))
        return status is not None

    def _list(self, exchange: Exchange) -> None:
        if self._refuses(exchange, "list pods"):
            return
        conditions = [{"type": "Ready", "status": "True"}]
        metadata = {"name": CONTROLLER, "namespace": INSTALLED}
        pod = {"metadata": metadata, "status": {"phase": "Running", "conditions": conditions}}
        items = [pod] if self.is_installed else []
        exchange.answer(200, {"kind": "PodList", "metadata": {}, "items": items})

    def _give_token(self, exchange: Exchange, account: str) -> None:
        self.tokens.append(account)
        if not self._refuses(exchange, f"token {account}"):
            exchange.answer(201, {"status": {"token": self._token}})

    async def _forward(self, exchange: Exchange, pod: str) -> None:
        is_controller = pod == CONTROLLER
        if self._refuses(exchange, f"forward {'controller' if is_controller else 'pods'}"):
            return
        self.forwarded.append(pod)
        port = self._port if is_controller else int(exchange.request.query["ports"])
        channels = await ServerChannels.accept(exchange, "v4.channel.k8s.io")
        for channel in (0, 1):
            await channels.send(channel, int(exchange.request.query["ports"]).to_bytes(2, "little"))
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError as error:
            await channels.send(1, str(error).encode())
            channels.end()
            await exchange.hang()
            return
        down = asyncio.ensure_future(_pump(reader, channels))
        try:
            while (message := await channels.receive()) is not None:
                writer.write(message[1:])
                await writer.drain()
        except asyncio.CancelledError:
            writer.transport.abort()  # nobody will be there to see the rest off
            raise
        finally:
            down.cancel()
            writer.close()
            exchange.writer.close()


async def _pump(reader: asyncio.StreamReader, channels: ServerChannels) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            await channels.send(0, data)
    channels.end()
