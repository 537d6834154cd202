"""The route to one service: its pods' addresses, a token, a stream to each pod in use.

A route learns the addresses from its resolver, which asks the controller, and asks again when a pod
cannot be reached. One thread connects for all calls that wait for a connection (`Route.request`); a
connection that breaks while calls are pending is made again by its stream's own thread
(`Connector.resume`).

Each call of an autoscaled service has a connection of its own (`Scaled`), which the scaler counts:

    call ── Stream ══ WebSocket ══ scaler ══ agent of some pod
                └──── once that broke ══════ agent of the same pod

So it is under Knative. Where the controller scales a service, its calls go to its pods as those of
other services, `kubetorch.sdk.calls.pod_watch` waits for further pods, and
`kubetorch.sdk.calls.queued_calls` moves calls to them.

A scaler takes an open connection for a call that runs: it makes pods for them, holds them while
there is no pod, and ends pods that have none. So a connection lives as long as its call. Scalers
cut those that last too long (Knative's after `timeoutSeconds` of the revision): the call goes on in
its pod, where its stream is resumed, past the scaler.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from kubetorch.config.settings import config
from kubetorch.errors import (
    AgentDiedError,
    CallLostError,
    CallRefusedError,
    ConfigError,
    ControllerError,
    ForbiddenError,
    KubernetesError,
    KubernetesForbiddenError,
    KubetorchError,
    PodTerminatedError,
    ProtocolError,
    ServiceNotFoundError,
    UnauthorizedError,
    VersionMismatchError,
)
from kubetorch.lib import processes, terminal, websocket_protocol
from kubetorch.lib.websocket_protocol import UpgradeRefusedError
from kubetorch.sdk.calls import stream as streams
from kubetorch.sdk.calls.pod_watch import PodWatch
from kubetorch.sdk.calls.queued_calls import QueuedCalls
from kubetorch.sdk.calls.stream import Stream
from kubetorch.sdk.logs import CallLines, Screen
from kubetorch.sdk.transport.pod_transport import DIRECT, PodTransport
from kubetorch.sdk.tuning import LIMITS, TIMING
from kubetorch.wire import exceptions, frames, routes, versions
from kubetorch.wire.messages import (
    TERMINATING,
    Ending,
    PodView,
    PodWait,
    WorkloadView,
    called_together,
    last_lines,
)

if TYPE_CHECKING:
    from kubetorch.sdk.transport.session import Session

#: The engine of services that the controller scales.
OWN_ENGINE = "kubetorch"
#: Pods that an error names when none is ready.
_NAMED_PODS = 3


class Scaling(NamedTuple):
    """The bounds of an autoscaled service, for its callers.

    Attributes:
        patience: Seconds that a call waits for a pod.
        slots: Calls that a pod runs at once; `None` if that is unknown, or any number.
        most_pods: The largest number of pods, if that is bounded.
        failure: Why no pod can start.
        reason: Why there are as many pods as there are.
        cause: The failure itself, with its traceback.
        lines: The last lines of a pod that cannot start.
    """

    patience: float
    slots: int | None = None
    most_pods: int | None = None
    failure: str = ""
    reason: str = ""
    cause: Mapping[str, Any] | None = None
    lines: str = ""

    @classmethod
    def of_service(cls, view: WorkloadView) -> Scaling | None:
        """The bounds of a service whose number of pods follows its load; `None` for another one."""
        settings, state, compute = view.spec.compute.autoscaling, view.scaling, view.spec.compute
        is_ours = state is not None and state.engine == OWN_ENGINE
        if not (view.scaler or is_ours):
            return None
        most_pods = None if settings is None else settings.max_scale
        if state is not None and is_ours:
            most_pods = state.maximum or None
        processes = compute.processes
        slots = None if settings is None else settings.concurrency
        if compute.concurrency is not None:
            slots = None if processes is None else compute.concurrency * processes
        is_served = any(pod.is_ready for pod in view.pods)
        failure = {} if is_served else view.failure or {}
        return cls(
            compute.launch_timeout,
            slots,
            most_pods,
            f"{failure.get('error_type')}: {failure.get('message')}" if failure else "",
            "" if state is None else state.reason,
            failure or None,
            last_lines(view.pods),
        )


class Scaler(NamedTuple):
    """The scaler of an autoscaled service, which takes its calls and makes pods for them."""

    url: str
    pods: dict[str, str]


class CalledPods(NamedTuple):
    """The pods that calls of a service go to, as the controller says.

    Attributes:
        together: Ordinals of the pods that each call goes to; `None`: a call goes to one pod.
        present: Ordinals of the pods that the service has.
    """

    together: tuple[int, ...] | None
    present: frozenset[int]

    def leaves_out(self, ordinal: int) -> bool:
        """True if the service does not have such a pod any more, and will not have one."""
        if self.together is not None:
            return ordinal not in self.together
        return bool(self.present) and ordinal not in self.present


class Location(NamedTuple):
    """The pods of a service and their URLs."""

    urls: tuple[str, ...]
    token: str
    ordinals: tuple[int, ...] = ()
    scaler: Scaler | None = None
    pods: Mapping[str, PodView] = MappingProxyType({})
    reason: str = ""
    is_distributed: bool = False
    is_torn_down: bool = False
    called: CalledPods | None = None
    scaling: Scaling | None = None

    @classmethod
    def of_service(cls, session: Session, view: WorkloadView) -> Location:
        """The ready pods in the order of their ordinals, or the scaler that makes pods."""
        endpoint = view.spec.compute.endpoint
        if endpoint is not None and endpoint.base_url is not None:
            return cls((endpoint.base_url,), view.token)
        scaler, spec = None, view.spec
        together = called_together(spec, view.pool)
        called_pods = [
            p for p in view.pods if p.is_ready and (not together or p.ordinal in together)
        ]
        ready = sorted(called_pods, key=lambda pod: pod.ordinal)
        if spec.compute.distribution is not None:
            # Each pod calls the others; always the same one, for it knows the earlier calls.
            ready = ready[:1]
        if view.scaler:
            scaler = Scaler(
                session.transport.scaler(spec.namespace, spec.name, view.scaler),
                {pod.name: session.address(view, pod) for pod in view.pods if pod.url},
            )
        return cls(
            tuple(session.address(view, pod) for pod in ready),
            view.token,
            tuple(pod.ordinal for pod in ready),
            scaler,
            _known_pods(view),
            view.reason,
            view.world is not None,
            view.status == TERMINATING,
            CalledPods(together, frozenset(pod.ordinal for pod in view.pods if pod.ended is None)),
            Scaling.of_service(view),
        )

    def only(self, urls: Iterable[str]) -> Location:
        """The location with the pods of these URLs alone."""
        kept_urls = set(urls)
        remaining = [
            pair for pair in itertools.zip_longest(self.urls, self.ordinals) if pair[0] in kept_urls
        ]
        ordinals = tuple(number for _, number in remaining) if self.ordinals else ()
        urls = tuple(url for url, _ in remaining)
        return self._replace(urls=urls, ordinals=ordinals)

    @property
    def ready_pods(self) -> frozenset[str]:
        """The names of the pods that take calls."""
        return frozenset(pod.name for pod in self.pods.values() if pod.is_ready)

    @property
    def is_whole(self) -> bool:
        """True if all the pods that may take calls have a URL."""
        pod_count = sum(pod.ended is None for pod in self.pods.values())
        return self.is_distributed or len(self.urls) >= pod_count

    def of(self, ordinal: int) -> Location:
        """The location of one pod of the service: without a URL while the pod is not ready."""
        numbered = zip(self.urls, self.ordinals, strict=False)
        pod_urls = tuple(url for url, number in numbered if number == ordinal)
        return Location(
            pod_urls[:1], self.token, (ordinal,), None, self.pods, self.reason, called=self.called
        )

    def absent(self, ordinal: int | None) -> AbsentError:
        """The error that the pod, or without an ordinal no pod, is ready, with the reasons."""
        is_scaled = self.scaling is not None and ordinal is None
        absent_pods = [
            pod
            for pod in self.pods.values()
            if not pod.is_ready
            and ordinal in (None, pod.ordinal)
            # That fewer pods were needed is no reason for which none is ready.
            and not (is_scaled and _has_left(pod))
        ]
        reasons = [f"pod {pod.name}: {_absence_reason(pod)}" for pod in absent_pods[-_NAMED_PODS:]]
        if self.reason:
            reasons.append(self.reason)
        if is_scaled and self.scaling is not None:
            reasons += filter(None, (self.scaling.failure, self.scaling.reason))
        lines = last_lines(absent_pods)
        return AbsentError(
            ("; ".join(reasons) or "none is ready") + lines,
            absent_pods[-1].name if absent_pods else None,
        )


def _known_pods(view: WorkloadView) -> dict[str, PodView]:
    """The pods of a service by name, with the ends of pods that are gone or lost to its world."""
    pod_by_name = {pod.name: pod for pod in (*view.lost, *view.pods)}
    for loss in () if view.world is None else view.world.lost:
        lost_pod = pod_by_name.get(loss.member.pod)
        if lost_pod is not None and lost_pod.ended is None:
            ended = Ending(reason=loss.reason, message=loss.message)
            pod_by_name[lost_pod.name] = replace(lost_pod, ended=ended)
    return pod_by_name


#: Asks the controller where a service is; raises `ServiceNotFoundError` when it is gone.
Resolver = Callable[[], Location]


class UnavailableError(Exception):
    """The pod cannot be reached now, perhaps later."""


class AbsentError(UnavailableError):
    """The controller says that a pod is not ready; the text has the reason."""

    def __init__(self, text: str, pod_name: str | None) -> None:
        super().__init__(text)
        self.pod_name = pod_name


class PodLeftError(CallRefusedError):
    """A service has fewer pods than a handle knows of: nothing ran in the one that is gone."""


def _has_left(pod: PodView) -> bool:
    """True if a pod was deleted, or is about to be."""
    return pod.phase == "Terminating" if pod.ended is None else pod.ended.reason == "Deleted"


def _absence_reason(pod: PodView) -> str:
    if pod.ended is None:
        return pod.reason or pod.phase
    return f"{pod.ended.reason} ({pod.ended.message})" if pod.ended.message else pod.ended.reason


#: Errors that further attempts cannot mend; some of them are an `OSError`, too.
FINAL = (
    ServiceNotFoundError,
    UnauthorizedError,
    ForbiddenError,
    VersionMismatchError,
    ProtocolError,
)
#: Errors that the user has to mend: rights, credentials, settings. A cluster that restarts may
#: raise them, too.
MISTAKES = (KubernetesForbiddenError, ConfigError)
#: Errors of an attempt after which the next one may succeed.
TRANSIENT = (OSError, websocket_protocol.WebSocketError, UnavailableError)


def mistake_in(error: Exception) -> Exception | None:
    """The cause of an attempt's failure that the user has to mend, if there is one."""
    mistakes = (cause for cause in (error, error.__cause__) if isinstance(cause, MISTAKES))
    return next(mistakes, None)


