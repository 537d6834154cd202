"""Times and limits of the worker, and those of its protocol, on which the agent relies too.

The worker runs in the user's interpreter: these are dataclasses of the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Times of the worker; all in seconds."""

    # --------------------------------------------------------------------------------------- calls
    #: Between two reports of progress, which a loop makes in each turn; the last is always sent.
    progress_interval_seconds: float = 0.05

    # --------------------------------------------------------------------------------- thread pool
    #: Up to this a job is quick: to hand it to another thread costs as much.
    quick_job_seconds: float = 0.0001
    #: The deputy leaves it to a job that should have been quick: a switch of threads may be late.
    deputy_grace_seconds: float = 0.001

    # ----------------------------------------------------------------------------------------- end
    #: A process that is to end waits for the turn to say so, which a thread may hold for ever.
    exit_frame_seconds: float = 0.5
    #: The main thread has it to leave by itself, then the event loop's thread ends the process.
    main_thread_exit_seconds: float = 1.0

    def __post_init__(self) -> None:
        assert self.quick_job_seconds < self.deputy_grace_seconds, (
            "the deputy leaves a job the time that quick jobs take"
        )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bytes and counts that the worker, and its protocol, have at most."""

    # ------------------------------------------------------------------------------------ payloads
    #: A longer payload lies in a memory file: to copy so much costs as much as to map it.
    inline_bytes: int = 256 * 1024
    #: Longest payload in the stream of a worker that has no room for a memory file.
    inline_fallback_bytes: int = 1024**3
    #: The values together that a pod keeps on its disk, and so one of them.
    stored_value_bytes: int = 2 * 1024**3
    #: First room for a long frame, doubled as it comes: a frame may claim more than it has.
    long_frame_first_bytes: int = 1024 * 1024

    # --------------------------------------------------------------------------------------- calls
    #: Values that a generator may send before the first GRANT, so that short ones need none.
    first_granted_values: int = 16
    #: Content type of a result, which becomes a header.
    content_type_bytes: int = 200
    #: Message of a report of progress; as JSON it may have eight times as many.
    progress_message_bytes: int = 4096
    #: Calls that WAITS names, and the call that each waits for: enough to see a circle.
    waiting_calls: int = 100
    #: Of the name of such a call: a service and a callable.
    waited_call_characters: int = 200
    #: Names in LOADED of the methods that the event loop runs, as JSON; `null` stands for the
    #: callable itself.
    loop_method_names_bytes: int = 256 * 1024

    # -------------------------------------------------------------------------------------- output
    #: An unfinished line is collected up to this, so that a print of many parts is one record.
    unfinished_line_bytes: int = 2048
    #: Name of a level, which is the user's.
    level_name_bytes: int = 64

    def __post_init__(self) -> None:
        assert self.inline_bytes < self.inline_fallback_bytes < self.stored_value_bytes, (
            "a value goes in the stream, in memory, or on the disk, in the order of its size"
        )


TIMING = Timing()
LIMITS = Limits()
