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
            lines += _parse(found)
    return lines[-count:]


def _parse(found: bytes) -> list[bytes]:
    """Lines of a pod's log, of what a kubelet answers: a moment, a space and the text each.

    Of text that is written over, such as a progress bar, the last state is taken. What has no
    moment (words of the kubelet's own, or a line that was cut) has that of the line before it.

    Args:
        found: The answer.
    """
    lines, time = [], 0.0
    for raw in found.split(b"\n"):
        if not raw:
            continue
        stamp, _, text = raw.partition(b" ")
        try:
            time = statuses.seconds(stamp.decode("ascii", "replace")[:19] + "Z")
        except ValueError:
            text = raw
        text = next((part for part in reversed(text.split(b"\r")) if part), b"")
        lines.append(msgspec.json.encode({"time": time, "text": text.decode("utf-8", "replace")}))
    return lines
