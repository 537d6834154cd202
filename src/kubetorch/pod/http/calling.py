"""`POST /{callable}[/{method}]`: one call by plain HTTP, for curl and every other language."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import math
import pickle
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from kubetorch.errors import KubetorchError, ProtocolError, SerializationError, did_you_mean
from kubetorch.lib.asgi import JSON, NDJSON, Request, Responder
from kubetorch.pod.calls import Call, Calls, join
from kubetorch.pod.logs import Line
from kubetorch.pod.payloads import OwnedPayload, Payload
from kubetorch.pod.tuning import LIMITS
from kubetorch.wire import codecs, exceptions, rank_values, routes
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.calls import Returned, new_call_id
from kubetorch.wire.frames import Body, Open, Progress
from kubetorch.wire.rank_values import Buffer

#: The thread that parses long bodies: the parser holds the interpreter.
_parser = ThreadPoolExecutor(1, "kubetorch-parse")
_BYTES = "application/octet-stream"
#: The content types of user code that a header accepts.
_CONTENT_TYPE = re.compile(rb"[\x20-\x7e]{1,200}")


class _Arguments(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request.

    Attributes:
        debugger, distributed_env_vars: Options of earlier clients, which are not taken here.
    """

    args: msgspec.Raw = msgspec.Raw(b"[]")
    kwargs: msgspec.Raw = msgspec.Raw(b"{}")
    data: str | None = None
    workers: str | tuple[int | str, ...] | None = None
    restart_procs: bool | None = None
    debugger: msgspec.Raw = msgspec.Raw()
    distributed_env_vars: msgspec.Raw = msgspec.Raw()


class Arguments(NamedTuple):
    encoded: bytes
    workers: str | tuple[int | str, ...] | None = None
    restart_procs: bool = False


_decoder = msgspec.json.Decoder(_Arguments | str)


async def call(
    request: Request, respond: Responder, calls: Calls, name: str, method: str | None
) -> None:
    """Run the call that a request describes, and answer with its outcome."""
    codec = request.headers.get(routes.SERIALIZATION.lower(), "json").strip().lower()
    if codec == codecs.VALUES:
        raise SerializationError(
            f"Serialization format {codec!r} is for streams; formats are {', '.join(codecs.CODECS)}"
        )
    calls.check_target(name, codec)
    arguments = await _arguments(await request.body(LIMITS.post_body_bytes), codec)
    if arguments.workers == "any" and not calls.is_distributed:
        arguments = arguments._replace(workers=None)  # it was chosen for that
    opening = Open(
        id=new_call_id(),
        callable=name,
        body=Body(codec, (len(arguments.encoded),), len(arguments.encoded)),
        method=method,
        request_id=request.headers[routes.REQUEST_ID.lower()],
        timeout=timeout_of(request.headers),
        queue_timeout=timeout_of(request.headers, routes.QUEUE_TIMEOUT),
        idempotency_key=request.headers.get(routes.IDEMPOTENCY_KEY.lower()),
        stream_logs=False,
        traceparent=request.headers.get("traceparent"),
        workers=arguments.workers,
        restart_procs=arguments.restart_procs,
    )
    caller = HttpCaller(request.source)
    running = _open(calls, opening, caller, arguments.encoded)
    watch = asyncio.ensure_future(request.disconnected())
    watch.add_done_callback(lambda _: caller.on_gone())
    try:
        await _relay(caller, running, respond)
    finally:
        watch.cancel()
        if running is not None:
            running.leave(caller)


async def is_for_any(request: Request) -> bool:
    """True if a request asks for the least busy pod; a malformed request does not."""
    body = await request.body(LIMITS.post_body_bytes)
    if b'"any"' not in body:
        return False
    codec = request.headers.get(routes.SERIALIZATION.lower(), "json").strip().lower()
    try:
        return (await _arguments(body, codec)).workers == "any"
    except KubetorchError:
        return False


async def _arguments(body: bytes, codec: str) -> Arguments:
    """As `parse_arguments`: of several long bodies one after the other, other requests between."""
    if len(body) <= LIMITS.loop_parsed_bytes:
        return parse_arguments(body, codec)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_parser, parse_arguments, body, codec)


