"""One call as its caller sees it: its frames, the meaning of events, and the next attempt.

Nothing here waits: `kubetorch.sdk.calls.call.Call` hands every event to `Invocation.step` and
follows the result.
"""

from __future__ import annotations

import copy
import re
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from kubetorch.errors import (
    AgentDiedError,
    CallLostError,
    CallRefusedError,
    CallTimeoutError,
    InstanceReplacedError,
    PodTerminatedError,
    ProtocolError,
    QueueFullError,
    ReferenceLostError,
    SerializationError,
    WorkerDiedError,
    WorkerMembershipChanged,
)
from kubetorch.sdk.calls.options import CallOptions
from kubetorch.sdk.calls.route import Route
from kubetorch.sdk.calls.stream import Stream
from kubetorch.sdk.calls.stream_writer import EXPIRED, LOST, Buffer, Event, PendingCall
from kubetorch.sdk.debugger.breakpoints import DebugConfig
from kubetorch.sdk.deploys.source import ProjectRef, explain_missing
from kubetorch.sdk.logs import CallLines
from kubetorch.sdk.tuning import LIMITS, TIMING
from kubetorch.specs import hints
from kubetorch.specs.callable import CALLABLES
from kubetorch.specs.logging import LoggingConfig
from kubetorch.wire import (
    calls,
    codecs,
    exceptions,
    frames,
    introspection,
    rank_values,
    references,
    retries,
)
from kubetorch.wire.debugger import Debugging
from kubetorch.wire.frames import Kind
from kubetorch.wire.messages import TORN_DOWN
from kubetorch.wire.references import Named

if TYPE_CHECKING:
    from kubetorch.sdk.debugger.terminal import CallerTerminals

#: Errors of a pod that is gone; in a distributed call its ranks are gone with it.
_LOSSES = (PodTerminatedError, CallLostError)
#: Python's error about a keyword that a function does not take.
_REFUSED_KEYWORD = re.compile(
    r"(?:.*\.)?(?P<function>\w+)\(\) got an unexpected keyword argument '(?P<keyword>\w+)'.*"
)
#: Refusals of calls that may be taken a little later, or by another pod.
_LATER = (CallRefusedError, PodTerminatedError, WorkerDiedError)

_RESULT, _YIELD, _ERROR, _LOG, _PROGRESS, _QUEUED, _BEGUN = map(
    int, (Kind.RESULT, Kind.YIELD, Kind.ERROR, Kind.LOG, Kind.PROGRESS, Kind.QUEUED, Kind.BEGUN)
)


@dataclass(frozen=True)
class Target:
    namespace: str
    service: str
    callable: str
    method: str | None = None
    kind: Literal["function", "generator", "async_generator"] = "function"
    declared: frozenset[str] = frozenset()
    modules: Mapping[str, str] = field(default_factory=dict)
    allowed: tuple[str, ...] | None = None
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    broadcast: tuple[int, ...] | None = None
    #: True if a call goes to the least busy pod, and the ordinals of all pods, if they are known.
    is_balanced: bool = False
    pods: tuple[int, ...] = ()
    #: True if the service bounds how many calls run at once.
    is_bounded: bool = False
    is_distributed: bool = False
    #: Items of a map that a pod should have: enough for two full batches in each of its processes.
    pod_items: int = 0
    origin: str | None = None
    project: ProjectRef | None = None

    @property
    def name(self) -> str:
        """The name for users, such as `Counter.add`."""
        return f"{self.callable}.{self.method}" if self.method else self.callable


@dataclass(slots=True, eq=False)
class Done:
    value: object
    error: Exception | None = None
    is_streamed: bool = False


@dataclass(slots=True, eq=False)
class Yielded:
    """The call is a generator that has a value."""

    value: object


@dataclass(slots=True)
class RetryAfter:
    delay: float


#: The meaning of an event; `None`: wait for the next one.
Step = Done | Yielded | RetryAfter | None


