"""Frames of a call stream: one frame is one binary WebSocket message.

     0      1       2          4             8                16
    +------+-------+----------+-------------+----------------+----------------+----------+
    | kind | flags | reserved | meta length | call number    | meta (msgpack) | payload  |
    | u8   | u8    | u16      | u32         | u64            |                |          |
    +------+-------+----------+-------------+----------------+----------------+----------+

All integers are big-endian. A call is a number that the client chose, unique on its stream:

    client  OPEN DATA*                            CANCEL?                          RELEASE?
    agent   (ACCEPTED | QUEUED | BEGUN)* (LOG | PROGRESS | YIELD)*    RESULT | ERROR

A payload that is longer than `chunk_bytes` follows its OPEN, RESULT or YIELD frame in DATA frames,
which have no meta; `Body.total` is the length of the whole payload. DATA frames of different calls
interleave. CREDIT allows the sender of a payload so many more bytes of one call; a LOG counts with
its meta, every other frame with its payload. ACK has the number of frames of the stream that have
arrived, so that the other end can forget them; ACK, WELCOME and GOAWAY are not counted.

A payload may travel in a memory file instead (`kubetorch.lib.memory_files`), if both ends are
processes of one user on one machine: on a Unix socket that WELCOME names, ahead of the frame, which
has the number of the file in its meta.

A stream survives its connection: both ends count the frames that they have sent and received, from
the first connection of a client to an incarnation of an agent. A sender keeps each counted frame
until the other end has acknowledged it; after a reconnect each end tells the number of frames that
it has received, and the other end sends the frames behind that number. So a frame arrives exactly
once as long as both processes live.
"""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from kubetorch.errors import ProtocolError
from kubetorch.wire.debugger import Debugging
from kubetorch.wire.tuning import LIMITS, TIMING

_ACK_BYTES = LIMITS.acknowledged_bytes
_ACK_FRAMES = LIMITS.acknowledged_frames
_META_BYTES = LIMITS.meta_bytes

#: Kind, flags, reserved, length of the meta, number of the call.
HEADER = struct.Struct("!BBHIQ")
HEADER_BYTES = HEADER.size
assert HEADER_BYTES == 16


class Kind(enum.IntEnum):
    """The kinds of frames, by their numbers on the wire."""

    #: Every frame is looked up by its kind, and the hash of an enumeration is written in Python.
    __hash__ = int.__hash__

    OPEN = 1
    DATA = 2
    CANCEL = 3
    CREDIT = 4
    ACK = 5
    #: Wait for a call that was opened before, by its id.
    ATTACH = 6
    #: The client names references in no further call.
    RELEASE = 7
    RESULT = 16
    ERROR = 17
    LOG = 18
    PROGRESS = 19
    YIELD = 20
    #: The agent has a detached call on its disk: it runs, or its record has the reason why not.
    ACCEPTED = 21
    #: The call waits for a process that may run it; the call begins to run.
    QUEUED = 22
    BEGUN = 23
    WELCOME = 32
    #: The agent accepts no more calls on this stream; running calls go on.
    GOAWAY = 33


#: Frames that do not count for ACK: losing them with a connection does no harm.
UNCOUNTED = frozenset({Kind.ACK, Kind.WELCOME, Kind.GOAWAY})
#: Every kind by its number.
KINDS = {int(kind): kind for kind in Kind}


def pack_header(kind: int, call: int, meta_length: int = 0) -> bytes:
    """The 16 bytes that a frame begins with."""
    return HEADER.pack(kind, 0, 0, meta_length, call)


def split(message: memoryview) -> tuple[int, int, memoryview, memoryview]:
    """The kind, the number of the call, the meta and the payload of a message that is a frame."""
    size = len(message)
    if size < HEADER_BYTES:
        raise ProtocolError(f"a message of {size} bytes that is no frame")
    kind, _, _, meta_length, number = HEADER.unpack_from(message)
    end = HEADER_BYTES + meta_length
    if end > size or meta_length > _META_BYTES:
        raise ProtocolError(f"a frame of {size} bytes claims {meta_length} of meta")
    return kind, number, message[HEADER_BYTES:end], message[end:]


# ------------------------------------------------------------------------------- meta of frames


