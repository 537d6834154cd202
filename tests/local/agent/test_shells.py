"""Shells of a pod: what travels, what is refused, and that none leaves anything behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import clock_loop
import descriptors
from kubetorch.errors import CallRefusedError
from kubetorch.lib import http_server, processes, sockets, websocket, websocket_protocol
from kubetorch.lib.websocket import Connection, Endpoint
from kubetorch.lib.websocket_protocol import UpgradeRefusedError
from kubetorch.pod.http.auth import Credentials, Guard
from kubetorch.pod.shells import Shells
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.wire import exceptions, messages, tokens
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.pod_commands import (
    ERRORS,
    OUTPUT,
    ShellEnd,
    ShellExit,
    ShellMessage,
    ShellOpen,
)


class Client(Endpoint):
    """The client's end of a shell."""

    def __init__(self) -> None:
        self.output = {OUTPUT: b"", ERRORS: b""}
        self.has_output = asyncio.Event()
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_open(self, connection: Connection) -> None:
        self.connection = connection

    def on_message(self, opcode: int, payload: memoryview) -> None:
        if opcode == websocket_protocol.TEXT:
            self.exited.set_result(messages.decode(ShellExit, bytes(payload)).code)
        else:
            self.output[bytes(payload[:1])] += payload[1:]
            self.has_output.set()

    def on_close(self, reason: str) -> None:
        self.closed.set_result(reason)

    def send(self, *parts: ShellMessage | bytes) -> None:
        """Send messages, and bytes for the standard input."""
        for part in parts:
            if isinstance(part, bytes):
                self.connection.send(part)
            else:
                self.connection.send(messages.encode(part), opcode=websocket_protocol.TEXT)

    async def next_output(self) -> bytes:
        """The output so far, once there is any."""
        await self.has_output.wait()
        return self.output[OUTPUT]


class Pod:
    """Shells behind a server, as an agent has them."""

    def __init__(self, folder: Path) -> None:
        user = tokens.fingerprint("token")
        guard = Guard(Credentials(user=user), audience="ns/f", host="127.0.0.1", clock=lambda: 0.0)
        self._changed = asyncio.Event()
        self.shells = Shells(
            pod_name="f-0",
            guard=guard,
            shell_environment=lambda: (str(folder), {"PATH": os.environ["PATH"]}),
            on_change=self._changed.set,
        )

    async def connect(self) -> Client:
        """Connect a client, which has sent nothing yet."""
        client = Client()
        await websocket.connect(
            f"http://127.0.0.1:{self.port}/",
            client,
            headers={"authorization": "Bearer token"},
            max_message=wire_tuning.LIMITS.shell_message_bytes,
        )
        return client

    async def has_no_shells(self) -> None:
        """Wait until no shell counts as running."""
        while self.shells.running:
            self._changed.clear()
            await self._changed.wait()


@contextlib.asynccontextmanager
async def a_pod(folder: Path) -> AsyncIterator[Pod]:
    pod = Pod(folder)
    upgrade = websocket.upgrader(
        lambda _path, headers: pod.shells.accept(headers),
        max_message=wire_tuning.LIMITS.shell_message_bytes,
    )
    server = http_server.Server(lambda *_: asyncio.sleep(0), upgrade=upgrade)
    listener = sockets.listen(sockets.LOOPBACK, 0)
    pod.port = listener.getsockname()[1]
    await server.start(listener)
    try:
        yield pod
    finally:
        await pod.shells.close()
        await server.close(1.0)


def test_a_command_gets_its_input_and_its_output_errors_and_exit_code_come(runs, tmp_path) -> None:
    async def scenario() -> None:
        async with a_pod(tmp_path) as pod:
            client = await pod.connect()
            client.send(ShellOpen(command="pwd; cat; echo bad >&2; exit 7"), b"in", ShellEnd())
            assert await client.exited == 7
            assert client.output == {OUTPUT: f"{tmp_path}\nin".encode(), ERRORS: b"bad\n"}
            await pod.has_no_shells()

    runs(scenario)


@pytest.mark.parametrize("text", [b"line\n", b"no line"])
def test_the_end_of_the_input_reaches_a_program_on_a_terminal(tmp_path, text) -> None:
    async def scenario() -> None:
        async with a_pod(tmp_path) as pod:
            client = await pod.connect()
            client.send(ShellOpen(command="cat", terminal=True), text, ShellEnd())
            assert await client.exited == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize(
    ("command", "reason"), [("x" * 200_000, "too long"), ("echo \0", "null byte")]
)
def test_a_command_that_cannot_be_started_leaves_nothing(
    tmp_path, command: str, reason: str, terminal: bool
) -> None:
    async def scenario() -> None:
        async with a_pod(tmp_path) as pod:
            client = await pod.connect()
            before = descriptors.numbers()
            client.send(ShellOpen(command=command, terminal=terminal))
            answer = await client.closed
            assert "the shell cannot be started" in answer and reason in answer
            await pod.has_no_shells()
            assert descriptors.numbers() < before

    asyncio.run(scenario())


