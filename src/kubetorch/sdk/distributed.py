"""`kt.distributed`: the addresses of the pods of a service, for code in these pods."""

from __future__ import annotations

import time
from math import inf

from kubetorch.config import environment
from kubetorch.errors import SpecError
from kubetorch.sdk import parameters
from kubetorch.sdk.tuning import TIMING


def pod_ips(quorum_workers: int | None = None, quorum_timeout: float = 0) -> list[str]:
    """The addresses of the pods of this service that answer now, sorted.

    It knows of pods that came later than this one, unlike the variable `POD_IPS`. Outside of a pod
    these are the addresses in the variable `LOCAL_IPS`, which commas separate.

    Args:
        quorum_workers: How many pods to wait for; one where this is not given.
        quorum_timeout: Seconds to wait; then those that are there are returned, perhaps none.

    Returns:
        An address for each pod. On the local backend all pods have the same one.

    Raises:
        RuntimeError: This pod runs no service of Kubetorch.
        SpecError: An argument is no such number.
    """
    quorum = 1 if quorum_workers is None else parameters.whole(quorum_workers)
    if quorum is None or quorum < 1:
        raise SpecError(
            f"quorum_workers is {quorum_workers!r}; it must be a whole number of at least 1"
        )
    timeout: object = quorum_timeout
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not is_number or not 0 <= quorum_timeout < inf:
        raise SpecError(f"quorum_timeout is {timeout!r}; it must be a number of seconds, 0 or more")
    file = environment.members_file()
    if file is None and environment.kubernetes_service() is None:
        return sorted(environment.local_ips())
    if file is None:
        raise RuntimeError(
            f"{environment.MEMBERS_FILE} is not set: this pod runs no service of Kubetorch, "
            "or the process was started without the environment of its worker"
        )
    until = time.monotonic() + quorum_timeout
    while True:
        try:
            addresses = file.read_text().split()
        except FileNotFoundError:  # the controller has not sent the members yet
            addresses = []
        if len(addresses) >= quorum or time.monotonic() >= until:
            return sorted(addresses)
        time.sleep(TIMING.members_poll_seconds)
