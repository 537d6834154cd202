"""The streams of all clients: who may open one, and which one a client comes back to."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from kubetorch.errors import CallRefusedError, KubetorchError, ProtocolError
from kubetorch.lib.asgi import refusal
from kubetorch.lib.connections import Endpoint, Refusal
from kubetorch.pod.calls.calls import Calls
from kubetorch.pod.calls.stream import ClientStream
from kubetorch.pod.http.auth import Guard
from kubetorch.pod.workers.host import Payload
from kubetorch.wire import failures, routes, tokens, versions

#: Clients at one time, with or without a connection.
CLIENT_LIMIT = 4096

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_RESUME = re.compile(r"([A-Za-z0-9._-]{1,128}):(\d{1,18})")


class Streams:
    """Accepts the connections of clients.

    Args:
        incarnation: Identity of this agent's process.
        pod_name: Name of the pod.
        calls: Where calls are opened.
        guard: Decides who may connect.
        allocate: Gives memory for large arguments.
    """

    def __init__(
        self,
        *,
        incarnation: str,
        pod_name: str,
        calls: Calls,
        guard: Guard,
        allocate: Callable[[int], Payload],
    ) -> None:
        self._incarnation = incarnation
        self._pod_name = pod_name
        self._calls = calls
        self._guard = guard
        self._allocate = allocate
        self._streams: dict[str, ClientStream] = {}
        self._draining: str | None = None

    def accept(self, path: str, headers: Mapping[str, str]) -> Endpoint:
        """The stream for a request to upgrade; see `kubetorch.lib.connections.Acceptor`.

        Raises:
            Refusal: It is refused.
        """
        try:
            self._guard.check_origin(headers.get("host"), headers.get("origin"))
            self._guard.check_token(headers.get(routes.AUTHORIZATION.lower()), tokens.CALL)
            if path != routes.STREAM:
                raise refusal(404, f"there is no stream at {path[:200]!r}")
            versions.check(
                _protocol(headers),
                peer="the client",
                fix_peer=versions.FIX_CLIENT,
                fix_self=versions.FIX_PODS,
            )
            client, resume_at = self._identify(headers)
            return self._stream(client, resume_at)
        except KubetorchError as error:
            failure = failures.describe(error, pod_name=self._pod_name, started=False)
            body = failures.without_traceback(failure, error).to_json()
            raise Refusal(failure.status, body) from error

    def has_uncounted(self) -> bool:
        """Whether there is a call that no client's first connection stands for.

        One that was made by `POST` has its request.
        """
        streams = list(self._streams.values())
        counted = {call for stream in streams for call in stream.counted()}
        others = {call for stream in streams for call in stream.joined()}
        return not counted.issuperset(others | self._calls.detached())

    def go_away(self, reason: str) -> None:
        """Take no new clients, and tell those that there are to call elsewhere."""
        self._draining = reason
        for stream in self._streams.values():
            stream.go_away(reason)

    def _identify(self, headers: Mapping[str, str]) -> tuple[str, int | None]:
        """The client, and how many frames it has of what this incarnation sent to it."""
        client = headers.get(routes.CLIENT.lower(), "")
        if not _NAME.fullmatch(client):
            raise ProtocolError(f"{routes.CLIENT} is {client[:80]!r}; it must name the client")
        resume = headers.get(routes.RESUME.lower())
        if resume is None:
            return client, None
        match = _RESUME.fullmatch(resume)
        if match is None:
            raise ProtocolError(f"{routes.RESUME} is {resume[:80]!r}; it must be <name>:<number>")
        return client, int(match[2]) if match[1] == self._incarnation else None

    def _stream(self, client: str, resume_at: int | None) -> ClientStream:
        known = self._streams.get(client)
        if known is not None:
            try:
                if resume_at is not None:
                    known.expect(resume_at)
                    return known
            except ProtocolError:  # it lacks frames that are gone: it starts from scratch
                pass
            known.end()
        if self._draining is not None:
            raise CallRefusedError(
                f"pod {self._pod_name} is being stopped: {self._draining}",
                hint="call again: another pod takes it",
            )
        if len(self._streams) >= CLIENT_LIMIT:
            raise CallRefusedError(f"pod {self._pod_name} has {CLIENT_LIMIT} clients")
        stream = ClientStream(
            client,
            incarnation=self._incarnation,
            pod_name=self._pod_name,
            calls=self._calls,
            allocate=self._allocate,
            on_over=self._forget,
        )
        self._streams[client] = stream
        stream.expect(None)
        return stream

    def _forget(self, stream: ClientStream) -> None:
        if self._streams.get(stream.client) is stream:
            del self._streams[stream.client]


def _protocol(headers: Mapping[str, str]) -> int | None:
    value = headers.get(routes.PROTOCOL.lower(), "")
    return int(value) if re.fullmatch(r"[0-9]{1,9}", value) else None
