"""Times and limits of the local service and of the programs that start it.

What starts a spare agent does not import this module, which takes time: see `local.process`.
"""

from __future__ import annotations

from kubetorch.controller.tuning import TIMING as CONTROLLER_TIMING
from kubetorch.lib.tuning import Table


class Timing(Table):
    """Times of the local service; all in seconds."""

    #: A start may take it: the machine may be busy, and an earlier service may be ending.
    start_seconds: float = 30.0
    #: A stop may take it: pods let their calls end for some of them.
    stop_seconds: float = 30.0
    #: A service waits for the lock of an earlier one, which lets its requests end before it exits.
    service_lock_seconds: float = 10.0
    #: A service that gives up and whose closing hangs ends after it: the next one waits for it.
    hung_close_seconds: float = service_lock_seconds / 2
    #: A service without workloads stops after so long without a request, unless its user says
    #: another time.
    idle_seconds: float = 60.0

    def __post_init__(self) -> None:
        closing_seconds = (
            CONTROLLER_TIMING.server_close_seconds
            + CONTROLLER_TIMING.stopped_pod_grace_seconds
            + CONTROLLER_TIMING.agent_exit_seconds
        )
        assert closing_seconds < self.service_lock_seconds, (
            "a service waits longer than the earlier one needs to close"
        )
        assert self.hung_close_seconds < self.service_lock_seconds < self.start_seconds, (
            "the program that starts a service hears that an earlier one holds the lock"
        )
        assert closing_seconds < self.stop_seconds, "a stop does not fail because a pod is slow"


class Limits(Table):
    """Bytes and counts of the local service."""

    #: `service.log`, at which a start begins a new one.
    service_log_bytes: int = 1024 * 1024
    #: What the disk has of a data store that a bucket keeps, with all that is on disk alone.
    bucket_copies_bytes: int = 20 * 1024**3
    #: Last lines of `service.log` in the error of a failed start.
    failed_start_lines: int = 20


TIMING = Timing()
LIMITS = Limits()
