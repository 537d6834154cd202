"""A spare agent: started, with everything imported, before anybody knows which pod it will be.

It waits on its standard input for the identity of a pod (`kubetorch.pod.spare`), and ends when that
ends: so it never outlives its controller. This module imports nothing of weight, so that the
service can start one before anything else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from kubetorch.lib import spawning


class Spare:
    """An agent that waits.

    Args:
        pid: Its process.
        mark: Value of `kubetorch.wire.podenv.MARK` in its environment.
        pipe: Where it reads who it is.
    """

    def __init__(self, pid: int, mark: str, pipe: int) -> None:
        self.pid = pid
        self.mark = mark
        self._pipe = pipe

    def become(self, environment: Mapping[str, str], log: str) -> int:
        """Let it be the pod with this environment and log; its process id.

        Raises:
            OSError: It died.
        """
        import json  # noqa: PLC0415  # the service starts its first spare before it imports that

        pod = {"environment": dict(environment), "log": log}
        with os.fdopen(self._pipe, "wb", buffering=0) as pipe:
            data = memoryview(json.dumps(pod).encode() + b"\n")
            while data:
                data = data[pipe.write(data) :]
        return self.pid

    def drop(self) -> None:
        """Let it end."""
        os.close(self._pipe)


def start(
    command: tuple[str, ...], environment: Mapping[str, str], *, mark: str, log: int
) -> Spare:
    """Start a spare.

    Args:
        command: What starts one.
        environment: Its environment, with the mark in it.
        mark: Its mark.
        log: Descriptor for what it writes before it is somebody.

    Raises:
        OSError: It cannot be started.
    """
    reading, writing = os.pipe()
    try:
        pid = spawning.spawn(command, environment, stdin=reading, output=log, errors=log)
    except OSError:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    return Spare(pid, mark, writing)
