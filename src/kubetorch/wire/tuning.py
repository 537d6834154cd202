"""Times and limits that both ends of a connection rely on."""

from __future__ import annotations

from kubetorch.lib.tuning import Table


class Timing(Table):
    """Times that two processes agree on; all in seconds."""

    # ------------------------------------------------------------------ calls
    #: Longest time of a call, 3 years: event loops cannot count more of them.
    longest_call_seconds: float = 1e8
    #: Pause before the second attempt of a call; it doubles each time. It is left out of messages.
    retry_backoff_seconds: float = 1.0
    #: Pause between two attempts at most. It is left out of messages, too.
    retry_longest_backoff_seconds: float = 60.0

    # ------------------------------------------------------------------ other requests
    #: Time that a step may take in a running pod, unless the request names another.
    image_step_seconds: float = 3600.0
    #: Time by which a client waits longer than the controller, for the controller's other work.
    answer_margin_seconds: float = 30.0

    # ------------------------------------------------------------------ teardown
    #: Time that running calls have to end in a teardown, unless the request names another.
    teardown_grace_seconds: float = 5.0
    #: Time after the grace until remaining pods are an error; processes end sooner.
    teardown_slack_seconds: float = 30.0

    # ------------------------------------------------------------------ tokens
    #: Time by which the clocks of a token's issuer and its checker may differ.
    clock_skew_seconds: float = 60.0


class Limits(Table):
    """Bytes and counts that a sender keeps to and a receiver refuses more of."""

    # ------------------------------------------------------------------ frames of a stream
    #: Payload of one frame: calls on one connection take turns chunk by chunk.
    chunk_bytes: int = 256 * 1024
    #: Payload under way for one call in one direction without a CREDIT.
    window_bytes: int = 8 * 1024 * 1024
    #: Bytes of one yielded value that are granted only when the program takes the value.
    withheld_bytes: int = window_bytes // 2
    #: Meta of a frame; both ends end a stream that brings more.
    meta_bytes: int = 4 * 1024 * 1024
    #: Frames that a receiver acknowledges together: the sender keeps the unacknowledged ones.
    acknowledged_frames: int = 64
    #: Bytes after which it acknowledges fewer frames.
    acknowledged_bytes: int = 2 * 1024 * 1024

    # ------------------------------------------------------------------ payloads
    #: Arguments of a call, which the agent has in its memory.
    arguments_bytes: int = 1024**3
    #: Calls of one stream whose arguments lie in memory files; the arguments of others are sent.
    memory_file_calls: int = 128
    #: Blob of a working directory or an image.
    blob_bytes: int = 8 * 1024**3
    #: Segments of a payload, whose sizes travel in one frame.
    payload_segments: int = 10_000
    #: The number of segments and their sizes.
    segment_sizes_bytes: int = 4 + 8 * payload_segments
    #: Buffer that is copied into its neighbour; a larger buffer is its own piece.
    copied_buffer_bytes: int = 4096

    # ------------------------------------------------------------------ values that take no bytes
    #: Rows of a value without bytes for them, which would take memory nevertheless.
    empty_rows: int = 1024 * 1024
    #: Rows of an array without elements, which become elements of a list.
    empty_array_rows: int = 1 << 20
    #: Product of an empty array's dimensions that are not 0: a sum over an axis has as many
    #: elements.
    empty_array_elements: int = 1 << 28
    #: Labels of a range; the values beside the range are as many.
    range_labels: int = 1 << 28
    #: Labels of a range without values beside it: an array of the labels has 512 MiB.
    bare_range_labels: int = 1 << 26
    #: Labels of a range inside a value, of which pandas makes an array.
    inner_range_labels: int = 1000
    #: Dictionaries of Arrow that are checked: with each batch, all dictionaries.
    checked_dictionary_bytes: int = 1 << 36

    # ------------------------------------------------------------------ failures
    #: Message or traceback; a longer text is cut in the middle, the pod's log has it.
    failure_text_characters: int = 256 * 1024
    #: JSON of a failure, which travels in one frame. Text and traceback alone always fit.
    failure_json_bytes: int = 4 * 1024 * 1024
    #: Failure in a message of a session, which has few further fields.
    session_failure_bytes: int = failure_json_bytes - 512 * 1024
    #: JSON of all members of one exception together.
    failure_members_characters: int = 256 * 1024
    #: JSON of an exception's plain attributes.
    failure_state_characters: int = 1024 * 1024
    #: Name of an exception's class, and of the module of the class.
    failure_name_characters: int = 1000
    #: Chain of causes that is described.
    failure_causes: int = 20
    #: Values that are copied of one value: lists that share parts may have any number of values.
    failure_values: int = 100_000
    #: Levels of one value that are copied.
    failure_value_levels: int = 9
    #: Items of one container that are copied.
    failure_value_items: int = 1000

    # ------------------------------------------------------------------ other messages
    #: Message of a shell, in both directions.
    shell_message_bytes: int = 256 * 1024
    #: Message of a debugger, in both directions: longer output travels in several.
    debug_message_bytes: int = 64 * 1024
    #: Last lines of a workload's log that a request may ask for.
    log_tail_lines: int = 100_000

    def __post_init__(self) -> None:
        assert self.failure_json_bytes <= self.meta_bytes, "a failure travels in one frame"
        assert 6 * 2 * self.failure_text_characters < self.session_failure_bytes, (
            "text and traceback of a failure fit, even if JSON escapes each of their characters"
        )
        assert self.segment_sizes_bytes <= self.meta_bytes, "the sizes travel in one frame"
        assert self.acknowledged_bytes < self.window_bytes, (
            "a sender with a full window is acknowledged"
        )


TIMING = Timing()
LIMITS = Limits()
