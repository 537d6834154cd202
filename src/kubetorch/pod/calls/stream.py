"""The server's end of one client's stream (`kubetorch.wire.frames`), over all its connections.

The stream belongs to the client, not to a connection: when one breaks, what was sent and not
acknowledged is sent again on the next (`kubetorch.wire.channel`), and calls go on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from kubetorch.errors import KubetorchError, ProtocolError, ResultExpiredError
from kubetorch.lib import websocket
from kubetorch.lib.connections import Connection
from kubetorch.pod.calls.call import Call
from kubetorch.pod.calls.calls import ARGUMENTS_LIMIT, Calls
from kubetorch.pod.calls.relay import Relay, log_level
from kubetorch.pod.workers.host import OwnedPayload, Payload
from kubetorch.wire import frames, versions
from kubetorch.wire.channel import Inbox, Outbox
from kubetorch.wire.frames import Kind

Buffer = bytes | bytearray | memoryview

#: Longest message: the largest meta and one chunk.
MESSAGE_LIMIT = frames.HEADER_BYTES + frames.META_LIMIT + frames.CHUNK
#: Bytes that may be sent and not acknowledged; a client that never acknowledges gets no more.
UNACKNOWLEDGED_LIMIT = 64 * 1024 * 1024
#: Seconds that a client has to come back after its connection broke.
LINGER = 30.0


# As plain numbers: these are compared for every call.
_DATA, _OPEN, _ACK = int(Kind.DATA), int(Kind.OPEN), int(Kind.ACK)
_META_LIMIT = frames.META_LIMIT


class ClientStream:
    """One client's stream; the endpoint of whichever connection it has.

    Args:
        client: The client's name for itself.
        incarnation: Identity of this agent's process.
        pod_name: Name of the pod.
        calls: Where calls are opened.
        allocate: Gives memory for arguments that are longer than a frame.
        on_over: The client is gone for good.
    """

    def __init__(
        self,
        client: str,
        *,
        incarnation: str,
        pod_name: str,
        calls: Calls,
        allocate: Callable[[int], Payload],
        on_over: Callable[[ClientStream], None],
    ) -> None:
        self.client = client
        self._incarnation = incarnation
        self._pod_name = pod_name
        self._calls = calls
        self._allocate = allocate
        self._on_over = on_over
        self._connection: Connection | None = None
        self._outbox = Outbox()
        self._inbox = Inbox()
        self._relays: dict[int, Relay] = {}
        # Numbers of calls that were opened elsewhere: others may have left them.
        self._attached: set[int] = set()
        # Whether its connection is its first: later ones lead past whoever counts them.
        self._is_first = True
        # Relays with something to send, in turn.
        self._ready: deque[Relay] = deque()
        # Frames that the client says it has, on a connection that is being opened.
        self._resume_at: int | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._is_over = False

    # ----------------------------------------------------------------------- the registry

    @property
    def is_connected(self) -> bool:
        """Whether the client is there."""
        return self._connection is not None

    def expect(self, resume_at: int | None) -> None:
        """A connection is about to be opened.

        Args:
            resume_at: Frames that the client has, when it goes on with this stream.

        Raises:
            ProtocolError: Frames that it lacks are gone.
        """
        if resume_at is not None:
            self._outbox.after(resume_at)
        self._resume_at = resume_at
        if self._connection is not None:
            # The client has left it, even if this end has not noticed yet.
            self._connection.abort("the client has opened another connection")
        self._wait_for_client()

    def go_away(self, reason: str) -> None:
        """Say that no more calls are taken; those that run go on."""
        if self._connection is not None:
            self._connection.send(frames.encode(Kind.GOAWAY, 0, frames.Goaway(reason)))

    def end(self, code: int = websocket.GOING_AWAY, reason: str = "") -> None:
        """The client is gone for good, or is to be: its calls are cancelled."""
        if self._is_over:
            return
        self._is_over = True
        if self._linger is not None:
            self._linger.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close(code, reason)
        relays = list(self._relays.values())
        self._relays.clear()
        self._ready.clear()
        for relay in relays:
            relay.abandon()
        self._on_over(self)

    def counted(self) -> set[Call]:
        """Calls that somebody who counts first connections knows of."""
        if not (self.is_connected and self._is_first):
            return set()
        found = self._relays.items()
        return {r.call for n, r in found if r.call is not None and n not in self._attached}

    def joined(self) -> set[Call]:
        """All calls of the client."""
        return {relay.call for relay in self._relays.values() if relay.call is not None}

    # ----------------------------------------------------------------------- the connection

    def on_open(self, connection: Connection) -> None:  # noqa: D102  # Endpoint's
        self._connection = connection
        self._is_first = self._resume_at is None
        if self._linger is not None:
            self._linger.cancel()
        resume_at, self._resume_at = self._resume_at, None
        welcome = frames.Welcome(
            incarnation=self._incarnation,
            pod=self._pod_name,
            generation=self._calls.generation,
            protocol=versions.PROTOCOL,
            received=self._inbox.received,
            resumed=resume_at is not None,
            max_payload=ARGUMENTS_LIMIT,
        )
        connection.send(frames.encode(Kind.WELCOME, 0, welcome))
        if resume_at is not None:
            for frame in self._outbox.after(resume_at):
                connection.send(*frame)
            self._pump()

    def on_close(self, reason: str) -> None:  # noqa: D102  # Endpoint's
        connection = self._connection
        if connection is None or connection.is_open or self._is_over:
            return  # of a connection that was replaced
        if connection.close_code is None:
            self._wait_for_client()
        else:
            # It said goodbye, or something that made no sense.
            self.end()

    def _wait_for_client(self) -> None:
        """There is no connection: the client is gone if it opens none in time."""
        self._connection = None
        if self._linger is not None:
            self._linger.cancel()
        self._linger = asyncio.get_running_loop().call_later(LINGER, self.end)

    def on_writable(self) -> None:  # noqa: D102  # Endpoint's
        self._pump()

    def on_message(self, opcode: int, payload: memoryview) -> None:  # noqa: D102  # Endpoint's
        size = len(payload)
        try:
            if opcode != websocket.BINARY or size < frames.HEADER_BYTES:
                raise ProtocolError(f"a message of {size} bytes that is no frame")
            kind, _, _, meta_length, number = frames.HEADER.unpack_from(payload)
            rest = payload[frames.HEADER_BYTES :]
            if meta_length > len(rest) or meta_length > _META_LIMIT:
                raise ProtocolError(f"a frame of {size} bytes claims {meta_length} of meta")
            self._on_frame(kind, number, rest[:meta_length], rest[meta_length:])
            self._count(kind, size)
        except ProtocolError as error:
            self._break(error)

    def on_large(self, head: memoryview, length: int) -> memoryview | None:  # noqa: D102
        kind, _, _, meta_length, number = frames.HEADER.unpack_from(head)
        relay = self._relays.get(number)
        if kind != Kind.DATA or meta_length or relay is None:
            return None
        try:
            return relay.place(length - len(head))
        except ProtocolError as error:
            self._break(error)
            return None

    def on_placed(self, head: bytes, rest: memoryview) -> None:  # noqa: D102  # Endpoint's
        try:
            kind, _, _, meta_length, number = frames.HEADER.unpack_from(head)
            if meta_length > (0 if kind == _DATA else min(len(rest), _META_LIMIT)):
                raise ProtocolError(f"a frame claims {meta_length} bytes of meta")
            if kind != _DATA:
                self._on_frame(kind, number, rest[:meta_length], rest[meta_length:])
            else:
                self._placed(number, len(rest))
            self._count(kind, len(head) + len(rest))
        except ProtocolError as error:
            self._break(error)

    def _break(self, error: ProtocolError) -> None:
        """The client does not speak the protocol: nothing that it says makes sense any more."""
        self.end(websocket.PROTOCOL_ERROR, error.message)

    # -------------------------------------------------------------------------------- frames in

    def _count(self, kind: int, size: int) -> None:
        if kind in frames.UNCOUNTED or self._is_over:
            return
        if self._inbox.count(size) and self._connection is not None:
            meta = frames.Ack(self._inbox.acknowledged())
            self._connection.send(frames.encode(Kind.ACK, 0, meta))

    def _on_frame(self, kind: int, number: int, meta: memoryview, payload: memoryview) -> None:
        if kind == _DATA:
            self._on_data(number, payload)
            return
        if kind not in _FROM_CLIENT:
            raise ProtocolError(f"a client may not send a frame of kind {kind}")
        content: Any = frames.decode_meta(kind, meta)
        if kind == _OPEN:
            self._on_open_frame(number, content, payload)
        elif kind == _ACK:
            self._outbox.ack(content.frames)
            if self._ready:
                self._pump()
        elif kind == Kind.ATTACH:
            self._on_attach(number, content)
        else:
            relay = self._relays.get(number)
            if relay is None:  # it has ended meanwhile
                return
            if kind == Kind.CREDIT:
                if content.bytes < 0:
                    raise ProtocolError(f"a credit of {content.bytes} bytes")
                relay.on_credit(content.bytes)
            else:
                relay.cancel(content.reason)

    def _on_open_frame(self, number: int, request: frames.Open, payload: memoryview) -> None:
        size = request.body.total
        is_inline = size <= frames.CHUNK
        if len(payload) != (size if is_inline else 0):
            raise ProtocolError(f"an OPEN frame with {len(payload)} of {size} bytes")
        relay = self._new_relay(number, log_level(request))
        earlier = self._calls.repeated(request)
        try:
            if isinstance(earlier, Call):
                earlier.join(relay)
                relay.call = earlier
                return
            if earlier is not None:
                relay.on_outcome(earlier)
                return
            relay.call = call = self._calls.open(request, relay)
        except KubetorchError as error:
            # Of one that cannot be joined something runs: to send it again would not help.
            started = isinstance(earlier, Call)
            relay.on_failure(self._calls.failure(error, started=started))
            return
        if is_inline:
            call.begin(OwnedPayload(bytes(payload)))
            return
        try:
            relay.receive_into(self._allocate(size))
        except (OSError, MemoryError) as error:
            refusal = KubetorchError(f"no memory for arguments of {size} bytes: {error}")
            call.fail(refusal, started=False)

    def _on_attach(self, number: int, meta: frames.Attach) -> None:
        relay = self._new_relay(number, "debug" if meta.stream_logs else None)
        self._attached.add(number)
        found = self._calls.find(meta.id)
        try:
            if isinstance(found, Call):
                found.join(relay)
                relay.call = found
            elif found is not None:
                relay.on_outcome(found)
            else:
                raise ResultExpiredError(f"pod {self._pod_name} knows no call {meta.id}")
        except KubetorchError as error:
            relay.on_failure(self._calls.failure(error, started=True))

    def _on_data(self, number: int, payload: memoryview) -> None:
        relay = self._relays.get(number)
        place = relay.place(len(payload)) if relay is not None else None
        if place is not None:
            place[:] = payload
            self._placed(number, len(payload))

    def _placed(self, number: int, size: int) -> None:
        relay = self._relays.get(number)
        credit = relay.placed(size) if relay is not None else 0
        if credit:
            self.send(frames.encode(Kind.CREDIT, number, frames.Credit(credit)))

    def _new_relay(self, number: int, level: str | None) -> Relay:
        if number in self._relays:
            raise ProtocolError(f"there is a call with the number {number} already")
        relay = Relay(self, number, pod_name=self._pod_name, log_level=level)
        self._relays[number] = relay
        return relay

    # ------------------------------------------------------------------------------- frames out

    @property
    def can_send(self) -> bool:
        """See `Link`."""
        connection = self._connection
        return (
            connection is not None
            and not connection.is_congested
            and self._outbox.kept_bytes < UNACKNOWLEDGED_LIMIT
        )

    def send(self, *parts: Buffer) -> None:
        """See `Link`."""
        self._outbox.keep(parts)
        if self._connection is not None:
            self._connection.send(*parts)

    def is_ready(self, relay: Relay) -> None:
        """See `Link`."""
        self._ready.append(relay)
        if len(self._ready) == 1:
            self._pump()

    def is_over(self, relay: Relay) -> None:
        """See `Link`."""
        self._relays.pop(relay.number, None)
        self._attached.discard(relay.number)

    def _pump(self) -> None:
        """Send what waits, one frame of each call in turn, as long as the client reads."""
        ready = self._ready
        while ready:
            connection = self._connection
            if connection is None or connection.is_congested:
                return
            if self._outbox.kept_bytes >= UNACKNOWLEDGED_LIMIT:
                return
            relay = ready.popleft()
            if relay.send_next():
                ready.append(relay)


_FROM_CLIENT = frozenset(map(int, (Kind.OPEN, Kind.CANCEL, Kind.CREDIT, Kind.ACK, Kind.ATTACH)))
