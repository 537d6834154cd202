"""The log lines of the pods of a workload, as one stream.

First come the last lines of all pods, in the order of their times; they come from the agents, and
from the backend for a pod whose agent does not answer. Then a follower gets new lines as they come,
of the present pods and of later ones, until the workload is deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

import msgspec

from kubetorch.controller.backends.base import Backend, PodStatus
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.controller.workload import Workload
from kubetorch.errors import ProtocolError
from kubetorch.lib import async_http
from kubetorch.lib.tasks import cancel_all
from kubetorch.wire import messages, routes
from kubetorch.wire.messages import DeployLog


class _Line(msgspec.Struct, frozen=True):
    """The fields of a line in a pod's log that are used (docs/design/logs.md)."""

    time: float
    text: str
    source: str = "stdout"
    level: str | None = None
    rank: int | None = None


_decoder = msgspec.json.Decoder(_Line)


class PodLogs:
    def __init__(
        self,
        workload: Workload,
        backend: Backend,
        *,
        token: Callable[[], str],
        may_read_others: Callable[[], Awaitable[bool]],
        pod: str | None = None,
    ) -> None:
        self._workload = workload
        self._backend = backend
        self._token = token
        self._may_read_others = may_read_others
        self._pod = pod
        #: By pod: the last lines that the reader got.
        self._last_lines: dict[str, deque[bytes]] = {}
        #: Time of the last notice that the reader got.
        self._notice_time = 0.0

    async def tail(self, count: int) -> list[DeployLog]:
        """The last lines, the oldest first."""
        pods = self._pods()
        tails = await asyncio.gather(
            *(self._tail(pod, max(count, LIMITS.joined_log_lines)) for pod in pods)
        )
        lines = self._new_notices()
        for pod, raw in zip(pods, tails, strict=True):
            self._last_lines[pod.name] = deque(
                raw[-LIMITS.joined_log_lines :], LIMITS.joined_log_lines
            )
            lines += [line for line in (_parse(raw_line, pod.name) for raw_line in raw) if line]
        lines.sort(key=lambda line: line.time)
        return lines[-count:] if count else []

    async def follow(self) -> AsyncIterator[DeployLog]:
        """New lines as they come; call `tail` first."""
        queue: asyncio.Queue[DeployLog] = asyncio.Queue(LIMITS.waiting_log_lines)
        followers: dict[str, asyncio.Task[None]] = {}
        workload_change = asyncio.ensure_future(self._workload.changes.wait())
        next_line = asyncio.ensure_future(queue.get())
        self._start_followers(followers, queue)
        try:
            for notice in self._new_notices():
                yield notice
            while not self._workload.is_gone:
                done, _ = await asyncio.wait(
                    {next_line, workload_change}, return_when=asyncio.FIRST_COMPLETED
                )
                if next_line in done:
                    yield next_line.result()
                    next_line = asyncio.ensure_future(queue.get())
                if workload_change in done:
                    for notice in self._new_notices():
                        yield notice
                    workload_change = asyncio.ensure_future(self._workload.changes.wait())
                    self._start_followers(followers, queue)
            # The last words of its pods, as far as they have arrived.
            for _ in range(1 + queue.qsize()):
                await asyncio.wait([next_line], timeout=0)
                if next_line.done():
                    yield next_line.result()
                    next_line = asyncio.ensure_future(queue.get())
            for notice in self._new_notices():
                yield notice
        finally:
            await cancel_all([next_line, workload_change, *followers.values()])

    def _new_notices(self) -> list[DeployLog]:
        """What the controller said about the service, for readers of all pods."""
        if self._pod is not None:
            return []
        notices = [line for line in self._workload.notices if line.time > self._notice_time]
        self._notice_time = notices[-1].time if notices else self._notice_time
        return notices

    def _pods(self) -> list[PodStatus]:
        return [pod for pod in self._workload.pods if self._pod in (None, pod.name)]

    def _start_followers(
        self, followers: dict[str, asyncio.Task[None]], queue: asyncio.Queue[DeployLog]
    ) -> None:
        for pod in self._pods():
            task = followers.get(pod.name)
            # Only an agent with a session answers; a later session is a change of the workload.
            if (task is None or task.done()) and self._workload.has_session(pod.name):
                followers[pod.name] = asyncio.ensure_future(self._follow(pod, queue))

    async def _follow(self, pod: PodStatus, queue: asyncio.Queue[DeployLog]) -> None:
        last_lines = self._last_lines.setdefault(pod.name, deque(maxlen=LIMITS.joined_log_lines))
        # The stream begins with lines that the reader has, unless newer lines pushed them out.
        repeated_lines, overlap_left = Counter(last_lines), LIMITS.joined_log_lines
        try:
            async with contextlib.aclosing(
                self._lines(pod, tail=LIMITS.joined_log_lines, follow=True)
            ) as lines:
                async for raw in lines:
                    overlap_left -= 1
                    if overlap_left >= 0 and repeated_lines[raw] > 0:
                        repeated_lines[raw] -= 1
                        continue
                    last_lines.append(raw)
                    line = _parse(raw, pod.name)
                    if line is not None:
                        await queue.put(line)
        except OSError:
            return  # its agent ended; a change of the workload follows when it connects again

    async def _tail(self, pod: PodStatus, count: int) -> list[bytes]:
        try:
            return [line async for line in self._lines(pod, tail=count, follow=False)]
        except OSError:
            # No agent has checked the token, and the backend would show the log of any user's pod.
            if not pod.is_ours and not await self._may_read_others():
                return []
            namespace = self._workload.record.namespace
            return await self._backend.log_tail(namespace, pod.name, count)

    async def _lines(
        self, pod: PodStatus, *, tail: int, follow: bool
    ) -> AsyncGenerator[bytes, None]:
        """Lines of a pod's log; `OSError` when its agent does not answer, or not to the end."""
        url = f"{pod.url}{routes.LOGS}?tail={tail}&follow={str(follow).lower()}"
        headers = {routes.AUTHORIZATION: f"Bearer {self._token()}"}
        fetched = async_http.fetch(
            "GET",
            url,
            headers,
            connect_timeout=TIMING.agent_log_seconds,
            timeout=TIMING.agent_log_seconds,
        )
        try:
            async with fetched as answer:
                if answer.status != 200:
                    raise ConnectionError(f"{url} answered {answer.status}")
                async for line in answer.lines(limit=LIMITS.log_line_bytes, timeout=None):
                    yield line
        except async_http.TooLargeError as error:
            raise ConnectionError(str(error)) from error


def _parse(raw: bytes, pod: str) -> DeployLog | None:
    try:
        line = _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):  # cut when its agent was killed
        return None
    return DeployLog(
        text=line.text,
        pod=pod,
        source=line.source,
        level=line.level,
        time=line.time,
        rank=line.rank,
    )


def check_pod(workload: Workload, pod: str) -> str | None:
    """The pod that a reader chooses; `None` for all pods."""
    if pod and pod not in workload.pod_names:
        pods_in_words = ", ".join(sorted(workload.pod_names)) or "none"
        raise ProtocolError(
            f"{workload.record.name} has no pod {pod}; the pods are {pods_in_words}"
        )
    return pod or None


def encode(lines: list[DeployLog]) -> bytes:
    return b"".join(messages.encode(line) + b"\n" for line in lines)
