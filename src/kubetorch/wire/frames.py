"""Frames of a call stream: one frame is one binary WebSocket message.

     0      1       2          4             8                16
    +------+-------+----------+-------------+----------------+----------------+----------+
    | kind | flags | reserved | meta length | call number    | meta (msgpack) | payload  |
    | u8   | u8    | u16      | u32         | u64            |                |          |
    +------+-------+----------+-------------+----------------+----------------+----------+

All integers are big-endian. A call is a number that the client chose, unique on its stream:

    client  OPEN DATA*                            CANCEL?
    agent   (ACCEPTED | QUEUED | BEGUN)* (LOG | PROGRESS | YIELD)*    RESULT | ERROR

A payload that is longer than `CHUNK` follows its OPEN, RESULT or YIELD frame in DATA frames, which
have no meta; `Body.total` says how many bytes there are in all. DATA frames of different calls
interleave. CREDIT gives the sender of payload room for so many more bytes of one call; a LOG counts
with its meta, every other frame with its payload. ACK says how many frames of the stream have
arrived, so that the other end can forget them; ACK, WELCOME and GOAWAY are not counted.

What makes a stream survive its connection: numbered frames, acknowledged and kept until then.

Both ends count the frames that they have sent and received, from the first connection of a client
to an incarnation of an agent. A sender keeps each counted frame until the other end has
acknowledged it; after a reconnect each end says how many it has received, and the other sends what
follows. So a frame arrives exactly once as long as both processes live.
"""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from kubetorch.errors import ProtocolError

#: Payload that travels in one frame.
CHUNK = 256 * 1024
#: Bytes of payload that may be under way for one call in one direction without a CREDIT.
WINDOW = 8 * 1024 * 1024
#: Bytes of meta that a frame may have; both ends end a stream that brings more.
META_LIMIT = 4 * 1024 * 1024

#: Kind, flags, reserved, length of the meta, number of the call.
HEADER = struct.Struct("!BBHIQ")
HEADER_BYTES = HEADER.size
assert HEADER_BYTES == 16


class Kind(enum.IntEnum):
    #: Hashing happens for every frame; that of an enumeration is written in Python.
    __hash__ = int.__hash__

    OPEN = 1
    DATA = 2
    CANCEL = 3
    CREDIT = 4
    ACK = 5
    #: Look at a call that somebody opened before, by its id.
    ATTACH = 6
    RESULT = 16
    ERROR = 17
    LOG = 18
    PROGRESS = 19
    YIELD = 20
    #: The agent has a detached call on its disk: it runs, or its record says why not.
    ACCEPTED = 21
    #: The call waits, since its process runs as many as it may; and now it runs.
    QUEUED = 22
    BEGUN = 23
    WELCOME = 32
    #: The agent takes no more calls on this stream; those that run go on.
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
    if end > size or meta_length > META_LIMIT:
        raise ProtocolError(f"a frame of {size} bytes claims {meta_length} of meta")
    return kind, number, message[HEADER_BYTES:end], message[end:]


# ------------------------------------------------------------------------------- meta of frames


class Body(msgspec.Struct, frozen=True, array_like=True):
    """The codec and the segments of a payload.

    Attributes:
        codec: `json`, `pickle`, `none` or one that the agent offers.
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
    """

    epoch: int
    nodes: tuple[int, ...]
    needs_slots: bool = False


class Retry(msgspec.Struct, frozen=True, omit_defaults=True):
    """After which errors a call runs again; see `kubetorch.wire.retries`.

    Attributes:
        names: Dotted names of classes; `None` is lost workers and pods.
        count: How often the agent runs a detached call again; any other one its caller makes again.
        backoff, max_backoff: Seconds before the second attempt, doubled each time, and at most.
    """

    names: tuple[str, ...] | None = None
    count: int = 0
    backoff: float = 1.0
    max_backoff: float = 60.0