class Backoff:
    """The pauses between attempts, up to a deadline."""

    def __init__(
        self, patience: float, *, longest: float = TIMING.stream_longest_delay_seconds
    ) -> None:
        self._longest = longest
        self._begun = time.monotonic()
        self.deadline = self._begun + patience
        self.last_error: Exception | None = None
        self.is_spent = False
        self._absent_since: float | None = None
        self._delay = TIMING.stream_first_delay_seconds

    def extend(self, deadline: float) -> None:
        self.deadline = max(self.deadline, deadline)

    @property
    def patience(self) -> float:
        """Seconds from its beginning to the deadline."""
        return self.deadline - self._begun

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def is_lasting(self) -> bool:
        """True if the failure was repeated for so long that it will not pass by itself."""
        return time.monotonic() - self._begun > TIMING.starting_server_seconds

    def gives_up_on(self, error: Exception) -> bool:
        """True if pods were absent for so long that another attempt is in vain.

        A controller or pod that cannot be reached may be back any moment.
        """
        now = time.monotonic()
        if not isinstance(error, AbsentError):
            self._absent_since = None
            return False
        self._absent_since = self._absent_since or now
        return now - self._absent_since >= TIMING.direct_patience_seconds

    @property
    def seconds_until_lasting(self) -> float:
        return self._begun + TIMING.starting_server_seconds - time.monotonic()

    @property
    def attempt(self) -> float:
        return max(min(TIMING.stream_attempt_seconds, self.seconds_left), 0.1)

    def pause(self, interrupted: threading.Event) -> bool:
        """Wait before the next attempt; false when there is none."""
        seconds_left = self.seconds_left
        if seconds_left <= 0:
            self.is_spent = True
        if self.is_spent or interrupted.wait(min(self._delay, seconds_left)):
            return False
        self._delay = min(self._delay * 2, self._longest)
        return True


