"""A `POST` to a service with several pods: the pod that gets it passes it on to all of them.

That pod is a client of its siblings, and of itself: each runs the call as if it were alone, with
the same arguments and the same token. The answer is the JSON list of their answers, in pod order;
for a generator it is their lines, as they come, each with the number of its pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager

import msgspec

from kubetorch.errors import AgentDiedError, CallRefusedError, KubetorchError, SerializationError
from kubetorch.lib import async_http, backoff, deadlines, transports
from kubetorch.lib.asgi import JSON, NDJSON, Request, Responder
from kubetorch.lib.tasks import cancel_all
from kubetorch.pod.http import calling
from kubetorch.pod.membership import Membership
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.wire import exceptions, routes
from kubetorch.wire.messages import Member

_PASSED_ON = (
    routes.AUTHORIZATION,
    routes.REQUEST_ID,
    routes.SERIALIZATION,
    routes.TIMEOUT,
    routes.QUEUE_TIMEOUT,
    routes.IDEMPOTENCY_KEY,
    "traceparent",
)


class _Answer(msgspec.Struct, frozen=True):
    """The answer of a pod, without the lines that were streamed."""

    status: int
    content_type: str = JSON
    body: bytes = b""

    @property
    def has_failed(self) -> bool:
        return self.status != 200

    @property
    def is_refusal(self) -> bool:
        """True if nothing of the call ran."""
        return self.status == CallRefusedError.status and (
            json.loads(self.body).get("code") == CallRefusedError.code
        )

    def as_json(self) -> bytes:
        """The body as a JSON value."""
        if self.content_type.startswith(JSON):
            return self.body
        return json.dumps(self.body.decode(errors="replace")).encode()


async def call(
    request: Request, respond: Responder, members: Membership, ordinals: Sequence[int]
) -> None:
    """Run the call that a request describes on these pods, and answer with their answers."""
    body = await request.body(LIMITS.post_body_bytes)
    headers = {
        name: request.headers[name.lower()]
        for name in _PASSED_ON
        if name.lower() in request.headers
    }
    timeout = calling.timeout_of(request.headers)
    patience = TIMING.broadcast_reach_seconds
    if timeout is not None:
        patience = min(timeout, patience)
    output = _Output(respond)
    tasks = [
        asyncio.ensure_future(
            _Part(ordinal, members, patience).run(request.path, headers, body, output)
        )
        for ordinal in ordinals
    ]
    disconnect = asyncio.ensure_future(request.disconnected())
    try:
        await _settle(tasks, disconnect)
        if not disconnect.done():
            answers = [task.result() if task.done() else None for task in tasks]
            await _answer(answers, respond)
    finally:
        await cancel_all((*tasks, disconnect))


async def _settle(tasks: Sequence[asyncio.Task[_Answer]], disconnect: asyncio.Task[None]) -> None:
    """Wait for all answers, or for the first failure and answers within a moment of it."""
    pending = set(tasks)
    while pending and not disconnect.done():
        await asyncio.wait({*pending, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        pending = {task for task in pending if not task.done()}
        if any(task.done() and task.result().has_failed for task in tasks):
            if pending:
                await asyncio.wait(pending, timeout=TIMING.broadcast_settle_seconds)
            return


async def _answer(answers: Sequence[_Answer | None], respond: Responder) -> None:
    failed = [answer for answer in answers if answer is not None and answer.has_failed]
    if respond.has_begun:
        for answer in failed:
            await respond.write(answer.body + b"\n")
        await respond.write(b"", more=False)
    elif failed:
        first, *other_failures = (json.loads(answer.body) for answer in failed)
        first["other_errors"] = other_failures
        await respond.answer(failed[0].status, json.dumps(first, ensure_ascii=False).encode())
    else:
        values = [answer.as_json() for answer in answers if answer is not None]
        await respond.answer(200, b"[" + b",".join(values) + b"]", JSON)


class _Output:
    """The lines of all pods' generators, one after the other."""

    def __init__(self, respond: Responder) -> None:
        self._respond = respond
        self._writing = asyncio.Lock()

    async def write(self, ordinal: int, line: bytes) -> None:
        """Pass on a line, which is a JSON object."""
        async with self._writing:
            if not self._respond.has_begun:
                await self._respond.begin(200, NDJSON)
            await self._respond.write(b'{"pod":%d,%b\n' % (ordinal, line[1:]))


class _Part(msgspec.Struct, frozen=True):
    ordinal: int
    members: Membership
    patience: float

    async def run(
        self, path: str, headers: Mapping[str, str], body: bytes, output: _Output
    ) -> _Answer:
        """The answer of the pod; an error on the way becomes an answer, too.

        A pod that cannot be reached or refuses the call is tried again: it may be starting.
        """
        refused = None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.patience
        headers = {**headers, routes.ALONE: "1"}
        for delay in backoff.exponential(
            first=TIMING.broadcast_first_delay_seconds, limit=TIMING.broadcast_longest_delay_seconds
        ):
            member = self.members.find(self.ordinal)
            if member is not None:
                fetched = async_http.fetch(
                    "POST",
                    member.url + path,
                    headers,
                    body,
                    connect_timeout=TIMING.broadcast_connect_seconds,
                    timeout=None,
                )
                with contextlib.suppress(transports.UnreachableError):
                    answer = await self._exchange(fetched, member, output)
                    if not answer.is_refusal:
                        return answer
                    refused = answer
            remaining_seconds = deadline - loop.time()
            if remaining_seconds <= 0:
                break
            await deadlines.wait_at_most(min(delay, remaining_seconds), self.members.changes.wait())
        error = CallRefusedError(f"pod {self.ordinal} could not be reached")
        return refused or _failure(error, None, started=False)

    async def _exchange(
        self,
        fetched: AbstractAsyncContextManager[async_http.Answer],
        member: Member,
        output: _Output,
    ) -> _Answer:
        error: KubetorchError
        try:
            async with fetched as answer:
                return await self._read(answer, output)
        except transports.UnreachableError:
            raise
        except OSError:
            error = AgentDiedError(member.pod, "AgentDied")
        except async_http.TooLargeError as large:
            error = SerializationError(f"pod {member.pod} gave {large}")
        return _failure(error, member.pod, started=True)

    async def _read(self, answer: async_http.Answer, output: _Output) -> _Answer:
        content_type = answer.headers.get("content-type", "")
        if not content_type.startswith(NDJSON):
            body = [piece async for piece in answer.pieces(timeout=None)]
            return _Answer(answer.status, content_type, b"".join(body))
        async for line in answer.lines(limit=LIMITS.broadcast_value_bytes, timeout=None):
            await output.write(self.ordinal, line)
        return _Answer(200)


def _failure(error: KubetorchError, pod: str | None, *, started: bool) -> _Answer:
    failure = exceptions.describe_refusal(error, pod_name=pod, started=started)
    return _Answer(failure.status, body=failure.to_json())