@pytest.mark.parametrize("terminal", [False, True])
def test_a_pod_that_is_out_of_descriptors_starts_no_shell_and_keeps_none(
    tmp_path, terminal: bool
) -> None:
    async def scenario() -> None:
        async with a_pod(tmp_path) as pod:
            refused = 0
            for count in range(1, 12):
                client = await pod.connect()
                before = descriptors.numbers()
                with descriptors.left(count):
                    client.send(ShellOpen(command="exit 3", terminal=terminal))
                    await asyncio.wait(
                        [client.exited, client.closed], return_when=asyncio.FIRST_COMPLETED
                    )
                    refused += client.closed.done()
                    client.connection.close()
                    await client.closed
                    await pod.has_no_shells()
                assert descriptors.numbers() < before
            assert 3 <= refused <= 10

    asyncio.run(scenario())


def test_a_shell_that_ends_while_no_descriptor_is_free_counts_as_ended(tmp_path) -> None:
    async def scenario() -> None:
        async with a_pod(tmp_path) as pod:
            client = await pod.connect()
            client.send(ShellOpen(command="cat; echo end; exit 3"), b"begun\n")
            assert await client.next_output() == b"begun\n"
            with descriptors.left(0):
                client.send(ShellEnd())
                assert await client.exited == 3
                assert client.output[OUTPUT] == b"begun\nend\n"
                await pod.has_no_shells()

    asyncio.run(scenario())


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no pidfd")
def test_a_shell_whose_end_cannot_be_watched_is_ended_at_once(tmp_path, monkeypatch) -> None:
    def refuse(_pid: int) -> int:
        raise PermissionError("not in this container")

    monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)

    async def scenario() -> None:
        async with a_pod(tmp_path) as pod:
            client = await pod.connect()
            before = descriptors.numbers()
            children = set(processes.children(os.getpid()))
            client.send(ShellOpen(command="sleep 1000"))
            assert "not in this container" in await client.closed
            await pod.has_no_shells()
            assert descriptors.numbers() < before
            for pid in set(processes.children(os.getpid())) - children:
                os.waitpid(pid, 0)

    asyncio.run(scenario())


def test_what_a_shell_started_has_ended_when_the_shells_are_closed(tmp_path) -> None:
    async def scenario() -> None:
        async with a_pod(tmp_path) as pod:
            client = await pod.connect()
            client.send(ShellOpen(command="setsid sh -c 'echo $$; exec sleep 1000'"))
            pid = int(await client.next_output())
            await pod.shells.close()
            assert pod.shells.running == 0
            assert processes.start_time(pid) is None
            with pytest.raises(UpgradeRefusedError) as refused:
                await pod.connect()
            assert "f-0 is about to end" in exceptions.parse_json(refused.value.body).message

    clock_loop.run(scenario(), clock_loop.StillLoop)


@pytest.mark.parametrize("before", [(), (ShellOpen(command="sleep 1000"), ShellEnd())])
def test_input_outside_of_the_time_for_it_is_refused(tmp_path, before) -> None:
    async def scenario() -> None:
        async with a_pod(tmp_path) as pod:
            client = await pod.connect()
            client.send(*before, b"input")
            assert "between ShellOpen and ShellEnd" in await client.closed
            await pod.has_no_shells()

    asyncio.run(scenario())


def test_a_client_that_opens_no_shell_does_not_take_the_place_of_one_for_long(tmp_path) -> None:
    async def scenario() -> None:
        async with a_pod(tmp_path) as pod:
            opening = await pod.connect()
            opening.send(ShellOpen(command="echo begun; sleep 1000"))
            await opening.next_output()
            silent = await pod.connect()
            await clock_loop.put_ahead(TIMING.shell_open_seconds)
            assert "ShellOpen" in await silent.closed
            assert pod.shells.running == 1
            assert not opening.closed.done()

    clock_loop.run(scenario(), clock_loop.AheadLoop)


def test_the_most_shells_of_a_pod_are_named_to_the_next_client(tmp_path) -> None:
    async def scenario() -> None:
        async with a_pod(tmp_path) as pod:
            for _ in range(LIMITS.shells):
                await pod.connect()
            with pytest.raises(UpgradeRefusedError) as refused:
                await pod.connect()
            error = exceptions.rebuild(exceptions.parse_json(refused.value.body))
            assert isinstance(error, CallRefusedError)
            assert f"f-0 already runs {LIMITS.shells} shells" in str(error)

    clock_loop.run(scenario(), clock_loop.StillLoop)
