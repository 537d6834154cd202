"""An agent without workers that speaks the protocol and does to a call what a test says.

It lives in a thread of the test. What happens to a call is a coroutine of the test, found by the
name that is called; everything else (streams that survive their connections, credit,
acknowledgements) is done here the way the protocol demands.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kubetorch.errors import KubetorchError, UnauthorizedError
from kubetorch.lib import websocket, websocket_protocol
from kubetorch.lib.http_server import Refusal, Server
from kubetorch.sdk.calls.route import Location
from kubetorch.wire import codecs, exceptions, frames, routes, versions
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.frames import Inbox, Kind, Outbox
from tests.decoding import decode


class Call:
    """One call, for the coroutine that answers it."""

    def __init__(self, client: Client, number: int, opened: frames.Open) -> None:
        self.client = client
        self.number = number
        self.opened = opened
        self.body = bytearray(opened.body.total)
        self.filled = 0
        self.taken = 0
        self.room = wire_tuning.LIMITS.window_bytes
        self.has_room = asyncio.Event()
        self.is_cancelled = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    @property
    def value(self) -> dict[str, Any]:
        """The arguments, decoded."""
        segments = codecs.split(memoryview(self.body), self.opened.body.sizes)
        return codecs.decode(self.opened.body.codec, segments)

    @property
    def args(self) -> list[Any]:
        return list(self.value["args"])

    def send(self, kind: Kind, meta: Any = None, *payload: bytes | memoryview) -> None:
        self.client.send(frames.encode(kind, self.number, meta), *payload)

    async def log(self, text: str, source: str = "stdout", level: str | None = None) -> None:
        meta = frames.Log(text, self.client.agent.pod, source, level, 0.0)
        frame = frames.encode(Kind.LOG, self.number, meta)
        await self._take_room(len(frame) - frames.HEADER_BYTES)
        self.client.send(frame)

    def progress(
        self, current: float, total: float | None = None, message: str | None = None
    ) -> None:
        self.send(Kind.PROGRESS, frames.Progress(current, total, message))

    async def give(self, value: object) -> None:
        """A value of a generator."""
        await self._value(Kind.YIELD, value)

    async def result(self, value: object = None, *, streamed: bool = False) -> None:
        await self._value(Kind.RESULT, value, streamed=streamed)
        self.client.calls.pop(self.number, None)

    def error(self, error: BaseException, *, started: bool = True) -> None:
        failure = exceptions.describe(error, pod_name=self.client.agent.pod, started=started)
        self.client.send(frames.pack_header(Kind.ERROR, self.number) + failure.to_json())
        self.client.calls.pop(self.number, None)

    async def _value(self, kind: Kind, value: object, *, streamed: bool = False) -> None:
        codec = self.opened.body.codec
        segments = codecs.encode(codec, value)
        sizes = tuple(map(len, segments))
        total = codecs.layout(sizes)[1]
        body = frames.Body(codec, sizes, total)
        meta = frames.Yield(body) if kind is Kind.YIELD else frames.Result(body, 1, streamed)
        payload = memoryview(b"".join(codecs.join(segments)))
        if total <= wire_tuning.LIMITS.chunk_bytes:
            if kind is Kind.YIELD:
                await self._take_room(total)
            self.send(kind, meta, payload)
            return
        self.send(kind, meta)
        for start in range(0, total, wire_tuning.LIMITS.chunk_bytes):
            chunk = payload[start : start + wire_tuning.LIMITS.chunk_bytes]
            await self._take_room(len(chunk))
            self.send(Kind.DATA, None, chunk)

    async def _take_room(self, size: int) -> None:
        while self.room < size:
            self.has_room.clear()
            await self.has_room.wait()
        self.room -= size


class Client:
    """One client's stream, over all its connections."""

    def __init__(self, agent: ScriptedAgent) -> None:
        self.agent = agent
        self.outbox = Outbox()
        self.inbox = Inbox()
        self.calls: dict[int, Call] = {}
        self.connection: websocket.Connection | None = None
        self.resume_at: int | None = None

    def send(self, *parts: bytes | memoryview) -> None:
        self.outbox.keep(parts)
        if self.connection is not None:
            self.connection.send(*parts)

    def on_open(self, connection: websocket.Connection) -> None:
        self.connection = connection
        is_resumed, resume_at = self.resume_at is not None, self.resume_at or 0
        welcome = frames.Welcome(
            incarnation=self.agent.incarnation,
            pod=self.agent.pod,
            generation=1,
            protocol=versions.PROTOCOL,
            received=self.inbox.received,
            resumed=is_resumed,
        )
        connection.send(frames.encode(Kind.WELCOME, 0, welcome))
        if is_resumed:
            for parts in self.outbox.after(resume_at):
                connection.send(*parts)

    def on_message(self, opcode: int, payload: memoryview) -> None:
        kind, number, meta, body = decode(payload)
        call = self.calls.get(number)
        if isinstance(meta, frames.Open):
            self.agent.opened.append(meta)
            call = self.calls[number] = Call(self, number, meta)
            if (meta.method or meta.callable) in self.agent.early:
                self.begin(call)
            elif meta.body.total == len(body):
                self.fill(call, body)
        elif isinstance(meta, frames.Attach):
            self.agent.attached.append(meta)
            self.agent.on_attach(Call(self, number, _as_open(meta)))
        elif kind is Kind.DATA and call is not None:
            if call.task is None:
                self.fill(call, body)
        elif isinstance(meta, frames.Credit) and call is not None:
            call.room += meta.bytes
            call.has_room.set()
        elif isinstance(meta, frames.Cancel):
            self.agent.cancelled.append(meta.reason)
            if call is not None:
                call.is_cancelled.set()
        elif isinstance(meta, frames.Ack):
            self.outbox.ack(meta.frames)
        if kind not in frames.UNCOUNTED and self.inbox.count(len(payload)):
            ack = frames.Ack(self.inbox.acknowledged())
            if self.connection is not None:
                self.connection.send(frames.encode(Kind.ACK, 0, ack))

    def fill(self, call: Call, data: memoryview) -> None:
        call.body[call.filled : call.filled + len(data)] = data
        call.filled += len(data)
        call.taken += len(data)
        if call.filled == len(call.body):
            self.begin(call)
        elif call.taken >= wire_tuning.LIMITS.window_bytes // 4:
            self.send(frames.encode(Kind.CREDIT, call.number, frames.Credit(call.taken)))
            call.taken = 0

    def begin(self, call: Call) -> None:
        handler = self.agent.handlers[call.opened.method or call.opened.callable]
        loop = asyncio.get_running_loop()
        call.task = loop.create_task(handler(call))
        if call.opened.detached and self.agent.accepts:
            loop.call_soon(self.accept, call)  # unless the handler refuses it at once

    def accept(self, call: Call) -> None:
        if self.calls.get(call.number) is call:
            call.send(Kind.ACCEPTED)

    def on_large(self, head: memoryview, length: int) -> memoryview | None:
        return None

    def on_placed(self, head: bytes, rest: memoryview) -> None:
        self.on_message(websocket_protocol.BINARY, memoryview(head + bytes(rest)))

    def on_writable(self) -> None:
        pass

    def on_close(self, reason: str) -> None:
        if self.connection is not None and self.connection.is_open:
            return  # another one has taken over
        if self.connection is not None and self.connection.close_code is not None:
            self.agent.close_codes.append(self.connection.close_code)
        self.connection = None
        self.agent.closed.set()