def parse_arguments(body: bytes, codec: str) -> Arguments:
    """The encoded arguments in the body of a request; nothing of them is decoded."""
    if not body.strip():
        if codec == "pickle":
            return Arguments(pickle.dumps({"args": [], "kwargs": {}}))
        return Arguments(b'{"args":[],"kwargs":{}}')
    try:
        decoded = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        _check_text(body)
        _check_keys(str(error))
        raise ProtocolError(
            f"the body is not JSON of the form {_FORM}: {error}",
            hint="with Content-Type: application/json",
        ) from error
    options = _Arguments() if isinstance(decoded, str) else decoded
    choice = (options.workers, bool(options.restart_procs))
    if codec == "pickle":
        data = decoded if isinstance(decoded, str) else decoded.data
        if data is None:
            raise ProtocolError('the body has no "data": the pickled arguments in base64')
        try:
            return Arguments(base64.b64decode(data, validate=True), *choice)
        except (binascii.Error, ValueError) as error:
            raise ProtocolError(f'"data" is not base64: {error}') from error
    if isinstance(decoded, str):
        raise ProtocolError(f"the body is a string; it must be {_FORM}")
    if decoded.data is not None:
        raise ProtocolError(
            f'"data" is for pickled arguments; this body is {codec}',
            hint=f'{routes.SERIALIZATION}: pickle says so; in JSON there are "args" and "kwargs"',
        )
    args, kwargs = bytes(decoded.args), bytes(decoded.kwargs)
    if not args.startswith(b"[") or not kwargs.startswith(b"{"):
        raise ProtocolError(f'"args" must be a list and "kwargs" an object: {_FORM}')
    return Arguments(b'{"args":%b,"kwargs":%b}' % (args, kwargs), *choice)


def _check_text(body: bytes) -> None:
    """Refuse half of a character, for which the parser's own error would be misleading."""
    lone_surrogate = _LONE_SURROGATE.search(body, 0, LIMITS.loop_parsed_bytes)
    if lone_surrogate is not None:
        raise ProtocolError(
            f"the body has {lone_surrogate[1].decode()} at byte {lone_surrogate.start(1)}, half of "
            "a character that JSON writes as a pair of such escapes",
            hint="write text as UTF-8; bytes that are no text travel as base64",
        )


#: A surrogate without the other one of its pair, as an escape of JSON.
_LONE_SURROGATE = re.compile(
    rb"(?<!\\)(?:\\\\)*"
    rb"(\\u[dD][89abAB][\da-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][\da-fA-F]{2})\\u[dD][c-fC-F][\da-fA-F]{2})"
)


def _check_keys(error: str) -> None:
    """Refuse a body with an unknown key, which may be misspelt."""
    unknown_key = _UNKNOWN_KEY.match(error)
    if unknown_key is not None:
        key, known_keys = unknown_key[1], _Arguments.__struct_fields__
        raise ProtocolError(
            f"the body has the key {json.dumps(key)[:_SHOWN]}, which means nothing: it must be "
            f"{_FORM}",
            hint=did_you_mean(key, known_keys) or f"arguments by name lie in kwargs: {_EXAMPLE}",
        )


#: The error of msgspec for an unknown key, and how many characters of the key are shown.
_UNKNOWN_KEY, _SHOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL), 80
_EXAMPLE = '{"kwargs": {"x": 1}}'
_FORM = '{"args": [...], "kwargs": {...}}'


def timeout_of(headers: Mapping[str, str], header: str = routes.TIMEOUT) -> float | None:
    """The seconds that a header has, whose names are in lower case."""
    text = headers.get(header.lower())
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= wire_tuning.TIMING.longest_call_seconds:
        raise ProtocolError(
            f"{header} is {text[:40]!r}; it must be a number of seconds from 0 to "
            f"{wire_tuning.TIMING.longest_call_seconds:.0f}"
        )
    return seconds


def _open(calls: Calls, opening: Open, caller: HttpCaller, arguments: bytes) -> Call | None:
    earlier = calls.find_earlier(opening)
    if earlier is not None:
        return join(earlier, caller)
    running = calls.open(opening, caller)
    running.begin(OwnedPayload(arguments))
    return running


async def _relay(caller: HttpCaller, running: Call | None, respond: Responder) -> None:
    granted = 0
    while True:
        event = await caller.events.get()
        if event is None:
            return
        if caller.notice is not None:
            respond.add_header(routes.INSTANCE_REPLACED, caller.notice)
        if isinstance(event, bytes):
            if respond.has_begun:
                await respond.write(event + b"\n", more=False)
            else:
                await respond.refuse(exceptions.parse_json(event).status, event)
            return
        if not event.is_yielded:
            await _answer(event, respond)
            return
        if not respond.has_begun:
            await respond.begin(200, NDJSON)
        await respond.write(_lines("yield", event.codec, event.segments))
        granted += 1
        if granted == LIMITS.granted_values and running is not None:
            granted = 0
            running.grant(LIMITS.granted_values)


