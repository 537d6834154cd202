"""Getting a stream its connection: the first one, and those that follow when it breaks."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from kubetorch.errors import (
    AgentDiedError,
    CallLostError,
    ConfigError,
    ControllerError,
    KubernetesError,
    KubernetesForbiddenError,
    KubetorchError,
    ProtocolError,
    ServiceNotFoundError,
    UnauthorizedError,
    VersionMismatchError,
)
from kubetorch.lib import websocket
from kubetorch.sdk.reach.way import DIRECT, Way
from kubetorch.sdk.streams import dial
from kubetorch.sdk.streams.stream import Stream
from kubetorch.wire import failures, routes, versions

if TYPE_CHECKING:
    from kubetorch.wire.messages import Ending

#: Seconds for one attempt.
_ATTEMPT = 5.0
#: Seconds for which a refusal may be that of a server that starts.
_DOUBT = 3.0
_FIRST_DELAY, _LONGEST_DELAY = 0.02, 1.0
#: Seconds for which a pod is tried that the controller does not hear of either.
_MISSING = 10.0


class Scaler(NamedTuple):
    """What takes the calls of an autoscaled service, and makes pods for them.

    Attributes:
        url: Where it does.
        pods: URLs of the agents of all pods that there are, by their names.
        patience: Seconds that a pod may take to be made.
        failure: Why there can be none, as far as the controller knows.
    """

    url: str
    pods: dict[str, str]
    patience: float
    failure: str = ""


class Location(NamedTuple):
    """Where a service is.

    Attributes:
        urls: Base URLs of the agents of its ready pods, in the order of the pods.
        token: What calls to them carry.
        ordinals: The number of each pod in the service, where that is known.
        scaler: Where each call goes on a connection of its own, if the service is autoscaled.
        ended: Why pods have ended whose calls may not know it, by their names.
    """

    urls: tuple[str, ...]
    token: str
    ordinals: tuple[int, ...] = ()
    scaler: Scaler | None = None
    ended: Mapping[str, Ending] = MappingProxyType({})

    def only(self, urls: Iterable[str]) -> Location:
        """The same without pods that have none of these URLs."""
        kept = set(urls)
        found = [one for one in itertools.zip_longest(self.urls, self.ordinals) if one[0] in kept]
        ordinals = tuple(number for _, number in found) if self.ordinals else ()
        return Location(tuple(url for url, _ in found), self.token, ordinals)

    def of(self, ordinal: int) -> Location:
        """Where one pod of the service is: without a URL when it is not ready."""
        numbered = zip(self.urls, self.ordinals, strict=False)
        here = tuple(url for url, number in numbered if number == ordinal)
        return Location(here[:1], self.token, (ordinal,), None, self.ended)


#: Asks the controller where a service is; raises `ServiceNotFoundError` when it is gone.
Resolver = Callable[[], Location]


class UnavailableError(Exception):
    """Not now, perhaps later."""


#: What no further attempt can help; some of them are an `OSError` too.
FINAL = (ServiceNotFoundError, UnauthorizedError, VersionMismatchError, ProtocolError)
#: What the user has to mend: rights, credentials, settings. A cluster that restarts may say so too.
MISTAKES = (KubernetesForbiddenError, ConfigError)
#: What an attempt fails with when the next one may succeed.
TRANSIENT = (OSError, websocket.WebSocketError, UnavailableError)


def mistake_in(error: Exception) -> Exception | None:
    """What of an attempt's failure the user has to mend, if anything."""
    found = (one for one in (error, error.__cause__) if isinstance(one, MISTAKES))
    return next(found, None)


class Backoff:
    """The pauses between attempts, up to a deadline.

    Args:
        patience: Seconds from now to the deadline.

    Attributes:
        deadline: When it is.
        failed: What the last attempt failed with.
        is_spent: The deadline has passed, and there was no further attempt.
    """

    def __init__(self, patience: float) -> None:
        self._begun = time.monotonic()
        self.deadline = self._begun + patience
        self.failed: Exception | None = None
        self.is_spent = False
        self._delay = _FIRST_DELAY

    def extend(self, deadline: float) -> None:
        """Go on until then, if that is later."""
        self.deadline = max(self.deadline, deadline)

    @property
    def patience(self) -> float:
        """Seconds from its beginning to the deadline."""
        return self.deadline - self._begun

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    @property
    def is_sure(self) -> bool:
        """Whether what was said again and again is no passing trouble."""
        return time.monotonic() - self._begun > _DOUBT

    @property
    def attempt(self) -> float:
        """Seconds that the next attempt may take."""
        return max(min(_ATTEMPT, self.left), 0.1)

    def pause(self, interrupted: threading.Event) -> bool:
        """Wait before the next attempt; false when there is none."""
        left = self.left
        if left <= 0:
            self.is_spent = True
        if self.is_spent or interrupted.wait(min(self._delay, left)):
            return False
        self._delay = min(self._delay * 2, _LONGEST_DELAY)
        return True


