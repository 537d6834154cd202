"""Requests to one API server: credentials, safe repetition, and errors that name the action.

Requests are sent again until `patience` is over:

| Outcome of an attempt | Requests that are sent again |
|---|---|
| no connection, so nothing was sent | every request |
| 429 | every request, after `Retry-After` |
| connection broken, silence, 5xx | those that only read |
| 401 | every request, once, with fresh credentials if there may be any |

A certificate that does not verify is never tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlencode, urlsplit

from kubetorch._version import __version__
from kubetorch.config import environment
from kubetorch.errors import KubernetesRequestError, KubetorchError
from kubetorch.k8s import failures
from kubetorch.k8s.credentials import Credentials
from kubetorch.k8s.failures import Action
from kubetorch.k8s.kubeconfig import Access
from kubetorch.k8s.tuning import LIMITS, TIMING
from kubetorch.lib import async_http, backoff, transports, websocket, websocket_protocol
from kubetorch.lib.http1 import BrokenError

_READING = "GET"
_JSON = "application/json"


@dataclass(frozen=True)
class Call:
    action: Action
    method: str
    path: str
    query: tuple[tuple[str, str], ...] = ()
    body: bytes | None = field(default=None, repr=False)
    content_type: str = _JSON

    @property
    def target(self) -> str:
        return f"{self.path}?{urlencode(self.query)}" if self.query else self.path


class Session:
    def __init__(
        self,
        access: Access,
        *,
        timeout: float,
        patience: float,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        if variables is None:
            variables = environment.for_programs()
        self.server = access.cluster.server
        self._prefix = urlsplit(self.server).path.rstrip("/")
        self._credentials = Credentials(access, variables)
        self._timeout = timeout
        self._patience = patience
        self._pool = async_http.HttpPool(connect_timeout=min(TIMING.connect_seconds, timeout))
        self._turns = asyncio.Semaphore(LIMITS.concurrent_requests)

    async def close(self) -> None:
        await self._pool.close()

    async def bearer_token(self) -> str | None:
        """The bearer token that requests carry now.

        None for a user with a certificate or a password, and with impersonation.
        """
        return await self._credentials.bearer_token()

    def reject_token(self, token: str) -> bool:
        """Get another token for the next request; whether another is possible."""
        if self._credentials.can_change:
            self._credentials.reject_token(token)
        return self._credentials.can_change

    async def fetch(self, call: Call) -> bytes:
        attempts = _Attempts(self._patience)
        while True:
            # A request that pauses before its next attempt does not hold up others.
            async with self._turns:
                answer_or_delay = await self._fetch_once(call, attempts)
            if isinstance(answer_or_delay, bytes):
                return answer_or_delay
            await asyncio.sleep(answer_or_delay)

    async def send(self, call: Call, *, patience: float | None = None) -> async_http.Answer:
        """Send a request whose answer may last; returns once the answer has begun."""
        attempts = _Attempts(self._patience if patience is None else patience)
        while True:
            answer_or_delay = await self._send_once(call, attempts)
            if isinstance(answer_or_delay, async_http.Answer):
                return answer_or_delay
            await asyncio.sleep(answer_or_delay)

    async def open_channel(
        self, call: Call, endpoint: websocket.Endpoint, subprotocols: tuple[str, ...]
    ) -> websocket.Connection:
        attempts = _Attempts(self._patience)
        while True:
            headers = await self._credentials.headers()
            offered = (*headers, ("Sec-WebSocket-Protocol", ", ".join(subprotocols)))
            try:
                connection = await websocket.upgrade(
                    await self._credentials.route(),
                    self._prefix + call.target,
                    endpoint,
                    headers=offered,
                    max_message=LIMITS.stream_message_bytes,
                    timeout=self._timeout,
                )
            except websocket_protocol.UpgradeRefusedError as error:
                if self._renews(error.status, headers, attempts):
                    continue
                refusal = failures.refused(call.action, error.status, error.body)
                await asyncio.sleep(attempts.pause(refusal, may_repeat=error.status == 429))
            except transports.UntrustedError as error:
                raise failures.untrusted(call.action, self.server, error) from error
            except transports.UnreachableError as error:
                failure = failures.unavailable(call.action, self.server, error)
                await asyncio.sleep(attempts.pause(failure, error))
            except TimeoutError as error:
                silent = async_http.SilentError(f"no answer within {self._timeout:g} s")
                raise failures.unavailable(call.action, self.server, silent) from error
            except (OSError, websocket_protocol.WebSocketError) as error:
                raise failures.unavailable(call.action, self.server, error) from error
            else:
                connection.silence = TIMING.stream_silence_seconds
                return connection

    async def _fetch_once(self, call: Call, attempts: _Attempts) -> bytes | float:
        """The whole answer of one attempt, or the seconds until the next one."""
        answer_or_delay = await self._send_once(call, attempts)
        if not isinstance(answer_or_delay, async_http.Answer):
            return answer_or_delay
        try:
            async with answer_or_delay as answer:
                return await answer.read(LIMITS.answer_bytes, timeout=self._timeout)
        except (BrokenError, async_http.SilentError) as error:
            failure = failures.unavailable(call.action, self.server, error)
            return attempts.pause(failure, error, may_repeat=call.method == _READING)
        except async_http.TooLargeError as error:
            raise failures.garbled(call.action, self.server, error) from error

    async def _send_once(self, call: Call, attempts: _Attempts) -> async_http.Answer | float:
        """The begun answer of one attempt, or the seconds until the next one."""
        headers = await self._credentials.headers()
        try:
            answer = await self._exchange(call, headers)
        except transports.UntrustedError as error:
            raise failures.untrusted(call.action, self.server, error) from error
        except (transports.UnreachableError, BrokenError, async_http.SilentError) as error:
            is_safe = isinstance(error, transports.UnreachableError) or call.method == _READING
            failure = failures.unavailable(call.action, self.server, error)
            return attempts.pause(failure, error, may_repeat=is_safe)
        if 200 <= answer.status < 300:
            return answer
        refusal = await self._refusal(call, answer)
        if self._renews(answer.status, headers, attempts):
            return 0.0
        is_safe = answer.status >= 500 and call.method == _READING
        return attempts.pause(refusal, may_repeat=is_safe or answer.status == 429)

    def _renews(
        self, status: int, headers: tuple[tuple[str, str], ...], attempts: _Attempts
    ) -> bool:
        """True if other credentials may replace the refused ones: once per request."""
        if status != 401 or not self._credentials.can_change or attempts.renewed:
            return False
        attempts.renewed = True
        self._credentials.reject(headers)
        return True

    async def _exchange(
        self, call: Call, headers: tuple[tuple[str, str], ...]
    ) -> async_http.Answer:
        head = [*headers, ("Accept", _JSON), ("User-Agent", f"kubetorch/{__version__}")]
        if call.body is not None:
            head.append(("Content-Type", call.content_type))
        request = async_http.Request(
            call.method, self._prefix + call.target, tuple(head), call.body
        )
        route = await self._credentials.route()
        return await self._pool.send(route, request, timeout=self._timeout)

    async def _refusal(self, call: Call, answer: async_http.Answer) -> KubernetesRequestError:
        try:
            body = await answer.read(LIMITS.refusal_bytes, timeout=self._timeout)
        except (BrokenError, async_http.SilentError, async_http.TooLargeError):
            body = b""  # the status says enough
        return failures.refused(call.action, answer.status, body, answer.headers)


class _Attempts:
    """The attempts of one request, and the pauses between them."""

    def __init__(self, patience: float) -> None:
        self.renewed = False
        self._end = asyncio.get_running_loop().time() + patience
        self._delays = backoff.jittered(
            first=TIMING.request_first_delay_seconds, limit=TIMING.request_longest_delay_seconds
        )

    def pause(
        self, failure: KubetorchError, cause: Exception | None = None, *, may_repeat: bool = True
    ) -> float:
        """Seconds until the next attempt; raises the failure if no attempt is left."""
        retry_after = failure.retry_after if isinstance(failure, KubernetesRequestError) else None
        delay = max(next(self._delays), retry_after or 0.0)
        if not may_repeat or asyncio.get_running_loop().time() + delay > self._end:
            raise failure from cause
        return delay
