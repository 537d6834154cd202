"""Times and limits of the installation."""

from __future__ import annotations

from kubetorch.lib.tuning import Table


class Timing(Table):
    """Times of the installation; all in seconds."""

    # ---------------------------------------------------------------------------------- installs
    #: The API server may take it to serve a definition.
    kind_established_seconds: float = 30.0
    #: The first lists of objects, before the wait for the controller.
    readiness_list_seconds: float = 30.0
    #: A cluster that retries makes the pods that it had refused within it.
    refused_pods_seconds: float = 5.0

    # ------------------------------------------------------------------------------------ checks
    #: A program in the controller's pod.
    pod_program_seconds: float = 15.0

    # ----------------------------------------------------------------------------------- removal
    #: Less than the Job of an uninstall may take, which is less than helm waits.
    removal_seconds: float = 240.0


class Limits(Table):
    """Counts of what the installation does and shows at most."""

    # ---------------------------------------------------------------------------------- installs
    #: Restarts after which a controller that ended is certain to end again.
    controller_restarts: int = 2
    #: Last lines of the controller's log in an error.
    controller_log_lines: int = 15
    #: Deepest nesting of templates that include each other.
    nested_templates: int = 50

    # ------------------------------------------------------------------------------------ checks
    #: Kinds that are checked.
    checked_kinds: int = 50
    #: Kinds that a finding names.
    named_kinds: int = 5

    # ----------------------------------------------------------------------------------- removal
    #: Requests that are under way at one time.
    concurrent_requests: int = 8
    #: Names in one message.
    named_objects: int = 10


TIMING = Timing()
LIMITS = Limits()
