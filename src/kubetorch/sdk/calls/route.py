"""Where the calls of one service go: its pods' addresses, a token, a stream to each pod in use.

Calls of an autoscaled service go to its scaler, each on a stream of its own (`Scaled`).

A route learns the addresses from its resolver, which asks the controller, and asks again when a pod
cannot be reached. Connecting happens in the thread of the caller that needs the connection; one
that breaks while calls are pending is made again by its stream's own thread.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple

from kubetorch.errors import CallRefusedError
from kubetorch.sdk.calls.scaled import Scaled
from kubetorch.sdk.logs import Screen
from kubetorch.sdk.reach.way import DIRECT, Way
from kubetorch.sdk.streams import connecting
from kubetorch.sdk.streams.connecting import (
    FINAL,
    TRANSIENT,
    Backoff,
    Location,
    Resolver,
    Scaler,
    UnavailableError,
)
from kubetorch.sdk.streams.stream import PING_AFTER, Stream

if TYPE_CHECKING:
    import asyncio

    from kubetorch.sdk.session import Session

__all__ = ["Location", "Resolver", "Route"]


class _Attempt(NamedTuple):
    """To connect, for all coroutines of a loop: each waits as long as it may itself."""

    future: asyncio.Future[Stream]
    backoff: Backoff


class Route:
    """The way to the pods of one service.

    Its streams are closed at exit, and let go of in forked children.

    Args:
        service: Name of the service, for messages.
        resolve: Asks where it is. Called from any thread.
        location: Where it is, if that is known already.
        ping_after: See `Stream`.
        ordinal: Number of the pod, if it is the way to one pod alone.
        way: Makes the connections.
    """

    def __init__(
        self,
        service: str,
        resolve: Resolver,
        location: Location | None = None,
        *,
        ping_after: float = PING_AFTER,
        ordinal: int | None = None,
        way: Way = DIRECT,
    ) -> None:
        self._way = way
        #: The session with the controller of the service, if it has one of its own.
        self.session: Session | None = None
        self.service = service
        self.ordinal = ordinal
        self._resolve = resolve
        #: Where lines from its pods go.
        self.screen = Screen()
        # Those to single pods, by ordinal.
        self._pods: dict[int, Route] = {}
        self._ping_after = ping_after
        self._location = location
        self._streams: dict[str, Stream] = {}
        # Those that take no more calls, but may have some that run.
        self._leaving: list[Stream] = []
        self._scaled = Scaled(service, resolve, way, ping_after)
        self._turn = 0
        self._connecting = threading.Lock()
        self._closed = threading.Event()
        self._connects: dict[asyncio.AbstractEventLoop, _Attempt] = {}
        reference = weakref.ref(self)
        atexit.register(_close, reference)
        os.register_at_fork(after_in_child=lambda: _abandon(reference))

    @property
    def patience(self) -> float:
        """Seconds that a call waits for a pod that takes it."""
        scaler = self._scaler
        return self._way.patience if scaler is None else max(self._way.patience, scaler.patience)

    @property
    def _scaler(self) -> Scaler | None:
        return None if self._location is None else self._location.scaler

    @property
    def shares_streams(self) -> bool:
        """Whether calls share connections; those of an autoscaled service do not."""
        return self._scaler is None

    # ------------------------------------------------------------------------------- streams

    def stream(self) -> Stream | None:
        """An open stream to the pod whose turn it is; `None` when one has to be connected."""
        location = self._location
        if location is None or location.scaler is not None:
            return None
        urls = location.urls
        if len(urls) == 1:
            stream = self._streams.get(urls[0])
            return stream if stream is not None and stream.accepts_calls else None
        return self._least_busy(urls)

    def connect(self, patience: float | None = None) -> Stream:
        """A stream that takes calls, waiting for a pod that can be reached.

        Raises:
            ServiceNotFoundError: The service is gone.
            UnauthorizedError, VersionMismatchError: It does not want to speak with this client.
            CallRefusedError: No pod could be reached in time.
        """
        return self._connect_within(Backoff(self.patience if patience is None else patience))

    async def connect_async(self, patience: float | None = None) -> Stream:
        """A stream that takes calls, waiting for a pod that can be reached.

        Raises:
            ServiceNotFoundError: The service is gone.
            UnauthorizedError, VersionMismatchError: It does not want to speak with this client.
            CallRefusedError: No pod could be reached in time.
        """
        import asyncio  # noqa: PLC0415  # a blocking caller does not need it

        loop = asyncio.get_running_loop()
        own = Backoff(self.patience if patience is None else patience)
        while True:
            stream = self.stream()
            if stream is not None:
                return stream
            if not self.shares_streams:
                return await self._begin(loop, own)
            shared = self._connects.get(loop)
            if shared is None or shared.future.done():
                # A thread for all coroutines of the loop, for as long as one of them waits.
                backoff = Backoff(own.left)
                shared = self._connects[loop] = _Attempt(self._begin(loop, backoff), backoff)
                shared.future.add_done_callback(lambda done: self._forget_attempt(loop, done))
            shared.backoff.extend(own.deadline)
            await asyncio.wait((shared.future,), timeout=max(own.left, 0.0))
            if not shared.future.done():
                raise self._refused(own, shared.backoff.failed)
            try:
                stream = shared.future.result()
            except CallRefusedError:
                if own.left <= 0 or not shared.backoff.is_spent:
                    raise
                continue  # the others' patience was over, just as this one came
            if stream.is_single and not stream.calls:
                stream.close()  # nobody knew yet that they are not shared

    def pod(self, ordinal: int) -> Route:
        """The way to one pod of the service, whichever it is at the time of a call."""
        found = self._pods.get(ordinal)
        if found is None:
            location = self._location
            made = Route(
                self.service,
                lambda: Location(*self._resolve()).of(ordinal),
                None if location is None else _if_there(location.of(ordinal)),
                ping_after=self._ping_after,
                ordinal=ordinal,
                way=self._way,
            )
            made.screen = self.screen
            made.session = self.session
            found = self._pods.setdefault(ordinal, made)
        return found

    def locate(self, location: Location | None) -> None:
        """Take this for where the service is; `None`: ask before the next connection."""
        self._location = location
        for ordinal, pod in self._pods.items():
            pod.locate(None if location is None else _if_there(location.of(ordinal)))

    def pause(self, delay: float) -> None:
        """Wait before the next attempt of a call."""
        self._closed.wait(delay)

    @property
    def is_closed(self) -> bool:
        """Whether nothing is to be sent on it any more."""
        return self._closed.is_set()

    def close(self) -> None:
        """Close all streams: plain calls that run are cancelled."""
        self._closed.set()
        for pod in self._drop_pods():
            pod.close()
        for stream in self._drop_streams():
            stream.close()

    def abandon(self) -> None:
        """Let go of everything, in a forked child."""
        self._connecting = threading.Lock()
        self._closed = threading.Event()
        self._connects.clear()
        for pod in self._drop_pods():
            pod.abandon()
        for stream in self._drop_streams():
            stream.abandon()

    def _drop_pods(self) -> list[Route]:
        pods = list(self._pods.values())
        self._pods.clear()
        return pods

    def _drop_streams(self) -> list[Stream]:
        streams = [*self._streams.values(), *self._leaving, *self._scaled.drop()]
        self._streams.clear()
        self._leaving.clear()
        return streams

    @property
    def _no_pod(self) -> str:
        where = "" if self.ordinal is None else f"with the number {self.ordinal} "
        return f"no pod {where}of {self.service}"

    # ---------------------------------------------------------------------------- connecting

    def _connect_within(self, backoff: Backoff) -> Stream:
        while True:
            try:
                return self._take(backoff)
            except FINAL:
                raise
            except TRANSIENT as failed:
                backoff.failed = error = failed
                mistake = connecting.mistake_in(failed)
                if mistake is not None and backoff.is_sure:
                    raise mistake from None
            if not backoff.pause(self._closed):
                raise self._refused(backoff, error) from error

    def _refused(self, backoff: Backoff, error: Exception | None) -> CallRefusedError:
        why = "" if error is None else f": {error}"
        return CallRefusedError(
            f"{self._no_pod} could be reached within {backoff.patience:g} s{why}",
            hint=f"kt status {self.service}",
        )

    def _least_busy(self, urls: tuple[str, ...]) -> Stream | None:
        best: Stream | None = None
        self._turn += 1
        for step in range(len(urls)):
            stream = self._streams.get(urls[(self._turn + step) % len(urls)])
            if stream is None or not stream.accepts_calls:
                return None
            if best is None or len(stream.calls) < len(best.calls):
                best = stream
        return best

    def _take(self, backoff: Backoff) -> Stream:
        """A stream of all calls, or where there is a scaler one for a single call."""
        with self._connecting:
            stream = self.stream()
            if stream is not None:
                return stream
            location = self._location or connecting.ask(self._resolve)
            scaler = location.scaler
            if scaler is None:
                return self._connect(location, backoff)
            self._location = location
        try:
            return self._scaled.connect(location, scaler, backoff, self._closed)
        except BaseException:
            self._location = None
            raise

    def _connect(self, location: Location, backoff: Backoff) -> Stream:
        """Connect to every pod that there is no stream to; one of the streams."""
        reached: dict[str, Stream] = {}
        error: Exception = UnavailableError("none is ready")
        for url in location.urls:
            stream = self._streams.get(url)
            if stream is not None and stream.accepts_calls:
                reached[url] = stream
                continue
            try:
                reached[url] = self._open(url, location, backoff)
            except FINAL:
                raise
            except TRANSIENT as failed:
                error = failed
        self._leaving += [old for old in self._streams.values() if old not in reached.values()]
        self._leaving = [old for old in self._leaving if old.calls]
        self._streams = reached
        # Pods that were not reached are left out until the controller is asked again.
        self._location = location.only(reached) if reached else None
        if not reached:
            raise error
        return next(iter(reached.values()))

    def _open(self, url: str, location: Location, backoff: Backoff) -> Stream:
        stream = Stream(lambda broken: self._resume(broken, url), ping_after=self._ping_after)
        connecting.begin(
            stream, url, location.token, self._resolve, timeout=backoff.attempt, way=self._way
        )
        return stream

    def _resume(self, stream: Stream, url: str) -> None:
        connecting.resume(stream, url, self._location, self._resolve, self._closed, self._way)

    def _begin(self, loop: asyncio.AbstractEventLoop, backoff: Backoff) -> asyncio.Future[Stream]:
        """Connect in a thread."""
        future: asyncio.Future[Stream] = loop.create_future()
        threading.Thread(
            target=self._connect_for,
            args=(loop, future, backoff),
            name="kubetorch-connect",
            daemon=True,
        ).start()
        return future

    def _forget_attempt(
        self, loop: asyncio.AbstractEventLoop, done: asyncio.Future[Stream]
    ) -> None:
        attempt = self._connects.get(loop)
        if attempt is not None and attempt.future is done:
            del self._connects[loop]

    def _connect_for(
        self,
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[Stream],
        backoff: Backoff,
    ) -> None:
        stream: Stream | None = None
        error: BaseException | None = None
        try:
            stream = self._connect_within(backoff)
        except BaseException as failed:  # noqa: BLE001  # it is raised in the loop
            error = failed

        def settle() -> None:
            if future.cancelled():
                _let_go(stream)
            elif stream is not None:
                future.set_result(stream)
            elif error is not None:
                future.set_exception(error)
                future.exception()  # retrieved: those who waited may be gone

        try:
            loop.call_soon_threadsafe(settle)
        except RuntimeError:  # the loop is closed: nobody waits any more
            _let_go(stream)


def _let_go(stream: Stream | None) -> None:
    """Nobody wants a stream any more that was connected; others may share it."""
    if stream is not None and stream.is_single:
        stream.close()


def _if_there(location: Location) -> Location | None:
    """A location that has a URL; without one the controller is to be asked."""
    return location if location.urls else None


def _close(reference: weakref.ref[Route]) -> None:
    route = reference()
    if route is not None:
        route.close()


def _abandon(reference: weakref.ref[Route]) -> None:
    route = reference()
    if route is not None:
        route.abandon()
