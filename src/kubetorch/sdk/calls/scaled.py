"""Calls of an autoscaled service: each on a connection of its own, which its scaler counts.

    call ── Stream ══ WebSocket ══ scaler ══ agent of some pod
                └──── once that broke ══════ agent of the same pod

A scaler takes an open connection for a call that runs: it makes pods for them, holds them while
there is no pod, and ends pods that have none. So a connection lives as long as its call. Scalers
cut those that last too long (Knative's after `timeoutSeconds` of the revision): the call goes on in
its pod, where its stream is resumed, past the scaler.
"""

from __future__ import annotations

import threading

from kubetorch.errors import CallRefusedError, PodTerminatedError
from kubetorch.sdk.reach.way import Way
from kubetorch.sdk.streams import connecting
from kubetorch.sdk.streams.connecting import (
    FINAL,
    Backoff,
    Location,
    Resolver,
    Scaler,
    UnavailableError,
)
from kubetorch.sdk.streams.stream import Stream

#: Seconds that a scaler may hold a connection before the controller is asked what is wrong.
HELD = 10.0


class Scaled:
    """The connections of calls that run.

    Args:
        service: Name of the service, for messages.
        resolve: Asks where it is.
        way: Makes the connections.
        ping_after: See `Stream`.
    """

    def __init__(self, service: str, resolve: Resolver, way: Way, ping_after: float) -> None:
        self._service = service
        self._resolve = resolve
        self._way = way
        self._ping_after = ping_after
        self._lock = threading.Lock()
        self._streams: list[Stream] = []

    def connect(
        self, location: Location, scaler: Scaler, backoff: Backoff, closed: threading.Event
    ) -> Stream:
        """A stream for one call.

        Args:
            location: Where the service is.
            scaler: Who takes its calls.
            backoff: How long this may take.
            closed: Ends the attempts to resume it.

        Raises:
            CallRefusedError: There can be no pod.
            KubetorchError, OSError, WebSocketError: As `connecting.attempt`.
        """
        if scaler.failure and backoff.is_sure:
            raise CallRefusedError(
                f"no pod of {self._service} can start: {scaler.failure}",
                hint=f"kt describe {self._service}",
            )
        stream = Stream(
            lambda broken: self._resume(broken, closed),
            ping_after=self._ping_after,
            is_single=True,
        )
        with self._lock:
            self._streams = [one for one in self._streams if not one.has_ended]
            self._streams.append(stream)
        timeout = max(min(HELD, backoff.left), 0.1)
        connecting.begin(
            stream, scaler.url, location.token, self._resolve, timeout=timeout, way=self._way
        )
        return stream

    def drop(self) -> list[Stream]:
        """All of them, which are forgotten here."""
        self._lock = threading.Lock()  # a forked child may have found it held
        streams, self._streams = self._streams, []
        return streams

    def _resume(self, stream: Stream, closed: threading.Event) -> None:
        """Connect a stream to the pod that its call runs in."""

        def resolve() -> Location:
            found = Location(*self._resolve())
            pods = {} if found.scaler is None else found.scaler.pods
            url = pods.get(stream.pod)
            return Location(() if url is None else (url,), found.token, ended=found.ended)

        backoff = Backoff(self._way.patience)
        while stream.calls and not stream.has_ended:
            try:
                location = connecting.ask(resolve)
            except UnavailableError as error:
                if not backoff.pause(closed):
                    stream.end(PodTerminatedError(stream.pod, f"it is not known where: {error}"))
                continue
            except FINAL as error:
                stream.end(error)
                return
            if not location.urls:
                stream.end(_gone(stream.pod))
                return
            connecting.resume(stream, location.urls[0], location, resolve, closed, self._way)
            return


def _gone(pod: str) -> PodTerminatedError:
    return PodTerminatedError(
        pod,
        "Gone",
        hint="autoscaled services lose pods when there is little to do; retries=1 makes a call "
        "again, and min_scale keeps pods",
    )
