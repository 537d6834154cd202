"""Times and limits of the client of Kubernetes."""

from __future__ import annotations

from kubetorch.lib.tuning import Table


class Timing(Table):
    """Times of the client; all in seconds."""

    # ---------------------------------------------------------------------------------- requests
    #: An API server has it to answer a request: a page of a large list takes seconds.
    request_seconds: float = 30.0
    #: A failed request is repeated for so long.
    request_patience_seconds: float = 10.0
    #: A connection to the API server has to be made within it.
    connect_seconds: float = 10.0
    #: Between two attempts of a request, at first.
    request_first_delay_seconds: float = 0.1
    #: And at most.
    request_longest_delay_seconds: float = 5.0

    # ----------------------------------------------------------------------------------- watches
    #: The server ends a watch after a random time of at least this, so that not all watches begin
    #: anew at the same time.
    watch_shortest_seconds: float = 240.0
    #: And at most.
    watch_longest_seconds: float = 300.0
    #: Before a watch or a list is repeated that failed, at first.
    watch_first_delay_seconds: float = 0.1
    #: And at most.
    watch_longest_delay_seconds: float = 3.0
    #: A watch that lasted so long was healthy: the pause after it is the shortest again.
    healthy_watch_seconds: float = 5.0
    #: Servers send a bookmark each minute. A server that sent nothing for so long waits for a
    #: version that it never had (etcd was restored), and would wait for ever.
    silent_watch_seconds: float = 150.0

    # ------------------------------------------------------------------------- streams with pods
    #: A WebSocket without a received byte is given up after it. API servers do not answer pings
    #: while a container does not read its input.
    stream_silence_seconds: float = 60.0

    # ------------------------------------------------------------------------------- credentials
    #: A plugin may take it, unless the kubeconfig gives another time.
    plugin_seconds: float = 30.0
    #: The same, at least, when it may talk to the user.
    interactive_plugin_seconds: float = 300.0
    #: The pipes of a killed plugin close within it, unless a process that left its group has them.
    plugin_pipe_close_seconds: float = 1.0
    #: A token file is read again after it; kubelets rotate tokens long before they end.
    token_file_reread_seconds: float = 60.0
    #: A plugin runs again so long before its credential expires: clocks differ.
    credential_renewal_seconds: float = 10.0

    def __post_init__(self) -> None:
        assert self.connect_seconds <= self.request_seconds, "a connection is made for a request"
        assert self.watch_shortest_seconds <= self.watch_longest_seconds, "they are bounds"
        assert 2 * 60.0 < self.silent_watch_seconds < self.watch_shortest_seconds, (
            "a server misses two bookmarks before it is silent, and is silent before its end"
        )
        assert self.watch_longest_delay_seconds < self.healthy_watch_seconds, (
            "a watch that fails again at once is not healthy"
        )
        assert self.plugin_seconds <= self.interactive_plugin_seconds, "people are slower"


class Limits(Table):
    """Bytes and counts that the client takes at most."""

    # ----------------------------------------------------------------------------------- answers
    #: An answer: a page of large objects has a part of it.
    answer_bytes: int = 256 * 1024**2
    #: One line of a watch: an object has at most 1.5 MiB in etcd, and more as JSON.
    watch_line_bytes: int = 16 * 1024**2
    #: The body of a refusal.
    refusal_bytes: int = 1024**2
    #: The beginning of a refusal that is no `Status`, which the error quotes.
    refusal_text_bytes: int = 300
    #: Objects of one page of a list, as kubectl asks for.
    page_objects: int = 500
    #: Requests with a short answer that are under way at the same time; further requests wait. A
    #: request that pauses before its next attempt is not under way.
    concurrent_requests: int = 32

    # ------------------------------------------------------------------------- streams with pods
    #: A message on a WebSocket; kubelets send at most 32 KiB at once.
    stream_message_bytes: int = 1024**2
    #: Unread messages at which the connection is not read any more.
    unread_high_bytes: int = 1024 * 1024
    #: Unread messages at which it is read again.
    unread_low_bytes: int = 256 * 1024
    #: Each output of a command, by default; the rest is dropped.
    command_output_bytes: int = 16 * 1024**2
    #: A log that is read at once.
    pod_log_bytes: int = 16 * 1024**2

    # ------------------------------------------------------------------------------- credentials
    #: Output of a plugin that is read: a credential has a few KiB.
    plugin_output_bytes: int = 1024 * 1024

    def __post_init__(self) -> None:
        assert self.unread_low_bytes < self.unread_high_bytes, "reading pauses, and goes on"
        assert self.refusal_text_bytes <= self.refusal_bytes < self.answer_bytes, (
            "a refusal is an answer, and its message a part of it"
        )


TIMING = Timing()
LIMITS = Limits()
