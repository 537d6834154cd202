"""Times and limits of the libraries, and the class of all such tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform as dataclass_transform
else:

    def dataclass_transform(**_: object):
        return lambda cls: cls


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Table:
    """Numbers by name, with defaults, that do not change once they are made.

    A frozen dataclass but for its price: a dataclass of sixty fields takes 5 ms to define, and
    every start of a program or a worker defines several.
    """

    def __init__(self, **numbers: float) -> None:
        for name, number in numbers.items():
            if not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} has no {name}")
            object.__setattr__(self, name, number)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Assert what has to hold between the numbers."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} of {type(self).__name__} does not change")


class Timing(Table):
    """Times of the libraries; in seconds, unless a name says another unit."""

    # ------------------------------------------------------------------ TCP
    #: Silence after which TCP probes the peer; the default of Linux is two hours.
    keepalive_idle_seconds: int = 15
    #: Pause between two probes.
    keepalive_interval_seconds: int = 5
    #: Probes without an answer after which the peer is given up.
    keepalive_probes: int = 4
    #: Time that sent data may go unacknowledged: as long as a silent peer takes to be given up.
    unacknowledged_milliseconds: int = 1000 * (
        keepalive_idle_seconds + keepalive_probes * keepalive_interval_seconds
    )

    # ------------------------------------------------------------------ WebSockets
    #: Pause between two pings, each of which a living peer answers.
    websocket_ping_seconds: float = 10.0
    #: Silence after which a peer is gone: it has left two pings unanswered.
    websocket_silence_seconds: float = 2 * websocket_ping_seconds
    #: Time for a close frame; a peer that does not read it is given up.
    websocket_close_seconds: float = 5.0
    #: Time that an acceptor has to decide about an upgrade: it may ask the Kubernetes API.
    upgrade_decision_seconds: float = 20.0

    # ------------------------------------------------------------------ HTTP
    #: Time that a blocking client keeps an idle connection: uvicorn closes it after 5 s.
    client_idle_connection_seconds: float = 4.0
    #: Time that an asynchronous client keeps an idle connection; Go's servers keep it for longer.
    pooled_connection_seconds: float = 55.0
    #: Time that a client has to read the refusal of its request: a connection closed at once would
    #: be reset by bytes that the client still sends, before the answer is read.
    http_refusal_seconds: float = 2.0

    # ------------------------------------------------------------------ proxy
    #: Time until the other server has taken the connection.
    proxy_connect_seconds: float = 10.0
    #: Time from the first byte of an answer's head to its last; until then the other server may
    #: compute for as long as it likes.
    proxy_head_seconds: float = 30.0
    #: Time that a side of a tunnel has to take the last bytes of the other side.
    proxy_close_seconds: float = 5.0
    #: Time for a refusal of an upgrade to arrive whole.
    proxy_refusal_seconds: float = 30.0
    #: Time that open requests have once the listener is closed.
    listener_goodbye_seconds: float = 0.5

    # ------------------------------------------------------------------ egress
    #: Time to resolve a name and connect to what it stands for.
    egress_connect_seconds: float = 15.0
    #: Time for open connections to end when the proxy is closed.
    egress_close_seconds: float = 2.0

    # ------------------------------------------------------------------ processes
    #: Pause from the end of a child until orphans are looked for: one search for many of them.
    orphan_search_delay_seconds: float = 1.0
    #: Time for the owner of an ended session leader to wait for it: killing takes up to 10 s.
    ended_leader_seconds: float = 30.0
    #: Pause between two checks of the descriptors: the system does not report a new limit.
    descriptor_check_seconds: float = 1.0

    # ------------------------------------------------------------------ files
    #: Time that a freed memory file is kept for the next value of about its size.
    idle_memory_file_seconds: float = 1.0
    #: Time that a program waits for another program that writes the file of settings.
    settings_lock_seconds: float = 10.0

    def __post_init__(self) -> None:
        assert self.websocket_silence_seconds >= 2 * self.websocket_ping_seconds, (
            "one lost ping does not end a connection"
        )


class Limits(Table):
    """Bytes and counts that the libraries keep, read or wait for at most."""

    # ------------------------------------------------------------------ HTTP/1 messages
    #: Head of a message: browsers send up to 16 KiB of cookies, Node.js takes 16 KiB in all, nginx
    #: 32 KiB, `http.client` 64 KiB a line.
    http_head_bytes: int = 64 * 1024
    #: Trailers, and all else outside of the body, after a head; trailers are dropped.
    http_trailers_bytes: int = 64 * 1024
    #: Bytes that the framing of chunks may add to each byte of a body: `1\r\nx\r\n` has five.
    chunk_framing_bytes: int = 8
    #: Interim answers before an answer: servers send one or two.
    interim_answers: int = 100
    #: Line of an answer that is read line by line: the reader keeps an unfinished line whole.
    answer_line_bytes: int = 64 * 1024**2

    # ------------------------------------------------------------------ egress
    #: Head of a request to the proxy.
    egress_head_bytes: int = 64 * 1024
    #: Bytes that are copied at once.
    egress_copied_bytes: int = 256 * 1024

    # ------------------------------------------------------------------ HTTP server
    #: Part of a body that waits until the application takes it; then nothing more is read.
    waiting_body_bytes: int = 256 * 1024
    #: Part of a body that is read and dropped after the answer, so that the client can read that.
    dropped_body_bytes: int = 4 * 1024 * 1024
    #: Bytes that each dropped piece counts for beside its own: many tiny chunks take time, too.
    dropped_piece_bytes: int = 64
    #: Pipelined requests that wait on one connection before nothing more is parsed.
    pipelined_requests: int = 16
    #: Pipelined requests that one piece of a connection's bytes may bring.
    pipelined_requests_of_piece: int = 256
    #: Chunks and requests that are parsed before other connections have their turn.
    parts_per_turn: int = 500
    #: Bytes into which a byte of gzip may be decompressed: ordinary text has a tenth of this; a
    #: body of a higher ratio is made to cost the server time.
    inflated_bytes_per_byte: int = 100
    #: Bytes that any body may be decompressed into.
    inflated_free_bytes: int = 1024 * 1024
    #: Bytes of gzip that one turn of the event loop decompresses.
    deflated_turn_bytes: int = 16 * 1024
    #: Bytes that one turn of the event loop may make of them.
    inflated_turn_bytes: int = 64 * 1024

    # ------------------------------------------------------------------ clients and proxy
    #: Idle connections of a blocking client, so that one client never holds more of a server's.
    client_idle_connections: int = 8
    #: Idle connections of an asynchronous client, to all servers together.
    pooled_connections: int = 32
    #: Bytes that wait for a side of a tunnel before the other side is not read any more.
    proxy_waiting_bytes: int = 256 * 1024
    #: Bytes that a client may send before its upgrade is made; then it is not read any more.
    early_upgrade_bytes: int = 64 * 1024

    # ------------------------------------------------------------------ WebSockets
    #: Bytes in the transport from which a connection counts as congested: two chunks of a large
    #: message, so that the socket never runs dry while the next one is prepared.
    websocket_waiting_bytes: int = 512 * 1024
    #: Length from which the handler says where a message belongs, so that it is not copied.
    large_message_bytes: int = 64 * 1024
    #: Bytes of a large message that the handler sees first: the header of a frame.
    large_message_head_bytes: int = 16
    #: Bytes that are read at once at first: a controller has thousands of silent connections.
    first_scratch_bytes: int = 8 * 1024
    #: Bytes that are read at once at most: a connection with much traffic soon gets them.
    longest_scratch_bytes: int = 256 * 1024
    #: Free bytes below which the scratch memory is moved before the next read.
    scratch_room_bytes: int = 4096
    #: Bytes that are read after a large message: the header and first bytes of the next one, which
    #: is likely to be large too. More would be read only to be copied to where it belongs.
    peeked_bytes: int = 2048
    #: Body of a refused upgrade that is read: a page of a proxy, or a failure in JSON.
    refused_upgrade_bytes: int = 1024 * 1024

    # ------------------------------------------------------------------ processes
    #: Line of a child's output; a longer one is cut into several.
    child_line_bytes: int = 16 * 1024
    #: Files and connections that a server with many clients needs.
    open_files: int = 65536
    #: Checks of the descriptors in a row that may fail with an unchanged limit: many clients may
    #: come at the same time.
    failed_descriptor_checks: int = 10

    # ------------------------------------------------------------------ memory that processes share
    #: Unused files that are kept, so that the next values need no new pages.
    idle_memory_file_bytes: int = 512 * 1024 * 1024
    #: Files that another process may use at a time; beyond, the oldest is given up.
    lent_memory_files: int = 64
    #: Bytes that are copied before other threads may run.
    memory_copy_bytes: int = 4 * 1024 * 1024
    #: File that serves any smaller value; a larger file serves those of a quarter of its size.
    fitting_memory_file_bytes: int = 1024 * 1024
    #: Sealed files of other processes that are mapped, or wait to be, at a time: before Python 3.13
    #: a mapping has a descriptor, and many programs may have no more than 1024.
    mapped_memory_files: int = 256
    #: Mappings of one file that are kept for further views, each with a descriptor, as above.
    idle_private_mappings: int = 2

    def __post_init__(self) -> None:
        assert self.large_message_head_bytes < self.large_message_bytes, (
            "the handler sees the head of a large message before its rest"
        )
        assert self.scratch_room_bytes + self.peeked_bytes <= self.first_scratch_bytes, (
            "the scratch memory has room for what is read after a large message"
        )


TIMING = Timing()
LIMITS = Limits()
