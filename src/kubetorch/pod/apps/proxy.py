"""Requests and WebSockets below `/http/`: who may reach the app, and what it sees of them.

A token may come in `Authorization`, in `X-Kubetorch-Token` where the app wants the former for
itself, in a cookie, or in the query, which a browser can be sent to and which is exchanged for the
cookie. The app never sees it: its log, or what it calls, would give it away.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Callable, Mapping

from kubetorch.errors import (
    ForeignOriginError,
    KubetorchError,
    PodTerminatedError,
    UnauthorizedError,
)
from kubetorch.lib import asgi, proxy
from kubetorch.lib.asgi import (
    ClientGoneError,
    Receive,
    Responder,
    Scope,
    Send,
    refusal,
    with_status,
)
from kubetorch.lib.http1 import BrokenError, Header, UnansweredError
from kubetorch.lib.http_server import Message, Upgrade
from kubetorch.lib.proxy import Mount, Passage, Target
from kubetorch.pod.apps.process import AppHost, AppProcess
from kubetorch.pod.http import calling
from kubetorch.pod.http.auth import Guard, refused
from kubetorch.pod.http.request_forwarder import RequestForwarder, is_alone
from kubetorch.pod.tuning import TIMING
from kubetorch.wire import routes, tokens
from kubetorch.wire.messages import Member
from kubetorch.wire.tokens import AppRequest

_MOUNT = Mount(outside=routes.APP, inside="")
_PREFIX = b"x-forwarded-prefix"
_PATH = re.compile(rb"/[!-:<-~]*")
_HINT = (
    "send it as Authorization: Bearer <token>; a browser is sent to the page with "
    f"?{routes.APP_TOKEN_QUERY}=<token>"
)


def cookie(name: str, token: str, *, path: str, is_secure: bool) -> str:
    """The value of a `Set-Cookie` header; `path` is where the browser sees the app."""
    from http.cookies import CookieError, SimpleCookie  # noqa: PLC0415  # 1 ms, for browsers

    jar: SimpleCookie = SimpleCookie()
    try:
        jar[name] = token
    except CookieError as error:
        raise ValueError(name) from error
    jar[name]["path"] = path
    jar[name]["secure"] = is_secure
    jar[name]["max-age"] = TIMING.app_cookie_seconds
    jar[name]["httponly"] = True
    jar[name]["samesite"] = "Strict"
    return jar[name].OutputString()


class AppNames:
    """The names by which a browser may call the app of a pod in a cluster.

    Any other name may be an attacker's that leads here (DNS rebinding). Addresses and `localhost`
    cannot.
    """

    def __init__(self, namespace: str, workload: str) -> None:
        self._namespace = namespace
        self._workload = workload
        #: Names that the controller reported, with `*.` before a whole domain; `None` before it has
        #: reported them, and on one machine: then no request is refused.
        self.controller_names: tuple[str, ...] | None = None

    def has(self, name: str) -> bool:
        if self.controller_names is None or asgi.is_loopback(name) or _is_address(name):
            return True
        if any(
            name == pattern or (pattern[:1] == "*" and name.endswith(pattern[1:]))
            for pattern in self.controller_names
        ):
            return True
        inner = name.removesuffix(".cluster.local").removesuffix(".svc")
        first, *rest = inner.split(".")
        if inner != name:
            return bool(rest) and rest[-1] == self._namespace
        if rest:
            return name == f"{self._workload}.{self._namespace}"
        return first == self._workload or first.startswith(f"{self._workload}-")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class AppProxy:
    def __init__(
        self,
        *,
        pod_name: str,
        guard: Guard,
        host: AppHost,
        names: AppNames,
        forwarder: RequestForwarder,
    ) -> None:
        self._pod_name = pod_name
        self._names = names
        self._guard = guard
        self._host = host
        self._forwarder = forwarder
        #: WebSockets that are open: they end with the app or the client, not by themselves.
        self.sockets = 0
        self._cookie = f"{routes.APP_COOKIE}{re.sub('[^a-zA-Z0-9-]', '-', pod_name)}"

    def has_path(self, path: bytes) -> bool:
        """True if a quoted path belongs to the app."""
        return self._host.view is not None and _MOUNT.has(path)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = list(scope["headers"])
        passage = self._admit(scope["method"], headers, scope["query_string"], scope["admit"])
        if passage.query_token is not None and scope["method"] == "GET":
            await self._exchange(scope, passage, send)
            return
        self._host.check_stopping()
        member = await self._less_busy(headers, scope["raw_path"])
        if member is not None and await self._forwarder.relay(
            member, scope, headers, receive, send
        ):
            return
        self._host.begin()
        try:
            source = (scope.get("client") or ("",))[0]
            _, leave = await self._enter(scope["raw_path"], headers, source)
            try:
                await self._relay(scope, passage, receive, send)
            finally:
                leave()
        finally:
            self._host.finish()

    async def _less_busy(self, headers: list[Header], path: bytes) -> Member | None:
        """The pod that is to answer a request, if it is not this one."""
        latest = self._host.latest
        if latest is None or not latest.app_run.is_balanced or is_alone(headers):
            return None
        return None if _is_probe(latest, path) else await self._forwarder.choose()

    async def _enter(
        self, path: bytes, headers: list[Header], source: str
    ) -> tuple[AppProcess, Callable[[], None]]:
        """Wait for the app, and for a slot; returns the app, and what gives the slot back.

        A request of the health check needs no slot.
        """
        texts = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        timeout = calling.timeout_of(texts, routes.QUEUE_TIMEOUT)
        process = await self._host.serving()
        if _is_probe(process, path):
            return process, lambda: None
        return process, await self._host.take_slot(source, timeout)

    async def _relay(self, scope: Scope, passage: AppRequest, receive: Receive, send: Send) -> None:
        headers = list(scope["headers"])
        has_begun = False

        async def send_on(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        process = await self._host.serving()
        app_scope = {**scope, "query_string": passage.query}
        passed = _passed(passage, headers)
        try:
            with self._host.answering():
                try:
                    target = _target(process, headers)
                    await proxy.relay(app_scope, passed, receive, send_on, target)
                except ConnectionRefusedError:
                    # Nothing was sent. If it has just ended, its successor gets the request.
                    if not await process.ends_within(TIMING.app_exit_notice_seconds):
                        raise
                    process = await self._host.serving()
                    target = _target(process, headers)
                    await proxy.relay(app_scope, passed, receive, send_on, target)
        except PodTerminatedError as error:
            if has_begun:
                raise ClientGoneError from error
            raise
        except (OSError, TimeoutError, asyncio.TimeoutError) as error:
            if has_begun:
                raise ClientGoneError from error
            is_cut_off = isinstance(error, UnansweredError | ConnectionResetError)
            if is_cut_off and await process.ends_within(TIMING.app_exit_notice_seconds):
                raise with_status(process.died(), 502) from error
            why = str(error) if isinstance(error, BrokenError) else type(error).__name__
            raise refusal(
                502,
                f"the app in {self._pod_name} did not answer on port {process.port}: {why}",
                hint="kt logs shows what it does",
            ) from error

    async def open(self, upgrade: Upgrade) -> Passage:
        """The way of a WebSocket; see `kubetorch.lib.proxy.Opener`.

        Until the app makes the upgrade it is a request as any other, and has a slot.
        """
        try:
            passage = self._admit("socket", upgrade.headers, upgrade.query, upgrade.admit)
            self._host.check_stopping()
            member = await self._less_busy(upgrade.headers, upgrade.raw_path)
            if member is not None:
                forwarder = self._forwarder
                passed = forwarder.headers(upgrade.headers)
                return self._passage(
                    forwarder.target(member), passed, lambda: None, forwarder.begin(member)
                )
            self._host.begin()
            try:
                process, leave = await self._enter(
                    upgrade.raw_path, upgrade.headers, upgrade.source
                )
            except BaseException:
                self._host.finish()
                raise
        except KubetorchError as error:
            raise refused(error, self._pod_name) from error
        upgrade.query = passage.query
        passed = _passed(passage, upgrade.headers)

        def finish() -> None:
            leave()
            self._host.finish()

        return self._passage(_target(process, upgrade.headers), passed, leave, finish)

    def _passage(
        self,
        target: Target,
        headers: list[Header],
        on_made: Callable[[], object],
        on_end: Callable[[], object],
    ) -> Passage:
        """A way to the target that counts in `sockets` once it is made."""
        is_made = False

        def make() -> None:
            nonlocal is_made
            is_made = True
            self.sockets += 1
            on_made()

        def end() -> None:
            self.sockets -= is_made
            on_end()

        return Passage(target, headers, make, end)

    def _admit(
        self, method: str, headers: list[Header], query: bytes, on_token: Callable[[], None]
    ) -> AppRequest:
        """Refuse a request without a right; returns it without the headers for Kubetorch."""
        is_token = self._guard.is_token
        header_texts = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        self._check_page(header_texts, method)
        # Tokens of other services are hidden from the app, too.
        passage = tokens.inspect(
            headers, query, is_ours=lambda token: tokens.is_signed(token) or is_token(token)
        )
        if any(map(is_token, passage.tokens)):
            on_token()
        elif not self._host.is_public:
            hint = f"{_HINT}; {self._guard.token_command} prints one"
            raise UnauthorizedError("this app needs a token", hint=hint)
        return passage

    def _check_page(self, headers: Mapping[str, str], method: str) -> None:
        """Refuse requests of other sites' pages, and names that are not the app's."""
        host, origin = headers.get("host"), headers.get("origin")
        is_local = self._guard.is_local or asgi.is_loopback(asgi.host_of(host))
        asgi.check_link(headers, method, may_be_beside=is_local)
        if is_local:
            asgi.check_local(host, origin)
            return
        # A proxy that calls the app by another name says what the browser called.
        called = headers.get("x-forwarded-host", host or "").split(",")
        names = {asgi.host_of(host_name) for host_name in (host, *called)}
        if origin is not None and asgi.host_of_origin(origin) not in names:
            raise ForeignOriginError(f"requests of pages from {origin[:200]!r} are refused")
        unknown = [name for name in names if not self._names.has(name)]
        if self._host.is_public and unknown:
            raise ForeignOriginError(
                f"this app is not called {unknown[0]!r:.200}",
                hint="an administrator names further hosts of apps: "
                "kt upgrade --set ingress.appHosts={HOST}",
            )

    async def _exchange(self, scope: Scope, passage: AppRequest, send: Send) -> None:
        """Give a browser the cookie for the token that it was sent here with."""
        assert passage.query_token is not None
        respond = Responder(send, {})
        headers: Mapping[str, str] = {}
        if self._guard.is_token(passage.query_token):
            header_values = dict(scope["headers"])
            is_secure = header_values.get(b"x-forwarded-proto") == b"https"
            path = _browser_prefix(scope["headers"]) or routes.APP
            text = cookie(self._cookie, passage.query_token, path=path, is_secure=is_secure)
            headers = {"set_cookie": text}
        # Relative, since a proxy in between may call this path otherwise.
        name = scope["raw_path"].rpartition(b"/")[2].decode("latin-1")
        query = f"?{passage.query.decode('latin-1')}" if passage.query else ""
        location = f"./{name}{query}"
        await respond.answer(
            303, b"", "text/plain", location=location, cache_control="no-store", **headers
        )


def _is_probe(process: AppProcess, path: bytes) -> bool:
    """True if a request asks whether the app is well."""
    probe = process.app.health_check
    return probe is not None and path == f"{routes.APP}{probe}".encode()


def _target(process: AppProcess, headers: list[Header]) -> Target:
    assert process.port is not None
    return Target(
        process.address, process.port, _MOUNT._replace(browser_prefix=_browser_prefix(headers))
    )


def _browser_prefix(headers: list[Header]) -> str:
    """The URL at which a browser sees the app, if the sender of the request named one."""
    prefix = dict(headers).get(_PREFIX, b"")
    return prefix.decode() if _PATH.fullmatch(prefix) else ""


def _passed(passage: AppRequest, headers: list[Header]) -> list[Header]:
    """The headers that the app gets."""
    app_headers = [header for header in passage.headers if not is_alone((header,))]
    return [*app_headers, *_forwarded(headers)]


def _forwarded(headers: list[Header]) -> list[Header]:
    """The headers that describe the way of the request."""
    header_values = dict(headers)
    more = []
    if _PREFIX not in header_values:
        more.append((_PREFIX, _MOUNT.outside.encode()))
    if b"host" in header_values and b"x-forwarded-host" not in header_values:
        more.append((b"x-forwarded-host", header_values[b"host"]))
    if b"x-forwarded-proto" not in header_values:
        more.append((b"x-forwarded-proto", b"http"))
    return more