def _as_open(meta: frames.Attach) -> frames.Open:
    return frames.Open(meta.id, "", frames.Body("json", (0,), 0))


Handler = Callable[[Call], Awaitable[None]]


class ScriptedAgent:
    """The agent.

    Attributes:
        handlers: What happens to a call, by the name that it calls.
        on_attach: What happens to an ATTACH.
        opened: Meta of the OPEN frames that came.
        attached: Meta of the ATTACH frames that came.
        cancelled: Reasons of the CANCEL frames that came.
        connects: How many upgrades were asked for.
        close_codes: With which connections were closed politely.
        closed: Some connection was closed.
        tokens: Tokens that are taken; `None`: all.
        refusal: Answers every upgrade, if there is one.
        accepts: It says that it has a detached call.
        early: Callables that run without their arguments, as a call does that runs already.
    """

    pod = "fake-0"

    def __init__(self, *, port: int = 0, **handlers: Handler) -> None:
        self.handlers: dict[str, Handler] = {"echo": echo, **handlers}
        self.on_attach: Callable[[Call], object] = lambda call: None
        self.opened: list[frames.Open] = []
        self.attached: list[frames.Attach] = []
        self.cancelled: list[str] = []
        self.connects = 0
        self.close_codes: list[int] = []
        self.closed = threading.Event()
        self.tokens: set[str] | None = None
        self.refusal: KubetorchError | None = None
        self.accepts = True
        self.early: set[str] = set()
        self.incarnation = os.urandom(4).hex()
        self.clients: dict[str, Client] = {}
        self.port = port
        self._loop = asyncio.new_event_loop()
        self._listening = threading.Event()
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ScriptedAgent:
        self._thread.start()
        assert self._listening.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop.is_closed():
            return
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        self._loop.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def locate(self) -> Location:
        return Location((self.url,), "token")

    def do(self, action: Callable[[], object]) -> Any:
        """Run something in the agent's loop; its result."""

        async def run() -> object:
            return action()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(60)

    def cut(self) -> None:
        """Break all connections, as a network does."""
        self.do(self._abort_connections)

    def die(self) -> None:
        """Forget everything, as an agent that was killed and started again."""

        self.do(self.die_now)

    def die_now(self) -> None:
        """As `die`, in the agent's loop."""
        self.incarnation = os.urandom(4).hex()
        self.give_up_now()

    def give_up_now(self) -> None:
        """Give up the streams of all clients, in the agent's loop."""
        for client in self.clients.values():
            client.connection = None
            for call in client.calls.values():
                if call.task is not None:
                    call.task.cancel()
        self.clients.clear()
        self._abort_connections()

    def _abort_connections(self) -> None:
        for connection in list(self._server.connections):
            if isinstance(connection, websocket.Connection):
                connection.abort("cut")

    def send_all(self, frame: bytes) -> None:
        """Send a frame on every connection, uncounted."""
        self.do(lambda: [c.connection.send(frame) for c in self.clients.values() if c.connection])

    def _accept(self, path: str, headers: Mapping[str, str]) -> Client:
        self.connects += 1
        token = headers[routes.AUTHORIZATION.lower()].removeprefix("Bearer ")
        refusal = self.refusal
        if self.tokens is not None and token not in self.tokens:
            refusal = UnauthorizedError("the token expired 3 s ago")
        if refusal is not None:
            raise Refusal(refusal.status, exceptions.describe(refusal).to_json())
        name = headers[routes.CLIENT.lower()]
        incarnation, _, received = headers.get(routes.RESUME.lower(), "").partition(":")
        is_known = incarnation == self.incarnation and name in self.clients
        client = self.clients[name] if is_known else Client(self)
        if client.connection is not None:  # its end was not noticed yet
            client.connection.abort("another one takes over")
        self.clients[name] = client
        client.resume_at = int(received) if is_known else None
        return client

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        upgrade = websocket.upgrader(self._accept, max_message=8 << 20)
        self._server = Server(_no_requests, upgrade=upgrade)
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        await self._server.start(listener)
        self._listening.set()
        await self._stop.wait()
        # asyncio leaks a connection that was accepted in the very pass of the loop that closes its
        # server (`Server._attach` asserts): no more are accepted a pass before.
        self._loop.remove_reader(listener)
        await asyncio.sleep(0)
        self._abort_connections()
        for client in self.clients.values():
            for call in client.calls.values():
                if call.task is not None:
                    call.task.cancel()
        other_tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*other_tasks, return_exceptions=True)
        await self._server.close(1.0)
        # A client that connected again meanwhile may be about to be accepted.
        late = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*late, return_exceptions=True)
        for connection in list(self._server.connections):
            connection.shutdown()
        self._abort_connections()
        await asyncio.sleep(0)


async def _no_requests(scope: Any, receive: Any, send: Any) -> None:
    raise NotImplementedError  # only upgrades come


async def echo(call: Call) -> None:
    """Return the arguments."""
    await call.result(call.args)


async def never(call: Call) -> None:
    """Neither return nor raise."""
    await call.is_cancelled.wait()
