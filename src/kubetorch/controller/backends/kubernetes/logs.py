"""What the kubelet keeps of a container's output, as lines of a pod's log.

An agent keeps the log of its pod itself, with who wrote what. When it does not answer (it crashed,
or never started), what it echoed to its container's output is still with the kubelet.
"""

from __future__ import annotations

import logging

import msgspec

from kubetorch.controller.backends.kubernetes import statuses
from kubetorch.errors import KubetorchError
from kubetorch.k8s import podlogs
from kubetorch.k8s.client import Client
from kubetorch.k8s.podlogs import LogOptions
from kubetorch.k8s.resources import PODS, Object, Ref

_log = logging.getLogger(__name__)


async def tail(client: Client, pod: Object, count: int) -> list[bytes]:
    """The last lines of the agent's container, of its run before this one too.

    Args:
        client: Asks the API server.
        pod: The pod.
        count: Lines.
    """
    metadata = pod["metadata"]
    ref = Ref(PODS, metadata["name"], metadata["namespace"])
    container = statuses.agent_container(pod)["name"]
    status = statuses.agent_status(pod)
    has_two = int(status.get("restartCount") or 0) > 0
    lines: list[bytes] = []
    for previous in (True, False) if has_two else (False,):
        options = LogOptions(container, previous=previous, tail=count, timestamps=True)
        try:
            found = await podlogs.read(client, ref, options)
        except KubetorchError as error:  # the container waits, or its run is forgotten
            _log.info("log not read pod=%s previous=%s error=%s", ref.name, previous, error.message)
        else:
            lines += map(_line, found.splitlines())
    return lines[-count:]


def _line(raw: bytes) -> bytes:
    stamp, _, text = raw.partition(b" ")
    time = statuses.seconds(stamp.decode("ascii", "replace")[:19] + "Z")
    return msgspec.json.encode({"time": time, "text": text.decode("utf-8", "replace")})
