"""Reads the logs that containers have written."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kubetorch.errors import KubernetesNotFoundError, KubernetesRequestError
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import Ref
from kubetorch.k8s.session import Call
from kubetorch.k8s.tuning import LIMITS

# A kubelet's answer, with status 200, for a container that it has removed.
_REMOVED_CONTAINER = b"unable to retrieve container logs for "


@dataclass(frozen=True)
class LogOptions:
    container: str | None = None
    previous: bool = False
    tail: int | None = None
    timestamps: bool = False

    def query(self) -> tuple[tuple[str, str], ...]:
        parameters = {
            "container": self.container,
            "previous": "true" if self.previous else None,
            "tailLines": self.tail,
            "timestamps": "true" if self.timestamps else None,
        }
        return tuple((name, str(value)) for name, value in parameters.items() if value is not None)


async def read(
    client: Client,
    pod: Ref,
    options: LogOptions | None = None,
    *,
    limit: int = LIMITS.pod_log_bytes,
) -> bytes:
    """Read the log as it is now."""
    ref, parameters = replace(pod, subresource="log"), (options or LogOptions()).query()
    query = (*parameters, ("limitBytes", str(limit)))
    call = Call(client.action("get", ref), "GET", client.path(ref), query)
    log = await client.session.fetch(call)
    if log.startswith(_REMOVED_CONTAINER):
        raise KubernetesNotFoundError(
            f"{call.action}: {log.decode('utf-8', 'replace').strip()}",
            hint="the container is not there any more; its next run may have a log",
        )
    return log


#: A kubelet's answer, with status 200, for a log that it has just removed for the next run's.
_REMOVED_LOG = b"failed to try resolving symlinks in path "


async def read_ended(client: Client, pod: Ref, options: LogOptions) -> bytes:
    """The log of a container's former run, or of its present run if the former log is removed."""
    try:
        log = await read(client, pod, replace(options, previous=True))
    except KubernetesRequestError:  # 400: there was none; 404: it was removed
        log = b""
    if log and not log.startswith(_REMOVED_LOG):
        return log
    return await read(client, pod, replace(options, previous=False))