async def _answer(result: _Value, respond: Responder) -> None:
    codec, segments = result.codec, result.segments
    if result.is_streamed or respond.has_begun:
        if not respond.has_begun:
            await respond.begin(200, NDJSON)
        await respond.write(_lines("return", codec, segments), more=False)
    elif codec == rank_values.CODEC:
        values = (
            _json(rank_value.codec, rank_value.segments)
            for rank_value in rank_values.unpack(segments)
        )
        await respond.answer(200, b"[%b]" % b",".join(values), JSON)
    elif codec == "none" and len(segments) == 2:
        # Raw content and its type, which the user's code made itself.
        kind = _CONTENT_TYPE.fullmatch(segments[1])
        await respond.answer(200, segments[0], kind[0].decode() if kind else _BYTES)
    else:
        await respond.answer(200, _json(codec, segments), JSON)


def _lines(key: str, codec: str, segments: Sequence[Buffer]) -> bytes:
    """A value as a line of JSON; of a distributed service a line for each rank."""
    if codec != rank_values.CODEC:
        return b'{"%b":%b}\n' % (key.encode(), _json(codec, segments))
    return b"".join(
        b'{"rank":%d,"%b":%b}\n'
        % (rank_value.rank, key.encode(), _json(rank_value.codec, rank_value.segments))
        for rank_value in rank_values.unpack(segments)
        # A rank that has ended returns its value with the others, at the end.
        if key == "return" or not rank_value.is_streamed
    )


def _json(codec: str, segments: Sequence[Buffer]) -> bytes:
    """A value as JSON text; a pickled one in base64."""
    if codec == "pickle":
        data = base64.b64encode(codecs.in_band(segments)).decode()
        return json.dumps({"data": data}).encode()
    if codec == "none" and len(segments) == 2:
        return json.dumps(bytes(segments[0]).decode(errors="replace")).encode()
    if codec == codecs.VALUES:  # of a call on a stream that has the same idempotency key
        _check_json(segments[0])
    return bytes(segments[0]) if segments and len(segments[0]) else b"null"


def _check_json(text: Buffer) -> None:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except msgspec.MsgspecError as error:
        raise SerializationError(
            "a program made the first call with this key, and its value is no JSON"
        ) from error


class _Value(NamedTuple):
    """A value that a generator yielded or the call returned: encoded, in memory that stays."""

    codec: str
    segments: list[memoryview]
    is_yielded: bool
    #: Returned after values that were yielded.
    is_streamed: bool = False


class HttpCaller:
    """The caller of a call that came by HTTP: events in, one reader.

    Lines are in the pod's log; a response has no place for progress.
    """

    takes_files = False

    def __init__(self, source: str) -> None:
        self.identity = f"http {source}"
        #: Values, a failure as JSON, or `None` when the client is gone. At most as many values as a
        #: generator may be ahead of its grants.
        self.events: asyncio.Queue[_Value | bytes | None] = asyncio.Queue()
        #: The notice that the instance was made anew, as text for a header.
        self.notice: str | None = None

    def on_queued(self) -> None:
        return None

    def on_begun(self) -> None:
        return None

    def on_gone(self) -> None:
        self.events.put_nowait(None)

    def on_log(self, line: Line) -> None:
        return None

    def on_progress(self, report: Progress) -> None:
        return None

    def on_replaced(self, notice: str, instance: str) -> None:
        self.notice = " ".join(notice.encode("ascii", "backslashreplace").decode().split())

    def on_yield(self, codec: str, sizes: Sequence[int], payload: Payload) -> None:
        segments = codecs.split(payload.view, sizes)
        self.events.put_nowait(_Value(codec, segments, is_yielded=True))
        payload.release()

    def on_result(self, result: Returned, payload: Payload | None) -> None:
        segments = codecs.split(memoryview(result.payload), result.sizes)
        self.events.put_nowait(_Value(result.codec, segments, False, result.streamed))
        if payload is not None:
            payload.release()

    def on_failure(self, failure: bytes) -> None:
        self.events.put_nowait(failure)
