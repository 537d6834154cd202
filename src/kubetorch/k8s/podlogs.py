"""What containers write to their log, all of it or as it comes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from kubetorch.errors import KubernetesNotFoundError, KubernetesRequestError
from kubetorch.k8s import failures
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import Ref
from kubetorch.k8s.session import Call
from kubetorch.lib.httpanswer import BrokenError

# What a kubelet answers, with status 200, of a container that it has removed.
_NOT_THERE = b"unable to retrieve container logs for "
#: A line that is longer comes in pieces.
LONGEST_LINE = 256 * 1024


@dataclass(frozen=True)
class LogOptions:
    """Which part of which log.

    Attributes:
        container: The container; the pod's only one, or default one, when not given.
        previous: That of the container's run before this one.
        tail: Only so many of the last lines.
        since_seconds: Only what is younger.
        since_time: Only what came after this moment (RFC 3339).
        timestamps: Begin each line with its moment.
    """

    container: str | None = None
    previous: bool = False
    tail: int | None = None
    since_seconds: int | None = None
    since_time: str | None = None
    timestamps: bool = False

    def query(self, *, follow: bool) -> tuple[tuple[str, str], ...]:
        """What says it in a URL."""
        wanted = {
            "container": self.container,
            "previous": "true" if self.previous else None,
            "tailLines": self.tail,
            "sinceSeconds": self.since_seconds,
            "sinceTime": self.since_time,
            "timestamps": "true" if self.timestamps else None,
            "follow": "true" if follow else None,
        }
        return tuple((name, str(value)) for name, value in wanted.items() if value is not None)


async def read(
    client: Client, pod: Ref, options: LogOptions | None = None, *, limit: int = 16 * 1024**2
) -> bytes:
    """What there is of a log now.

    Args:
        client: Asks the server.
        pod: The pod.
        options: Which part of it.
        limit: Bytes of its beginning that are taken.

    Raises:
        KubernetesNotFoundError: Neither the API server nor the kubelet has it.
    """
    call = _call(client, pod, options or LogOptions(), follow=False)
    call = replace(call, query=(*call.query, ("limitBytes", str(limit))))
    found = await client.session.fetch(call)
    if found.startswith(_NOT_THERE):
        raise KubernetesNotFoundError(
            f"{call.action}: {found.decode('utf-8', 'replace').strip()}",
            hint="the container is not there any more; its next run may have a log",
        )
    return found


async def read_ended(client: Client, pod: Ref, options: LogOptions) -> bytes:
    """The log of a container's run before this one, or of this one where that is forgotten.

    Raises:
        KubernetesError: There is neither.
    """
    try:
        return await read(client, pod, replace(options, previous=True))
    except KubernetesRequestError:  # 400: there was none; 404: it was removed
        return await read(client, pod, replace(options, previous=False))


async def follow(
    client: Client, pod: Ref, options: LogOptions | None = None
) -> AsyncGenerator[bytes, None]:
    """Lines of a log without their ends, as they come, until the container has ended.

    A kubelet ends a log when it rotates it under a slow reader, too: whoever needs every line goes
    on from the last one's timestamp.

    Args:
        client: Asks the server.
        pod: The pod.
        options: Which part of it.

    Raises:
        KubernetesUnavailableError: The connection broke.
    """
    call = _call(client, pod, options or LogOptions(), follow=True)
    async with (
        await client.session.send(call) as answer,
        # It may rightly be silent for days.
        contextlib.aclosing(answer.pieces(timeout=None)) as pieces,
    ):
        pending = bytearray()
        try:
            async for piece in pieces:
                pending += piece
                *lines, rest = bytes(pending).split(b"\n")
                pending = bytearray(rest)
                for line in lines:
                    yield line
                if len(pending) > LONGEST_LINE:
                    yield bytes(pending)
                    pending.clear()
        except BrokenError as error:
            raise failures.unavailable(call.action, client.session.server, error) from error
        if pending:
            yield bytes(pending)


def _call(client: Client, pod: Ref, options: LogOptions, *, follow: bool) -> Call:
    ref = replace(pod, subresource="log")
    return Call(client.action("get", ref), "GET", client.path(ref), options.query(follow=follow))