class Connector:
    """Connects streams: for the first time, and again when their connection breaks."""

    def __init__(
        self, service: str, resolve: Resolver, transport: PodTransport, closed: threading.Event
    ) -> None:
        self.transport = transport
        #: Ends every pause.
        self.closed = closed
        self._service = service
        self._resolve = resolve
        #: True once a pod was reached.
        self._was_reached = False

    def ask(self) -> Location:
        try:
            location = Location(*self._resolve())
        except ServiceNotFoundError as not_found:
            is_known = not self._was_reached or not_found.reason
            raise not_found if is_known else self.torn_down() from not_found.__cause__
        except FINAL:
            raise
        except (ControllerError, KubernetesError, ConfigError) as error:
            raise UnavailableError(str(error)) from error
        if location.is_torn_down:
            raise self.torn_down(location.reason)
        return location

    def torn_down(self, reason: str = "") -> ServiceNotFoundError:
        """The error that the service is gone, although it was there."""
        return ServiceNotFoundError(
            f"the service {self._service} was torn down while it was called"
            + (f": {reason}" if reason else ""),
            hint="deploy it again with .to(kt.Compute(...))",
        )

    def begin(self, stream: Stream, url: str, token: str, *, timeout: float) -> None:
        """Connect a stream for the first time; an expired token is replaced once."""
        try:
            try:
                self._attempt(stream, url, token, timeout)
            except UnauthorizedError:
                self._attempt(stream, url, self.ask().token, timeout)
        except BaseException:  # Ctrl-C too: no one else could close the stream
            stream.close()
            raise
        self._was_reached = True

    def _attempt(self, stream: Stream, url: str, token: str, timeout: float) -> None:
        headers = {
            routes.AUTHORIZATION: f"Bearer {token}",
            routes.PROTOCOL: str(versions.PROTOCOL),
            routes.CLIENT: stream.id,
        }
        stream.authorization = headers[routes.AUTHORIZATION]
        if stream.incarnation:
            headers[routes.RESUME] = f"{stream.incarnation}:{stream.received}"
        try:
            opened, rest = streams.dial(
                url, routes.STREAM, headers, timeout=timeout, transport=self.transport
            )
        except UpgradeRefusedError as refused:
            raise _upgrade_error(refused) from None
        stream.open(opened, rest, timeout=timeout)

    def resume(self, stream: Stream, url: str, location: Location | None) -> None:
        """Connect a stream again whose connection broke; runs in the stream's own thread.

        Afterwards the stream has a connection, or has ended and its pending calls with it.
        """
        # Asking first and often finds a lost rank when the controller knows it, not by timeouts.
        is_asked = is_distributed = location is not None and location.is_distributed
        longest, delay = (
            (TIMING.rank_attempt_seconds, TIMING.rank_longest_delay_seconds)
            if is_distributed
            else (TIMING.stream_attempt_seconds, TIMING.stream_longest_delay_seconds)
        )
        backoff = Backoff(self.transport.patience, longest=delay)
        token = location.token if location is not None else ""
        is_fresh = False
        missing_since: float | None = None
        error: Exception | None = ConnectionResetError("the agent closed the connection")
        while stream.calls and not stream.has_ended:
            if not is_asked:
                error = self._try(stream, url, token, min(backoff.attempt, longest))
            if error is None:
                return
            is_asked = False
            if isinstance(error, FINAL) and (is_fresh or not isinstance(error, UnauthorizedError)):
                break
            mistake = mistake_in(error)
            if mistake is not None and backoff.is_lasting:
                error = mistake
                break
            try:
                new_location = self.ask()
            except UnavailableError:
                new_location = None
            except FINAL as final:
                error = final
                break
            if new_location is not None:
                token, is_fresh = new_location.token, True
                now = time.monotonic()
                missing_since = None if url in new_location.urls else missing_since or now
                missing = None if missing_since is None else now - missing_since
                end = _end_error(new_location.pods.get(stream.pod), stream.pod, error, missing)
                if end is not None:
                    error = end
                    break
                if missing is not None and missing > TIMING.unknown_pod_seconds:
                    break
            if not isinstance(error, UnauthorizedError) and not backoff.pause(self.closed):
                break
        stream.end(_loss_error(stream.pod, error))

    def _try(self, stream: Stream, url: str, token: str, timeout: float) -> Exception | None:
        try:
            self._attempt(stream, url, token, timeout)
        except (*TRANSIENT, KubetorchError) as error:
            return error
        return None


