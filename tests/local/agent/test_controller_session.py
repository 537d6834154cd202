"""An agent's session with a controller that says what a test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kubetorch.lib import deadlines, http_server, sockets, websocket, websocket_protocol
from kubetorch.lib.websocket import Connection, Endpoint
from kubetorch.pod.session import ControllerAddress, Session
from kubetorch.pod.tuning import LIMITS
from kubetorch.wire import messages, versions
from kubetorch.wire.messages import (
    Activity,
    FromAgent,
    FromController,
    Hello,
    LogReport,
    Members,
    Observed,
    StageReport,
)

HELLO = Hello(
    namespace="ns",
    workload="f",
    pod="f-1",
    incarnation="i",
    url="http://127.0.0.1:1",
    protocol=versions.PROTOCOL,
    version="0",
)


class Controller(Endpoint):
    """The controller's end of all sessions; what was said on them."""

    def __init__(self) -> None:
        self.headers: list[dict[str, str]] = []
        self.received_messages: list[FromAgent] = []
        self.arrived = asyncio.Event()
        self.connection: Connection | None = None

    def accept(self, path: str, headers: dict[str, str]) -> Endpoint:
        self.headers.append(dict(headers))
        return self

    def on_open(self, connection: Connection) -> None:
        self.connection = connection

    def on_message(self, opcode: int, payload: memoryview) -> None:
        self.received_messages.append(messages.decode(FromAgent, bytes(payload)))  # type: ignore[arg-type]
        self.arrived.set()

    async def until(self, is_there: Callable[[], bool]) -> None:
        while not is_there():
            self.arrived.clear()
            await self.arrived.wait()

    def send(self, text: bytes) -> None:
        assert self.connection is not None
        self.connection.send(text, opcode=websocket_protocol.TEXT)

    def of(self, kind: type[FromAgent]) -> list[FromAgent]:
        return [message for message in self.received_messages if isinstance(message, kind)]


def run(scenario: Callable[[Controller, Session, list[FromController]], Awaitable[None]]) -> None:
    """With a session that is kept, and what the controller said on it."""

    async def main() -> None:
        controller, received = Controller(), list[FromController]()
        listener = sockets.listen(sockets.LOOPBACK, 0)
        upgrade = websocket.upgrader(controller.accept, max_message=2**20)
        server = http_server.Server(_nothing, upgrade=upgrade)
        await server.start(listener)
        session = Session(
            address=ControllerAddress(
                f"http://{sockets.LOOPBACK}:{listener.getsockname()[1]}/", fixed_token="token"
            ),
            hello=lambda: HELLO,
            activity=lambda: Activity(calls=0, last=1.0),
            on_message=received.append,
            on_settled=lambda call_id: None,
            on_abandoned=lambda: None,
        )
        running = asyncio.create_task(session.run())
        try:
            async with deadlines.timeout(20):
                await controller.until(lambda: bool(controller.of(Activity)))
                await scenario(controller, session, received)
        finally:
            running.cancel()
            await asyncio.wait([running])
            await server.close(5.0)

    asyncio.run(main())


async def _nothing(scope: object, receive: object, send: object) -> None:
    raise AssertionError("nobody asks for that")


def test_a_session_begins_with_who_the_pod_is_and_what_it_serves() -> None:
    async def scenario(controller: Controller, session: Session, _: list[FromController]) -> None:
        assert controller.headers[0]["authorization"] == "Bearer token"
        assert isinstance(controller.received_messages[0], Hello)
        session.report_observed(Observed(generation=3, serving=3))
        await controller.until(lambda: bool(controller.of(Observed)))
        assert controller.connection is not None
        controller.received_messages.clear()
        controller.connection.abort("on purpose")
        await controller.until(lambda: bool(controller.of(Activity)))
        assert [type(message) for message in controller.received_messages] == [
            Hello,
            Observed,
            Activity,
        ]

    run(scenario)


def test_what_only_a_newer_controller_says_is_ignored() -> None:
    async def scenario(
        controller: Controller, session: Session, received: list[FromController]
    ) -> None:
        controller.send(b'{"type":"of tomorrow"}')
        controller.send(b"no message")
        members = Members(epoch=1, members=())
        controller.send(messages.encode(members))
        while not received:
            await asyncio.sleep(0.01)
        assert received == [members]
        assert len(controller.headers) == 1

    run(scenario)


def test_an_import_that_prints_without_end_does_not_fill_the_session() -> None:
    async def scenario(controller: Controller, session: Session, _: list[FromController]) -> None:
        for generation in (1, 2):
            session.report_stage(StageReport(generation=generation, stage="importing"))
            for number in range(LIMITS.load_log_lines + 5):
                session.report_line(LogReport(generation=generation, text=f"line {number}"))
            session.report_observed(Observed(generation=generation, serving=generation))
        await controller.until(lambda: len(controller.of(Observed)) == 2)
        lines = [
            message for message in controller.received_messages if isinstance(message, LogReport)
        ]
        assert len(lines) == 2 * LIMITS.load_log_lines
        last = lines[LIMITS.load_log_lines - 1]
        assert (last.text, last.source) == (
            f"… more than {LIMITS.load_log_lines} lines; kt logs has the others",
            "kubetorch",
        )

    run(scenario)
