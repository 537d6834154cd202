"""The way of requests and WebSockets below `/http/` to the app of the pod."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping

from kubetorch.errors import ForeignOriginError, KubetorchError, UnauthorizedError
from kubetorch.lib import proxying, tunnels
from kubetorch.lib.asgi import ClientGoneError, Receive, Responder, Scope, Send, refusal
from kubetorch.lib.proxying import BrokenAnswerError, Header, Mount, Target
from kubetorch.pod.apps import access
from kubetorch.pod.apps.access import Passage
from kubetorch.pod.apps.host import AppHost
from kubetorch.pod.apps.process import AppProcess
from kubetorch.pod.http.auth import Guard
from kubetorch.wire import failures, routes

_MOUNT = Mount(outside=routes.APP, inside="")
_HINT = (
    "send it as Authorization: Bearer <token>; a browser is sent to the page with "
    f"?{routes.APP_TOKEN_QUERY}=<token>; kt token NAME prints one"
)


class Gate:
    """Lets requests through to the app.

    Args:
        pod_name: For errors.
        guard: Decides who may ask.
        host: Knows the app.
    """

    def __init__(self, *, pod_name: str, guard: Guard, host: AppHost) -> None:
        self._pod_name = pod_name
        self._guard = guard
        self._host = host
        self._cookie = f"{routes.APP_COOKIE}{re.sub('[^a-zA-Z0-9-]', '-', pod_name)}"

    def takes(self, path: str) -> bool:
        """Whether a path is one of the app's."""
        return self._host.view is not None and _MOUNT.has(path)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request with what the app answers.

        Raises:
            KubetorchError: It may not be asked, or does not answer.
            ClientGoneError: The answer has begun and broke off.
        """
        headers = list(scope["headers"])
        passage = self._admit(scope["method"], headers, scope["query_string"])
        if passage.query_token is not None and scope["method"] == "GET":
            await self._exchange(scope, passage, send)
            return
        has_begun = False

        async def send_on(message: proxying.Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        self._host.begin()
        try:
            process = await self._host.serving()
            asked = {**scope, "query_string": passage.query}
            passed = [*passage.headers, *_forwarded(headers)]
            try:
                await proxying.relay(asked, passed, receive, send_on, _target(process))
            except (OSError, TimeoutError, asyncio.TimeoutError) as error:
                if has_begun:
                    raise ClientGoneError from error
                raise self._no_answer(process, error) from error
        finally:
            self._host.finish()

    async def open(
        self, upgrade: tunnels.Upgrade
    ) -> tuple[Target, list[Header], Callable[[], None]]:
        """The way of a WebSocket; see `kubetorch.lib.tunnels.Opener`.

        Raises:
            Refused: It may not be opened.
        """
        try:
            passage = self._admit("GET", upgrade.headers, upgrade.query, is_socket=True)
            self._host.begin()
            try:
                process = await self._host.serving()
            except BaseException:
                self._host.finish()
                raise
        except KubetorchError as error:
            failure = failures.describe(error, pod_name=self._pod_name, started=False)
            body = failures.without_traceback(failure, error).to_json()
            raise tunnels.Refused(failure.status, body) from error
        upgrade.query = passage.query
        passed = [*passage.headers, *_forwarded(upgrade.headers)]
        return _target(process), passed, self._host.finish

    def _admit(
        self, method: str, headers: list[Header], query: bytes, *, is_socket: bool = False
    ) -> Passage:
        """Refuse who may not ask; else the request without what is not the app's business.

        Raises:
            KubetorchError: It is refused.
        """
        found = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        self._guard.check_origin(found.get("host"), found.get("origin"))
        if self._guard.is_local and access.is_foreign(found, "POST" if is_socket else method):
            raise ForeignOriginError("requests of pages from other sites are refused")
        passage = access.inspect(headers, query, is_token=self._guard.is_token)
        if not self._host.is_public and not any(map(self._guard.is_token, passage.tokens)):
            raise UnauthorizedError("this app needs a token", hint=_HINT)
        return passage

    async def _exchange(self, scope: Scope, passage: Passage, send: Send) -> None:
        """Give a browser the cookie for the token that it was sent here with."""
        assert passage.query_token is not None
        respond = Responder(send, {})
        headers: Mapping[str, str] = {}
        if self._guard.is_token(passage.query_token):
            headers = {"set_cookie": access.cookie(self._cookie, passage.query_token)}
        # Relative, since who is in between may call this path otherwise.
        name = scope["raw_path"].rpartition(b"/")[2].decode("latin-1")
        query = f"?{passage.query.decode('latin-1')}" if passage.query else ""
        location = f"./{name}{query}"
        await respond.answer(
            303, b"", "text/plain", location=location, cache_control="no-store", **headers
        )

    def _no_answer(self, process: AppProcess, error: Exception) -> KubetorchError:
        why = str(error) if isinstance(error, BrokenAnswerError) else type(error).__name__
        return refusal(
            502,
            f"the app in {self._pod_name} did not answer on port {process.app.port}: {why}",
            hint="kt logs shows what it does",
        )


def _target(process: AppProcess) -> Target:
    assert process.app.port is not None
    return Target(process.address, process.app.port, _MOUNT)


def _forwarded(headers: list[Header]) -> list[Header]:
    """What the app is told of the way to it."""
    known = dict(headers)
    more = []
    if b"x-forwarded-prefix" not in known:
        more.append((b"x-forwarded-prefix", _MOUNT.outside.encode()))
    if b"host" in known and b"x-forwarded-host" not in known:
        more.append((b"x-forwarded-host", known[b"host"]))
    if b"x-forwarded-proto" not in known:
        more.append((b"x-forwarded-proto", b"http"))
    return more