def _upgrade_error(refused: UpgradeRefusedError) -> Exception:
    error = exceptions.rebuild(exceptions.parse_json(refused.body))
    for error_type in (UnauthorizedError, VersionMismatchError):
        if isinstance(error, error_type):
            return error
        if refused.status == error_type.status:
            return error_type(str(error))
    return UnavailableError(f"the agent answered with status {refused.status}: {error}")


def _end_error(
    pod_view: PodView | None, pod: str, error: Exception, missing: float | None
) -> KubetorchError | None:
    """The error of a pod that has ended; `None` if it may still run.

    `missing`: the seconds for which the controller has sent calls elsewhere, if it does.
    """
    if pod_view is not None and pod_view.ended is not None:
        return pod_view.ended.error(pod)
    if missing is None or not isinstance(error, ConnectionRefusedError):
        return None
    # A kubelet reports the reason a second later; for a process of this machine there is none.
    is_unsaid = pod_view is not None and pod_view.phase == "Unknown" and pod_view.pid is None
    return (
        None
        if is_unsaid and missing < TIMING.pod_end_reason_seconds
        else AgentDiedError(pod, "AgentDied")
    )


def _loss_error(pod: str, error: Exception | None) -> Exception:
    # The API server's error about a pod that it cannot reach is about the connection, and says
    # nothing about the call.
    is_about_transport = isinstance(error, KubernetesError) and not isinstance(error, MISTAKES)
    if isinstance(error, KubetorchError) and not is_about_transport:
        return error
    lost = CallLostError(
        f"the connection to pod {pod} broke and could not be made again: {error}",
        hint="the effect of the call is unknown; kt logs shows its output",
    )
    lost.__cause__ = error
    return lost


def _check_can_start(service: str, scaling: Scaling | None, backoff: Backoff) -> None:
    """Refuse a call of a service without pods that can start, once that was so for a while."""
    if scaling is None or not scaling.failure or not backoff.is_lasting:
        return
    refused = CallRefusedError(
        f"no pod of {service} can start: {scaling.failure}{scaling.lines}",
        hint=f"kt describe {service}",
    )
    failure = None if scaling.cause is None else exceptions.parse(dict(scaling.cause))
    if failure is not None:
        refused.pod_name, refused.remote_traceback = failure.pod_name, failure.traceback or None
    raise refused from None if failure is None else exceptions.rebuild(failure)


class Scaled:
    def __init__(self, service: str, connector: Connector, ping_after: float) -> None:
        self._service = service
        self._connector = connector
        self._ping_after = ping_after
        self._lock = threading.Lock()
        self._streams: list[Stream] = []

    def connect(self, location: Location, scaler: Scaler, backoff: Backoff) -> Stream:
        _check_can_start(self._service, location.scaling, backoff)
        stream = Stream(self._resume, ping_after=self._ping_after, is_single=True)
        with self._lock:
            self._streams = [
                open_stream for open_stream in self._streams if not open_stream.has_ended
            ]
            self._streams.append(stream)
        timeout = max(min(TIMING.scaler_hold_seconds, backoff.seconds_left), 0.1)
        self._connector.begin(stream, scaler.url, location.token, timeout=timeout)
        return stream

    def drop(self) -> list[Stream]:
        self._lock = threading.Lock()  # a forked child may have found it held
        streams, self._streams = self._streams, []
        return streams

    def _resume(self, stream: Stream) -> None:
        """Connect a stream to the pod that its call runs in."""
        usual = self._connector

        def resolve() -> Location:
            service_location = usual.ask()
            pods = {} if service_location.scaler is None else service_location.scaler.pods
            url = pods.get(stream.pod)
            return Location(
                () if url is None else (url,), service_location.token, pods=service_location.pods
            )

        connector = Connector(self._service, resolve, usual.transport, usual.closed)
        backoff = Backoff(usual.transport.patience)
        while stream.calls and not stream.has_ended:
            try:
                location = connector.ask()
            except UnavailableError as error:
                if not backoff.pause(usual.closed):
                    stream.end(
                        PodTerminatedError(
                            stream.pod, f"the address of the pod is unknown: {error}"
                        )
                    )
                continue
            except FINAL as error:
                stream.end(error)
                return
            pod_view = location.pods.get(stream.pod)
            if pod_view is not None and pod_view.ended is not None:
                stream.end(pod_view.ended.error(stream.pod))
                return
            if not location.urls:
                hint = (
                    "autoscaled services lose pods when there is little to do; retries=1 makes a "
                    "call again, and min_scale keeps pods"
                )
                stream.end(PodTerminatedError(stream.pod, "Gone", hint=hint))
                return
            connector.resume(stream, location.urls[0], location)
            return


