"""Times and limits of the worker, and those of its protocol, on which the agent relies too."""

from __future__ import annotations

from kubetorch.lib.tuning import Table


class Timing(Table):
    """Times of the worker; all in seconds."""

    # --------------------------------------------------------------------------------------- calls
    #: Pause between two reports of progress, which a loop may make in each turn; the last is sent.
    progress_interval_seconds: float = 0.05

    # --------------------------------------------------------------------------------- thread pool
    #: Duration up to which a job is quick: another thread would take as long to get it.
    quick_job_seconds: float = 0.0001
    #: Time that the deputy leaves to a job that should have been quick.
    deputy_grace_seconds: float = 0.001

    # ------------------------------------------------------------------------------------ debugger
    #: Time to connect to the agent, which is in the same pod.
    debugger_connect_seconds: float = 5.0
    #: Time to install debugpy: 7 MB. An index that does not answer is asked again meanwhile.
    debugger_install_seconds: float = 60.0
    #: Time in which a thread comes to a line of Python, and so can be stopped.
    debugger_interrupt_seconds: float = 30.0
    #: Pause between two looks for the thread of a call that is to stop, which may not have begun.
    debugger_poll_seconds: float = 0.02

    # ----------------------------------------------------------------------------------------- end
    #: Time that a process which is to end waits for the turn to say so: it may be never.
    exit_frame_seconds: float = 0.5
    #: Time that the main thread has to leave by itself: a call may hold it up.
    main_thread_exit_seconds: float = 1.0

    def __post_init__(self) -> None:
        assert self.quick_job_seconds < self.deputy_grace_seconds, (
            "the deputy leaves a job the time that quick jobs take"
        )


class Limits(Table):
    """Bytes and counts that the worker, and its protocol, have at most."""

    # ------------------------------------------------------------------------------------ payloads
    #: Payload that travels in the stream; a longer one lies in a memory file.
    inline_bytes: int = 256 * 1024
    #: The same of a worker that has no room for a memory file.
    inline_fallback_bytes: int = 1024**3
    #: Values together that a pod keeps on its disk, and so one of them.
    stored_value_bytes: int = 2 * 1024**3
    #: Room for a long frame at first, which doubles as it comes: a frame may claim any length.
    long_frame_first_bytes: int = 1024 * 1024

    # --------------------------------------------------------------------------------------- calls
    #: Values that a generator may send before the first GRANT.
    first_granted_values: int = 16
    #: Content type of a result, which becomes a header.
    content_type_bytes: int = 200
    #: Message of a report of progress; as JSON it may have eight times as many.
    progress_message_bytes: int = 4096
    #: Calls that WAITS names.
    waiting_calls: int = 100
    #: Name in WAITS of the call that another one waits for.
    waited_call_characters: int = 200
    #: Names in LOADED of the methods that the event loop runs and of batched ones, as JSON.
    method_names_bytes: int = 256 * 1024

    # ------------------------------------------------------------------------------------ debugger
    #: Prompt of a debugger; a longer one is output without an end of line.
    debugger_prompt_characters: int = 200
    #: Completions of a name, which a terminal lists.
    debugger_completions: int = 500
    #: End of what an installer says that fails, which becomes an error.
    debugger_problem_characters: int = 500

    # -------------------------------------------------------------------------------------- output
    #: Unfinished line that is collected before it is written.
    unfinished_line_bytes: int = 2048
    #: Name of a level of a line, which may be the user's.
    level_name_bytes: int = 64

    def __post_init__(self) -> None:
        assert self.inline_bytes < self.inline_fallback_bytes < self.stored_value_bytes, (
            "a value goes in the stream, in memory, or on the disk, in the order of its size"
        )


TIMING = Timing()
LIMITS = Limits()
