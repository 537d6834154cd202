"""An agent without workers: it speaks the session's protocol and serves what it is told to.

What it does is chosen by variables of its container:

    FAKE_CRASH=1            it says why and ends before it connects
    FAKE_FAIL=<generation>  it cannot load this generation
    FAKE_SLOW=<generation>  it begins to load this generation and never ends
    FAKE_CHILD=1            it leaves a process behind in a session of its own
    FAKE_STUBBORN=1         it does not end when it is told to
    FAKE_LOGS=1             it reports a line for each generation that it loads
    FAKE_PRESENT=<number>   of all agents only so many connect

What it is told of its world is in `members.jsonl` of its folder, with the time. SIGUSR1 has it ask
for a new world, SIGUSR2 for one of those that are there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from kubetorch.lib import websocket, websocket_protocol
from kubetorch.wire import exceptions, messages, routes, versions
from kubetorch.wire.messages import (
    Activity,
    CallReport,
    CancelCall,
    FromController,
    Hello,
    LogReport,
    Members,
    Observed,
    Probe,
    Probed,
    Regroup,
    RegroupFailed,
    Reload,
    StageReport,
    Terminate,
)
from kubetorch.wire.podenv import PodEnv

POD = PodEnv.read(os.environ)
ROOT = Path(POD.root)


class Agent:
    """The endpoint of its session."""

    def __init__(self) -> None:
        self.serving = 0
        self.epoch = 0
        self.connection: websocket.Connection | None = None
        self.closed = asyncio.Event()
        self.probes: set[asyncio.Task[None]] = set()

    def send(self, message: object) -> None:
        if self.connection is not None:
            self.connection.send(messages.encode(message), opcode=websocket_protocol.TEXT)

    def on_open(self, connection: websocket.Connection) -> None:
        self.connection = connection

    def on_message(self, opcode: int, payload: memoryview) -> None:
        message = messages.decode(FromController, bytes(payload))
        log("got", type(message).__name__)
        if isinstance(message, Members | RegroupFailed):
            if isinstance(message, Members) and message.world is not None:
                self.epoch = message.world.epoch
            with (ROOT / "members.jsonl").open("ab") as file:
                file.write(b"%f %b\n" % (time.time(), messages.encode(message)))
        if isinstance(message, Probe):
            probe = asyncio.create_task(self.probe(message))
            self.probes.add(probe)
            probe.add_done_callback(self.probes.discard)
        if isinstance(message, Reload):
            self.reload(message)
        elif isinstance(message, Terminate) and not os.environ.get("FAKE_STUBBORN"):
            sys.exit(0)
        elif isinstance(message, CancelCall):
            ended = time.time()
            self.send(
                CallReport(
                    id=message.id, callable="f", state="cancelled", started=ended, ended=ended
                )
            )

    async def probe(self, message: Probe) -> None:
        host, _, port = message.url.rpartition("/")[2].rpartition(":")
        is_reached = False
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /health HTTP/1.1\r\n\r\n")
            is_reached = bool(await asyncio.wait_for(reader.read(1), 1.0))
            writer.close()
        self.send(Probed(id=message.id, is_reached=is_reached))

    def regroup(self, *, is_quorum_awaited: bool) -> None:
        request = Regroup(
            id=uuid.uuid4().hex, epoch=self.epoch, is_quorum_awaited=is_quorum_awaited
        )
        self.send(request)

    def reload(self, message: Reload) -> None:
        number = message.generation
        self.send(StageReport(generation=number, stage="importing"))
        if os.environ.get("FAKE_LOGS"):
            self.send(LogReport(generation=number, text=f"loading {number}"))
        environment = dict(message.spec.compute.env_vars) | dict(os.environ)
        if environment.get("FAKE_SLOW") == str(number):
            return
        if environment.get("FAKE_FAIL") == str(number):
            failure = exceptions.describe(ImportError("no module named nonsense")).to_dict()
            self.send(Observed(generation=number, serving=self.serving, failure=failure))
            return
        self.serving = number
        self.send(Observed(generation=number, serving=number))

    def on_large(self, head: memoryview, length: int) -> None:
        return None

    def on_placed(self, head: bytes, rest: memoryview) -> None:
        self.on_message(websocket_protocol.TEXT, memoryview(head + rest))

    def on_writable(self) -> None:
        return

    def on_close(self, reason: str) -> None:
        self.connection = None
        self.closed.set()


def log(*words: object) -> None:
    print(*words, flush=True)


async def main() -> None:
    if os.environ.get("FAKE_CRASH"):
        log("the fake agent cannot start")
        sys.exit(3)
    if os.environ.get("FAKE_STUBBORN"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.environ.get("FAKE_CHILD"):
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    write_log()
    if not is_present():
        await asyncio.Event().wait()
    server = await asyncio.start_server(answer, POD.host, POD.port)
    async with server:
        agent = Agent()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, lambda: agent.regroup(is_quorum_awaited=True))
        loop.add_signal_handler(signal.SIGUSR2, lambda: agent.regroup(is_quorum_awaited=False))
        while True:
            try:
                await session(agent)
            except (OSError, websocket_protocol.UpgradeRefusedError) as error:
                log("no session", error)
            await asyncio.sleep(0.05)


async def session(agent: Agent) -> None:
    credentials = json.loads(Path(POD.credentials_file).read_bytes())
    url = Path(POD.controller_file).read_text().strip()
    agent.closed.clear()
    await websocket.connect(
        url + routes.SESSIONS,
        agent,
        headers={routes.AUTHORIZATION: f"Bearer {credentials['session']}"},
        max_message=1 << 24,
    )
    agent.send(
        Hello(
            namespace=POD.namespace,
            workload=POD.workload,
            pod=POD.pod,
            incarnation=str(os.getpid()),
            url=f"http://{POD.host}:{POD.port}",
            protocol=versions.PROTOCOL,
            version="0",
            generation=agent.serving,
            calls=tuple(path.stem.removeprefix("call-") for path in ROOT.glob("call-*.json")),
        )
    )
    for path in ROOT.glob("call-*.json"):
        agent.send(messages.decode(CallReport, path.read_bytes()))
    while not agent.closed.is_set():
        agent.send(Activity(calls=0, last=0.0))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(agent.closed.wait(), 0.5)


def is_present() -> bool:
    """Whether it is one of those that connect."""
    count = os.environ.get("FAKE_PRESENT")
    if count is None:
        return True
    home = ROOT.parents[2]  # in the folder of the pods, the controller removes what is none
    for number in range(int(count)):
        with contextlib.suppress(FileExistsError):
            (home / f"present-{POD.workload}-{number}").mkdir()
            return True
    return False


def write_log() -> None:
    folder = ROOT / "log"
    folder.mkdir(exist_ok=True)
    with (folder / "current.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), "pod": POD.pod, "text": "started"}) + "\n")


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Every request gets the log."""
    await reader.readuntil(b"\r\n\r\n")
    body = (ROOT / "log" / "current.jsonl").read_bytes()
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    writer.close()


if __name__ == "__main__":
    asyncio.run(main())