class Connected(NamedTuple):
    """The result of a `Request`: its own stream, `None` where calls share streams, or an error."""

    stream: Stream | None
    error: BaseException | None
    #: True if the error is that the time of all waiting calls was over.
    is_spent: bool


class _Attempt:
    """An attempt to connect, for all waiting requests, each of which has its own deadline."""

    def __init__(self, backoff: Backoff) -> None:
        self.backoff = backoff
        self.requests: dict[Request, None] = {}
        #: Notes that the number of requests has changed, while they wait for a pod.
        self.on_change: Callable[[], object] | None = None

    def join(self, request: Request) -> None:
        request.attempt = self
        self.requests[request] = None
        self.backoff.extend(request.deadline)
        self.changed()

    def changed(self) -> None:
        if self.on_change is not None:
            self.on_change()


class Request:
    """A call waits for a connection; `deliver` is called by the thread that connects."""

    attempt: _Attempt

    def __init__(
        self, route: Route, patience: float, deliver: Callable[[Connected], object]
    ) -> None:
        self.deliver = deliver
        self.deadline = time.monotonic() + patience
        self._route = route
        self._patience = patience

    def cancel(self) -> None:
        self.attempt.requests.pop(self, None)
        self.attempt.changed()

    def refusal(self) -> CallRefusedError:
        return self._route.refusal(self._patience, self.attempt.backoff.last_error)