def ask(resolve: Resolver) -> Location:
    """Where the service is.

    Raises:
        UnavailableError: The controller does not know just now.
        ServiceNotFoundError, UnauthorizedError, VersionMismatchError: It never will.
    """
    try:
        return Location(*resolve())
    except FINAL:
        raise
    except (ControllerError, KubernetesError, ConfigError) as error:
        raise UnavailableError(str(error)) from error


def attempt(stream: Stream, url: str, token: str, *, timeout: float, way: Way = DIRECT) -> None:
    """Connect a stream to the agent at `url`, the way that leads there.

    Raises:
        UnauthorizedError, VersionMismatchError: The agent does not want this client.
        OSError, WebSocketError, UnavailableError: It cannot be reached, or not now.
    """
    headers = {
        routes.AUTHORIZATION: f"Bearer {token}",
        routes.PROTOCOL: str(versions.PROTOCOL),
        routes.CLIENT: stream.id,
    }
    if stream.incarnation:
        headers[routes.RESUME] = f"{stream.incarnation}:{stream.received}"
    try:
        connection, rest = dial.dial(url, routes.STREAM, headers, timeout=timeout, way=way)
    except dial.RefusedError as refused:
        raise _refusal(refused) from None
    stream.open(connection, rest, timeout=timeout)


def begin(
    stream: Stream, url: str, token: str, resolve: Resolver, *, timeout: float, way: Way = DIRECT
) -> None:
    """As `attempt`, for the first time; the token may have ended, then a fresh one is tried."""
    try:
        try:
            attempt(stream, url, token, timeout=timeout, way=way)
        except UnauthorizedError:
            attempt(stream, url, ask(resolve).token, timeout=timeout, way=way)
    except BaseException:
        stream.close()
        raise


def _refusal(refused: dial.RefusedError) -> Exception:
    error = failures.rebuild(failures.parse_json(refused.body))
    if isinstance(error, (UnauthorizedError, VersionMismatchError)):
        return error
    if refused.status == UnauthorizedError.status:
        return UnauthorizedError(str(error))
    if refused.status == VersionMismatchError.status:
        return VersionMismatchError(str(error))
    return UnavailableError(f"the agent answered with status {refused.status}: {error}")


def resume(
    stream: Stream,
    url: str,
    location: Location | None,
    resolve: Resolver,
    closed: threading.Event,
    way: Way = DIRECT,
) -> None:
    """Connect a stream again whose connection broke; runs in the stream's own thread.

    Afterwards the stream has a connection, or has ended and its pending calls with it.

    Args:
        stream: The stream.
        url: The agent that it was connected to.
        location: What was known when the connection broke.
        resolve: Asks where the service is now.
        closed: Ends the attempts.
        way: Leads to the agent.
    """
    backoff = Backoff(way.patience)
    token = location.token if location is not None else ""
    is_fresh = False
    missing_since: float | None = None
    error: Exception | None = ConnectionResetError("the agent closed the connection")
    while stream.calls and not stream.has_ended:
        error = _try(stream, url, token, backoff, way)
        if error is None:
            return
        if isinstance(error, FINAL) and (is_fresh or not isinstance(error, UnauthorizedError)):
            break
        mistake = mistake_in(error)
        if mistake is not None and backoff.is_sure:
            error = mistake
            break
        try:
            found = ask(resolve)
        except UnavailableError:
            found = None
        except FINAL as final:
            error = final
            break
        if found is not None:
            token, is_fresh = found.token, True
            end = _end(stream.pod, url, found, error)
            if end is not None:
                error = end
                break
            if url in found.urls:
                missing_since = None
            elif time.monotonic() - (missing_since := missing_since or time.monotonic()) > _MISSING:
                break
        if not isinstance(error, UnauthorizedError) and not backoff.pause(closed):
            break
    lost = CallLostError(
        f"the connection to pod {stream.pod} broke and could not be made again: {error}",
        hint="what the call did is unknown; kt logs shows what it printed",
    )
    lost.__cause__ = error
    # What the API server says of a pod that it does not reach is how, not what happened.
    is_way = isinstance(error, KubernetesError) and not isinstance(error, MISTAKES)
    stream.end(error if isinstance(error, KubetorchError) and not is_way else lost)


def _end(pod: str, url: str, found: Location, error: Exception) -> KubetorchError | None:
    """Why nobody is there any more, if that is so."""
    if pod in found.ended:
        return found.ended[pod].error(pod)
    if url not in found.urls and isinstance(error, ConnectionRefusedError):
        return AgentDiedError(pod, "AgentDied")
    return None


def _try(stream: Stream, url: str, token: str, backoff: Backoff, way: Way) -> Exception | None:
    try:
        attempt(stream, url, token, timeout=backoff.attempt, way=way)
    except (OSError, websocket.WebSocketError, UnavailableError, KubetorchError) as error:
        return error
    return None