class Open(msgspec.Struct, frozen=True, omit_defaults=True):
    """Meta of OPEN: one call.

    Attributes:
        id: Identity of the call, unique in the world; a handle finds it again by this.
        body: Its arguments: `{"args": [...], "kwargs": {...}}`.
        request_id: Identity of the request that the call belongs to, for logs.
        timeout: Seconds of its run after which the agent interrupts it.
        idempotency_key: A second call with the same key gets the result of the first.
        stream_logs: Whether LOG frames are wanted, and from which level on.
        log_level: Lowest level of logger lines: `debug`, `info`, `warning`, `error`, `critical`.
        detached: The call goes on when the client is gone; its result is kept.
        traceparent: W3C trace context of the caller.
        instance: The instance of the class that answered the program last.
        confirm: ACCEPTED is wanted; an agent says in WELCOME whether it sends it.
        workers: Nodes of a distributed service that it runs on: `any`, `ready`, text that addresses
            contain, or node ranks, addresses and pod names; `None` is all of the world.
        restart_procs: The world is formed again, with new processes, before it runs.
        part: It is a part of a distributed call, made by another agent.
        origin: The code that the caller means, as `Origin.key`; the agent says if it runs other.
        whole_timeout: Seconds that the caller gave, of which `timeout` was left when it was sent.
        chain: The calls that wait for it, as the worker that makes it got them; see `Chain`.
        queue_timeout: Seconds that it may wait for its turn.
        queue_news: QUEUED and BEGUN are wanted, which older clients do not know.
        collective: Shared by the calls of one broadcast: they are one ancestor, whichever pod
            it is asked in. BEGUN is wanted even if the call has not waited.
        is_item: It is an item of a map: of a `def` one runs in a process at a time, where the
            service does not say how many. BEGUN is wanted even if it has not waited, QUEUED not.
        item: Its number among the items of a map, for errors.
        map_id: Identity of the map, of an item whose caller is told if such items hardly use the
            processor.
        is_again: The process that ran it before ended, which it may have caused: of such calls one
            runs in a process at a time.
        retry: After which errors it runs again.
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
    confirm: bool = False
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


class Chain(tuple[tuple[str, str], ...]):
    """The calls that wait for a call, each by the slot that it holds and its own identity.

    Of the calls in one slot only the last is named, so a chain is as long as the processes that it
    runs in are many. It travels as `slot:call,slot:call`, the nearest last; what it is in between
    is the business of the agents alone. Code of a worker outside of the context of a call sends
    `kubetorch.specs.callable.UNKNOWN_CHAIN`.
    """

    @classmethod
    def parse(cls, text: str) -> Chain:
        """The chain of a text; total: what is none of it is left out."""
        pairs = (pair.partition(":") for pair in text.split(",")) if text else ()
        return cls((slot, call) for slot, _, call in pairs if slot and call)

    def render(self) -> str:
        return ",".join(f"{slot}:{call}" for slot, call in self)


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
        unless_begun: Only if nothing of it has run yet, which a refusal then says.
    """

    reason: str = "cancelled by the caller"
    unless_begun: bool = False


class Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """Meta of RESULT.

    Of a generator (`streamed`), YIELD frames carried the values, and `body` is what it returned.
    """

    body: Body
    generation: int = 0
    streamed: bool = False
    instance: str | None = None


class Yield(msgspec.Struct, frozen=True):
    """Meta of YIELD: one value of a generator."""

    body: Body


#: Sources of lines that no code of the user wrote: steps of an image, and Kubetorch itself.
IMAGE, OWN = "image", "kubetorch"
NOT_USERS = frozenset({IMAGE, OWN})


class Log(msgspec.Struct, frozen=True, omit_defaults=True):
    """Meta of LOG: one line.

    Attributes:
        text: The line without its end; for a logger the message alone.
        source: `stdout`, `stderr`, `logger`, or one of `NOT_USERS`.
        level: Level of a logger's line, such as `INFO`. What a program prints that has handlers of
            its own counts as `INFO` on stdout and as `ERROR` on stderr; else a print has none.
        time: Seconds since the epoch.
        instance: The line is no output: it says that the instance of the class was made anew, and
            this is the new one.
        origin: The line is no output: it says that the service runs this code, and not what the
            caller means.
    """

    text: str
    pod: str
    source: str = "stdout"
    level: str | None = None
    time: float = 0.0
    rank: int | None = None
    instance: str | None = None
    origin: str | None = None


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """Meta of PROGRESS: how far the call has come."""

    current: float
    total: float | None = None
    message: str | None = None
    rank: int | None = None


class Credit(msgspec.Struct, frozen=True, array_like=True):
    """Meta of CREDIT: room for so many more bytes of payload of this call."""

    bytes: int


class Ack(msgspec.Struct, frozen=True, array_like=True):
    """Meta of ACK: how many counted frames of this stream have arrived, since it began."""

    frames: int


class Welcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """Meta of WELCOME, the agent's first frame on a connection.

    Attributes:
        incarnation: Identity of the agent's process; another one knows nothing of older calls.
        generation: Generation that serves calls now.
        protocol: Version that the agent speaks on this stream.
        received: Counted frames of this client that the agent has seen.
        resumed: The agent remembers this client; frames that it has not acknowledged follow.
        max_payload: Largest payload that it takes, in bytes.
        confirms: It answers a detached call with ACCEPTED where OPEN asks for it.
        codecs: Codecs that it takes beside those that every agent has.
        lines_up: It knows items of maps, and calls that are cancelled unless they have begun.
    """

    incarnation: str
    pod: str
    generation: int
    protocol: int
    received: int = 0
    resumed: bool = False
    max_payload: int = 0
    confirms: bool = False
    codecs: tuple[str, ...] = ()
    lines_up: bool = False


class Goaway(msgspec.Struct, frozen=True, omit_defaults=True):
    """Meta of GOAWAY."""

    reason: str


_encoder = msgspec.msgpack.Encoder()


def encode(kind: Kind, call: int, meta: msgspec.Struct | None = None) -> bytes:
    """Header and meta of a frame; the payload, if there is one, is sent after it."""
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
        Kind.RESULT: Result,
        Kind.LOG: Log,
        Kind.PROGRESS: Progress,
        Kind.YIELD: Yield,
        Kind.WELCOME: Welcome,
        Kind.GOAWAY: Goaway,
    }.items()
}


def decode_meta(kind: int, meta: bytes | bytearray | memoryview) -> msgspec.Struct | None:
    """The meta of a frame of this kind; `None` for kinds that have none.

    ERROR has none: its payload is a failure as JSON (`kubetorch.wire.exceptions`).
    """
    decoder = _DECODERS.get(kind)  # type: ignore[call-overload]  # a Kind is its number
    if decoder is None:
        return None
    try:
        return decoder.decode(meta)  # type: ignore[no-any-return]  # its type is in the table
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"meta of {Kind(kind).name}: {error}") from error


#: A receiver acknowledges at the latest after so many frames or bytes.
ACK_FRAMES = 64
ACK_BYTES = 2 * 1024 * 1024

Buffer = bytes | bytearray | memoryview
Frame = Sequence[Buffer]


class Outbox:
    """Frames that were sent and not yet acknowledged. Frames are sequences of buffers."""

    def __init__(self) -> None:
        self._kept: deque[Frame] = deque()
        self._acked = 0
        #: Bytes of the frames that are kept.
        self.kept_bytes = 0

    @property
    def sent(self) -> int:
        """Number of frames sent so far."""
        return self._acked + len(self._kept)

    @property
    def last(self) -> Frame | None:
        """The frame that was sent last, if it is still kept."""
        return self._kept[-1] if self._kept else None

    def keep(self, frame: Frame) -> int:
        """Remember a frame that is about to be sent; its number, from 1."""
        self._kept.append(frame)
        for part in frame:
            self.kept_bytes += len(part)
        return self._acked + len(self._kept)

    def ack(self, received: int) -> None:
        """Forget what the other end has."""
        if received > self.sent:
            raise ProtocolError(f"{received} frames acknowledged, only {self.sent} were sent")
        while self._acked < received:
            # First this: a signal handler that raises after a call leaves `sent` as it is.
            self._acked += 1
            for part in self._kept.popleft():
                self.kept_bytes -= len(part)

    def after(self, received: int) -> Iterator[Frame]:
        """The frames to send again to an end that has `received` frames."""
        if received < self._acked:
            raise ProtocolError(f"frame {received + 1} was acknowledged and is gone")
        self.ack(received)
        return iter(tuple(self._kept))


class Inbox:
    """Counts what arrives and says when to acknowledge it."""

    def __init__(self) -> None:
        self.received = 0
        self._acked = 0
        self._bytes = 0

    def count(self, size: int) -> bool:
        """Count a frame; true if an ACK is due."""
        self.received += 1
        self._bytes += size
        return self.received - self._acked >= ACK_FRAMES or self._bytes >= ACK_BYTES

    def acknowledged(self) -> int:
        """The number to send in an ACK that goes out now."""
        self._acked = self.received
        self._bytes = 0
        return self.received