class Route:
    """The route to the pods of one service.

    Its streams are closed at exit, and dropped in forked children.
    """

    def __init__(
        self,
        service: str,
        resolve: Resolver,
        location: Location | None = None,
        *,
        ping_after: float = TIMING.stream_ping_seconds,
        ordinal: int | None = None,
        transport: PodTransport = DIRECT,
        wait: Callable[[PodWait], Location] | None = None,
    ) -> None:
        self._connector = Connector(service, resolve, transport, threading.Event())
        #: The session with the controller of the service, if it has one of its own.
        self.session: Session | None = None
        #: The instance of a class that answered last, where all calls go to one pod.
        self.instance: str | None = None
        #: Reports of pods about their code that were shown.
        self._reported_texts: set[str] = set()
        self.service = service
        self.ordinal = ordinal
        #: Where lines from its pods go.
        self.screen = Screen()
        #: `kt.config.stream_logs` and its revision: reading it costs a tenth of a call.
        self._shown = (-1, True)
        #: The same of `kt.config.post_mortem`.
        self._post_mortem = (-1, False)
        #: Routes to single pods, by ordinal.
        self._pods: dict[int, Route] = {}
        self._called = None if location is None else location.called
        self._scaling = None if location is None else location.scaling
        self._ready_pods = frozenset() if location is None else location.ready_pods
        #: Waits for further pods of a service that the controller scales.
        self._wait = wait
        self._new_growth()
        #: Ancestors of calls that the controller does not know as pods of the service.
        self._unknown_ancestors: set[str] = set()
        self._ping_after = ping_after
        self._location = location
        self._streams: dict[str, Stream] = {}
        #: Streams that take no more calls, but may have running ones.
        self._leaving: list[Stream] = []
        self._scaled = Scaled(service, self._connector, ping_after)
        #: True if this program tore the service down.
        self._is_torn_down = False
        self._turn = 0
        #: The time of the next check for missing pods.
        self._check_pods_at: float | None = None
        self._connecting = threading.Lock()
        self._requesting = threading.Lock()
        self._attempt: _Attempt | None = None
        processes.at_exit(self.close)
        processes.at_fork(self.abandon)

    @property
    def patience(self) -> float:
        """Seconds that a call waits for a pod."""
        usual, scaling = self._connector.transport.patience, self._scaling
        return usual if scaling is None else max(usual, scaling.patience)

    @property
    def _scaler(self) -> Scaler | None:
        return None if self._location is None else self._location.scaler

    @property
    def slots(self) -> int | None:
        """The calls that a scaler lets into a pod at one time; `None` without such a bound."""
        return None if self._scaler is None else self._slots

    @property
    def scale(self) -> int:
        """The calls that fit into as many pods as there may be, where that is bounded; else 0."""
        scaling = self._scaling
        return 0 if scaling is None else (scaling.most_pods or 0) * (scaling.slots or 1)

    @property
    def is_growing(self) -> bool:
        """True if the controller makes pods for calls that wait."""
        return self._scaling is not None and self._scaler is None and self._wait is not None

    @property
    def _slots(self) -> int | None:
        return None if self._scaling is None else self._scaling.slots or None

    @property
    def shows_logs(self) -> bool:
        """True if lines of calls without an option of their own are shown."""
        if self._shown[0] != config.revision:
            self._shown = (config.revision, config.stream_logs)
        return self._shown[1]

    @property
    def has_post_mortem(self) -> bool:
        """True if calls without an option of their own stop at errors."""
        if self._post_mortem[0] != config.revision:
            self._post_mortem = (config.revision, config.post_mortem)
        return self._post_mortem[1]

    @property
    def shares_streams(self) -> bool:
        """True if calls share connections; those of an autoscaled service do not."""
        return self._scaler is None

    # ------------------------------------------------------------------------------- streams

    def stream(self) -> Stream | None:
        """An open stream to the pod whose turn it is; `None` when one has to be connected."""
        location = self._location
        if location is None or location.scaler is not None:
            return None
        if self._check_pods_at is not None and time.monotonic() >= self._check_pods_at:
            self._check_pods_at = None
            threading.Thread(
                target=self._connect_missing_pods, name="kubetorch-connect", daemon=True
            ).start()
        urls = location.urls
        if self.is_growing:
            return self._least_busy_of_growing(urls)
        if len(urls) == 1:
            stream = self._streams.get(urls[0])
            return stream if stream is not None and stream.accepts_calls else None
        return self._least_busy(urls)

    def streams(self) -> list[Stream]:
        """The open streams to all pods; none when one has to be connected, or calls share none.

        Repeated calls find new pods.
        """
        if self.is_growing:
            self._watch.want()
        elif self._check_pods_at is None:
            self._check_pods_at = time.monotonic() + TIMING.pod_check_seconds
        location = self._location if self.stream() is not None else None
        if location is None:
            return []
        streams = self._streams  # another thread may put others in its place
        return [streams[url] for url in location.urls if url in streams]

    def connect(self, patience: float | None = None) -> Stream:
        """A stream that takes calls, waiting for a pod that can be reached."""
        patience = self.patience if patience is None else patience
        return self._connect_within(Backoff(patience), lambda: 1)

    def request(self, patience: float, deliver: Callable[[Connected], object]) -> Request:
        """Connect in a thread: all that wait at the same time share it."""
        request = Request(self, patience, deliver)
        with self._requesting:
            attempt = self._attempt
            if attempt is not None and self.shares_streams:
                attempt.join(request)
                return request
            attempt = _Attempt(Backoff(patience))
            attempt.join(request)
            watch = self._watch
            attempt.on_change = lambda: watch.recount(attempt.backoff, len(attempt.requests))
            if self.shares_streams:
                self._attempt = attempt
            thread = threading.Thread(
                target=self._connect_for, args=(attempt,), name="kubetorch-connect", daemon=True
            )
            try:
                thread.start()
            except BaseException:  # Ctrl-C too: calls would join an attempt without a thread
                self._attempt = None
                raise
        return request

    def pod(self, ordinal: int) -> Route:
        """The route to the pod with this ordinal, whichever it is at the time of a call."""
        pod_route = self._pods.get(ordinal)
        if pod_route is None:
            location = self._location
            new_route = Route(
                self.service,
                lambda: self._ask().of(ordinal),
                None if location is None else _if_reachable(location.of(ordinal)),
                ping_after=self._ping_after,
                ordinal=ordinal,
                transport=self._connector.transport,
            )
            new_route.screen = self.screen
            new_route.session = self.session
            pod_route = self._pods.setdefault(ordinal, new_route)
        return pod_route

    def of(self, stream: Stream) -> Route:
        """The route to the one pod of a stream, which knows the instance in that pod."""
        location = self._location
        numbered = () if location is None else zip(location.urls, location.ordinals, strict=False)
        numbers = (number for url, number in numbered if self._streams.get(url) is stream)
        ordinal = next(numbers, None)
        return self if ordinal is None else self.pod(ordinal)

    def nearest(self, pods: Iterable[str]) -> Route | None:
        """The route to the first of these pods that is a pod of the service; `None` without one."""
        location = self._location
        pods_by_name = {} if location is None else location.pods
        views = (pods_by_name[name] for name in pods if name in pods_by_name)
        return next((self.pod(view.ordinal) for view in views if view.ended is None), None)

    def find_ancestors(self, pods: Iterable[str]) -> None:
        """Ask for the pods of the service if these may belong to it, and are newer than the route.

        Pods of services whose number follows the load come and go while a program runs.
        """
        location = self._location
        if self._scaling is None or location is None:
            return
        prefix = f"{self.service}-"
        new_pods = {name for name in pods if name.startswith(prefix)} - location.pods.keys()
        if new_pods <= self._unknown_ancestors:
            return
        try:
            self.locate(self._ask())
        except (UnavailableError, *FINAL):
            return
        self._unknown_ancestors |= new_pods

    def locate(self, location: Location | None) -> None:
        """Use this location from now on; `None`: ask before the next connection."""
        self._location = location
        if location is not None:
            self._note(location)
        for ordinal, pod in self._pods.items():
            pod.locate(None if location is None else _if_reachable(location.of(ordinal)))

    def called_together(self, default: tuple[int, ...]) -> tuple[int, ...] | None:
        """Ordinals of the pods that a call goes to, as last reported; else `default`."""
        return default if self._called is None else self._called.together

    def _ask(self) -> Location:
        location = self._connector.ask()
        self._note(location)
        return location

    def _note(self, location: Location) -> None:
        """Remember the part of a location that holds also while it is not known."""
        self._called = location.called or self._called
        if self.ordinal is None:
            self._scaling, self._ready_pods = location.scaling, location.ready_pods

    def accept(self, view: WorkloadView) -> None:
        """Use the location that the controller described."""
        assert self.session is not None
        self.locate(Location.of_service(self.session, view))

    def answered(self, instance: str | None) -> None:
        location = self._location
        if location is None or (location.scaler is None and len(location.urls) == 1):
            self.instance = instance

    def log(self, line: frames.Log, lines: CallLines) -> None:
        """Show a line of a call, or its report about the code or the instance of its pod."""
        if line.origin is not None:
            text = line.text[: LIMITS.code_report_characters]
            if text not in self._reported_texts and len(self._reported_texts) < LIMITS.code_reports:
                self._reported_texts.add(text)
                terminal.say_once(f"{self.service} {text}")
            return
        instance = line.instance
        if instance is None or instance != self.instance:
            lines.log(line)
        if instance is not None:
            self.answered(instance)

    def pause(self, delay: float) -> None:
        self._connector.closed.wait(delay)

    @property
    def is_closed(self) -> bool:
        """True if nothing is sent on the route any more."""
        return self._connector.closed.is_set()

    def close(self, *, is_torn_down: bool = False) -> None:
        """Close all streams: plain calls that run are cancelled."""
        self._is_torn_down = is_torn_down
        self._connector.closed.set()
        for pod in self._drop_pods():
            pod.close(is_torn_down=is_torn_down)
        error = self._connector.torn_down() if is_torn_down else None
        for stream in self._drop_streams():
            stream.close(error)

    def abandon(self) -> None:
        self._connecting = threading.Lock()
        self._connector.closed = threading.Event()
        self._requesting = threading.Lock()
        self._attempt = None
        for pod in self._drop_pods():
            pod.abandon()
        for stream in self._drop_streams():
            stream.abandon()
        self._new_growth()

    # --------------------------------------------------- services that the controller scales

    def _new_growth(self) -> None:
        closed = self._connector.closed
        self._watch = PodWatch(self._wait_for_pods, lambda: self._ready_pods, closed)
        #: Called by any thread when there are streams to further pods.
        self.on_new_pods: set[Callable[[], object]] = set()
        #: Calls that wait in the queues of pods.
        self.queued_calls = QueuedCalls(
            self._open_streams, lambda: self._slots, self._watch.want, closed
        )

    def note_waiting(self, source: Hashable, count: int) -> None:
        """Note how many calls of a source have no pod, which is load of the service."""
        self._watch.note(source, count)

    def _open_streams(self) -> list[Stream]:
        location, streams = self._location, self._streams
        urls = () if location is None else location.urls
        open_streams = (streams[url] for url in urls if url in streams)
        return [stream for stream in open_streams if stream.accepts_calls]

    def _least_busy_of_growing(self, urls: tuple[str, ...]) -> Stream | None:
        """The least busy of the pods that still take calls; the watch finds out about others."""
        open_streams = self._open_streams()
        if len(open_streams) < len(urls) and self._check_pods_at is None:
            self._check_pods_at = time.monotonic() + TIMING.pod_check_seconds
        if not open_streams:
            return None
        self._turn += 1
        turn = self._turn % len(open_streams)
        least_busy = min(open_streams[turn:] + open_streams[:turn], key=lambda each: each.load)
        if least_busy.load:
            self._watch.want()
        return least_busy

    def _wait_for_pods(self, wait: PodWait) -> frozenset[str]:
        """Send a wait, and connect to the pods that are ready then; returns their names."""
        assert self._wait is not None
        location = Location(*self._wait(wait))
        self._note(location)
        if not wait.seconds or location.is_torn_down:
            return location.ready_pods
        streams = set(self._streams.values())
        if location.urls:
            with self._connecting:
                try:
                    self._connect(location, Backoff(TIMING.stream_attempt_seconds))
                except (*TRANSIENT, KubetorchError):
                    pass  # a call that connects gets the error
        if not streams.issuperset(self._streams.values()):
            self.queued_calls.balance()
            for notify in self.on_new_pods.copy():
                notify()
        if self.is_closed:
            self.close(is_torn_down=self._is_torn_down)
        return location.ready_pods

    def _await_pods(self, backoff: Backoff, count: int, seen: int) -> bool:
        """Wait until the controller has news of the pods; false at the deadline."""
        scaling, watch = self._scaling, self._watch
        _check_can_start(self.service, scaling, backoff)
        seconds = min(backoff.seconds_left, TIMING.pod_wait_seconds)
        if seconds <= 0 or self.is_closed:
            return False
        if scaling is not None and scaling.failure:
            seconds = min(seconds, max(backoff.seconds_until_lasting, 0.0) + 0.01)
        watch.note(backoff, count)
        watch.await_answer(seen, seconds)
        return True

    def _drop_pods(self) -> list[Route]:
        pods = list(self._pods.values())
        self._pods.clear()
        return pods

    def _drop_streams(self) -> list[Stream]:
        streams = [*self._streams.values(), *self._leaving, *self._scaled.drop()]
        self._streams.clear()
        self._leaving.clear()
        return streams

    # ---------------------------------------------------------------------------- connecting

    def _connect_within(self, backoff: Backoff, count_calls: Callable[[], int]) -> Stream:
        """A stream for so many calls, which may become fewer meanwhile."""
        try:
            return self._connect_until(backoff, count_calls)
        finally:
            if self.is_growing:
                self._watch.note(backoff, 0)

    def _connect_until(self, backoff: Backoff, count_calls: Callable[[], int]) -> Stream:
        while True:
            answers = self._watch.answers
            try:
                return self._acquire_stream(backoff)
            except FINAL:
                raise
            except TRANSIENT as failed:
                backoff.last_error = error = failed
                mistake = mistake_in(failed)
                if mistake is not None and backoff.is_lasting:
                    raise mistake from None
                call_count = count_calls()
                if self.is_growing and isinstance(failed, AbsentError) and call_count:
                    if self._await_pods(backoff, call_count, answers):
                        continue
                    backoff.is_spent = True
                elif backoff.gives_up_on(failed):
                    raise self.refusal(TIMING.direct_patience_seconds, failed) from failed
            if not count_calls() or not backoff.pause(self._connector.closed):
                refusal = self.refusal(backoff.patience, error)
                raise self._connector.torn_down() if self._is_torn_down else refusal from error

    def refusal(self, patience: float, error: Exception | None) -> CallRefusedError:
        seconds = f"{patience:.0f}" if patience >= 9.95 else f"{patience:.2g}"
        pod_text = "" if self.ordinal is None else f"with the number {self.ordinal} "
        reason = "" if error is None else f": {error}"
        refused = CallRefusedError(
            f"no pod {pod_text}of {self.service} could be reached within {seconds} s{reason}",
            hint=f"kt status {self.service}",
        )
        if isinstance(error, AbsentError):
            refused.pod_name = error.pod_name
        return refused

    def _least_busy(self, urls: tuple[str, ...]) -> Stream | None:
        best: Stream | None = None
        self._turn += 1
        for step in range(len(urls)):
            stream = self._streams.get(urls[(self._turn + step) % len(urls)])
            if stream is None or not stream.accepts_calls:
                return None
            if best is None or stream.load < best.load:
                best = stream
        return best

    def most_calls(self, stream: Stream) -> int | None:
        """The number of calls up to which this pod may take one more: another pod has so many.

        `None`: there is no other pod.
        """
        streams, location = self._streams, self._location  # another thread may put others there
        urls = () if location is None else location.urls
        open_streams = [streams[url] for url in urls if url in streams]
        return min(
            (open_stream.load for open_stream in open_streams if open_stream is not stream),
            default=None,
        )

    def _acquire_stream(self, backoff: Backoff) -> Stream:
        """The stream that calls share, or with a scaler a stream for a single call."""
        with self._connecting:
            stream = self.stream()
            if stream is not None:
                return stream
            location = self._location
            if location is None or not location.token:  # the error names a missing right
                location = self._ask()
            scaler = location.scaler
            if scaler is None:
                return self._connect(location, backoff)
            self._location = location
        try:
            return self._scaled.connect(location, scaler, backoff)
        except BaseException:  # Ctrl-C too: the scaler may be what was wrong
            self._location = None
            raise

    def _connect(self, location: Location, backoff: Backoff) -> Stream:
        """Connect to every pod without a stream; returns one of the streams."""
        called, ordinal = location.called, self.ordinal
        if called is not None and ordinal is not None and called.leaves_out(ordinal):
            self._location = None
            raise PodLeftError(
                f"{self.service} has no pod with the number {ordinal} any more",
                hint=f"kt status {self.service} shows its pods",
            )
        reached: dict[str, Stream] = {}
        error: Exception = location.absent(self.ordinal)
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
        # Pods that were not reached are left out until `_connect_missing_pods`.
        self._location = reachable = location.only(reached) if reached else None
        is_whole = reachable is None or reachable.is_whole or self.ordinal is not None
        self._check_pods_at = None if is_whole else time.monotonic() + TIMING.pod_check_seconds
        if not reached:
            raise error
        return next(iter(reached.values()))

    def _connect_missing_pods(self) -> None:
        """Connect to missing pods, in a thread: calls go to the other pods meanwhile."""
        with self._connecting:
            try:
                self._connect(self._ask(), Backoff(TIMING.stream_attempt_seconds))
            except (*TRANSIENT, KubetorchError):
                self._check_pods_at = time.monotonic() + TIMING.pod_check_seconds
        if self.is_closed:
            self.close(is_torn_down=self._is_torn_down)

    def _open(self, url: str, location: Location, backoff: Backoff) -> Stream:
        ping_after = self._ping_after
        if location.is_distributed:
            is_direct = self._connector.transport is DIRECT
            ping_after = min(
                ping_after,
                TIMING.rank_ping_seconds if is_direct else TIMING.forwarded_rank_ping_seconds,
            )
        stream = Stream(lambda broken: self._resume(broken, url), ping_after=ping_after)
        self._connector.begin(stream, url, location.token, timeout=backoff.attempt)
        return stream

    def _resume(self, stream: Stream, url: str) -> None:
        self._connector.resume(stream, url, self._location)

    def _connect_for(self, attempt: _Attempt) -> None:
        stream: Stream | None = None
        error: BaseException | None = None
        try:
            stream = self._connect_within(attempt.backoff, lambda: len(attempt.requests))
        except BaseException as failed:  # noqa: BLE001  # it is raised where the calls are made
            error = failed
        with self._requesting:
            if self._attempt is attempt:
                self._attempt = None
            requests, attempt.requests = attempt.requests, {}
        # The stream of an autoscaled service is for one call; other requests begin again.
        single_stream = stream if stream is not None and stream.is_single else None
        for request in requests:
            request.deliver(Connected(single_stream, error, attempt.backoff.is_spent))
            single_stream = None
        if single_stream is not None:
            single_stream.close()


def _if_reachable(location: Location) -> Location | None:
    """The location if it has a URL; `None` has the controller asked."""
    return location if location.urls else None