class Body(msgspec.Struct, frozen=True, array_like=True):
    """The codec and the segments of a payload.

    Attributes:
        codec: `json`, `values`, `pickle` or `none`.
        sizes: Bytes of each segment; see `kubetorch.wire.codecs.layout` for where they lie.
        total: Bytes of the whole payload, padding included, over all frames.
    """

    codec: str
    sizes: tuple[int, ...]
    total: int


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of a distributed call that one agent asks another to run; see docs/design/ranks.md.

    Attributes:
        epoch: Epoch of the world.
        nodes: Node ranks to cover: the receiver's own first, then those that it passes it on to.
        needs_slots: It is the whole call, and the receiver hands out the slots of all ranks.
        is_any: It is the whole call, and the receiver chooses the node that is least busy.
    """

    epoch: int
    nodes: tuple[int, ...]
    needs_slots: bool = False
    is_any: bool = False


class Retry(msgspec.Struct, frozen=True, omit_defaults=True):
    """The errors after which a call runs again; see `kubetorch.wire.retries`.

    Attributes:
        names: Dotted names of classes; `None` for losses of workers and pods.
        count: How often the agent runs a detached call again; the caller repeats any other call.
        backoff, max_backoff: Seconds before the second attempt, doubled each time, and at most.
    """

    names: tuple[str, ...] | None = None
    count: int = 0
    backoff: float = TIMING.retry_backoff_seconds
    max_backoff: float = TIMING.retry_longest_backoff_seconds


class Open(msgspec.Struct, frozen=True, omit_defaults=True):
    """Meta of OPEN: one call.

    Attributes:
        id: Identity of the call, unique in the world; a handle finds it again by this.
        body: Its arguments: `{"args": [...], "kwargs": {...}}`.
        request_id: Identity of the request that the call belongs to, for logs.
        timeout: Seconds of its run after which the agent interrupts it.
        idempotency_key: A second call with the same key gets the result of the first.
        stream_logs: Whether the client wants LOG frames.
        log_level: Lowest level of logger lines: `debug`, `info`, `warning`, `error`, `critical`.
        detached: The call goes on when the client is gone; its result is kept. ACCEPTED says
            that the agent has it.
        traceparent: W3C trace context of the caller.
        instance: The instance of the class that answered the program last.
        workers: Nodes of a distributed service that it runs on: `any`, the least busy one, `ready`,
            text that addresses contain, or node ranks, addresses and pod names; `None` is all of
            the world.
        restart_procs: The world is formed again, with new processes, before it runs.
        part: Set by another agent for a part of a distributed call.
        origin: The code that the caller means, as `Origin.key`; the agent warns if it runs another.
        whole_timeout: The caller's timeout in seconds, of which `timeout` remained at the send.
        chain: The calls that wait for it, from the worker that makes it; see `Chain`.
        queue_timeout: Seconds that it may wait for its turn.
        queue_news: The client wants QUEUED and BEGUN.
        collective: Identity that the calls of one broadcast share: all pods count them as one
            ancestor. The client wants BEGUN even if the call has not waited.
        is_item: It is an item of a map: if the service does not bound its calls, a process runs one
            item of a `def` at a time. The client wants BEGUN even if it has not waited, but not
            QUEUED.
        item: Its number among the items of a map, for errors.
        map_id: Identity of the map, if the caller wants to know that its items hardly use the
            processor.
        is_again: The process that ran it before ended, which it may have caused: a process runs one
            such call at a time.
        retry: The errors after which it runs again.
        most_calls: The pod refuses it if it has more calls than this: another one has as few.
        debug: The debugger of the call.
        file: The number of the memory file of its arguments, which then follow in no frame.
        references: Identities of the references among its arguments, whose bytes went before.
        reference: It is no call: its body is the value of the reference with this identity, in the
            codec `values`, for calls that name it. An empty RESULT says that the pod has it.
    """

    id: str
    callable: str
    body: Body
    method: str | None = None
    request_id: str = "-"
    timeout: float | None = None
    idempotency_key: str | None = None
    stream_logs: bool = True
    log_level: str = "info"
    detached: bool = False
    traceparent: str | None = None
    instance: str | None = None
    workers: str | tuple[int | str, ...] | None = None
    restart_procs: bool = False
    part: Part | None = None
    origin: str | None = None
    whole_timeout: float | None = None
    chain: str = ""
    queue_timeout: float | None = None
    queue_news: bool = False
    collective: str = ""
    is_item: bool = False
    is_again: bool = False
    map_id: str = ""
    item: int | None = None
    retry: Retry | None = None
    most_calls: int | None = None
    debug: Debugging | None = None
    file: int = 0
    references: tuple[str, ...] = ()
    reference: str = ""


class Ancestor(NamedTuple):
    """A call that waits for another one.

    Attributes:
        slot: The slot that it holds.
        call: Its identity.
        pod: The pod in which it holds the slot, if other calls wait there for such a slot; else
            empty: its descendants may then run in any pod.
    """

    slot: str
    call: str
    pod: str = ""


class Chain(tuple[Ancestor, ...]):
    """The calls that wait for a call, each with the slot that it holds.

    The chain names only the last call in each slot, so its length is at most the number of
    processes. It travels as `slot:call:pod,slot:call:pod`, the nearest call last. Code of a worker
    outside of the context of a call sends `kubetorch.specs.callable.UNKNOWN_CHAIN`.
    """

    @classmethod
    def parse(cls, text: str) -> Chain:
        """The chain of a text; malformed parts are left out."""
        entries = (entry.split(":") for entry in text.split(","))
        ancestors = (Ancestor(*fields) for fields in entries if len(fields) in (2, 3))
        return cls(ancestor for ancestor in ancestors if ancestor.slot and ancestor.call)

    def render(self) -> str:
        return ",".join(f"{slot}:{call}:{pod}" for slot, call, pod in self)

    @property
    def pods(self) -> tuple[str, ...]:
        """The pods that its descendants go to, if the calls are for them: the nearest first."""
        return tuple(ancestor.pod for ancestor in reversed(self) if ancestor.pod)


class Attach(msgspec.Struct, frozen=True, omit_defaults=True):
    """Meta of ATTACH: wait for the end of the call with this id.

    Attributes:
        serialization: `pickle`: give the value of the call, which could not travel.
    """

    id: str
    stream_logs: bool = False
    serialization: str = ""


class Cancel(msgspec.Struct, frozen=True, omit_defaults=True):
    """Meta of CANCEL: the caller does not want the call any more.

    Attributes:
        unless_begun: Only if the call does not run yet: its error then says that it never ran.
    """

    reason: str = "cancelled by the caller"
    unless_begun: bool = False


class Release(msgspec.Struct, frozen=True, omit_defaults=True):
    """Meta of RELEASE: identities of references."""

    references: tuple[str, ...]


class Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """Meta of RESULT.

    For a generator (`streamed`), YIELD frames carried its values, and `body` is its return value.
    `file` is the number of the memory file of the value, if it travels in one.
    """

    body: Body
    generation: int = 0
    streamed: bool = False
    instance: str | None = None
    file: int = 0


class Yield(msgspec.Struct, frozen=True, omit_defaults=True):
    """Meta of YIELD: one value of a generator; `file` is as in RESULT."""

    body: Body
    file: int = 0


#: Sources of lines that no code of the user wrote: steps of an image, and Kubetorch itself.
IMAGE, KUBETORCH = "image", "kubetorch"
NOT_USERS = frozenset({IMAGE, KUBETORCH})


#: Kinds of events of a debugger: the call waits at a prompt; how to attach; the call goes on.
STOPPED, HINT, OVER = "stopped", "hint", "over"


class DebugEvent(msgspec.Struct, frozen=True, array_like=True):
    """What a line says of a debugger.

    Attributes:
        session: Identity of the session in its pod.
        kind: `STOPPED`, `HINT` or `OVER`.
        mode: The kind of debugger that the program asks for.
    """

    session: str
    kind: str
    mode: str = "pdb"


class Log(msgspec.Struct, frozen=True, omit_defaults=True):
    """Meta of LOG: one line.

    Attributes:
        text: The line without its end; for a logger the message alone.
        source: `stdout`, `stderr`, `logger`, or one of `NOT_USERS`.
        level: Level of a logger's line, such as `INFO`. Prints of a program with its own handlers
            count as `INFO` on stdout and as `ERROR` on stderr; other prints have no level.
        time: Seconds since the epoch.
        instance: Identity of the new instance, for a line that is no output but reports that the
            instance of the class was made anew.
        origin: The code that the service runs, for a line that is no output but reports that this
            is not the code that the caller means.
        debug: For a line about a debugger; without a text it is for programs alone.
    """

    text: str
    pod: str
    source: str = "stdout"
    level: str | None = None
    time: float = 0.0
    rank: int | None = None
    instance: str | None = None
    origin: str | None = None
    debug: DebugEvent | None = None


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """Meta of PROGRESS: the progress of the call, reported by `kt.progress`."""

    current: float
    total: float | None = None
    message: str | None = None
    rank: int | None = None


class Credit(msgspec.Struct, frozen=True, array_like=True):
    """Meta of CREDIT: the receiver accepts so many more bytes of payload of this call."""

    bytes: int


class Ack(msgspec.Struct, frozen=True, array_like=True):
    """Meta of ACK: the number of counted frames of this stream that have arrived since it began."""

    frames: int


class Welcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """Meta of WELCOME, the agent's first frame on a connection.

    Attributes:
        incarnation: Identity of the agent's process; another one knows nothing of calls before it.
        generation: Generation that serves calls now.
        protocol: Version that the agent speaks on this stream.
        received: Counted frames of this client that the agent has seen.
        resumed: The agent remembers this client; frames that it has not acknowledged follow.
        max_payload: Largest payload that it accepts, in bytes.
        memory_socket: Path of its socket for memory files; empty if it has none.
        memory_share: Bytes of memory files that the client may have under way in its calls, and as
            many that views in the client keep.
    """

    incarnation: str
    pod: str
    generation: int
    protocol: int
    received: int = 0
    resumed: bool = False
    max_payload: int = 0
    memory_socket: str = ""
    memory_share: int = 0


class StreamProof(msgspec.Struct, frozen=True):
    """First message of a client on the socket for memory files: its stream is there already.

    Attributes:
        token: As the header `Authorization` of the stream.
        client: Identity of the stream, which only its two ends know.
        incarnation: Of the agent.
    """

    token: str
    client: str
    incarnation: str


class Goaway(msgspec.Struct, frozen=True, omit_defaults=True):
    """Meta of GOAWAY."""

    reason: str


_encoder = msgspec.msgpack.Encoder()
_proof_decoder = msgspec.msgpack.Decoder(StreamProof)


def encode_proof(proof: StreamProof) -> bytes:
    return _encoder.encode(proof)


def decode_proof(data: bytes) -> StreamProof:
    try:
        return _proof_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"no proof of a stream: {error}") from error


def encode(kind: Kind, call: int, meta: msgspec.Struct | None = None) -> bytes:
    """Header and meta of a frame; its payload, if it has one, is sent behind them."""
    if meta is None:
        return pack_header(kind, call)
    packed = _encoder.encode(meta)
    return pack_header(kind, call, len(packed)) + packed


_DECODERS: dict[Kind, msgspec.msgpack.Decoder[msgspec.Struct]] = {
    kind: msgspec.msgpack.Decoder(meta)
    for kind, meta in {
        Kind.OPEN: Open,
        Kind.CANCEL: Cancel,
        Kind.CREDIT: Credit,
        Kind.ACK: Ack,
        Kind.ATTACH: Attach,
        Kind.RELEASE: Release,
        Kind.RESULT: Result,
        Kind.LOG: Log,
        Kind.PROGRESS: Progress,
        Kind.YIELD: Yield,
        Kind.WELCOME: Welcome,
        Kind.GOAWAY: Goaway,
    }.items()
}


def decode_meta(kind: int, meta: bytes | bytearray | memoryview) -> msgspec.Struct | None:
    """The meta of a frame of this kind; `None` for kinds without meta.

    ERROR has no meta: its payload is a failure as JSON (`kubetorch.wire.exceptions`).
    """
    decoder = _DECODERS.get(kind)  # type: ignore[call-overload]  # a Kind is its number
    if decoder is None:
        return None
    try:
        return decoder.decode(meta)  # type: ignore[no-any-return]  # its type is in the table
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"meta of {Kind(kind).name}: {error}") from error


Buffer = bytes | bytearray | memoryview
Frame = Sequence[Buffer]


class Outbox:
    """Frames that were sent and not yet acknowledged; a frame is a sequence of buffers."""

    def __init__(self) -> None:
        self._unacknowledged: deque[Frame] = deque()
        self._acknowledged_frames = 0
        #: Bytes of the unacknowledged frames.
        self.kept_bytes = 0

    @property
    def sent(self) -> int:
        """Number of frames sent so far."""
        return self._acknowledged_frames + len(self._unacknowledged)

    @property
    def last(self) -> Frame | None:
        """The frame that was sent last, if it is not acknowledged."""
        return self._unacknowledged[-1] if self._unacknowledged else None

    def keep(self, frame: Frame) -> int:
        """Keep a frame that is about to be sent; returns its number, from 1."""
        self._unacknowledged.append(frame)
        for part in frame:
            self.kept_bytes += len(part)
        return self._acknowledged_frames + len(self._unacknowledged)

    def ack(self, received: int) -> None:
        """Forget the frames that the other end has received."""
        if received > self.sent:
            raise ProtocolError(f"{received} frames acknowledged, only {self.sent} were sent")
        while self._acknowledged_frames < received:
            # The count goes first: a signal handler that raises in between leaves `sent` right.
            self._acknowledged_frames += 1
            for part in self._unacknowledged.popleft():
                self.kept_bytes -= len(part)

    def after(self, received: int) -> Iterator[Frame]:
        """The frames to send again to an end that has `received` frames."""
        if received < self._acknowledged_frames:
            raise ProtocolError(f"frame {received + 1} was acknowledged and is gone")
        self.ack(received)
        return iter(tuple(self._unacknowledged))


class Inbox:
    """Counts frames that arrive, and decides when to acknowledge them."""

    def __init__(self) -> None:
        self.received = 0
        self._acknowledged_frames = 0
        self._unacknowledged_bytes = 0

    def count(self, size: int) -> bool:
        """Count a frame; true if an ACK is due."""
        self.received += 1
        self._unacknowledged_bytes += size
        return (
            self.received - self._acknowledged_frames >= _ACK_FRAMES
            or self._unacknowledged_bytes >= _ACK_BYTES
        )

    def acknowledged(self) -> int:
        """The number for an ACK that is sent now."""
        self._acknowledged_frames = self.received
        self._unacknowledged_bytes = 0
        return self.received