class RankValues(list[Any]):
    """The values of the ranks of a distributed service, in rank order.

    Attributes:
        ranks: The rank of each value.
        ended: Ranks whose generator returned its value, and did not yield it.
    """

    def __init__(
        self, segments: Sequence[Buffer], modules: Mapping[str, str], requested_codec: str
    ) -> None:
        entries = rank_values.unpack(segments)
        for entry in entries:
            codecs.check_answer(entry.codec, requested_codec)
        values = (codecs.decode(entry.codec, entry.segments, modules=modules) for entry in entries)
        super().__init__(values)
        self.ranks = [entry.rank for entry in entries]
        self.ended = frozenset(entry.rank for entry in entries if entry.is_streamed)


class Invocation:
    """One call, over all attempts to make it."""

    #: When to stop waiting, even for the agent's own timeout; `None` while it has not begun.
    expires: float | None = None
    _key: str | None = None
    _request_id: str | None = None
    #: The number of attempts that may follow, and the number of this attempt.
    _retries = 0
    _attempts = 1
    _delay = TIMING.call_first_delay_seconds
    _has_yielded = False
    _lines: CallLines | None = None
    _instance: str | None = None
    #: The identity that all calls of a broadcast share, if the service bounds its calls; and
    #: true once this call has begun to run.
    collective = ""
    has_begun = False
    #: When it began to wait in the queue of a pod for the first time.
    _queued_at: float | None = None
    #: False if a pickled answer is refused also where the arguments are a pickle.
    takes_pickle = True
    #: True for an item of a map without a window: by default a process runs one at a time.
    is_item = False
    #: Its number among the items of a map.
    item: int | None = None
    #: Identity of that map, if its pod is to measure how the items use the processor.
    map_id = ""
    #: True once its pod was asked to give it back, unless it has begun.
    is_taken_back = False
    #: True if the process ended that ran the attempt before.
    _lost_its_worker = False
    # How often its pod lacked the value of a reference.
    _lacks = 0
    #: When the line of its pod was full for the first time.
    _refused_at: float | None = None
    #: When and where it was sent, and true if its pod reports when it begins.
    _sent_at = 0.0
    _sent_on: Stream | None = None
    #: True if it is under way in one of several pods, any of which may take it; and the number of
    #: pods that refused it because another one is less busy.
    _is_placed = False
    _passes = 0
    #: Pods in which its ancestors hold slots, the nearest first; and true if it goes to one.
    _ancestor_pods: tuple[str, ...] = ()
    _is_with_ancestor = False
    #: The sessions of debuggers that have the call, what is left of its time meanwhile, and the
    #: terminals of them that are this program's.
    _debuggers: frozenset[str] = frozenset()
    _seconds_left: float | None = None
    _here: CallerTerminals | None = None

    def __init__(
        self,
        target: Target,
        route: Route,
        options: CallOptions,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        *,
        is_detached: bool = False,
    ) -> None:
        options.check_ranks(target.service, is_distributed=target.is_distributed)
        codec = options.serialization or codecs.usual(target.allowed)
        if target.allowed is not None:
            codecs.check_allowed(codec, target.allowed)
        calls.check_arguments(codecs.buffer_bytes((*args, *kwargs.values())))
        self._encode(codec, {"args": args, "kwargs": kwargs})
        calls.check_arguments(self.body.total)
        self.target = target
        self._keywords = kwargs.keys()
        #: The route to all pods of the service.
        self.service_route = route
        self.route = route
        is_any = options.is_for_any and not target.is_distributed
        #: True if the least busy pod takes it.
        self.is_balanced = target.is_balanced or is_any
        #: Ordinals of the pods that it goes to, if it is a broadcast; the service may have fewer
        #: pods than when the target was described.
        broadcast_pods = target.broadcast
        self.broadcast = (
            None if broadcast_pods is None or is_any else route.called_together(broadcast_pods)
        )
        self.options = options
        #: True if lines that it prints are shown.
        chosen_logs = options.stream_logs
        self.shows_logs = route.shows_logs if chosen_logs is None else chosen_logs
        self.is_detached = is_detached
        self.id = calls.new_call_id()
        self._chain = _ambient_chain()
        if self._chain:
            self._ancestor_pods = frames.Chain.parse(self._chain).pods
        self._patient_from = time.monotonic()
        self.begin_to_expire()
        if options.idempotency_key is not None:
            self._key = options.idempotency_key
        if options.retries and not is_detached:  # its agent makes a detached one again
            self._retries = options.retries
            self._key = self._key or calls.new_call_id()

        if self.is_balanced:
            self._follow_ancestor()
        key, pods = options.idempotency_key, broadcast_pods or target.pods
        if self.is_balanced and key is not None and pods:
            # Only that pod has the outcome of this key.
            self._ancestor_pods, self._is_placed, self._is_with_ancestor = (), False, False
            self.route = route.pod(pods[zlib.crc32(key.encode()) % len(pods)])

    def _encode(self, codec: str, arguments: Mapping[str, object]) -> None:
        wire_codec = codecs.VALUES if codec == "json" else codec
        named: dict[str, Named] = {}
        token = references.named.set(named)
        try:
            self.segments = codecs.encode(wire_codec, arguments, "")
        finally:
            references.named.reset(token)
        self.body = _body(wire_codec, self.segments)
        #: The references among the arguments.
        self.named = tuple(named.values())
        if len(named) > LIMITS.call_references:
            raise SerializationError(
                f"a call has {len(named)} references; at most {LIMITS.call_references} may be",
                hint="put values that belong together into one reference: kt.ref([...])",
            )

    def replace_arguments(self, codec: str, segments: Sequence[codecs.Segment]) -> None:
        self.segments = list(segments)
        self.body = _body(codec, segments)

    def begin_to_expire(self) -> None:
        if self.options.timeout is not None:
            self.expires = (
                time.monotonic() + self.options.timeout + TIMING.call_timeout_grace_seconds
            )

    @property
    def lines(self) -> CallLines:
        if self._lines is None:
            self._lines = CallLines(
                self.route.screen, self.target.logging, self.options.on_progress
            )
        return self._lines

    @property
    def request_id(self) -> str:
        chosen_id = self._request_id or self.options.request_id
        return chosen_id or _ambient_request_id() or self.id[:10]

    def spread(self) -> list[Invocation]:
        """The calls of a broadcast, one for each pod, in pod order; else the call itself."""
        if self.broadcast is None:
            return [self]
        self._request_id = self.request_id
        if self.target.is_bounded:
            self.collective = calls.new_call_id()
        return [self._on(ordinal) for ordinal in self.broadcast]

    def shape(self, values: list[Any]) -> Any:  # noqa: ANN401  # the user's own values
        """The result of a broadcast: a list, or the value itself if the service has one pod now."""
        assert self.broadcast is not None
        together = self.route.called_together(self.broadcast)
        return values[0] if together is None and len(values) == 1 else values

    def of_item(self, number: int) -> Invocation:
        """The call of one item of a map, on the least busy pod, or on that of an ancestor.

        With a key it is always the same pod, since only that pod has the outcome.
        """
        pods = self.broadcast
        if pods is None:
            return self
        if self.options.idempotency_key is None:
            self._follow_ancestor()
            return self
        return self._on(pods[number % len(pods)])

    def _on(self, ordinal: int) -> Invocation:
        """This call on one pod; the arguments are encoded once."""
        part = copy.copy(self)
        part.id = calls.new_call_id()
        part.route = self.route.pod(ordinal)
        return part

    @property
    def may_move(self) -> bool:
        """True if another pod of the service may take it while it waits in the queue of its pod."""
        return self.is_balanced and self._is_placed and not self._is_with_ancestor

    # ------------------------------------------------------------------------------- sending

    @property
    def patience(self) -> float:
        """Seconds that a connection may take."""
        longest = self.route.patience
        patience = min(longest, self.options.timeout or longest)
        return max(self._patient_from + patience - time.monotonic(), 0.0)

    def start(self, stream: Stream, call: PendingCall, *, reads: bool = False) -> None:
        target = self.target
        most_calls = None
        if (self.is_balanced or self.broadcast is not None) and self.route.ordinal is None:
            self._is_placed, self.route = True, self.service_route.of(stream)
            if self.is_balanced and not self.is_item and self._passes < LIMITS.call_passes:
                most_calls = self.service_route.most_calls(stream)
        self._sent_at = time.monotonic()
        self.has_begun = self.is_taken_back = False
        self._instance = self.route.instance
        timeout = None
        if self.expires is None:  # an attempt before this one had to wait
            self.begin_to_expire()
        if self.expires is not None:
            timeout = max(
                self.expires - TIMING.call_timeout_grace_seconds - time.monotonic(), 0.001
            )
        if self.is_item:  # its pod says when it begins
            self.expires = None
        body, segments = self.body, self.segments
        meta = frames.Open(
            self.id,
            target.callable,
            body,
            target.method,
            self.request_id,
            timeout,
            self._key,
            self.shows_logs,
            target.logging.level,
            self.is_detached,
            None,
            self._instance,
            self.options.wire_workers if target.is_distributed else None,
            bool(self.options.restart_procs),
            None,
            target.origin,
            self.options.timeout,
            self._chain,
            self._queue_timeout,
            not self.is_detached,
            self.collective,
            self.is_item,
            self._lost_its_worker,
            self.map_id,
            self.item,
            self._wire_retry,
            most_calls,
            self._debugging,
            references=tuple(reference.identity for reference in self.named),
        )
        self._sent_on = stream
        stream.start(call, meta, segments, reads=reads, named=self.named)

    @property
    def _queue_timeout(self) -> float | None:
        """Seconds that it may still wait in the queue of a pod."""
        timeout, queued_at = self.options.queue_timeout, self._queued_at
        if timeout is None or queued_at is None:
            return timeout
        return max(timeout - (time.monotonic() - queued_at), 0.001)

    @property
    def _debugging(self) -> Debugging | None:
        """The debugger of the call, if it is to have one."""
        config, post_mortem = self.options.debug, self.options.post_mortem
        if post_mortem is None:
            post_mortem = self.route.has_post_mortem
        if config is None and not post_mortem:
            return None
        assert config is None or isinstance(config, DebugConfig)
        settings = config or DebugConfig()
        return Debugging(
            settings.mode, settings.port, stops=config is not None, post_mortem=post_mortem
        )

    @property
    def _wire_retry(self) -> frames.Retry | None:
        """The rule for the agent, if the call may be made again."""
        options = self.options
        if self.is_detached:
            if not options.retries:
                return None
            names, seconds = options.retry_names, (options.backoff, options.max_backoff)
            return frames.Retry(names, options.retries, *seconds)
        return frames.Retry(options.retry_names) if options.retry_names and self._retries else None

    # -------------------------------------------------------------------------------- events

    def step(self, stream: Stream, event: Event) -> Step:
        """The meaning of an event of the attempt on `stream`."""
        kind = event.kind
        if kind == _RESULT:
            self.end_lines()
            instance = event.meta.instance
            # A handle's question about names is no call, after which the program would be warned.
            is_call = self.target.method != CALLABLES
            if is_call and instance != self._instance and self._instance == self.route.instance:
                self.route.answered(instance)
            return self._value(event)
        if kind == _LOG:
            stream.note_taken(event)
            self._on_line(stream, event.meta)
            return None
        if kind == _YIELD:
            self._has_yielded = True
            self.end_lines()
            stream.note_taken(event)
            done = self._value(event)
            return done if done.error is not None else Yielded(done.value)
        if kind == _PROGRESS:
            if event.call.reports:
                self.lines.progress(stream.pod, event.call.reports.popleft())
            return None
        if kind == _ERROR:
            failure = exceptions.parse_json(bytes(event.payload or b""))
            return self.retry_after_refusal(failure) or self._end_with(
                self.error_of(failure), is_named=failure.repeats
            )
        if kind == _QUEUED:
            self.expires, self.has_begun = None, False
            self._queued_at = self._queued_at or time.monotonic()
            return None
        if kind == _BEGUN:
            self.has_begun, self._queued_at = True, None
            self.begin_to_expire()
            return None
        if kind == LOST:
            return self.retry_after_loss(event) or self._end_with(event.meta)
        if kind == EXPIRED:
            stream.cancel(event.call, "the call timed out")
            return self._end_with(self.timed_out())
        return None

    def _on_line(self, stream: Stream, line: frames.Log) -> None:
        if line.debug is None:
            self.route.log(line, self.lines)
        else:
            self._on_debugger(stream, line)

    def _on_debugger(self, stream: Stream, line: frames.Log) -> None:
        """Let the timeout stand while a debugger has the call, and attach if this is a terminal."""
        from kubetorch.sdk.debugger import terminal  # noqa: PLC0415  # where a call stops alone

        assert line.debug is not None
        session, kind = line.debug.session, line.debug.kind
        now = time.monotonic()
        if kind == frames.STOPPED:
            if self.expires is not None:
                self._seconds_left, self.expires = self.expires - now, None
            self._debuggers |= {session}
        elif kind == frames.OVER:
            self._debuggers -= {session}
            if not self._debuggers and self._seconds_left is not None:
                self.expires, self._seconds_left = now + self._seconds_left, None
        if self._here is None:
            place = (self.target.namespace, self.target.service)
            self._here = terminal.CallerTerminals(self.route.session, place)
        self.end_lines()
        stream.watch()
        if not self._here.handle(line) and line.text:
            self.lines.log(line)

    def retry_after_refusal(self, failure: exceptions.Failure) -> RetryAfter | None:
        """Decide about a refusal: the function did not run, and another attempt may help."""
        if failure.started:
            return None
        if failure.code == ReferenceLostError.code and self._sent_on is not None:
            return self._retry_with_references(self._sent_on)
        if self.is_taken_back:
            self._patient_from = time.monotonic()
            return self._retry(at_once=True)
        if self.item is not None and failure.code == QueueFullError.code:
            return self._retry_in_line()
        self._renew_patience()
        if self.patience <= 0:
            return None
        error = exceptions.rebuild(failure, modules=self.target.modules)
        if isinstance(error, CallRefusedError) and error.calls and self._sent_on is not None:
            self._sent_on.note_load(error.calls)
            self._passes += 1
            return self._retry(at_once=True)
        if not isinstance(error, _LATER):
            return None
        self.leave_ancestor()
        # A pod that is being stopped has said so, and gets no further call.
        is_leaving = self._sent_on is not None and not self._sent_on.accepts_calls
        return self._retry(at_once=is_leaving)

    def _retry_with_references(self, stream: Stream) -> RetryAfter | None:
        """The retry of a call whose pod lacks the value of a reference, which then goes ahead."""
        self._lacks += 1
        is_vain = stream.references.refusal(self.named) is not None
        has_all = all(reference.content is not None for reference in self.named)
        if is_vain or not has_all or self._lacks > LIMITS.reference_attempts:
            return None
        stream.references.forget(self.named)
        self._patient_from = time.monotonic()
        return self._retry(at_once=True)

    def _retry_in_line(self) -> RetryAfter | None:
        """The retry of an item of a map, which waits here while the line of its pod is full."""
        now = time.monotonic()
        self._refused_at = self._refused_at or now
        longest = self.options.queue_timeout
        if longest is not None and now - self._refused_at >= longest:
            return None
        self._patient_from = now
        self.expires = None
        return self._retry()

    def retry_after_loss(self, event: Event) -> RetryAfter | None:
        """Decide about a call that was lost with its stream, before it can have run."""
        if self.is_item and not self.has_begun and isinstance(event.meta, PodTerminatedError):
            # The pod, which reports an item before it begins, has ended.
            self._renew_patience()
            self.leave_ancestor()
            return self._retry() if self.patience > 0 else None
        is_transport = isinstance(event.meta, (CallLostError, AgentDiedError))
        if event.call.was_written or not is_transport or self.patience <= 0:
            return None
        return self._retry()

    def timed_out(self) -> CallTimeoutError:
        ordinal = self.route.ordinal
        where = "" if ordinal is None else f" in pod {ordinal}"
        error = CallTimeoutError(
            f"{self.target.name} did not end within its timeout of "
            f"{self.options.timeout:g} s{where}",
            hint=f"kt logs {self.target.service} shows its output",
        )
        self._count_attempts(error)
        return error

    def refused(self, error: Exception) -> Exception:
        is_over = (
            self.expires is not None
            and time.monotonic()
            >= self.expires - TIMING.call_timeout_grace_seconds - TIMING.call_timeout_early_seconds
        )
        if not is_over or not isinstance(error, CallRefusedError):
            self._count_attempts(error)
            return error
        timed_out = CallTimeoutError(
            f"{self.target.name} did not begin within its timeout of {self.options.timeout:g} s: "
            f"{error.message}",
            hint=error.hint,
        )
        timed_out.__cause__, timed_out.pod_name = error, error.pod_name
        self._count_attempts(timed_out)
        return timed_out

    def _value(self, event: Event) -> Done:
        meta, payload = event.meta, event.payload
        assert payload is not None
        body: frames.Body = meta.body
        sizes = body.sizes
        try:
            segments = [payload] if len(sizes) == 1 else codecs.split(memoryview(payload), sizes)
            requested_codec = self.body.codec if self.takes_pickle else "json"
            if body.codec == rank_values.CODEC:
                value: object = RankValues(segments, self.target.modules, requested_codec)
            else:
                codecs.check_answer(body.codec, requested_codec)
                value = codecs.decode(body.codec, segments, modules=self.target.modules)
        except (SerializationError, ProtocolError) as error:
            return Done(None, error)
        return Done(value, is_streamed=event.kind == _RESULT and meta.streamed)

    def end_lines(self) -> None:
        """Show nothing more of the call."""
        if self._lines is not None:
            self._lines.end()

    def _end_with(self, error: Exception, *, is_named: bool = False) -> Step:
        if self._may_retry(error, is_named=is_named):
            return self._begin_next_attempt(error)
        self.end_lines()
        is_loss = isinstance(error, _LOSSES) and getattr(error, "reason", "") != TORN_DOWN
        if self.target.is_distributed and is_loss:
            error = membership_error(self.target.name, error)
        self._count_attempts(error)
        return Done(None, error)

    def _count_attempts(self, error: Exception) -> None:
        """Note the number of attempts in an error, if there may be several."""
        if self.options.retries and not self.is_detached:
            exceptions.set_attempts(error, self._attempts)

    def error_of(self, failure: exceptions.Failure) -> Exception:
        error = exceptions.rebuild(failure, modules=self.target.modules)
        if isinstance(error, ReferenceLostError) and self._sent_on is not None:
            error = self._sent_on.references.refusal(self.named) or error
        if isinstance(error, InstanceReplacedError):
            self.route.answered(error.instance)
        # The error is of the user's class, whose attributes may raise.
        introspection.attempt(explain_missing, None, error, self.target.project)
        introspection.attempt(self._explain_option, None, error)
        return error

    def _explain_option(self, error: Exception) -> None:
        """Add a hint to the error about an unknown keyword that is an option of calls."""
        refused = _REFUSED_KEYWORD.fullmatch(str(error)) if type(error) is TypeError else None
        if refused is None or refused["keyword"] not in self._keywords:
            return
        suggestion = hints.hint("call", refused["keyword"])
        if suggestion is not None and refused["function"] == (self.target.method or self._function):
            exceptions.add_note(error, f"hint: options of a call are given so: {suggestion}")

    @property
    def _function(self) -> str:
        return self.target.callable.rpartition(".")[2]

    def _may_retry(self, error: Exception, *, is_named: bool) -> bool:
        if self._has_yielded or self._retries <= 0:
            return False
        # The worker has compared errors of the user's code; our own may be raised here.
        return is_named or retries.repeats(type(error), self.options.retry_names, {})

    def _begin_next_attempt(self, error: Exception) -> RetryAfter:
        """Begin the next attempt after a pause, with the full timeout."""
        options = self.options
        delay = retries.pause(self._attempts, options.backoff, options.max_backoff)
        self._retries -= 1
        self._attempts += 1
        self._delay = TIMING.call_first_delay_seconds
        self._lost_its_worker = isinstance(error, WorkerDiedError)
        self._debuggers, self._seconds_left = frozenset(), None
        self._patient_from = time.monotonic() + delay
        if options.timeout is not None:
            self.expires = self._patient_from + options.timeout + TIMING.call_timeout_grace_seconds
        # Only the pod that may have run the call knows its outcome.
        self._choose_pod(may_have_run=isinstance(error, CallLostError))
        return RetryAfter(delay)

    def _renew_patience(self) -> None:
        """Restart the patience if a pod had the call for a while, which was no wait for a pod."""
        now = time.monotonic()
        was_taken = self.is_item or self._queued_at is not None
        if was_taken and now - self._sent_at > TIMING.call_accepted_seconds:
            self._patient_from = now

    def _retry(self, *, at_once: bool = False) -> RetryAfter:
        self._choose_pod(may_have_run=False)
        if at_once:
            return RetryAfter(0.0)
        delay, self._delay = self._delay, min(self._delay * 2, TIMING.call_longest_delay_seconds)
        return RetryAfter(delay)

    def _choose_pod(self, *, may_have_run: bool) -> None:
        if self._is_placed and not may_have_run:
            self.route = self.service_route
            self._follow_ancestor()

    def _follow_ancestor(self) -> None:
        """Go to the pod in which the nearest ancestor holds a slot of the service, if there is one.

        It runs there in that slot; elsewhere it could wait for calls that wait for that slot.
        """
        route = None
        if self._ancestor_pods:
            self.service_route.find_ancestors(self._ancestor_pods)
            route = self.service_route.nearest(self._ancestor_pods)
        if route is not None:
            self.route, self._is_placed, self._is_with_ancestor = route, True, True

    def leave_ancestor(self) -> bool:
        """Go to any pod, since the one of its ancestor takes no calls; false if it went to none."""
        if not self._is_with_ancestor:
            return False
        self._ancestor_pods, self._is_with_ancestor = (), False
        self.route, self._patient_from = self.service_route, time.monotonic()
        return True


def _body(codec: str, segments: Sequence[codecs.Segment]) -> frames.Body:
    if len(segments) == 1:
        size = len(segments[0])
        return frames.Body(codec, (size,), size)
    sizes = tuple(map(len, segments))
    return frames.Body(codec, sizes, codecs.layout(sizes)[1])


def membership_error(name: str, error: Exception) -> WorkerMembershipChanged:
    """The error of a distributed call whose own pod is gone, given the pod's error."""
    pod = str(getattr(error, "pod_name", None) or "its pod")
    reason = str(getattr(error, "reason", None) or "lost")
    changed = WorkerMembershipChanged(
        removed_ips=[pod],
        message=f"pod {pod} of {name} is gone ({reason}), and its ranks with it",
        reasons={pod: reason},
        hint="restart_procs=True, or a deploy, forms the world again with the pods that are there",
    )
    changed.pod_name, changed.__cause__ = pod, error
    return changed


def _ambient_chain() -> str:
    """Identities of the surrounding call of this worker, and of the calls that wait for it."""
    context = sys.modules.get("kubetorch.pod.user_process.current_call")
    return "" if context is None else str(context.chain())


def _ambient_request_id() -> str | None:
    """Identity of the request that the surrounding call of this worker belongs to."""
    context = sys.modules.get("kubetorch.pod.user_process.current_call")
    return None if context is None else context.request_id()
